"""The sections of benchmarks.gpu_check for several GPUs: ranks of a mesh, and their gather."""

from __future__ import annotations

import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import parts
from lpr import DecodeConfig, SamplingParams
from lpr.dist.comm import Comm
from lpr.dist.runtime import World, join
from tests.fakes.prompts import PROMPTS

GATHERED_WORDS = (64, 1024, 16384)
"""Payloads of a timed gather, in int32 words: those of a token each, of a tree, and of a batch of trees."""
NUM_GATHERS = 50
ROOT, GRACE = Path(__file__).parents[2], 40.0


def ranks(
    num_ranks: int, sizes: parts.Sizes, expected: dict[str, Any] | None, seconds: float, tp: int = 1
) -> dict[str, Any]:
    """Ids of several ranks against those of plain decoding: by NCCL with a GPU each, by gloo where they share one."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "ids.json"
        worker = ["-m", "benchmarks.gpu_check", "--worker", str(target), "--device", sizes.device.type, "--tp", str(tp)]
        began = time.perf_counter()
        tiny = ["--tiny"] if "tiny" in sizes.models else []
        execute([f"--nproc_per_node={num_ranks}", *worker, *tiny], seconds, Path(folder) / "log")
        record = json.loads(target.read_text())
    record["seconds_with_start"] = round(time.perf_counter() - began, 2)
    found = record.pop("ids")
    if expected is not None:
        record["equal_to_cpu"] = {
            name: sum(mine == theirs for mine, theirs in zip(found[name], expected[name], strict=True))
            for name in found
        }
    return record


def execute(words: list[str], seconds: float, log: Path) -> None:
    """Run torchrun; raises RuntimeError with the most telling line of its output, or if it takes too long."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words]
    with log.open("w") as output:  # a file: a rank that outlives its launcher would hold a pipe open
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=ROOT)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # it ends its ranks, and gives them 30 s
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
            raise RuntimeError(f"did not end within {seconds:g} s") from None
        finally:
            process.kill()
            process.wait()
    if code:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip(" =-")]
        raised = [line for line in lines if re.match(r"(\[rank\d+\]: *)?[\w.]+(Error|Exception): ", line)]
        told = [line for line in raised if "ChildFailedError" not in line] or lines or ["nothing was printed"]
        raise RuntimeError(f"exit code {code}: {told[-1]}")


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
