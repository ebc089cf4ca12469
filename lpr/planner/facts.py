"""Properties of a model that determine memory and traffic, derived from the model itself without its weights.

The model is built on the meta device with all parameters of a checkpoint. Its own tensor-parallel plan gives the split
of each, and one forward on meta tensors gives its K/V. There are no formulas per model family.
"""

import json
import math
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from lpr.config import DecodeConfig, InputError, named_line
from lpr.files import asset
from lpr.model.adapter import Adapter
from lpr.model.families import refusal
from lpr.model.kv_cache import KVCache
from lpr.model.low_bit.checkpoint import expected_codings
from lpr.model.low_bit.coded import Coding
from lpr.model.low_bit.formats import read_format
from lpr.model.multimodal import empty_decoder
from lpr.model.parallel import splits_heads, splits_layers
from lpr.model.recurrent.split_heads import Cut, Parts, SplitLayer, own_plan, share, split_layers
from lpr.model.rewrite.sharded_layers import generic_name
from lpr.model.step_inputs import Row

DTYPE_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}

# The projections that hold keys, as transformers.distributed.tensor_parallel.get_kv_heads_per_rank names them.
_FUSED = ("qkv_proj", "query_key_value")


@dataclass(frozen=True)
class Weights:
    """Equal parameters of several layers: `count` tensors of `shape` that the plan splits by `style`."""

    name: str  # name with * instead of the layer's number
    shape: tuple[int, ...]
    count: int
    style: str | None  # the plan's style; None: every rank of a replica holds all of it
    is_lookup: bool  # an embedding that is not the output head too: a step reads a row per token and not the whole
    is_expert: bool  # experts along the first axis, of which a token uses few
    coding: Coding | None = None  # of weights of a low-bit checkpoint, [outputs, inputs]
    cut: Cut | None = None  # of weights that are split by heads, in parts

    def num_bytes(self, shape: Sequence[int], element_size: int) -> int:
        """Bytes of a tensor, or of the part of it that has `shape`."""
        if self.coding is None:
            return element_size * math.prod(shape)
        return shape[0] * replace(self.coding, num_inputs=shape[1], group=min(self.coding.group, shape[1])).row_bytes


@dataclass(frozen=True)
class KeptHeads:
    """The K and V heads that `count` layers keep per token, and their sizes; without values the keys of an indexer."""

    num_heads: int
    key_dim: int
    value_dim: int
    count: int


@dataclass(frozen=True)
class KeptState:
    """States of one shape that `count` layers keep of a request, however long it is."""

    shape: tuple[int, ...]
    """A convolution's [channels, inputs] in the model's dtype, or a scan's [heads, K, V] or [channels, K] in fp32."""
    is_scan: bool
    count: int
    parts: Parts = ()  # the parts of the first axis that are divided among ranks; empty if the state is replicated

    def on(self, tp: int) -> Self:
        """The state on one of `tp` ranks."""
        return replace(self, shape=(share(self.parts, tp), *self.shape[1:])) if self.parts else self

    def num_bytes(self, element_size: int) -> int:
        return self.count * math.prod(self.shape) * (4 if self.is_scan else element_size)

    def flops(self, num_tokens: int) -> float:
        """Upper bound of a chunk's or tree's floating point operations: those of the delta rule.

        It reads its states twice and writes them, computes two kinds of scores per pair of tokens, and solves a
        triangular system.
        """
        if not self.is_scan:
            return 2.0 * self.count * num_tokens * self.shape[0] * (self.shape[1] + 1)
        pairs = num_tokens * self.shape[0] * (2 * self.shape[1] + 2 * self.shape[2]) if len(self.shape) == 3 else 0
        return self.count * num_tokens * (6.0 * math.prod(self.shape) + 2.0 * pairs)


