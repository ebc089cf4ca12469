"""The drafting core in use: the C++ extension (native/) if it was built, else `lpr.core`.

Both have the classes and functions named here, and give the same trees, states and digests to the last bit, so ranks
with and without the extension work together. `lpr.core` is the executable specification; each of its modules names its
twin in native/. LPR_PURE_PYTHON=1 in the environment chooses the specification.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lpr.core import constants, heads, wire


def _load() -> tuple[ModuleType | None, str | None]:
    """The initialised extension; or None and the reason if it is wanted and missing."""
    if os.environ.get("LPR_PURE_PYTHON", "") not in ("", "0"):
        return None, None
    try:
        extension = import_module("lpr._native")
    except ImportError as failure:
        return None, str(failure)
    extension.set_constants(numbers())
    return extension, None


def numbers() -> dict[str, Any]:
    """The constants of the specification by lower-case name, for the extension."""
    named = {**vars(heads), **vars(wire), **vars(constants)}
    return {name.lower(): value for name, value in named.items() if name.isupper() and not name.startswith("_")}


_extension, missing = _load()
"""`missing`: the reason why the specification runs although the extension is wanted; else None."""
is_native = _extension is not None
if missing:
    logging.getLogger(__name__).warning(
        "lpr drafts in Python, about 15 times more slowly than in C++ (%s): reinstall it where there is a compiler, or "
        "set LPR_PURE_PYTHON=1 if that is meant",
        missing,
    )

if TYPE_CHECKING or _extension is None:
    from lpr.core.budgets import Budgets
    from lpr.core.chains import Chains, ChainState
    from lpr.core.drafting import Drafter
    from lpr.core.noise_keys import selection_words
    from lpr.core.partition import Shard
    from lpr.core.recycle import CandidateTable
    from lpr.core.rows import ancestor_words, place_packed, place_rows
    from lpr.core.state import SequenceState
    from lpr.core.step import Concluded, Conclusion, StepDraft, draft_step, expectations
    from lpr.core.suffix_index import SuffixIndex
    from lpr.core.tree import TokenTree
__all__ = [
    "Budgets", "CandidateTable", "ChainState", "Chains", "Concluded", "Conclusion", "Drafter", "SequenceState", "Shard",
    "StepDraft", "SuffixIndex", "TokenTree", "ancestor_words", "draft_step", "expectations", "is_native", "missing",
    "place_packed", "place_rows", "selection_words",
]  # fmt: skip

choose_rows: Callable[..., None] | None = getattr(_extension, "choose_rows", None)
best_rows: Callable[..., None] | None = getattr(_extension, "best_rows", None)
rank_rows: Callable[..., None] | None = getattr(_extension, "rank_rows", None)
guess_rows: Callable[..., None] | None = getattr(_extension, "guess_rows", None)
draft_rows: Callable[..., None] | None = getattr(_extension, "draft_rows", None)
"""Tokens that rows of logits give (lpr.model.sampling.in_cpp); without the extension torch and numpy choose them."""

use_team: Callable[..., None] | None = getattr(_extension, "use_team", None)
share_of_workers: Callable[..., list[int]] | None = getattr(_extension, "share_of_workers", None)
"""Loops of the extension in torch's team of threads (lpr.model.threads), and a loop that does nothing else."""

PagedAttention: Callable[..., Any] | None = getattr(_extension, "PagedAttention", None)
"""Attention over pages (lpr.model.attention.native)."""

attend_in_order: Callable[..., None] | None = getattr(_extension, "attend_in_order", None)
"""Exact attention (lpr.model.attention.in_order); without the extension torch does it, in another order."""

walk_linear: Callable[..., None] | None = getattr(_extension, "walk_linear", None)
"""Exact scans (lpr.model.recurrent.in_order); without the extension torch does them, with other bits."""

rms_norm: Callable[..., None] | None = getattr(_extension, "rms_norm", None)
rotate: Callable[..., None] | None = getattr(_extension, "rotate", None)
gate: Callable[..., None] | None = getattr(_extension, "gate", None)
"""Parts of a decoder layer on a CPU (lpr.model.fused.elementwise); without the extension they are the modules' own."""

can_tile: Callable[[], bool] | None = getattr(_extension, "can_tile", None)
can_use_amx: Callable[[], bool] | None = getattr(_extension, "can_use_amx", None)
use_narrow_vectors: Callable[[bool], None] | None = getattr(_extension, "use_narrow_vectors", None)
multiply_tiles: Callable[..., None] | None = getattr(_extension, "multiply_tiles", None)
"""Matrix products of a few rows (lpr.model.cpu.tiles), with AVX2 or AVX-512; of bfloat16 by a core's matrix unit if it
has one (AMX). Elsewhere torch multiplies."""

add_low_rank: Callable[..., None] | None = getattr(_extension, "add_low_rank", None)
"""What adapters add to rows of a product (lpr.model.lora.bank); without the extension torch multiplies."""

DecoderLayer: Callable[..., Any] | None = getattr(_extension, "DecoderLayer", None)
DecoderLayers: Callable[..., Any] | None = getattr(_extension, "DecoderLayers", None)
"""A decoder layer of these products, parts and attention as one call (lpr.model.fused.decoder_layer)."""

if _extension is not None:
    globals().update({name: getattr(_extension, name) for name in __all__ if name not in ("is_native", "missing")})
