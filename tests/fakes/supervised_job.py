"""A supervised job of real processes, for tests that kill its ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lpr
from tests.fakes.paths import ROOT
from tests.fakes.quick_start import is_forker
from tests.fakes.supervised_worker import PROMPTS

PATIENCE = 150.0
"""Seconds for what takes 10 on a machine with nothing else to do: three processes load on two cores."""


@contextmanager
def supervised(folder: Path, *command: str) -> Iterator[subprocess.Popen[str]]:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "lpr.dist.supervisor", *command],
        cwd=ROOT, env=variables, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=30)


def children(pid: int) -> list[int]:
    """Processes that a process has started and that live, but for the one that forks for it."""
    try:
        found = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
        return [int(each) for words in found for each in words if not is_forker(each)]
    except OSError:
        return []


def await_fact(folder: Path, found: Callable[[dict[str, Any]], bool], after: float = 0.0) -> dict[str, Any]:
    """The first line of a job's log with what is looked for."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        path = folder / "log"
        for line in path.read_text().splitlines() if path.exists() else ():
            fact = json.loads(line) if line.endswith("}") else {"at": 0.0}
            if fact["at"] > after and found(fact):
                return fact
        time.sleep(0.02)
    raise AssertionError(f"not in {PATIENCE} s: {path.read_text() if path.exists() else 'no log'}")


def number_of(pid: int) -> int:
    """The number of a process among all ranks that its job ever had; -1 of another process."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return -1
    return next((int(word[5:]) for word in words if word.startswith(b"RANK=")), -1)


def place_of(pid: int) -> tuple[int, int]:
    """Replica and rank in it of a process of a job with two ranks to a replica."""
    return divmod(number_of(pid), 2)


def check_outputs(folder: Path) -> None:
    """The job's ids are those of a single engine."""
    engine = lpr.Engine.from_pretrained(
        lpr.bundled_model(), lpr.DecodeConfig(window_size=0, trie_nodes=8, max_batch_size=2), device="cpu"
    )
    params = [
        lpr.SamplingParams(max_new_tokens=80, temperature=0.8 if n % 2 else 0.0, seed=n, ignore_eos=True)
        for n in range(len(PROMPTS))
    ]
    expected = [each.token_ids for each in engine.generate(PROMPTS, params)]
    assert [json.loads((folder / f"{n}.out").read_text()) for n in range(len(PROMPTS))] == expected
