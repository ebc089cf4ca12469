"""Rounds: a variant of a peer completes all prompts one after the other, at one temperature with one seed.

Finished rounds are kept in the work folder, and reused as long as the same software would make them.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from benchmarks.common import git, read_json, write_json
from benchmarks.peers import own
from benchmarks.peers.environment import installed, python_of, weights_for
from benchmarks.peers.process import PeerError, Process
from benchmarks.peers.worker import Peer

Outputs = list[dict[str, Any]]  # per prompt `ids`, `steps` and `seconds` (of a machine that may be busy)
FIRST_SEED = 100


@dataclass(frozen=True)
class Task:
    """The prompts of all contestants."""

    prompts: list[list[int]]
    max_new_tokens: int
    stop_ids: list[int]
    separators: list[int]  # Ids of comma, period and blank, which PIA calls stop words.
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
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.close()

    def process(self, peer: Peer) -> Process:
        """The peer's process, started if need be; raises PeerError."""
        if peer.name not in self._processes:
            folder = self.work / peer.name
            folder.mkdir(parents=True, exist_ok=True)
            python, model = python_of(peer, self.work), weights_for(peer, self._model, self.work)
            self._processes[peer.name] = Process(python, peer.module, model, self._threads, folder / "log.txt")
        return self._processes[peer.name]

    def outputs(self, peer: Peer, variant: str, temperature: float, seed: int) -> Outputs:
        """A round, done before or now; raises PeerError."""
        software = software_of(peer, self.work)
        made_by = [software, self.task.facts, self._threads, self.task.prompts]
        path = self.work / "rounds" / f"{digest_of([peer.name, variant, temperature, seed, made_by])}.json"
        if path.exists() and "+changes" not in software:
            found: Outputs = read_json(path)
            return found
        plain = self.outputs(own.PEER, own.PLAIN, temperature, seed) if peer.replays else []
        done: Outputs = []
        for number in range(len(self.task.prompts)):
            request = self.task.request(number, variant, temperature, seed)
            text = {"text": plain[number]["ids"]} if plain else {}
            done.append(self.process(peer).complete({**request, **text}))
        write_json(path, done)
        return done


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
