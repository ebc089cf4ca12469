"""One rank leads, the others follow: requests that only rank 0 knows of, run by every rank alike.

Rank 0 announces what it wants (requests, a configuration, the end) in the header of a step's gather; the message
follows as one broadcast, and every rank applies it after the same step. In a world of one the same lines run, with
nobody to tell.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from lpr.config import DecodeConfig, SamplingParams
from lpr.engine.engine import Engine
from lpr.engine.request import Chunk, Prompt, Request


class Leader:
    """Rank 0's side of an engine that all ranks share."""

    def __init__(self, engine: Engine) -> None:
        """Lead the ranks of `engine`'s world."""
        self.engine = engine
        self._new: list[Request] = []
        self._told: deque[Request] = deque()

    @property
    def busy(self) -> bool:
        """Is any request not finished yet?"""
        return bool(self._new or self._told or self.engine.busy)

    def submit(self, prompt: Prompt, params: SamplingParams) -> Request:
        """Queue a request for all ranks. Raises InputError for a prompt that cannot be completed."""
        request = self.engine.prepare(prompt, params)
        self._new.append(request)
        return request

    def configure(self, decode: DecodeConfig) -> None:
        """Let all ranks decode with other settings; needs an engine without requests."""
        if self.busy:
            raise RuntimeError("configure needs an engine without requests")
        self._tell({"configure": asdict(decode)})

    def learn(self, outputs: Sequence[Sequence[int]]) -> None:
        """Let all ranks draft from earlier outputs."""
        self._tell({"learn": outputs})

    def load_trie(self, path: str | Path) -> None:
        """Let all ranks draft from a trie file, which only rank 0 needs to have. Raises InputError on rank 0.

        The tokens are broadcast, so ranks on other machines need no copy of the file, and all have the same one even if
        another program replaces it meanwhile.
        """
        if self.busy:
            raise RuntimeError("load_trie needs an engine without requests")
        self._tell({"trie": True}, self.engine.read_trie(path).tobytes())

    def step(self) -> list[Chunk]:
        """One step of all ranks; new requests reach them with it and run from the next one on."""
        if self._new and not self.engine.announcing:
            requests = [{"prompt": r.prompt_ids, "params": asdict(r.params)} for r in self._new]
            self.engine.announce(_pack({"submit": requests}))
            self._told.extend(self._new)
            self._new.clear()
        chunks = self.engine.step()
        while (message := self.engine.received()) is not None:
            parts, tokens = _unpack(message)
            for _ in parts.get("submit", ()):
                self.engine.enqueue(self._told.popleft())
            _apply_settings(self.engine, parts, tokens)
        return chunks

    def close(self) -> None:
        """Let the other ranks leave `follow`."""
        self._tell({"close": True})

    def _tell(self, message: dict[str, object], tokens: bytes = b"") -> None:
        while self.engine.announcing:
            self.step()
        self.engine.announce(_pack(message, tokens))
        while self.engine.announcing:
            self.step()


def follow(engine: Engine) -> None:
    """What every rank but 0 does: take part in each step until rank 0 closes."""
    while True:
        engine.step()
        while (message := engine.received()) is not None:
            parts, tokens = _unpack(message)
            for each in parts.get("submit", ()):
                engine.submit(each["prompt"], SamplingParams(**each["params"]))
            if parts.get("close"):
                return
            _apply_settings(engine, parts, tokens)


def _pack(parts: dict[str, Any], tokens: bytes = b"") -> bytes:
    """A message: one line of JSON, then int32 tokens, of which there can be millions."""
    return json.dumps(parts).encode() + b"\n" + tokens


def _unpack(message: bytes) -> tuple[dict[str, Any], np.ndarray]:
    line, _, tokens = message.partition(b"\n")
    return json.loads(line), np.frombuffer(tokens, np.int32)


def _apply_settings(engine: Engine, parts: dict[str, Any], tokens: np.ndarray) -> None:
    if "configure" in parts:
        engine.reconfigure(DecodeConfig(**parts["configure"]))
    if "trie" in parts:
        engine.restore(tokens)
    for token_ids in parts.get("learn", ()):
        engine.learn(token_ids)
