"""Checks that the KV cache fits into memory before it is made: a number in place of a killed process."""

from __future__ import annotations

from pathlib import Path

import torch

_RESERVE = 0.05
"""Part of the free memory that is left to the activations of a step."""


def free_bytes(device: torch.device) -> int | None:
    """Free bytes of `device`, or None where they are unknown (a CPU without /proc)."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    meminfo = Path("/proc/meminfo")
    if device.type != "cpu" or not meminfo.exists():
        return None
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def cache_shortage(available: int, bytes_per_row: int, num_slots: int, max_length: int, extra_rows: int) -> str | None:
    """One line on how much memory the cache lacks and what would fit, or None if it fits.

    A slot has `max_length` rows for committed tokens and `extra_rows` for a step's tree; `available` is in bytes.
    """
    usable = int(available * (1 - _RESERVE))
    slot_bytes = (max_length + extra_rows) * bytes_per_row
    needed = num_slots * slot_bytes
    if needed <= usable:
        return None
    missing = (
        f"the cache of max_batch_size={num_slots} sequences of max_length={max_length} needs {_size(needed)}, and "
        f"{_size(usable)} are free: {_size(needed - usable)} are missing"
    )
    fitting = []
    if usable >= slot_bytes:
        fitting.append(f"max_batch_size={usable // slot_bytes}")
    for slots in dict.fromkeys((num_slots, 1)):
        length = usable // (slots * bytes_per_row) - extra_rows
        if 2 <= length < max_length:
            with_slots = "" if slots == num_slots else f"max_batch_size={slots} with "
            fitting.append(f"{with_slots}max_length={length}")
            break
    if not fitting:
        return f"{missing}; not even one sequence of 2 tokens would fit: use fewer nodes per step or a larger --tp"
    return f"{missing}; {' or '.join(fitting)} would fit"


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
