"""Recognises modules of transformers by their behaviour, independent of class names and source.

A module's forward runs on a few random numbers on the CPU, in the model's dtype. Its children and the functions that it
calls are replaced by stand-ins, which record their inputs and return random numbers, so the model's weights and hooks
take no part. The recorded inputs must equal those of lpr's form of the module, bit by bit, because only elementwise
operators lie between stand-ins. A forward that raises or differs is not recognised, and the module's own code runs. The
self-check covers values that are not tried here.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from lpr.model.fused.elementwise import Activation, Weighing
from lpr.model.transformers_versions import cache_argument

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
}
_WEIGHINGS: dict[Weighing, Callable[[Tensor, Tensor, torch.dtype], Tensor]] = {
    Weighing.ROUNDED: lambda normed, weight, dtype: weight * normed.to(dtype),
    Weighing.ONE_PLUS: lambda normed, weight, dtype: (normed * (1.0 + weight.float())).to(dtype),
    Weighing.WIDE: lambda normed, weight, dtype: (weight * normed).to(dtype),
}
_SIZES = ((3, 1), (3, 4))  # Batch and length of the probes. A tensor of 3 is not unpacked into two by accident.
_IGNORED = {"sliding_window", "position_ids", "use_cache"}
"""Arguments of attention that lpr's attention ignores or derives from the mask."""


