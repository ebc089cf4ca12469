"""The description of a peer, and its process, which answers requests one by one, as JSON lines.

A request has `variant`, `prompt` (ids), `max_new_tokens`, `temperature`, `seed`, `stop_ids`, `separators` (the ids of
comma, period and blank), `text` (of plain decoding, for replays) and `fresh` (clear the indexes of earlier requests).
The answer has `ids`, `steps` (forward passes that emitted tokens, the prompt's included), `seconds`.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Request = dict[str, Any]
Complete = Callable[[Request], tuple[list[int], int]]  # completes a request: its ids and its steps


@dataclass(frozen=True)
class Peer:
    """A system that completes prompts in a process of its own."""

    name: str  # Its name on the command line and in the table.
    module: str  # The script that completes prompts with it.
    variants: Mapping[str, str]  # Settings under test: name to description.
    why: str  # A remark for readers of its figures.
    repository: str = ""  # Its git URL; empty for a package of this environment.
    commit: str = ""
    folders: Mapping[str, str] = field(default_factory=dict)
    """Folders of the checkout, and the names under which they are imported."""
    requirements: Sequence[str] = ()  # Packages that pip installs into its environment.
    build: Callable[[Path, Path], None] | None = None
    """Compiles it, given the environment's folder and the one that holds `folders`."""
    old_weights: bool = False  # True if it needs a model folder in the form of transformers 4.
    model_type: str = ""  # The architecture whose code it runs the model with, if it differs from the model's own.
    learns: Sequence[str] = ()  # Variants that keep text from one prompt for the next.
    samples: bool = True  # True if it decodes at temperatures above 0.
    replays: bool = False  # True if it drafts for existing texts, instead of completing prompts.

    @property
    def identity(self) -> str:
        """Changes if another installation is necessary."""
        return json.dumps([self.repository, self.commit, dict(self.folders), list(self.requirements)])


SOFTWARE = ("torch", "transformers", "numpy")


def main(start: Callable[[str], Complete]) -> int:
    """Serve requests from stdin until it ends; `start` loads the model. Arguments: model folder and threads."""
    folder, threads = sys.argv[1], int(sys.argv[2])
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # other output goes to stderr
    if threads:
        _set_threads(threads)
    complete = start(folder)
    _send(answers, {"software": {"python": platform.python_version(), **_software()}})
    for line in sys.stdin:
        _send(answers, _answer(complete, json.loads(line)))
    return 0


def cut(ids: list[int], request: Request) -> list[int]:
    """The ids up to the first stop token, at most `max_new_tokens`."""
    ids = ids[: request["max_new_tokens"]]
    ends = [at for at, token in enumerate(ids) if token in request["stop_ids"]]
    return ids[: ends[0] + 1] if ends else ids


class Calls:
    """Counts the calls of a model's method."""

    def __init__(self, model: Any, name: str) -> None:
        """Wrap the method `name` of `model`."""
        self.number = 0
        method = getattr(model, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            self.number += 1
            return method(*args, **kwargs)

        setattr(model, name, counting)


def how_to_choose(request: Request) -> dict[str, Any]:
    """Arguments of transformers' `generate` for a request's temperature."""
    if not request["temperature"]:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": request["temperature"], "top_k": 0, "top_p": 1.0}


def _answer(complete: Complete, request: Request) -> dict[str, Any]:
    began = time.perf_counter()
    try:
        ids, steps = complete(request)
    except Exception as failure:  # any failure is the peer's result
        traceback.print_exc()
        return {"failed": f"{type(failure).__name__}: {failure}"[:300]}
    return {"ids": cut(ids, request), "steps": steps, "seconds": time.perf_counter() - began}


def _send(answers: Any, value: dict[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


def _set_threads(threads: int) -> None:
    try:
        import torch
    except ImportError:  # a replay does not need torch
        return
    torch.set_num_threads(threads)


def _software() -> dict[str, str]:
    found = {}
    for name in SOFTWARE:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
