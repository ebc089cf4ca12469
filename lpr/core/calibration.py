"""Calibration of drafts: from a child's score to the frequency with which it was right. Twin: native/calibration.h.

A *stage* of the search drafts a child from the evidence at its parent: the inherited or longest matches first, then
ever shorter contexts. Each stage counts only for the case that the stages before it were wrong. Within a stage a child
has a *score*, its share of the evidence's weight. Children of one stage, depth, kind of evidence and range of scores
share a *cell*, whose probability is the frequency with which its children were right (adaptive probability maps, as in
the PAQ compressors: Mahoney 2005, "Adaptive weighing of context models").

Only the nodes of the accepted path show which child was right. A child of a later stage than the right one is not
counted either, because its stage holds for another case.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import frexp

from lpr.core import constants
from lpr.core.digest import Digest
from lpr.core.tree import TokenTree

_STAGE_SIZE = constants.NUM_LEVELS * constants.NUM_KINDS * constants.NUM_BUCKETS


def first_cell(stage: int, depth: int) -> int:
    """The first cell of a stage for parents at `depth`; `cell_within` is an offset from it."""
    level = constants.LEVELS[depth] if depth < len(constants.LEVELS) else constants.NUM_LEVELS - 1
    return (stage * constants.NUM_LEVELS + level) * constants.NUM_KINDS * constants.NUM_BUCKETS


def cell_within(kind: int, odds: float) -> int:
    """Offset of a cell among those of its stage and depth: by kind of evidence and octave of the score's odds."""
    bucket = frexp(odds)[1] + constants.MIDDLE_BUCKET
    if not 0 <= bucket < constants.NUM_BUCKETS:
        bucket = 0 if bucket < 0 else constants.NUM_BUCKETS - 1
    return kind * constants.NUM_BUCKETS + bucket


class Calibration:
    """Frequencies per cell. Replicated state: a pure function of the observations, in order."""

    __slots__ = ("_digest", "frequencies", "trials")

    def __init__(self, is_sampled: bool = False) -> None:
        """The shipped frequencies, fitted on recorded completions, for a request that is greedy or that samples."""
        self.frequencies = constants.SHIPPED_FREQUENCIES[is_sampled][:]  # per cell, from 0 to 1
        self.trials = constants.SHIPPED_TRIALS[is_sampled][:]
        """Per cell: the weight of its frequency, in trials."""
        self._digest = Digest()

    @property
    def digest(self) -> int:
        """64-bit digest of every frequency that an observation changed, in order."""
        return self._digest.value

    def copy(self) -> Calibration:
        """An independent copy."""
        copy = Calibration()
        copy.frequencies, copy.trials, copy._digest.value = self.frequencies[:], self.trials[:], self.digest
        return copy

    def observe(self, tree: TokenTree, path: Sequence[int], cells: Sequence[int], is_open: bool = False) -> None:
        """Count the accepted `path` of `tree`; `cells` [len(tree)] has each node's cell, -1 for none.

        None of the children of the last node of `path` may be what the model chose after it. If the path `is_open`,
        that choice is not known, and these children do not count.
        """
        changed = array("d")
        for parent, right in zip(path, path[1:] if is_open else (*path[1:], -1), strict=not is_open):
            # No source of the search proposed the right child, so the children of all stages count as wrong.
            end = (cells[right] // _STAGE_SIZE + 1) * _STAGE_SIZE if right >= 0 else 0
            end = end or len(self.frequencies)
            for child in tree.children[parent].values():
                if 0 <= cells[child] < end:
                    changed.append(self._count(cells[child], child == right))
        self._digest.update(memoryview(changed).cast("B").cast("Q"))

    def _count(self, cell: int, right: bool) -> float:
        """Count one trial; return the cell's new frequency."""
        trials = self.trials[cell] + 1.0
        frequency = self.frequencies[cell]
        frequency = max(constants.LEAST_FREQUENCY, frequency + (right - frequency) / trials)
        self.frequencies[cell] = frequency
        self.trials[cell] = min(trials, constants.CELL_MEMORY)
        return frequency
