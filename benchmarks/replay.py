"""Replay recorded completions to measure drafting alone: `python -m benchmarks.replay --traces FILE.jsonl`.

Greedy decoding emits the recorded completion whatever is drafted, so no model is needed to count its steps: the
accepted path of each draft follows the recorded tokens, and the next one is the bonus token. Prompt and completion are
tokenised separately, without special tokens. Recycled candidates and the Jacobi window need a model and are off.

Each line of a trace file is a JSON object with the strings `prompt` and `completion`. `--warm FILE` puts the
completions of its tasks into the shared index before the first task; the same file may serve for both:

    python -m benchmarks.replay --traces T.jsonl --last 50                              # cold
    python -m benchmarks.replay --traces T.jsonl --last 50 --warm T.jsonl --warm-first 50  # warm

`expected_per_step` is the sum of the drafts' probabilities and `accepted_per_step` the number of accepted nodes; they
agree where the calibration is good. `draft_ms_per_step` (median) and `draft_ms_p99` are processor time of the thread.
`limit_tokens_per_step` comes from copying, in every step, the longest phrase that occurs in the text so far, and one
more token: the parse of Lempel and Ziv (1977). A copy may overlap its source. A tree can leave a phrase for another, so
the limit is not a strict bound; `share_of_limit` relates drafting to it. With `--learn` each completed task enters the
shared index, as in an engine; the result then depends on the order and number of tasks.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import tyro
from rich.console import Console

from benchmarks.common import Flag, Options, Whole, progress, run_main
from lpr.config import DecodeConfig, InputError, TreeSizes
from lpr.core.suffix_index import as_learnt
from lpr.native import Drafter, SuffixIndex, TokenTree

Encode = Callable[[str], list[int]]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(Options):
    """Measure drafting on recorded completions."""

    traces: str  # JSON lines with prompt and completion.
    skip: Annotated[Whole, tyro.conf.arg(name="from")] = 0  # Leave out the first N tasks.
    first: Whole | None = None  # Replay the first N tasks only.
    last: Whole | None = None  # Replay the last N tasks only.
    warm: str | None = None  # Trace file whose completions are known before the first task.
    warm_first: Whole | None = None  # Know only the first N tasks of --warm.
    warm_last: Whole | None = None  # Know only the last N tasks of --warm.
    learn: Flag = False  # Each replayed completion enters the shared index.
    budget: Whole = 64  # Node budget of a step.
    branch_length: Whole | None = None  # Greatest depth of a node; the budget if none is given.
    tokenizer: str | None = None  # SentencePiece .model file, or name or path for AutoTokenizer.


@dataclass(frozen=True)
class Task:
    """One recorded request, in tokens."""

    prompt: list[int]
    completion: list[int]


@dataclass
class Tally:
    """Counts of a replay; `expected` sums the probabilities of all nodes; the lists have an entry per step."""

    num_steps: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    expected: float = 0.0
    fewest_steps: int = 0  # Steps of the limit .
    draft_ms: list[float] = field(default_factory=list)
    learn_ms: list[float] = field(default_factory=list)


SEPARATOR = -1
"""Between texts, so that no phrase runs from one into the next."""


class Phrases:
    """Longest phrases of a text that occur before a growing position."""

    def __init__(self, known: Iterable[Sequence[int]], text: Sequence[int]) -> None:
        """Index `text`, with the `known` texts before it."""
        joined: list[int] = []
        for each in known:
            joined += [*each, SEPARATOR]
        self._begin = len(joined)
        self._tokens = np.array([*joined, *text], np.int64)
        keys = self._tokens[:-1] << 32 | self._tokens[1:]
        order = np.argsort(keys, kind="stable")
        changes = np.flatnonzero(np.diff(keys[order])) + 1
        self._by_pair = {int(keys[places[0]]): places for places in np.split(order, changes) if len(places)}
        self._first: dict[int, int] = {}
        for place, token in enumerate(self._tokens.tolist()):
            self._first.setdefault(token, place)

    def longest(self, at: int) -> int:
        """Length of the longest phrase at position `at` that also occurs at an earlier position."""
        here, tokens = self._begin + at, self._tokens
        if here >= len(tokens) or self._first[int(tokens[here])] >= here:
            return 0
        if here + 1 == len(tokens):
            return 1
        places = self._by_pair[int(tokens[here] << 32 | tokens[here + 1])]
        places = places[: np.searchsorted(places, here)]
        if not len(places):
            return 1
        length = 2
        while here + length < len(tokens):
            going_on = places[tokens[places + length] == tokens[here + length]]
            if not len(going_on):
                break
            places, length = going_on, length + 1
        return length


def fewest_steps(prompt: Sequence[int], completion: Sequence[int], known: Iterable[Sequence[int]] = ()) -> int:
    """Steps of the limit for `completion`: each is a longest phrase of the text so far, and one more token."""
    phrases = Phrases(known, [*prompt, *completion])
    at, end, steps = len(prompt), len(prompt) + len(completion), 0
    while at < end:
        at += phrases.longest(at) + 1
        steps += 1
    return steps


def read_traces(path: str) -> list[tuple[str, str]]:
    """The (prompt, completion) pairs of a trace file; raises InputError that names the line."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(f"cannot read {path}: {reason}") from error
    pairs = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InputError(f"{path}, line {number}: not JSON ({error})") from error
        if not isinstance(row, dict) or not all(isinstance(row.get(k), str) for k in ("prompt", "completion")):
            raise InputError(f"{path}, line {number}: needs the strings 'prompt' and 'completion'")
        pairs.append((row["prompt"], row["completion"]))
    if not pairs:
        raise InputError(f"{path} holds no traces")
    return pairs


