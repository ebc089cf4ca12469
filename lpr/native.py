"""The drafting core that runs: `lpr.core` in C++ (native/) where it was built, else `lpr.core` itself.

Both have the same classes and give the same trees, probabilities, states and digests to the last bit, so ranks with and
without the extension work together. `lpr.core` is the executable specification, and what one reads; code that drafts
imports the names of both from here. LPR_PURE_PYTHON=1 in the environment chooses the specification.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lpr import config
from lpr.core import budget, budgets, calibration, drafting, evaluated, step_times, suffix_index


def _load() -> tuple[ModuleType | None, str | None]:
    """The extension, ready to use, and if there is none and nobody asked for that, why."""
    if os.environ.get("LPR_PURE_PYTHON", "") not in ("", "0"):
        return None, None
    try:
        extension = import_module("lpr._native")
    except ImportError as failure:
        return None, str(failure)
    extension.set_constants(_constants())
    return extension, None


def _constants() -> dict[str, Any]:
    """The numbers of the specification, which the extension takes over: each is said in one place."""
    numbers = {
        config: ("NUM_HEADER", "NUM_TREE_HEADER"),
        drafting: ("GROWTH", "SHARED_TRUST", "REPLACED_TRUST", "BESIDE_TRUST", "MOST", "DELAY", "POOL_MATCH"),
        evaluated: ("MOST_BESIDE", "PAIR_BITS"),
        suffix_index: ("MAX_MATCH",),
        calibration: ("RECENT_STAGE", "RECENT_KIND", "SEVERAL", "MEMORY", "LEAST"),
        budget: (
            *("WINDOW_MEMORY", "WINDOW_RETURN", "TRUSTED_NODES", "TRUST_MEMORY", "PLAIN_MEMORY", "MOST_PROMISED"),
            *("LONG_MEMORY", "NEAR_PRICE", "WINDOW_SEGMENT", "QUIET_STEPS", "LONGEST_PAUSE", "LONGEST_FAR_PAUSE"),
        ),
        budgets: ("FORGOTTEN_AFTER",),
    }
    frequencies, trials = zip(*calibration._SHIPPED, strict=True)
    return {
        **{name.lower(): getattr(module, name) for module, names in numbers.items() for name in names},
        "root_places": drafting.ROOT_PLACES,
        "node_places": drafting.NODE_PLACES,
        "weight": drafting._WEIGHT,
        "novelty": drafting._NOVELTY,
        "recycled": drafting._RECYCLED,
        "recent_tokens": drafting.RECENT_TOKENS,
        "shipped_frequencies": [list(each) for each in frequencies],
        "shipped_trials": [list(each) for each in trials],
        "levels": list(calibration._LEVELS),
        "num_levels": calibration._NUM_LEVELS,
        "num_kinds": calibration._NUM_KINDS,
        "num_buckets": calibration._NUM_BUCKETS,
        "middle": calibration._MIDDLE,
        "knots": list(step_times.KNOTS),
    }


_extension, missing = _load()
"""`missing`: why the specification runs where the extension was wanted; None if all is as asked for."""
is_native = _extension is not None
if missing:
    logging.getLogger(__name__).warning(
        "lpr drafts in Python, about 15 times more slowly than in C++ (%s): reinstall it where there is a compiler, or "
        "set LPR_PURE_PYTHON=1 if that is meant",
        missing,
    )

if TYPE_CHECKING or _extension is None:
    from lpr.core.accept import accept
    from lpr.core.budget import AcceptanceHistory, AdaptiveBudget, Draft, DraftRequest, FixedBudget
    from lpr.core.budgets import Budgets
    from lpr.core.calibration import Calibration
    from lpr.core.drafting import Drafter
    from lpr.core.noise_keys import selection_words
    from lpr.core.partition import Shard, partition
    from lpr.core.pool import NGramPool
    from lpr.core.recycle import CandidateTable
    from lpr.core.rows import (
        Conclusion,
        StepDraft,
        ancestor_words,
        cache_moves,
        draft_step,
        place_rows,
        row_entries,
        split,
        workload,
    )
    from lpr.core.state import SequenceState, TreeResult, has_nan_result
    from lpr.core.suffix_index import SuffixIndex
    from lpr.core.tree import TokenTree
    from lpr.core.window import JacobiWindow
__all__ = [
    "AcceptanceHistory",
    "AdaptiveBudget",
    "Budgets",
    "Calibration",
    "CandidateTable",
    "Conclusion",
    "Draft",
    "DraftRequest",
    "Drafter",
    "FixedBudget",
    "JacobiWindow",
    "NGramPool",
    "SequenceState",
    "Shard",
    "StepDraft",
    "SuffixIndex",
    "TokenTree",
    "TreeResult",
    "accept",
    "ancestor_words",
    "cache_moves",
    "draft_step",
    "has_nan_result",
    "is_native",
    "missing",
    "partition",
    "place_rows",
    "row_entries",
    "selection_words",
    "split",
    "workload",
]

choose_rows: Callable[..., None] | None = getattr(_extension, "choose_rows", None)
"""Chooses the tokens of rows of logits (lpr.model.sampling.in_cpp); without the extension torch and numpy do it."""

attend_in_order: Callable[..., None] | None = getattr(_extension, "attend_in_order", None)
"""Exact attention (lpr.model.exact.in_order); without the extension torch's matrix products do it, in another order."""

if _extension is not None:
    globals().update({name: getattr(_extension, name) for name in __all__ if name not in ("is_native", "missing")})
