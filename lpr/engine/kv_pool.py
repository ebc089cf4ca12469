"""The size of the KV cache: the number of pages per rank and the longest sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lpr.config import PAGE_SIZE, DecodeConfig, InputError
from lpr.core.step_times import StepTimes
from lpr.dist.comm import Comm, agree, is_alone
from lpr.engine.options import EngineOptions
from lpr.model.kv_cache import KVCache
from lpr.model.runner import TreeModel
from lpr.sched.page_moves import PageClear, PageCopy, PageIn, PageMove, PageOut, StateCopy

DEFAULT_LENGTH = 4096
"""Default capacity on a CPU, in tokens for each of `max_batch_size` sequences."""
GPU_SHARE = 0.9  # default share of a GPU's free memory for the cache
CPU_SHARE = 0.5  # most of a CPU's free memory that the default takes
ROUNDED = 256  # sizes are rounded up to multiples of this, so that new tree sizes seldom need a new cache
SWAP_GIB, SWAP_SHARE = 4.0, 0.25
"""Default GiB of host memory for swapped-out pages (as in vLLM v0), and the largest share of free memory for it."""
RESERVE = 0.05  # share of the free memory reserved for the activations of a step


@dataclass(frozen=True)
class PoolSize:
    """Pages of a rank, and the longest sequence."""

    num_pages: int
    max_length: int
    num_host_pages: int = 0  # pages in host memory


@dataclass(frozen=True, kw_only=True)
class PoolNeeds:
    """The inputs of the pool's size."""

    decode: DecodeConfig
    kv_memory: float | None  # as EngineOptions.kv_memory
    longest: int | None  # positions that the model has or `decode.max_length` allows; None: no limit is known
    num_ahead: int  # rows of a step's tree, for each decoding sequence
    page_size: int
    bytes_per_token: int
    free: int | None  # free bytes of the rank's device, the present cache included; None: unknown
    on_gpu: bool = False
    reserve: int = 0  # bytes of `free` that steps need, if that is more than RESERVE of it
    told: str = ""  # use of the rest of a GPU's memory, for messages

    @classmethod
    def of(
        cls, model: TreeModel, like: KVCache, decode: DecodeConfig, options: EngineOptions, longest: int | None,
        num_ahead: int, comm: Comm,
    ) -> PoolNeeds:  # fmt: skip
        """The needs of a `model` whose cache is like `like`."""
        num_axes = (comm.size > 1) + (comm.tp_mesh is not None)
        batch, prompt = decode.max_batch_size, decode.prefill_chunk
        told = model.memory_needs(batch, num_ahead, prompt, longest or DEFAULT_LENGTH, num_axes)
        return cls(
            decode=decode,
            kv_memory=options.kv_memory,
            longest=longest,
            num_ahead=num_ahead,
            page_size=PAGE_SIZE,
            bytes_per_token=like.bytes_per_token,
            free=model.free_bytes(comm.num_sharing),
            on_gpu=model.device.type == "cuda",
            reserve=told.steps if told is not None else 0,
            told=told.tell() if told is not None else "",
        )

    def num_pages(self) -> int:
        """The number of pages that fit on this rank; raises InputError."""
        if not self.bytes_per_token:  # without attention: pages cost nothing
            length = self.decode.max_length or min(self.longest or DEFAULT_LENGTH, DEFAULT_LENGTH)
            return -(-self.decode.max_batch_size * (length + self.num_ahead) // self.page_size)
        share = self.kv_memory if self.kv_memory is not None else GPU_SHARE if self.on_gpu else None
        if share is not None and not 0 < share < float("inf"):
            raise InputError(f"kv_memory={share} must be above 0: up to 1 a share of the free memory, above it bytes")
        usable = None if self.free is None else usable_tokens(self.free, self.bytes_per_token, self.reserve)
        if self.decode.kv_tokens is not None:
            tokens = self.decode.kv_tokens
            if lack := lack_of_room(self.free, tokens, self.bytes_per_token, self.reserve):
                raise InputError(f"kv_tokens={tokens}: {lack}{self.rest}")
            return -(-tokens // self.page_size)
        if share is not None and share > 1:
            tokens = int(share) // self.bytes_per_token
        elif share is not None and usable is not None:
            tokens = int(share * usable)
        else:
            length = self.decode.max_length or min(self.longest or DEFAULT_LENGTH, DEFAULT_LENGTH)
            tokens = self.decode.max_batch_size * -(-(length + self.num_ahead) // ROUNDED) * ROUNDED
            tokens = tokens if usable is None else min(tokens, int(usable * CPU_SHARE))
        return (tokens if usable is None else min(tokens, usable)) // self.page_size

    def size(self, num_pages: int) -> PoolSize:
        """The size with that many pages; raises InputError if they hold no sequence."""
        room = num_pages * self.page_size - self.num_ahead
        length = self.decode.max_length or 2
        if room < length:
            held, needs = room + self.num_ahead, length + self.num_ahead
            what = f"one sequence of {length} tokens and a tree of {self.num_ahead} nodes need {needs}"
            size = _size(held * self.bytes_per_token)
            raise InputError(f"there is K/V for {held} tokens ({size}), and {what}{self.rest}")
        return PoolSize(num_pages, min(room, self.longest or room))

    def describe(self, num_pages: int) -> str:
        """The use of a GPU's memory with that many pages, and the rest, as one line."""
        taken = num_pages * self.page_size * self.bytes_per_token
        left = (self.free or 0) - self.reserve - taken
        tokens = f"{num_pages * self.page_size} tokens"
        return f"memory in GiB: {self.told}; K/V of {tokens} {taken / 2**30:.2f}, left {left / 2**30:.2f}"

    @property
    def rest(self) -> str:
        """Other uses of the memory, for the end of a message."""
        return f"; the other parts in GiB: {self.told}" if self.told else ""


def common_size(needs: PoolNeeds, comm: Comm) -> PoolSize:
    """The size that all ranks of `comm` have room for; raises the same InputError on all of them."""
    failure, pages = None, 0
    try:
        pages = needs.num_pages()
    except InputError as error:
        failure = str(error)
    agree(comm, failure)
    if not is_alone(comm):
        if not comm.serves:  # it has pages of its own
            pages = 2**31 - 1
        pages = int(comm.gather(torch.tensor([pages], dtype=torch.int32)).min())
    return needs.size(pages)


def given_size(needs: PoolNeeds, num_pages: int) -> PoolSize:
    """The pool size of a running mesh; raises InputError if this rank has no room for it."""
    if lack := lack_of_room(needs.free, num_pages * needs.page_size, needs.bytes_per_token, needs.reserve):
        raise InputError(f"{lack}{needs.rest}")
    return needs.size(num_pages)


def common_host_pages(
    model: TreeModel, needs: PoolNeeds, options: EngineOptions, times: StepTimes | None, comm: Comm
) -> int:
    """Pages in host memory that fit on all ranks; 0 if recomputing K/V is faster on one of them."""
    assert model.cache is not None
    if not needs.bytes_per_token:
        return 0
    failure, count, page_size = None, 0, needs.page_size
    try:
        free = model.free_host_bytes(comm.num_sharing)
        count = num_host_pages(options.swap_space, free, page_size * needs.bytes_per_token)
    except InputError as error:
        failure = str(error)
    agree(comm, failure)
    if not options.prefix_reuse or (
        count and not is_swap_faster(model.cache.swap_ms(), times, page_size, needs.decode.prefill_chunk)
    ):
        count = 0
    return count if is_alone(comm) else int(comm.gather(torch.tensor([count], dtype=torch.int32)).min())


def num_host_pages(swap_space: float | None, free: int | None, page_bytes: int) -> int:
    """Pages in a rank's host memory, of which `free` bytes are free (None: unknown); raises InputError."""
    if swap_space is not None and not 0 <= swap_space < math.inf:
        raise InputError(f"swap_space={swap_space} must be a number of GiB, 0 or more")
    wanted = int((SWAP_GIB if swap_space is None else swap_space) * 2**30)
    if swap_space is None and free is not None:
        wanted = min(wanted, int(free * SWAP_SHARE))
    elif free is not None and wanted > free:
        raise InputError(f"swap_space={swap_space:g} GiB: {_size(free)} of host memory are free")
    return wanted // page_bytes if page_bytes else 0  # no layer has K/V


def is_swap_faster(swap_ms: float, times: StepTimes | None, page_size: int, prefill_chunk: int) -> bool:
    """True if copying a page to host memory and back is faster than computing it in a prefill chunk.

    Also True without step times.
    """
    return times is None or swap_ms < times.time(prefill_chunk) / prefill_chunk * page_size


def usable_tokens(free: int, bytes_per_token: int, reserve: int = 0) -> int:
    """Tokens whose K/V fits into `free` bytes, with a reserve for steps: `reserve` bytes, and RESERVE of `free`."""
    if not bytes_per_token:  # a model without attention
        return 1 << 40
    return max(0, free - max(reserve, int(free * RESERVE))) // bytes_per_token


def lack_of_room(free: int | None, tokens: int, bytes_per_token: int, reserve: int = 0) -> str | None:
    """A message if the K/V of `tokens` tokens does not fit into `free` bytes (None: unknown); None if it fits."""
    if free is None or tokens <= (usable := usable_tokens(free, bytes_per_token, reserve)):
        return None
    needs, has = _size(tokens * bytes_per_token), _size(usable * bytes_per_token)
    return f"the K/V of {tokens} tokens needs {needs}, and {has} are free, for {usable} tokens"


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def follow(cache: KVCache, moves: Sequence[PageMove], tables: Sequence[tuple[int, Sequence[int], int]]) -> None:
    """Apply the scheduler's decisions to a cache: page moves, then changes of block tables (RankPages.take_changed)."""
    for move in moves:
        match move:
            case PageCopy():
                cache.copy_page(move.source, move.target, move.num_rows)
            case PageClear():
                cache.clear([move.page])
            case PageOut():
                cache.host_pages.store(move.page, move.host_page)
            case StateCopy():
                cache.states.copy(move.source, move.target)
            case PageIn():
                cache.host_pages.load(move.host_page, move.page)
    for slot, pages, first in tables:
        cache.assign(slot, pages, first)
