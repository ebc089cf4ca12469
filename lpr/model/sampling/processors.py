"""Logits processors on a token tree: called at the same places and with the same ids as in plain decoding.

A processor is any callable `(input_ids [1, L] int64, scores [1, V] float32) -> scores [1, V]`, such as those of
transformers. A node's `input_ids` are its path: the committed tokens and the nodes from the root down to it. Only nodes
on the path of chosen tokens are processed, from the root downwards, one call each; other nodes keep the choice from
unprocessed logits as a guess. With one rank a processor is called once per emitted token, in order, and may be
stateful. With several, each rank processes the nodes of its shard, so a processor must be a pure function.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from transformers.generation import logits_process as stock

from lpr.config import SamplingParams, first_line
from lpr.core.accept import NOT_A_NUMBER, PROCESSOR_FAILED, as_guess
from lpr.model.sampling.grammar import Grammar
from lpr.model.transfer import to_device

Processor = Callable[[Tensor, Tensor], Tensor]
Pick = Callable[[Tensor, np.ndarray], Tensor]
"""`pick(scores [m, V], rows [m])` samples the next tokens [m] int64 of rows of the step; NOT_A_NUMBER for none."""

NOTHING_LEFT = "the logits processors left no token to choose"


class Processors:
    """The processors of one request, in order of application, and the last failure."""

    def __init__(self, functions: Sequence[Processor]) -> None:
        self.functions = tuple(functions)
        self.failure: str | None = None  # error message of the last failed node, on the rank that evaluated it

    @property
    def are_row_by_row(self) -> bool:
        """True if one call for many paths of equal length gives the same results as a call for each."""
        return all(is_row_by_row(function) for function in self.functions)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor | None:
        """The processed scores [m, V] after paths [m, L], or None if a processor failed; m is 1 unless row by row."""
        shape = scores.shape
        for function in self.functions:
            name = getattr(function, "__name__", type(function).__name__)
            try:
                scores = function(input_ids, scores)
            except Exception as failure:  # users' code may raise any type; only this request fails
                self.failure = f"logits processor {name} failed: {type(failure).__name__}: {first_line(failure)}"[:300]
                return None
            if not isinstance(scores, Tensor) or scores.shape != shape:
                got = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
                self.failure = f"logits processor {name} failed: it returned {got} for scores {list(shape)}"
                return None
        return scores

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        num_prompt: int,
        stop_ids: frozenset[int],
        device: torch.device,
        more: Sequence[Processor] = (),
        tokenizer: Any | None = None,
    ) -> Self | None:
        """The processors of `params`, then `more`, in the order of transformers' `generate`; None if there are none."""
        functions: list[Processor] = []
        if params.repetition_penalty != 1.0:
            functions.append(stock.RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
        if params.no_repeat_ngram_size:
            functions.append(stock.NoRepeatNGramLogitsProcessor(params.no_repeat_ngram_size))
        if params.presence_penalty or params.frequency_penalty:
            functions.append(OutputPenalty(num_prompt, params.presence_penalty, params.frequency_penalty))
        if params.logit_bias:
            functions.append(LogitBias(params.logit_bias, device))
        if params.min_new_tokens and stop_ids:
            ids = to_device(np.array(sorted(stop_ids), np.int64), device)
            least = params.min_new_tokens
            functions.append(stock.MinNewTokensLengthLogitsProcessor(num_prompt, least, ids, str(device)))
        if params.grammar:
            functions.append(Grammar(params.grammar, num_prompt, tokenizer))
        functions.extend(more)
        if params.forced_ids:
            functions.append(Forced(params.forced_ids, num_prompt))
        return cls(functions) if functions else None


class OutputPenalty:
    """Presence and frequency penalties of OpenAI's API, for tokens of the output (the prompt does not count)."""

    def __init__(self, num_prompt: int, presence: float, frequency: float) -> None:
        self.num_prompt, self.presence, self.frequency = num_prompt, presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        num_rows, vocabulary = scores.shape
        output = input_ids[:, self.num_prompt :].clamp(max=vocabulary)  # ids without a logit go to a spare column
        counts = torch.zeros(num_rows, vocabulary + 1, dtype=torch.int64, device=scores.device)
        counts = counts.scatter_add_(1, output, torch.ones_like(output))[:, :vocabulary]
        return scores - self.frequency * counts - self.presence * (counts > 0)


class Forced:
    def __init__(self, ids: Sequence[int], num_prompt: int) -> None:
        self.ids, self.num_prompt = ids, num_prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        place = input_ids.shape[1] - self.num_prompt
        if place >= len(self.ids):
            return scores
        only = torch.full_like(scores, -torch.inf)
        only[:, self.ids[place]] = 0.0
        return only


class LogitBias:
    def __init__(self, pairs: Sequence[tuple[int, float]], device: torch.device) -> None:
        self.ids = to_device(np.array([token for token, _ in pairs], np.int64), device)
        self.biases = to_device(np.array([bias for _, bias in pairs], np.float32), device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_add(1, self.ids, self.biases.to(scores.dtype).expand(len(scores), -1))


_STOCK = (
    "ForcedBOSToken", "ForcedEOSToken", "InfNanRemove", "MinLength", "MinNewTokensLength", "NoBadWords",
    "NoRepeatNGram", "RepetitionPenalty", "SequenceBias", "SuppressTokensAtBegin", "SuppressTokens",
)  # fmt: skip
ROW_BY_ROW = {Forced, LogitBias, OutputPenalty, *(getattr(stock, f"{name}LogitsProcessor") for name in _STOCK)}
"""Stateless processors (exactly these types) that compute each row separately."""


def is_row_by_row(function: Processor) -> bool:
    """True for the types in ROW_BY_ROW, unless an ignored length is given per row of a batch."""
    return type(function) in ROW_BY_ROW and not isinstance(getattr(function, "prompt_ignore_length", None), Tensor)


@dataclass
class ProcessorPath:
    """The evaluated nodes of one sequence in a step, whose choices go through its processors."""

    processors: Processors
    tokens: Sequence[int]  # committed tokens, the root included
    start: int  # index of its first result among the rows of the step's logits
    node_tokens: Sequence[int]  # the tokens of the evaluated nodes; the first is the root
    node_parents: Sequence[int]  # their parents, as indices into `node_tokens`; parents come first

    def follow(self, logits: Tensor, chosen: Tensor, pick: Pick) -> None:
        """Replace this sequence's part of `chosen` [n] by processed choices; `logits` are the step's [n, V].

        On a GPU all nodes are processed without waiting for the device, if the processors permit it.
        """
        if logits.device.type != "cpu" and self.processors.are_row_by_row:
            if self.choose_all(logits, chosen, pick):
                return
            self.processors.failure = None  # for `walk` to find, if it is on the path
        self.walk(logits, chosen, pick)

    def choose_all(self, logits: Tensor, chosen: Tensor, pick: Pick) -> bool:
        """Choices for every node, with one call per depth and no synchronisation; False if a processor failed."""
        paths: list[list[int]] = []  # below the root
        for parent, token in zip(self.node_parents, self.node_tokens, strict=True):
            paths.append([*paths[parent], token] if parent >= 0 else [])
        order = sorted(range(len(paths)), key=lambda node: len(paths[node]))
        flat = [token for node in order for token in paths[node]]
        # One copy to the device.
        words = to_device(np.array([*order, *self.tokens, *flat], np.int64), logits.device)
        nodes, committed, rest = words.split([len(order), len(self.tokens), len(flat)])
        scores = logits[self.start : self.start + len(order)].index_select(0, nodes).float()
        depths = [len(paths[node]) for node in order]
        processed: list[Tensor] = []
        for depth in range(depths[-1] + 1):
            count, above = depths.count(depth), sum(len(each) for each in processed)
            below, rest = rest[: count * depth].view(count, depth), rest[count * depth :]
            input_ids = torch.cat([committed.expand(count, -1), below], 1)
            found = self.processors(input_ids, scores[above : above + count])
            if found is None:
                return False
            processed.append(found)
        codes = pick(torch.cat(processed), self.start + np.array(order))
        mine = chosen[self.start : self.start + len(order)]
        broken = mine.index_select(0, nodes) == NOT_A_NUMBER
        self.processors.failure = NOTHING_LEFT  # the only failure that is still possible
        codes = torch.where((codes == NOT_A_NUMBER) & ~broken, PROCESSOR_FAILED, codes)
        if len(order) > 1:
            codes = torch.where(broken, NOT_A_NUMBER, codes)
        mine.index_copy_(0, nodes, codes)
        return True

    def walk(self, logits: Tensor, chosen: Tensor, pick: Pick) -> None:
        """Choices along their own path, guesses elsewhere; each call of `pick` waits for the device."""
        mine = chosen[self.start : self.start + len(self.node_tokens)]
        broken = mine == NOT_A_NUMBER
        mine.copy_(torch.where(broken, mine, as_guess(0) - mine))
        is_broken = broken.tolist()
        edges = {
            (up, token): node for node, (up, token) in enumerate(zip(self.node_parents, self.node_tokens, strict=True))
        }
        input_ids = to_device(np.array([self.tokens], np.int64), logits.device)
        node: int | None = 0
        while node is not None:
            # If the root is alone, its NaN is its own, and a processor may replace it.
            if is_broken[node] and len(is_broken) > 1:
                return
            row = self.start + node
            scores = self.processors(input_ids, logits[row : row + 1].to(torch.float32, copy=True))
            picked = None if scores is None else pick(scores, np.array([row]))
            code = PROCESSOR_FAILED if picked is None else int(picked)
            if code == NOT_A_NUMBER and not is_broken[node]:
                self.processors.failure = NOTHING_LEFT
                code = PROCESSOR_FAILED
            mine[node] = code
            node = edges.get((node, code))
            if node is not None and picked is not None:
                input_ids = torch.cat([input_ids, picked.view(1, 1)], 1)


def pure(processors: Processors | None) -> Processors | None:
    """Those of `processors` that keep no state of calls, in a set of their own: drafts may call them ahead of time."""
    functions = processors.functions if processors is not None else ()
    known = [each for each in functions if isinstance(each, Grammar) or is_row_by_row(each)]
    return Processors(known) if known else None
