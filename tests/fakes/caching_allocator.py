"""A model of torch's caching allocator on one GPU: where blocks lie, what is reserved, and when memory runs out.

The rules are those of c10/cuda/CUDACachingAllocator.cpp (PyTorch 2.x) and c10/core/AllocatorConfig.h with the default
settings, i.e. without expandable segments, `max_split_size_mb` and rounding to powers of two:

* sizes are rounded up to 512 bytes (`round_size`); up to 1 MiB they come from segments of 2 MiB, below 10 MiB from
  segments of 20 MiB, and larger ones from segments of their own, rounded up to 2 MiB (`get_allocation_size`);
* a request takes the smallest free block of its stream and pool that holds it, of equal ones the lowest
  (`get_free_block`, BlockComparatorSize), and leaves the rest free if that is 512 bytes or more of a small block, or
  more than 1 MiB of a large one (`should_split`);
* a freed block merges with free neighbours of its segment (`free_block`, `try_merge_blocks`); one that another stream
  has used is free once that stream's work is done (`record_stream`, `process_events`);
* where the device has no room, pending blocks are waited for, and segments without a block in use are given back
  (`release_cached_blocks`); the memory between blocks in use is not. Then the request fails.

Memory of a graph is a private pool, whose segments are given back when no graph holds the pool.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

MIB = 1 << 20
MIN_BLOCK, SMALL = 512, MIB
SMALL_SEGMENT, LARGE_SEGMENT, MIN_OWN_SEGMENT, SEGMENT_ROUNDING = 2 * MIB, 20 * MIB, 10 * MIB, 2 * MIB


@dataclass(eq=False)
class Block:
    """A part of a segment, in use or free."""

    address: int
    size: int
    stream: int = 0
    pool: Hashable = None
    """Handle of a graph's pool; None: the pool of everything else."""
    is_small: bool = False
    in_use: bool = False
    previous: Block | None = field(default=None, repr=False)
    """The neighbour before it in its segment."""
    next: Block | None = field(default=None, repr=False)
    users: set[int] = field(default_factory=set)
    """Other streams that have used it."""

    @property
    def place(self) -> tuple[int, int, int]:
        """Its place among the free blocks of a pool."""
        return self.stream, self.size, self.address


