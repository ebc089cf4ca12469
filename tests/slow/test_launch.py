"""The long tests of tests/project/test_launch.py."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from lpr.dist.places import INTERFACES
from tests.dist.test_private_store import LOOPBACK
from tests.fakes.paths import ROOT
from tests.fakes.quick_scripts import torchrun_path
from tests.project.test_launch import (
    JOB,
    KEY,
    LAUNCH,
    TINY,
    WANTED,
    ask,
    documents,
    end_groups,
    ended,
    free_port,
    listening_of,
    on_path,
    slurm,
    templates,
)


def test_a_set_of_two_machines_serves(torchrun_path: str) -> None:
    """The manifest's own commands, as Kubernetes would start them, for two machines that are both this one."""
    (found,) = documents(LAUNCH / "k8s/leaderworkerset_two_machines.yaml")
    port, store = free_port(), free_port()
    ours = {"--master-port": store, "--nproc-per-node": 1, "--lp": 2, "--tp": 1, "--port": port, "--model": None}
    processes = []
    try:
        for machine, template in enumerate(templates(found)):
            box = template["spec"]["containers"][0]
            values = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": str(machine), "LWS_LEADER_ADDRESS": "127.0.0.1"}
            words = box["args"]
            for name, value in values.items():
                words = [each.replace(f"$({name})", value) for each in words]
            words = [each for each in words if ours.get(each.split("=")[0], 0) is not None]
            words = [f"{name}={ours[name]}" if (name := each.split("=")[0]) in ours else each for each in words]
            command = [*box["command"], *words, *TINY]
            env = on_path() | {"PATH": torchrun_path, "LPR_API_KEY": KEY, **dict.fromkeys(INTERFACES, "lo")}
            processes.append(subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True))
        assert ask(port, processes)["usage"]["completion_tokens"] > 0
        assert httpx.get(f"http://127.0.0.1:{port}/readyz").json()["ranks"]["present"] == 2
        for each in processes:  # as when the pods are deleted
            each.terminate()
        ended(processes)
    finally:
        end_groups(processes)


def test_the_slurm_script_serves(slurm: dict[str, str], tmp_path: Path, torchrun_path: str) -> None:
    """On two machines, whose tasks are started here."""
    port = free_port() % 20000 + 20000
    env = slurm | {"SLURM_JOB_NUM_NODES": "2", "PORT": str(port - 3), "PATH": f"{tmp_path}:{torchrun_path}"}
    command = [LAUNCH / "slurm_serve.sh", "--lp", "2", *TINY]
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"lpr.serve: http://127.0.0.1:{port}\n".encode()
            assert ask(port, [process])["usage"]["completion_tokens"] > 0
            process.terminate()
            ended([process])
        finally:
            end_groups([process])


def test_a_slurm_job_meets_by_its_numbers(slurm: dict[str, str], tmp_path: Path, torchrun_path: str) -> None:
    env = slurm | {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": str(free_port()), "SLURM_SUBMIT_DIR": str(ROOT)}
    env["PATH"] = f"{tmp_path}:{torchrun_path}"
    done = subprocess.run([LAUNCH / "slurm.sh", *JOB], cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["token_ids"]) == 8


@pytest.mark.timeout(900)
def test_the_ray_application_serves_grows_and_survives() -> None:
    """Ray is started here; tests/fakes/ray_application.py says what is done with it."""
    pytest.importorskip("ray.serve", reason=WANTED)
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "fakes" / "ray_application.py"],
        cwd=ROOT,
        env=on_path() | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["text"] and found["streamed"] == found["afterwards"] == found["on_two_machines"] == found["text"]
    assert found["refused"] == 400 and found["at_the_start"] == 1
    assert found["under_load"] == [200] and found["through_the_kill"] == [200] * 16
    assert found["streams_that_went_on"] == [True] * 6
    assert len(found["by_prefix"]) == 1, "prompts that begin alike have gone to several meshes"
    assert found["mesh"] == {"lp": 2, "tp": 1}


def test_one_machine_listens_at_one_port_beside_loopback(tmp_path: Path) -> None:
    """The store of torchrun, as torch binds it to all interfaces."""
    port = free_port()
    prompts = tmp_path / "in.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": "def f(x):"}) + "\n" for _ in range(200)))
    files = [f"--prompts={prompts}", f"--output={tmp_path / 'out.jsonl'}", "--max-new-tokens=200", *TINY[2:]]
    env = on_path() | {"PORT": str(port), "NPROC": "2"}
    process = subprocess.Popen([LAUNCH / "one_machine.sh", *files], cwd=ROOT, env=env, start_new_session=True)
    try:
        end = time.monotonic() + 120
        while not (tmp_path / "out.jsonl").exists() or not (tmp_path / "out.jsonl").stat().st_size:
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.05)
        outside = {name for name in listening_of([process]) if name.split(":")[0] not in LOOPBACK}
        assert {int(name.split(":")[1], 16) for name in outside} == {port}
    finally:
        end_groups([process])