@dataclass(frozen=True)
class Collective:
    """A collective after `count` modules, over `width` values of each token."""

    kind: str  # "all_reduce" or "all_gather"
    width: int
    count: int
    per_result: bool  # True for a split output head: every rank sends CHOICE_WORDS per token with results

    def num_bytes(self, num_tokens: float, num_results: float, element_size: int, tp: int) -> int:
        """Bytes of one collective; for a gather the total over all `tp` ranks."""
        if self.per_result:
            return round(4 * CHOICE_WORDS * num_results) * tp
        return round(num_tokens * self.width * element_size)


CHOICE_WORDS = 3 + 2 * DecodeConfig().num_candidates
"""Int32 words of a rank's choice among its part of the vocabulary: lpr.model.sampling.parts.choose_in_part."""


@dataclass(frozen=True)
class ModelFacts:
    name: str
    model_type: str
    dtype: str  # the checkpoint's own, bfloat16 if the config does not say
    weights: tuple[Weights, ...]
    kept: tuple[KeptHeads, ...]
    states: tuple[KeptState, ...]  # of recurrent layers
    recurrent: tuple[SplitLayer, ...]  # those that are split by heads
    indexer_heads: int  # heads of sparse attention's indexers, which score every key
    collectives: tuple[Collective, ...]  # those of one forward along tp; empty without a plan
    has_plan: bool  # transformers has a tensor-parallel plan for this model type
    splits_queries: bool  # the plan gives each rank its own query heads
    splits_kv: bool
    """The plan gives each rank its own key/value heads; latent attention keeps its one latent on all ranks."""
    fused_heads: bool  # the plan splits a projection that holds queries and keys together
    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_size: int
    vocab_size: int
    max_positions: int | None
    num_experts: int
    experts_per_token: int
    low_bit: str | None = None  # the format of a low-bit checkpoint whose linear layers a GPU keeps in few bits
    kv_in_fp8: bool = False

    def state_bytes(self, element_size: int, tp: int = 1) -> int:
        """Bytes of the recurrent states of one request, as lpr keeps them on a rank."""
        return sum(each.on(tp).num_bytes(element_size) for each in self.states)

    @property
    def num_parameters(self) -> int:
        """All parameters, tied ones once."""
        return sum(weights.count * math.prod(weights.shape) for weights in self.weights)


def read_config(source: str) -> PretrainedConfig:
    """The config of a folder, a config.json or a hub id; raises InputError with one line."""
    path = Path(source)
    looks_local = path.is_absolute() or source.startswith((".", "~")) or source.count("/") != 1 or path.exists()
    if looks_local and not path.exists():
        raise InputError(f"model {source!r} is no preset, and no such file or folder exists; presets: --list")
    try:
        if path.is_file():
            return config_from(json.loads(path.read_text(encoding="utf-8")))
        return AutoConfig.from_pretrained(source)
    except InputError:
        raise
    except Exception as failure:  # transformers and huggingface_hub raise dozens of types here
        raise InputError(f"cannot read the config of {source!r}: {named_line(failure)}") from failure


def config_from(values: dict[str, Any]) -> PretrainedConfig:
    """The config of the keys of a config.json; raises InputError."""
    others = dict(values)
    model_type = others.pop("model_type", None)
    if not isinstance(model_type, str):
        raise InputError("the config names no model_type")
    try:
        return AutoConfig.for_model(model_type, **others)
    except Exception as failure:  # each model type has validators of its own
        reason = " ".join(line.strip() for line in str(failure).splitlines())[:200]
        raise InputError(f"model_type {model_type!r}: {reason}") from failure


