"""Rounds: a variant of a peer completes all prompts one after the other, at one temperature with one seed.

Finished rounds are kept in the work folder, and reused as long as the same software would make them.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from benchmarks.common import git, read_json, write_json
from benchmarks.peers import own
from benchmarks.peers.environment import installed, python_of, weights_for
from benchmarks.peers.process import PeerError, Process
from benchmarks.peers.recipe import Peer

Outputs = list[dict[str, Any]]
"""Per prompt `ids`, `steps` and `seconds` (of a machine that may be busy)."""
WARM_UP_TOKENS = 16
FIRST_SEED = 100


@dataclass(frozen=True)
class Task:
    """The prompts of all contestants."""

    prompts: list[list[int]]
    max_new_tokens: int
    stop_ids: list[int]
    separators: list[int]
    """Ids of comma, period and blank, which PIA calls stop words."""
    facts: dict[str, Any]

    def request(self, number: int, variant: str, temperature: float, seed: int) -> dict[str, Any]:
        """The request for a prompt; the first of a round clears the peer's indexes."""
        return {
            "variant": variant, "prompt": self.prompts[number], "max_new_tokens": self.max_new_tokens,
            "temperature": temperature, "seed": seed, "stop_ids": self.stop_ids, "separators": self.separators,
            "fresh": number == 0,
        }  # fmt: skip


class Rounds:
    """Completes rounds, with a process per peer; a context."""

    def __init__(
        self, work: Path, model: Path, task: Task, threads: int = 1, processes: dict[str, Process] | None = None
    ) -> None:
        """`processes` are running ones by the name of their peer."""
        self.task, self.work, self._model, self._threads = task, work, model, threads or 1
        self._processes = dict(processes or {})

    def __enter__(self) -> Self:
        """The rounds."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes."""
        for process in self._processes.values():
            process.close()

    def process(self, peer: Peer) -> Process:
        """The peer's process, started if need be; raises PeerError."""
        if peer.name not in self._processes:
            folder = self.work / peer.name
            folder.mkdir(parents=True, exist_ok=True)
            self._processes[peer.name] = Process(
                python_of(peer, self.work), peer.module, weights_for(peer, self._model, self.work), self._threads,
                folder / "log.txt",
            )  # fmt: skip
        return self._processes[peer.name]

    def outputs(self, peer: Peer, variant: str, temperature: float, seed: int) -> Outputs:
        """A round, done before or now; raises PeerError."""
        done = self._read(peer, variant, temperature, seed)
        plain = self.outputs(own.PEER, own.PLAIN, temperature, seed) if peer.replays else []
        for number in range(len(self.task.prompts)):
            if number in done:
                continue
            request = self.task.request(number, variant, temperature, seed)
            if plain:
                request["text"] = plain[number]["ids"]
            done[number] = self.process(peer).complete(request)
            if variant not in peer.learns:  # else only a whole round can be reused
                self.keep(peer, variant, temperature, seed, done)
        self.keep(peer, variant, temperature, seed, done)
        return [done[number] for number in range(len(self.task.prompts))]

    def keep(self, peer: Peer, variant: str, temperature: float, seed: int, done: dict[int, dict[str, Any]]) -> None:
        """Keep outputs by their prompt's number, for this run and later ones."""
        whole = len(done) == len(self.task.prompts)
        if variant in peer.learns and not whole:
            return
        keys = self._keys
        outputs = {keys[number]: output for number, output in done.items()}
        path = self._path(peer, variant, temperature, seed)
        if path.exists() and variant not in peer.learns:
            found = read_json(path)
            outputs = {**found["outputs"], **outputs} if found["made_by"] == self._made_by(peer, variant) else outputs
        write_json(path, {"made_by": self._made_by(peer, variant), "outputs": outputs})

    @property
    def _keys(self) -> list[str]:
        return [digest_of(prompt) for prompt in self.task.prompts]

    def _path(self, *round_of: Any) -> Path:
        peer, *rest = round_of
        return Path(self.work) / "rounds" / f"{digest_of([peer.name, *rest])}.json"

    def _made_by(self, peer: Peer, variant: str) -> dict[str, Any]:
        facts = {"by": software_of(peer, self.work), "facts": self.task.facts, "threads": self._threads}
        return {**facts, "prompts": digest_of(self.task.prompts)} if variant in peer.learns else facts

    def _read(self, peer: Peer, variant: str, temperature: float, seed: int) -> dict[int, dict[str, Any]]:
        """Outputs of the same software for these prompts."""
        path = self._path(peer, variant, temperature, seed)
        if not path.exists():
            return {}
        found = read_json(path)
        made_by = self._made_by(peer, variant)
        if found["made_by"] != made_by or "+changes" in str(made_by["by"]):
            return {}
        return {number: found["outputs"][key] for number, key in enumerate(self._keys) if key in found["outputs"]}


