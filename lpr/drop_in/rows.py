"""The rows of one `generate` call: each is decoded as a request, and all form the batch that transformers makes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from transformers import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    MinPLogitsWarper,
    StoppingCriteriaList,
    StopStringCriteria,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation import GenerateDecoderOnlyOutput

from lpr.config import InputError, SamplingParams
from lpr.model.sampling.processors import Processor, is_row_by_row

# These treat all rows of a batch alike. Other processors and criteria may have state per row (as
# PrefixConstrainedLogitsProcessor does), so they get a batch of the usual number of rows, each a copy of this row.
_ROWS_ALIKE = {
    getattr(transformers, name)
    for name in (
        "EosTokenCriteria", "EpsilonLogitsWarper", "EtaLogitsWarper", "ExponentialDecayLengthPenalty",
        "ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor", "InfNanRemoveLogitsProcessor",
        "LogitNormalization", "MaxLengthCriteria", "MaxTimeCriteria", "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor", "MinPLogitsWarper", "NoBadWordsLogitsProcessor",
        "NoRepeatNGramLogitsProcessor", "SequenceBiasLogitsProcessor", "StopStringCriteria",
        "SuppressTokensAtBeginLogitsProcessor", "SuppressTokensLogitsProcessor", "TemperatureLogitsWarper",
        "TopKLogitsWarper", "TopPLogitsWarper", "TypicalLogitsWarper", "WatermarkLogitsProcessor",
    )
}  # fmt: skip

_ON_HOST = {EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria}
"""Criteria that read only ids, which are on the host: no synchronisation with the GPU after every token."""


def sampling_of(config: Any, processors: Sequence[Any]) -> tuple[SamplingParams, list[Any], list[Any]]:
    """The SamplingParams of a call, the processors to apply before them, and the processors that they replace.

    lpr itself applies temperature, top-k, top-p and min-p at the end of the list, so that they also apply to the
    guesses of a Jacobi window, which no processor sees.
    """
    if not config.do_sample:
        return SamplingParams(), list(processors), []
    rest, values = list(processors), {"temperature": 1.0}
    kinds = MinPLogitsWarper, TopPLogitsWarper, TopKLogitsWarper, TemperatureLogitsWarper
    for kind, name in zip(kinds, ("min_p", "top_p", "top_k", "temperature"), strict=True):
        if rest and type(rest[-1]) is kind and _is_plain(rest[-1]):
            values[name] = getattr(rest.pop(), name)
    return SamplingParams(**values), rest, list(processors[len(rest) :])  # type: ignore[arg-type]


def _is_plain(warper: Any) -> bool:
    drops = getattr(warper, "filter_value", -float("inf")) == -float("inf")
    return drops and getattr(warper, "min_tokens_to_keep", 1) == 1 and getattr(warper, "top_p", 1.0) > 0


def for_row(function: Callable[..., Any], index: int, num_rows: int, input_ids: torch.Tensor, values: Any) -> Any:
    """The result of a processor or criterion for row `index`, which is `input_ids` [1, L] with its `values`."""
    if num_rows == 1 or type(function) in _ROWS_ALIKE or isinstance(function, SynthIDTextWatermarkLogitsProcessor):
        return function(input_ids, values)
    if isinstance(values, torch.Tensor):
        values = values.repeat(num_rows, 1)
    elif values is not None:
        values = tuple(each.expand(num_rows, -1) for each in values)
    result = function(input_ids.repeat(num_rows, 1), values)
    return result[index : index + 1] if isinstance(result, torch.Tensor) and result.dim() else result


class OutputRow:
    """One row: its processors as the engine calls them, and its progress."""

    def __init__(self, index: int, num_pads: int, batch: OutputBatch) -> None:
        self.index = index
        self.batch = batch
        self.length = batch.num_prompt  # tokens so far, padding and prompt included
        self.finished_at: int | None = None  # its length when a stopping criterion ended it
        self.scores: list[torch.Tensor] = []
        self.logits: list[torch.Tensor] = []
        self.failure: Exception | None = None  # the exception of a processor
        self._pads = batch.prompt_ids[index : index + 1, :num_pads]
        self._functions = batch.processors
        if batch.num_rows > 1:  # SynthID has state per row
            stateful = SynthIDTextWatermarkLogitsProcessor
            self._functions = [copy.deepcopy(f) if isinstance(f, stateful) else f for f in batch.processors]

    @property
    def processors(self) -> list[Processor]:
        """The processors for the engine: the functions themselves if possible, as some need no synchronisation."""
        keeps = self.batch.keeps_scores or self.batch.keeps_logits
        if not keeps and not self._pads.numel() and all(map(is_row_by_row, self._functions)):
            return list(self._functions)
        return [self._process] if self._functions or keeps else []

    def _process(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The processed scores [1, V] after the path `input_ids` [1, L], which lacks the row's padding."""
        batch, device = self.batch, scores.device
        where = self._pads.device
        input_ids, scores = torch.cat([self._pads, input_ids.to(where)], 1), scores.to(where)
        if batch.keeps_logits:
            self.logits.append(scores.clone())
        try:
            for function in self._functions:
                scores = for_row(function, self.index, batch.num_rows, input_ids, scores)
            if batch.keeps_scores:
                kept = scores.clone()
                for function in batch.warpers:
                    kept = for_row(function, self.index, batch.num_rows, input_ids, kept)
                self.scores.append(kept)
        except Exception as failure:
            self.failure = failure
            raise
        return scores.to(device)


