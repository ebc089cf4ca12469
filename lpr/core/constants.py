"""The numbers of the drafting cost model, in one place for both cores.

The Python core reads them here; lpr.native passes every upper-case name to the C++ core when it loads it. Unless a line
says otherwise, they were measured on the first 50 ClassEval tasks of two models, where the optimum is flat
(dev/LOG.md).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from math import exp

from lpr.core.recycle import MAX_SCORE, probability_of
from lpr.core.tree import Source

# Evidence (lpr.core.drafting, lpr.core.evaluated). POOL_MATCH and RECYCLED_WEIGHT were measured with the bundled model,
# because recorded completions have no Jacobi guesses and no candidates.
MAX_MATCH = 16  # longest context match in tokens; longer ones predict no better
GROWTH = 1.3  # factor of a place's weight per matching token before it: 1.3^match
NOVELTY = 5.0  # weight reserved for tokens that the evidence does not hold
SHARED_TRUST = 0.4  # weight of a place in the shared draft index, relative to one in the request's own index
REPLACED_TRUST = 0.3  # factor of places where the last token differs
POOL_MATCH = 3  # a pooled n-gram weighs as much as a match of this many tokens
RECYCLED_WEIGHT = 128.0  # total weight of a token's recycled candidates, split by probability
SIBLING_TRUST = 0.5
"""Factor of the candidates of a node whose context differs in one token (EvaluatedNodes.of_siblings)."""
MOST_SIBLINGS = 4  # rejected children of one node that are followed, in the order in which they were drafted
PAIR_BITS = 12
"""Pairs of tokens are kept in a hash table of 2^12 slots; a new pair overwrites the old one of its slot (rule R8)."""
MOST_KNOWN = 0.999  # upper bound of the summed probability of one stage's children
DELAY = 0.25  # the next source is asked at this part of the escape's probability: about what its best child gets
ROOT_PLACES, NODE_PLACES = 32, 8  # places looked up per suffix index at the root, and at a node below it
RECENT_TOKENS = 64  # tokens of the request tried without any context, the most recent first
HEAD_WEIGHT = 128.0  # total weight of a prediction head's guesses for one node, split by probability
HEAD_KIND, COPY_KIND = int(Source.HEAD), int(Source.COPY)
WEIGHTS = [GROWTH**length for length in range(MAX_MATCH + 1)]  # weight of a place by the length of its match
NOVELTIES = [NOVELTY / GROWTH**offset for offset in range(MAX_MATCH + 1)]
"""Novelty by the number of tokens since the places were looked up."""
CANDIDATE_WEIGHTS = [RECYCLED_WEIGHT * probability_of(score) for score in range(MAX_SCORE + 1)]
"""Weight of a recycled candidate by its score."""

# Alignment with a prediction (lpr.core.alignment); strengths are lengths of matches. Measured on the first 97 tasks of
# EditEval with their own inputs and with those of other tasks (commit cacb7da: benchmarks/edits.py).
PREDICTION_TRUST = 0.5  # weight of a place in the prediction, relative to one in the request's own index
FIRST_STRENGTH = 8  # of the cursor at the beginning of the prediction
REPLACED_COST, INSERTED_COST = 3, 4
"""Strength that a cursor loses at a wrong token, if it advances (replacement) and if it stays (insertion)."""
NEAR_BEFORE, NEAR_AFTER, NEAR_PLACES = 8, 32, 4
"""Search range for a token before and after the anchor, in tokens, and the most occurrences used."""
NEAR_BONUS = 3  # strength added to a place near the anchor, besides its match length
SURE_STRENGTH = 6  # least strength of a cursor whose place becomes the anchor
LOST_AFTER, LOST_MATCH = 16, 4
"""After LOST_AFTER tokens without a certain place, only matches of at least LOST_MATCH tokens start cursors: the
prediction may belong to another text."""
MOST_CURSORS = 6

# Calibration (lpr.core.calibration).
NUM_STAGES = 4  # contexts of a search's stages: two or more tokens, one token, one token replaced, none
RECENT_STAGE = 3
RECENT_KIND = 0
"""Kind of a token tried without any context. Every other kind is the `Source` of the best place."""
SEVERAL = 8  # added to the `Source` if more than one place supports the token
LEVELS = [0, 1, *[2] * 4, *[3] * 10]
"""Level by depth of the parent. Deeper parents have the last level: text accepted that far is a copy or a loop."""
NUM_LEVELS, NUM_KINDS, NUM_BUCKETS = 5, 17, 24
MIDDLE_BUCKET = 12  # bucket of odds from 1/2 to 1
STRENGTH, WEAK_STRENGTH = 200.0, 20.0
"""Weight of a cell's shipped frequency, in trials. Weak: cells that were not fitted, and deep ones, which must adapt
quickly to loops."""
FIRST_WEAK_LEVEL = 3
CELL_MEMORY = 1000.0  # most trials that a cell remembers, so that its frequency follows the text
LEAST_FREQUENCY = 1e-4  # lower bound of a cell's frequency, so that every cell can recover

# Step times (lpr.core.step_times).
KNOTS = (1, 2, 4, 8, 16, 17, 32, 33, 48, 49, 64, 65, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Numbers of evaluated tokens per rank at which step times are given.

Matrix units multiply tiles of 16 or 64 rows: t(n) jumps at the first row of a tile and is nearly flat within it."""

