"""Sampling on a CPU without a sort: the tokens that `specification.pick` chooses, id for id.

The reference noises and, with a limit, sorts the vocabulary for every row. But only tokens near the top can win. With
a limit, the few largest scores nearly always hold all that it allows; without one, a token far below the best total so
far cannot reach it, since noise has an upper bound. What the few largest cannot decide is decided from more of the
row; and where a token wins of which this arithmetic is not exact enough to say whether the limit allows it, the
reference decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from lpr.core.accept import NOT_A_NUMBER
from lpr.model.sampling import specification
from lpr.model.sampling.noise import LARGEST_NOISE, RARE_BITS, RARE_NOISE, bits_of_pairs, gumbel_of_pairs
from lpr.model.sampling.selection import Selection

NUM_LARGEST = 64
"""Scores that are looked at first."""
CHUNK = 1 << 18
"""Scores that are worked on at a time: 1 MiB, which a core's cache holds."""
DOUBT = 1e-5
"""Probabilities this close to top-p are computed by the reference: a row's sum in float32 is right to about 1e-6."""
CLOSE = 1e-9
"""Ratios of two weights this close to min-p likewise: they are float64."""
NEAR = (7.0, 12.0, np.inf)
"""The parts of an undecided row that are sorted, one after the other: scores down to this far below its largest."""


def draw(logits: torch.Tensor, selection: Selection) -> torch.Tensor:
    """The next token [n] int64 of every row of `logits` [n, V] on a CPU; NOT_A_NUMBER where there is none."""
    chosen = np.full(len(logits), NOT_A_NUMBER, np.int64)
    warm = selection.temperature.numpy() > 0
    for rows in _chunks(np.flatnonzero(~warm), logits):
        chosen[rows] = best_tokens(_take(logits, rows).float()).numpy()
    limited = np.zeros(len(logits), bool)
    if selection.filtered:
        limited = ((selection.top_k > 0) | (selection.top_p < 1) | (selection.min_p > 0)).numpy() & warm
    if limited.any():
        _draw_limited(logits, selection, np.flatnonzero(limited), chosen)
    if (free := warm & ~limited).any():
        _draw_unlimited(logits, selection, np.flatnonzero(free), chosen)
    return torch.from_numpy(chosen)


def best_tokens(scores: torch.Tensor) -> torch.Tensor:
    """The argmax [n] of scores [n, V] on a CPU, of equal ones the first; NOT_A_NUMBER in rows with a NaN.

    numpy finds it several times as fast as torch, and like torch takes a NaN for the largest.
    """
    values = scores.numpy()
    found = values.argmax(1)
    spoilt = np.isnan(values[np.arange(len(found)), found])
    if spoilt.any():
        found[spoilt] = NOT_A_NUMBER
    return torch.from_numpy(found)