def facts_of(config: PretrainedConfig, name: str) -> ModelFacts:
    """Facts of the model of `config`; raises InputError if it is no causal LM."""
    transformers_logging.set_verbosity_error()
    text, form = config.get_text_config(decoder=True), read_format(config)
    try:
        with torch.device("meta"):
            model = empty_decoder(config).eval()
        codings = dict(expected_codings(model, form)) if form is not None else {}
        reason = refusal(model)
        cache = _filled_cache(model) if reason is None else KVCache(1, 1)
    except Exception as failure:  # model code may raise any type; the config is then unusable
        raise InputError(f"{name}: the config makes no causal LM: {named_line(failure)}") from failure
    if reason is not None:
        raise InputError(f"{name}: model type {text.model_type!r} cannot run a token tree: {reason}")
    pairs = [(keys.shape[1], keys.shape[2], values.shape[2]) for keys, values in cache.layer_tensors.values()]
    kept = tuple(KeptHeads(*shape, count) for shape, count in Counter(pairs).items())
    layers = split_layers(model) if form is None else {}
    plan = dict(model.tp_plan or {})
    plan |= own_plan(model, plan) if layers else {}
    of_layer = {getattr(model.get_submodule(name), "layer_idx", None): each for name, each in layers.items()}
    found: Counter[tuple[tuple[int, ...], bool, Parts]] = Counter()
    for (kind, layer, _), state in cache.states.of(0).items():
        is_scan, split = kind == "scan", of_layer.get(layer)
        parts = () if split is None else split.heads if is_scan else split.channels
        found[tuple(state.shape), is_scan, parts] += 1
    splits = [key.rpartition(".")[2] for key, style in plan.items() if style == "colwise"]
    dtype = str(getattr(config, "dtype", None) or "bfloat16").removeprefix("torch.")
    return ModelFacts(
        name=name,
        model_type=text.model_type,
        dtype=dtype if dtype in DTYPE_SIZES else "bfloat16",
        weights=_weights(model, plan, codings, layers),
        kept=kept,
        states=tuple(KeptState(shape, is_scan, count, parts) for (shape, is_scan, parts), count in found.items()),
        recurrent=tuple(layers.values()),
        indexer_heads=_first(text, "index_n_heads") or 0,
        collectives=_collectives(model, plan),
        has_plan=splits_layers(plan),
        splits_queries=splits_heads(plan),
        splits_kv=any(name in ("k_proj", *_FUSED) for name in splits),
        fused_heads=any(name in _FUSED for name in splits),
        num_layers=text.num_hidden_layers,
        num_heads=_num_heads(text),
        num_kv_heads=max((each.num_heads for each in kept), default=1),
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        max_positions=_first(text, "max_position_embeddings", "n_positions", "seq_length", "max_seq_len"),
        num_experts=_first(text, "num_local_experts", "num_experts", "n_routed_experts") or 0,
        experts_per_token=_first(text, "num_experts_per_tok", "moe_topk") or 0,
        low_bit=form.method if form is not None and codings else None,
    )


def _num_heads(config: Any) -> int:
    """Attention heads, of the layer with most of them; 0 without attention."""
    if "num_attention_heads" in (getattr(config, "per_layer_attributes", None) or ()):
        return max(layer.num_attention_heads for layer in config.per_layer_config)
    return getattr(config, "num_attention_heads", 0)


def _first(config: PretrainedConfig, *names: str) -> int | None:
    values = [getattr(config, name, None) for name in names]
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _weights(
    model: PreTrainedModel, plan: dict[str, str], codings: dict[str, Coding], layers: dict[str, SplitLayer]
) -> tuple[Weights, ...]:
    cuts = {f"{name}.{key}": cut for name, layer in layers.items() for key, cut in layer.cuts.items()}
    lookups = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    lookups.discard(id(getattr(model.get_output_embeddings(), "weight", None)))
    groups: Counter[tuple[Any, ...]] = Counter()
    for name, parameter in model.named_parameters():  # a tied parameter comes once
        is_expert = ".experts." in name and parameter.dim() >= 2
        generic = generic_name(name)
        style = plan.get(generic, plan.get(generic.rpartition(".")[0]))  # a plan names a parameter, or its module
        kind = style, id(parameter) in lookups, is_expert, codings.get(name), cuts.get(name)
        groups[generic, tuple(parameter.shape), *kind] += 1
    return tuple(Weights(name, shape, count, *rest) for (name, shape, *rest), count in groups.items())