def default_tokenizer() -> str:
    """Path of the 32k SentencePiece model that the `mistral_common` package ships."""
    spec = find_spec("mistral_common")
    for place in spec.submodule_search_locations or () if spec else ():
        found = sorted((Path(place) / "data").glob("*.model.v3")) + sorted((Path(place) / "data").glob("*.model.v1"))
        if found:
            return str(found[0])
    raise InputError("no default tokenizer: pip install mistral-common sentencepiece, or give --tokenizer")


def load_tokenizer(name: str) -> Encode:
    """An encoder without special tokens, of a SentencePiece file or of what AutoTokenizer takes."""
    try:
        if Path(name).is_file() and ".model" in Path(name).name:
            from sentencepiece import SentencePieceProcessor

            return SentencePieceProcessor(model_file=name).encode
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(name)
        return lambda text: tokenizer.encode(text, add_special_tokens=False)
    except Exception as error:  # the libraries raise many types
        raise InputError(f"cannot load tokenizer {name!r}: {str(error).strip().splitlines()[0]}") from error


def select(pairs: list[T], first: int | None, last: int | None) -> list[T]:
    """The first `first` of the pairs, or the last `last`, or all of them; raises InputError if both are given."""
    if first is not None and last is not None:
        raise InputError("--first and --last, and --warm-first and --warm-last, exclude each other")
    if first is not None:
        return pairs[:first]
    return pairs if last is None else pairs[max(0, len(pairs) - last) :]


def tasks_of(pairs: Sequence[tuple[str, str]], encode: Encode, path: str) -> list[Task]:
    """The pairs of a trace file in tokens, without empty ones; raises InputError if nothing is left."""
    tasks = [Task(encode(prompt), encode(completion)) for prompt, completion in pairs]
    tasks = [task for task in tasks if task.prompt and task.completion]
    if not tasks:
        raise InputError(f"{path}: every prompt or completion is empty")
    return tasks


def learn(trie: SuffixIndex, documents: Iterable[list[int]]) -> None:
    """Put finished outputs into the index, as an engine does."""
    for document in documents:
        trie.extend(document)
        trie.end_document()


def follow(tree: TokenTree, tokens: Sequence[int], done: int) -> tuple[list[int], list[int]]:
    """The path of `tree` along the recorded `tokens` after the first `done`, and the tokens that the step emits."""
    node = 0
    path: list[int] = []
    emitted: list[int] = []
    while node >= 0 and done + len(emitted) < len(tokens):
        emitted.append(tokens[done + len(emitted)])
        path.append(node)
        node = tree.find(node, emitted[-1])
    if node >= 0:  # the recorded text ended on a drafted node
        path.append(node)
    return path, emitted


