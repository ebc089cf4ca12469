"""Correctness and speed of every GPU part, in one command and a few minutes.

    python -m benchmarks.gpu_check --minutes 8

Sections are independent: a failure is recorded with its reason and the rest goes on. On a GPU each has a budget of
seconds (BUDGETS): it begins only if that much is left, and is cut off when the budget is used up; the result names
skipped and cut sections. Results are written to benchmarks/results/gpu_check.json as they are measured, so that a
section that is cut keeps what it has; `python -m benchmarks.report` reads them.
A bare machine is made ready by benchmarks/gpu/bare.py.

Each model's table of step times, as `StepTimes.from_json` reads it, is also in
benchmarks/results/tn_<gpu>_<model>.json, for `--costs`.
`--device cpu --tiny` runs the same program on any machine, to test it.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from transformers import PreTrainedModel

import lpr.native
from benchmarks import recorded
from benchmarks.common import RESULTS, Flag, circumstances, read_options, reason, write_json
from benchmarks.gpu import models, parts, several
from lpr import InputError
from lpr.dist.runtime import leave
from lpr.model.rewrite.base import Setting, Stage
from lpr.model.rewrite.table import rewrite
from tests.fakes.prompts import PROMPTS

BUDGETS = {
    "environment": 5, "bandwidth": 5, "build": 35, "t(n)": 75, "recorded": 60, "copies": 25, "profile": 10,
    "kernels": 30, "correctness": 60, "exact": 60, "sampling": 20,
    "ranks": 40, "hybrid": 40,
}  # fmt: skip
"""Seconds of a section on a GPU, by its name or the part before a colon, with room: on an H200 `t(n)` took 37, and the
kernels' compilation most of `kernels` and `correctness`. On one GPU the sections
up to `sampling` fit in 8 minutes; those of several GPUs have 8 more; the others take the remaining time."""


@dataclass(frozen=True, kw_only=True)
class GpuCheckOptions:
    """Correctness and speed on a GPU, in minutes."""

    minutes: float = 8.0  # Begin no section after this time.
    several_minutes: float = 8.0  # Minutes more where there are several GPUs.
    device: Literal["cuda", "cpu"] = "cuda"  # Device.
    tiny: Flag = False  # Use tiny models, to test this program.
    sections: tuple[str, ...] = ()  # Run only these sections, such as t(n).
    output: Path = RESULTS / "gpu_check.json"  # File to write the results to.
    worker: Path | None = None  # Internal: be one rank of a section with several ranks, and write to this file.
    tp: int = 1  # Internal: tensor-parallel size of that rank's mesh.


class BudgetError(BaseException):
    """A section has used up its budget. Not an Exception, so that no fallback inside the section catches it."""


@contextmanager
def at_most(seconds: float | None) -> Iterator[None]:
    """Raise BudgetError in the main thread after so many seconds; None means never."""

    def ring(*_: object) -> None:
        raise BudgetError(f"cut off after its {seconds:g} s")

    if seconds is None:
        yield
        return
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Report:
    """Runs sections and records their results, failures, or lack of time."""

    def __init__(
        self, path: Path, minutes: float, only: Sequence[str], budgets: Mapping[str, float] | None = None
    ) -> None:
        """Results go to `path`; no section begins after `minutes`; `only` names the wanted sections, if any.

        `budgets` are the sections' seconds, as BUDGETS; without them a section has no limit.
        """
        self.path = path
        self.only = only
        self.budgets = budgets or {}
        self.began = time.perf_counter()
        self.deadline = self.began + 60 * minutes
        self.console = Console(stderr=True)
        self.sections: dict[str, Any] = {}

    @property
    def seconds_left(self) -> float:
        """Seconds until no section may begin."""
        return self.deadline - time.perf_counter()

    def extend(self, minutes: float) -> None:
        """Give the sections to come more time."""
        self.deadline += 60 * minutes

    def budget(self, name: str) -> float | None:
        """Seconds of a section; None means no limit."""
        return self.budgets.get(name, self.budgets.get(name.split(":")[0]))

    def run(self, name: str, section: Callable[[], dict[str, Any]]) -> Any:
        """The section's result, or None; a section does not begin if its budget exceeds the time left."""
        if self.only and name.split(":")[0] not in self.only:
            return None
        began, result, seconds = time.perf_counter(), None, self.budget(name)
        if self.seconds_left < (seconds or 0.0):
            left = max(0.0, self.seconds_left)
            record: dict[str, Any] = {"skipped": f"needs {seconds or 0:.0f} s, {left:.0f} s are left"}
        else:
            try:
                with at_most(seconds), parts.listened(partial(self._note, name)):
                    result = section()
                record = dict(result)
            except BudgetError as cut:
                record = {**self.sections.get(name, {}), "cut": str(cut)}
            except Exception as failure:  # a failed section is a result
                where = traceback.format_exc().strip().splitlines()[-12:]
                record = {**self.sections.get(name, {}), "failed": reason(failure), "traceback": where}
            record.pop("unfinished", None)
        record["seconds"] = round(time.perf_counter() - began, 2)
        self.sections[name] = record
        words = ("failed", "skipped", "cut")
        state = next((f"{word}: {record[word]}" for word in words if word in record), "done")
        self.console.print(f"{name}: {state} ({record['seconds']} s)", markup=False, highlight=False, soft_wrap=True)
        self.write()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return result

    def _note(self, name: str, result: dict[str, Any]) -> None:
        """Write what the running section `name` has measured so far."""
        self.sections[name] = {**result, "unfinished": True}
        self.write()

    def write(self) -> dict[str, Any]:
        """Write and return the results so far."""
        named = {
            f"{word}_sections": [name for name, record in self.sections.items() if word in record]
            for word in ("failed", "skipped", "cut")
        }
        record = {"benchmark": "gpu_check", **named, **circumstances(), "sections": self.sections}
        record["total_seconds"] = round(time.perf_counter() - self.began, 1)
        write_json(self.path, record)
        return record