_REDUCED = {
    "rowwise", "rowwise_rep", "rowwise_split_input", "embedding_rowwise", "moe_tp_experts", "all_reduce"
}  # fmt: skip
_COLLECTIVES = dict.fromkeys(_REDUCED, "all_reduce")
_COLLECTIVES |= dict.fromkeys(("colwise_gather_output", "colwise_rep", "embedding_colwise"), "all_gather")


def _collectives(model: PreTrainedModel, plan: dict[str, str]) -> tuple[Collective, ...]:
    hidden = model.config.get_text_config(decoder=True).hidden_size
    head = model.get_output_embeddings()
    found: Counter[tuple[str, int, bool]] = Counter()
    for name, module in model.named_modules():
        kind = _COLLECTIVES.get(plan.get(generic_name(name), ""))
        if kind is not None:
            width = getattr(module, "out_features", None) or getattr(module, "embedding_dim", None) or hidden
            found[kind, width, module is head and kind == "all_gather"] += 1
    return tuple(Collective(kind, width, count, per_result) for (kind, width, per_result), count in found.items())


def _filled_cache(model: PreTrainedModel) -> KVCache:
    """lpr's cache after a forward of one token. It keeps all tokens of every layer, also with sliding windows."""
    for name, module in model.named_modules():
        if name.endswith(".experts"):  # routing depends on values, which meta tensors do not have
            module.forward = lambda hidden, *args, **kwargs: hidden
    cache = KVCache(1, 1)
    Adapter(model, attention="sdpa").logits([Row.chain(0, 0, [0], 1)], cache)
    return cache


@dataclass(frozen=True)
class Planned:
    name: str
    config: PretrainedConfig
    decode: dict[str, int]  # fields of DecodeConfig that the file sets; budgets per rank
    origin: str  # source of the facts, for the reader


def preset_names() -> list[str]:
    return sorted(path.stem for path in asset("models").glob("*.toml"))


def read_preset(name: str) -> dict[str, Any]:
    return tomllib.loads(asset(f"models/{name}.toml").read_text(encoding="utf-8"))


def measured_values() -> Any:
    """Measured acceptance and host times, which predictions start from (`source` in it names the commits)."""
    return json.loads(asset("measured.json").read_text(encoding="utf-8"))


def resolve(source: str) -> Planned:
    """The model that `source` names; raises InputError."""
    exists = Path(source).exists()
    for name in preset_names():
        values = read_preset(name)
        origin = f"preset {name}"
        if source.lower() == values["hub"].lower() and not exists:  # a known hub id needs no download
            origin = f"preset {name}, which has the facts of {source}"
        elif source.lower() != name:
            continue
        return Planned(name, config_from(values["config"]), dict(values["decode"]), origin)
    if source.endswith(".toml"):
        return _from_run(Path(source))
    return Planned(Path(source).name if exists else source, read_config(source), {}, source)


def _from_run(path: Path) -> Planned:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as failure:
        raise InputError(f"cannot read {path}: {failure.strerror or failure}") from failure
    except ValueError as failure:
        raise InputError(f"{path} is not TOML: {failure}") from failure
    if "config" in values:
        return Planned(path.stem, config_from(values["config"]), dict(values.get("decode", {})), str(path))
    if not isinstance(values.get("model"), str):
        raise InputError(f"{path} names no model: it is neither a named run nor a preset")
    mesh = values.get("mesh", {"lp": 1, "tp": 1})
    if not isinstance(mesh, dict) or set(mesh) != {"lp", "tp"}:
        raise InputError(f"{path}: mesh must be like {{ lp = 4, tp = 2 }}, not {mesh!r}")
    model = resolve(values["model"])
    decode = {field.name: values[field.name] for field in fields(DecodeConfig) if field.name in values}
    return Planned(path.stem, model.config, decode, f"{path}: {model.origin}")
