"""The kernel that moves rows against torch's operators; without a GPU in Triton's interpreter."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from lpr.model import moves
from lpr.model.kv_cache import KVCache
from lpr.model.step_inputs import Row

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs the package triton", allow_module_level=True)
from lpr.model.kernels import moves_kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def commits(generator: np.random.Generator, num_slots: int) -> np.ndarray:
    """The moves, int64 [2, n], of commits of a path each in pages that lie anywhere."""
    cache, found = KVCache(num_slots, 96, num_pages=40, page_size=16), []
    cache.move = found.append  # type: ignore[method-assign]
    cache._pools = [torch.empty(0)]
    pages = generator.permutation(40)[: 6 * num_slots].reshape(num_slots, 6)
    rows = [Row.chain(slot, int(generator.integers(0, 20)), [1] * 70, 1) for slot in range(num_slots)]
    for slot in range(num_slots):
        cache.assign(slot, pages[slot])
    paths = [np.sort(generator.choice(70, generator.integers(1, 40), replace=False)) for _ in rows]
    moved = [(row, entry, to) for row, path in enumerate(paths) for to, entry in enumerate(path) if entry != to]
    cache.commit_moves(rows, np.array(moved, np.int64).T)
    return found[0]


@pytest.mark.parametrize("dim, dtype", [(8, torch.float32), (9, torch.bfloat16), (150, torch.float16), (5, torch.int8)])
def test_commits_give_the_bytes_of_index_copy(dim: int, dtype: torch.dtype) -> None:
    """Also of NaN, of more moves than a program holds, and of rows that are read and written."""
    generator = np.random.default_rng(dim)
    overlapped = False
    for num_slots in (1, 6):
        rows = commits(generator, num_slots)
        assert rows.shape[1] > moves_kernel.MOVES * (num_slots > 1)
        overlapped = overlapped or bool(np.isin(rows[0], rows[1]).any())
        pool = torch.randint(-128, 128, (3, 641, 2, dim * dtype.itemsize), dtype=torch.int8).view(dtype).to(DEVICE)
        expected = pool.clone()
        source, target = torch.from_numpy(rows).to(DEVICE)
        moves.by_operators(expected, source, target)
        moves_kernel.move_rows(pool, source, target)
        assert torch.equal(pool.view(torch.int8), expected.view(torch.int8))
    assert overlapped


def test_no_move_reads_what_an_earlier_one_writes() -> None:
    """So that MOVES rows at a time, in order, are as good as all at once."""
    for seed in range(30):
        source, target = commits(np.random.default_rng(seed), 5)
        written: set[int] = set()
        for each, to in zip(source.tolist(), target.tolist(), strict=True):
            assert each not in written
            written.add(to)


def test_rows_behind_two_gibibytes() -> None:
    """Offsets of 32 bits end there. The pool's memory is never touched elsewhere."""
    rows = 800_000_000
    pool = torch.empty(2, rows, 1, 3, dtype=torch.int8, device=DEVICE)
    source, target = (
        torch.tensor([rows - 3, rows - 1], device=DEVICE),
        torch.tensor([rows - 4, rows - 3], device=DEVICE),
    )
    pool[:, source, 0] = torch.tensor([[[1, 2, 3], [4, 5, 6]], [[7, 8, 9], [10, 11, 12]]]).to(DEVICE, torch.int8)
    moves_kernel.move_rows(pool, source, target)
    assert pool[0, -4:, 0].tolist()[:2] == [[1, 2, 3], [4, 5, 6]]
    assert pool[1, -4:, 0].tolist()[:2] == [[7, 8, 9], [10, 11, 12]]


def test_layers_without_values() -> None:
    moves_kernel.move_rows(torch.empty(2, 9, 1, 0), torch.tensor([3]), torch.tensor([1]))
