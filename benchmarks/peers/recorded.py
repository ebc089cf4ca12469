"""Peers that draft from text alone, replayed over a model's recorded texts, without the model.

Verification by sampling accepts a drafted token where the sampled text continues with it, so a recorded text takes the
steps of a run that writes this text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from benchmarks.peers import arctic
from benchmarks.peers.environment import installed, python_of
from benchmarks.peers.process import Process
from lpr.config import InputError

CountSteps = Callable[..., int]
"""The steps of a text, given its prompt and its output, and as a further argument the most nodes of a draft."""
LOOKUP_TOKENS = 10


@contextmanager
def replayed_peers(work: Path) -> Iterator[dict[str, CountSteps]]:
    """Peers that can be replayed, by name: Arctic's suffix tree installed in `work`, and transformers' prompt lookup.

    Each text is drafted for by itself. Raises InputError where Arctic's is not installed.
    """
    if not installed(arctic.PEER, work):
        raise InputError(f"arctic is not installed in {work}; python -m benchmarks.peers install --only arctic")
    with Process(
        python_of(arctic.PEER, work), arctic.PEER.module, work, 1, work / arctic.PEER.name / "log.txt"
    ) as process:

        def replay(variant: str, prompt: list[int], output: list[int], num_nodes: int = arctic.DEPTH) -> int:
            request = {
                "variant": variant, "prompt": prompt, "text": output, "fresh": True, "max_new_tokens": len(output),
                "stop_ids": [], "nodes": num_nodes,
            }  # fmt: skip
            return int(process.complete(request)["steps"])

        def arctic_as(variant: str) -> CountSteps:
            return partial(replay, variant)

        yield {
            "transformers, prompt lookup": lookup_steps,
            **{f"arctic, {variant}": arctic_as(variant) for variant in arctic.PEER.variants},
        }


def lookup_steps(prompt: Sequence[int], output: Sequence[int], num_nodes: int = LOOKUP_TOKENS) -> int:
    """The steps of a text by transformers' prompt lookup."""
    text = torch.tensor([[*prompt, *output]])
    longest = text.shape[1] + num_nodes
    search: Any = PromptLookupCandidateGenerator(num_output_tokens=num_nodes, max_length=longest)
    at, steps = len(prompt), 0
    while at < text.shape[1]:
        drafted = search.get_candidates(text[:, :at])[0][0, at:].tolist()
        for token, came in zip(drafted, text[0, at:].tolist(), strict=False):
            if token != came:
                break
            at += 1
        at += 1
        steps += 1
    return steps
