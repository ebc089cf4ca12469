"""A request, the chunks that steps add to it, and its completion."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch

from lpr.core.accept import NOT_A_NUMBER
from lpr.engine.outcomes import Outcome, Outcomes
from lpr.engine.stats import DecodeStats
from lpr.engine.text import TextStream
from lpr.engine.turns import Turns, in_turn
from lpr.model.sampling.processors import Processor, Processors
from lpr.native import Conclusion, SequenceState
from lpr.protocol import Chunk, ErrorCode, Failure, Submit, TokenLogprobs, Usage

log = logging.getLogger(__name__)

Prompt = str | Sequence[int]
"""Text, or token ids."""
UNKNOWN_SOURCE = "unknown"
"""Source of a token that is sent again."""


@dataclass
class Completion:
    """A finished request's output."""

    prompt: Prompt
    prompt_token_ids: list[int]
    token_ids: list[int]
    """Emitted ids, an end-of-text token included."""
    text: str
    """Emitted text; it continues the prompt, and ends before a stop string or an end-of-text token."""
    finish_reason: str
    """`stop` (end of text or a stop string), `length` (max_new_tokens), `abort` or `error`."""
    stats: DecodeStats
    error: str | None = None
    """The error that ended the request, in one line; ids and text are those before it."""
    logprobs: list[TokenLogprobs] | None = None
    """Per token id, if SamplingParams asked for them."""


