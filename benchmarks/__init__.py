"""Programs that measure lpr; each prints one JSON line last. Their further packages are in the extra `bench`."""

import os
import sys
from types import TracebackType

EXTRA = ("httpx", "matplotlib", "psutil", "pyarrow")  # packages of that extra, by import name


def _report_missing_package(kind: type[BaseException], failure: BaseException, trace: TracebackType | None) -> None:
    """One line instead of a traceback: programs import these packages before they parse options."""
    if not isinstance(failure, ModuleNotFoundError) or failure.name not in EXTRA:
        sys.__excepthook__(kind, failure, trace)
        return
    print(f"benchmarks: the package {failure.name} is missing: pip install -e '.[bench]'", file=sys.stderr, flush=True)
    os._exit(2)


sys.excepthook = _report_missing_package
