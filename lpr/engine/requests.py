"""The requests of a replica by their ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lpr.config import InputError
from lpr.engine.exchange import DesyncError
from lpr.engine.request import Prompt, Request, make_request
from lpr.model.sampling.processors import Processor
from lpr.protocol import RequestId, Submit


class RequestTable:
    """Open and announced requests, and the next free number."""

    def __init__(self, tokenizer: Any | None, eos_token_ids: frozenset[int], device: torch.device) -> None:
        """An empty table; requests are made for this tokenizer, and their masks on `device`."""
        self.open: dict[RequestId, Request] = {}
        """Submitted and not finished, the same on every rank."""
        self.announced: dict[RequestId, Request] = {}
        """Made by this rank's own program; their Submit command has not been applied yet."""
        self.next_id = 0
        self._facts = tokenizer, eos_token_ids, device

    def make(self, command: Submit, prompt: Prompt | None = None, processors: Sequence[Processor] = ()) -> Request:
        """The request that a command describes; `prompt` is what its Completion shows, by default the ids."""
        prompt = prompt if prompt is not None else command.token_ids[: command.num_prompt]
        return make_request(command, prompt, *self._facts, processors)

    def new_id(self, wanted: RequestId | None) -> RequestId:
        """`wanted`, or the next number; raises InputError if it is in use."""
        id = self.next_id if wanted is None else wanted
        if id in self.open or id in self.announced:
            raise InputError(f"request id {id!r} is in use")
        return id

    def count(self, id: RequestId) -> None:
        """Hand out later numbers than `id` from now on."""
        if isinstance(id, int):
            self.next_id = max(self.next_id, id + 1)

    def submit(self, command: Submit) -> Request:
        """Open the request of a command: the announced one where this rank's program has made it.

        Raises DesyncError if that one differs, InputError if the request needs processors and was not announced.
        """
        self.count(command.id)
        request = self.announced.pop(command.id, None)
        if request is None:
            if command.has_processors:
                raise InputError(f"request {command.id} has logits processors, which are code: submit it on every rank")
            request = self.make(command)
        elif (request.tokens, request.params) != (command.token_ids, command.params):
            raise DesyncError(f"request {command.id} of this rank differs from that of rank 0")
        request.arrived = command.arrived  # rank 0's clock orders the queue
        self.open[command.id] = request
        return request
