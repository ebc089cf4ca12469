"""Choosing tokens on a CPU in C++ (native/sampling.h): the ids of `specification.pick`, candidates, guesses.

Rows in which rounding could decide (about 2 in 100,000) are computed by the specification itself.
"""

import numpy as np
import torch

from lpr import native
from lpr.core.accept import NOT_A_NUMBER
from lpr.core.recycle import MAX_SCORE, SCORE_STEPS
from lpr.model.sampling import specification
from lpr.model.sampling.selection import Selection
from lpr.model.threads import team_size

_NONE, _DOUBT = -1, -2  # the extension's codes: no choice; too close to decide in float32


def draw(logits: torch.Tensor, selection: Selection) -> torch.Tensor:
    """The next token [n] int64 of every row of `logits` [n, V] on a CPU; NOT_A_NUMBER where there is none."""
    assert native.choose_rows is not None
    logits, found = _readable(logits), np.empty(len(logits), np.int64)
    keys = selection.keys[selection.key_of].numpy().astype(np.uint32)
    limits = [each.numpy() for each in (selection.top_k, selection.top_p, selection.min_p)]
    columns = selection.temperature.numpy(), keys, *limits
    native.choose_rows(*_place(logits), *columns, selection.first_token, team_size(), found)
    doubtful = np.flatnonzero(found == _DOUBT)
    if len(doubtful):
        found[doubtful] = specification.pick(logits[torch.from_numpy(doubtful)], selection.rows(doubtful)).numpy()
    return _chosen(found)


def best_tokens(logits: torch.Tensor) -> torch.Tensor:
    """The argmax [n] of `logits` [n, V] on a CPU, of equal ones the first; NOT_A_NUMBER with a NaN, or all -inf."""
    if native.best_rows is not None:
        logits, found = _readable(logits), np.empty(len(logits), np.int64)
        native.best_rows(*_place(logits), team_size(), found)
        return _chosen(found)
    values = logits.float().numpy()  # numpy is several times as fast, and also treats NaN as the largest
    found = values.argmax(1)
    return _chosen(np.where(values[np.arange(len(found)), found] > -np.inf, found, _NONE))


def candidates(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `choice.candidates`, on a CPU; of equally likely tokens the first."""
    assert native.rank_rows is not None
    logits, k = _readable(logits), min(k, logits.shape[1])
    tokens, scores = np.empty((len(logits), k), np.int32), np.empty((len(logits), k), np.uint8)
    native.rank_rows(*_place(logits), team_size(), SCORE_STEPS, MAX_SCORE, tokens, scores)
    return torch.from_numpy(tokens), torch.from_numpy(scores)


def guesses(
    logits: torch.Tensor, selection: Selection, vocabulary: torch.Tensor | None, num_noised: int, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `lpr.model.heads.guesses.likeliest`, on a CPU; of equally likely tokens the first."""
    assert native.guess_rows is not None
    logits, count, k = _readable(logits), len(logits), min(k, num_noised, logits.shape[1])
    temperature, keys = np.zeros(count, np.float32), np.zeros(count, np.uint32)
    if selection.sampled:
        temperature, keys = selection.temperature.numpy(), selection.keys[selection.key_of].numpy().astype(np.uint32)
    tokens, shares = np.empty((count, k), np.int64), np.empty((count, k), np.float32)
    known = 0 if vocabulary is None else vocabulary.data_ptr()
    native.guess_rows(*_place(logits), temperature, keys, num_noised, known, team_size(), tokens, shares)
    return torch.from_numpy(tokens), torch.from_numpy(shares)


def drafts(logits: torch.Tensor, selection: Selection, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A low-bit copy's draft from `logits` [n, V] on a CPU: tokens [n, k], its choice first, and their odds [n, k].

    The choice is that of `draw`, or either one of a near tie; NOT_A_NUMBER if there is none. Odds of being chosen are
    relative to those of the likeliest token.
    """
    assert native.draft_rows is not None
    logits, k = _readable(logits), min(k, logits.shape[1])
    tokens, odds = np.empty((len(logits), k), np.int64), np.empty((len(logits), k), np.float32)
    native.draft_rows(*_place(logits), selection.words.numpy(), team_size(), tokens, odds)
    return _chosen(tokens), torch.from_numpy(odds)


def _readable(logits: torch.Tensor) -> torch.Tensor:
    logits = logits if logits.dtype in (torch.float32, torch.bfloat16) else logits.float()
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _place(logits: torch.Tensor) -> tuple[int, int, int, bool]:
    return logits.data_ptr(), logits.shape[1], logits.stride(0), logits.dtype is torch.bfloat16


def _chosen(found: np.ndarray) -> torch.Tensor:
    found[found == _NONE] = NOT_A_NUMBER
    return torch.from_numpy(found)
