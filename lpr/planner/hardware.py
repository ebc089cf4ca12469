"""GPUs and links by their data sheets.

Bandwidths are what a vendor states, so a time computed from them is a floor. Sources, per line: NVIDIA data sheets of
the A100 (80 GB and 40 GB SXM, June 2021), H100 SXM (2023), H200 SXM (2024), L40S (2023), A10 (2021) and the DGX B200
(2024: 64 TB/s, 1440 GB and 72 PFLOP/s dense FP8 for eight GPUs; bf16 is half of that). Arithmetic is dense bf16 on
tensor cores, without sparsity.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lpr.config import InputError

GIB = 1 << 30


@dataclass(frozen=True)
class Gpu:
    """One accelerator."""

    name: str
    memory: int
    """Bytes that a program can have; data sheets count in powers of ten or two, nvidia-smi shows these."""
    bandwidth: float
    """Bytes per second of its memory, by the data sheet."""
    flops: float
    """Dense bf16 floating point operations per second, by the data sheet."""
    link: str
    """What usually joins several of them inside a host; names of lpr.planner.interconnect."""


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-80gb", 80 * GIB, 2039e9, 312e12, "nvlink-a100"),
        Gpu("a100-40gb", 40 * GIB, 1555e9, 312e12, "nvlink-a100"),
        Gpu("h100", 80 * GIB, 3350e9, 989e12, "nvlink-h100"),
        Gpu("h200", 140 * GIB, 4800e9, 989e12, "nvlink-h100"),
        Gpu("b200", 178 * GIB, 8000e9, 2250e12, "nvlink-b200"),
        Gpu("l40s", 45 * GIB, 864e9, 362e12, "pcie4"),
        Gpu("a10", 22 * GIB, 600e9, 125e12, "pcie4"),
    )
}
DEFAULT_GPU = "a100-80gb"
"""The machine of the lookahead decoding paper."""

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def parse_size(text: str, flag: str) -> int:
    """Bytes of a size such as 80GiB or 80GB; raises InputError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    if match is None or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise InputError(f"{flag} {text!r} is no size; write a number and a unit, such as 80GiB or 80GB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def parse_bandwidth(text: str, flag: str) -> float:
    """Bytes per second of a bandwidth such as 2039GB/s or 3.35TB; raises InputError."""
    return float(parse_size(re.sub(r"(/s|ps)$", "", text.strip(), flags=re.IGNORECASE), flag))


def gpu_named(name: str) -> Gpu:
    """A GPU of the table; raises InputError."""
    try:
        return GPUS[name.lower()]
    except KeyError:
        raise InputError(f"--gpu {name!r} is none of {', '.join(GPUS)}; or give --gpu-memory and --bandwidth") from None
