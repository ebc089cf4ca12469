"""What stands for Triton kernels on the pretend GPU: their specifications, or the kernels in Triton's interpreter.

A kernel is launched with tensors of the device only, on the current stream. Not imitated: limits of a launch,
registers, shared memory, and what a compiler makes of the code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attention_reference
import torch
from pretend_device import OnGpu, PretendError, current_gpu, held

from lpr.model.sampling import specification
from lpr.model.sampling.selection import Selection
from lpr.model.tree_mask import Paths, TreeMask


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
    for each in (*given, None if pages is None else pages.table):
        if each is not None and not isinstance(each, OnGpu):
            raise PretendError(f"the kernel was given a CPU tensor {tuple(each.shape)}")
    batch, num_heads, length, _ = query.shape
    out = query.new_empty(batch, length, num_heads, value.shape[3])
    tables = None if pages is None else pages._replace(table=held(pages.table))
    parts = TreeMask(held(mask.bits), held(mask.num_cached), held(mask.num_entries), held(mask.positions))

    def run() -> None:
        found = specification(
            held(query), held(key), held(value), parts, tables, **{name: held(rule) for name, rule in rules.items()}
        )
        out.held.copy_(found.transpose(1, 2))

    gpu.launch(run, [each for each in given if each is not None], [out])
    return out.transpose(1, 2)


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
        for out, found in zip(made, specification.likeliest(held(logits), count), strict=True):
            out.held.copy_(found)

    current_gpu().launch(run, [logits], made)
    return made[0], made[1], made[2]
