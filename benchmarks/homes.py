"""Home ranks: tokens evaluated and K/V held per committed token, against always and never splitting trees.

    python -m benchmarks.homes --data humaneval.jsonl --output benchmarks/results/homes.json

Ranks are processes of this machine (gloo). A load is a number of concurrent requests: when one ends the next is
submitted. Counting begins with the first request that replaces another one, and ends when `--prompts` more have been
submitted. Three policies complete the same prompts with the same engine: `split` (all ranks work on every tree), `home`
(one rank per request) and `elastic`. Tree sizes follow a table of step times. Steps are counted, not timed: the tokens
that a step's busiest rank evaluates (prompts, pending chains, nodes, and the prompts of ranks that join), and the time
of such a step by the table. On the host, the driver's processor time for drafting and concluding is measured. All token
ids are compared with plain decoding's.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import STEP_TIMES, DataOptions, attempt, progress, read_json, run_main
from benchmarks.data import prompts_of
from benchmarks.engines import StepClock, params_for
from benchmarks.processes.launch import LAUNCHER, execute
from lpr import DecodeConfig, Engine, SamplingParams, bundled_model
from lpr.config import Auto
from lpr.core.step_times import StepTimes, read_step_times
from lpr.dist.runtime import World, join
from lpr.engine.hooks import StepHooks
from lpr.engine.request import Prompt, Request
from lpr.engine.scheduler import Schedule

POLICIES: dict[str, int | Auto] = {"split": 0, "home": 1, "elastic": "auto"}
"""Name to `home_ranks`."""


@dataclass(frozen=True, kw_only=True)
class HomesOptions(DataOptions):
    """Tokens that ranks evaluate and hold, by how requests are distributed over them."""

    ranks: tuple[int, ...] = (2, 4)
    """Numbers of ranks."""
    loads: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of concurrent requests."""
    temperatures: tuple[float, ...] = (0.0,)
    """Temperatures."""
    costs: Path = STEP_TIMES / "h100_7b.json"
    """Table of step times; the default is an estimate of a 7B model on one H100."""
    max_length: int = 1024
    """Tokens of a prompt and its output."""
    timeout: float = 3600.0
    """Seconds per world."""


@dataclass
class Counter:
    """Counts the tokens that all ranks evaluate and hold, on the driver."""

    times: StepTimes
    num_steps: int = 0
    num_tokens: int = 0
    busiest: int = 0
    """Tokens that the busiest rank of each step evaluated."""
    everybody: int = 0
    filled: int = 0
    """Tokens that ranks computed to join a request."""
    milliseconds: float = 0.0
    decoding: list[int] = field(default_factory=lambda: [0, 0])
    """Of steps without prompts: tokens emitted, and tokens that the busiest rank evaluated."""
    copies: list[float] = field(default_factory=list)
    """Per step: tokens with K/V on some rank, summed over ranks, per token of the running requests."""
    widths: list[float] = field(default_factory=list)
    """Per step: home ranks of a request, on average."""
    host: list[float] = field(default_factory=list)
    """Per step: milliseconds of the driver's processor for drafting and concluding."""

    def run(self, engine: Engine, run: Run, schedule: Schedule[Request], num_command_bytes: int) -> Any:
        """Take a step by `run`, and count it."""
        running = engine.scheduler.running
        loads = [0] * engine.comm.size
        for request, counts in schedule.filling:
            loads = [load + count for load, count in zip(loads, counts, strict=True)]
            if request in schedule.decoding:
                self.filled += sum(counts)
        begins = any(request not in schedule.decoding for request, _ in schedule.filling)
        begins |= any(request.num_output == 0 for request in schedule.decoding)
        lengths = [len(request.tokens) for request in running]
        held = sum(sum(request.num_computed_tokens) for request in running)
        engine.hooks = clock = StepClock(time.thread_time)
        result = run(schedule, num_command_bytes)
        engine.hooks = StepHooks()
        if result.outcomes:
            loads = [load + own for load, own in zip(loads, result.outcomes[0].num_entries, strict=True)]
            self.host.append(clock.phases["draft"] + clock.phases["commit"])
        self.num_steps += 1
        emitted = sum(len(outcome.concluded.emitted) for outcome in result.outcomes)
        self.num_tokens += emitted
        if not begins:
            self.decoding = [self.decoding[0] + emitted, self.decoding[1] + max(loads)]
        self.busiest += max(loads)
        self.everybody += sum(loads)
        self.milliseconds += self.times.time(max(loads), 1, max(lengths))
        self.copies.append(held / sum(lengths))
        self.widths.append(sum(len(request.homes) for request in running) / len(running))
        return result

    def figures(self) -> dict[str, Any]:
        """The figures of all steps."""
        return {
            "num_tokens": self.num_tokens,
            "tokens_per_step": round(self.num_tokens / self.num_steps, 3),
            "busiest_per_token": round(self.decoding[1] / max(1, self.decoding[0]), 3),
            "busiest_per_token_with_prompts": round(self.busiest / self.num_tokens, 3),
            "evaluated_per_token": round(self.everybody / self.num_tokens, 3),
            "joined_per_token": round(self.filled / self.num_tokens, 3),
            "table_ms_per_token": round(self.milliseconds / self.num_tokens, 4),
            "kv_copies": round(sum(self.copies) / len(self.copies), 3),
            "homes_per_request": round(sum(self.widths) / len(self.widths), 3),
            "host_ms_per_step": round(statistics.median(self.host), 4),
        }


Run = Callable[[Schedule[Request], int], Any]


