"""The long test of tests/serve/ranks/test_rank.py."""

from __future__ import annotations

import subprocess
import sys

IMPORTS = """
import gc
from lpr.serve.ranks.rank import bridge
before = sum(each["collections"] for each in gc.get_stats())
bridge()
print(sum(each["collections"] for each in gc.get_stats()) - before, gc.isenabled(), gc.get_freeze_count())
"""


def test_imports_are_not_searched_for_garbage() -> None:
    """Hundreds of collections would take a sixth of the time until a service is ready."""
    run = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=300, check=True)
    collections, is_enabled, num_frozen = run.stdout.split()
    assert int(collections) < 10 and is_enabled == "True" and int(num_frozen) > 100_000
