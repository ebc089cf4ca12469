"""Steps of a real shape with recorded outcomes: the forward runs, and its results are those of text (this repository).

    python -m benchmarks.recorded --clients 4 16 64 --json      # a small model on a CPU
    python -m benchmarks.recorded --model codellama-7b          # random weights of that shape, on a GPU

So drafts are accepted as recorded text accepts them, whatever the weights are. Clients arrive one after the other, and
one that is done makes room for the next. Step times of --costs decide tree sizes. Of a row the figures are means over
the steps: `entries_wanted`, trees and pieces of prompts; `entries_computed` by the forward, padding included (on a CPU,
which pads nothing, those of the captured step that a GPU would replay); `model_ms`, the measured time of the forward;
`modelled_ms`, that of --costs for `entries_computed`.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.common import RESULTS, Options, Whole, run_main
from benchmarks.gpu.models import random_model
from benchmarks.gpu.parts import Sizes, measured, wait
from benchmarks.host import LONGEST_OUTPUT, LONGEST_PROMPT, Texts, stand_in
from benchmarks.paced_device import Script
from lpr import DecodeConfig, Engine, SamplingParams, bundled_model
from lpr.engine.options import EngineOptions, load_step_times
from lpr.model.graph_inputs import packed_shape
from lpr.model.input_builder import Row
from lpr.model.loader import choose_device, load, load_tokenizer, wrap
from lpr.model.sampling.selection import Selection
from lpr.planner.facts import read_preset

OPTIONS = EngineOptions(prefix_reuse=False, compile="off")


@dataclass(frozen=True, kw_only=True)
class RecordedOptions(Options):
    """Steps of a real shape, whose outcomes are those of recorded text."""

    model: str | None = None  # Preset of lpr.plan, with random weights; the bundled model if none is given.
    device: str | None = None  # cpu or cuda; a GPU if there is one.
    clients: tuple[Whole, ...] = (1, 4, 16, 64)  # Numbers of requests at a time.
    steps: Whole = 100  # Steps of each row.
    costs: Path = RESULTS / "tn_nvidia-h200_codellama-7b.json"  # Step times as lpr.core.step_times reads them.


class Steps:
    """Runs the forward of an engine, whose prompts are those of a script, and puts recorded results in its place."""

    def __init__(self, engine: Engine, script: Script) -> None:
        self.seen: list[tuple[float, float, float]] = []
        """Per step the entries that were wanted and computed, and milliseconds of the forward."""
        self._engine, self._script = engine, script
        self._model: Any = engine.model
        self._evaluate, self._fill = self._model.evaluate, self._model.fill
        vars(self._model).update(evaluate=self.evaluate, fill=self.fill)
        engine.replica.overlap.is_on = False  # its next step would follow the results that recorded ones replace

    def fill(self, rows: Sequence[Row]) -> Any:
        return self._timed(partial(self._fill, rows), rows, Selection.build([]), 0)

    def evaluate(self, rows: Sequence[Row], *how: Any) -> torch.Tensor:
        results = self._timed(partial(self._evaluate, rows, *how), rows, *how)
        answers = torch.from_numpy(self._script.answer(rows, how[1])[1])
        return results[:, : answers.shape[1]].copy_(answers)

    def _timed(self, forward: Any, rows: Sequence[Row], selection: Selection, num_candidates: int) -> Any:
        model, wanted = self._model, sum(row.num_entries for row in rows)
        self._script.learn(rows)
        before, began = model.forward.num_computed, time.perf_counter()
        results = forward()
        wait(model.device)
        milliseconds = (time.perf_counter() - began) * 1e3
        limits = model.cache.num_slots, model.cache.rows_per_slot, model.cache.num_slots * self._engine.sizes.num_nodes
        shape = packed_shape(rows, selection, num_candidates, *limits)
        on_cpu = shape.num_computed if shape is not None else 0
        computed = (on_cpu if model.device.type == "cpu" else model.forward.num_computed - before) or wanted
        self.seen.append((wanted, computed, milliseconds))
        return results


def measure_clients(
    engine: Engine, texts: Texts, drafts: bool, options: RecordedOptions, clients: int
) -> dict[str, Any]:
    sizes: Any = {"max_batch_size": clients, "max_length": LONGEST_PROMPT + LONGEST_OUTPUT + 1}
    engine.configure(DecodeConfig(**sizes) if drafts else DecodeConfig.autoregressive(**sizes, num_candidates=0))
    steps, running, emitted = Steps(engine, Script(texts.recorded, texts.whole)), list[Any](), 0
    began = time.perf_counter()
    while len(steps.seen) < options.steps:
        if len(running) < clients:  # one after the other
            prompt, output = texts.take()
            running.append(engine.submit(prompt, SamplingParams(max_new_tokens=len(output), ignore_eos=True)))
        engine.step()
        emitted += sum(len(chunk.token_ids) for request in running for chunk in request.take())
        running = [request for request in running if request.finish_reason is None]
    seconds, count = time.perf_counter() - began, len(steps.seen)
    for request in running:
        engine.abort(request)
    model: Any = engine.model
    del model.evaluate, model.fill
    times = load_step_times(options.costs)
    modelled = [times.time(computed, min(clients, int(computed)), LONGEST_PROMPT) for _, computed, _ in steps.seen]
    columns = dict(zip(("entries_wanted", "entries_computed", "model_ms"), zip(*steps.seen, strict=True), strict=True))
    means = {name: round(statistics.mean(column), 3) for name, column in columns.items()}
    rates = {"tokens_per_step": round(emitted / count, 3), "tokens_per_s": round(emitted / seconds, 1)}
    modelled_ms = round(statistics.mean(modelled), 3)
    return {"clients": clients, "drafts": drafts, **means, "modelled_ms": modelled_ms, **rates, "num_steps": count}


def rows_of(engine: Engine, options: RecordedOptions, tell: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    """The rows of all numbers of clients, plain and with drafts; each is told as it is measured."""
    texts, rows = Texts(stand_in(), load_tokenizer(bundled_model()), engine.model.vocab_size), list[dict[str, Any]]()
    for clients, drafts in product(options.clients, (False, True)):
        rows.append(measure_clients(engine, texts, drafts, options, clients))
        tell({"rows": rows})
    engine.close()
    return rows


def overlap_of(engine: Engine, clients: int, num_tokens: int) -> list[dict[str, Any]]:
    """Milliseconds a token with and without overlap, plain and with drafts, of the model's own tokens."""
    params, rows = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True), list[dict[str, Any]]()
    plain = DecodeConfig.autoregressive(max_batch_size=clients, max_length=2 * num_tokens)
    for switch, decode in (("is_on", plain), ("begins_early", replace(plain, window_size=0, trie_nodes=8))):
        found, ids, launched = dict[str, Any](), list[Any](), 0
        for name in ("first", "without", "with"):  # the first run captures
            engine.configure(decode)  # without the outputs of the last run, as a source of drafts
            setattr(engine.replica.overlap, switch, name == "with")
            began = time.perf_counter()
            completions = engine.generate([[1 + client] for client in range(clients)], params)
            found[f"{name}_ms"] = round((time.perf_counter() - began) * 1e3 / num_tokens, 3)
            ids.append([each.token_ids for each in completions])
            launched = engine.replica.overlap.num_launched
        row = {"clients": clients, "drafts": switch == "begins_early", **found}
        rows.append({**row, "launched": launched, "same_ids": ids[1] == ids[2]})
    return rows


