"""The model of torch's caching allocator: rounding, segments, splits, merges, streams, graphs' pools and its end."""

from __future__ import annotations

import random

import pytest
import torch

from tests.fakes.caching_allocator import MIB, Block, CachingAllocator


def test_sizes_of_segments() -> None:
    """`get_allocation_size`: 2 MiB up to 1 MiB, 20 MiB below 10 MiB, then the size itself in steps of 2 MiB."""
    for size, segment in ((1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (21 * MIB, 22)):
        memory = CachingAllocator(100 * MIB)
        assert memory.malloc(size).size % 512 == 0
        assert (memory.reserved, memory.num_segments) == (segment * MIB, 1), size


def test_the_smallest_block_that_fits_is_split() -> None:
    memory = CachingAllocator(1 << 30)
    blocks = [memory.malloc(size * MIB) for size in (64, 32, 48)]
    for each in blocks:
        memory.free(each)
    found = memory.malloc(30 * MIB)
    assert found.address == blocks[1].address and found.size == 30 * MIB, "the rest of 2 MiB is a block of its own"
    assert memory.malloc(47 * MIB + 512 * 1024).size == 48 * MIB, "a rest of at most 1 MiB stays with its block"
    assert memory.reserved == 144 * MIB
    memory.verify()


def test_holes_are_not_given_back() -> None:
    memory = CachingAllocator(100 * MIB)
    blocks = [memory.malloc(4 * MIB) for _ in range(15)]  # three segments of 20 MiB
    for each in blocks[:10:2]:
        memory.free(each)
    memory.empty_cache()
    assert memory.reserved == 60 * MIB and memory.inactive == memory.stuck == 20 * MIB
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 44.00 MiB. GPU 0 has .* 100.00 MiB of which"):
        memory.malloc(44 * MIB)
    memory.malloc(40 * MIB)
    for each in blocks[1:10:2]:
        memory.free(each)
    memory.malloc(22 * MIB)  # two segments are whole again, and are given back for it
    assert memory.reserved == 82 * MIB
    memory.verify()


def test_streams_have_blocks_of_their_own() -> None:
    memory = CachingAllocator(100 * MIB)
    block = memory.malloc(30 * MIB, stream=1)
    memory.record_stream(block, 2)
    memory.free(block)
    assert memory.malloc(30 * MIB, stream=1).address != block.address, "stream 2 may still read it"
    memory.finish(2)
    assert memory.malloc(30 * MIB, stream=2).address != block.address
    assert memory.malloc(30 * MIB, stream=1).address == block.address


def test_a_pool_is_kept_while_a_graph_holds_it() -> None:
    memory = CachingAllocator(100 * MIB)
    memory.hold_pool("graphs")
    memory.free(memory.malloc(40 * MIB, pool="graphs"))
    memory.empty_cache()
    assert memory.reserved == 40 * MIB and memory.malloc(40 * MIB).pool is None and memory.reserved == 80 * MIB
    with pytest.raises(torch.OutOfMemoryError):
        memory.malloc(30 * MIB)
    memory.drop_pool("graphs")
    memory.malloc(30 * MIB)
    assert memory.reserved == 70 * MIB


def test_any_order_of_requests_keeps_the_rules() -> None:
    generator = random.Random(1)
    memory = CachingAllocator(1 << 30, 10 * MIB)
    held: list[Block] = []
    for step in range(3000):
        if held and generator.random() < 0.48:
            memory.free(held.pop(generator.randrange(len(held))))
        else:
            size = int(2 ** generator.uniform(0, 26))
            try:
                held.append(memory.malloc(size, generator.randrange(2)))
            except torch.OutOfMemoryError:
                memory.free(held.pop())
        if step % 50 == 0:
            memory.verify()
    while held:
        memory.free(held.pop())
    memory.empty_cache()
    memory.verify()
    assert memory.reserved == memory.allocated == 0
