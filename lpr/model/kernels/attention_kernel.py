"""Tree attention as a Triton kernel: split-KV, GQA groups folded into the query rows, bits as a mask.

One program processes a block of query rows (entries x heads of one GQA group) and one split of the keys: first blocks
of committed tokens, which need only a bound, then blocks of the tree, with one word of mask bits per row and 64 keys.
Few rows and long contexts would leave most of a GPU idle, so the keys are split among programs, and the last of them,
or a second kernel, combines their partial softmaxes (split-KV, "Flash-Decoding", Dao et al. 2023; the online softmax is
Milakov and Gimelshein 2018, arXiv 1805.02867). All lengths are read on the device: a launch depends on shapes only.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Self

import torch
import triton
from torch import Tensor

from lpr.config import InputError
from lpr.model.kernels import device_of
from lpr.model.kernels.attention_code import attend, combine
from lpr.model.tree_mask import TreeMask

MAX_HEAD_DIM = 256
MOST_SPLITS = 8  # most splits of the keys, if they suffice for half of the multiprocessors
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Tiles:
    """The configuration of a launch: rows and keys per block, key splits, warps and pipeline stages."""

    block_m: int
    block_n: int
    num_splits: int
    num_warps: int
    num_stages: int


def choose_tiles(
    num_rows: int, dim: int, dtype: torch.dtype, num_groups: int, num_kv: int, num_processors: int
) -> Tiles:
    """Tiles for `num_rows` query rows for each of `num_groups` (batch x K/V head), from shapes only.

    Compiled for sm_80, sm_86 and sm_90, these blocks use at most 99 KB of shared memory, the limit of consumer GPUs.
    Keys (at least 256 per split) are split until there are two programs per multiprocessor, but into more than
    MOST_SPLITS only while half of the multiprocessors are idle: each split writes and reads float32 partial sums as
    large as the output.
    """
    wide = max(16, triton.next_power_of_2(dim))
    if dtype == torch.float32:  # no tensor cores: products live in registers
        most, block_n, num_warps, num_stages = (32, 64, 8, 1) if wide <= 128 else (16, 32, 8, 2)
    else:
        most, block_n, num_warps, num_stages = (128, 64, 4, 2) if wide <= 128 else (64, 32, 4, 2)
    block_m = min(max(16, triton.next_power_of_2(num_rows)), most)
    programs = num_groups * -(-num_rows // block_m)
    num_splits = 1
    if programs < num_processors:
        while num_splits < 64 and num_kv > 256 * num_splits:
            if programs * num_splits >= num_processors * (2 if num_splits < MOST_SPLITS else 0.5):
                break
            num_splits *= 2
    return Tiles(block_m, block_n, num_splits, 8 if block_m == 128 else num_warps, num_stages)


def interpreted() -> bool:
    """True if the kernels run in Triton's interpreter, on the CPU (TRITON_INTERPRET=1 at their import)."""
    return not isinstance(attend, triton.JITFunction)


