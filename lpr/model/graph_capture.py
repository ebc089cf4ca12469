"""Capture of a program as a CUDA graph, and the check for models that cannot be captured."""

from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from lpr.model.attention import sparse
from lpr.model.families import has_experts, rope_parameters

_WAITING = (
    "_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "unique_consecutive", "masked_select", "is_nonzero",
    "equal",
)  # fmt: skip
"""Operators whose result's value or shape the host must wait for."""
_DYNAMIC_ROPE = ("dynamic", "longrope")

Program = Callable[[], torch.Tensor]


class Capturer(Protocol):
    """Turns a program into its replay; the tests have one for a CPU."""

    def capture(self, program: Program) -> Program:
        """Run `program` once eagerly, then record it; every replay returns the same tensor."""
        ...

    def release(self) -> None:
        """Free all captured graphs, also ones still referenced; they must not be replayed again."""


class CudaCapturer(Capturer):
    """Captures with torch.cuda.graph, on a stream of its own, into one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: WeakSet[Any] = WeakSet()

    def release(self) -> None:
        for graph in list(self._graphs):
            graph.reset()
        self._graphs.clear()
        # A new pool: a tensor that outlives the graphs of a pool prevents further captures into it.
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, program: Program) -> Program:
        """As Capturer.capture. The first run sets libraries up, which a capture does not allow."""
        with torch.cuda.device(self.device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                program()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            try:
                # thread_local: NCCL's watchdog thread queries events during the capture.
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    results = program()
            except Exception:
                torch.cuda.set_stream(stream)  # a failed capture leaves its stream current
                raise

        self._graphs.add(graph)

        def replay() -> torch.Tensor:
            graph.replay()
            return results

        return replay


class WaitsError(RuntimeError):
    """The model's forward makes the host wait for the device, or depends on the host."""


class NoWaiting(TorchDispatchMode):
    """Raises WaitsError at an operator that synchronises the host, which a graph cannot contain."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name.split("::")[-1].split(".")[0] in _WAITING:
            raise WaitsError(f"its forward waits for the device ({name})")
        result = func(*args, **(kwargs or {}))
        if name in ("aten::_to_copy", "aten::copy_"):
            source = args[1] if name == "aten::copy_" else args[0]
            if source.device != result.device:
                raise WaitsError(f"its forward copies from {source.device.type} to {result.device.type} ({name})")
        return result


def uncapturable(model: PreTrainedModel, accepts_positions: bool) -> str | None:
    """The reason in its configuration why `model` cannot be captured; None if it has none."""
    config: Any = model.config.get_text_config(decoder=True)
    for rope in rope_parameters(config):
        name = rope.get("rope_type", rope.get("type"))
        if name in _DYNAMIC_ROPE:
            return f"its rope_type {name!r} looks at the longest position of each step on the host"
    if sparse.pools(config):
        return "which of its tokens are pooled is found on the host"
    is_eager = getattr(config, "_experts_implementation", None) == "eager" and model._can_set_experts_implementation()
    if is_eager and has_experts(config):  # families with their own experts code (Llama 4) ignore the setting
        return "its experts implementation 'eager' asks the device which experts are hit (use 'grouped_mm')"
    if not accepts_positions:
        return "its forward takes no positions, so that the cached length would be a constant of the graph"
    return None
