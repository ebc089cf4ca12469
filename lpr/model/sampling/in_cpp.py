"""Sampling on a CPU in C++ (native/sampling.h): the tokens that `specification.pick` chooses, id for id.

A row is read a few times in a core's cache: scaled, searched for the best total of score and noise, and added up where
a limit asks for it. Rows of which rounding would decide are left to `in_numpy`, two in a hundred thousand.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from lpr import native
from lpr.core.accept import NOT_A_NUMBER
from lpr.model.sampling import in_numpy
from lpr.model.sampling.selection import Selection
from lpr.model.threads import share_out

_NONE, _DOUBT = -1, -2
"""What the extension says of a row without a choice, and of one that is too close to call."""


def draw(logits: torch.Tensor, selection: Selection) -> torch.Tensor:
    """The next token [n] int64 of every row of `logits` [n, V] on a CPU; NOT_A_NUMBER where there is none."""
    warm = selection.temperature.numpy() > 0
    chosen = np.empty(len(logits), np.int64)
    if not warm.all():
        chosen[~warm] = in_numpy.best_tokens(logits[torch.from_numpy(~warm)].float()).numpy()
    rows = np.flatnonzero(warm)
    found = _choose(logits if len(rows) == len(logits) else logits[torch.from_numpy(rows)], selection, rows)
    doubtful = rows[found == _DOUBT]
    if len(doubtful):
        there = torch.from_numpy(doubtful)
        found[found == _DOUBT] = in_numpy.draw(logits[there], selection.rows(doubtful)).numpy()
    chosen[rows] = np.where(found == _NONE, NOT_A_NUMBER, found)
    return torch.from_numpy(chosen)


def _choose(logits: torch.Tensor, selection: Selection, rows: np.ndarray) -> np.ndarray:
    """What the extension says of `logits`, those of the selection's `rows`; by as many threads as torch uses."""
    wide = logits.float()
    scores = (wide if wide.stride(1) == 1 else wide.contiguous()).numpy()
    columns = [
        np.ascontiguousarray(each, dtype)
        for each, dtype in (
            (selection.temperature.numpy()[rows], np.float32),
            (selection.keys.numpy()[selection.key_of.numpy()[rows]], np.uint32),
            (selection.top_k.numpy()[rows], np.int64),
            (selection.top_p.numpy()[rows], np.float32),
            (selection.min_p.numpy()[rows], np.float32),
        )
    ]
    found = np.empty(len(rows), np.int64)

    def work(part: slice) -> None:
        _choose_rows()(scores[part], *[each[part] for each in columns], found[part])

    share_out(work, len(rows))
    return found


def _choose_rows() -> Callable[..., None]:
    assert native.choose_rows is not None
    return native.choose_rows
