"""Properties read from a model's config and class: support for trees, recurrent layers, experts, positions."""

from typing import Any

from transformers import PreTrainedModel

from lpr.model.attention import sparse
from lpr.model.recurrent.plug import is_pluggable
from lpr.model.transformers_versions import CACHE_ARGUMENTS, cache_argument

_RECURRENT_LAYERS = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
"""Kinds in `config.layer_types` that fold the past into a state: state-space, convolution and linear attention."""
_RECURRENT = "recurrent state: {} the past into one state by code of its own, which cannot follow a tree's branches"


_INKLING_2 = "recurrent state behind convolutions whose weights each token chooses, as it does attention sinks"
_ALIBI = "its ALiBi bias counts cache rows, where a tree needs positions"
_REASONS = {
    **dict.fromkeys(("bloom", "mpt"), _ALIBI),
    "gpt_neo": "the window of its local layers counts cache rows, where a tree needs positions",
    **dict.fromkeys(("inkling2_text", "inkling2_loop_text"), _INKLING_2),
    "rwkv": "recurrent state in no cache: its forward returns it in a list",
    "xlm": "its forward takes no cache of keys and values: what it calls a cache is a dictionary",
    "xlstm": "recurrent state in a cache of its own, scaled by a running maximum",
}


def refusal(model: PreTrainedModel) -> str | None:
    """The reason in its config why this model cannot evaluate a tree; None if it has none."""
    config: Any = model.config.get_text_config(decoder=True)
    if getattr(config, "use_bidirectional_attention", False) in (True, "all"):
        return "tokens of its prompt attend to later ones"
    kinds = getattr(config, "layer_types", None)
    if kinds and "reference_sliding_attention" in kinds:
        return "the window of its reference_sliding_attention layers begins where a prompt ends"
    if config.model_type in _REASONS:
        return _REASONS[config.model_type]
    if getattr(config, "alibi", False):
        return _ALIBI
    if is_recurrent(model) and not is_pluggable(model):
        recurrent = sorted(_RECURRENT_LAYERS.intersection(kinds or ()))
        return _RECURRENT.format(f"its {recurrent[0]} layers fold" if recurrent else "it folds")
    if kinds and (reason := sparse.refusal(config)) is not None:
        return reason
    if cache_argument(type(model).forward) is None:
        return f"its forward takes no cache of keys and values ({', '.join(CACHE_ARGUMENTS)})"
    return None


def is_recurrent(model: PreTrainedModel) -> bool:
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None)
    return bool(_RECURRENT_LAYERS.intersection(kinds)) if kinds else bool(model._is_stateful)


def has_experts(config: Any) -> bool:
    return any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def rope_parameters(config: Any) -> list[dict[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]


def position_limit(config: Any) -> tuple[int, str] | None:
    """The largest number of positions with exact batches, and the reason, if it is below the model's own limit.

    Longrope (Phi-3 128k) switches to other frequencies for *all* rows of a forward as soon as one position exceeds the
    original context. Drafts and neighbours in the batch would then change the output.
    """
    if limit := getattr(config, "log_scaling_n_floor", None):  # Inkling
        return int(limit), "beyond them attention is scaled by the cache row of a token"
    for each in rope_parameters(config):
        if each.get("rope_type") == "longrope":
            name = "original_max_position_embeddings"
            if limit := each.get(name) or getattr(config, name, None):
                return int(limit), "beyond them longrope changes the frequencies of every row in the batch"
    return None
