"""The long tests of tests/engine/test_engine.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import lpr
from lpr import Engine, InputError
from tests.engine.test_engine import REVISIONS, save
from tests.fakes.models import tiny_model
from tests.fakes.paths import ROOT


def test_a_revision_is_that_of_weights_and_tokenizer(tmp_path: Path) -> None:
    """Two commits of a hub's model in its cache, and no network."""
    cache = tmp_path / "hub" / "models--org--name"
    sums = {}
    for seed, commit in enumerate(("a" * 40, "b" * 40)):
        folder = save(tiny_model(seed=seed), cache / "snapshots" / commit)
        sums[commit[0]] = next(tiny_model(seed=seed).parameters()).sum().item()
        tokenizer = AutoTokenizer.from_pretrained(lpr.bundled_model())
        tokenizer.add_tokens([f"<{number}>" for number in range(seed)])
        tokenizer.save_pretrained(folder)
        name = ("main", "v1")[seed]
        (cache / "refs").mkdir(exist_ok=True)
        (cache / "refs" / name).write_text(commit)
    length = len(AutoTokenizer.from_pretrained(lpr.bundled_model()))
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("HF_HUB_CACHE", None)
    command = [sys.executable, "-c", REVISIONS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    *loaded, unknown = json.loads(done.stdout.splitlines()[-1])
    first, second = [pytest.approx(sums["a"]), length], [pytest.approx(sums["b"]), length + 1]
    assert loaded == [first, first, second, second] and first != second
    assert unknown.startswith("cannot load a model from 'org/name'") and "\n" not in unknown
    with pytest.raises(InputError, match="only models of the hub have revisions"):
        Engine.from_pretrained(lpr.bundled_model(), revision="main")
