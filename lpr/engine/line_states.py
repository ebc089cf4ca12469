"""The recurrent states that a draft rank has of a request (lpr.engine.draft_rank).

A pass needs the states right before the first token that it evaluates, and states do not go back. So the rank has three
places for each request: those behind what it drafted last (the scratch states, which passes read), those behind some
committed token (the slot's own), and those behind what it had drafted some steps ago (a mark), to which the second ones
move on when these tokens are committed. From the latest place that still holds, the tokens behind it are evaluated.
"""

from __future__ import annotations

from lpr.model.recurrent.states import States


class LineStates:
    """The places of one slot, and the number of tokens that each has followed; 0: none."""

    def __init__(self, states: States, slot: int, place: int) -> None:
        """`place` of `states` is for the mark."""
        assert states.scratch is not None
        self._states, self._scratch = states, states.scratch
        self._slot, self._place = slot, place
        self._base = self._next = self._mark = self.tip = 0

    def go_to(self, num_held: int, num_right: int) -> int:
        """Let the scratch states be the latest ones behind at most `num_held` tokens; returns behind how many.

        The first `num_right` of these tokens are committed.
        """
        slot, states = self._slot, self._states
        self._mark = self._mark if self._mark <= num_held else 0
        self._base = self._base if self._base <= num_held else 0
        if self._base < self._mark <= num_right:
            states.copy(self._place, slot)
            self._base, self._mark = self._mark, 0
        if self.tip > num_held or not self.tip:
            self.tip = max(self._base, self._mark)
            if self.tip:
                self._scratch.copy(self._place if self._mark else slot, slot, states)
        if self.tip > num_right and not self._mark:
            states.copy(slot, self._place, self._scratch)
            self._mark = self.tip
        elif self._base < self.tip == num_right:
            states.copy(slot, slot, self._scratch)
            self._base = self.tip
        return self.tip

    def begin(self, num_right: int) -> None:
        """Passes begin, the first of which writes the slot's own states `num_right` tokens behind the scratch states.

        If they are interrupted before `end`, what they have written does not count.
        """
        self._next = self.tip + num_right if num_right else self._base
        self.tip, self._base = 0, 0 if num_right else self._base

    def end(self, num_drafted: int, has_base: bool) -> None:
        """Passes have ended behind `num_drafted` tokens, 0 if the last one failed."""
        self.tip, self._base = num_drafted, self._next if has_base else 0
