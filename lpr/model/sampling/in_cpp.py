"""Sampling on a CPU in C++ (native/sampling.h): the tokens that `specification.pick` chooses, id for id.

The specification itself decides the rows where rounding would matter, two in a hundred thousand.
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
    """The argmax [n] of scores [n, V] on a CPU, of equal ones the first; NOT_A_NUMBER in rows with a NaN."""
    values = scores.numpy()  # several times as fast as torch, and like torch takes a NaN for the largest
    found = values.argmax(1)
    broken = np.isnan(values[np.arange(len(found)), found])
    if broken.any():
        found[broken] = NOT_A_NUMBER
    return torch.from_numpy(found)


def _choose(logits: torch.Tensor, selection: Selection, rows: np.ndarray) -> np.ndarray:
    assert native.choose_rows is not None
    choose, wide = native.choose_rows, logits.float()
    scores = (wide if wide.stride(1) == 1 else wide.contiguous()).numpy()
    keys = selection.keys[selection.key_of].numpy().astype(np.uint32)
    limits = selection.top_k, selection.top_p, selection.min_p
    columns = [each[rows] for each in (selection.temperature.numpy(), keys, *[each.numpy() for each in limits])]
    found = np.empty(len(rows), np.int64)

    def work(part: slice) -> None:
        choose(scores[part], *[each[part] for each in columns], selection.first_token, found[part])

    share_out(work, len(rows))
    return found
