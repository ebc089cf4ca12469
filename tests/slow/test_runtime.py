"""The long tests of tests/dist/test_runtime.py."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.dist.test_runtime import VARIABLES
from tests.fakes.models import tiny_model
from tests.fakes.paths import ROOT
from tests.fakes.quick_scripts import torchrun_path
from tests.fakes.torchrun import (
    FORKED,
    JOB,
    LONG,
    PROGRAM,
    TORCHRUN,
    alone,
    many,
    prompts,
    rows,
    run,
    start,
    state,
    wait_for,
    workers,
)


def test_two_agents_on_loopback(prompts: Path, tmp_path: Path, torchrun_path: str) -> None:
    """launch/many_machines.sh as two machines would run it."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "HEAD": f"localhost:{port}", "NNODES": "2", "NPROC": "1", "PATH": torchrun_path}
    target = tmp_path / "out.jsonl"
    command = ["launch/many_machines.sh", "--prompts", str(prompts), "--output", str(target), *JOB]
    numbered = [env | {"NODE_RANK": number} for number in ("1", "0")]
    agents = [subprocess.Popen(command, cwd=ROOT, env=each, stderr=subprocess.PIPE, text=True) for each in numbered]
    try:
        errors = [agent.communicate(timeout=240)[1] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], errors
    assert [row["token_ids"] for row in rows(target)] == [row["token_ids"] for row in alone(prompts, "0")]


@pytest.mark.timeout(900)
def test_a_restarted_job_resumes(many: Path, tmp_path: Path) -> None:
    undisturbed, target = tmp_path / "undisturbed.jsonl", tmp_path / "out.jsonl"
    done = run([*FORKED, "2", "lpr.generate", "--prompts", str(many), "--output", str(undisturbed), *LONG])
    assert done.returncode == 0, done.stderr
    agent = start(2, 2, many, target, [*LONG, "--json"])
    try:
        wait_for(lambda: target.exists() and target.read_bytes().count(b"\n") >= 3)
        first = workers(agent)
        os.kill(first[1], signal.SIGKILL)
        wait_for(lambda: len(workers(agent)) == 2 and not set(workers(agent)) & set(first))
        at_restart = target.read_bytes()
        out, err = agent.communicate(timeout=240)
    finally:
        agent.kill()
    assert agent.returncode == 0, err
    assert target.read_bytes() == undisturbed.read_bytes()
    kept = json.loads(out.splitlines()[-1])["kept_from_earlier_attempt"]
    assert kept == at_restart.count(b"\n") >= 3, "finished prompts are not repeated"


def test_one_rank_cannot_load_the_model(tmp_path: Path) -> None:
    """The same path on both ranks, but readable on one only: each machine has its own disk."""
    model = tmp_path / "model"
    tiny_model().save_pretrained(model)
    program = tmp_path / "program.py"
    program.write_text(
        "import lpr.model.loader as loader, os\n"
        "exists = loader.Path.is_dir\n"
        "loader.Path.is_dir = lambda self: exists(self) and not (os.environ['RANK'] == '1' and 'model' in self.name)\n"
        + PROGRAM.format(arguments=f"['--model', {str(model)!r}]")
    )
    done = run([*FORKED, "2", str(program)])
    assert done.returncode == 2
    assert done.stderr.count("lpr.generate: error: rank 1: model folder") == 1


def test_bad_input_under_torchrun_is_one_message() -> None:
    done = run([*TORCHRUN, "--nproc_per_node=2", "-m", "lpr.generate", "--model", "/no/such/model"])
    assert done.returncode != 0
    assert done.stderr.count("lpr.generate: error: rank 0: model folder") == 1
    assert "exitcode  : 2" in done.stderr
    assert "[rank" not in done.stderr and done.stderr.count("Traceback") <= 1, "torchrun's own, none of the ranks'"


def test_ranks_that_differ(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(arguments="['--trie-nodes', str(16 + rank)]"))
    done = run([*FORKED, "2", str(program)])
    assert done.returncode == 2
    assert done.stderr.count("lpr.generate: error: rank 1 has another set of arguments than rank 0") == 1


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        env = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
        done = run([sys.executable, "-m", "lpr.generate", "--timeout", "5"], env={**env, "MASTER_PORT": port})
    assert done.returncode == 2
    assert "lpr.generate: error: rank 0 of 2 cannot join the others" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_killed_rank_ends_the_job(many: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    agent = start(2, 0, many, target, LONG)
    try:
        wait_for(lambda: target.exists() and target.read_bytes().count(b"\n") >= 2)
        ranks = workers(agent)
        os.kill(ranks[1], signal.SIGKILL)
        killed = time.monotonic()
        wait_for(lambda: not Path(f"/proc/{ranks[0]}").exists() or b"Z" in state(ranks[0]), 10)
        assert time.monotonic() - killed < 10
        _, err = agent.communicate(timeout=300)
    finally:
        agent.kill()
    assert agent.returncode != 0
    assert all(len(row["token_ids"]) == 80 or row["finish_reason"] == "stop" for row in rows(target))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("launcher", "temperature", "more"),
    [
        ([*TORCHRUN, "--nproc_per_node=2", "lpr.generate"], "0.8", ["--max-batch-size", "4"]),
        ([*FORKED, "3", "lpr.generate"], "0", ["--ngram-size", "3"]),
        ([*FORKED, "2", "lpr.generate"], "0.8", ["--draft-ranks", "1"]),
    ],
    ids=["torchrun", "three", "draft rank"],
)
def test_the_same_text_as_one_process(
    prompts: Path, tmp_path: Path, launcher: list[str], temperature: str, more: list[str]
) -> None:
    target = tmp_path / "out.jsonl"
    done = run([*launcher, "--prompts", str(prompts), "--output", str(target),
                "--temperature", temperature, "--json", *JOB, *more])  # fmt: skip
    assert done.returncode == 0, done.stderr
    found, expected = rows(target), alone(prompts, temperature)
    assert [row["token_ids"] for row in found] == [row["token_ids"] for row in expected]
    assert [row["text"] for row in found] == [row["text"] for row in expected]
    assert {row["world_size"] for row in found} == {3 if "--ngram-size" in more else 2}
    assert len(done.stdout.splitlines()) == 1, "only rank 0 prints"
    report = json.loads(done.stdout)
    assert report["payload_bytes_per_step"] > 0 and ("copy" in report["sources"]) == ("--draft-ranks" in more)


def test_half_of_a_launchers_environment_is_one_line_and_code_2() -> None:
    env = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    for command in ("lpr.generate", "lpr.serve"):
        left = {"RANK": "two", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
        done = run([sys.executable, "-m", command], env={**env, **left})
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert done.stderr.strip().splitlines()[-1].startswith(f"{command}: error: RANK must be a whole number")