def row_of(rounds: Rounds, peer: Peer, variant: str, temperature: float, seeds: Sequence[int]) -> dict[str, Any]:
    """A row of the result: tokens per step over all prompts and seeds, and whether the ids are plain decoding's."""
    row: dict[str, Any] = {
        "peer": peer.name, "variant": variant, "temperature": temperature, "seeds": list(seeds),
        "name": f"{peer.name}, {variant}",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }  # fmt: skip
    try:
        found = [rounds.outputs(peer, variant, temperature, seed) for seed in seeds]
        row["by"] = software_of(peer, rounds.work)
        comparable = not peer.replays and (not temperature or peer is own.PEER)
        plain = [rounds.outputs(own.PEER, own.PLAIN, temperature, seed) for seed in seeds] if comparable else []
    except PeerError as failure:
        return {**row, "failed": str(failure)}
    counts = [(sum(len(each["ids"]) for each in one), sum(each["steps"] for each in one)) for one in found]
    tokens, steps = (sum(each) for each in zip(*counts, strict=True))
    row |= {"num_tokens": tokens, "num_steps": steps, "tokens_per_step": round(tokens / steps, 4)}
    row["by_seed"] = [round(count / steps_of, 4) for count, steps_of in counts]
    if comparable:
        pairs = [pair for ours, theirs in zip(found, plain, strict=True) for pair in zip(ours, theirs, strict=True)]
        row["outputs"], row["different"] = len(pairs), sum(ours["ids"] != theirs["ids"] for ours, theirs in pairs)
    return row


def time_them(
    rounds: Rounds, entries: Sequence[tuple[Peer, str]], first: int, advance: Callable[[], None]
) -> Iterator[dict[str, Any]]:
    """Seconds of every entry for every prompt, greedily, each prompt completed by all of them in changing order.

    The first entry is the base of the others: `base_seconds`, of the same prompt in the same run.
    """
    task, done = rounds.task, [dict[int, dict[str, Any]]() for _ in entries]
    for peer, variant in entries:
        request = task.request(0, variant, 0.0, FIRST_SEED)
        rounds.process(peer).complete({**request, "max_new_tokens": WARM_UP_TOKENS})
    for number in range(len(task.prompts)):
        for place in range(len(entries)):
            which = (place + number) % len(entries)
            peer, variant = entries[which]
            done[which][number] = rounds.process(peer).complete(task.request(number, variant, 0.0, FIRST_SEED))
        for (peer, variant), answers in zip(entries, done, strict=True):
            yield {
                "peer": peer.name, "variant": variant, "prompt": first + number,
                "seconds": round(answers[number]["seconds"], 4),
                "base_seconds": round(done[0][number]["seconds"], 4), "load_average": round(os.getloadavg()[0], 2),
                "by": software_of(peer, rounds.work),
            }  # fmt: skip
            rounds.keep(peer, variant, 0.0, FIRST_SEED, answers)
        advance()


def digest_of(value: Any) -> str:
    """A short name for a value."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def software_of(peer: Peer, work: Path) -> str:
    """The commit of a peer; for lpr, the last commit that changed its code."""
    if peer.repository:
        return str((installed(peer, work) or {}).get("commit", "unknown"))[:12]
    if peer is not own.PEER:
        import transformers

        return f"transformers {transformers.__version__}"
    root = Path(__file__).parents[2]
    code = ["--", "lpr", "native"]
    commit = git(root, "log", "-1", "--format=%h", *code)
    return f"lpr {commit}" + ("+changes" if git(root, "status", "--porcelain", *code) else "")
