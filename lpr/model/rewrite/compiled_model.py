"""The rewrite that compiles the steps of a model with torch.compile."""

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from lpr.model.families import is_recurrent
from lpr.model.rewrite.base import Rewrite, Setting, Stage
from lpr.model.rewrite.sharded_layers import still_split


def refusal(model: PreTrainedModel) -> str | None:
    """The reason why the steps of `model` cannot be compiled, or None."""
    if is_recurrent(model):
        return "its recurrent layers keep what a step evaluates outside of its graph"
    split = next(still_split(model), None)
    return f"its module {split} is split over ranks in a way that the compiler does not follow" if split else None


class CompiledModel(Rewrite):
    """Compiles the whole forward of captured steps (lpr.model.torch_compile)."""

    name, stage = "torch.compile", Stage.LATE

    def __init__(self, backend: str = "inductor") -> None:
        self._backend = backend

    def why_not(self, model: Any, setting: Setting) -> str | None:
        if setting.compile == "off" or not isinstance(model, PreTrainedModel):
            return "not asked for"
        if (why := refusal(model)) is not None:
            return f"this model cannot be compiled: {why}"
        return f"compile works on captured steps: {setting.uncaptured}" if setting.uncaptured is not None else None

    def match(self, model: nn.Module, setting: Setting) -> Iterator[tuple[str, None]]:
        yield "", None

    def apply(self, module: nn.Module, found: None) -> None:
        options = {"combo_kernels": True} if self._backend == "inductor" else None  # independent ones in one launch
        module.compile(dynamic=True, fullgraph=True, backend=self._backend, options=options)

    def undo(self, module: Any) -> None:
        module._compiled_call_impl = None  # what Module.compile has set

    def is_done(self, model: nn.Module) -> bool:
        """False: every engine of a model compiles its own forward."""
        return False