class OutputBatch:
    """The output of a `generate` call while its rows grow, a few tokens at a time and each at its own pace."""

    def __init__(
        self,
        input_ids: torch.Tensor,
        num_pads: Sequence[int],
        config: Any,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        streamer: Any = None,
    ) -> None:
        """The rows of `input_ids` [B, L], of which the first `num_pads` tokens are padding."""
        self.num_rows, self.num_prompt = input_ids.shape
        self.max_new_tokens: int = config.max_length - self.num_prompt
        self.config, self.criteria, self.streamer = config, criteria, streamer
        self.params, self.processors, self.warpers = sampling_of(config, processors)
        self.keeps_scores = bool(config.return_dict_in_generate and config.output_scores)
        self.keeps_logits = bool(config.return_dict_in_generate and config.output_logits)
        self.pads = any(hasattr(each, "eos_token_id") for each in criteria)
        """True if finished rows are padded. Without an end-of-text token, transformers continues them."""
        pad = config._pad_token_tensor
        if self.num_rows > 1:
            if self.pads and pad is None:
                raise InputError("a batch whose rows end at different lengths needs a pad_token_id")
            if any(isinstance(each, UnbatchedClassifierFreeGuidanceLogitsProcessor) for each in processors):
                raise InputError(f"lpr.lookahead decodes with guidance_scale one row at a time, not {self.num_rows}")
        fill = int(pad) if pad is not None else 0
        self.device = input_ids.device
        self.prompt_ids = input_ids
        self.ids = torch.full((self.num_rows, config.max_length), fill, dtype=input_ids.dtype)
        """[B, max_length] on the host: prompts with their padding, outputs, and padding behind finished rows."""
        self.ids[:, : self.num_prompt] = input_ids.cpu()
        self.rows = [OutputRow(index, count, self) for index, count in enumerate(num_pads)]
        self._num_streamed = self.num_prompt

    @property
    def length(self) -> int | None:
        """Length of the whole output, known as soon as every row is finished."""
        ends = [row.finished_at for row in self.rows if row.finished_at is not None]
        return max(ends) if len(ends) == self.num_rows else None

    @property
    def is_complete(self) -> bool:
        length = self.length
        return length is not None and (self.pads or all(row.length >= length for row in self.rows))

    def push(self, row: OutputRow, token: int) -> None:
        """Add a row's next token; tokens after the end of a padded row are dropped."""
        if row.finished_at is not None and self.pads:
            return
        self.ids[row.index, row.length] = token
        row.length += 1
        # Every criterion is called: some count their calls.
        if row.finished_at is None and any([self._is_met(each, row) for each in self.criteria]):
            row.finished_at = row.length
        if self.streamer is not None:
            self._stream()

    def _is_met(self, criterion: Callable[..., Any], row: OutputRow) -> bool:
        """True if a row ends here. Only criteria outside _ON_HOST get tensors on the GPU, and are waited for."""
        input_ids = self.ids[row.index : row.index + 1, : row.length]
        if type(criterion) not in _ON_HOST:
            input_ids = input_ids.to(self.device)
        scores = tuple(row.scores[: row.length - self.num_prompt]) if self.keeps_scores else None
        return bool(for_row(criterion, row.index, self.num_rows, input_ids, scores))

    def _stream(self) -> None:
        """Stream the tokens [B] of every position that all rows have reached, as transformers does after each step."""
        length = self.length
        ends = [row.length for row in self.rows if row.finished_at is None or not self.pads]
        ready = min(ends) if ends else self.ids.shape[1]
        for place in range(self._num_streamed, ready if length is None else min(ready, length)):
            self.streamer.put(self.ids[:, place])
            self._num_streamed = place + 1

    def result(self) -> torch.Tensor | GenerateDecoderOnlyOutput:
        length = self.length
        assert length is not None
        if self.streamer is not None:
            self.streamer.end()
        sequences = self.ids[:, :length].to(self.device, copy=True)
        if not self.config.return_dict_in_generate:
            return sequences
        count = length - self.num_prompt
        values: dict[str, Any] = {"sequences": sequences}
        ends = [(row.finished_at or length) - self.num_prompt if self.pads else count for row in self.rows]
        for name, keeps in (("scores", self.keeps_scores), ("logits", self.keeps_logits)):
            if keeps:
                rows = [getattr(row, name)[:end] for row, end in zip(self.rows, ends, strict=True)]
                nothing = torch.zeros_like(rows[0][0])
                columns = ([row[i] if i < len(row) else nothing for row in rows] for i in range(count))
                values[name] = tuple(map(torch.cat, columns))  # [B, V] each
        return GenerateDecoderOnlyOutput(**values)
