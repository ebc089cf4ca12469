"""The sections of benchmarks.gpu_check for several GPUs: ranks of a mesh, their gather, and one that is killed."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import parts
from benchmarks.processes.launch import LAUNCHER, ROOT, RunFailedError, execute, last_line, stop
from lpr import DecodeConfig, SamplingParams
from lpr.dist.comm import Comm
from lpr.dist.runtime import World, join
from tests.fakes.prompts import PROMPTS

GATHERED_WORDS = (64, 1024, 16384)
"""Payloads of a timed gather, in int32 words: those of a token each, of a tree, and of a batch of trees."""
NUM_GATHERS = 50
KILLED_TOKENS = 256


def ranks(
    num_ranks: int, sizes: parts.Sizes, expected: dict[str, Any] | None, seconds: float, tp: int = 1
) -> dict[str, Any]:
    """Ids of several ranks against those of plain decoding: by NCCL with a GPU each, by gloo where they share one."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "ids.json"
        worker = ["-m", "benchmarks.gpu_check", "--worker", str(target), "--device", sizes.device.type, "--tp", str(tp)]
        began = time.perf_counter()
        tiny = ["--tiny"] if "tiny" in sizes.models else []
        execute([*LAUNCHER, f"--nproc_per_node={num_ranks}", *worker, *tiny], seconds)
        record = json.loads(target.read_text())
    record["seconds_with_start"] = round(time.perf_counter() - began, 2)
    found = record.pop("ids")
    if expected is not None:
        record["equal_to_cpu"] = {
            name: sum(mine == theirs for mine, theirs in zip(found[name], expected[name], strict=True))
            for name in found
        }
    return record


def work_as_rank(target: Path, sizes: parts.Sizes, tp: int) -> int:
    """The program of each process of `ranks`: completes all prompts with the bundled model; rank 0 writes the ids."""
    world = World.from_environment()
    device = world.device(sizes.device.type)
    with join(world, device, 120.0, tp) as comm:
        decode = DecodeConfig(window_size=5, trie_nodes=32, max_batch_size=4)
        engine = parts.bundled(decode, torch.device(device or "cpu"), comm=comm, dtype="float32")
        tokens = sizes.max_new_tokens
        sampled = SamplingParams(max_new_tokens=tokens, temperature=0.8, top_p=0.95, seed=7)
        kinds = {"greedy": SamplingParams(max_new_tokens=tokens), "seeded": sampled}
        began, ids, steps, ms = time.perf_counter(), {}, {}, {}
        for name, params in kinds.items():
            start = time.perf_counter()
            done = engine.generate(PROMPTS[: sizes.num_prompts], params)
            ids[name] = [each.token_ids for each in done]
            steps[name] = sum(each.stats.num_steps for each in done)
            ms[name] = round(1e3 * (time.perf_counter() - start) / max(each.stats.num_steps for each in done), 3)
        if comm.rank == 0:
            record = {"ids": ids, "steps": steps, "prompts": sizes.num_prompts, "num_ranks": comm.size}
            record |= {"ms_per_step": ms, "seconds": round(time.perf_counter() - began, 2)}
            record["graph_reason"] = engine.model.graph_reason
            record["captured"] = engine.model.num_captures
            record["mesh"] = f"lp {comm.size} x tp {comm.tp_size}"
        engine.close()
        gathers = gather_times(comm, torch.device(device or "cpu"))
        if comm.rank == 0 and comm.tp_rank == 0:
            target.write_text(json.dumps({**record, "gather_us": gathers}))
    return 0


def gather_times(comm: Comm, device: torch.device) -> dict[str, float]:
    """Median microseconds of a gather, of the payload on the device to what all ranks sent on the host, by words."""
    found = {}
    for words in GATHERED_WORDS:
        payload = torch.full((words,), comm.rank, dtype=torch.int32, device=device)
        times = []
        for _ in range(NUM_GATHERS):
            began = time.perf_counter()
            gathered = comm.gather(payload)
            times.append(time.perf_counter() - began)
            if gathered[:, 0].tolist() != list(range(comm.size)):
                raise RuntimeError(f"a gather of {words} words has mixed its ranks up")
        found[str(words)] = round(1e6 * statistics.median(times[5:]), 1)
    return found


def killed(num_ranks: int, sizes: parts.Sizes, seconds: float) -> dict[str, Any]:
    """A job of ranks that survive a loss, run without one, then with the last rank killed: texts and seconds."""
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS[: sizes.num_prompts]))
        texts: list[Any] = []
        record: dict[str, Any] = {"num_ranks": num_ranks, "prompts": sizes.num_prompts}
        for kills in (False, True):
            target = Path(folder) / f"out{kills:d}.jsonl"
            command = [sys.executable, "-m", "lpr.generate", "--survive", "--lp", str(num_ranks), "--prompts"]
            command += [str(prompts), "--output", str(target), "--device", sizes.device.type, "--dtype", "float32"]
            command += ["--max-new-tokens", str(KILLED_TOKENS), "--compile", "off", "--max-batch-size", "1"]
            began = time.perf_counter()
            found = run_and_kill(command, target if kills else None, seconds, Path(folder))
            record[f"seconds {'with' if kills else 'without'} a loss"] = round(time.perf_counter() - began, 2)
            record["killed"] = found
            texts.append([json.loads(line)["token_ids"] for line in target.read_text().splitlines()])
        record["same_ids"] = sum(one == other for one, other in zip(*texts, strict=True))
    return record


def run_and_kill(command: list[str], target: Path | None, seconds: float, folder: Path) -> int:
    """Run a supervisor to its end; kill its last rank once `target` has a line. Returns how many were killed."""
    until, num_killed, err = time.monotonic() + seconds, 0, folder / "stderr"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    with err.open("w") as err_file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=err_file, stderr=err_file, env=env)
        try:
            while process.poll() is None:
                if time.monotonic() > until:
                    raise RunFailedError(f"did not end within {seconds:g} s")
                if target is not None and not num_killed and target.exists() and target.stat().st_size:
                    os.kill(max(children(process.pid)), signal.SIGKILL)
                    num_killed += 1
                time.sleep(0.02)
        finally:
            stop(process)
    if process.returncode:
        raise RunFailedError(f"exit code {process.returncode}: {last_line(err.read_text(errors='replace'))}")
    return num_killed


def children(pid: int) -> list[int]:
    """The processes that a process has started, by Linux's /proc."""
    return [
        int(each) for task in Path(f"/proc/{pid}/task").iterdir() for each in (task / "children").read_text().split()
    ]
