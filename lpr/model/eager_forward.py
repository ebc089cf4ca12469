"""Forward strategies: from the rows of a step to its results.

EagerForward calls the model. `graphs.GraphForward` replays captured calls, possibly of a CompiledForward.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from lpr.model.adapter import Adapter
from lpr.model.graph_capture import Capturer
from lpr.model.kv_cache import KVCache
from lpr.model.sampling.sampler import Sampler
from lpr.model.sampling.selection import Selection
from lpr.model.step_inputs import Row, StepInputs
from lpr.model.transfer import to_device


class EagerForward:
    """Builds the inputs of each step and calls the model; also the interface of all strategies."""

    capturer: Capturer | None = None  # captures steps; None evaluates them directly
    reason: str | None = None  # the reason why no further step is captured, once a capture has failed
    num_captures = 0  # graphs captured so far
    passes = False  # True if a low-bit copy makes passes between a step and the reading of its results
    num_computed = 0  # entries that captured steps have computed, padding included

    def __init__(
        self, adapter: Adapter, sampler: Sampler, cache: KVCache, before_launch: Callable[[], None] = lambda: None
    ) -> None:
        """Evaluate on `cache`; `before_launch` is called when a step's inputs are made, before the device has work.

        A replay on a GPU does not call it: the step's gather compares the rows (lpr.engine.exchange.check_replica).
        """
        self.adapter = adapter
        self.sampler = sampler
        self.cache = cache
        self.before_launch = before_launch
        self.hidden: dict[int, torch.Tensor] = {}
        """By slot, the last hidden states [entries, H] of the last step's rows, if the adapter keeps them."""

    @torch.no_grad()
    def evaluate(self, rows: Sequence[Row], selection: Selection, num_candidates: int) -> torch.Tensor:
        """As TreeModel.evaluate; the results are valid until the next call."""
        selection = selection.to(self.adapter.device)
        inputs = self.adapter.step_inputs(rows, self.cache)
        inputs.in_parts = self.sampler.in_parts(selection)
        return self.sampler.results(self._logits(inputs), selection, num_candidates)

    def fill(self, rows: Sequence[Row]) -> None:
        self._logits(self.adapter.step_inputs(rows, self.cache))

    def run_program(self, shape: Any, program: Any, words: np.ndarray, states: list[torch.Tensor]) -> torch.Tensor:
        """What `program` makes of int32 `words` and of all `states` [n, H], if there are any, on the device.

        It does not depend on the host otherwise; all programs of a `shape` are the same, and those without are rare.
        """
        given = [torch.cat(states)] if states else []
        found: torch.Tensor = program(to_device(words, self.adapter.device), *given)
        return found

    def _logits(self, inputs: StepInputs) -> torch.Tensor:
        self.before_launch()
        logits = self.adapter.forward(inputs, self.cache)
        if (states := inputs.hidden) is not None:
            places = zip(inputs.rows, inputs.places(), strict=True)
            self.hidden = {row.slot: states[at, begin : begin + row.num_entries] for row, (at, begin) in places}
        return logits
