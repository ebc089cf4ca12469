"""A change to a foreign model: the parts that it matches, the change itself, and the way back.

`carry_out` walks over what a rewrite matches and notes it on the model, by the names of modules, so that a copy of the
model knows it too. The list of all rewrites and the table of their conflicts are in lpr.model.rewrite.table.
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
    LOAD = 0  # while the model is read: they are final
    TREE = 1
    """When an adapter takes the model, whoever holds it: within a step they evaluate trees, outside nothing changes."""
    FASTER = 2  # when an engine prepares a model that has no other user: the same results in fewer or faster calls
    EXACT = 3  # when exact mode is prepared
    LATE = 4  # when all ranks have checked the model


@dataclass(frozen=True)
class Shards:
    """How transformers has split a model over ranks."""

    plan: Mapping[str, str]
    group: dist.ProcessGroup
    rank: int


@dataclass(frozen=True)
class Setting:
    """What decides on rewrites besides the model."""

    device: torch.device
    is_ours: bool = True  # True if the model was loaded by lpr, so that its weights may be laid out anew
    exact: bool = False
    tp: bool = False  # True if ranks share the weights
    has_head: bool = False  # True if a prediction head is to guess from hidden states
    compile: str = "off"  # "on", "off" or "auto"
    uncaptured: str | None = None  # the reason why steps are not captured, which only compiled steps need
    shards: Shards | None = None

    @property
    def modes(self) -> set[str]:
        """Names of conflicts that hold here, whatever is rewritten."""
        asked = {"tp": self.tp, "exact": self.exact, "draft head": self.has_head, "foreign": not self.is_ours}
        return {name for name, holds in asked.items() if holds} | {f"compile={self.compile}", self.device.type}


class Rewrite(ABC):
    """A kind of change to the modules of a model."""

    name: str
    stage: Stage

    def why_not(self, model: nn.Module, setting: Setting) -> str | None:
        """The reason why nothing of `model` is changed in this setting; None leaves it to `match`."""
        return None

    @abstractmethod
    def match(self, model: nn.Module, setting: Setting) -> Iterator[tuple[str, Any]]:
        """The modules to be changed, by name, and of each what `apply` needs besides it."""

    @abstractmethod
    def apply(self, module: Any, found: Any) -> None:
        """Change a module that matches."""

    def undo(self, module: Any) -> None:
        """Give back a module as it was; raises TypeError for a change that is final."""
        raise TypeError(f"{self.name} is final: load the model anew")

    def finish(self, model: nn.Module) -> None:  # noqa: B027
        """Do what takes all changed modules."""

    def is_done(self, model: nn.Module) -> bool:
        """True if `model` has been changed before."""
        return self.name in done_to(model)


class EachModule(Rewrite):
    """A rewrite that looks at each module by itself."""

    @abstractmethod
    def find(self, module: Any, setting: Setting) -> Any | None:
        """What `apply` needs for `module`; None if it does not match."""

    def match(self, model: nn.Module, setting: Setting) -> Iterator[tuple[str, Any]]:
        for name, module in list(model.named_modules()):
            if (found := self.find(module, setting)) is not None:
                yield name, found


class OwnForward:
    """The forward of a module's class, for what replaces it on the module.

    The module is not kept alive: as its replacement holds this, a dropped model would keep its weights until the
    collector runs, and that counts objects and not bytes.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._forward: Any = type(module).forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(self._module(), *args, **kwargs)

    def __reduce__(self) -> tuple[type[OwnForward], tuple[nn.Module | None]]:
        return OwnForward, (self._module(),)  # in a copy of the model, that of the module's copy


class NewForward(EachModule):
    """Gives modules a forward that computes all that is in them, in one object with the field `plain: OwnForward`."""

    stage = Stage.FASTER

    def match(self, model: nn.Module, setting: Setting) -> Iterator[tuple[str, Any]]:
        """As Rewrite.match; the parts of a module with such a forward are not called any more."""
        inside = set[int]()
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
    """Lets `find` name a function that a step calls, with the module and its forward before other arguments."""

    stage = Stage.TREE

    def apply(self, module: nn.Module, found: Callable[..., Any]) -> None:
        module.forward = partial(found, module, module.forward)

    def undo(self, module: Any) -> None:
        stock = module.forward.args[1]
        del module.forward
        if getattr(stock, "__func__", None) is not type(module).forward:
            module.forward = stock


def done_to(model: nn.Module) -> dict[str, list[str]]:
    """By the name of a rewrite, the names of the modules that it has changed."""
    found: dict[str, list[str]] = vars(model).setdefault("_lpr_rewrites", {})
    return found


def carry_out(rewrite: Rewrite, model: nn.Module, setting: Setting) -> list[str]:
    """Rewrite `model`, once; returns the names of the modules that are changed."""
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
    """Give back what `rewrite` has changed."""
    modules = dict(model.named_modules())
    for name in dict.fromkeys(done_to(model).get(rewrite.name, ())):
        rewrite.undo(modules[name])
    done_to(model).pop(rewrite.name, None)