def complete(engine: Engine, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[list[int]]:
    """The ids of all prompts, by plain decoding of a full batch."""
    requests = [engine.submit(*each) for each in zip(prompts, params, strict=True)]
    while not engine.is_idle:
        engine.step()
    return [request.token_ids for request in requests]


def count(
    engine: Engine, prompts: Sequence[Prompt], params: Sequence[SamplingParams], load: int, times: StepTimes
) -> tuple[list[list[int]], Counter]:
    """Keep `load` requests running; returns their outputs, and the counts of the steps with a full load."""
    counter, run = Counter(times), engine.replica.run
    left = list(zip(prompts, params, strict=True))[::-1]
    requests: list[Request] = []

    def counted(schedule: Schedule[Request], num_command_bytes: int) -> Any:
        if len(requests) > load:
            return counter.run(engine, run, schedule, num_command_bytes)
        return run(schedule, num_command_bytes)

    def running() -> list[Request]:
        return [request for request in requests if request.finish_reason is None]

    engine.replica.run = counted  # type: ignore[method-assign]
    try:
        while left or len(running()) == load:
            while left and len(running()) < load:
                requests.append(engine.submit(*left.pop()))
            engine.step()
    finally:
        engine.replica.run = run  # type: ignore[method-assign]
    for request in running():
        engine.abort(request)
    while not engine.is_idle:
        engine.step()
    return [request.token_ids for request in requests], counter


def work(spec: dict[str, Any]) -> None:
    """One rank of a run; the driver writes the record to `spec["output"]`."""
    times = read_step_times(spec["times"], "times")
    decode = DecodeConfig(max_batch_size=max(spec["loads"]), max_length=spec["max_length"])
    world = World.from_environment()
    with join(world, spec["device"], spec["timeout"]) as comm:
        engine = Engine.from_pretrained(
            spec["model"],
            decode,
            comm=comm,
            device=spec["device"],
            dtype=spec["dtype"],
            costs=times,
            exact=spec["exact"],
        )
        prompts: Sequence[Prompt] = spec["prompts"]
        if comm.rank:
            engine.work()
            return
        runs = []
        for temperature in spec["temperatures"]:
            params = params_for(len(prompts), spec["max_new_tokens"], temperature, ignore_eos=True)
            engine.configure(DecodeConfig.autoregressive(max_batch_size=8, max_length=spec["max_length"]))
            expected = complete(engine, prompts, params)
            for load in spec["loads"]:
                number = load + spec["counted"]
                case = {"num_ranks": comm.size, "temperature": temperature, "load": load}
                for name, homes in POLICIES.items():
                    engine.configure(replace(decode, home_ranks=homes))
                    found, counter = count(engine, prompts[:number], params[:number], load, times)
                    runs.append({**case, "policy": name, **compared(found, expected[:number], counter)})
                    Path(spec["output"]).write_text(json.dumps(runs), encoding="utf-8")
        engine.close()
        Path(spec["output"]).write_text(json.dumps(runs), encoding="utf-8")


def compared(found: Sequence[list[int]], expected: Sequence[list[int]], counter: Counter) -> dict[str, Any]:
    """The figures of a run, or a failure if it emitted other tokens than plain decoding."""
    different = sum(one != other[: len(one)] for one, other in zip(found, expected, strict=True))
    if different:
        return {"failed": f"{different} of {len(found)} prompts got other tokens than plain decoding"}
    return counter.figures()


def measure(options: HomesOptions, console: Console) -> dict[str, Any]:
    """Run all worlds."""
    console.print("ceiling: the better of split and home at every load, and more where neither extreme is best")
    spec = {
        "times": read_json(options.costs),
        "prompts": prompts_of(options, options.skip + options.prompts + max(options.loads)),
        "counted": options.prompts,
        "loads": options.loads,
        "temperatures": options.temperatures,
        "max_new_tokens": options.max_new_tokens,
        "max_length": options.max_length,
        "model": str(options.model or bundled_model()),
        "device": options.device or "cpu",
        "dtype": options.dtype,
        "exact": options.exact,
        "timeout": options.timeout,
    }
    runs: list[dict[str, Any]] = []
    with progress(console, len(options.ranks)) as advance, tempfile.TemporaryDirectory(prefix="lpr-homes-") as folder:
        for num_ranks in options.ranks:
            output, path = Path(folder) / f"runs-{num_ranks}.json", Path(folder) / f"spec-{num_ranks}.json"
            path.write_text(json.dumps({**spec, "output": str(output)}), encoding="utf-8")
            command = [*LAUNCHER, f"--nproc_per_node={num_ranks}", "-m", "benchmarks.homes", "--worker", str(path)]

            def run(command: list[str] = command, output: Path = output, num_ranks: int = num_ranks) -> dict[str, Any]:
                execute(command, options.timeout, options.threads or 1)
                return {}

            failed = attempt(run)
            if output.exists():  # also what was counted before a failure
                runs += json.loads(output.read_text(encoding="utf-8"))
            runs += [{"num_ranks": num_ranks, **failed}] if failed else []
            advance()
    return {
        "data": Path(options.data).name,
        "model": Path(options.model).name if options.model else "bundled",
        "times": Path(options.costs).name,
        "max_new_tokens": options.max_new_tokens,
        "num_prompts": options.prompts,
        "runs": runs,
    }


def main() -> int:
    """Run the command line; returns the exit code."""
    if len(sys.argv) == 3 and sys.argv[1] == "--worker":
        work(read_json(sys.argv[2]))
        return 0
    return run_main("homes", HomesOptions, measure)


if __name__ == "__main__":
    sys.exit(main())
