"""Sampling on a CPU against its specification, id for id, on logits made to be difficult."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from difficult_logits import PARAMS, draws, peaked
from hypothesis import given, settings

from lpr.config import SamplingParams
from lpr.core.accept import NOT_A_NUMBER
from lpr.model.sampling import in_numpy, specification
from lpr.model.sampling.choice import pick
from lpr.model.sampling.noise import LARGEST_NOISE, RARE_BITS, RARE_NOISE, bits_of_pairs, gumbel, gumbel_of_pairs
from lpr.model.sampling.selection import Selection


@settings(max_examples=300, deadline=None)
@given(draws())
def test_the_same_ids_as_the_specification(drawn: tuple[torch.Tensor, Selection]) -> None:
    logits, selection = drawn
    if selection.sampled:
        assert torch.equal(in_numpy.draw(logits, selection), specification.pick(logits, selection))
    assert torch.equal(pick(logits, selection), pick(logits, selection, fixed_shapes=True))


TREE = [0, 1, 1, 2, 2, 2, 3, 4] * 4


@pytest.mark.parametrize("params", PARAMS, ids=range(len(PARAMS)))
@pytest.mark.parametrize("vocabulary", [49152, 128256, 262144])
def test_large_vocabularies(params: SamplingParams, vocabulary: int) -> None:
    logits = peaked(torch.Generator().manual_seed(vocabulary), 8, vocabulary)
    logits[6:] *= 0.3  # two rows whose limits allow more than the few largest scores
    selection = Selection.build([(params, TREE[:8])])
    assert torch.equal(in_numpy.draw(logits, selection), specification.pick(logits, selection))


@pytest.mark.parametrize("params", PARAMS, ids=range(len(PARAMS)))
def test_noise_is_made_only_where_it_can_matter(params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logarithms of the noise are for a hundredth of the vocabulary; the reference takes them for all of it."""
    counted = []

    def count(keys: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        counted.append(len(tokens))
        return gumbel_of_pairs(keys, tokens)

    monkeypatch.setattr(in_numpy, "gumbel_of_pairs", count)
    monkeypatch.setattr(in_numpy.specification, "pick", None)
    logits = peaked(torch.Generator().manual_seed(6), len(TREE), 50_000)
    in_numpy.draw(logits, Selection.build([(params, TREE)]))
    assert 0 < sum(counted) < 0.01 * logits.numel()


def pick_as_before(logits: torch.Tensor, selection: Selection) -> torch.Tensor:
    """The choice as it was first written, with probabilities in float32 and ties in the order of an unstable sort."""
    scores = logits.float()
    scaled = scores / selection.temperature[:, None]
    ordered, index = scaled.sort(-1, descending=True)
    rank = torch.arange(scaled.shape[1])[None]
    top_k = torch.where(selection.top_k > 0, selection.top_k, scaled.shape[1])[:, None]
    keep = ordered >= ordered.gather(1, (top_k - 1).clamp_max(scaled.shape[1] - 1))
    ordered = ordered.masked_fill(~keep, float("-inf"))
    probs = torch.softmax(ordered, -1)
    before = probs.cumsum(-1) - probs
    keep &= (before < selection.top_p[:, None]) | (selection.top_p[:, None] >= 1) | (rank == 0)
    probs = torch.softmax(ordered.masked_fill(~keep, float("-inf")), -1)
    keep &= probs >= selection.min_p[:, None] * probs[:, :1]
    scaled = scaled.masked_fill(~torch.zeros_like(keep).scatter(1, index, keep), float("-inf"))
    return (scaled + gumbel(selection.keys[selection.key_of][:, None], torch.arange(scores.shape[1])[None])).argmax(-1)


@pytest.mark.parametrize("params", PARAMS, ids=range(len(PARAMS)))
def test_no_id_has_changed_since_it_was_first_written(params: SamplingParams) -> None:
    generator = torch.Generator().manual_seed(8)
    for start in range(0, 1600, 400):
        logits = peaked(generator, 400, 2000)
        selection = Selection.build([(params, range(start, start + 400))])
        assert torch.equal(in_numpy.draw(logits, selection), pick_as_before(logits, selection))


def test_noise_of_pairs_is_the_noise() -> None:
    generator = np.random.default_rng(0)
    keys = generator.integers(0, 2**32, 100_000, dtype=np.uint32)
    tokens = generator.integers(0, 2**20, 100_000, dtype=np.uint32)
    expected = gumbel(torch.from_numpy(keys.astype(np.int64)), torch.from_numpy(tokens.astype(np.int64)))
    assert np.array_equal(gumbel_of_pairs(keys, tokens), expected.numpy())
    one = gumbel_of_pairs(keys[:1], tokens)
    assert np.array_equal(one, gumbel_of_pairs(np.repeat(keys[:1], len(tokens)), tokens))
    assert np.array_equal(gumbel_of_pairs(keys[5:17], tokens[5:17]), expected.numpy()[5:17]), "wherever it stands"


def test_the_bounds_of_the_noise_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(1)
    keys = generator.integers(0, 2**32, 1_000_000, dtype=np.uint32)
    tokens = np.arange(1_000_000, dtype=np.uint32)
    rare = gumbel_of_pairs(keys, tokens) >= RARE_NOISE
    assert rare.sum() > 1000 and (bits_of_pairs(keys, tokens)[rare] <= RARE_BITS).all()
    assert (bits_of_pairs(keys, tokens) <= RARE_BITS).mean() < 0.003
    for largest in (0, 1, 2**32 - 1):
        monkeypatch.setattr(
            "lpr.model.sampling.noise.bits_of_pairs", lambda *_, bits=largest: np.array([bits], np.uint32)
        )
        assert -3 < gumbel_of_pairs(keys, tokens)[0] < LARGEST_NOISE


def test_a_row_without_a_choice_spoils_no_other() -> None:
    logits = peaked(torch.Generator().manual_seed(9), 6, 9000)
    logits[1, 77], logits[3], logits[4, 5] = torch.nan, -torch.inf, torch.inf
    for params in PARAMS:
        selection = Selection.build([(params, range(6))])
        chosen = in_numpy.draw(logits, selection)
        assert [code == NOT_A_NUMBER for code in chosen.tolist()] == [False, True, False, True, True, False]
        alone = [in_numpy.draw(logits[i : i + 1], Selection.build([(params, [i])])) for i in range(6)]
        assert torch.equal(chosen, torch.cat(alone))


# Seeded faults.


def many_ids(params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10)
    logits = torch.cat([peaked(generator, 40, 9000) * scale for scale in (1.0, 0.5, 0.3, 0.2)])
    levels = torch.randint(0, 4, (160, 60), generator=generator).float()  # many ties among few tokens
    logits = torch.cat([logits, torch.nn.functional.pad(levels, (0, 8940), value=-torch.inf)])
    selection = Selection.build([(params, range(len(logits)))])
    return in_numpy.draw(logits, selection), specification.pick(logits, selection)


def noise_bound_too_low(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(in_numpy, "LARGEST_NOISE", 9.0)


def rare_hash_too_low(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(in_numpy, "RARE_BITS", np.uint32(int(RARE_BITS) // 16))


def what_is_not_reached_is_taken(patch: pytest.MonkeyPatch) -> None:
    choose = in_numpy.Limits.choose
    patch.setattr(in_numpy.Limits, "choose", lambda *args: (choose(*args)[0], np.ones(len(args[1]), bool)))


def sums_of_the_largest_only(patch: pytest.MonkeyPatch) -> None:
    def mutant(scaled: torch.Tensor, values: np.ndarray, top_p: torch.Tensor) -> np.ndarray:
        return np.exp(values - values[:, :1]).sum(1)

    patch.setattr(in_numpy, "_whole", mutant)


def ties_in_any_order(patch: pytest.MonkeyPatch) -> None:
    def mutant(scaled: torch.Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
        ids = torch.arange(scaled.shape[1] - 1, -1, -1).expand_as(scaled)
        values, place = torch.sort(scaled.flip(1), dim=-1, descending=True, stable=True)
        return values[:, :count].numpy(), ids.gather(1, place)[:, :count].numpy()

    patch.setattr(in_numpy, "largest", mutant)


@pytest.mark.parametrize(
    "fault, params",
    [
        (noise_bound_too_low, PARAMS[0]),
        (rare_hash_too_low, PARAMS[0]),
        (what_is_not_reached_is_taken, PARAMS[1]),
        (what_is_not_reached_is_taken, PARAMS[3]),
        (sums_of_the_largest_only, PARAMS[1]),
        (ties_in_any_order, PARAMS[1]),
    ],
)
def test_faults_are_noticed(
    fault: Callable[[pytest.MonkeyPatch], None], params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert torch.equal(*many_ids(params))
    fault(monkeypatch)
    assert not torch.equal(*many_ids(params))
