"""Work of the extension, which holds no lock, on several threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch


def share_out(work: Callable[[slice], None], number: int) -> None:
    """Call `work` with equal slices of `number` things, on as many threads as torch uses."""
    num_threads = torch.get_num_threads()
    if (count := min(num_threads, number)) < 2:
        work(slice(0, number))
        return
    edges = [number * part // count for part in range(count + 1)]
    list(_pool(num_threads).map(work, map(slice, edges[:-1], edges[1:])))


@lru_cache(maxsize=1)
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="lpr")
