"""What stands for Triton kernels on the pretend GPU: their specifications, or the kernels in Triton's interpreter.

A kernel is launched with tensors of the device only, on the current stream. Not imitated: limits of a launch,
registers, shared memory, and what a compiler makes of the code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from lpr.model.kv_cache import KVCache
from lpr.model.low_bit.coded import Coding
from lpr.model.moves import by_operators, gpu_mover
from lpr.model.runner import TreeModel
from lpr.model.sampling import specification
from lpr.model.sampling.choice import gpu_likeliest, gpu_pick
from lpr.model.sampling.selection import Selection
from lpr.model.step_inputs import Row
from lpr.model.tree_mask import Paths, TreeMask
from tests.fakes import attention_reference
from tests.fakes.pretend_device import OnGpu, PretendError, current_gpu, held


def without_a_check(runner: TreeModel) -> KVCache:
    """Stands for the self-check where it has its own tests: the interpreter takes several seconds for it."""
    cache = KVCache(1, 16)
    runner.adapter.logits([Row.chain(0, 0, [1, 2], 1)], cache)
    gpu_pick(runner.adapter.device)
    gpu_likeliest(runner.adapter.device)
    gpu_mover(runner.adapter.device)
    return cache


def kernel(query: Any, key: Any, value: Any, mask: TreeMask, *, tiles: Any = None, **rules: Any) -> torch.Tensor:
    """Stands for the attention kernel: its specification, launched with tensors of the device only."""
    return _launch(attention_reference.tree_attention, query, key, value, mask, rules)


def exact_kernel(query: Any, key: Any, value: Any, mask: TreeMask, paths: Paths, **rules: Any) -> torch.Tensor:
    """Stands for the kernel of exact mode, likewise."""
    if not all(isinstance(each, OnGpu) for each in (paths.entries, paths.num_shared)):
        raise PretendError("the kernel was given paths on the CPU")
    return _launch(attention_reference.exact_tree_attention, query, key, value, mask, rules)


def _launch(
    specification: Callable[..., torch.Tensor], query: Any, key: Any, value: Any, mask: TreeMask, rules: dict[str, Any]
) -> torch.Tensor:
    gpu = current_gpu()
    pages = rules.pop("pages", None)
    given = query, key, value, mask.bits, mask.num_cached, mask.num_entries, mask.positions, rules.get("sinks")
    for each in (*given, mask.starts, mask.slots, None if pages is None else pages.table):
        if each is not None and not isinstance(each, OnGpu):
            raise PretendError(f"the kernel was given a CPU tensor {tuple(each.shape)}")
    batch, num_heads, length, _ = query.shape
    out = query.new_empty(batch, length, num_heads, value.shape[3])
    tables = None if pages is None else pages._replace(table=held(pages.table))
    of_packed = held(mask.starts), held(mask.slots)
    of_all = held(mask.bits), held(mask.num_cached), held(mask.num_entries), held(mask.positions)
    parts = TreeMask(*of_all, *of_packed)

    def run() -> None:
        found = specification(
            held(query), held(key), held(value), parts, tables, **{name: held(rule) for name, rule in rules.items()}
        )
        out.held.copy_(found.transpose(1, 2))

    gpu.launch(run, [each for each in given if each is not None], [out])
    return out.transpose(1, 2)


def rms_norm(states: Any, weight: Any, epsilon: float, weighing: int, added: Any = None) -> torch.Tensor:
    """Stands for the kernel of norms, likewise."""
    out: Any = torch.empty_like(states)

    def run() -> None:
        if added is not None:
            held(states).add_(held(added))
        held(out).copy_(_normed(held(states), held(weight), epsilon, weighing))

    _launch_on((states, weight, *([] if added is None else [added])), (states, out), run)
    return out


def norm_heads(states: Any, weight: Any, epsilon: float, weighing: int, first: int, heads: int) -> None:
    """Stands for the kernel of norms in heads, likewise."""

    def run() -> None:
        width = len(weight)
        part = held(states)[..., first : first + heads * width].unflatten(-1, (heads, width))
        part.copy_(_normed(part, held(weight), epsilon, weighing))

    _launch_on((states, weight), (states,), run)


def _normed(states: torch.Tensor, weight: torch.Tensor, epsilon: float, weighing: int) -> torch.Tensor:
    wide = states.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    if weighing == 0:
        return weight * wide.to(states.dtype)
    return (wide * (weight.float() + (weighing == 1))).to(states.dtype)


def rotate(states: Any, cosines: Any, sines: Any, heads: int) -> None:
    """Stands for the kernel of rotary embeddings, likewise."""
    run = lambda: _rotate(*map(held, (states, cosines, sines)), heads)  # noqa: E731
    _launch_on((states, cosines, sines), (states,), run)


def _rotate(states: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, heads: int) -> None:
    width = cosines.shape[-1]
    part = states[..., : heads * width].unflatten(-1, (heads, width))
    low, high = part.chunk(2, -1)
    turned = torch.cat([-high, low], -1)
    part.copy_(part * cosines[..., None, :] + turned * sines[..., None, :])


def place(states: Any, cosines: Any, sines: Any, num_queries: int, rows: Any, keys: Any, values: Any) -> None:
    """Stands for the kernel that rotates heads and writes K and V to the cache, likewise."""

    def run() -> None:
        turned, num_keys, width = held(states).clone(), keys.shape[1], cosines.shape[-1]
        _rotate(turned, held(cosines), held(sines), num_queries + num_keys)
        by_head = turned.flatten(0, -2).unflatten(-1, (-1, width))
        held(states).copy_(
            torch.cat([turned[..., : num_queries * width], held(states)[..., num_queries * width :]], -1)
        )
        for side, first in ((keys, num_queries), (values, num_queries + num_keys)):
            held(side).index_copy_(0, held(rows), by_head[:, first : first + num_keys])

    _launch_on((states, cosines, sines, rows), (states, keys, values), run)


def gate(states: Any, activation: int) -> torch.Tensor:
    """Stands for the kernel of gates, likewise."""
    out: Any = states.new_empty(*states.shape[:-1], states.shape[-1] // 2)

    def run() -> None:
        gates, values = held(states).chunk(2, -1)
        active = torch.nn.functional.gelu(gates, approximate="tanh") if activation else torch.nn.functional.silu(gates)
        held(out).copy_(active * values)

    _launch_on((states,), (out,), run)
    return out


def multiply_codes(coding: Coding, rows: Any, given: Any, bias: Any) -> torch.Tensor:
    """Stands for the kernel of products with weights of few bits, likewise."""
    out: Any = given.new_empty(*given.shape[:-1], len(rows))

    def run() -> None:
        weight = coding.to_dense(held(rows), given.dtype)
        held(out).copy_(torch.nn.functional.linear(held(given), weight, None if bias is None else held(bias)))

    _launch_on((rows, given, *([] if bias is None else [bias])), (out,), run)
    return out


def move_rows(pool: Any, source: Any, target: Any) -> None:
    """Stands for the kernel that moves rows, likewise."""
    given = pool, source, target
    _launch_on(given, (pool,), lambda: by_operators(*map(held, given)))


def _launch_on(given: Sequence[Any], written: Sequence[Any], run: Callable[[], None]) -> None:
    if not all(isinstance(each, OnGpu) for each in given):
        raise PretendError("a kernel was given a CPU tensor")
    current_gpu().launch(run, [*given], [*written])


class Launched:
    """Stands for a kernel: runs it in the interpreter, with tensors of the device only."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **constants: Any) -> None:
            if any(isinstance(each, torch.Tensor) and not isinstance(each, OnGpu) for each in args):
                raise PretendError("a kernel was given a CPU tensor")
            there = [each for each in args if isinstance(each, OnGpu)]
            current_gpu().launch(lambda: self.kernel[grid](*map(held, args), **constants), there, there)

        return launch


