"""Host time on the critical path of a step, on a device of a given pace.

    python -m benchmarks.host --traces T.jsonl --output benchmarks/results/host.json
    python -m benchmarks.host --quick --json                # minutes

The model's forward is replaced by a paced device (benchmarks.paced_device): it takes t(n) of a table of step times and
answers from recorded completions. *Efficiency* is the device's time over wall time while a batch decodes; *host ms* is
the median time of a step beyond the device's time, and *host us per request* all of the thread's work in a step, hidden
or not, over its requests. Steps that evaluate a prompt do not count. The host's work is timed by the processor time of
its thread, in which it waits for others that draft with it (--threads). Its waits for the device poll, as CUDA does by
default. `h100_7b` is an estimate of a 7B model in bf16 on one H100 (7.3 ms for 1 node, 9 ms for 64, then 13.2 GFLOP a
token at 600 TFLOP/s).

Nodes are those of a sequence on each rank, 0 those of plain decoding. With lp above 1 the other ranks are simulated:
they take as long as this rank, at the same time, and the collective takes no time. A sampled request follows the
recorded text too, so only its host work differs. Without --traces, this repository's source serves as text.
"""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

import lpr.native
from benchmarks.common import STEP_TIMES, Flag, Options, Whole, run_main
from benchmarks.paced_device import Device, Lap, PacedComm, PacedModel, Recorded
from benchmarks.replay import read_traces
from lpr import DecodeConfig, Engine, SamplingParams, bundled_model
from lpr.config import InputError
from lpr.engine.options import EngineOptions, load_step_times

LONGEST_PROMPT, LONGEST_OUTPUT = 1024, 384
SPARE = 64  # entries of a step beyond its trees, per sequence, up to which the step counts; more are a prompt's


@dataclass(frozen=True, kw_only=True)
class HostOptions(Options):
    """Efficiency of a step on a device of a given pace."""

    traces: str | None = None  # JSON lines with prompt and completion; this repository's source if none is given.
    quick: Flag = False  # Fewer cases and steps: some minutes.
    steps: Whole = 0  # Steps per case; 0 means 200, or 60 with --quick.


