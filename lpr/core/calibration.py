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

from array import array
from collections.abc import Iterable, Sequence
from math import frexp

from lpr.core.tree import TokenTree

NUM_STAGES = 5
"""Stages of a search: longest context, one token, one token replaced, none; and nodes that were there before."""
RECENT_STAGE, WINDOW_STAGE = 3, 4
_DEPTHS = (0, 1, 2, 2, 2, 2)
"""Depth class by depth of the parent: root, shallow, and (see `_DEEP`) deep."""
_DEEP = 3
_NUM_DEPTHS = 4
SEVERAL = 5
"""Added to the `Source` of evidence that is more than one place."""
_NUM_KINDS = 11
_NUM_BUCKETS = 24
_MIDDLE = 12

STRENGTH = 100.0
"""Trials that the shipped frequency of a cell counts for."""
MEMORY = 1000.0
"""Trials that a cell remembers: older ones fade, so that it follows the text."""
LEAST = 1e-4
"""No cell falls below this, so that none is lost for good."""


def cell_of(stage: int, depth: int, kind: int, odds: float) -> int:
    """The cell of a child: by stage, depth of its parent, kind of evidence and odds of its score, in octaves."""
    level = _DEPTHS[depth] if depth < len(_DEPTHS) else _DEEP
    bucket = frexp(odds)[1] + _MIDDLE
    bucket = 0 if bucket < 0 else _NUM_BUCKETS - 1 if bucket >= _NUM_BUCKETS else bucket
    return ((stage * _NUM_DEPTHS + level) * _NUM_KINDS + kind) * _NUM_BUCKETS + bucket


def _prior() -> array[float]:
    """Frequency per cell before anything was observed: what the score says."""
    row = [1 / (1 + 2.0 ** (_MIDDLE - bucket + 0.5)) for bucket in range(_NUM_BUCKETS)]
    return array("d", row * (NUM_STAGES * _NUM_DEPTHS * _NUM_KINDS))


class Calibration:
    """Frequencies per cell. Replicated state: a pure function of the observations, in order.

    The caller decides what one object covers, a request or all of them.
    """

    __slots__ = ("frequencies", "trials")

    def __init__(self) -> None:
        """What is shipped, fitted on recorded completions (dev/LOG.md)."""
        self.frequencies = _prior()
        """Per cell: how often its children were right, 0 to 1."""
        self.trials = array("d", [STRENGTH]) * len(self.frequencies)
        """Per cell: the number of trials that its frequency counts for."""

    def observe(self, tree: TokenTree, path: Sequence[int], cells: Sequence[int]) -> None:
        """Take in the accepted `path` of `tree`; `cells` [len(tree)] has each node's cell, -1 for none.

        The token after the last node of `path` must be known to be none of its children.
        """
        for parent, right in zip(path, (*path[1:], -1), strict=True):
            last = cells[right] if right >= 0 else len(self.frequencies)
            stage_end = (last // _STAGE_SIZE + 1) * _STAGE_SIZE
            for child in tree.children[parent].values():
                cell = cells[child]
                if 0 <= cell < stage_end:
                    self._count(cell, child == right)

    def _count(self, cell: int, right: bool) -> None:
        trials = self.trials[cell] + 1.0
        frequency = self.frequencies[cell]
        frequency += (right - frequency) / trials
        self.frequencies[cell] = frequency if frequency > LEAST else LEAST
        if trials <= MEMORY:
            self.trials[cell] = trials

    def content(self) -> Iterable[bytes]:
        """Everything that a digest of replicated state has to cover."""
        return self.frequencies.tobytes(), self.trials.tobytes()


_STAGE_SIZE = _NUM_DEPTHS * _NUM_KINDS * _NUM_BUCKETS
