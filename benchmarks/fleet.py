"""Strong scaling in wall-clock time: real ranks on meshes of lp x tp, with tokens checked against plain decoding.

    python -m benchmarks.fleet --data classeval.jsonl --meshes 1x1 2x1 1x2 --output benchmarks/results/fleet.json

A run is the command `torchrun -m lpr.generate`, and its time is that command's own: all prompts one after the other,
with their first steps, without process start and model loading. Per data set and temperature there are plain decoding
on one process (1x1) and on every tensor-parallel size of the meshes (1xT), and lookahead on every mesh with every node
budget per rank, half of it for the Jacobi window and its pool.

Speed-ups are relative to plain decoding on one process. Tokens are compared with plain decoding of the same tp, as a
sum split over ranks differs in its last bits; in half precision so does a GEMM with other rows, so only --dtype float32
promises equality. A run that emits other tokens, fails or times out is recorded as failed, without a speed-up; the rest
goes on, and the exit code is 1.

A rank has one CPU thread by default, so that on a CPU more ranks are more hardware. benchmarks.strong_scaling counts
the steps of more ranks than a machine has.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from benchmarks.common import ManyDataOptions, Whole, progress, run_main
from benchmarks.data import load_prompts, template_of
from benchmarks.engines import split_budget
from benchmarks.processes.launch import LAUNCHER, RunFailedError, execute
from lpr.config import InputError

PLAIN = "autoregressive"
SMALLEST_BUDGET = 16
"""Fewest nodes per rank that hold both a window and a draft from the index."""


@dataclass(frozen=True, kw_only=True)
class FleetOptions(ManyDataOptions):
    """Wall clock of real ranks on meshes lp x tp."""

    threads: Whole = 1
    """CPU threads of a rank; 0 leaves torch's default."""
    meshes: tuple[str, ...] = ("1x1", "2x1", "1x2")
    """Meshes LPxTP, such as 4x2."""
    budgets: tuple[str, ...] = ("32", "64", "auto")
    """Nodes per rank, or auto."""
    temperatures: tuple[float, ...] = (0.0, 0.8)
    """Temperatures."""
    tp_backend: Literal["transformers", "deepspeed"] = "transformers"
    """Tensor-parallel backend."""
    repeats: Whole = 1
    """Runs of each case; medians count."""
    timeout: float = 900.0
    """Seconds for one run."""


@dataclass(frozen=True)
class Case:
    """A data set at a temperature on a mesh, with a node budget per rank."""

    data: str
    temperature: float
    lp: int
    tp: int
    budget: int | str
    """Nodes per rank, "auto" or PLAIN."""

    @property
    def baseline(self) -> Case:
        """Plain decoding with the same tp, whose tokens must be equal."""
        return Case(self.data, self.temperature, 1, self.tp, PLAIN)

    @property
    def reference(self) -> Case:
        """Plain decoding on one process, the base of the speed-up."""
        return Case(self.data, self.temperature, 1, 1, PLAIN)

    @property
    def flags(self) -> list[str]:
        """The budget as flags of lpr.generate."""
        if self.budget == "auto":
            return []
        if self.budget == PLAIN:
            return ["--window-size", "0", "--trie-nodes", "0"]
        sizes = split_budget("both", int(self.budget))
        names = ("window_size", "guess_set_size", "trie_nodes")
        return [word for name in names for word in ("--" + name.replace("_", "-"), str(getattr(sizes, name)))]


@dataclass
class Run:
    """One run of a case: the report and output of lpr.generate, or its failure."""

    summary: dict[str, Any] = field(default_factory=dict)
    token_ids: list[list[int]] = field(default_factory=list)
    error: str | None = None


def mesh(text: str) -> tuple[int, int]:
    """The sizes (lp, tp) of a mesh such as 4x2; raises InputError."""
    sizes = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if sizes is None:
        raise InputError(f"--meshes {text} is not like 4x2")
    return int(sizes[1]), int(sizes[2])


def budget(text: str) -> int | str:
    """A node budget per rank; raises InputError."""
    if text == "auto":
        return text
    if not text.isdigit() or int(text) < SMALLEST_BUDGET:
        raise InputError(f"--budgets {text} is neither auto nor at least {SMALLEST_BUDGET}")
    return int(text)


def plan(
    data: Sequence[str], temperatures: Sequence[float], meshes: Sequence[tuple[int, int]], budgets: Sequence[int | str]
) -> list[Case]:
    """All cases, each once, plain decoding before the cases that are compared with it."""
    cases: list[Case] = []
    for path in data:
        for temperature in temperatures:
            sizes = sorted({1, *(tp for _, tp in meshes)})
            cases += [Case(path, temperature, 1, tp, PLAIN) for tp in sizes]
            cases += [Case(path, temperature, lp, tp, each) for lp, tp in meshes for each in budgets]
    return list(dict.fromkeys(cases))


