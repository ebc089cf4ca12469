"""Programs that measure lpr; each prints one JSON line last. What they need beyond lpr is in the extra `bench`."""

import os
import sys
from types import TracebackType

EXTRA = ("httpx", "matplotlib", "psutil", "pyarrow")
"""Packages of that extra, as they are imported."""


def _say_what_is_missing(kind: type[BaseException], failure: BaseException, trace: TracebackType | None) -> None:
    """Instead of a traceback: programs import these packages first of all, before anybody can ask for them."""
    if not isinstance(failure, ModuleNotFoundError) or failure.name not in EXTRA:
        sys.__excepthook__(kind, failure, trace)
        return
    print(f"benchmarks: the package {failure.name} is missing: pip install -e '.[bench]'", file=sys.stderr, flush=True)
    os._exit(2)


sys.excepthook = _say_what_is_missing