def section(model: Any, sizes: Sizes) -> dict[str, Any]:
    options = RecordedOptions(clients=sizes.clients, steps=sizes.num_steps)
    engine = Engine.from_model(model, None, DecodeConfig(max_batch_size=1), OPTIONS, costs=options.costs)
    overlap = overlap_of(engine, sizes.clients[-1], sizes.num_steps)
    measured({"rows": [], "overlap": overlap})
    return {"rows": rows_of(engine, options, lambda rows: measured({**rows, "overlap": overlap})), "overlap": overlap}


def measure(options: RecordedOptions, console: Console) -> dict[str, Any]:
    device, decode = choose_device(options.device), DecodeConfig(max_batch_size=1)
    if options.model is None:
        loaded = load(str(bundled_model()), "auto", str(device), None)
    else:
        loaded = wrap(random_model(read_preset(options.model)["config"], Sizes.real(device)), None)
    engine = Engine(loaded, decode, replace(OPTIONS, costs=options.costs))
    rows = rows_of(engine, options, lambda result: console.print(result["rows"][-1]))
    return {"model": options.model or "bundled", "device": device.type, "costs": options.costs.stem, "rows": rows}


def main() -> int:
    return run_main("recorded", RecordedOptions, measure)


if __name__ == "__main__":
    sys.exit(main())