def sampling_kernel(logits: Any, selection: Selection) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands for the sampling kernel, likewise."""
    for name, each in {"logits": logits, "the selection": selection.keys}.items():
        if not isinstance(each, OnGpu):
            raise PretendError(f"the sampling kernel was given {name} on the CPU")
    out = logits.new_empty(len(logits), dtype=torch.int64)
    totals = logits.new_empty(len(logits), dtype=torch.float32)

    def run() -> None:
        sizes = (selection.num_keys, selection.num_rows, selection.sampled, selection.filtered)
        there = Selection(held(selection.words), *sizes)
        for made, found in zip((out, totals), specification.choose(held(logits), there), strict=True):
            made.held.copy_(found)

    current_gpu().launch(run, [logits, selection.words], [out, totals])
    return out, totals


def likeliest_kernel(logits: Any, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Stands for the kernels of likely tokens, likewise."""
    if not isinstance(logits, OnGpu):
        raise PretendError("the kernel of likely tokens was given logits on the CPU")
    shape = len(logits), min(count, logits.shape[1])
    made = [logits.new_empty(*shape, dtype=torch.float32), logits.new_empty(*shape, dtype=torch.int64)]
    made.append(logits.new_empty(len(logits), dtype=torch.float32))

    def run() -> None:
        top, _, total = specification.likeliest(held(logits), count)
        first = held(logits).sort(dim=-1, descending=True, stable=True).indices[:, :count]
        for out, found in zip(made, (top, first, total), strict=True):
            out.held.copy_(found)

    current_gpu().launch(run, [logits], made)
    return made[0], made[1], made[2]


@pytest.fixture
def products_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's matrix products, each row of which is the same wherever it stands.

    NumPy's BLAS adds in another order by the place of a row on some processors.
    """
    from triton.runtime import interpreter

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        one, other = (each.data.astype(d.data.dtype) for each in (a, b))
        return interpreter.TensorHandle(np.einsum("mk,kn->mn", one, other) + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