def attempt(case: Case, options: FleetOptions, num_prompts: int, folder: Path, prompts: Path) -> Run:
    """Run `case` once, in processes of its own."""
    output = folder / "output.jsonl"
    output.unlink(missing_ok=True)
    command = [*LAUNCHER, f"--nproc_per_node={case.lp * case.tp}", "-m", "lpr.generate", "--tp", str(case.tp)]
    command += ["--prompts", str(prompts), "--output", str(output), "--json", "--max-batch-size", "1", *case.flags]
    command += ["--temperature", str(case.temperature), "--max-new-tokens", str(options.max_new_tokens)]
    command += ["--dtype", options.dtype, "--tp-backend", options.tp_backend]
    command += ["--exact"] if options.exact else []
    for name in ("model", "device"):
        if getattr(options, name) is not None:
            command += [f"--{name}", getattr(options, name)]
    try:
        summary = json.loads(execute(command, options.timeout, options.threads, folder).splitlines()[-1])
        rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
        if len(rows) != num_prompts or (summary["mesh"]["lp"], summary["mesh"]["tp"]) != (case.lp, case.tp):
            raise RunFailedError(f"{len(rows)} of {num_prompts} completions came, from a mesh of {summary['mesh']}")
        return Run(summary, [row["token_ids"] for row in rows])
    except RunFailedError as failure:
        return Run(error=str(failure))
    except (OSError, ValueError, LookupError) as failure:
        return Run(error=f"the output cannot be read: {type(failure).__name__}: {failure}")


def judge(case: Case, runs: Mapping[Case, Sequence[Run]]) -> dict[str, Any]:
    """The record of a case: figures, and whether its tokens equal those of plain decoding."""
    mine, expected = runs[case], runs[case.baseline][0]
    record: dict[str, Any] = {
        "data": case.data.rsplit("/", 1)[-1],
        "temperature": case.temperature,
        "mesh": f"{case.lp}x{case.tp}",
        "num_ranks": case.lp * case.tp,
        "budget_per_rank": case.budget,
        "error": next((run.error for run in mine if run.error is not None), None),
        "equal_to_autoregressive": None,
    }
    if record["error"] is not None:
        return record
    record |= figures(mine)
    if expected.error is None:
        wrong = [sum(a != b for a, b in zip(run.token_ids, expected.token_ids, strict=True)) for run in mine]
        record["equal_to_autoregressive"] = not any(wrong)
        if any(wrong):
            record["error"] = f"{max(wrong)} of {len(expected.token_ids)} prompts got other tokens than 1x{case.tp} AR"
            return record
        plain = figures(runs[case.baseline])["tokens_per_second"]
        record["part_of_ceiling"] = round(record["tokens_per_second"] / (plain * record["tokens_per_step"]), 3)
    if runs[case.reference][0].error is None:
        plain = figures(runs[case.reference])["tokens_per_second"]
        record["speedup_over_autoregressive"] = round(record["tokens_per_second"] / plain, 3)
    return record


def figures(runs: Sequence[Run]) -> dict[str, Any]:
    """Medians over the successful runs, which differ only in times and in steps that follow from times."""
    found = [run.summary for run in runs if run.error is None]
    seconds = statistics.median(each["seconds"] for each in found)
    num_tokens = statistics.median(each["num_tokens"] for each in found)
    num_steps = statistics.median(each["num_steps"] for each in found)
    return {
        "seconds": seconds,
        "seconds_of_each": [each["seconds"] for each in found],
        "num_tokens": num_tokens,
        "num_steps": num_steps,
        "tokens_per_step": round(num_tokens / num_steps, 4),
        "tokens_per_second": round(num_tokens / seconds, 2),
        "ms_per_step": round(1e3 * seconds / num_steps, 3),
        "payload_bytes_per_rank": found[0]["payload_bytes_per_step"],
    }


def measure(options: FleetOptions, console: Console) -> dict[str, Any]:
    """Run every case, in rounds, so that a drift of the machine's speed meets all alike."""
    if not options.repeats:
        raise InputError("--repeats 0 must be at least 1")
    meshes, budgets = [mesh(each) for each in options.meshes], [budget(each) for each in options.budgets]
    prompts = {path: load_prompts(path, options.prompts, template_of(options)) for path in options.data}
    cases = plan(options.data, options.temperatures, meshes, budgets)
    console.print("ceiling: tokens/s of plain decoding with the same tp, times tokens per step, if no step took longer")
    runs: dict[Case, list[Run]] = {case: [] for case in cases}
    total = options.repeats * len(cases)
    with tempfile.TemporaryDirectory(prefix="lpr-fleet-") as name, progress(console, total) as advance:
        folder = Path(name)
        for _ in range(options.repeats):
            for case in cases:
                advance(0, f"{case.lp}x{case.tp} {case.budget}, temperature {case.temperature}")
                lines = folder / "prompts.jsonl"
                lines.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts[case.data]))
                runs[case].append(attempt(case, options, len(prompts[case.data]), folder, lines))
                advance()
    found = [judge(case, runs) for case in cases]
    for each in found:
        if each["error"] is not None:
            line = f"failed: {each['mesh']} {each['budget_per_rank']}: {each['error']}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    return {
        "num_prompts": {path.rsplit("/", 1)[-1]: len(each) for path, each in prompts.items()},
        "max_new_tokens": options.max_new_tokens,
        "tp_backend": options.tp_backend,
        "num_failed": sum(record["error"] is not None for record in found),
        "runs": found,
    }


def main() -> int:
    """Run the command line; returns the exit code."""
    return run_main("fleet", FleetOptions, measure)


if __name__ == "__main__":
    sys.exit(main())