class CachingAllocator:
    """The memory of one GPU with `capacity` bytes, of which the CUDA context and libraries take `context`."""

    def __init__(self, capacity: int, context: int = 0) -> None:
        self.capacity, self.context = capacity, context
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        """Bytes of blocks in use, and of segments."""
        self.num_segments = 0
        self._free: defaultdict[tuple[Hashable, bool], list[tuple[int, int, int]]] = defaultdict(list)
        self._blocks: dict[int, Block] = {}
        """All blocks by their addresses."""
        self._pending: list[Block] = []
        self._held: Counter[Hashable] = Counter()
        self._next_address = SEGMENT_ROUNDING

    @property
    def device_free(self) -> int:
        """Bytes of the device outside of segments, as `torch.cuda.mem_get_info` reports them."""
        return self.capacity - self.context - self.reserved

    @property
    def inactive(self) -> int:
        """Bytes that are free within segments."""
        return sum(size for blocks in self._free.values() for _, size, _ in blocks)

    @property
    def stuck(self) -> int:
        """Bytes of them that `empty_cache` does not give back, as their segments hold blocks in use."""
        return sum(each.size for each in self._blocks.values() if not each.in_use and not _is_whole(each))

    def malloc(self, size: int, stream: int = 0, pool: Hashable = None) -> Block:
        """A block of `size` bytes or more; raises torch.OutOfMemoryError."""
        if size <= 0:
            return Block(0, 0, stream, pool, in_use=True)
        wanted = -(-size // MIN_BLOCK) * MIN_BLOCK
        is_small = wanted <= SMALL
        block = self._fitting(wanted, stream, pool, is_small) or self._segment(wanted, stream, pool, is_small)
        if block is None:
            self.empty_cache()
            block = self._segment(wanted, stream, pool, is_small)
        if block is None:
            raise torch.OutOfMemoryError(self._refusal(size))
        self._split(block, wanted)
        block.in_use = True
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Take a block back; it can be used again once the other streams that used it have finished."""
        if not block.size:
            return
        assert block.in_use and self._blocks.get(block.address) is block, "a block is freed twice"
        self.allocated -= block.size
        if block.users - {block.stream}:
            self._pending.append(block)
        else:
            self._merge(block)

    def record_stream(self, block: Block, stream: int) -> None:
        """Note that another stream uses the block."""
        block.users.add(stream)

    def finish(self, stream: int | None = None) -> None:
        """The work of a stream so far, or of all of them, is done: blocks that waited for it are free."""
        waiting, self._pending = self._pending, []
        for block in waiting:
            block.users -= {stream} if stream is not None else set(block.users)
            if block.users - {block.stream}:
                self._pending.append(block)
            else:
                self._merge(block)

    def empty_cache(self) -> None:
        """Give segments without a block in use back to the device, of graphs' pools only where no graph is left."""
        self.finish()
        for (pool, _), found in self._free.items():
            if pool is not None and self._held[pool]:
                continue
            for place in [each for each in found if _is_whole(self._blocks[each[2]])]:
                found.remove(place)
                self.reserved -= self._blocks.pop(place[2]).size
                self.num_segments -= 1

    def hold_pool(self, pool: Hashable) -> None:
        """A graph is captured into a pool."""
        self._held[pool] += 1

    def drop_pool(self, pool: Hashable) -> None:
        """A graph of the pool is reset."""
        self._held[pool] -= 1

    def verify(self) -> None:
        """Raise AssertionError unless blocks tile their segments and all sums are right."""
        places = {place for found in self._free.values() for place in found}
        assert len(places) == sum(map(len, self._free.values()))
        pending = {id(each) for each in self._pending}
        used = sum(each.size for each in self._blocks.values() if each.in_use and id(each) not in pending)
        assert used == self.allocated and sum(each.size for each in self._blocks.values()) == self.reserved
        for block in self._blocks.values():
            assert block.in_use or block.place in places
            if block.next is not None:
                assert block.next.previous is block and block.next.address == block.address + block.size
                assert block.in_use or block.next.in_use, "free neighbours are one block"
        assert self.reserved <= self.capacity - self.context

    def _fitting(self, wanted: int, stream: int, pool: Hashable, is_small: bool) -> Block | None:
        found = self._free[pool, is_small]
        at = bisect_left(found, (stream, wanted, 0))
        return self._blocks[found.pop(at)[2]] if at < len(found) and found[at][0] == stream else None

    def _segment(self, wanted: int, stream: int, pool: Hashable, is_small: bool) -> Block | None:
        size = -(-wanted // SEGMENT_ROUNDING) * SEGMENT_ROUNDING
        if wanted < MIN_OWN_SEGMENT:
            size = SMALL_SEGMENT if is_small else LARGE_SEGMENT
        if size > self.device_free:
            return None
        block = Block(self._next_address, size, stream, pool, is_small)
        self._next_address += size + SEGMENT_ROUNDING  # segments are no neighbours
        self._blocks[block.address] = block
        self.reserved += size
        self.num_segments += 1
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return block

    def _split(self, block: Block, wanted: int) -> None:
        rest = block.size - wanted
        if rest < MIN_BLOCK if block.is_small else rest <= SMALL:
            return
        other = Block(block.address + wanted, rest, block.stream, block.pool, block.is_small)
        other.previous, other.next = block, block.next
        if block.next is not None:
            block.next.previous = other
        block.next, block.size = other, wanted
        self._blocks[other.address] = other
        insort(self._free[other.pool, other.is_small], other.place)

    def _merge(self, block: Block) -> None:
        block.in_use, found = False, self._free[block.pool, block.is_small]
        block.users.clear()
        for first, second in ((block, block.next), (block.previous, block)):
            if first is None or second is None or first.in_use or second.in_use:
                continue
            other = second if first is block else first
            del found[bisect_left(found, other.place)]
            del self._blocks[second.address]
            first.size += second.size
            first.next = second.next
            if second.next is not None:
                second.next.previous = first
            block = first
        insort(found, block.place)

    def _refusal(self, size: int) -> str:
        return (
            f"CUDA out of memory. Tried to allocate {_size(size)}. GPU 0 has a total capacity of "
            f"{_size(self.capacity)} of which {_size(self.device_free)} is free. Of the allocated memory "
            f"{_size(self.allocated)} is allocated by PyTorch, and {_size(self.reserved - self.allocated)} is reserved "
            "by PyTorch but unallocated."
        )


def _is_whole(block: Block) -> bool:
    """True for a block that is a whole segment."""
    return block.previous is None and block.next is None


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / MIB:.2f} MiB"
