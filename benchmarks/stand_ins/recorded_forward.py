"""A forward that answers from recorded completions, for counts that need real ranks but no model.

Everything else is the engine's own: schedule, home ranks, drafts, budgets, shards, gather, accepted paths. What it says
below a path that the text follows, and elsewhere, is said in benchmarks.stand_ins.paced. Greedy requests only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.replay import read_traces
from benchmarks.stand_ins.paced import Recorded
from lpr.config import InputError
from lpr.engine.engine import Engine
from lpr.model.inputs import Row
from lpr.model.sampling.selection import Selection

Text = tuple[list[int], list[int]]
"""Tokens of a prompt and of its completion."""


def recorded_texts(path: str, tokenizer: Any, count: int, num_prompt: int, num_output: int) -> list[Text]:
    """The first `count` traces of a file whose completion has `num_output` tokens; raises InputError.

    Prompts are cut to their last `num_prompt` tokens.
    """
    texts: list[Text] = []
    for prompt, completion in read_traces(path):
        first = tokenizer.encode(prompt, add_special_tokens=False)[-num_prompt:]
        then = tokenizer.encode(completion, add_special_tokens=False)[:num_output]
        if len(then) == num_output and (first, then) not in texts:
            texts.append((first, then))
    if len(texts) < count:
        raise InputError(f"{path} has {len(texts)} completions of {num_output} tokens, and {count} are asked for")
    return texts[:count]


class RecordedForward:
    """Takes the place of an engine's forward, on each rank, whatever the engine is configured for."""

    def __init__(self, engine: Engine, texts: Sequence[Text]) -> None:
        """Answer requests for the prompts of `texts`."""
        self._engine = engine
        self._recorded = Recorded([[*prompt, *output] for prompt, output in texts])
        self._by_prompt = {tuple(prompt): [*prompt, *output] for prompt, output in texts}
        model: Any = engine.model
        allocate = model.allocate

        def allocate_and_replace(*args: Any) -> None:
            allocate(*args)
            self._replace()

        model.allocate = allocate_and_replace
        self._replace()

    def _replace(self) -> None:
        model: Any = self._engine.model
        model.evaluate, model.fill = self.evaluate, _nothing
        for name in ("move", "clear", "move_slot", "exchange_slots"):
            setattr(model.cache, name, _nothing)

    def evaluate(self, rows: Sequence[Row], selection: Selection, num_candidates: int) -> torch.Tensor:
        """As TreeModel.evaluate."""
        rank = self._engine.comm.rank
        by_slot = {each.slots[rank]: each for each in self._engine.scheduler.running if each.slots[rank] >= 0}
        results = []
        for row in rows:
            if row.num_results:
                above = len(row.tokens) - row.num_results
                root, request = int(row.positions[above]), by_slot[row.slot]
                text = self._by_prompt[tuple(request.prompt_ids)]
                parts = (row.tokens[above:], row.parents[above:] - above, row.positions[above:] - root)
                tokens, parents, depths = (each.tolist() for each in parts)
                results.append(self._recorded.answers(text, root, tokens, parents, depths, num_candidates))
        return torch.from_numpy(np.concatenate(results))


def _nothing(*args: Any) -> None:
    """There is no K/V."""
