"""Real processes under torchrun, on gloo: few, as each start costs seconds; the full matrix runs on threads."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest

from lpr.cli.generate import main
from lpr.config import InputError
from lpr.dist.runtime import World
from lpr.serve.ranks import socket_folder
from tests.cli.test_generate import write_prompts
from tests.fakes.paths import ROOT
from tests.fakes.prompts import PROMPTS

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
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


@pytest.mark.parametrize(
    ("num_ranks", "temperature", "module", "more"),
    [
        (2, "0.8", ["lpr.generate"], ["--max-batch-size", "4"]),
    ],
)
def test_the_same_text_as_one_process(
    prompts: Path, tmp_path: Path, num_ranks: int, temperature: str, module: list[str], more: list[str]
) -> None:
    target = tmp_path / "out.jsonl"
    done = run([*TORCHRUN, f"--nproc_per_node={num_ranks}", *module, "--prompts", str(prompts),
                "--output", str(target), "--temperature", temperature, "--json", *JOB, *more])  # fmt: skip
    assert done.returncode == 0, done.stderr
    found, expected = rows(target), alone(prompts, temperature)
    assert [row["token_ids"] for row in found] == [row["token_ids"] for row in expected]
    assert [row["text"] for row in found] == [row["text"] for row in expected]
    assert {row["world_size"] for row in found} == {num_ranks}
    assert len(done.stdout.splitlines()) == 1, "only rank 0 prints"
    assert json.loads(done.stdout)["payload_bytes_per_step"] > 0


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


VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.mark.parametrize(
    "left, wanted",
    [
        ({}, 1),
        ({"WORLD_SIZE": ""}, 1),
        ({"WORLD_SIZE": "two"}, 1),
        ({"WORLD_SIZE": "2"}, 1),
        ({"WORLD_SIZE": "4", "LOCAL_RANK": "3"}, 1),
        ({"WORLD_SIZE": "1", "RANK": "0"}, 1),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "x"}, 1),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, 2),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({"RANK": "1"}, "MASTER_ADDR"),
        ({"MASTER_ADDR": "a", "WORLD_SIZE": "2"}, "no RANK"),
        ({"RANK": "two", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "RANK must be a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "two", "MASTER_ADDR": "a"}, "WORLD_SIZE must be a whole number"),
        ({"RANK": "-1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "RANK must be a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "no rank of WORLD_SIZE 2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "x"}, "MASTER_PORT"),
    ],
)
def test_what_launchers_leave_behind(monkeypatch: pytest.MonkeyPatch, left: dict[str, str], wanted: int | str) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in left.items():
        monkeypatch.setenv(name, value)
    if isinstance(wanted, int):
        assert World.from_environment().size == wanted
        return
    with pytest.raises(InputError, match=wanted):
        World.from_environment()


def test_half_of_a_launchers_environment_is_one_line_and_code_2() -> None:
    env = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    for command in ("lpr.generate", "lpr.serve"):
        left = {"RANK": "two", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
        done = run([sys.executable, "-m", command], env={**env, **left})
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert done.stderr.strip().splitlines()[-1].startswith(f"{command}: error: RANK must be a whole number")


def test_a_long_temporary_folder_has_no_room_for_a_socket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for length, folder in ((20, None), (200, "/tmp")):
        monkeypatch.setattr("tempfile.tempdir", "/" + "t" * length)
        assert socket_folder() == folder
