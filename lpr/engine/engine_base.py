"""The part of the engine's API that does not concern requests: state, settings, adapters and learned outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from lpr.config import DecodeConfig, InputError, TreeSizes
from lpr.core.digest import digest_of
from lpr.core.step_times import StepTimes
from lpr.core.suffix_index import END
from lpr.dist.comm import Comm, agree, is_driver
from lpr.engine.commands import Configure, Learn, LoadAdapter, UnloadAdapter
from lpr.engine.driver import Driver
from lpr.engine.hooks import StepHooks
from lpr.engine.options import EngineOptions, named_folders
from lpr.engine.replica import Replica
from lpr.engine.request import Request
from lpr.engine.requests import check_history, checked_ids
from lpr.engine.trie_file import fingerprint_of, read_history, write_trie
from lpr.engine.turns import Turns, in_turn
from lpr.model.modes import in_own_modes
from lpr.model.runner import TreeModel
from lpr.protocol import RequestId
from lpr.sched.scheduler import Scheduler


class EngineBase:
    """Base of `Engine`, which sets its attributes."""

    comm: Comm
    options: EngineOptions
    tokenizer: Any | None
    replica: Replica
    driver: Driver
    model: TreeModel
    turns: Turns

    @property
    def hooks(self) -> StepHooks:
        """Called by every step; settable (lpr.engine.hooks)."""
        return self.replica.hooks

    @hooks.setter
    def hooks(self, hooks: StepHooks) -> None:
        self.replica.hooks = hooks

    @property
    def requests(self) -> Mapping[RequestId, Request]:
        """Submitted and unfinished requests by their ids, the same on every rank."""
        return MappingProxyType(self.replica.requests.open)

    @property
    def is_idle(self) -> bool:
        """True if no request waits, runs, or has a pending Submit command."""
        return self.scheduler.is_idle and not self.replica.requests.announced

    @property
    def is_stopped(self) -> bool:
        """True if the driver has ended the job, or this rank has left it after an exception."""
        return self.replica.closed is not None

    @property
    def scheduler(self) -> Scheduler[Request]:
        """Waiting and running requests; another object after `configure`."""
        return self.replica.scheduler

    @property
    def decode(self) -> DecodeConfig:
        """The current settings."""
        return self.replica.decode

    @property
    def sizes(self) -> TreeSizes:
        """The current tree sizes, with the automatic fields of `decode` resolved."""
        return self.replica.sizes

    @property
    def memory(self) -> str | None:
        """The use of this rank's GPU memory, and the rest, as one line; None on a CPU."""
        return self.replica.memory

    @property
    def max_length(self) -> int:
        """Most tokens of a sequence, prompt included."""
        return self.replica.max_length

    @property
    def step_times(self) -> StepTimes | None:
        """The replicated step times; None if sizes are fixed."""
        return self.replica.sizer.times

    @property
    def payload_bytes(self) -> int:
        """Bytes that each rank contributes to the all-gather of a full batch's step."""
        return self.replica.exchange.payload_bytes

    @in_turn
    @in_own_modes
    def configure(self, decode: DecodeConfig, *, keep_drafts: bool = False) -> None:
        """Decode further requests with other settings; needs an idle engine.

        Drops the learned outputs, unless `keep_drafts` is true and `trie_capacity` is unchanged.
        """
        self._require_idle("configure")
        self.driver.post_and_wait(Configure(decode, keep_drafts))

    def weights_changed(self) -> None:
        """Drop all K/V after a change of the model's weights; needs an idle engine.

        An engine detects changed weights itself, except for writes through `.data` to a small part of a parameter.
        Raises InputError if it was loaded by `from_pretrained` on a CPU, which keeps a copy of the weights.
        """
        self.replica.watch.note_change()
        self.configure(self.decode, keep_drafts=True)

    def _ids(self, ids: Sequence[int], rule: str) -> list[int]:
        return checked_ids(ids, self.model.vocab_size, rule)

    def _require_idle(self, name: str) -> None:
        self.turns.refuse_within(name)
        if not self.is_idle:
            raise RuntimeError(f"{name} needs an engine without requests")

    @in_turn
    def learn(self, *documents: Sequence[int]) -> None:
        """Add outputs to the shared draft index; raises InputError for ids outside the vocabulary."""
        known = [self._ids(document, "a document is a list of token ids") for document in documents]
        self.driver.post(Learn(b"".join(np.array([*ids, END], np.int32).tobytes() for ids in known if ids)))

    @in_turn
    def learn_history(self, history: np.ndarray, tenant: str = "", read_to: str = "") -> None:
        """Add documents, int32 [num_tokens] separated by END, to a tenant's draft index.

        They come from other replicas of a fleet; `read_to` is the last entry of the stream that they include. Raises
        InputError for an id outside the vocabulary.
        """
        check_history(history, self.model.vocab_size)
        self.driver.post(Learn(history.tobytes(), tenant=tenant, read_to=read_to))

    @in_turn
    def learned(self, tenant: str = "") -> tuple[np.ndarray, str]:
        """A tenant's learned outputs, and the last entry of its stream in them.

        The outputs are int32 [num_tokens]: documents separated by END, the oldest first.
        """
        return self.replica.drafts.history(tenant), self.read_to.get(tenant, "")

    @property
    def read_to(self) -> Mapping[str, str]:
        """By tenant, the last entry of its stream that was learned (see `learn_history`)."""
        return MappingProxyType(self.replica.drafts.read_to)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the vocabulary: a saved trie can be loaded by engines with the same fingerprint."""
        return fingerprint_of(self.tokenizer, self.model.vocab_size)

    @in_turn
    def save_trie(self, path: str | Path) -> Path:
        """Write the learned outputs to a file, atomically; returns its path. Raises InputError."""
        return write_trie(path, self.replica.drafts.shared, self.fingerprint)

    @in_turn
    def load_trie(self, path: str | Path) -> None:
        """Replace the learned outputs by those in a file; beyond the capacity the oldest are dropped.

        With several ranks only rank 0 reads the file. Raises InputError for a file that `save_trie` did not write,
        that is damaged, or that belongs to another tokenizer.
        """
        self._require_idle("load_trie")
        history = np.empty(0, np.int32)
        if is_driver(self.comm):
            history = read_history(path, self.fingerprint, self.model.vocab_size)[-self.sizes.trie_capacity :]
        self.driver.post_and_wait(Learn(history.tobytes(), replace=True))

    @in_turn
    def load_adapter(self, name: str, folder: str | Path) -> Future[None]:
        """Load a LoRA adapter in PEFT's format on all ranks; it replaces an adapter of the same name.

        With one rank the adapter is loaded when this returns, and any failure raises InputError. With several ranks all
        read the folder after the running step; the returned future then completes, with InputError if a rank failed. A
        folder that this rank cannot read raises InputError at once.
        """
        adapters, command = self.replica.adapters, None
        if is_driver(self.comm):
            command = adapters.command(name, folder)
        return self._post_for(name, command)

    @in_turn
    def unload_adapter(self, name: str) -> Future[None]:
        """Refuse further requests for an adapter and unload it after its last request. Returns as `load_adapter`."""
        return self._post_for(name, UnloadAdapter(name))

    def _post_for(self, name: str, command: LoadAdapter | UnloadAdapter | None) -> Future[None]:
        self.replica.check_open()
        done = self.replica.adapters.expect(name)
        if command is not None:
            self.driver.post(command)
        if done.done():
            done.result()
        return done

    def _load_at_start(self) -> None:
        """Load the adapters of the options; raises the same InputError on all ranks."""
        commands, failure, adapters = list[LoadAdapter](), None, self.replica.adapters
        try:
            for name, folder in named_folders(self.options.lora_modules).items():
                commands.append(adapters.command(name, folder))
        except InputError as error:
            failure = str(error)
        agree(self.comm, failure, {"set of adapters": digest_of(repr([(each.name, each.digest) for each in commands]))})
        for command in commands:
            loaded = adapters.expect(command.name)
            self.driver.post_and_wait(command)
            loaded.result(0)

    @property
    def adapters(self) -> Mapping[str, str]:
        """The folders of the loaded adapters, by name."""
        return MappingProxyType({name: each.path for name, each in self.replica.adapters.names.items()})