class Request:
    """A prompt and its output so far."""

    def __init__(
        self,
        command: Submit,
        prompt: Prompt,
        tokenizer: Any | None,
        eos_token_ids: frozenset[int],
        device: torch.device,
        processors: Sequence[Processor] = (),
        turns: Turns | None = None,
    ) -> None:
        """The request that a command describes, with its delivered tokens as output; raises InputError."""
        self.turns = turns or Turns()
        """The lock of the engine, whose steps write to this request."""
        self.id, self.prompt, self.params, self.num_prompt = command.id, prompt, command.params, command.num_prompt
        self._tokens = list(command.token_ids)
        self._state: SequenceState | None = None
        self.longest = self.num_prompt + self.params.max_new_tokens
        """Most tokens of prompt and output."""
        self.priority, self.arrived, self._command = command.priority, command.arrived, command
        self.adapter, self.learns, self.details = command.adapter, command.learns, command.details
        self.tenant = f"\0{command.adapter}\0{command.tenant}" if command.adapter else command.tenant
        """Requests of one tenant share drafts and K/V, and have one adapter."""
        self.share, self.weight, self.charged = command.share, command.weight, 0.0
        self._new_stream = partial(TextStream, tokenizer, self.prompt_ids, self.params, eos_token_ids)
        self.text_stream = self._new_stream()
        stop_ids = self.text_stream.stop_ids
        self.processors = Processors.of(self.params, self.num_prompt, stop_ids, device, processors, tokenizer)
        self.is_portable = not processors
        """False if it has processors of the caller: only a rank that submitted them can continue the request."""
        self.is_plain = self.params.temperature == 0 and self.processors is None and self.params.logprobs is None
        """True for greedy decoding without processors and log-probabilities."""
        self.wants_each_step = bool(
            self.params.stop or self.params.logprobs is not None or self.details or command.prediction
        )
        """True if its chunks need the result of each step: its tree, log-probabilities, a search for stop strings."""
        self.predicted = command.predicted
        """Tokens drafted from the prediction, and the accepted ones of them, up to the last `collect`."""
        self.finish_reason: str | None = None
        """None while the request is unfinished, then as in Completion."""
        self.error: str | None = None
        self.slots: list[int] = []
        """Per rank while it runs: its place in the batch, -1 where it has none."""
        self.admission = 0  # number of its admission
        self.num_preempted_tokens = 0
        """Number of its computed tokens when it was preempted, until it runs again."""
        self._homes: list[int] = []
        self.num_cached_tokens = 0
        """Tokens whose K/V came from the prefix cache."""
        self.arrived_ms = 0.0
        """Time of its arrival, on the clock of the scheduler's targets."""
        self._stats, self._logprobs = DecodeStats(), list[TokenLogprobs]()
        self._chunks: deque[Chunk] = deque()
        self._unwritten: list[Chunk] = []
        _, self.finish_reason = self.text_stream.extend(self.token_ids)
        self._num_characters = len(self.text_stream.take())
        """Characters of text in chunks so far, or delivered by an earlier run."""
        self._delivered = (self.num_output, self._num_characters)
        """Tokens delivered by an earlier run, and the characters of their text."""
        self._num_added = self.num_output
        """Tokens in chunks so far, or delivered by an earlier run."""
        self._had_nan = False
        """True if the last step had NaN logits."""
        self._is_over = False
        """True if the last chunk was made."""
        self._is_changing = False
        """True while its chunks are made; it stays True if that was interrupted, and chunks were lost."""
        self._is_writing = False  # True while their text is made

    @property
    @in_turn
    def submit(self) -> Submit:
        """The command that submits this request with its present output."""
        self.collect()
        now = {"token_ids": list(self.tokens), "arrived": self.arrived, "predicted": self.predicted}
        return msgspec.structs.replace(self._command, **now)

    @property
    def state(self) -> SequenceState | None:
        """Its decoding state while it holds a slot; else None."""
        return self._state

    @state.setter
    def state(self, state: SequenceState | None) -> None:
        self._tokens = self.tokens  # with those of the last steps
        self._state = state
        if state is not None:
            state.num_steps, state.num_emitted = self._stats.num_steps, self._stats.num_tokens

    @property
    def tokens(self) -> list[int]:
        """Prompt and output, always the same list; its state adds the tokens of steps when it is read."""
        return self._tokens if self._state is None else self._state.tokens

    @property
    def prediction(self) -> list[int]:
        """Tokens that the output is expected to follow."""
        return self._command.prediction

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt's tokens."""
        return self.tokens[: self.num_prompt]

    @property
    def token_ids(self) -> list[int]:
        """The output so far."""
        return self.tokens[self.num_prompt :]

    @property
    def num_output(self) -> int:
        """Tokens of the output so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Length of the longest pending chain of any home rank, the root included."""
        return self.running.num_pending

    @property
    def num_left(self) -> int:
        """Most tokens that it may still emit."""
        return self.longest - len(self.tokens)

    @property
    def num_computed_tokens(self) -> list[int]:
        """Per rank: leading tokens whose K/V it holds in the request's pages."""
        return self.running.num_computed_tokens

    @num_computed_tokens.setter
    def num_computed_tokens(self, counts: list[int]) -> None:
        self.running.num_computed_tokens = counts

    @property
    def homes(self) -> list[int]:
        """The ranks that serve it while it runs, ascending."""
        return self._homes

    @homes.setter
    def homes(self, ranks: list[int]) -> None:
        self._homes = ranks
        if self.state is not None:
            self.state.homes = ranks

    @property
    def running(self) -> SequenceState:
        """The state of a request that holds a slot."""
        assert self._state is not None, "the request does not run"
        return self._state

    @property
    def is_sound(self) -> bool:
        """False if its K/V may contain NaN: it failed, or the logits of its first token were NaN and are retried."""
        return self.error is None and (self.num_output > 0 or not self._had_nan)

    @property
    @in_turn
    def stats(self) -> DecodeStats:
        """Counts of its steps so far."""
        self.collect()
        return self._stats

    @property
    @in_turn
    def logprobs(self) -> list[TokenLogprobs]:
        """Per token of the output, if `params` ask for them."""
        self.collect()
        return self._logprobs

    @property
    def usage(self) -> Usage:
        """The counts of its decoding work so far."""
        return self.stats.usage(min(self.num_cached_tokens, self.num_prompt))

    def resume(self, stats: DecodeStats, logprobs: Sequence[TokenLogprobs]) -> None:
        """Continue from another rank's counts."""
        self._stats, self._logprobs = stats, list(logprobs)

    @property
    @in_turn
    def chunks(self) -> deque[Chunk]:
        """The chunks since the last `take`, which completes their text."""
        self.collect()
        return self._chunks

    @in_turn
    def take(self) -> list[Chunk]:
        """The chunks since the last call, with their text."""
        self.write()
        taken = list(self._chunks)
        self._chunks.clear()
        return taken

    @in_turn
    def resend(self, num_tokens: int) -> Chunk:
        """The output after the first `num_tokens` tokens as one chunk, for a receiver of whole chunks."""
        ids, (num_known, at) = self.token_ids[num_tokens:], self._delivered
        if num_tokens != num_known:  # chunks of a lost driver
            known = self._new_stream()
            known.extend(self.token_ids[:num_tokens])
            at = len(known.take())  # the text of these tokens, independent of the steps' ends
        chunk = Chunk(self.id, ids, self.text_stream.taken[at:], start=num_tokens, start_character=at)
        chunk.predicted = self.predicted
        if self.params.logprobs is not None:
            chunk.logprobs = self._logprobs[len(self._logprobs) - len(ids) :]
        if self.details:
            chunk.sources = [UNKNOWN_SOURCE] * len(ids)
        return chunk

    @staticmethod
    def advance(batch: Sequence[Request], outcomes: Outcomes) -> list[Request]:
        """Add a step's results, at once where it may end a request or it takes each step; returns those that ended.

        The tokens of the others wait in their states for `collect`.
        """
        outcomes.concluded.publish()
        looked_at = sorted({*outcomes.concluded.ending, *outcomes.one_by_one})
        for index in looked_at:
            batch[index].collect(outcomes[index])
        return [batch[index] for index in looked_at if batch[index].finish_reason is not None]

    def collect(self, last: Outcome | None = None) -> None:
        """Count the steps since the last call and put their tokens into one chunk, without text.

        `last` is the result of the last of them, if it may end the request or if the request takes each step.
        """
        if self.state is None or (last is None and self.wants_each_step):
            return
        self._begin_change()
        counts = self.state.take_counts()
        if counts is not None:
            begin = self.num_prompt + self._num_added
            self._stats.count(counts)
            self._emit(self.tokens[begin : begin + counts[2]], last)
        self._end_change()

    def _begin_change(self) -> None:
        if self._is_changing:
            raise RuntimeError(f"an exception has left the output of request {self.id!r} in part")
        self._is_changing = True
        self.turns.changing.add(self)

    def _end_change(self) -> None:
        self._is_changing = self._is_writing = False
        self.turns.changing.discard(self)

    @staticmethod
    def require_whole(changing: set[Request]) -> None:
        """Raise RuntimeError if an exception has left the output of an unfinished request of `changing` in part."""
        for request in list(changing):
            if request.finish_reason is None:
                request._begin_change()
            changing.discard(request)

    def _emit(self, tokens: list[int], outcome: Outcome | None) -> None:
        """Add `tokens`, those of steps up to that of `outcome`, up to the request's end; drop later ones."""
        taken, self.finish_reason = self.text_stream.extend(tokens)
        if taken < len(tokens):
            del self.tokens[self.num_prompt + self._num_added + taken :]
        self._stats.num_tokens += taken
        chunk = Chunk(self.id, tokens[:taken], start=self.text_stream.num_tokens - taken)
        if outcome is not None:
            if self.finish_reason is None and outcome.concluded.failure is not None:
                self._fail(outcome.concluded)
            outcome.describe(chunk, self.params.logprobs, self.details)
            if self.prediction:
                drafted, accepted = outcome.num_predicted(taken)
                self.predicted = self.predicted[0] + drafted, self.predicted[1] + accepted
        self._unwritten.append(chunk)
        self._add(chunk)
        if self.params.stop:  # the search for stops has decoded the tokens, so the chunk gets their text
            self._write_texts()

    def _add(self, chunk: Chunk) -> None:
        chunk.predicted = self.predicted
        if self.finish_reason is not None:
            chunk.finish_reason, chunk.stop_reason = self.finish_reason, self.text_stream.stop_reason
            chunk.usage = self._stats.usage(min(self.num_cached_tokens, self.num_prompt))
            chunk.failure = Failure(ErrorCode.GENERATION_FAILED, self.error) if self.error is not None else None
        self._logprobs += chunk.logprobs or ()
        self._chunks.append(chunk)  # `abandon` restores the following state from it
        self._num_added += len(chunk.token_ids)
        self._is_over = chunk.finish_reason is not None

    def abandon(self, error: str | None) -> None:
        """End the request after an exception that may have left its last step incomplete; drops tokens in no chunk.

        It ends by `error`, or is aborted if that is None. A request with its last chunk is not changed, unless the
        exception came while its text was made.
        """
        if not (self._is_changing or self._is_over):
            with suppress(Exception):  # errors of a tokenizer
                self.write()
        if self._chunks:
            last = self._chunks[-1]
            self._num_added, self._is_over = last.start + len(last.token_ids), last.finish_reason is not None
        del self._logprobs[self._num_added - self._delivered[0] :]
        is_in_part = self._is_changing and self._unwritten and (self.params.stop or self._is_writing)
        if self._is_over and not is_in_part:
            self.state = None
            self._end_change()
            return
        if self._is_over:
            last = self._chunks[-1]
            last.finish_reason = last.stop_reason = last.usage = last.failure = None
        for chunk in self._unwritten:  # their text is lost
            chunk.text, chunk.start_character = "", self._num_characters
        self._unwritten.clear()
        del self.tokens[self.num_prompt + self._num_added :]
        self.text_stream.abandon()
        self.error, self.finish_reason, self.state = error, "error" if error is not None else "abort", None
        self._end_change()
        self._add(Chunk(self.id, [], start=self.num_output, start_character=self._num_characters))

    def end(self, reason: str) -> None:
        """End the request between two steps."""
        self.write()
        self.text_stream.close()
        self.finish_reason = reason
        text = self.text_stream.take(None)
        self._add(Chunk(self.id, [], text, start=self.text_stream.num_tokens, start_character=self._num_characters))

    def write(self) -> None:
        """Make the text of the chunks since the last call; can be deferred until the device is busy."""
        self.collect()
        if self._unwritten:
            self._begin_change()
            self._is_writing = True
            self._write_texts()
            self._end_change()

    def _write_texts(self) -> None:
        """Add the text of their tokens to chunks; a chunk without tokens gets the rest."""
        at = self._num_characters
        for chunk in self._unwritten:
            chunk.text, chunk.start_character = self.text_stream.take(len(chunk.token_ids) or None), at
            at += len(chunk.text)
        self._num_characters, self._unwritten = at, []  # one statement, so that an exception cannot come between

    def _fail(self, concluded: Conclusion) -> None:
        """End a request without a next token, on every rank; only ranks that ran its processor know the cause.

        After NaN logits the step is first repeated without a draft, which may have caused them.
        """
        if concluded.failure == NOT_A_NUMBER:
            if len(concluded.tree) > 1:
                self._had_nan = True
                return
            self.error = f"the model's logits for output token {self.num_output + 1} are not numbers (NaN), or all -inf"
        else:
            owner = [concluded.path[-1] in shard.owned for shard in concluded.shards].index(True)
            known = self.processors.failure if self.processors is not None else None
            if known is not None and len(concluded.shards) > 1:  # another rank's message does not reach rank 0's users
                log.warning("request %s: %s", self.id, known)
            self.error = known or f"a logits processor failed on rank {owner}, whose log says how"
        self.finish_reason = "error"
        self._write_texts()
        self.text_stream.close()

    @in_turn
    def completion(self) -> Completion:
        """The finished request's output; raises RuntimeError before it has finished."""
        if self.finish_reason is None:
            raise RuntimeError(f"request {self.id} has not finished")
        self.write()
        output = self.prompt, self.prompt_ids, self.token_ids, self.text_stream.text, self.finish_reason
        return Completion(*output, self._stats, self.error, None if self.params.logprobs is None else self._logprobs)