def _chunks(rows: np.ndarray, logits: torch.Tensor) -> Iterator[np.ndarray]:
    size = max(1, CHUNK // logits.shape[1])
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _take(tensor: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    """Rows in ascending order, without a copy where they are neighbours."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return tensor[rows[0] : rows[-1] + 1]
    return tensor[torch.from_numpy(rows)]


def _scaled(logits: torch.Tensor, selection: Selection, rows: np.ndarray) -> torch.Tensor:
    return _take(logits, rows).float() / _take(selection.temperature, rows)[:, None]


def _keys(selection: Selection, rows: np.ndarray) -> np.ndarray:
    return selection.keys[_take(selection.key_of, rows)].numpy().astype(np.uint32)


def _draw_unlimited(logits: torch.Tensor, selection: Selection, rows: np.ndarray, chosen: np.ndarray) -> None:
    """Rows of one key share their noise, which is made for tokens that could win in one of them."""
    key_of = selection.key_of.numpy()[rows]
    order = np.argsort(key_of, kind="stable")
    for group in np.split(rows[order], np.flatnonzero(np.diff(key_of[order])) + 1):
        key = _keys(selection, group[:1])
        for part in _chunks(group, logits):
            scaled = _scaled(logits, selection, part).numpy()
            first = scaled.argmax(1)
            best = scaled[np.arange(len(part)), first]
            good = np.isfinite(best)  # else a NaN or +inf, or nothing but -inf
            if not good.any():
                continue
            part, scaled, first, best = part[good], scaled[good] if not good.all() else scaled, first[good], best[good]
            start = np.uint32(selection.first_token)
            reach = best + gumbel_of_pairs(key, first.astype(np.uint32) + start)
            tokens = _possible_winners(scaled, reach - np.abs(reach) * np.float32(1e-6), key, first, start)
            noise = gumbel_of_pairs(key, tokens + start)
            for row, scores in zip(part, scaled, strict=True):
                chosen[row] = tokens[(scores[tokens] + noise).argmax()]  # of equal ones the lowest id


def _possible_winners(
    scaled: np.ndarray, reach: np.ndarray, key: np.ndarray, first: np.ndarray, start: np.uint32
) -> np.ndarray:
    """The columns [m] uint32, ascending, of tokens whose scores [n, V] can reach `reach` [n] with the noise of `key`.

    Column 0 is token `start`. The `first` [n], whose totals are within reach, are among them.
    Most need a noise that is rare: the hash alone tells that they lack it, without a logarithm.
    """
    near = np.flatnonzero((scaled >= (reach - np.float32(RARE_NOISE))[:, None]).any(0)).astype(np.uint32)
    far = np.flatnonzero((scaled >= (reach - np.float32(LARGEST_NOISE))[:, None]).any(0)).astype(np.uint32)
    return np.unique(np.concatenate([first.astype(np.uint32), near, far[bits_of_pairs(key, far + start) <= RARE_BITS]]))


def _draw_limited(logits: torch.Tensor, selection: Selection, rows: np.ndarray, chosen: np.ndarray) -> None:
    """The best total among what the largest scores show to be allowed; if they do not tell, one row after the other."""
    parts = []
    for part in _chunks(rows, logits):
        scaled = _scaled(logits, selection, part)
        values, tokens = largest(scaled, NUM_LARGEST)
        parts.append((values, tokens, _whole(scaled, values, _take(selection.top_p, part))))
    values, tokens, whole = (np.concatenate(each) for each in zip(*parts, strict=True))
    good = np.isfinite(values[:, 0])
    if not good.all():
        rows, values, tokens, whole = rows[good], values[good], tokens[good], whole[good]
    keys = np.repeat(_keys(selection, rows), values.shape[1]) if len(rows) else np.empty(0, np.uint32)
    totals = values + gumbel_of_pairs(keys, tokens.astype(np.uint32).reshape(-1)).reshape(values.shape)
    parameters = [each.numpy()[rows] for each in (selection.top_k, selection.top_p, selection.min_p)]
    limits = find_limits(values, whole, values.shape[1] == logits.shape[1], *parameters)
    chosen[rows], sure = limits.choose(totals, tokens)
    for place in np.flatnonzero(~sure):
        row = rows[place : place + 1]
        found = None
        if not limits.reached[place]:
            found = _from_more(_scaled(logits, selection, row)[0].numpy(), whole[place : place + 1], selection, row)
        if found is None:
            found = int(specification.pick(_take(logits, row), selection.rows(row))[0])
        chosen[row] = found


def _whole(scaled: torch.Tensor, values: np.ndarray, top_p: torch.Tensor) -> np.ndarray:
    """The sums [n] of exp(score - largest) over the rows of [n, V], where a limit asks for them."""
    if bool((top_p >= 1).all()):
        return np.ones(len(scaled), np.float32)
    return (scaled - torch.from_numpy(values[:, :1])).exp_().sum(1).numpy()


def _from_more(scaled: np.ndarray, whole: np.ndarray, selection: Selection, row: np.ndarray) -> int | None:
    """The choice of one row [V] from all scores near its largest, or from all of them; None if in doubt."""
    top_k, top_p, min_p = (each.numpy()[row] for each in (selection.top_k, selection.top_p, selection.min_p))
    for near in NEAR:
        tokens = np.flatnonzero(scaled >= scaled.max() - np.float32(near))
        tokens = tokens[np.argsort(-scaled[tokens], kind="stable")]
        values = scaled[tokens][None]
        limits = find_limits(values, whole, len(tokens) == len(scaled), top_k, top_p, min_p, True)
        if limits.reached[0]:
            most = limits.possible[0]
            totals = values[:, :most] + gumbel_of_pairs(_keys(selection, row), tokens[:most].astype(np.uint32))
            token, sure = limits.choose(totals, tokens[None, :most])
            return int(token[0]) if sure[0] else None
    raise AssertionError("the whole row reaches every limit")


def largest(scaled: torch.Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The `count` largest scores of every row of [n, V], sorted, equal ones by id, and their tokens.

    Of scores that equal the last one, others may be left out.
    """
    vocabulary = scaled.shape[1]
    width = vocabulary // count
    if width <= 2 * count:
        values, tokens = scaled.topk(min(count, vocabulary), dim=-1)
    else:
        # Blocks of `count` scores, one every `width`: those with the largest maxima hold all that exceed the least of
        # these maxima. The maxima over an outer axis are 15 times as fast as a topk of the row.
        blocks = scaled[:, : count * width].unflatten(1, (count, width))
        best = blocks.amax(1).topk(count, dim=-1).indices
        inside = blocks.gather(2, best[:, None].expand(-1, count, -1)).flatten(1)
        ids = (best[:, None] + torch.arange(count)[:, None] * width).flatten(1)
        rest = torch.arange(count * width, vocabulary).expand(len(scaled), -1)
        values, place = torch.cat([inside, scaled[:, count * width :]], 1).topk(count, dim=-1)
        tokens = torch.cat([ids, rest], 1).gather(1, place)
    tokens, order = tokens.sort(-1)
    values, order = torch.sort(values.gather(1, order), dim=-1, descending=True, stable=True)
    return values.numpy(), tokens.gather(1, order).numpy()


@dataclass
class Limits:
    """How many of the largest scores of some rows their limits allow."""

    allowed: np.ndarray
    """[n]: at least so many."""
    possible: np.ndarray
    """[n]: and at most so many, as sums are rounded."""
    reached: np.ndarray
    """[n] bool: is nothing allowed beyond these scores?"""

    def choose(self, totals: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of every row the token [n] with the best of the totals [n, m], and whether it is sure to be the choice."""
        totals = np.where(np.arange(totals.shape[1]) < self.possible[:, None], totals, -np.inf)
        best = totals.max(1, keepdims=True)
        wins = totals == best
        last = wins.shape[1] - 1 - wins[:, ::-1].argmax(1)
        found = np.where(wins, tokens, np.iinfo(np.int64).max).min(1)  # of equal ones the lowest id
        return found, self.reached & (last < self.allowed)


def find_limits(
    values: np.ndarray,
    whole: np.ndarray,
    complete: bool,
    top_k: np.ndarray,
    top_p: np.ndarray,
    min_p: np.ndarray,
    all_held: bool = False,
) -> Limits:
    """How many of the largest scores [n, m] of some rows, sorted, are within the limits [n] of each.

    `whole` is the sum of exp(score - largest) over the row, where top-p needs it. The scores are the row's largest but
    for such that equal the last one, or with `all_held` including those; if `complete`, they are the whole row.
    """
    num = values.shape[1]
    held = np.full(len(values), num) if complete or all_held else (values > values[:, -1:]).sum(1)
    weights = np.exp(values.astype(np.float64) - values[:, :1])
    rank = np.arange(num)
    # top-k: those that equal the k-th stay.
    has_k, knows_k = top_k > 0, (top_k > 0) & (top_k <= held)
    allowed = held
    if has_k.any():
        kth = np.take_along_axis(values, np.clip(top_k - 1, 0, num - 1)[:, None], 1)
        allowed = np.where(knows_k, ((values >= kth) & (rank < held[:, None])).sum(1), held)
    reached = knows_k | complete
    has_total = reached | ~has_k | (top_p >= 1)
    possible = allowed
    # top-p: the first, and those with less than p before them.
    has_p = top_p < 1
    if has_p.any():
        sums = weights.cumsum(1)
        total = np.where(has_k, np.take_along_axis(sums, np.maximum(allowed - 1, 0)[:, None], 1)[:, 0], whole)
        before = (sums - weights) / np.maximum(total, 1e-300)[:, None]
        counted = rank < allowed[:, None]
        sure = (((before < top_p[:, None] - DOUBT) | (rank == 0)) & counted).sum(1)
        open_ = (((before < top_p[:, None] + DOUBT) | (rank == 0)) & counted).sum(1)
        reached = np.where(has_p, has_total & (reached | (open_ < allowed)), reached)
        possible = np.where(has_p, open_, allowed)
        allowed = np.where(has_p, sure, allowed)
    # min-p: those with at least this part of the first one's probability.
    has_min = min_p > 0
    if has_min.any():
        inside = rank < held[:, None]
        is_first = values == values[:, :1]
        sure = ((is_first | (weights > min_p[:, None] * (1 + CLOSE))) & inside).sum(1)
        open_ = ((is_first | (weights >= min_p[:, None] * (1 - CLOSE))) & inside).sum(1)
        reached |= has_min & (open_ < held) & has_total
        possible = np.where(has_min, np.minimum(open_, possible), possible)
        allowed = np.where(has_min, np.minimum(sure, allowed), allowed)
    return Limits(allowed, possible, reached)
