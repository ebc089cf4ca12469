"""lpr: a lookahead-parallel runtime for decoder-only language models.

`lpr.Engine.from_pretrained("path/or/hub-id").generate(["def f("], lpr.SamplingParams(max_new_tokens=64))`
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lpr.config import DecodeConfig, InputError, SamplingParams
    from lpr.drop_in.lookahead import Lookahead, lookahead
    from lpr.engine.engine import Engine
    from lpr.engine.options import EngineOptions
    from lpr.engine.request import Completion, Request
    from lpr.model.loader import bundled_model
    from lpr.protocol import Chunk

__version__ = "0.1.0"
__all__ = [
    "Chunk", "Completion", "DecodeConfig", "Engine", "EngineOptions", "InputError", "Lookahead", "Request",
    "SamplingParams", "bundled_model", "lookahead",
]  # fmt: skip

_HOMES = {
    "config": ("DecodeConfig", "InputError", "SamplingParams"), "drop_in.lookahead": ("Lookahead", "lookahead"),
    "protocol": ("Chunk",), "engine.request": ("Completion", "Request"), "engine.engine": ("Engine",),
    "engine.options": ("EngineOptions",), "model.loader": ("bundled_model",),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    # On first use: the core stays importable without loading torch and transformers (3 seconds).
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"lpr.{module}"), name)
    raise AttributeError(f"module 'lpr' has no attribute {name!r}")
