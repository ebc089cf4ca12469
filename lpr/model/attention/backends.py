"""The ways to attend over a token tree, the preferred one first, and the choice among them."""

from __future__ import annotations

from abc import ABC, abstractmethod
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
from lpr.model.recurrent.convolved_projections import has_convolved_projections


class Reads(Enum):
    """What attention learns of a tree by."""

    MASKS = "dense masks"
    BITS = "ancestors as bits, and block tables"
    PAGES = "trees and block tables as they are"


class Backend(ABC):
    """A way to attend."""

    choice: str
    """The value of `attention`."""
    reads = Reads.MASKS
    preferred_on: str | None = None
    """The type of device on which "auto" takes it; None: on any."""

    @abstractmethod
    def name(self, exact: bool) -> str:
        """The name of the implementation in the registries of transformers."""

    @abstractmethod
    def supports(self, model: PreTrainedModel) -> str | None:
        """The reason why it cannot attend for `model` on its device; None if it can."""

    def set(self, model: PreTrainedModel, exact: bool) -> None:
        """Let `model` attend by it."""
        set_attention(model, self.name(exact))


def _own_code(model: PreTrainedModel, choice: str) -> str | None:
    if model._can_set_attn_implementation():
        return None
    owner = f"model type {model.config.get_text_config(decoder=True).model_type!r} has its own attention code"
    return f"{owner}, which attention={choice!r} does not reach; use attention='sdpa'"


def _selects(model: PreTrainedModel, choice: str) -> str | None:
    is_sparse = selects(model.config.get_text_config(decoder=True))
    return f"attention={choice!r} knows no sparse attention; use attention='sdpa'" if is_sparse else None


class Triton(Backend):
    """Triton kernels on a GPU."""

    choice, reads, preferred_on = "triton", Reads.BITS, "cuda"

    def name(self, exact: bool) -> str:
        """As Backend.name."""
        return TRITON_EXACT if exact else TRITON

    def supports(self, model: PreTrainedModel) -> str | None:
        """As Backend.supports."""
        if (why := _own_code(model, self.choice)) is not None:
            return why
        if not find_spec("triton"):
            return "attention='triton' needs the package triton (pip install triton); or use attention='sdpa'"
        if has_convolved_projections(model):
            owner = f"the recurrent layers of model type {model.config.get_text_config(decoder=True).model_type!r}"
            return f"attention='triton' has no kernel for {owner}; use attention='sdpa'"
        return _selects(model, self.choice)

    def set(self, model: PreTrainedModel, exact: bool) -> None:
        """As Backend.set."""
        load_kernel(self.name(exact))
        super().set(model, exact)


class Native(Backend):
    """C++ on a CPU."""

    choice, reads, preferred_on = "native", Reads.PAGES, "cpu"

    def name(self, exact: bool) -> str:
        """As Backend.name."""
        return NATIVE_EXACT if exact else NATIVE

    def supports(self, model: PreTrainedModel) -> str | None:
        """As Backend.supports."""
        if (why := _own_code(model, self.choice)) is not None:
            return why
        why = why_not_native(model.dtype) if model.device.type == "cpu" else "it runs on a CPU"
        if why is not None:
            return f"attention='native' cannot be used: {why}; use attention='auto'"
        return _selects(model, self.choice)


class OwnCode(Backend):
    """The model's own attention code, with a mask from the registry."""

    choice = "sdpa"

    def name(self, exact: bool) -> str:
        """As Backend.name."""
        return TREE_MASK_ONLY

    def supports(self, model: PreTrainedModel) -> str | None:
        """As Backend.supports."""
        return "transformers dispatches its attention" if model._can_set_attn_implementation() else None

    def set(self, model: PreTrainedModel, exact: bool) -> None:
        """As Backend.set."""
        for config in attention_configs(model):
            config._attn_implementation_internal = TREE_MASK_ONLY


class Sparse(Backend):
    """PyTorch's attention over selected tokens."""

    choice = "sdpa"

    def name(self, exact: bool) -> str:
        """As Backend.name."""
        return SPARSE_ATTENTION

    def supports(self, model: PreTrainedModel) -> str | None:
        """As Backend.supports."""
        return None if selects(model.config.get_text_config(decoder=True)) else "no layer of it selects tokens"


class Dense(Backend):
    """PyTorch's attention; in exact mode each entry by itself (lpr.model.attention.in_order)."""

    choice = "sdpa"

    def name(self, exact: bool) -> str:
        """As Backend.name."""
        return TREE_ATTENTION

    def supports(self, model: PreTrainedModel) -> None:
        """As Backend.supports: always."""


BACKENDS: tuple[Backend, ...] = (Triton(), Native(), OwnCode(), Sparse(), Dense())
"""The first that supports a model attends for it."""
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
    """The configs that choose the attention of the model's parts, each once."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    return list({id(each): each for each in configs if hasattr(each, "_attn_implementation_internal")}.values())
