"""Real processes under torchrun, on gloo: few, as each start costs seconds."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest

from lpr.cli.generate import main
from tests.cli.test_generate import write_prompts
from tests.fakes.paths import ROOT
from tests.fakes.prompts import PROMPTS

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
FORKED = [sys.executable, str(ROOT / "tests/fakes/forked_ranks.py")]
"""Takes the number of ranks and a program, for tests that are not about torchrun."""
JOB = ["--max-new-tokens", "40", "--trie-nodes", "16", "--window-size", "5", "--max-batch-size", "1"]


def run(command: list[str], timeout: float = 240, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, **more)  # type: ignore[call-overload]


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("in") / "in.jsonl", PROMPTS[:6])


@cache
def alone(prompts: Path, temperature: str) -> list[dict[str, object]]:
    """What this process writes."""
    target = prompts.with_name(f"alone at {temperature}.jsonl")
    assert main(["--prompts", str(prompts), "--output", str(target), "--temperature", temperature, *JOB]) == 0
    return rows(target)


def workers(agent: subprocess.Popen[str]) -> list[int]:
    """Process ids of an agent's workers, in the order of their start."""
    found = []
    for child in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split():
        with contextlib.suppress(FileNotFoundError):  # it has ended meanwhile
            if b"lpr.generate" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
    return found


def wait_for(condition, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


def start(num_ranks: int, restarts: int, prompts: Path, target: Path, more: list[str]) -> subprocess.Popen[str]:
    command = [*TORCHRUN, f"--nproc_per_node={num_ranks}", f"--max-restarts={restarts}", "-m", "lpr.generate",
               "--prompts", str(prompts), "--output", str(target), *more]  # fmt: skip
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


LONG = ["--max-new-tokens", "80", "--trie-nodes", "8", "--window-size", "3", "--max-batch-size", "1"]
LONG += ["--home-ranks", "0"]  # one after the other on all ranks, so that outputs come in the same order


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("many") / "in.jsonl", PROMPTS[:9])


def state(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1][:3]
    except FileNotFoundError:
        return b"Z"


PROGRAM = """
import os, sys
from lpr.cli.generate import main
from lpr.dist.runtime import leave
rank = int(os.environ["RANK"])
arguments = {arguments}
leave(main(arguments))
"""