# Budgets (lpr.core.budget, lpr.core.budgets).
FIRST_WINDOW_YIELD = 0.14
"""Initial estimate of the Jacobi window's yield, in tokens per step; that of its pool is
`POOL_YIELD` * log2((1 + W) / 3).

Measured beside drafts from text at temperature 0.8: windows of 4, 8, 16 and 32 columns gave 0.10 to 0.18 tokens a step
and their pools 0.09, 0.20, 0.40 and 0.55 (dev/LOG.md, strong scaling)."""
POOL_YIELD = 0.16
WINDOW_SEGMENT = 16
"""Steps between two decisions whether the Jacobi window runs; its guesses take several steps to converge."""
WINDOW_MEMORY = 0.05  # weight of a step in the moving average of the window's yield
WINDOW_RETURN = 0.01
"""Per step without a window, the part by which its estimated yield returns to the initial one, so that the window is
tried again."""
QUIET_STEPS = 4
"""After this many consecutive steps whose best size was no draft, a sequence is decoded without drafts for a while."""
LONGEST_PAUSE, LONGEST_FAR_PAUSE = 8, 32
"""Most steps without drafts between two trials; the pause doubles up to this. Far: see `NEAR_PRICE`."""
LEAST_GAIN = 0.03
"""A step of B sequences has drafts only if they raise the expected tokens per millisecond by at least this part, times
1 - 1 / B.

Step times are known to a few percent, and in a large batch a node gains less than that. When 17 tokens seemed to take
no longer than 16, a batch of 16 drafted single nodes, which cost a tenth of a step and gained a thirtieth. For one
sequence nodes gain more than the error of step times, and a least gain of 3 % lost about as much (dev/LOG.md)."""
NEAR_PRICE = 0.5  # a sequence is far from drafting if its best node is worth less than this part of its price
NUM_BANDS = 7  # bands of depths counted separately: 1, 2 to 3, 4 to 7 and so on, and 64 or more
TRUSTED_NODES = 2.0  # weight of a band's initial trust, in expected nodes
TRUST_MEMORY = 0.95  # decay per step with drafts of a sequence's expected and accepted counts
PLAIN_MEMORY = 0.99  # the same per plain step, so that drafts are tried again after a while
LONG_MEMORY = 0.995
"""Decay per draft of the counts over all sequences, also for bands without a node; new sequences start from these
counts. In a step in which no sequence drafts they decay by `PLAIN_MEMORY` instead."""
MOST_PROMISED = 2.0
"""Most expected nodes of a band counted per step: a long chain that fails at its start is one failure, not sixty."""
LONGEST_CATCH_UP = 64
"""A longer pending chain is a prompt. Its time is spent once, so it does not make nodes cheaper."""
FORGOTTEN_AFTER = 4096
"""Steps after which an unused budget is dropped: there are many sets of home ranks, and few are in use (rule R8)."""


