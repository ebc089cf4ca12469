"""A CUDA graph on a CPU: the operators of a program, recorded once with their tensors and run again without it.

As with a real graph, a replay runs none of the program's Python: a number that the host computed is a constant, and a
tensor that was not written since is stale.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lpr.model.graph_capture import Capturer, NoWaiting, Program


@dataclass
class FakeCapturer(Capturer):
    """Capturer of tests; counts what it captures and replays."""

    num_captures: int = 0
    num_replays: int = 0
    drop: str = ""
    """Operators of this name are left out of replays: a seeded fault."""

    def capture(self, program: Program) -> Program:
        self.num_captures += 1
        program()
        recording = Recording()
        with NoWaiting(), recording:
            results = program()

        def replay() -> torch.Tensor:
            self.num_replays += 1
            recording.replay(self.drop)
            return results

        return replay


@dataclass
class Recording(TorchDispatchMode):
    """Every operator with its arguments and results, but for those that only make a view."""

    steps: list[tuple[Any, Any, Any, list[torch.Tensor]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {_storage(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        made = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        fresh = [each for each in made if _storage(each) not in given]
        if fresh or func._schema.is_mutable:
            self.steps.append((func, args, kwargs, fresh))
        return result

    @torch.no_grad()
    def replay(self, drop: str = "") -> None:
        """Run the operators in order; results go to the memory that they had when they were recorded."""
        for func, args, kwargs, recorded in self.steps:
            if drop and drop in func.name():
                continue
            made = [each for each in tree_leaves(func(*args, **kwargs)) if isinstance(each, torch.Tensor)]
            for target, new in zip(recorded, made, strict=not func._schema.is_mutable):
                assert target.shape == new.shape and target.dtype == new.dtype
                if target.numel():
                    target.copy_(new)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
