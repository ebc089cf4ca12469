"""The numbers of the drafting cost model, in one place for both cores.

The Python core reads them here; lpr.native hands every upper-case name to the C++ core once, when it loads it.
They were measured on the first 50 ClassEval tasks of two models, where the optimum is flat (dev/LOG.md), unless a line
says otherwise.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from math import exp

from lpr.core.recycle import MAX_SCORE, probability_of
from lpr.core.tree import Source

# Evidence (lpr.core.drafting, lpr.core.evaluated). POOL_MATCH and RECYCLED_WEIGHT were measured with the bundled model:
# recorded completions hold no guesses of a model.
MAX_MATCH = 16  # longest context match that counts; longer ones predict no better
GROWTH = 1.3  # factor of a place's weight per matching token before it: 1.3^match
NOVELTY = 5.0  # weight kept back for tokens that the evidence does not hold
SHARED_TRUST = 0.4  # weight of a place in the shared draft index; one of the request itself has 1
REPLACED_TRUST = 0.3  # factor of places where the last token differs
POOL_MATCH = 3  # a pooled n-gram weighs as much as a match of this length: the model itself guessed it nearby
RECYCLED_WEIGHT = 128.0  # weight that a token's recycled candidates share, each by its probability
SIBLING_TRUST = 0.5
"""Factor of the candidates of a node whose context differs in one token (EvaluatedNodes.of_siblings)."""
MOST_SIBLINGS = 4  # rejected children of one node that are followed, in the order in which they were drafted
PAIR_BITS = 12
"""Pairs of tokens are kept in 2^12 slots, each in the slot that its hash chooses, the newest pair alone (rule R8)."""
MOST_KNOWN = 0.999  # upper bound of the summed probability of one stage's children
DELAY = 0.25  # part of the escape's probability at which the next source is asked: about what its best child will get
ROOT_PLACES, NODE_PLACES = 32, 8  # places looked up per suffix index at the root, and at a node below it
RECENT_TOKENS = 64  # tokens of the request tried without any context, the most recent first
HEAD_WEIGHT = 128.0  # weight that the guesses of a prediction head for one node share, each by its probability
HEAD_KIND, COPY_KIND = int(Source.HEAD), int(Source.COPY)
WEIGHTS = [GROWTH**length for length in range(MAX_MATCH + 1)]  # weight of a place by the length of its match
NOVELTIES = [NOVELTY / GROWTH**offset for offset in range(MAX_MATCH + 1)]
"""Novelty by the tokens since the places were looked up."""
CANDIDATE_WEIGHTS = [RECYCLED_WEIGHT * probability_of(score) for score in range(MAX_SCORE + 1)]
"""Weight of a recycled candidate by its score."""

# Alignment with a prediction (lpr.core.alignment); strengths are lengths of matches. Measured on the first 97 tasks of
# EditEval with their own inputs and with those of other tasks (commit cacb7da: benchmarks/edits.py).
PREDICTION_TRUST = 0.5  # weight of a place in the prediction; one of the request itself has 1
FIRST_STRENGTH = 8  # of the cursor at the beginning of the prediction
REPLACED_COST, INSERTED_COST = 3, 4
"""What a cursor loses at another token than its own, when it steps on and when it stays."""
NEAR_BEFORE, NEAR_AFTER, NEAR_PLACES = 8, 32, 4
"""Tokens before and after the anchor among which a token is looked for, and most places of it."""
NEAR_BONUS = 3  # strength of a place for being near the anchor, besides its match
SURE_STRENGTH = 6  # least strength of a cursor whose place becomes the anchor
LOST_AFTER, LOST_MATCH = 16, 4
"""Tokens without a sure place after which only matches of some length count: the prediction may be of another text."""
MOST_CURSORS = 6

# Calibration (lpr.core.calibration).
NUM_STAGES = 4  # stages of a search: the longest context, one token, one token replaced, none
RECENT_STAGE = 3
RECENT_KIND = 0
"""Kind of a token that is tried without any context; the other kinds are the `Source` of the best place."""
SEVERAL = 8  # added to the `Source` of evidence that is more than one place
LEVELS = [0, 1, *[2] * 4, *[3] * 10]
"""Level by depth of the parent; deeper parents have the last level: text right so often is a copy or a loop."""
NUM_LEVELS, NUM_KINDS, NUM_BUCKETS = 5, 17, 24
MIDDLE_BUCKET = 12  # bucket of odds from 1/2 to 1
STRENGTH, WEAK_STRENGTH = 200.0, 20.0
"""Trials that the shipped frequency of a cell counts for. Weak: not fitted, or deep, where a loop shows at once."""
FIRST_WEAK_LEVEL = 3
CELL_MEMORY = 1000.0  # most trials that a cell counts; older ones fade, so that it follows the text
LEAST_FREQUENCY = 1e-4  # lower bound of a cell's frequency, so that no cell is lost for good

# Step times (lpr.core.step_times).
KNOTS = (1, 2, 4, 8, 16, 17, 32, 33, 48, 49, 64, 65, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Numbers of evaluated tokens, per rank, that a row of step times has times for.

Matrix units multiply 16 or 64 rows at once, so one row more is a jump, and those after it are cheap."""

