"""What lets a torch without CUDA make tensors that say so."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import torch

GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl { C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>); }
"""


def load_guard(folder: Path) -> None:
    """Lets this torch make tensors of a device that it was not built for; builds the library in `folder`, once."""
    library, mine, source = (
        folder / name for name in ("guard.so", f"guard{os.getpid()}.so", f"guard{os.getpid()}.cpp")
    )
    if not library.exists():
        source.write_text(GUARD)
        torch_folder = Path(os.path.dirname(torch.__file__))
        subprocess.run(
            ["c++", "-shared", "-fPIC", "-std=c++20", source, "-o", mine, f"-I{torch_folder / 'include'}",
             f"-L{torch_folder / 'lib'}", "-lc10"],
            check=True, timeout=300,
        )  # fmt: skip
        mine.rename(library)
    ctypes.CDLL(str(library))
