"""Sampling on a CPU in C++ (native/sampling.h): the tokens that `specification.pick` chooses, id for id.

A row is read a few times in a core's cache: scaled, searched for the best total of score and noise, and added up where
a limit needs it. The specification decides the rows where rounding would matter, two in a hundred thousand.
"""

from __future__ import annotations

import numpy as np
import torch

from lpr import native
from lpr.core.accept import NOT_A_NUMBER
from lpr.model.sampling import specification
from lpr.model.sampling.selection import Selection
from lpr.model.threads import share_out

_NONE, _DOUBT = -1, -2
"""The extension's codes of a row without a choice, and of one that is too close to call."""


def draw(logits: torch.Tensor, selection: Selection) -> torch.Tensor:
    """The next token [n] int64 of every row of `logits` [n, V] on a CPU; NOT_A_NUMBER where there is none."""
    warm = selection.temperature.numpy() > 0
    chosen = np.empty(len(logits), np.int64)
    if not warm.all():
        chosen[~warm] = best_tokens(logits[torch.from_numpy(~warm)].float()).numpy()
    rows = np.flatnonzero(warm)
    found = _choose(logits if len(rows) == len(logits) else logits[torch.from_numpy(rows)], selection, rows)
    doubtful = rows[found == _DOUBT]
    if len(doubtful):
        there = torch.from_numpy(doubtful)
        found[found == _DOUBT] = specification.pick(logits[there], selection.rows(doubtful)).numpy()
    chosen[rows] = np.where(found == _NONE, NOT_A_NUMBER, found)
    return torch.from_numpy(chosen)


def best_tokens(scores: torch.Tensor) -> torch.Tensor:
    """The argmax [n] of scores [n, V] on a CPU, of equal ones the first; NOT_A_NUMBER in rows with a NaN.

    numpy finds it several times as fast as torch, and like torch takes a NaN for the largest.
    """
    values = scores.numpy()
    found = values.argmax(1)
    broken = np.isnan(values[np.arange(len(found)), found])
    if broken.any():
        found[broken] = NOT_A_NUMBER
    return torch.from_numpy(found)


def _choose(logits: torch.Tensor, selection: Selection, rows: np.ndarray) -> np.ndarray:
    """The extension's codes for `logits`, those of the selection's `rows`; by as many threads as torch uses."""
    assert native.choose_rows is not None
    choose, wide = native.choose_rows, logits.float()
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
        choose(scores[part], *[each[part] for each in columns], selection.first_token, found[part])

    share_out(work, len(rows))
    return found