@dataclass(frozen=True)
class Case:
    """One row of the result."""

    batch: int
    nodes: int
    lp: int = 1
    temperature: float = 0.0
    window: bool = False

    def decode(self) -> DecodeConfig:
        """Fixed sizes of `nodes` a sequence and rank; with a window, half of them for the window and its pool.

        Plain decoding has 0.
        """
        columns = max(1, self.nodes // 16) if self.window else 0
        return DecodeConfig(
            window_size=columns,
            trie_nodes=max(0, self.nodes - 1 - 8 * columns + (1 if columns else 0)),
            num_candidates=8 if self.nodes else 0,
            max_batch_size=self.batch,
            max_length=LONGEST_PROMPT + LONGEST_OUTPUT + 1,
            prefill_chunk=self.batch * LONGEST_PROMPT,
            home_ranks=0,  # every rank works on every tree: the other ranks are made up
        )


def cases(quick: bool) -> list[Case]:
    """The cases of a run; the first of equal batch, nodes, lp and temperature has no window."""
    found = [Case(batch, nodes) for nodes in (0, 16, 64, 128) for batch in (1, 8, 32)]
    found += [Case(batch, nodes) for batch in (64, 191) for nodes in (0, 16)]
    found += [Case(batch, 64, temperature=0.8) for batch in (1, 8, 32)]
    found += [Case(batch, 64, lp) for lp in (2, 8) for batch in (1, 8)]
    found += [Case(batch, 64, window=True) for batch in (1, 8)]
    if not quick:
        found += [Case(batch, nodes, lp, 0.8) for lp in (2, 8) for batch in (1, 8) for nodes in (16, 64, 128)]
        found += [Case(batch, nodes, window=True) for batch in (1, 8, 32) for nodes in (16, 128)]
    return found


class Texts:
    """Recorded requests in tokens, taken in turns."""

    def __init__(self, pairs: Sequence[tuple[str, str]], tokenizer: Any, vocab_size: int = 1 << 30) -> None:
        """The usable ones of `pairs` of prompt and completion; raises InputError if there is none.

        A smaller vocabulary than the tokenizer's has several tokens for one.
        """
        self.requests = []
        for texts in pairs:
            ids = [[each % vocab_size for each in tokenizer.encode(text, add_special_tokens=False)] for text in texts]
            first, then = ids[0][-LONGEST_PROMPT:], ids[1][:LONGEST_OUTPUT]
            if len(first) > 1 and len(then) > 32:
                self.requests.append((first, then))
        if not self.requests:
            raise InputError("no trace has a prompt and a completion of more than 32 tokens")
        self.whole = [[*first, *then] for first, then in self.requests]
        self.recorded = Recorded(self.whole)
        self._next = 0

    def take(self) -> tuple[list[int], list[int]]:
        """The next request."""
        self._next += 1
        return self.requests[self._next % len(self.requests)]


def measure_case(case: Case, loaded: Any, texts: Texts, num_steps: int) -> dict[str, Any]:
    """Decode with a full batch for `num_steps` steps that count."""
    device = Device(load_step_times(STEP_TIMES))
    comm = PacedComm(case.lp)
    engine = Engine(loaded, case.decode(), EngineOptions(prefix_reuse=False), comm=comm)
    paced = PacedModel(engine, device, texts.recorded, texts.whole, case.lp)
    comm.paced = paced
    running: list[Any] = []
    laps: list[Lap] = []
    gc.collect()
    gc.freeze()  # as the command does
    while len(laps) < num_steps:
        while len(running) < case.batch:
            with device.clock.stopped():
                prompt, output = texts.take()
                params = SamplingParams(
                    max_new_tokens=len(output), temperature=case.temperature, seed=len(laps), ignore_eos=True
                )
                running.append(engine.submit(prompt, params))
        device.lap = lap = Lap(began=device.clock.now())
        engine.step()
        lap.ended = device.clock.now()
        running = [request for request in running if request.finish_reason is None]
        most = case.batch * (engine.sizes.num_nodes + SPARE)
        if lap.device and lap.num_entries <= most and paced.batch == case.batch:
            laps.append(lap)
    gc.unfreeze()
    for request in running:
        engine.abort(request)
    return summary(case, laps[2:])


def summary(case: Case, laps: Sequence[Lap]) -> dict[str, Any]:
    """A row of the result; parts are medians of milliseconds on the critical path."""
    host = sorted((lap.ended - lap.began - lap.device) * 1e3 for lap in laps)
    device, wall = sum(lap.device for lap in laps), sum(lap.ended - lap.began for lap in laps)

    def median(part: Any) -> float:
        return round(statistics.median(part(lap) * 1e3 for lap in laps), 4)

    return {
        "batch": case.batch,
        "nodes": case.nodes,
        "lp": case.lp,
        "temperature": case.temperature,
        "window": case.window,
        "costs": STEP_TIMES.stem,
        "efficiency": round(device / wall, 4),
        "host_ms": round(statistics.median(host), 4),
        "host_us_per_request": round(
            median(lambda lap: lap.waited - lap.began + lap.ended - lap.ready) * 1e3 / case.batch, 2
        ),
        "host_ms_p99": round(host[min(len(host) - 1, int(0.99 * len(host)))], 4),
        "step_ms": median(lambda lap: lap.ended - lap.began),
        "draft_ms": median(lambda lap: lap.asked - (lap.ready if lap.is_early else lap.began)),
        "inputs_ms": median(lambda lap: lap.launched - lap.asked),
        "hidden_ms": median(
            lambda lap: lap.waited - lap.began + lap.ended - lap.launched if lap.is_early else lap.waited - lap.launched
        ),
        "after_ms": median(lambda lap: 0.0 if lap.is_early else lap.ended - lap.ready),
        "entries": round(statistics.mean(lap.num_entries for lap in laps), 1),
        "num_steps": len(laps),
    }


def measure(options: HostOptions, console: Console) -> dict[str, Any]:
    """All cases, one after the other."""
    from lpr.model.loader import load

    loaded = load(str(bundled_model()), "auto", "cpu", None)
    pairs = read_traces(options.traces) if options.traces else stand_in()
    texts = Texts(pairs, loaded.tokenizer)
    rows = []
    for case in cases(options.quick):
        row = measure_case(case, loaded, texts, options.steps or (60 if options.quick else 200))
        rows.append(row)
        console.print(
            f"batch {case.batch}, {case.nodes} nodes, lp {case.lp}, T={case.temperature}"
            f"{', window' if case.window else ''}: efficiency {row['efficiency']:.3f}, host {row['host_ms']:.3f} ms"
        )
    return {"core": "native" if lpr.native.is_native else "python", "rows": rows}


def stand_in() -> list[tuple[str, str]]:
    """Requests made of this repository's source."""
    pairs = []
    for path in sorted((Path(__file__).parent.parent / "lpr").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if len(text) > 3000:
            pairs.append((text[: len(text) // 2], text[len(text) // 2 :]))
    return pairs


def main() -> int:
    """Run the command line; returns the exit code."""
    return run_main("host", HostOptions, measure)


if __name__ == "__main__":
    sys.exit(main())
