"""A replica of the job's state: what every rank holds and does alike, the driver included.

One sentence carries it: *every rank applies the same commands after the same step*. So a step reads schedule, run,
update, and nothing in it asks which rank this is, but for the shard that the rank evaluates.
"""

from __future__ import annotations

import operator
import reprlib
import time
from collections.abc import Sequence

import numpy as np

from lpr.config import InputError
from lpr.core.step_times import StepTimes
from lpr.core.suffix_index import as_learnt
from lpr.engine.commands import Command, Configure, Costs, Drain, Learn, TakeIn
from lpr.engine.exchange import DesyncError
from lpr.engine.replicated import ReplicatedState
from lpr.engine.request import Outcome, Prompt, Request
from lpr.engine.scheduler import Schedule
from lpr.engine.step import decode_step, untimed
from lpr.engine.targets import Targets
from lpr.native import SuffixIndex
from lpr.protocol import Abort, RequestId, Stop, Submit


class Replica(ReplicatedState):
    """A replicated state as commands and steps change it."""

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt; raises InputError for one that is empty or not of this model's vocabulary."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InputError("this model has no tokenizer: give prompts as lists of token ids")
            try:
                prompt.encode()
            except UnicodeEncodeError as failure:
                raise InputError(f"the prompt is no Unicode text: {failure.reason} at {failure.start}") from None
            ids = list(self.tokenizer(prompt)["input_ids"])
        else:
            try:
                ids = [operator.index(token) for token in prompt]
            except TypeError:
                raise InputError(f"a prompt is text or a list of token ids, not {reprlib.repr(prompt)}") from None
        if not ids:
            raise InputError("the prompt is empty: a model needs at least one token to continue")
        outside = [token for token in ids if not 0 <= token < self.model.vocab_size]
        if outside:
            raise InputError(f"token id {outside[0]} is not in the model's vocabulary of {self.model.vocab_size}")
        return ids

    def apply(self, command: Command) -> None:
        """Do what a command says; every rank applies the same commands after the same step."""
        match command:
            case Submit():
                self._submit(command)
            case Abort():
                self._abort(command.id)
            case Learn():
                self._learn(command)
            case Costs():
                self._take_times(StepTimes.from_json(command.table), command.given)
            case Configure():
                self._configure(command.decode)
            case TakeIn():
                self._take_in(command.replicas)
            case Drain():
                self.is_draining = True
            case Stop():
                for id in list(self._requests):
                    self._abort(id)
                self.is_stopped = True

    def _learn(self, command: Learn) -> None:
        if command.replace:
            self.shared = SuffixIndex(self.sizes.trie_capacity)
        trie = self._tenants.learning(command.tenant) if command.tenant else self.shared
        if trie is not None:
            trie.insert(np.frombuffer(command.history, np.int32))
            if command.read_to:
                self._tenants.read_to[command.tenant] = command.read_to

    def _count_id(self, id: RequestId) -> None:
        if isinstance(id, int):
            self._next_id = max(self._next_id, id + 1)

    def _submit(self, command: Submit) -> None:
        self._count_id(command.id)
        request = self._named.pop(command.id, None)
        if request is None:
            if command.has_processors:
                raise InputError(f"request {command.id} has logits processors, which are code: submit it on every rank")
            request = self._make(command, command.token_ids[: command.num_prompt])
        elif (request.tokens, request.params) != (command.token_ids, command.params):
            raise DesyncError(f"request {command.id} of this rank differs from that of rank 0")
        request.arrived = command.arrived  # rank 0's clock orders the queue
        self._requests[command.id] = request
        if request.finish_reason is not None:  # what was delivered already says so
            self._end(request, request.finish_reason)
        elif self.is_draining:
            self._end(request, "abort")
        else:
            self.scheduler.add(request)

    def _abort(self, id: RequestId) -> None:
        request = self._requests.get(id)
        if request is None:
            return
        if request.state is None:
            self.scheduler.withdraw(request)
        else:
            request.settle()
            self._release(request)
        self._end(request, "abort")

    def _end(self, request: Request, reason: str) -> None:
        """End a request between two steps."""
        request.end(reason)
        self._requests.pop(request.id, None)
        self._advanced.append(request)

    def _take_times(self, times: StepTimes, given: bool) -> None:
        if given:
            self._times, self._follows = times, False
        else:
            self._sizer.times = times

    def schedule(self) -> Schedule[Request]:
        """Give free slots to waiting requests; what each running request does in the next step."""
        while (admission := self.scheduler.admit()) is not None:
            request, computed = admission.request, admission.num_computed_tokens
            request.num_cached_tokens = min(computed[rank] for rank in request.homes)
            request.state = self._new_state(request, computed)
        schedule = self.scheduler.schedule()
        self._move()
        return schedule

    def run(self, schedule: Schedule[Request], num_command_bytes: int) -> tuple[list[Outcome], int, StepTimes | None]:
        """Take the step that `schedule` says, whose header announces `num_command_bytes` on the driver.

        Returns what it did to each decoding request, the bytes of commands that the driver announced, and on the
        driver, now and then, the step times that all ranks should decide by, as far as the step before tells.
        """
        began, captures = time.perf_counter(), self.model.num_captures
        self._new_times = None
        self.hooks.begin_step()
        self._sizer.begin_step(schedule.decoding, schedule.filling)
        outcomes, num_command_bytes = decode_step(
            schedule.decoding,
            schedule.filling,
            self.sizes,
            self.model,
            self._exchange,
            self._sizer.budgets,
            num_command_bytes,
            self.recorder.begin() if self.recorder is not None else untimed,
            self._catch_up,
            # With the length of what all draft from, a rank that has learnt something else is found at once.
            (self.scheduler.signature + len(self.shared)) % 2**64,
        )
        if outcomes:
            self._sizer.end_step(outcomes[0].num_entries)
        if self.scheduler.targets is not None:
            pass_step(self.scheduler.targets, schedule, outcomes, self.comm.size)
        if outcomes and not schedule.filling and captures == self.model.num_captures:
            self._timed = schedule.decoding, outcomes, (time.perf_counter() - began) * 1e3
        return outcomes, num_command_bytes, self._new_times

    def _catch_up(self) -> None:
        """While the device works, do what the last step left: nothing that decides what comes next."""
        if self._timed is not None:
            self._new_times, self._timed = self._sizer.observe(*self._timed), None
        for request in self.scheduler.running:
            request.write()
            request.stats.count_nodes()
        self.hooks.while_busy()

    def update(self, schedule: Schedule[Request], outcomes: Sequence[Outcome]) -> None:
        """Feed a step's results to its requests; those that are finished give their slots back."""
        for request, _ in schedule.filling:
            request.stats.num_fill_steps += 1
        batch = schedule.decoding
        for request, outcome in zip(batch, outcomes, strict=True):
            request.advance(outcome)
        self._advanced += batch
        if self.recorder is not None and batch:
            for request in batch:
                request.write()
            self.recorder.record(batch, outcomes, [request.chunks[-1] for request in batch])
        for request in [request for request in batch if request.finish_reason is not None]:
            self._release(request)
            del self._requests[request.id]

    def _release(self, request: Request) -> None:
        """Learn from a request's output, and take its slot."""
        assert self.model.cache is not None
        learnt = self._learnt(request)
        if learnt is not None and self.sizes.trie_nodes and request.num_output:
            learnt.extend(as_learnt(request.prompt_ids, request.token_ids))
            learnt.end_document()
        sound = request.error is None and request.num_output > 0
        if not sound:  # its K/V may be NaN, which would spoil the slot's next request
            slot = request.slots[self.comm.rank]
            if slot >= 0:
                self.model.cache.clear(slot, 0)
        self.scheduler.finish(request, keep=sound)
        self._move()
        request.state = None


def pass_step(
    targets: Targets[Request], schedule: Schedule[Request], outcomes: Sequence[Outcome], num_ranks: int
) -> None:
    """Move the clock of the targets by a step, whose loads all ranks know."""
    loads = list(outcomes[0].num_entries) if outcomes else [0] * num_ranks
    for _, counts in schedule.filling:
        loads = [load + count for load, count in zip(loads, counts, strict=True)]
    requests = [*schedule.decoding, *(request for request, _ in schedule.filling)]
    targets.pass_step(loads, len(requests) // num_ranks, max(len(request.tokens) for request in requests))