def environment() -> dict[str, Any]:
    """The machine and the libraries."""
    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads()}
    found["core"] = "native" if lpr.native.is_native else "python"  # the latter drafts 15 times more slowly
    for name in ("triton", "deepspeed", "tyro", "rich"):
        found[name] = importlib.util.find_spec(name) is not None
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": properties.name,
            "num_gpus": torch.cuda.device_count(),
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "capability": [properties.major, properties.minor],
            "nccl": torch.distributed.is_nccl_available(),
        }
    return found


def write_table(folder: Path, gpu: str, name: str, times: dict[str, Any], sizes: parts.Sizes) -> dict[str, Any]:
    """The step times of a model as a table, also written to a file of its own."""
    form = "graphs" if any(row["form"] == "graphs" for row in times["rows"]) else "eager"
    rows = [row for row in times["rows"] if row["form"] == form]
    table = {
        "name": name,
        "nodes": rows[0]["nodes"],
        "rows": [{"batch": 1, "kv": row["kv"], "ms": row["ms"]} for row in rows],
        "source": f"measured by benchmarks.gpu_check on {gpu}: {name} with random weights in {sizes.dtype}, {form}, "
        f"torch {torch.__version__}",
    }
    path = folder / f"tn_{re.sub('[^a-z0-9]+', '-', gpu.lower())}_{name}.json"
    write_json(path, table)
    return table


