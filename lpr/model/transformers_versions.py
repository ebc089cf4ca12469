"""Differences between the supported versions of transformers (5.17 to 5.24); no other module checks versions."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import transformers
import transformers.distributed.mixin as distributed_mixin
from torch.distributed.device_mesh import DeviceMesh
from transformers.cache_utils import Cache

from lpr.config import InputError

CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
"""Names of the argument of a forward that takes a cache: since 5.24, up to 5.23, and of Mamba up to 5.23."""


@functools.cache
def cache_argument(forward: Callable[..., Any]) -> str | None:
    """The name of the argument of `forward` that takes a cache; None if none does."""
    given = inspect.signature(forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in given), None)


def passed(cache: Cache | None, module: torch.nn.Module) -> dict[str, Cache | None]:
    name = cache_argument(type(module).forward)
    if name is None:
        raise TypeError(f"the forward of {type(module).__name__} takes no cache")
    return {name: cache}


@contextmanager
def split_over(mesh: DeviceMesh, device: torch.device | None) -> Iterator[None]:
    """Context: `from_pretrained` splits over `mesh`; it ignores `device_mesh=` and would use the whole world as tp.

    Raises InputError for versions before 5.18, which do not allow this.
    """
    module: Any = distributed_mixin
    if not hasattr(module, "initialize_distributed_mesh"):
        raise InputError(
            f"--tp needs transformers 5.18 or later and this is {transformers.__version__}; "
            "--tp-backend deepspeed takes it too"
        )
    original = module.initialize_distributed_mesh
    module.initialize_distributed_mesh = lambda config: (device, SimpleNamespace(get_mesh=lambda dims: mesh))
    try:
        yield
    finally:
        module.initialize_distributed_mesh = original
