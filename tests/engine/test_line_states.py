"""The states that a draft rank has of a request: each place has those of the tokens that it counts."""

from __future__ import annotations

import random

import pytest
import torch

from lpr.engine.line_states import LineStates
from lpr.model.recurrent.states import States


@pytest.mark.parametrize("seed", range(20))
def test_places_have_the_states_of_the_tokens_that_they_have_followed(seed: int) -> None:
    """Random steps of a request that takes other ways than its drafts; a state here is a sum over its tokens."""
    dice, states = random.Random(seed), States(4)
    states._tensors["scan", 0, 1] = torch.full((4, 1), -1)
    states.scratch = states.resized(2)
    places, scratch, (own,) = LineStates(states, 1, 3), states.scratch._tensors["scan", 0, 1], states._tensors.values()
    tokens, chain, longest = [dice.randrange(9) for _ in range(5)], list[int](), 0

    def state(count: int) -> int:
        return sum((at + 1) * token for at, token in enumerate([*tokens, *chain][:count], 1)) + count

    for _ in range(60):
        above = len(tokens) - 1
        held = dice.choice([0, above]) if dice.random() < 0.05 else above + len(chain)
        start = places.go_to(held, min(held, above))
        assert start <= held and (not start or scratch[1] == state(start))
        longest = max(longest, start - above)
        right = max(0, above - start)
        chain += [dice.randrange(9) for _ in range(dice.randrange(1, 5))]
        places.begin(right)
        failed_pass = dice.choice([0, 0, 0, 0, 0, 0, 1, 2])
        if right and failed_pass != 1:
            own[1] = state(start + right)
        if failed_pass != 1:
            scratch[1] = state(above + len(chain))
        places.end(0 if failed_pass else above + len(chain), failed_pass != 1 or not right)
        count = dice.randrange(len(chain) + 1)
        tokens += chain[:count]
        chain = chain[count:] if dice.random() < 0.6 else []
        if not chain:
            tokens.append(9)
    assert longest > 0
