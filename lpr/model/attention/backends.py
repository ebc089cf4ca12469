"""The backends of tree attention in order of preference, and the choice among them."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from typing import Any

from transformers import PreTrainedModel

from lpr.config import InputError
from lpr.model.attention.dense import TREE_ATTENTION, TREE_MASK_ONLY
from lpr.model.attention.native import NATIVE, NATIVE_EXACT, why_not_native
from lpr.model.attention.sparse import SPARSE_ATTENTION, selects
from lpr.model.attention.triton_kernels import TRITON, TRITON_EXACT, load_kernel
from lpr.model.multimodal import set_attention


class Reads(Enum):
    """The form in which a backend reads the tree."""

    MASKS = "dense masks"
    BITS = "ancestors as bits, and block tables"
    PAGES = "trees and block tables as they are"


@dataclass(frozen=True)
class Backend:
    choice: str  # the value of `attention`
    supports: Callable[[PreTrainedModel], str | None]
    """Returns the reason why it does not support a model on its device; None if it does."""
    plain: str  # the name of the implementation in the registries of transformers
    exact: str  # the same in exact mode
    reads: Reads = Reads.MASKS
    preferred_on: str | None = None  # the device type for which "auto" selects it; None: any

    def name(self, exact: bool) -> str:
        return self.exact if exact else self.plain

    def set(self, model: PreTrainedModel, exact: bool) -> None:
        if self.reads is Reads.BITS:
            load_kernel(self.name(exact))
        if self.plain != TREE_MASK_ONLY:
            set_attention(model, self.name(exact))
            return
        for config in attention_configs(model):
            config._attn_implementation_internal = self.plain


def _is_reached(model: PreTrainedModel, choice: str) -> str | None:
    text = model.config.get_text_config(decoder=True)
    if not model._can_set_attn_implementation():
        owner = f"model type {text.model_type!r} has its own attention code"
        return f"{owner}, which attention={choice!r} does not reach; use attention='sdpa'"
    return f"attention={choice!r} knows no sparse attention; use attention='sdpa'" if selects(text) else None


def _triton(model: PreTrainedModel) -> str | None:
    if (why := _is_reached(model, "triton")) is not None:
        return why
    if not find_spec("triton"):
        return "attention='triton' needs the package triton (pip install triton); or use attention='sdpa'"
    return None


def _native(model: PreTrainedModel) -> str | None:
    if (why := _is_reached(model, "native")) is not None:
        return why
    why = why_not_native(model.dtype) if model.device.type == "cpu" else "it runs on a CPU"
    return f"attention='native' cannot be used: {why}; use attention='auto'" if why is not None else None


def _own_code(model: PreTrainedModel) -> str | None:
    return "transformers dispatches its attention" if model._can_set_attn_implementation() else None


def _sparse(model: PreTrainedModel) -> str | None:
    return None if selects(model.config.get_text_config(decoder=True)) else "no layer of it selects tokens"


BACKENDS = (
    Backend("triton", _triton, TRITON, TRITON_EXACT, Reads.BITS, preferred_on="cuda"),
    Backend("native", _native, NATIVE, NATIVE_EXACT, Reads.PAGES, preferred_on="cpu"),
    Backend("sdpa", _own_code, TREE_MASK_ONLY, TREE_MASK_ONLY),
    Backend("sdpa", _sparse, SPARSE_ATTENTION, SPARSE_ATTENTION),
    Backend("sdpa", lambda model: None, TREE_ATTENTION, TREE_ATTENTION),
)
"""The first backend that supports a model is used. Exact mode without a kernel: lpr.model.attention.in_order."""
ATTENTION = ("auto", "sdpa", "triton", "native")
"""Choices of `attention`: lpr's own, PyTorch's attention with a dense mask, a GPU kernel that reads bits, or C++ that
reads pages on a CPU."""


def choose(model: PreTrainedModel, choice: str) -> Backend:
    """The backend for `model`, among those of `choice`; raises InputError with the reason if there is none."""
    if choice not in ATTENTION:
        raise InputError(f"attention={choice!r} is none of {', '.join(ATTENTION)}")
    reasons = []
    for backend in BACKENDS:
        is_asked = choice == backend.choice
        if is_asked or (choice == "auto" and backend.preferred_on in (None, model.device.type)):
            if (why := backend.supports(model)) is None:
                return backend
            reasons.append(why)
    raise InputError(reasons[0])


def attention_configs(model: PreTrainedModel) -> list[Any]:
    """The distinct configs that name the attention of the model's parts."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    return list({id(each): each for each in configs if hasattr(each, "_attn_implementation_internal")}.values())
