"""The interface of a rewrite, a change to a transformers model: match, apply, undo.

`carry_out` applies a rewrite to all matching modules and records their names on the model, so that a copy of the model
has the record too. The list of all rewrites and the table of their conflicts are in lpr.model.rewrite.table.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class Stage(IntEnum):
    LOAD = 0  # while the model is loaded; cannot be undone
    TREE = 1  # for every model that an Adapter takes: in a step they evaluate trees; no effect outside a step
    FASTER = 2  # for a model without other users: the same results in fewer or faster calls
    EXACT = 3  # when exact mode is prepared
    LATE = 4  # when all ranks have checked the model


@dataclass(frozen=True)
class Shards:
    """The tensor-parallel split that transformers made."""

    plan: Mapping[str, str]
    group: dist.ProcessGroup
    rank: int


@dataclass(frozen=True)
class Setting:
    """The inputs besides the model that decide on rewrites."""

    device: torch.device
    is_ours: bool = True  # True if the model was loaded by lpr, so that its weights may be laid out anew
    exact: bool = False
    tp: bool = False  # True if ranks share the weights
    has_head: bool = False  # True if a prediction head is to guess from hidden states
    compile: str = "off"  # "on", "off" or "auto"
    adapters: bool = False  # True if adapters are loaded at start or may be later
    uncaptured: str | None = None  # the reason why steps are not captured, which only compiled steps need
    shards: Shards | None = None

    @property
    def modes(self) -> set[str]:
        """The names of modes of this setting that appear in CONFLICTS."""
        asked = {"tp": self.tp, "exact": self.exact, "draft head": self.has_head, "foreign": not self.is_ours}
        asked["adapters"] = self.adapters
        return {name for name, holds in asked.items() if holds} | {f"compile={self.compile}", self.device.type}


class Rewrite(ABC):
    """A kind of change to the modules of a model."""

    name: str
    stage: Stage

    def why_not(self, model: nn.Module, setting: Setting) -> str | None:
        """The reason why the rewrite does not apply to `model` in this setting; None leaves it to `match`."""
        return None

    @abstractmethod
    def match(self, model: nn.Module, setting: Setting) -> Iterator[tuple[str, Any]]:
        """The modules to change, by name, each with the second argument of `apply`."""

    @abstractmethod
    def apply(self, module: Any, found: Any) -> None:
        """Change a module that matches."""

    def undo(self, module: Any) -> None:
        """Restore a module; raises TypeError for a change that cannot be undone."""
        raise TypeError(f"{self.name} is final: load the model anew")

    def finish(self, model: nn.Module) -> None:  # noqa: B027
        """Called once after all modules are changed."""

    def is_done(self, model: nn.Module) -> bool:
        return self.name in done_to(model)


class EachModule(Rewrite):
    """A rewrite that matches each module separately."""

    @abstractmethod
    def find(self, module: Any, setting: Setting) -> Any | None:
        """The second argument of `apply` for `module`; None if it does not match."""

    def match(self, model: nn.Module, setting: Setting) -> Iterator[tuple[str, Any]]:
        for name, module in list(model.named_modules()):
            if (found := self.find(module, setting)) is not None:
                yield name, found


class OwnForward:
    """The forward of a module's class, for use by its replacement.

    It holds a weak reference: the module holds its replacement, and in a cycle a dropped model would keep its weights
    until the garbage collector runs, which counts objects and not bytes.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._forward: Any = type(module).forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(self._module(), *args, **kwargs)

    def __reduce__(self) -> tuple[type[OwnForward], tuple[nn.Module | None]]:
        return OwnForward, (self._module(),)  # in a copy of the model, refers to the module's copy


class NewForward(EachModule):
    """Replaces modules' forward by one object with the field `plain: OwnForward`, which computes the whole module."""

    stage = Stage.FASTER

    def match(self, model: nn.Module, setting: Setting) -> Iterator[tuple[str, Any]]:
        inside = set[int]()  # children of changed modules, which are not called any more
        for name, module in list(model.named_modules()):
            own = vars(module).get("forward")
            if isinstance(getattr(own, "plain", None), OwnForward):
                inside.update(map(id, module.modules()))
            if own is None and id(module) not in inside and (found := self.find(module, setting)) is not None:
                yield name, found

    def apply(self, module: nn.Module, found: Any) -> None:
        module.forward = found

    def undo(self, module: nn.Module) -> None:
        vars(module).pop("forward", None)


class WrappedForward(EachModule):
    """Wraps a forward in the function that `find` returns, which gets the module and its forward as first arguments."""

    stage = Stage.TREE

    def apply(self, module: nn.Module, found: Callable[..., Any]) -> None:
        module.forward = partial(found, module, module.forward)

    def undo(self, module: Any) -> None:
        stock = module.forward.args[1]
        del module.forward
        if getattr(stock, "__func__", None) is not type(module).forward:
            module.forward = stock


def done_to(model: nn.Module) -> dict[str, list[str]]:
    """By rewrite name, the names of the modules that it has changed."""
    return vars(model).setdefault("_lpr_rewrites", {})


def carry_out(rewrite: Rewrite, model: nn.Module, setting: Setting) -> list[str]:
    """Apply a rewrite to `model`, once; returns the names of the changed modules."""
    if not rewrite.is_done(model):
        modules, names = dict(model.named_modules()), []
        for name, found in rewrite.match(model, setting):
            rewrite.apply(modules[name], found)
            names.append(name)
        if names:
            done_to(model)[rewrite.name] = names
            rewrite.finish(model)
    return done_to(model).get(rewrite.name, [])


def undo(rewrite: Rewrite, model: nn.Module) -> None:
    """Undo `rewrite` on all modules that it has changed."""
    modules = dict(model.named_modules())
    for name in dict.fromkeys(done_to(model).get(rewrite.name, ())):
        rewrite.undo(modules[name])
    done_to(model).pop(rewrite.name, None)