def check(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise InputError for unsupported dtypes and head dimensions."""
    if not query.is_cuda and not interpreted():
        raise InputError(
            "attention='triton' needs a CUDA device; on a CPU use attention='sdpa' (or TRITON_INTERPRET=1 to test)"
        )
    if query.dtype not in DTYPES:
        raise InputError(f"attention='triton' works in float32, bfloat16 and float16, not {query.dtype}")
    widest = max(query.shape[3], value.shape[3])
    if widest > MAX_HEAD_DIM:
        raise InputError(f"attention='triton' takes heads of at most {MAX_HEAD_DIM} dimensions, not {widest}")
    if query.shape[1] % key.shape[1]:
        raise InputError(f"{query.shape[1]} query heads are no multiple of {key.shape[1]} key heads")


class Rules(NamedTuple):
    sinks: Tensor | None = None  # [Hq]: attention-sink logits, part of the softmax without a value (GPT-OSS)
    window: int | None = None  # keeps the keys of the last `window` positions (Mistral)
    chunk: int | None = None  # keeps the keys of the query's own chunk of positions (Llama 4)
    softcap: float | None = None  # bounds scores by `softcap * tanh(score / softcap)` (Gemma 2)
    scale: float | None = None  # None: D**-0.5

    def numbers(self, dim: int) -> tuple[float, float, int, int]:
        scale = dim**-0.5 if self.scale is None else self.scale
        return scale, self.softcap or 1.0, self.window or 0, self.chunk or 1

    def flags(self) -> dict[str, bool]:
        given = {"SOFTCAP": self.softcap, "WINDOW": self.window, "CHUNK": self.chunk}
        return {f"HAS_{name}": each is not None for name, each in given.items()}


class Pages(NamedTuple):
    """The block tables of a batch, if K and V are all rows of a cache, [1, Hk, rows, D(v)]."""

    table: Tensor  # [B, pages] int32
    size: int  # rows of a page; 0: K and V are [B, Hk, KV, D(v)] themselves, and `table` is not read
    num_kv: int  # KV
    arrived: Tensor | None = None
    """Int32 zeros, for counting which splits have ended; of one stream. Without them a second kernel combines."""

    @classmethod
    def none(cls, key: Tensor, mask: TreeMask) -> Self:
        return cls(mask.num_cached[None], 0, key.shape[2])

    def strides(self, states: Tensor) -> tuple[int, int, int]:
        """Strides of K or V: batch, head, row."""
        return (0 if self.size else states.stride(0)), states.stride(1), states.stride(2)


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: TreeMask,
    pages: Pages | None = None,
    *,
    tiles: Tiles | None = None,
    **rules: Any,
) -> Tensor:
    """Attention of `query` [B, Hq, T, D] over `key`, `value` [B, Hk, KV, D(v)] by Rules; returns [B, Hq, T, Dv].

    With a packed mask (`TreeMask.starts`) B is 1, and `pages` has the tables of all slots.
    An entry attends to the committed tokens, its ancestors and itself; the other rows of the cache are not read.
    Padding entries return 0. The result's transposition to [B, T, Hq, Dv] is contiguous. K and V may be strided views
    of a cache. Raises InputError for head dimensions above 256 and other dtypes than float32, bfloat16 and float16.
    """
    pages = pages or Pages.none(key, mask)
    if tiles is not None or not torch.compiler.is_compiling():  # only a compiler needs an operator
        return _launch(query, key, value, mask, pages, Rules(**rules), tiles).transpose(1, 2)
    parts = mask.bits, mask.num_cached, mask.num_entries, mask.positions, mask.starts, mask.slots
    return _operator(query, key, value, *parts, pages.table, pages.size, *Rules(**rules)).transpose(1, 2)


@torch.library.custom_op("lpr::tree_attention", mutates_args=())
def _operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bits: Tensor,
    num_cached: Tensor,
    num_entries: Tensor,
    positions: Tensor,
    starts: Tensor | None,
    slots: Tensor | None,
    table: Tensor,
    page_size: int,
    sinks: Tensor | None,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    scale: float | None,
) -> Tensor:
    """The kernel as a torch operator, [B, T, Hq, Dv], which a compiled forward calls without a graph break.

    The number of keys is passed as the table's shape: torch.compile would specialise on the value of an integer.
    """
    mask = TreeMask(bits, num_cached, num_entries, positions, starts, slots)
    rules = Rules(sinks, window, chunk, softcap, scale)
    num_kv = table.shape[1] * page_size if page_size else key.shape[2]
    return _launch(query, key, value, mask, Pages(table, page_size, num_kv), rules)


@_operator.register_fake
def _shape_of(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


def _launch(
    query: Tensor, key: Tensor, value: Tensor, mask: TreeMask, pages: Pages, rules: Rules, tiles: Tiles | None = None
) -> Tensor:
    check(query, key, value)
    query, key, value = (each if each.stride(3) == 1 else each.contiguous() for each in (query, key, value))
    batch, num_heads, num_tokens, dim = query.shape
    num_kv_heads, dim_v = key.shape[1], value.shape[3]
    group = num_heads // num_kv_heads
    is_packed, num_sequences = mask.starts is not None, len(mask.num_cached)
    num_rows = group * (-(-num_tokens // num_sequences) if is_packed else num_tokens)  # of a sequence, about
    if tiles is None:
        processors, groups = _num_processors(query.device), num_sequences * num_kv_heads
        tiles = choose_tiles(num_rows, max(dim, dim_v), query.dtype, groups, pages.num_kv, processors)
    splits, num_rows = tiles.num_splits, group * batch * num_tokens
    num_q_blocks = -(-group * num_tokens // tiles.block_m)
    if is_packed:  # each sequence may begin within a block
        num_q_blocks = num_rows // tiles.block_m + num_sequences
    block_dv = max(16, triton.next_power_of_2(dim_v))
    out = query.new_empty(batch, num_tokens, num_heads, dim_v)
    sinks = rules.sinks if rules.sinks is not None else out  # not read without HAS_SINKS
    parts = [out, out, out]  # not touched by a single split
    if splits > 1:
        shape = (num_kv_heads, num_rows, splits)
        parts = [torch.empty(size, dtype=torch.float32, device=out.device) for size in ((*shape, dim_v), shape, shape)]
    num_blocks = num_q_blocks * num_kv_heads * batch
    joins = splits > 1 and pages.arrived is not None and len(pages.arrived) >= num_blocks
    arrived = pages.arrived if joins else mask.num_cached  # not touched
    starts, slots = (mask.num_cached if each is None else each for each in (mask.starts, mask.slots))
    with device_of(query):
        attend[(num_q_blocks * splits, num_kv_heads, batch)](
            query, key, value, pages.table, mask.bits.contiguous(), mask.num_cached, mask.num_entries,
            mask.positions.contiguous(), starts, slots, sinks, out, *parts, arrived, *rules.numbers(dim),
            num_tokens, mask.bits.shape[2], num_q_blocks, splits, num_sequences, batch * num_tokens,
            *query.stride()[:3], *pages.strides(key), *pages.strides(value), pages.table.stride(0),
            NUM_KV_HEADS=num_kv_heads, GROUP=group, D=dim, DV=dim_v, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
            BLOCK_D=max(16, triton.next_power_of_2(dim)), BLOCK_DV=block_dv, IS_SPLIT=splits > 1, JOINS=joins,
            **rules.flags(), HAS_SINKS=rules.sinks is not None, UPCAST=interpreted() and query.dtype == torch.bfloat16,
            PAGE=pages.size, PACKED=is_packed, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
        if splits > 1 and not joins:
            combine[(num_rows, num_kv_heads)](
                *parts, sinks, out, batch * num_tokens, NUM_KV_HEADS=num_kv_heads, GROUP=group, DV=dim_v,
                BLOCK_DV=block_dv, NUM_SPLITS=splits, HAS_SINKS=rules.sinks is not None, num_warps=4,
            )  # fmt: skip
    return out


@lru_cache
def _num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; the interpreter gets a few, so that it splits too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
