"""Makes a machine with a GPU and torch, but without a network, ready for `benchmarks.gpu_check`.

    python benchmarks/gpu/bare.py --collect     # where there is a network: download wheels to benchmarks/gpu/wheels
    python benchmarks/gpu/bare.py               # there: install what is missing from them, and build the extension

Imports nothing but the standard library. It says in one line each what it did, and ends with 1 if something is missing.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
WHEELS = Path(__file__).parent / "wheels"
NEEDED = ("torch", "triton", "transformers", "accelerate", "numpy", "msgspec", "rich", "tyro", "llguidance")
"""Modules that gpu_check imports; torch and triton have to be there."""
WITHOUT_TORCH = ("transformers", "numpy", "msgspec", "rich", "tyro", "llguidance", "psutil", "setuptools", "wheel")
"""Packages that bring what they need; accelerate, the other one, would bring torch."""
MOST_SECONDS = 600.0
BUILD = ("setup.py", "build_ext", "--inplace", "--parallel", str(os.cpu_count() or 1))


def run(*words: str) -> bool:
    """True if a Python command worked; its last line is shown otherwise."""
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=MOST_SECONDS)
    if done.returncode:
        print(f"failed: python {' '.join(words)[:100]}: {(done.stderr.strip().splitlines() or [''])[-1]}")
    return done.returncode == 0


def main(collects: bool) -> int:
    """Collect wheels, or install and build; returns the exit code."""
    if collects:
        download = ("-m", "pip", "download", "-q", "-d", str(WHEELS))
        return 0 if run(*download, *WITHOUT_TORCH) and run(*download, "--no-deps", "accelerate") else 1
    for name in NEEDED:
        if importlib.util.find_spec(name) is None:
            where = ["--no-index", "--find-links", str(WHEELS)] if WHEELS.is_dir() else []
            print(f"{name}: {'installed' if run('-m', 'pip', 'install', '-q', *where, name) else 'missing'}")
    if not run("-c", "import lpr.native as it; assert it.is_native"):
        print(f"extension: {'built' if run(*BUILD) else 'missing: its Python form is slow'}")
    return 0 if run("-c", "import benchmarks.gpu_check") else 1


if __name__ == "__main__":
    sys.exit(main("--collect" in sys.argv[1:]))