class FixedSizes:
    """Drafts trees of one size for `replay_task`, and counts in `tally`."""

    def __init__(self, config: TreeSizes, shared: SuffixIndex, known: Sequence[Sequence[int]] = ()) -> None:
        """A draft has up to `config.trie_nodes` nodes; `known` are the texts of the `shared` index."""
        self.config, self.shared, self.tally = config, shared, Tally()
        self.known = list(known)

    def draft(self, drafter: Drafter, tree: TokenTree) -> None:
        """Draft the tree of a step."""
        start = time.thread_time()
        probabilities = drafter.draft(tree, self.config.trie_nodes)
        self.tally.draft_ms.append((time.thread_time() - start) * 1e3)
        self.tally.expected += sum(probabilities[1:])


def replay_task(task: Task, sizes: FixedSizes) -> None:
    """Decode one recorded task step by step, adding to `sizes.tally`."""
    tally, drafter = sizes.tally, Drafter(sizes.config, sizes.shared, None, None, [], len(task.prompt))
    drafter.observe(task.prompt)
    tally.fewest_steps += fewest_steps(task.prompt, task.completion, sizes.known)
    done, root = 0, task.prompt[-1]
    while done < len(task.completion):
        tree = TokenTree(root)
        sizes.draft(drafter, tree)
        path, emitted = follow(tree, task.completion, done)
        root, done = emitted[-1], done + len(emitted)
        start = time.thread_time()
        drafter.learn(tree, path)
        tally.learn_ms.append((time.thread_time() - start) * 1e3)
        drafter.observe(emitted)
        tally.num_accepted += len(path) - 1
        tally.num_steps += 1
        tally.num_drafted += len(tree) - 1
    tally.num_tokens += len(task.completion)


def measure(options: ReplayOptions, console: Console) -> dict[str, Any]:
    """Replay as the options say; returns the facts and results of the JSON line."""
    config = DecodeConfig(
        window_size=0, trie_nodes=options.budget, branch_length=options.branch_length or max(1, options.budget)
    ).resolved()
    tokenizer = options.tokenizer or default_tokenizer()
    encode = load_tokenizer(tokenizer)
    traces = select(read_traces(options.traces)[options.skip :], options.first, options.last)
    warm = select(read_traces(options.warm), options.warm_first, options.warm_last) if options.warm else []
    tasks = tasks_of(traces, encode, options.traces)
    known = [as_learnt(encode(prompt), encode(completion)) for prompt, completion in warm]
    shared = SuffixIndex(config.trie_capacity)
    learn(shared, known)
    warm_tokens, num_warm = len(shared), len(known)
    console.print(f"ceiling: every drafted token right, {config.branch_length + 1} tokens per step")
    found = replay(tasks, FixedSizes(config, shared, known), options.learn, console)
    return {
        **found,
        "setting": "warm" if num_warm else "cold",
        "learn": options.learn,
        "traces": options.traces,
        "first_prompt": options.skip,
        "num_tasks": len(tasks),
        "budget": options.budget,
        "branch_length": config.branch_length,
        "warm": options.warm,
        "num_warm_tasks": num_warm,
        "num_warm_tokens": warm_tokens,
        "tokenizer": Path(tokenizer).name,
    }


def replay(tasks: Sequence[Task], sizes: FixedSizes, learns: bool, console: Console) -> dict[str, Any]:
    """Replay the tasks, whose completions enter the shared index if it `learns`; returns the figures."""
    with progress(console, len(tasks), "replay") as advance:
        for task in tasks:
            replay_task(task, sizes)
            if learns:
                sizes.known.append(as_learnt(task.prompt, task.completion))
                learn(sizes.shared, [as_learnt(task.prompt, task.completion)])
            advance()
    tally = sizes.tally
    ordered = sorted(tally.draft_ms)
    return {
        "tokens_per_step": round(tally.num_tokens / tally.num_steps, 4),
        "limit_tokens_per_step": round(tally.num_tokens / tally.fewest_steps, 4),
        "share_of_limit": round(tally.fewest_steps / tally.num_steps, 4),
        "drafted_per_step": round(tally.num_drafted / tally.num_steps, 2),
        "draft_ms_per_step": round(statistics.median(ordered), 4),
        "draft_ms_p99": round(ordered[min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)], 4),
        "learn_ms_per_step": round(statistics.median(tally.learn_ms), 4),
        "expected_per_step": round(tally.expected / tally.num_steps, 4),
        "accepted_per_step": round(tally.num_accepted / tally.num_steps, 4),
        "num_tokens": tally.num_tokens,
        "num_steps": tally.num_steps,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return run_main("replay", ReplayOptions, measure, arguments)


if __name__ == "__main__":
    sys.exit(main())
