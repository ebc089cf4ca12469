"""The long tests of tests/planner/test_footprint.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from lpr.planner.footprint import kv_token_bytes, weight_bytes
from tests.fakes.again import again
from tests.fakes.paths import ROOT
from tests.planner import test_footprint as fast
from tests.planner.test_footprint import FAMILIES, tiny_facts

test_presets_have_the_published_parameters = again(
    fast.test_presets_have_the_published_parameters, "name", fast.PUBLISHED, without=fast.SMALL
)


def test_shards_are_those_of_transformers() -> None:
    """Parameters, K/V and collectives of five families on two and four ranks, as transformers itself shards them."""
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests" / "fakes" / "sharded.py"), "2,4", *FAMILIES]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [(row["tp"], row["model_type"]) for row in rows] == [(tp, name) for tp in (2, 4) for name in FAMILIES]
    for row in rows:
        facts = tiny_facts(row["model_type"])
        counts = {"all_reduce": 0, "all_gather": 0}
        for collective in facts.collectives:
            counts[collective.kind] += collective.count
        assert weight_bytes(facts, row["tp"], 1) == row["numel"], row
        assert kv_token_bytes(facts, row["tp"], 1) == row["kv_values"], row
        assert counts == {kind: row[kind] for kind in counts}, row
