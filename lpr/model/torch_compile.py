"""Captured steps through torch.compile, which fuses the operations between a layer's matrix products.

The whole forward is one graph of operators with symbolic sizes. All packed steps need three compiled forms and all
padded ones four, because torch.compile specialises on sizes of 1 (sequences and entries). Each form takes a minute or
two to compile for a model of 32 layers; a later start reads it from disk. The collectives of a tensor-parallel replica
are operators of the graph. Only captured steps are compiled; if the compiler fails, they run uncompiled.
"""

import logging
import os
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from lpr.config import first_line
from lpr.model.adapter import Adapter
from lpr.model.kv_cache import KVCache
from lpr.model.rewrite.base import Setting, carry_out, undo
from lpr.model.rewrite.compiled_model import CompiledModel
from lpr.model.step_inputs import StepInputs

logger = logging.getLogger(__name__)

MOST_FORMS = 64  # forms of a step that may be compiled; torch's own limit is 8


def compiled_folder() -> Path:
    """Folder of compiled code: TORCHINDUCTOR_CACHE_DIR, or `lpr/compiled` in the user's cache folder."""
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if given and given != default_cache_dir():  # torch notes its own default there
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lpr" / "compiled"


class CompiledForward:
    """An adapter's forward, compiled from its next call on."""

    def __init__(self, adapter: Adapter, backend: str = "inductor") -> None:
        self.reason: str | None = None  # the reason why steps are no longer compiled; None while they are
        self._adapter = adapter
        self._before, self._rewrite = _so_far(), CompiledModel(backend)
        # torch's default is a temporary folder, which may be lost at a restart of the machine or container.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(compiled_folder())
        torch._dynamo.config.recompile_limit = max(MOST_FORMS, torch._dynamo.config.recompile_limit)
        carry_out(self._rewrite, adapter.model, Setting(adapter.device))

    def forward(self, inputs: StepInputs, cache: KVCache) -> torch.Tensor:
        try:
            with distinct_sizes():
                return self._adapter.forward(inputs, cache, compiled=True)
        except Exception as failure:  # of the compiler, of Triton, of a driver: of any type
            is_capturing = self._adapter.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            if is_capturing or not self.give_up(failure):
                raise
        return self._adapter.forward(inputs, cache)

    def describe(self) -> str | None:
        """The cost of compiling so far; None if nothing was compiled."""
        seconds, forms, from_disk = (now - before for now, before in zip(_so_far(), self._before, strict=True))
        compiled = f"{forms:.0f} forms of a step compiled in {seconds:.1f} s"
        return f"{compiled}, {from_disk:.0f} of them read from {compiled_folder()}" if forms else None

    def give_up(self, failure: Exception | str) -> bool:
        """Stop compiling and log the reason; False if compiling was stopped before."""
        if self.reason is not None:
            return False
        self.reason = first_line(failure)
        undo(self._rewrite, self._adapter.model)
        logger.warning("steps are not compiled: %s", self.reason)
        return True


def distinct_sizes() -> AbstractContextManager[None]:
    """Context: the compiler does not unify symbolic sizes that are equal by chance, such as a batch of 2 and 2 heads.

    Otherwise steps in which they differ would need more forms.
    """
    found: AbstractContextManager[None] = torch.fx.experimental._config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
    return found


def _so_far() -> tuple[float, int, int]:
    """The compiler's seconds, its forms and how many of them it read from disk, in this process."""
    times, counters = torch._dynamo.utils.compilation_time_metrics, torch._dynamo.utils.counters
    from_disk = max(counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_hit"])
    return sum(times.get("_compile.compile_inner", ())), counters["stats"]["unique_graphs"], from_disk
