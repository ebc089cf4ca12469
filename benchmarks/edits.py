"""Edits of code, with the code as prediction: `python -m benchmarks.edits --data edit_eval.jsonl --model FOLDER`.

The tasks are those of EditEval (InstructCoder, Li et al. 2023, github.com/qishenghu/InstructCoder), JSON lines with
`instruction`, `input` and `output`. Teacher-forced: the reference edit is the completion, whatever a model would write,
and steps are counted as in benchmarks.replay, each task by itself. The prediction is the input, or that of another
task. With `candidates`, each accepted token brings the model's next tokens along. `--peers DIR`, the work folder of
benchmarks.peers, adds Arctic's suffix decoding and transformers' prompt lookup, whose prompt holds the input too.

`--run N` also lets the model write its own edits of the last N tasks: without a prediction, with the input, and with
that of another task, by turns. All ids must be equal. Sizes are automatic there, unless `--nodes` fixes them.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import Options, Whole, progress, run_main
from benchmarks.peers.recorded import CountSteps, replayed_peers
from benchmarks.record import Recorded
from benchmarks.replay import FixedSizes, Task, replay_task
from lpr import DecodeConfig, Engine, InputError, SamplingParams
from lpr.model.sampling.choice import candidates as candidates_of
from lpr.native import SuffixIndex

NUM_CANDIDATES = 8
REQUEST = "{instruction}\n\n```python\n{input}\n```\n\nAnswer with the edited code only."


@dataclass(frozen=True, kw_only=True)
class EditsOptions(Options):
    """Tokens per step on edits of code."""

    data: str
    """edit_eval.jsonl."""
    model: str
    """Folder of a model with a chat template."""
    skip: Annotated[Whole, tyro.conf.arg(name="from")] = 0
    """Leave out the first N tasks; the shipped numbers were fitted on the first 97."""
    budgets: tuple[Whole, ...] = (16, 32, 64)
    """Numbers of drafted nodes."""
    peers: Path | None = None
    """Work folder of benchmarks.peers; replays peers too."""
    run: Whole = 0
    """Let the model edit the last N tasks itself."""
    nodes: Whole = 0
    """Nodes of a tree there; 0: automatic."""
    temperature: float = 0.0
    """Temperature there."""
    max_new_tokens: Whole = 160
    """Tokens of an edit there."""


def read_tasks(path: str, tokenizer: Any) -> list[Task]:
    """The tasks with an input and an output, each with its input as prediction; raises InputError."""

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    try:
        rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
        rows = [row for row in rows if row["input"] and row["output"]]
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": REQUEST.format(**row)}], tokenize=False, add_generation_prompt=True
            )
            for row in rows
        ]
    except (OSError, ValueError, KeyError, TypeError) as failure:
        raise InputError(f"{path} has no tasks of EditEval: {failure}") from failure
    return [
        Task(ids(prompt), ids(row["output"]), prediction=ids(row["input"]))
        for prompt, row in zip(prompts, rows, strict=True)
    ]


@torch.inference_mode()
def with_candidates(model: Any, task: Task) -> Task:
    """The task with the model's next tokens after each of its tokens."""
    tokens = np.array([*task.prompt, *task.completion], np.int32)
    found, scores = candidates_of(model(torch.tensor(tokens[None]).long()).logits[0].float(), NUM_CANDIDATES)
    hidden = np.zeros((len(tokens), 0), np.int8)
    arrays = tokens, found.to(torch.int32).numpy(), scores.numpy(), hidden
    return replace(task, recorded=Recorded(0, 0.0, 0, len(task.prompt), *arrays))


def others(tasks: Sequence[Task]) -> list[Task]:
    """The tasks with the prediction of another one each."""
    return [replace(task, prediction=tasks[at - min(7, len(tasks) - 1)].prediction) for at, task in enumerate(tasks)]