class StandIn(nn.Module):
    """A child module that records its input and returns `compute(input)`."""

    def __init__(self, compute: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.compute = compute
        self.given: list[Tensor] = []

    def forward(self, states: Tensor) -> Any:
        self.given.append(states.clone())
        return self.compute(states)

    def got(self, expected: Tensor) -> bool:
        return len(self.given) == 1 and _same(self.given[0], expected)


class _Random:
    """Random numbers of a dtype, the same in each process; does not change torch's own generator."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.generator = dtype, torch.Generator().manual_seed(0)

    def __call__(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.generator, device="cpu").to(self.dtype)

    def stand_in(self, *size: int) -> tuple[StandIn, Tensor]:
        """A stand-in, and the tensor that it returns."""
        found = self(*size)
        return StandIn(lambda _: found.clone()), found


def _same(one: Any, other: Tensor) -> bool:
    return isinstance(one, Tensor) and one.dtype is other.dtype and torch.equal(one, other)


def _copied(module: nn.Module, children: Mapping[str, nn.Module], **fields: Any) -> Any:
    """`module` with other children and fields, and without its parameters and hooks."""
    copied = object.__new__(type(module))
    empty: dict[str, Any] = {"_forward_hooks": {}, "_forward_pre_hooks": {}, "_parameters": {}}
    vars(copied).update({**vars(module), **empty, "_modules": dict(children), **fields})
    return copied


def _has(module: Any, children: set[str], parameters: set[str] = frozenset()) -> bool:  # type: ignore[assignment]
    """True if `module` has exactly these children and parameters, and its class's forward."""
    names = set(module._modules) == children and set(module._parameters) == parameters
    return names and not module._buffers and "forward" not in vars(module)


def _tried(check: Callable[..., Any], *args: Any) -> Any:
    try:
        with torch.no_grad(), torch.device("cpu"):
            return check(*args)
    except Exception:  # of any type
        return None


def weighing_of(module: nn.Module) -> tuple[Weighing, float] | None:
    """The Weighing and epsilon of the RMS norm `module`; None if it is not an RMS norm."""
    return _tried(_weighing_of, module) if _has(module, set(), {"weight"}) else None


def _weighing_of(module: Any) -> tuple[Weighing, float] | None:
    forward = type(module).forward
    epsilon = next(getattr(module, name) for name in ("variance_epsilon", "eps") if hasattr(module, name))
    left = set(_WEIGHINGS) if len(inspect.signature(forward).parameters) == 2 else set()
    for dtype in {module.weight.dtype, torch.float32, torch.bfloat16}:
        random = _Random(dtype)
        scales, weight = torch.logspace(-4, 2, 12).view(3, 4, 1).to(dtype), random(module.weight.shape[0])
        states = random(3, 4, len(weight)) * scales
        wide = states.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        for size in ((3, 4), (3, 1, 2, 2), (12,)):
            found = forward(_copied(module, {}, _parameters={"weight": weight}), states.clone().view(*size, -1))
            found = found.view(states.shape)
            left = {each for each in left if _close(found, _WEIGHINGS[each](normed, weight, dtype))}
    return (min(left), float(epsilon)) if left else None


def _close(found: Tensor, expected: Tensor) -> bool:
    """True if they differ at most by the order of a sum: in half precision nearly all values are then equal."""
    ulp, is_half = torch.finfo(expected.dtype).eps, expected.dtype is not torch.float32
    differ = (found - expected).abs() > (1 if is_half else 8) * ulp * expected.abs()
    equal = float((found == expected).float().mean())
    return found.dtype is expected.dtype and not bool(differ.any()) and (not is_half or equal > 0.98)


def activation_of(module: nn.Module, dtype: torch.dtype) -> Activation | None:
    """The activation of an MLP, down_proj(activation(gate_proj(x)) * up_proj(x)); None if `module` is none."""
    known = _has(module, {"gate_proj", "up_proj", "down_proj", "act_fn"})
    return _tried(_activation_of, module, dtype) if known else None


def _activation_of(module: Any, dtype: torch.dtype) -> Activation | None:
    random, left = _Random(dtype), set(_ACTIVATIONS)
    for size in _SIZES:
        states = random(*size, 8)
        (gate, gated), (up, values), (down, out) = (random.stand_in(*size, width) for width in (64, 64, 8))
        gated *= 4
        children = {"gate_proj": gate, "up_proj": up, "down_proj": down, "act_fn": _copied(module.act_fn, {})}
        found = type(module).forward(_copied(module, children), states.clone())
        if not (_same(found, out) and gate.got(states) and up.got(states)):
            return None
        left = {each for each in left if down.got(_ACTIVATIONS[each](gated) * values)}
    return min(left) if left else None


def is_decoder_layer(layer: nn.Module, sizes: list[int], dtype: torch.dtype, multiplier: float) -> bool:
    """True if `layer` has the structure of Llama's decoder layer, optionally with norms of heads.

    That is: attention and MLP, each after a norm and times `multiplier`, are added to the residual. `sizes` are the
    widths of queries, keys and values; the rotary embedding covers whole heads, as in Llama.
    """
    attention: Any = getattr(layer, "self_attn", None)
    children = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
    projections = {"q_proj", "k_proj", "v_proj", "o_proj"}
    if not _has(layer, children) or not (_has(attention, projections) or _has(attention, projections | _HEAD_NORMS)):
        return False
    given, dim = (layer, attention, sizes, dtype, multiplier), getattr(attention, "head_dim", 0)
    is_whole = _tried(_is_layer, *given, (3, 4), dim // 2) is None  # else only the given part
    return is_whole and all(_tried(_is_layer, *given, size, dim) for size in _SIZES)


_HEAD_NORMS = {"q_norm", "k_norm"}


class _Noted:
    """A cache and an attention that record their inputs."""

    def __init__(self, *returned: Tensor) -> None:
        self.returned, self.calls = returned, list[tuple[tuple[Any, ...], dict[str, Any]]]()

    def update(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        return self.returned


def _is_layer(
    layer: Any, attention: Any, sizes: list[int], dtype: torch.dtype, multiplier: float, size: tuple[int, int], dim: int
) -> bool:
    random, head = _Random(dtype), attention.head_dim
    states, tables = random(*size, 8), (random(*size, dim), random(*size, dim))
    factors = {name: random(head) for name in _HEAD_NORMS & set(attention._modules)}
    (q, queries), (k, keys), (v, values) = (random.stand_in(*size, width) for width in sizes)
    (o, mixed), (before, normed), (after, second), (mlp, added) = (random.stand_in(*size, 8) for _ in range(4))
    heads = [[count, width // head] for count, width in zip(("q", "k", "v"), sizes, strict=True)]
    cache = _Noted(*(random(size[0], count, 5, head) for _, count in heads[1:]))
    attend = _Noted(random(*size, sizes[0] // head, head))
    norms = {name: StandIn(lambda x, factor=factor: x * factor) for name, factor in factors.items()}  # type: ignore[misc]
    config = _Probed(attention.config)
    parts = {"q_proj": q, "k_proj": k, "v_proj": v, "o_proj": o, **norms}
    copied = {"input_layernorm": before, "post_attention_layernorm": after, "mlp": mlp}
    copied["self_attn"] = _copied(attention, parts, config=config, training=False)
    mask, marker = random(1), random(1)
    given: dict[str, Any] = {"attention_mask": mask, "position_ids": None, "use_cache": True}
    given |= {"position_embeddings": tables, "lpr_marker": marker, "lpr_attend": attend}
    given[str(cache_argument(type(layer).forward))] = cache
    found = type(layer).forward(_copied(layer, copied, training=False), states.clone(), **given)
    if dim != head:
        return True

    def of_heads(name: str, flat: Tensor) -> Tensor:
        split = flat.unflatten(-1, (-1, head))
        return (split * factors[name] if name in factors else split).transpose(1, 2)

    def rotated(x: Tensor) -> Tensor:
        cosines, sines = (each[:, None] for each in tables)
        half = torch.cat((-x[..., head // 2 :], x[..., : head // 2]), -1)
        return x * cosines + half * sines

    (written, _), (attended, how) = *cache.calls, *attend.calls
    _, query, key, value, masked, *_ = attended
    how = {name: each for name, each in how.items() if each is not None and name not in _IGNORED}
    residual = states + (mixed if multiplier == 1 else mixed * multiplier)
    return (
        before.got(states)
        and all(each.got(normed) for each in (q, k, v))
        and _same(written[0], rotated(of_heads("k_norm", keys)))
        and _same(written[1], of_heads("", values))
        and written[2] == attention.layer_idx
        and _same(query, rotated(of_heads("q_norm", queries)))
        and (key is cache.returned[0] and value is cache.returned[1] and masked is mask)
        and (how.pop("lpr_marker") is marker and how.pop("lpr_attend") is attend)
        and (how.pop("scaling") == attention.scaling and how.pop("dropout", 0.0) == 0.0 and not how)
        and o.got(attend.returned[0].flatten(2))
        and after.got(residual)
        and mlp.got(second)
        and _same(found, residual + (added if multiplier == 1 else added * multiplier))
    )


class _Probed:
    """A config whose attention is `_attend`."""

    _attn_implementation = "lpr_probe"

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _attend(*args: Any, lpr_attend: _Noted, **kwargs: Any) -> tuple[Tensor, None]:
    return lpr_attend.update(*args, lpr_attend=lpr_attend, **kwargs)[0].clone(), None


AttentionInterface.register("lpr_probe", _attend)
