"""Drafting on recorded texts of several data sets, by nodes of a step: `python -m benchmarks.data_sets`.

    python -m benchmarks.record --model FOLDER --chat-template --data gsm8k_test.jsonl --temperatures 0 0.2 0.8 \\
        --steps gsm8k.npz
    python -m benchmarks.data_sets --steps gsm8k.npz humaneval.npz --budgets 8 64 512

Each file (benchmarks.record) is replayed at each of its temperatures and each budget, as benchmarks.replay does with
one: with candidates of accepted nodes only, each text by itself. Outputs that loop favour copying, so the figures
without them are given too. Several texts of one prompt and temperature are counted together and by seed. `--peers DIR`,
the work folder of benchmarks.peers, also counts the steps of peers that draft from text alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from benchmarks.common import Options, Whole, progress, run_main
from benchmarks.limit import Counted, count_output, figures_with_limit
from benchmarks.peers.recorded import CountSteps, replayed_peers
from benchmarks.record import Recorded, read_texts
from benchmarks.replay import FixedSizes, Task, replay_task
from lpr import DecodeConfig
from lpr.native import SuffixIndex


@dataclass(frozen=True, kw_only=True)
class DataSetsOptions(Options):
    """Drafting on recorded texts of several data sets, by nodes of a step."""

    steps: tuple[str, ...]
    """Files that benchmarks.record has written."""
    skip: Annotated[Whole, tyro.conf.arg(name="from")] = 0
    """Leave out the first N prompts."""
    budgets: tuple[Whole, ...] = (8, 16, 32, 64, 128, 256, 512)
    """Numbers of drafted nodes."""
    peers: Path | None = None
    """Work folder of benchmarks.peers; replays peers too."""


def measure(options: DataSetsOptions, console: Console) -> dict[str, Any]:
    """Replay every file at every temperature of it and every budget."""
    files = {Path(path).stem: read_texts(path) for path in options.steps}
    texts = {
        name: [text for text in found if len(text.output) > 1 and text.prompt >= options.skip]
        for name, (found, _) in files.items()
    }
    by_temperature = {
        (name, temperature): [text for text in each if abs(text.temperature - temperature) < 1e-6]
        for name, each in texts.items()
        for temperature in sorted({round(text.temperature, 6) for text in each})
    }
    console.print("ceiling: every drafted token right, and one more")
    runs, peers, none = [], [], dict[str, CountSteps]()
    with (
        progress(console, len(by_temperature), "replay") as advance,
        replayed_peers(options.peers) if options.peers else nullcontext(none) as known_peers,
    ):
        for (name, temperature), chosen in by_temperature.items():
            case = {"data": name, "temperature": temperature}
            runs += [
                {**case, "budget": budget, **replay_texts(chosen, lpr_steps(budget))} for budget in options.budgets
            ]
            peers += [
                {**case, "peer": peer, **replay_texts(chosen, peer_steps(count))} for peer, count in known_peers.items()
            ]
            advance()
    facts = {name: found for name, (_, found) in files.items()}
    return {"recorded": facts, "runs": runs, "peers": peers}


def lpr_steps(budget: int) -> Callable[[Recorded], int]:
    """The steps of a text with trees of up to `budget` drafted nodes."""
    config = DecodeConfig(window_size=0, trie_nodes=budget, branch_length=max(1, budget)).resolved()

    def count(text: Recorded) -> int:
        sizes = FixedSizes(config, SuffixIndex(config.trie_capacity))
        replay_task(Task(text.tokens[: text.num_prompt].tolist(), text.output, text), sizes)
        return sizes.tally.num_steps

    return count


def peer_steps(count: CountSteps) -> Callable[[Recorded], int]:
    """The same of a peer."""
    return lambda text: count(text.tokens[: text.num_prompt].tolist(), text.output)


def replay_texts(texts: Sequence[Recorded], steps_of: Callable[[Recorded], int]) -> dict[str, Any]:
    """Tokens per step of some texts, each by itself, and of those that do not loop."""
    counted = [count_output(text.tokens[: text.num_prompt].tolist(), text.output, steps_of(text)) for text in texts]
    found = {"num_texts": len(counted), **figures_with_limit(counted)}
    by_seed: dict[int, list[Counted]] = {}
    for text, each in zip(texts, counted, strict=True):
        by_seed.setdefault(text.seed - text.prompt, []).append(each)
    if len(by_seed) > 1:
        found["by_seed"] = [figures_with_limit(by_seed[seed])["tokens_per_step"] for seed in sorted(by_seed)]
    return found


def main() -> int:
    """Run the command line; returns the exit code."""
    return run_main("data_sets", DataSetsOptions, measure)


if __name__ == "__main__":
    sys.exit(main())
