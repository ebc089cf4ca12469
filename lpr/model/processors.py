"""Logits processors on a token tree: called where plain decoding would call them, with the ids it would have.

A processor is any callable `(input_ids [1, L] int64, scores [1, V] float32) -> scores [1, V]`, such as those of
transformers. For a node, `input_ids` is the node's own path: the committed tokens and the nodes from the root down to
it. Only the nodes of the path that the choices themselves follow are asked about, one call each, from the root
downwards. So with one rank a processor is called once per emitted token and in order, as by plain decoding, and may
keep a state; per token it costs what it costs there. (Asking about every node would take up to 184 calls a step with
the default DecodeConfig.) With several ranks each rank asks about the nodes of the path in its own shard, so a
processor must then be a function of its two arguments, the same on every rank.

The other nodes keep the choice of the unprocessed logits as a guess for the Jacobi window. A rank that strayed from
the path, because its logits differ from the owner's in a last bit, has reported only guesses below that node, and
`accept` stops there: a shorter step, the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from lpr.config import SamplingParams
from lpr.core.accept import NOT_A_NUMBER, PROCESSOR_FAILED, as_guess
from lpr.model.grammar import Grammar

Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Processors:
    """The processors of one request, in the order in which they are applied, and what went wrong in them."""

    def __init__(self, functions: Sequence[Processor]) -> None:
        """Apply `functions` one after the other."""
        self.functions = tuple(functions)
        self.failure: str | None = None
        """Why the last failed node failed, in one line, on the rank that evaluated it."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor | None:
        """The processed scores [1, V] after a path [1, L], or None if a processor failed."""
        shape = scores.shape
        for function in self.functions:
            name = getattr(function, "__name__", type(function).__name__)
            try:
                scores = function(input_ids, scores)
            except Exception as failure:  # users' code: anything can come, and it concerns this request only
                lines = str(failure).strip().splitlines() or ["no message"]
                self.failure = f"logits processor {name} failed: {type(failure).__name__}: {lines[0]}"[:300]
                return None
            if not isinstance(scores, torch.Tensor) or scores.shape != shape:
                got = list(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__
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
    ) -> Processors | None:
        """What `params` ask for and then `more`, in the order of transformers' `generate`; None if that is nothing."""
        functions: list[Processor] = []
        if params.repetition_penalty != 1.0:
            functions.append(RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
        if params.no_repeat_ngram_size:
            functions.append(NoRepeatNGramLogitsProcessor(params.no_repeat_ngram_size))
        if params.presence_penalty or params.frequency_penalty:
            functions.append(OutputPenalty(num_prompt, params.presence_penalty, params.frequency_penalty))
        if params.logit_bias:
            functions.append(LogitBias(params.logit_bias, device))
        if params.min_new_tokens and stop_ids:
            ids = torch.tensor(sorted(stop_ids), device=device)
            functions.append(MinNewTokensLengthLogitsProcessor(num_prompt, params.min_new_tokens, ids, str(device)))
        if params.grammar:
            functions.append(Grammar(params.grammar, num_prompt, tokenizer))
        functions.extend(more)
        if params.forced_ids:
            functions.append(Forced(params.forced_ids, num_prompt))
        return cls(functions) if functions else None


class OutputPenalty:
    """Penalties for what the output holds already, as OpenAI's API defines them (the prompt does not count)."""

    def __init__(self, num_prompt: int, presence: float, frequency: float) -> None:
        """For a request whose first `num_prompt` tokens are the prompt."""
        self.num_prompt = num_prompt
        self.presence = presence
        self.frequency = frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores [1, V] after the path `input_ids` [1, L]."""
        counts = torch.bincount(input_ids[0, self.num_prompt :], minlength=scores.shape[1])
        return scores - self.frequency * counts - self.presence * (counts > 0)


class Forced:
    """Leaves one token to choose at each place of a text that is known."""

    def __init__(self, ids: Sequence[int], num_prompt: int) -> None:
        """The output behind `num_prompt` tokens begins with `ids`."""
        self.ids = ids
        self.num_prompt = num_prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores [1, V] after the path `input_ids` [1, L]."""
        place = input_ids.shape[1] - self.num_prompt
        if place >= len(self.ids):
            return scores
        only = torch.full_like(scores, -torch.inf)
        only[0, self.ids[place]] = 0.0
        return only


class LogitBias:
    """What is added to the logits of some tokens."""

    def __init__(self, pairs: Sequence[tuple[int, float]], device: torch.device) -> None:
        """Pairs of a token id and its bias."""
        self.ids = torch.tensor([token for token, _ in pairs], device=device)
        self.biases = torch.tensor([bias for _, bias in pairs], device=device)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores [1, V] after any path."""
        return scores.index_add(1, self.ids, self.biases[None].to(scores.dtype))


@dataclass
class ProcessorPath:
    """The results of one sequence in a step, for following its choices through its processors."""

    processors: Processors
    tokens: Sequence[int]
    """Committed tokens, the root included."""
    start: int
    """Where its results begin among the rows of the step's logits."""
    node_tokens: Sequence[int]
    """The tokens of the evaluated nodes; the first is the root."""
    node_parents: Sequence[int]
    """Their parents, as indices into `node_tokens`; parents come first."""

    def follow(self, logits: torch.Tensor, chosen: torch.Tensor, pick: Callable[[torch.Tensor, int], int]) -> None:
        """Replace this sequence's part of `chosen` [n]: processed choices along their own path, guesses elsewhere.

        `logits` are the step's [n, V]; `pick(scores [1, V], row)` chooses the next token of a row or says -1. Each
        call of `pick` waits for the device, as many processors do themselves.
        """
        mine = chosen[self.start : self.start + len(self.node_tokens)]
        broken = mine == NOT_A_NUMBER
        mine.copy_(torch.where(broken, mine, as_guess(0) - mine))
        is_broken = broken.tolist()
        edges = {
            (up, token): node for node, (up, token) in enumerate(zip(self.node_parents, self.node_tokens, strict=True))
        }
        input_ids = torch.tensor([self.tokens], device=logits.device)
        node: int | None = 0
        while node is not None:
            # Alone in its step a root cannot have caught another node's NaN; a processor may be there to repair it.
            if is_broken[node] and len(is_broken) > 1:
                return
            row = self.start + node
            scores = self.processors(input_ids, logits[row : row + 1].to(torch.float32, copy=True))
            code = PROCESSOR_FAILED if scores is None else pick(scores, row)
            if code == NOT_A_NUMBER and not is_broken[node]:
                self.processors.failure = "the logits processors left no token to choose"
                code = PROCESSOR_FAILED
            mine[node] = code
            node = edges.get((node, code))
            if node is not None:
                input_ids = torch.cat([input_ids, input_ids.new_tensor([[code]])], 1)
