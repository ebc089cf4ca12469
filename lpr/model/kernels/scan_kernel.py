"""Tree forms of recurrent layers as Triton kernels: convolution, linear attention with decay, selective scan.

Each is one launch for all rows, which reads the states of its slots in place and does not change them. It keeps the
contributions of all entries; `advance` is a second launch, which adds those of the accepted path to the states. The
tree is given as bits and all lengths are read on the device, so a launch depends on shapes only.

Linear attention processes a tree of any size, BLOCK_M entries at a time. Triangular systems of the delta rule are
solved by forward substitution, all entries of a depth at once. Powers of the system's matrix would take fewer products,
but lose all digits in float32 for equal keys along a chain of 64: the powers grow like binomial coefficients.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from lpr.config import InputError
from lpr.model.kernels import device_of
from lpr.model.kernels.recurrent_code import (
    advance_convolution,
    advance_selective,
    convolve_tree,
    find_parents,
    select_tree,
)
from lpr.model.kernels.scan_code import advance_scan, scan_tree
from lpr.model.kernels.walk_code import advance_walk, walk_tree
from lpr.model.tree_mask import TreeMask

BLOCK_M = 16  # entries of linear attention per block, the minimum of a tensor-core product
BLOCK_N = 32  # earlier entries at a time; divides a word of bits
MAX_KEYS = 256  # largest size of a key of linear attention, and of a place's state in a selective scan

Make = Callable[[str, Sequence[int], torch.dtype], Tensor]
"""Returns memory by name and shape: newly allocated, or the same in every step for captured graphs."""
Advance = Callable[[Tensor, Tensor], None]
"""Advances states, of which the second argument has those before the step, along the path to an entry of each row,
int32 [B]; -1: no change."""

Sizes = dict[str, int]  # constants of a launch


@dataclass(frozen=True)
class Places:
    mask: TreeMask
    slots: Tensor  # [B] int32: the rows' places in the tensors of states
    trunk: Tensor  # [B] int32: leading blocks of BLOCK_M entries that are a chain, and ancestors of all later entries
    parents: Tensor  # [B, T] int32: of real entries, -1 for what follows the state
    num_kept: int  # most entries behind a trunk
    first: Tensor  # [B] int32: the first entry behind the trunk

    @property
    def lengths(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.mask.num_cached, self.mask.num_entries, self.slots


def place(mask: TreeMask, slots: Tensor, trunk: Tensor | None = None, num_kept: int | None = None) -> Places:
    """The places of a step; without `trunk` no row has one. One launch, whatever the number of layers."""
    bits = mask.bits.contiguous()
    batch, num_tokens, num_words = bits.shape
    trunk = torch.zeros_like(slots) if trunk is None else trunk
    parents = torch.empty(batch, num_tokens, dtype=torch.int32, device=bits.device)
    with device_of(bits):
        find_parents[(-(-num_tokens // 64), batch)](
            bits, mask.num_entries, parents, num_tokens, num_words, BLOCK=64, num_warps=2
        )
    return Places(replace(mask, bits=bits), slots, trunk, parents, num_kept or num_tokens, trunk * BLOCK_M)


class Options(NamedTuple):
    solve: bool = False
    """True for the delta rule: an entry writes the difference of its value to the state's prediction."""
    norm: bool = False  # True if queries and keys are normalised to length 1
    scale: float = 1.0  # factor of queries
    rate: Tensor | None = None  # [H]: the decay is its product with `beta`, a step size; without it decays are given
    bias: Tensor | None = None  # [H], added to step sizes
    softplus: bool = False  # True if step sizes are softplus of what is given
    limits: tuple[float, float] = (0.0, float("inf"))  # of step sizes
    skip: Tensor | None = None  # [H]: values go to the outputs with these factors


