"""LoRA adapters of an engine, by name: loaded and unloaded by commands, on all ranks after the same step.

A request refers to its adapter by the digest of the adapter's files, because a name may get another adapter while
requests of the old one run. Prefix caches and drafts are keyed by the digest as well: they depend on the weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lpr.config import InputError, first_line
from lpr.dist.comm import Comm, agree
from lpr.engine.commands import LoadAdapter
from lpr.model.lora.bank import SlotAdapters
from lpr.model.lora.files import LoraFiles, read_lora
from lpr.model.lora.load import check_lora, load_lora, unload_lora
from lpr.model.runner import TreeModel
from lpr.protocol import MeshError

if TYPE_CHECKING:
    from lpr.engine.request import Request


MOST = 128  # names of adapters: each keeps weights in memory, and clients with a key may load them


class Adapters:
    """The adapters of a replica, the same on every rank."""

    def __init__(self, model: TreeModel | None) -> None:
        """An empty registry that loads into `model`; None on a draft-only rank, which loads no adapter."""
        self._model = model
        self.names: dict[str, LoadAdapter] = {}
        """By name, the command that loaded the adapter."""
        self.loaded: dict[str, str] = {}
        """By digest, the folder of each adapter that has a name or an open request."""
        self._read: dict[str, LoraFiles] = {}
        """By digest, files read for a command that is not applied yet."""
        self._awaited: dict[str, Future[None]] = {}
        """By name, the future that the next command of that name completes."""

    def command(self, name: str, folder: str | Path) -> LoadAdapter:
        """Read a folder; returns the command that loads it as `name`. Raises InputError."""
        if not name or not name.isprintable():
            raise InputError(f"the name of an adapter is printable text, not {name!r}")
        if name not in self.names and len(self.names) >= MOST:
            raise InputError(f"{MOST} adapters are loaded, which is the most: unload one before {name!r}")
        files = read_lora(folder)
        self._read[files.digest] = files
        return LoadAdapter(name, str(Path(folder).absolute()), files.digest)

    def expect(self, name: str) -> Future[None]:
        """A future that the next command for that name completes, with InputError if a rank failed to load."""
        return self._awaited.setdefault(name, Future())

    def load(self, command: LoadAdapter, comm: Comm) -> None:
        """Load an adapter on all ranks of `comm`, or on none if one fails."""
        is_new, failure = command.digest not in self.loaded, None
        try:
            if is_new:
                self._load(command.path, command.digest, comm)
            self.names[command.name] = command
        except InputError as error:
            failure = error
            if is_new:
                self._forget(command.digest)
        self._read.pop(command.digest, None)
        self._answer(command.name, failure)

    def unload(self, name: str, requests: Iterable[Request]) -> None:
        """Remove a name; the adapter stays loaded while one of the open `requests` uses it."""
        failure = None if self.names.pop(name, None) is not None else InputError(f"no adapter is named {name!r}")
        self.sweep(requests)
        self._answer(name, failure)

    def sweep(self, requests: Iterable[Request]) -> None:
        """Unload adapters that have no name and no open request."""
        named = {each.digest for each in self.names.values()}
        if unnamed := self.loaded.keys() - named:
            for digest in sorted(unnamed - {each.adapter for each in requests}):
                self._forget(digest)

    def resolve(self, adapter: str | None) -> str:
        """The digest of an adapter by its name, or by its digest; "" for none. Raises InputError."""
        if not adapter:
            return ""
        if adapter in self.names:
            return self.names[adapter].digest
        if adapter in self.loaded:
            return adapter
        raise InputError(f"no adapter is named {adapter!r}; loaded: {', '.join(self.names) or 'none'}")

    def of_slots(self, running: Collection[Request], rank: int) -> SlotAdapters | None:
        places = self._model.bank.places if self._model is not None else None
        if self._model is None or not places:
            return None
        found = {each.slots[rank]: places[each.adapter] for each in running if each.adapter and each.slots[rank] >= 0}
        return SlotAdapters(self._model.bank, found) if found else None

    def resume(self, names: Iterable[LoadAdapter], loaded: Mapping[str, str]) -> None:
        """On a newcomer: load the adapters of the other ranks; raises InputError."""
        for digest, path in loaded.items():
            self._load(path, digest, Comm())
        self.names = {each.name: each for each in names}

    def close(self) -> None:
        """Unload all adapters, so that the caller may keep using its model."""
        self.names.clear()
        self.sweep(())

    def _load(self, path: str, digest: str, comm: Comm) -> None:
        """Load an adapter on all ranks of `comm`; raises the same InputError on all of them if one cannot."""
        agree(comm, self._failure_of(self._take, path, digest))
        agree(comm, self._failure_of(check_lora, self._model, digest) if self._model is not None else None)
        self.loaded[digest] = path

    def _take(self, path: str, digest: str) -> None:
        if self._model is None:
            return
        files = self._read.get(digest) or read_lora(path)
        if files.digest != digest:
            raise InputError(f"the adapter in {path!r} is not the one that the other ranks have")
        if digest not in self._model.bank.places:  # it may be loaded already, by a load that a lost rank interrupted
            load_lora(self._model, files)

    def _failure_of(self, action: Any, *args: Any) -> str | None:
        try:
            action(*args)
        except InputError as error:
            return str(error)
        except MeshError:
            raise
        except torch.OutOfMemoryError:
            return "there is no memory for the adapter"
        except RuntimeError as failure:  # layers whose shapes do not fit
            return f"the adapter does not fit this model: {first_line(failure)}"
        return None

    def _forget(self, digest: str) -> None:
        self.loaded.pop(digest, None)
        if self._model is not None and digest in self._model.bank.places:
            unload_lora(self._model, digest)

    def _answer(self, name: str, failure: InputError | None) -> None:
        if (awaited := self._awaited.pop(name, None)) is not None:
            if failure is not None:
                awaited.set_exception(failure)
            else:
                awaited.set_result(None)