# Budgets (lpr.core.budget, lpr.core.budgets).
FIRST_WINDOW_YIELD = 0.14
"""Tokens a step that the Jacobi window is expected to earn at first, and `POOL_YIELD` * log2((1 + W) / 3) its pool.

Measured beside drafts from text at temperature 0.8: windows of 4, 8, 16 and 32 columns gave 0.10 to 0.18 tokens a step
and their pools 0.09, 0.20, 0.40 and 0.55 (dev/LOG.md, strong scaling)."""
POOL_YIELD = 0.16
WINDOW_SEGMENT = 16
"""Steps between two decisions whether the Jacobi window runs: it needs several steps to show what it yields."""
WINDOW_MEMORY = 0.05  # weight of a step in the moving average of the window's yield
WINDOW_RETURN = 0.01
"""Per step without a window, how far the estimate of its yield returns to the first one: the window is tried again."""
QUIET_STEPS = 4
"""After so many steps in a row that were best without any draft, a sequence is decoded plainly for a while."""
LONGEST_PAUSE, LONGEST_FAR_PAUSE = 8, 32
"""Most steps between two trials whether drafts pay again; the pause doubles up to this. Far: see `NEAR_PRICE`."""
LEAST_GAIN = 0.03
"""A step of B sequences has drafts only if their promise of tokens per millisecond is higher than without them by this
part, times 1 - 1 / B.

Step times are known to a few percent, and among many sequences a node brings less than that: where 17 tokens seemed to
take no longer than 16, a batch of 16 drafted single nodes, which cost a tenth of a step and bring a thirtieth. For one
sequence nodes bring more than such an error, and a least gain of 3 % cost about as much (dev/LOG.md)."""
NEAR_PRICE = 0.5  # a sequence whose best node is worth less than this part of its price is far from paying
NUM_BANDS = 7  # depths whose promises are counted apart: 1, 2 to 3, 4 to 7 and so on, and 64 or more
TRUSTED_NODES = 2.0  # promised nodes of each band that count as kept before any of a sequence's nodes was tried
TRUST_MEMORY = 0.95  # part of earlier evidence on a sequence's promises that remains after a step with drafts
PLAIN_MEMORY = 0.99  # the same per plain step: what failed long ago is tried again
LONG_MEMORY = 0.995
"""As TRUST_MEMORY for all sequences together, per draft, even one without nodes of a band; new sequences start from
their record. `PLAIN_MEMORY` counts here per step in which no sequence drafts."""
MOST_PROMISED = 2.0
"""Most promised nodes of a band that a step counts for: a long chain that breaks at once is one failure, not sixty."""
LONGEST_CATCH_UP = 64
"""A longer chain above a root is a prompt: its time is spent once, whatever is drafted, so it makes no node cheaper."""
FORGOTTEN_AFTER = 4096
"""Steps after which an unused budget is dropped: sets of home ranks are many, and few are in use (rule R8)."""


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
# Recorded completions hold no guesses of a window: only a start.
_GUESSED = {Source.WINDOW: -2.0, Source.WINDOW + SEVERAL: 1.0}
# Levels and slopes of a prediction's children by stage and kind, fitted on the first 97 tasks of EditEval. They are
# weak, as predictions differ.
_PREDICTED = {
    (0, Source.PREDICTION): ((-0.5, 0.3, 0.7, 1.7, 2.3), (1.0, 1.0, 0.9, 0.35, 0.15)),
    (0, Source.PREDICTION + SEVERAL): ((-0.6, -0.3, 0.0, 1.5, 2.5), (0.55, 0.55, 0.6, 0.25, 0.15)),
    (2, Source.PREDICTION): ((-2.5,) * 5, (0.5,) * 5),
    (2, Source.PREDICTION + SEVERAL): ((-1.0,) * 5, (0.6,) * 5),
}

# Guesses know the sampling noise, so their odds need no octaves. How good a head is differs: the start is cautious.
_HEAD = ((-1.0,) * 5, (0.65,) * 5)
_PREDICTED |= {(0, Source.HEAD): _HEAD, (0, Source.HEAD + SEVERAL): ((0.3,) * 5, (0.65,) * 5)}
# Shares of a copy's choices and of their runners-up are above and below one half (lpr.model.self_draft).
_PREDICTED |= {(0, Source.COPY): ((0.0,) * 5, (1.1,) * 5), (0, Source.COPY + SEVERAL): ((1.0,) * 5, (1.1,) * 5)}


def _shipped(fit: _Fit) -> tuple[array[float], array[float]]:
    """Per cell: the frequency before anything was observed, and the trials that it counts for."""
    frequencies, trials = array("d"), array("d")
    for stage in range(NUM_STAGES):
        for number in range(NUM_LEVELS):
            for kind in range(NUM_KINDS):
                levels, slopes = _PREDICTED.get((stage, kind), (fit.levels[stage], fit.slopes[stage]))
                log_odds, slope = levels[number] + fit.kinds.get(kind, _GUESSED.get(kind, 0.0)), slopes[number]
                for bucket in range(NUM_BUCKETS):
                    frequency = 1 / (1 + exp(-log_odds - slope * (bucket - MIDDLE_BUCKET)))
                    # Rounded, so that ranks with different mathematical libraries start alike.
                    frequencies.append(min(max(round(frequency, 6), LEAST_FREQUENCY), 1.0))
                fitted = kind in fit.kinds and number < FIRST_WEAK_LEVEL
                trials.extend([STRENGTH if fitted else WEAK_STRENGTH] * NUM_BUCKETS)
    return frequencies, trials


SHIPPED_FREQUENCIES, SHIPPED_TRIALS = zip(_shipped(_GREEDY), _shipped(_SAMPLED), strict=True)
"""Per cell, for requests that are greedy and for those that sample."""