def linear_scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor | None,
    beta: Tensor,
    states: Tensor,
    places: Places,
    make: Make,
    options: Options,
    exact: bool = False,
) -> tuple[Tensor, Advance]:
    """Linear attention with decay along paths: queries and keys [B, T, G, K], values [B, T, H, V], beta [B, T, H].

    With `exact` entries are processed one by one, with the same bits in every tree.

    `decay` has logarithms, [B, T, H] or, per channel, [B, T, H, K]; `states` are float32 [slots, H, K, V]. H is a
    multiple of G. Returns [B, T, H, V], 0 for padding, in the dtype of `value`.
    """
    query, key, value = (each if each.stride(3) == 1 else each.contiguous() for each in (query, key, value))
    batch, num_tokens, num_heads, dim_v = value.shape
    num_keys, dim = key.shape[2:]
    if dim > MAX_KEYS:
        raise InputError(f"the scan's kernel takes keys of at most {MAX_KEYS} dimensions, not {dim}")
    given = options.rate if decay is None else decay
    assert given is not None
    given = given.contiguous() if given.dim() == 1 else given
    per_channel = given.dim() == 4
    if per_channel and given.stride(3) != 1:
        given = given.contiguous()
    kept = [
        make("keys", (batch, places.num_kept, num_heads if exact else num_keys, dim), torch.float32),
        make("values", (batch, places.num_kept, num_heads, dim_v), torch.float32),
        make("decays", (batch, places.num_kept, num_heads, *given.shape[3:]), torch.float32),
        make("trunk", (batch, num_heads, dim, dim_v), torch.float32),
    ]
    out = torch.empty_like(value, memory_format=torch.contiguous_format)
    nothing = out  # not read without its flag
    bias, skip = (nothing if each is None else each.contiguous() for each in (options.bias, options.skip))
    num_words = places.mask.bits.shape[2]
    sizes, of_advance = linear_tiles(num_heads, num_keys, dim, dim_v, per_channel)
    num_tiles = -(-dim_v // sizes["BLOCK_V"])
    flags = {"SOLVE": options.solve, "NORM": options.norm, "HAS_RATE": decay is None, "SOFTPLUS": options.softplus}
    flags |= {"HAS_BIAS": options.bias is not None, "HAS_SKIP": options.skip is not None}
    strides = [each.stride()[:3] for each in (query, key, value)]
    strides += [(0, 0, 0) if decay is None else given.stride()[:3], beta.stride()]
    steps = [step for each in strides for step in each]
    if exact:
        kept.insert(3, make("betas", (batch, places.num_kept, num_heads), torch.float32))
        scratch = torch.empty(batch, places.num_kept, num_heads, dim, dim_v, dtype=torch.float32, device=value.device)
        sizes = {name: sizes[name] for name in ("NUM_HEADS", "GROUP", "K", "V", "PER_CHANNEL", "BLOCK_V")}
        sizes |= {"BLOCK_K": triton.next_power_of_2(dim), "SOLVE": flags.pop("SOLVE")}
        with device_of(value):
            walk_tree[(num_tiles, num_heads, batch)](
                query, key, value, given, beta, bias, skip, states, places.parents, *places.lengths, places.first, out,
                scratch, *kept, options.scale, *options.limits, num_tokens, places.num_kept, *steps, **sizes, **flags,
                num_warps=4,
            )  # fmt: skip

        def advance_exactly(last: Tensor, states: Tensor) -> None:
            with device_of(states):
                advance_walk[(num_tiles, num_heads, batch)](
                    *kept, states, places.mask.bits, *places.lengths, places.first, last, num_tokens, num_words,
                    places.num_kept, **sizes, num_warps=4,
                )  # fmt: skip

        return out, advance_exactly
    with device_of(value):
        scan_tree[(num_tiles, num_heads, batch)](
            query, key, value, given, beta, bias, skip, states, places.mask.bits, *places.lengths, places.trunk, out,
            *kept, options.scale, *options.limits, num_tokens, num_words, places.num_kept,
            *steps, **sizes, **flags, num_warps=4,
        )  # fmt: skip

    def advance(last: Tensor, states: Tensor) -> None:
        with device_of(states):
            advance_scan[(num_tiles * -(-dim // of_advance["BLOCK_K"]), num_heads, batch)](
                *kept, states, places.mask.bits, *places.lengths, places.trunk, last, num_tokens, num_words,
                places.num_kept, **of_advance, num_warps=4,
            )  # fmt: skip

    return out, advance


def linear_tiles(num_heads: int, num_keys: int, dim: int, dim_v: int, per_channel: bool) -> tuple[Sizes, Sizes]:
    """The constants of `scan_tree` and of `advance_scan`."""
    sizes = {"NUM_HEADS": num_heads, "GROUP": num_heads // num_keys, "K": dim, "V": dim_v, "PER_CHANNEL": per_channel}
    sizes |= {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "BLOCK_V": 16 if dim_v <= 16 else 32}
    return sizes | {"CHANNELS": 16}, sizes | {"BLOCK_K": 32 if dim <= 32 else 64}


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, states: Tensor, places: Places, make: Make
) -> tuple[Tensor, Advance]:
    """A causal convolution per channel along paths, of x [B, C, T] by weight [C, width], `silu` of it if asked for.

    `states` are the last inputs, [slots, C, width - 1]. Returns [B, C, T] with the strides of x, 0 for padding.
    """
    batch, channels, num_tokens = x.shape
    width = weight.shape[1]
    num_kept = places.num_kept + width - 1
    kept = make("inputs", (batch, num_kept, channels), states.dtype)
    out = torch.empty_like(x)
    first = places.first
    block_t, block_c = 16, min(128, triton.next_power_of_2(channels))
    grid = -(-num_tokens // block_t), -(-channels // block_c), batch
    with device_of(x):
        convolve_tree[grid](
            x, weight, out if bias is None else bias, states, places.parents, *places.lengths, first, out, kept,
            num_tokens, num_kept, *x.stride(), *out.stride(), *weight.stride(), C=channels, WIDTH=width,
            BLOCK_T=block_t, BLOCK_C=block_c, HAS_BIAS=bias is not None, SILU=silu, num_warps=4,
        )  # fmt: skip

    def advance(last: Tensor, states: Tensor) -> None:
        with device_of(states):
            advance_convolution[(grid[1], batch)](
                kept, states, places.parents, places.mask.num_cached, places.slots, first, last, num_tokens, num_kept,
                C=channels, WIDTH=width, BLOCK_C=block_c, BLOCK_W=triton.next_power_of_2(width - 1), num_warps=4,
            )  # fmt: skip

    return out, advance


def selective_scan(
    x: Tensor,
    steps: Tensor,
    rates: Tensor,
    keys: Tensor,
    queries: Tensor,
    states: Tensor,
    places: Places,
    make: Make,
    *,
    bias: Tensor | None = None,
    softplus: bool = False,
    skip: Tensor | None = None,
    gate: Tensor | None = None,
) -> tuple[Tensor, Advance]:
    """Mamba 1's selective scan: x, `steps` and `gate` [B, C, T], `rates` [C, K], keys and queries [B, K, T].

    `states` are float32 [slots, C, K]. Returns [B, C, T] with the strides of x, 0 for padding.
    """
    batch, channels, num_tokens = x.shape
    dim = rates.shape[1]
    if dim > MAX_KEYS:
        raise InputError(f"the selective scan's kernel takes states of at most {MAX_KEYS} places, not {dim}")
    rates = rates.contiguous()
    flags = {"HAS_BIAS": bias is not None, "HAS_SKIP": skip is not None, "HAS_GATE": gate is not None}
    part = batch, places.num_kept
    kept = [
        make("inputs", (*part, channels), torch.float32),
        make("steps", (*part, channels), torch.float32),
        make("keys", (*part, dim), torch.float32),
        make("trunk", (batch, channels, dim), torch.float32),
    ]
    scratch = torch.empty(*part, channels, dim, dtype=torch.float32, device=x.device)
    out = torch.empty_like(x)
    first = places.first
    block_k = triton.next_power_of_2(dim)
    block_c = min(triton.next_power_of_2(channels), max(1, 1024 // block_k))
    sizes = {"C": channels, "K": dim, "BLOCK_C": block_c, "BLOCK_K": block_k}
    grid = -(-channels // block_c), batch
    skip, bias = (out if each is None else each.contiguous() for each in (skip, bias))
    optional = [skip, out if gate is None else gate, bias]
    strides = [step for each in (x, steps, keys, queries, optional[1], out) for step in each.stride()]
    with device_of(x):
        select_tree[grid](
            x, steps, rates, keys, queries, *optional, states, places.parents, *places.lengths, first, out, scratch,
            *kept, num_tokens, places.num_kept, *strides, **sizes, **flags, SOFTPLUS=softplus, num_warps=4,
        )  # fmt: skip

    def advance(last: Tensor, states: Tensor) -> None:
        bits = places.mask.bits
        with device_of(states):
            advance_selective[grid](
                *kept, rates, states, bits, *places.lengths, first, last, num_tokens, bits.shape[2], places.num_kept,
                **sizes, num_warps=4,
            )  # fmt: skip

    return out, advance
