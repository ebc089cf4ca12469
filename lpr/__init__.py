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
    "Chunk",
    "Completion",
    "DecodeConfig",
    "Engine",
    "EngineOptions",
    "InputError",
    "Lookahead",
    "Request",
    "SamplingParams",
    "bundled_model",
    "lookahead",
]

_HOMES = {
    "DecodeConfig": "lpr.config",
    "InputError": "lpr.config",
    "SamplingParams": "lpr.config",
    "Lookahead": "lpr.drop_in.lookahead",
    "lookahead": "lpr.drop_in.lookahead",
    "Chunk": "lpr.protocol",
    "Completion": "lpr.engine.request",
    "Engine": "lpr.engine.engine",
    "EngineOptions": "lpr.engine.options",
    "Request": "lpr.engine.request",
    "bundled_model": "lpr.model.loader",
}


def __getattr__(name: str) -> Any:
    # On first use: the core stays importable without loading torch and transformers (3 seconds).
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'lpr' has no attribute {name!r}")
