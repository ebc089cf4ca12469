"""What drafted tokens turned out to be worth: score of a child -> the frequency with which it was right.

A child is drafted by a *stage* of the search, the evidence asked for at its parent: the inherited or longest matches
first, then ever shorter contexts, and each stage answers only for the case that the ones before it were wrong. Within a
stage a child has a *score*, its share of the evidence's weight. Children of one stage, depth, kind of evidence and
range of scores share a *cell*, and a cell's probability is the frequency with which its children were right (adaptive
probability maps, as in the PAQ compressors: Mahoney 2005, "Adaptive weighing of context models").

What was right can be seen at the nodes of the accepted path only: one of their children at most is what the model
chose. A node off the path says nothing of its children. A child of a later stage than the right one says nothing
either, because its stage was asked about another case.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, frexp

from lpr.core.tree import Source, TokenTree

NUM_STAGES = 4
"""Stages of a search: the longest context, one token, one token replaced, none."""
RECENT_STAGE = 3
RECENT_KIND = 0
"""Kind of a token that is tried without any context; all other kinds are a `Source`, the best place's."""
SEVERAL = 5
"""Added to the `Source` of evidence that is more than one place."""

_LEVELS = (0, 1, *[2] * 4, *[3] * 10)
"""Level by depth of the parent; deeper ones are level 4: what has been right so often is copied text, or a loop."""
_NUM_LEVELS, _NUM_KINDS, _NUM_BUCKETS = 5, 11, 24
_MIDDLE = 12
_STAGE_SIZE = _NUM_LEVELS * _NUM_KINDS * _NUM_BUCKETS

# Recorded completions hold no guesses of a window. These are only where its first steps start from.
_GUESSED = {Source.WINDOW: -2.0, Source.WINDOW + SEVERAL: 1.0}


@dataclass(frozen=True)
class _Fit:
    """The log-odds of a child are level + kind + slope * octave of the odds of its score."""

    levels: tuple[tuple[float, ...], ...]
    """One row per stage, one column per level."""
    slopes: tuple[tuple[float, ...], ...]
    kinds: dict[int, float]
    """Those that were fitted."""


# Fitted on replays of the first 50 ClassEval tasks of two models, cold and warm (dev/LOG.md).
_GREEDY = _Fit(
    levels=(
        (0.40, 0.58, 0.37, 0.30, 1.48),
        (-0.13, -0.73, -0.96, 0.0, 0.0),
        (-1.06, -0.50, -0.51, 0.0, 0.0),
        (-0.90, -0.66, -1.49, 0.0, 0.0),
    ),
    slopes=(
        (0.92, 1.04, 1.00, 0.61, 0.41),
        (0.84, 0.55, 0.49, 0.7, 0.7),
        (0.56, 0.65, 0.7, 0.7, 0.7),
        (0.20, 0.0, 0.0, 0.7, 0.7),
    ),
    kinds={
        RECENT_KIND: -3.06,
        Source.TRIE: 0.29,
        Source.SHARED_TRIE: 0.09,
        Source.TRIE + SEVERAL: -0.60,
        Source.SHARED_TRIE + SEVERAL: -0.55,
    },
)
# Fitted on texts of SmolLM2-135M-Instruct at temperature 0.8 (16 ClassEval tasks, benchmarks.record), with the noise in
# the odds and the fit above as the prior.
_SAMPLED = _Fit(
    levels=(
        (0.39, 0.62, 0.50, 0.23, 1.23),
        (-0.96, -0.80, -0.84, -0.05, 0.0),
        (-0.71, -0.52, -0.56, 0.0, 0.0),
        (-0.78, -0.78, -1.49, 0.0, 0.0),
    ),
    slopes=(
        (0.67, 0.75, 0.74, 0.54, 0.30),
        (0.50, 0.46, 0.50, 0.67, 0.7),
        (0.54, 0.62, 0.71, 0.7, 0.7),
        (0.26, 0.08, 0.0, 0.7, 0.7),
    ),
    kinds={
        RECENT_KIND: -3.06,
        Source.TRIE: 0.05,
        Source.SHARED_TRIE: 0.09,
        Source.TRIE + SEVERAL: -0.54,
        Source.SHARED_TRIE + SEVERAL: -0.55,
        Source.POOL + SEVERAL: -0.28,
        Source.RECYCLED + SEVERAL: -0.24,
    },
)