def large_model(report: Report, name: str, sizes: parts.Sizes, bytes_per_s: float | None) -> None:
    """The sections of one model of a real shape; the first one also follows recorded text, drafts and is profiled."""
    held: dict[str, PreTrainedModel] = {}

    def build() -> dict[str, Any]:
        model = held["model"] = models.random_model(sizes.models[name], sizes)
        found = {"parameters": sum(weight.numel() for weight in model.parameters()), "by_module": models.checks(model)}
        if sizes.device.type == "cuda":  # as a program that loads a model has it
            lines = rewrite(model, Setting(model.device), Stage.FASTER)
            replaced = {line.name: line.num_modules for line in lines if line.reason is None}
            found |= {"replaced": replaced, "self_check": models.checks(model)}
        return found

    def times() -> dict[str, Any]:
        gpu = torch.cuda.get_device_name() if sizes.device.type == "cuda" else sizes.device.type
        found = models.step_times(held["model"], sizes, bytes_per_s)
        return {**found, "table": write_table(report.path.parent, gpu, name, found, sizes)}

    if report.run(f"build:{name}", build) is None:
        return
    report.run(f"t(n):{name}", times)
    if name == next(iter(sizes.models)):
        report.run(f"recorded:{name}", lambda: recorded.section(held["model"], sizes))
        report.run(f"copies:{name}", lambda: models.copies(held["model"], sizes))
        report.run(f"profile:{name}", lambda: models.profile_step(held["model"], sizes))


def several_gpus(
    report: Report, sizes: parts.Sizes, expected: dict[str, Any] | None, num_gpus: int, minutes: float
) -> None:
    """The second part: all GPUs as one mesh, then fewer, then tensor parallel, with the gather's times."""
    if num_gpus < 2:  # ranks that share a GPU tell nothing of several
        return
    report.extend(minutes)
    counts = [count for count in (8, 4, 2, 1) if count <= num_gpus and (count > 1 or num_gpus > 2)]
    for count in counts:
        report.run(f"ranks:{count}", partial(several.ranks, count, sizes, expected, 100.0))
    for tp in counts if sizes.device.type == "cuda" else ():
        if tp > 1:
            report.run(f"ranks:tp {tp}", partial(several.ranks, tp, sizes, expected, 100.0, tp))


def check(report: Report, sizes: parts.Sizes, several_minutes: float = 8.0) -> None:
    """All sections: what compiles and agrees, then a 7B model's steps, then several GPUs, then the rest."""
    prompts = PROMPTS[: sizes.num_prompts]
    on_gpu = sizes.device.type == "cuda"
    report.run("environment", environment)
    copied = report.run("bandwidth", lambda: parts.bandwidth(sizes))
    bytes_per_s = copied["bytes_per_s"] if copied else None
    names = list(sizes.models)
    large_model(report, names[0], sizes, bytes_per_s)
    report.run("kernels", lambda: parts.warm_up(sizes))
    correct = report.run("correctness", lambda: parts.correctness(sizes, prompts))
    expected = correct["ids"] if correct else None
    report.run("exact", lambda: parts.exact_mode(sizes, prompts))
    report.run("sampling", lambda: parts.choices(sizes))
    several_gpus(report, sizes, expected, torch.cuda.device_count() if on_gpu else 2, several_minutes)
    for name in names[1:][::-1]:  # the largest first
        large_model(report, name, sizes, bytes_per_s)
    report.run("hybrid", lambda: models.hybrid_step(sizes))


def main() -> int:
    """Run the command line; returns the exit code: 0, 1 if a section failed, 2 without a GPU."""
    try:
        options = read_options("gpu_check", GpuCheckOptions)
        if options.device == "cuda" and not torch.cuda.is_available():
            raise InputError("no CUDA device is available; `--device cpu --tiny` tests the program itself")
        if options.device == "cpu" and not options.tiny:
            raise InputError("the real models are for a GPU: --device cpu needs --tiny")
    except InputError as error:
        print(f"benchmarks.gpu_check: {error}", file=sys.stderr)
        return 2
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    sizes = parts.Sizes.tiny(device) if options.tiny else parts.Sizes.real(device)
    if options.worker is not None:
        return several.work_as_rank(options.worker, sizes, options.tp)
    budgets = BUDGETS if device.type == "cuda" else {}
    report = Report(options.output, options.minutes, options.sections, budgets)
    check(report, sizes, options.several_minutes)
    record = report.write()
    named = {name: names for name, names in record.items() if name.endswith("_sections")}
    print(json.dumps({"output": report.path.name, **named}))
    return 1 if record["failed_sections"] else 0


if __name__ == "__main__":
    leave(main())
