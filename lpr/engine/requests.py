"""The requests of a replica by id, and the validation of new ones."""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from lpr.config import InputError
from lpr.core.suffix_index import END
from lpr.engine.exchange import DesyncError
from lpr.engine.request import Prompt, Request
from lpr.engine.turns import Turns
from lpr.model.sampling.grammar import begin
from lpr.model.sampling.processors import Processor
from lpr.protocol import RequestId, Submit


class RequestTable:
    """Open and announced requests, and the next free number."""

    def __init__(
        self, tokenizer: Any | None, eos_token_ids: frozenset[int], device: torch.device, turns: Turns | None = None
    ) -> None:
        """An empty table; requests are made for this tokenizer, and their masks on `device`."""
        self._turns = turns or Turns()
        self.open: dict[RequestId, Request] = {}
        """Submitted, unfinished requests; the same on every rank."""
        self.announced: dict[RequestId, Request] = {}
        """Requests created by this rank's own program whose Submit command has not been applied yet."""
        self.next_id = 0
        self._facts = tokenizer, eos_token_ids, device

    def make(self, command: Submit, prompt: Prompt | None = None, processors: Sequence[Processor] = ()) -> Request:
        """The request of a command; `prompt` is that of its Completion, by default the ids."""
        prompt = prompt if prompt is not None else command.token_ids[: command.num_prompt]
        return Request(command, prompt, *self._facts, processors, self._turns)

    def compile(self, grammar: str, vocab_size: int) -> Future[Any] | None:
        """Begin to compile a grammar for later requests, whose masks have `vocab_size` tokens."""
        return begin(grammar, self._facts[0], vocab_size)

    def new(self, command: Submit, prompt: Prompt | None = None, processors: Sequence[Processor] = ()) -> Request:
        """As `make`, for a new request; raises InputError if its id is in use."""
        if command.id in self.open or command.id in self.announced:
            raise InputError(f"request id {command.id!r} is in use")
        request = self.make(command, prompt, processors)
        self.count(command.id)
        return request

    def count(self, id: RequestId) -> None:
        """Make sure that later generated ids are greater than `id`."""
        if isinstance(id, int):
            self.next_id = max(self.next_id, id + 1)

    def submit(self, command: Submit) -> Request:
        """Open the request of a command: the announced one if this rank's program created it.

        Raises DesyncError if the announced one differs, InputError if the request needs processors and was not
        announced.
        """
        self.count(command.id)
        request = self.announced.pop(command.id, None)
        if request is None:
            if command.has_processors:
                raise InputError(f"request {command.id} has logits processors, which are code: submit it on every rank")
            request = self.make(command)
        elif (request.tokens, request.params, request.prediction, request.adapter) != (
            command.token_ids, command.params, command.prediction, command.adapter
        ):  # fmt: skip
            raise DesyncError(f"request {command.id} of this rank differs from that of rank 0")
        request.arrived = command.arrived  # rank 0's clock orders the queue
        self.open[command.id] = request
        return request


def encode_prompt(prompt: Prompt, tokenizer: Any | None, vocab_size: int) -> list[int]:
    """The token ids of a prompt; raises InputError if it is empty or has an id outside the vocabulary."""
    ids = _encode(prompt, tokenizer, vocab_size, "prompt")
    if not ids:
        raise InputError("the prompt is empty: a model needs at least one token to continue")
    return ids


def encode_prediction(prediction: Prompt | None, tokenizer: Any | None, vocab_size: int, longest: int) -> list[int]:
    """The first `longest` token ids of a prediction, without special tokens; raises InputError as `encode_prompt`."""
    if prediction is None:
        return []
    return _encode(prediction, tokenizer, vocab_size, "prediction", add_special_tokens=False)[:longest]


def _encode(text: Prompt, tokenizer: Any | None, vocab_size: int, name: str, **options: bool) -> list[int]:
    """The token ids of a text, encoded with these options, or the given ids; raises InputError."""
    if not isinstance(text, str):
        return checked_ids(text, vocab_size, f"a {name} is text or a list of token ids")
    if tokenizer is None:
        raise InputError(f"this model has no tokenizer: give {name}s as lists of token ids")
    try:
        text.encode()
    except UnicodeEncodeError as failure:
        raise InputError(f"the {name} is no Unicode text: {failure.reason} at {failure.start}") from None
    return checked_ids(tokenizer(text, **options)["input_ids"], vocab_size, f"the {name}'s ids are numbers")


def checked_ids(given: Sequence[int], vocab_size: int, rule: str) -> list[int]:
    """Token ids of a caller as a list; raises InputError with the text `rule` unless all are in the vocabulary."""
    try:
        if isinstance(given, (bytes, bytearray)):  # a text that was not decoded: its bytes would pass as ids
            raise TypeError
        ids = [operator.index(token) for token in given]
    except TypeError:
        raise InputError(f"{rule}, not {reprlib.repr(given)}") from None
    if outside := [token for token in ids if not 0 <= token < vocab_size]:
        raise InputError(f"token id {outside[0]} is not in the model's vocabulary of {vocab_size}")
    return ids


def check_history(history: np.ndarray, vocab_size: int) -> None:
    """Raise InputError unless a history, int32 [num_tokens], has ids of the vocabulary and END only."""
    if len(history) and not END <= history.min() <= history.max() < vocab_size:
        raise InputError(f"a learned history has ids outside the model's vocabulary of {vocab_size}")


def check_request(command: Submit, max_length: int, vocab_size: int) -> None:
    """Raise InputError for a request that an engine with these limits cannot complete."""
    num_prompt, params, priority = command.num_prompt, command.params, command.priority
    if num_prompt + params.max_new_tokens > max_length:
        raise InputError(
            f"the prompt's {num_prompt} tokens and max_new_tokens={params.max_new_tokens} exceed the context of "
            f"{max_length} tokens"
        )
    if type(priority) is not int or not -(2**63) <= priority < 2**63:
        raise InputError(f"priority={priority!r} must be a whole number of 64 bits")
    if not 0 < command.weight < math.inf:
        raise InputError(f"weight={command.weight!r} must be a number above 0")
    if command.tenant.startswith("\0"):  # reserved for requests with adapters
        raise InputError("a tenant does not begin with a zero character")
    biased = [token for token, _ in params.logit_bias]
    for name, tokens in (("logit_bias", biased), ("forced_ids", params.forced_ids)):
        if outside := [token for token in tokens if token >= vocab_size]:
            raise InputError(f"{name}: {outside[0]} is not in the model's vocabulary of {vocab_size}")
