"""How the rows of a step become results: the interface of the strategies, and the direct one.

`EagerForward` calls the model, `graphs.GraphForward` replays what it has captured of such calls. TreeModel chooses one
when its cache is allocated. `compiled.CompiledForward` takes the adapter's place in what is captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from lpr.model.adapter import Adapter
from lpr.model.capture import Capturer
from lpr.model.inputs import Row
from lpr.model.kv_cache import KVCache
from lpr.model.sampling.sampler import Sampler
from lpr.model.sampling.selection import Selection


class Forward(Protocol):
    """Evaluates the rows of steps on one KV cache."""

    capturer: Capturer | None
    """What captures steps; None if steps are evaluated directly."""
    reason: str | None
    """Why no further step is captured, once a capture has failed."""
    num_captures: int

    def evaluate(self, rows: Sequence[Row], selection: Selection, num_candidates: int) -> torch.Tensor:
        """As TreeModel.evaluate; the results are valid until the next call."""
        ...

    def fill(self, rows: Sequence[Row]) -> None:
        """As TreeModel.fill."""
        ...

    def limit(self, max_nodes: int) -> None:
        """Expect steps of up to `max_nodes` nodes a row."""
        ...

    def prepare(self, num_candidates: int, show: bool) -> None:
        """Do before the first request what common steps would otherwise wait for; `show` progress on a terminal."""
        ...


class EagerForward:
    """Lays out the rows of each step anew and calls the model's operators one by one."""

    capturer: Capturer | None = None
    reason: str | None = None
    num_captures = 0

    def __init__(
        self, adapter: Adapter, sampler: Sampler, cache: KVCache, before_launch: Callable[[], None] = lambda: None
    ) -> None:
        """Evaluate on `cache`; `before_launch` is called when a step's inputs are made, before the device has work."""
        self.adapter = adapter
        self.sampler = sampler
        self.cache = cache
        self.before_launch = before_launch

    @torch.no_grad()
    def evaluate(self, rows: Sequence[Row], selection: Selection, num_candidates: int) -> torch.Tensor:
        """As Forward.evaluate."""
        selection = selection.to(self.adapter.device)
        logits = self._logits(rows, in_parts=self.sampler.in_parts(selection))
        return self.sampler.results(logits, selection, num_candidates)

    def fill(self, rows: Sequence[Row]) -> None:
        """As Forward.fill."""
        self._logits(rows, in_parts=False)

    def _logits(self, rows: Sequence[Row], in_parts: bool) -> torch.Tensor:
        inputs = self.adapter.step_inputs(rows, self.cache)
        inputs.in_parts = in_parts
        self.before_launch()
        return self.adapter.forward(inputs, self.cache)

    def limit(self, max_nodes: int) -> None:
        """Nothing: any step can be evaluated."""

    def prepare(self, num_candidates: int, show: bool) -> None:
        """Nothing: no step waits for a capture."""
