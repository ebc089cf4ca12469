"""Recurrent layers of a step whose tree is given as bits, by Triton kernels.

A call of the model is one launch, including norms, step sizes and gates besides the scan. Advancing the states of a
layer is one more. Steps without bits (attention other than 'triton') use the torch forms on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.activations import ACT2FN

from lpr.model.kernels import scan_kernel
from lpr.model.kernels.scan_kernel import Options
from lpr.model.recurrent.kernel_step import KernelStep
from lpr.model.recurrent.states import States

SILU = ("silu", "swish")


def _step_of(states: States) -> KernelStep:
    assert states.kernels is not None
    return states.kernels


def _convolve(
    states: States, x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Tensor:
    step = _step_of(states)
    site, tensor = states.of_convolution(x, weight.shape[1])
    memory, is_silu = states.memory(site, x.device), activation in SILU
    out, advance = scan_kernel.convolve(x, weight, bias, is_silu, tensor, step.places, memory)
    step.advances.append(advance)
    return out if activation is None or is_silu else ACT2FN[activation](out)


def _linear(
    states: States, query: Tensor, key: Tensor, value: Tensor, decay: Tensor | None, beta: Tensor, options: Options
) -> Tensor:
    step = _step_of(states)
    site, tensor = states.of_scan((value.shape[2], key.shape[3], value.shape[3]), value.device)
    memory = states.memory(site, value.device)
    given = query, key, value, decay, beta, tensor, step.places, memory, options
    out, advance = scan_kernel.linear_scan(*given, exact=states.is_exact)
    step.advances.append(advance)
    return out


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
    options = Options(solve=True, norm=use_qk_l2norm_in_kernel, scale=query.shape[-1] ** -0.5)
    out = _linear(states, query, key, value, g, beta, options)
    return out, out.new_empty(0)


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
    options = Options(rate=A, bias=dt_bias, softplus=dt_softplus, limits=dt_limit, skip=D)
    out = _linear(states, C, B, hidden_states, None, dt, options)
    return out, out.new_empty(0)


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
    step = _step_of(states)
    site, tensor = states.of_scan(A.shape, A.device)
    out, advance = scan_kernel.selective_scan(
        hidden_states, dt, A, B, C, tensor, step.places, states.memory(site, A.device),
        bias=delta_bias, softplus=delta_softplus, skip=D, gate=z,
    )  # fmt: skip
    step.advances.append(advance)
    return out, out.new_empty(0)


CALLS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": _delta,
    "chunk_kimi_delta_attention": _delta,
    "mamba2_chunk_scan": _ssd,
    "mamba_selective_scan": _selective,
}
"""As CALLS of lpr.model.recurrent.plug."""
