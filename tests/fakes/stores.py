"""Where tests of shared drafts get their redis-server, and how they wait for what other threads do."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import time
from collections.abc import Callable

import pytest

HAS_SERVER = pytest.mark.skipif(
    shutil.which("redis-server") is None or importlib.util.find_spec("redis") is None,
    reason="needs redis-server (Debian's package of that name) and pip install 'lpr[fleet]'",
)
WAIT = 30.0
"""Seconds that a loaded machine may take for what takes milliseconds."""


def until(is_so: Callable[[], object], what: str, seconds: float = WAIT) -> None:
    """Wait until `is_so`, at most `seconds`; an exception counts as no."""
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(Exception):
            if is_so():
                return
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.01)