@dataclass(frozen=True)
class _Fit:
    """The log-odds of a child are level + kind + slope * octave of the odds of its score."""

    levels: tuple[tuple[float, ...], ...]  # one row per stage, one column per level
    slopes: tuple[tuple[float, ...], ...]
    kinds: dict[int, float]  # the kinds that were fitted


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
# Fitted on texts of SmolLM2-135M-Instruct at temperature 0.8 (16 ClassEval tasks), with the noise in
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
# Not fitted: recorded completions have no guesses of a window. Only a start.
_GUESSED = {Source.WINDOW: -2.0, Source.WINDOW + SEVERAL: 1.0}
# Levels and slopes of a prediction's children by stage and kind, fitted on the first 97 tasks of EditEval. Their weight
# is low, because predictions differ between workloads.
_PREDICTED = {
    (0, Source.PREDICTION): ((-0.5, 0.3, 0.7, 1.7, 2.3), (1.0, 1.0, 0.9, 0.35, 0.15)),
    (0, Source.PREDICTION + SEVERAL): ((-0.6, -0.3, 0.0, 1.5, 2.5), (0.55, 0.55, 0.6, 0.25, 0.15)),
    (2, Source.PREDICTION): ((-2.5,) * 5, (0.5,) * 5),
    (2, Source.PREDICTION + SEVERAL): ((-1.0,) * 5, (0.6,) * 5),
}

# A head's guesses already include the sampling noise, so their odds need no octaves. Heads differ in quality, so the
# start is cautious.
_HEAD = ((-1.0,) * 5, (0.65,) * 5)
_PREDICTED |= {(0, Source.HEAD): _HEAD, (0, Source.HEAD + SEVERAL): ((0.3,) * 5, (0.65,) * 5)}
# A low-bit copy's choice has a share above one half, the second choice one below (lpr.model.self_draft).
_PREDICTED |= {(0, Source.COPY): ((0.0,) * 5, (1.1,) * 5), (0, Source.COPY + SEVERAL): ((1.0,) * 5, (1.1,) * 5)}


def _shipped(fit: _Fit) -> tuple[array[float], array[float]]:
    """Per cell: the initial frequency, and its weight in trials."""
    frequencies, trials = array("d"), array("d")
    for stage in range(NUM_STAGES):
        for number in range(NUM_LEVELS):
            for kind in range(NUM_KINDS):
                levels, slopes = _PREDICTED.get((stage, kind), (fit.levels[stage], fit.slopes[stage]))
                log_odds, slope = levels[number] + fit.kinds.get(kind, _GUESSED.get(kind, 0.0)), slopes[number]
                for bucket in range(NUM_BUCKETS):
                    frequency = 1 / (1 + exp(-log_odds - slope * (bucket - MIDDLE_BUCKET)))
                    # Rounded, so that ranks with different math libraries have the same start.
                    frequencies.append(min(max(round(frequency, 6), LEAST_FREQUENCY), 1.0))
                fitted = kind in fit.kinds and number < FIRST_WEAK_LEVEL
                trials.extend([STRENGTH if fitted else WEAK_STRENGTH] * NUM_BUCKETS)
    return frequencies, trials


SHIPPED_FREQUENCIES, SHIPPED_TRIALS = zip(_shipped(_GREEDY), _shipped(_SAMPLED), strict=True)
"""Per cell, for requests that are greedy and for those that sample."""
