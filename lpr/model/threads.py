"""Runs the C++ extension's loops, without the GIL, on torch's threads."""

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import torch

from lpr import native

_RUNTIMES = ("libgomp", "libiomp5", "libomp")  # OpenMP runtimes that torch may bring; all export GOMP_parallel on Linux

MOST_DRAFTING = 8
"""Threads that draft beside a GPU: 64 trees of 16 nodes take 1.5 ms on one."""


def team_size() -> int:
    """Number of threads for the extension's loops: torch's if its OpenMP runtime is accessible, else 1."""
    return torch.get_num_threads() if has_team() else 1


def drafting_threads(device: torch.device, num_sharing: int) -> int:
    """Number of threads that draft for a model on `device`, which `num_sharing` ranks share.

    Beside a GPU a rank has its share of the processor to itself, and torchrun gives torch one thread of it.
    """
    if device.type == "cpu" or not has_team():
        return team_size()
    return max(team_size(), min(_share(num_sharing), MOST_DRAFTING))


@lru_cache
def _share(num_sharing: int) -> int:
    """A rank's share of the processors."""
    return len(os.sched_getaffinity(0)) // (num_sharing * max(1, torch.cuda.device_count()))


@lru_cache(maxsize=1)
def has_team() -> bool:
    """Give the extension the entry point of the OpenMP runtime that torch has loaded; False if there is none."""
    maps = Path("/proc/self/maps")
    if native.use_team is None or not maps.exists():
        return False
    torch_folder = str(Path(torch.__file__).parent)
    paths = {line.split(maxsplit=5)[5] for line in maps.read_text().splitlines() if line.count("/")}
    loaded = sorted(
        (path for path in paths if Path(path).name.startswith(_RUNTIMES)),
        key=lambda path: not path.startswith(torch_folder),
    )
    for path in loaded:
        run_team = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
        if run_team is not None:
            native.use_team(ctypes.cast(run_team, ctypes.c_void_p).value)
            return True
    return False


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
