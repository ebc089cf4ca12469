"""Replaces the convolution and scan functions of transformers' recurrent layers by forms for trees.

A modelling file calls these functions by a few module-level names, at which it also plugs kernels in. `RecurrentCalls`
replaces these names by functions that look for the running step. In a step they evaluate its trees with the states of
its cache; outside one they call transformers' own. No model family is named here.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from importlib import import_module
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from lpr.model.recurrent.scans import DECAYED, DELTA, Rule
from lpr.model.recurrent.selective import Selective
from lpr.model.recurrent.states import States
from lpr.model.rewrite.base import Rewrite, Setting, Stage
from lpr.model.step_inputs import current_step

key_gain: ContextVar[float] = ContextVar("key_gain", default=1.0)
"""Factor of Mamba's writes to its state, in steps and outside of them (lpr.model.recurrent.gain)."""


def _convolve(
    states: States, x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Tensor:
    if (step := states.kernel_step()) is not None:
        return step.convolve(states, x, weight, bias, activation)
    return states.convolve(x, weight, bias, ACT2FN[activation] if activation is not None else lambda out: out)


def _delta(
    states: States,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    if (step := states.kernel_step()) is not None:
        how = {"solve": True, "norm": use_qk_l2norm_in_kernel, "scale": query.shape[-1] ** -0.5}
        out = step.linear(states, query, key, value, g, beta, **how)
        return out, out.new_empty(0)
    dtype, times = query.dtype, value.shape[2] // key.shape[2]
    query, key = (each.repeat_interleave(times, dim=2) for each in (query, key)) if times > 1 else (query, key)
    query, key, value, g, beta = (each.float().contiguous() for each in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        query, key = (each * torch.rsqrt((each * each).sum(-1, keepdim=True) + 1e-6) for each in (query, key))
    inputs = [query * query.shape[-1] ** -0.5, key, value, g, beta]
    out = states.scan(DELTA, inputs, (key.shape[2], key.shape[3], value.shape[3]))
    return out.to(dtype), out.new_empty(0)


def _ssd(
    states: States,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> tuple[Tensor, Tensor]:
    if (step := states.kernel_step()) is not None:
        how = {"rate": A, "bias": dt_bias, "softplus": dt_softplus, "limits": dt_limit, "skip": D}
        out = step.linear(states, C, B, hidden_states, None, dt, **how)
        return out, out.new_empty(0)
    dt = dt + dt_bias.to(dt.dtype) if dt_bias is not None else dt
    dt = torch.clamp(F.softplus(dt) if dt_softplus else dt, *dt_limit).float()
    x, times = hidden_states.float(), hidden_states.shape[2] // B.shape[2]
    keys, queries = (each.float().repeat_interleave(times, dim=2) for each in (B, C))
    out = states.scan(
        DECAYED, [queries, keys, x * dt[..., None], A.float() * dt], (x.shape[2], keys.shape[3], x.shape[3])
    )
    return (out if D is None else out + D[..., None] * x).contiguous(), out.new_empty(0)


def _selective(
    states: States,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    if (step := states.kernel_step()) is not None:
        how = {"bias": delta_bias, "softplus": delta_softplus, "skip": D, "gate": z}
        out = step.selective(states, hidden_states, dt, A, B, C, **how)
        return out, out.new_empty(0)
    dt = dt + delta_bias.to(dt.dtype)[..., None] if delta_bias is not None else dt
    dt = F.softplus(dt) if delta_softplus else dt
    inputs = [each.float().transpose(1, 2) for each in (hidden_states, dt, B, C)]
    rule = Selective(A.float())
    out = states.scan(Rule(rule.scan, rule.padding, rule.enter), inputs, A.shape).transpose(1, 2)
    out = out if D is None else out + hidden_states * D[:, None]
    return out if z is None else out * F.silu(z), out.new_empty(0)


CALLS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": _delta,
    "chunk_kimi_delta_attention": _delta,
    "mamba2_chunk_scan": _ssd,
    "mamba_selective_scan": _selective,
}
"""By name in a modelling file, the function used in a step; with the arguments and results of the replaced one."""


def _places(model: nn.Module) -> list[tuple[Any, str]]:
    """The modelling files of a model and the names in them that can be replaced."""
    files = [import_module(name) for name in sorted({type(module).__module__ for module in model.modules()})]
    return [(file, name) for file in files for name in CALLS if callable(getattr(file, name, None))]


def is_pluggable(model: nn.Module) -> bool:
    """True if its layers call convolution or scan by names in CALLS."""
    return bool(_places(model))


class RecurrentCalls(Rewrite):
    """Modelling files call the forms for trees. All models of a file share its names; the last undo restores them."""

    name, stage = "recurrent calls over trees", Stage.TREE

    def match(self, model: nn.Module, setting: Setting) -> Iterator[tuple[str, Any]]:
        if places := _places(model):
            yield "", places

    def is_done(self, model: nn.Module) -> bool:
        """As Rewrite.is_done; a copy of a model uses the names too."""
        return all(model in getattr(getattr(*place), "users", ()) for place in _places(model))

    def apply(self, module: nn.Module, found: list[tuple[Any, str]]) -> None:
        for file, name in found:
            if not hasattr(stock := getattr(file, name), "users"):
                setattr(file, name, _replaced(stock, name))
            getattr(file, name).users.add(module)

    def undo(self, module: nn.Module) -> None:
        for file, name in _places(module):
            replaced = getattr(file, name)
            replaced.users.discard(module)
            if not replaced.users:
                setattr(file, name, replaced.stock)


def _replaced(stock: Callable[..., Any], name: str) -> Callable[..., Any]:
    names = list(inspect.signature(stock).parameters)
    place = names.index("B") if "B" in names else None

    @functools.wraps(stock)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        step, gain = current_step(), key_gain.get()
        if gain != 1.0 and place is not None:
            if place < len(args):
                args = (*args[:place], args[place] * gain, *args[place + 1 :])
            else:
                kwargs = {**kwargs, "B": kwargs["B"] * gain}
        if step is None:
            return stock(*args, **kwargs)
        return CALLS[name](step.states, *args, **kwargs)

    evaluate.stock, evaluate.users = stock, WeakSet()  # type: ignore[attr-defined]
    return evaluate
