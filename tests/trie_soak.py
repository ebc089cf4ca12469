"""A soak of the shared trie: insert far more than it holds, and query it all the while.

    python -m benchmarks.trie --output benchmarks/results/trie.json         # 5M tokens, capacity 1M

The drafting core that runs is soaked: LPR_PURE_PYTHON=1 chooses the specification, which takes some ten times as long.

The text is synthetic: documents of 200 to 2000 tokens made of phrases, which follow Zipf's law and of which some are
new at every document, so that pairs of tokens keep coming and going and drafts are found. An insertion is one
document; a query is a draft of 64 nodes after a few tokens of a recent document. Both are timed by the processor time
of the thread and, beside it, by the clock. RSS is of the whole process; `max_elements` is the most that the trie's
containers held together, links included.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import make_parser, run_main, whole
from benchmarks.replay import learn
from lpr.config import DecodeConfig, InputError
from lpr.native import Drafter, SuffixIndex, TokenTree, is_native

VOCABULARY = 32_000
NODES = 64


def documents(seed: int = 0) -> Iterator[list[int]]:
    """Endless documents, the same for the same seed."""
    draw = random.Random(seed)
    phrases = [_phrase(draw) for _ in range(20_000)]
    while True:
        for _ in range(20):
            phrases[draw.randrange(len(phrases))] = _phrase(draw)
        document: list[int] = []
        length = draw.randint(200, 2000)
        while len(document) < length:
            document += phrases[int(len(phrases) ** draw.random()) - 1]
            if draw.random() < 0.3:
                document.append(draw.randrange(VOCABULARY))
        yield document[:length]


def _phrase(draw: random.Random) -> list[int]:
    return [int(VOCABULARY ** draw.random()) for _ in range(draw.randint(3, 12))]


def soak(num_tokens: int, capacity: int, queries: int) -> dict[str, Any]:
    """Insert `num_tokens` and draft `queries` times once the trie is full; times in milliseconds."""
    trie = SuffixIndex(capacity)
    config = DecodeConfig(window_size=0, trie_nodes=NODES).resolved()
    draw = random.Random(1)
    inserted = num_documents = most = 0
    every = max(1, (num_tokens - capacity) // 1100 // max(1, queries) or 1)
    insertions: list[tuple[float, float]] = []
    drafts: list[tuple[float, float]] = []
    nodes: list[int] = []
    rss_start, rss_full = resident_mb(), 0.0
    for document in documents():
        insertions.append(_timed(lambda: learn(trie, [document])))  # noqa: B023 - called at once
        inserted += len(document) + 1
        num_documents += 1
        most = max(most, trie.num_entries)
        if inserted >= capacity and not rss_full:
            rss_full = resident_mb()
        if inserted >= capacity and num_documents % every == 0:
            start = draw.randrange(len(document) - 40)
            drafter = Drafter(config, trie)
            drafter.observe(document[start : start + 8])
            tree = TokenTree(document[start + 7])
            drafts.append(_timed(lambda: drafter.draft(tree, NODES)))  # noqa: B023
            nodes.append(len(tree) - 1)
        if inserted >= num_tokens and len(drafts) >= queries:
            break
    seconds = sum(cpu for cpu, _ in insertions) / 1e3
    return {
        "num_tokens": inserted,
        "num_documents": num_documents,
        "capacity": capacity,
        "vocabulary": VOCABULARY,
        "held_tokens": len(trie),
        "max_elements": most,
        "tokens_per_second": round(inserted / seconds),
        "insertion_ms": _spread(insertions),
        "query_ms": {**_spread(drafts), "nodes": statistics.mean(nodes), "count": len(drafts)},
        "rss_mb": {"at_start": rss_start, "when_full": rss_full, "at_end": resident_mb()},
    }


def resident_mb() -> float:
    """Memory of this process that is in use now, in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return round(int(line.split()[1]) / 1024, 1)
    raise InputError("this benchmark reads /proc/self/status, which this system does not have")


def _timed(action: Any) -> tuple[float, float]:
    """Milliseconds of processor time, and by the clock."""
    cpu, clock = time.thread_time(), time.perf_counter()
    action()
    return (time.thread_time() - cpu) * 1e3, (time.perf_counter() - clock) * 1e3


def _spread(times: list[tuple[float, float]]) -> dict[str, float]:
    cpu, clock = (sorted(each) for each in zip(*times, strict=True))
    last = len(cpu) - 1
    return {
        "p50": round(cpu[last // 2], 3),
        "p99": round(cpu[int(0.99 * last)], 3),
        "max": round(cpu[-1], 3),
        "max_by_the_clock": round(clock[-1], 3),
    }


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Soak one trie and show what it took."""
    if options.capacity < 1 or options.tokens < options.capacity:
        raise InputError(f"--tokens {options.tokens} must be at least --capacity {options.capacity}, and that 1")
    console.print("ceiling: an engine's step at 64 nodes; target: queries below 2 ms at p99, memory that stays bounded")
    gc.collect()
    gc.freeze()  # as the command does
    return {
        "benchmark": "trie",
        "core": "native" if is_native else "python",
        **soak(options.tokens, options.capacity, options.queries),
    }


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = make_parser("trie", "A soak of the shared trie.", threads=1)
    parser.add_argument("--tokens", type=whole, default=5_000_000, metavar="N", help="tokens to insert")
    parser.add_argument("--capacity", type=whole, default=1_000_000, metavar="N", help="tokens that the trie holds")
    parser.add_argument("--queries", type=whole, default=2000, metavar="N", help="drafts at capacity")
    return run_main(parser, measure)


if __name__ == "__main__":
    sys.exit(main())