STRENGTH, WEAK_STRENGTH = 200.0, 20.0
"""Trials that the shipped frequency of a cell counts for. Weak: not fitted, or deep, where a loop shows at once."""
_DEEP = 3  # first level whose cells are weak
MEMORY = 1000.0
"""Trials that a cell remembers: older ones fade, so that it follows the text."""
LEAST = 1e-4
"""No cell falls below this, so that none is lost for good."""


def first_cell(stage: int, depth: int) -> int:
    """The first cell of a stage below parents of a depth; `cell_within` counts from there."""
    return (stage * _NUM_LEVELS + (_LEVELS[depth] if depth < len(_LEVELS) else 4)) * _NUM_KINDS * _NUM_BUCKETS


def cell_within(kind: int, odds: float) -> int:
    """The place of a cell among those of its stage and depth: by kind of evidence and octave of the score's odds."""
    bucket = frexp(odds)[1] + _MIDDLE
    if not 0 <= bucket < _NUM_BUCKETS:
        bucket = 0 if bucket < 0 else _NUM_BUCKETS - 1
    return kind * _NUM_BUCKETS + bucket


def _shipped(fit: _Fit) -> tuple[array[float], array[float]]:
    """Per cell: the frequency before anything was observed, and the trials that it counts for."""
    frequencies, trials = array("d"), array("d")
    for levels, slopes in zip(fit.levels, fit.slopes, strict=True):
        for number, (level, slope) in enumerate(zip(levels, slopes, strict=True)):
            for kind in range(_NUM_KINDS):
                log_odds = level + fit.kinds.get(kind, _GUESSED.get(kind, 0.0))
                for bucket in range(_NUM_BUCKETS):
                    frequency = 1 / (1 + exp(-log_odds - slope * (bucket - _MIDDLE)))
                    # Rounded, so that ranks with different mathematical libraries start alike.
                    frequencies.append(min(max(round(frequency, 6), LEAST), 1.0))
                fitted = kind in fit.kinds and number < _DEEP
                trials.extend([STRENGTH if fitted else WEAK_STRENGTH] * _NUM_BUCKETS)
    return frequencies, trials


_SHIPPED = (_shipped(_GREEDY), _shipped(_SAMPLED))
"""For requests that are greedy, and for those that sample."""


class Calibration:
    """Frequencies per cell. Replicated state: a pure function of the observations, in order.

    The caller decides what one object covers, a request or all of them.
    """

    __slots__ = ("_hash", "frequencies", "trials")

    def __init__(self, is_sampled: bool = False) -> None:
        """What is shipped, fitted on recorded completions, for a request that is greedy or that samples."""
        frequencies, trials = _SHIPPED[is_sampled]
        self.frequencies = frequencies[:]
        """Per cell: how often its children were right, 0 to 1."""
        self.trials = trials[:]
        """Per cell: the number of trials that its frequency counts for."""
        self._hash = hashlib.blake2b(digest_size=8)

    @property
    def digest(self) -> int:
        """64-bit digest of every frequency that an observation changed, in order."""
        return int.from_bytes(self._hash.digest(), "little")

    def observe(self, tree: TokenTree, path: Sequence[int], cells: Sequence[int]) -> None:
        """Take in the accepted `path` of `tree`; `cells` [len(tree)] has each node's cell, -1 for none.

        None of the children of the last node of `path` may be what the model chose after it.
        """
        changed = array("d")
        for parent, right in zip(path, (*path[1:], -1), strict=True):
            # A right child that no source of the search proposed was wrong for all of them.
            end = (cells[right] // _STAGE_SIZE + 1) * _STAGE_SIZE if right >= 0 else 0
            end = end or len(self.frequencies)
            for child in tree.children[parent].values():
                if 0 <= cells[child] < end:
                    changed.append(self._count(cells[child], child == right))
        self._hash.update(changed.tobytes())

    def _count(self, cell: int, right: bool) -> float:
        """Take in one trial; return the cell's new frequency."""
        trials = self.trials[cell] + 1.0
        frequency = self.frequencies[cell]
        frequency = max(LEAST, frequency + (right - frequency) / trials)
        self.frequencies[cell] = frequency
        self.trials[cell] = min(trials, MEMORY)
        return frequency
