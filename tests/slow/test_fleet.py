"""The long tests of tests/benchmarks/test_fleet.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import lpr
from benchmarks import fleet
from benchmarks.fleet import Case, attempt
from lpr import DecodeConfig, Engine, SamplingParams
from tests.fakes.prompts import PROMPTS


def test_a_real_fleet_emits_plain_decodings_tokens(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS[:2]))
    options = fleet.FleetOptions(data=("x",), max_new_tokens=12, timeout=200, dtype="float32")
    done = attempt(Case("x", 0.8, 2, 1, 32), options, 2, tmp_path, prompts)
    assert done.error is None
    engine = Engine.from_pretrained(lpr.bundled_model(), DecodeConfig.autoregressive())
    params = SamplingParams(max_new_tokens=12, temperature=0.8)
    assert done.token_ids == [each.token_ids for each in engine.generate(PROMPTS[:2], params)]
    assert done.summary["seconds"] > 0 and done.summary["payload_bytes_per_step"] > 0