def lpr_steps(task: Task, budget: int) -> int:
    """The steps of a task with trees of up to `budget` drafted nodes."""
    config = DecodeConfig(window_size=0, trie_nodes=budget, branch_length=max(1, budget)).resolved()
    sizes = FixedSizes(config, SuffixIndex(config.trie_capacity))
    replay_task(task, sizes)
    return sizes.tally.num_steps


def peer_steps(count: CountSteps) -> Callable[[Task, int], int]:
    """The same of a peer, which knows no prediction."""
    return lambda task, budget: count(task.prompt, task.completion, budget)


def measure(options: EditsOptions, console: Console) -> dict[str, Any]:
    """Replay all contestants; then run the model, if asked to."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tasks = read_tasks(options.data, tokenizer)[options.skip :]
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    ranked = [with_candidates(model, task) for task in tasks]
    known = {
        "lpr": [replace(task, prediction=()) for task in tasks],
        "lpr, prediction": tasks,
        "lpr, another task's": others(tasks),
        "lpr, candidates": [replace(task, prediction=()) for task in ranked],
        "lpr, candidates and prediction": ranked,
        "lpr, candidates and another task's": others(ranked),
    }
    none = dict[str, CountSteps]()
    rows = []
    with (
        replayed_peers(options.peers) if options.peers else nullcontext(none) as peers,
        progress(console, len(known) + len(peers), "replay") as advance,
    ):
        contestants: list[tuple[str, Callable[[Task, int], int], Sequence[Task]]] = [
            (name, lpr_steps, these) for name, these in known.items()
        ]
        contestants += [(name, peer_steps(count), tasks) for name, count in peers.items()]
        for name, steps, these in contestants:
            num_tokens = sum(len(task.completion) for task in these)
            figures = {
                str(budget): round(num_tokens / sum(steps(task, budget) for task in these), 3)
                for budget in options.budgets
            }
            rows.append({"name": name, **figures})
            advance()
    found = {"data": Path(options.data).name, "model": Path(options.model).name, "first_task": options.skip}
    found |= {"num_tasks": len(tasks), "num_tokens": sum(len(task.completion) for task in tasks), "rows": rows}
    return {**found, "runs": run_model(options, tasks[-options.run :], console) if options.run else []}


def run_model(options: EditsOptions, tasks: Sequence[Task], console: Console) -> list[dict[str, Any]]:
    """The model's own edits: steps, milliseconds and counted tokens by prediction; raises InputError if ids differ."""
    nodes: dict[str, Any] = {"window_size": 0, "trie_nodes": options.nodes} if options.nodes else {}
    engine = Engine.from_pretrained(options.model, DecodeConfig(max_batch_size=1, **nodes), dtype="float32")
    kinds: dict[str, list[Sequence[int]]] = {"none": [()] * len(tasks), "input": [task.prediction for task in tasks]}
    kinds["another task's"] = [task.prediction for task in others(tasks)]
    rows: dict[str, Counter[str]] = {name: Counter() for name in kinds}
    with progress(console, len(tasks), "editing") as advance:
        for at, task in enumerate(tasks):
            seen = set()
            params = SamplingParams(max_new_tokens=options.max_new_tokens, temperature=options.temperature, seed=at)
            for name in [*kinds, *kinds][at % len(kinds) :][: len(kinds)]:
                began = time.perf_counter()
                request = engine.submit(task.prompt, params, prediction=kinds[name][at] or None, learns=False)
                while request.finish_reason is None:
                    engine.step()
                drafted, accepted = request.predicted
                rows[name].update(steps=request.stats.num_steps, tokens=request.num_output, drafted=drafted)
                rows[name].update(accepted=accepted, ms=round(1e3 * (time.perf_counter() - began)))
                seen.add(tuple(request.token_ids))
            if len(seen) > 1:
                raise InputError(f"task {at}: a prediction has changed the text")
            advance()
    return [
        {"prediction": name, **row, "tokens_per_step": round(row["tokens"] / row["steps"], 3)}
        for name, row in rows.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return run_main("edits", EditsOptions, measure, arguments)


if __name__ == "__main__":
    sys.exit(main())
