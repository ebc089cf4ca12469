"""Drafting on recorded texts of several data sets, by nodes of a step: `python -m benchmarks.data_sets`.

    python -m benchmarks.record --model FOLDER --chat-template --data gsm8k_test.jsonl --temperatures 0 0.2 0.8 --steps gsm8k.npz
    python -m benchmarks.data_sets --steps gsm8k.npz humaneval.npz --budgets 8 64 512

Each file (benchmarks.record) is replayed at each of its temperatures with trees of up to so many drafted nodes, as
benchmarks.replay does with one: candidates of accepted nodes only, no text drafted from another. An output that repeats
itself flatters whoever copies, so the figures are given without such outputs, too.
"""  # noqa: E501

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import make_parser, progress, run_main, whole
from benchmarks.limit import beside_limit, count_output
from benchmarks.record import Recorded, read_texts
from benchmarks.replay import FixedSizes, Task, replay_task
from lpr import DecodeConfig
from lpr.native import SuffixIndex


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Replay every file at every temperature of it and every budget."""
    files = {Path(path).stem: read_texts(path) for path in options.steps}
    texts = {name: [text for text in found if len(text.output) > 1] for name, (found, _) in files.items()}
    cases = [
        (name, temperature, budget)
        for name, each in texts.items()
        for temperature, budget in product(sorted({round(text.temperature, 6) for text in each}), options.budgets)
    ]
    console.print("ceiling: every drafted token right, and one more")
    runs = []
    with progress(console, len(cases), "replay") as advance:
        for name, temperature, budget in cases:
            chosen = [text for text in texts[name] if abs(text.temperature - temperature) < 1e-6]
            case = {"data": name, "temperature": temperature, "budget": budget}
            runs.append({**case, **replay_texts(chosen, budget)})
            advance()
    facts = {name: found for name, (_, found) in files.items()}
    return {"benchmark": "data_sets", "recorded": facts, "runs": runs}


def replay_texts(texts: Sequence[Recorded], budget: int) -> dict[str, Any]:
    """Tokens per step of some texts, each by itself, and of those that do not loop."""
    config = DecodeConfig(window_size=0, trie_nodes=budget, branch_length=max(1, budget)).resolved()
    counted = []
    for text in texts:
        sizes = FixedSizes(config, SuffixIndex(config.trie_capacity))
        task = Task(text.tokens[: text.num_prompt].tolist(), text.output, text)
        replay_task(task, sizes)
        counted.append(count_output(task.prompt, task.completion, sizes.tally.num_steps))
    return {"num_texts": len(counted), **beside_limit(counted)}


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = make_parser("data_sets", "Drafting on recorded texts of several data sets, by nodes of a step.")
    parser.add_argument("--steps", required=True, nargs="+", metavar="FILE", help="what benchmarks.record has written")
    parser.add_argument("--budgets", type=whole, nargs="+", default=[8, 16, 32, 64, 128, 256, 512], metavar="N")
    return run_main(parser, measure)


if __name__ == "__main__":
    sys.exit(main())
