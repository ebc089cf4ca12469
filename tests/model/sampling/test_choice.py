from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from lpr.config import SamplingParams
from lpr.core.noise_keys import noise_key
from lpr.core.recycle import SCORE_STEPS
from lpr.model.sampling import choice as choice_module
from lpr.model.sampling import specification
from lpr.model.sampling.choice import TRIED, candidates, check_pick, choose, gpu_likeliest, pick
from lpr.model.sampling.selection import Selection
from lpr.model.sampling.specification import gumbel, limit
from tests.fakes.difficult_logits import PARAMS, peaked

CPU = torch.device("cpu")


def selection(params: SamplingParams, positions: range | list[int]) -> Selection:
    return Selection.build([(params, positions)], CPU)


def allowed_probs(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution that transformers samples from with these parameters."""
    scores = TemperatureLogitsWarper(params.temperature)(None, logits)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    return torch.softmax(scores, -1)


CASES = [
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.8, seed=2),
    SamplingParams(temperature=1.5, seed=3, top_k=7),
    SamplingParams(temperature=0.8, seed=4, top_p=0.9),
    SamplingParams(temperature=1.2, seed=5, min_p=0.05),
    SamplingParams(temperature=1.1, seed=6, top_k=20, top_p=0.8, min_p=0.02),
]


@pytest.mark.parametrize("params", CASES, ids=str)
def test_draws_from_the_right_distribution(params: SamplingParams) -> None:
    """Chi-square over 100,000 draws, one per position; 5 standard deviations above its mean fails."""
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(0)) * 2
    expected = allowed_probs(logits, params)[0].double() * 100_000
    drawn = choose(logits.expand(100_000, -1), selection(params, range(100_000)))
    counts = torch.bincount(drawn, minlength=40).double()
    assert counts[expected == 0].sum() == 0
    rare = expected < 5
    cells = [(counts[~rare], expected[~rare])]
    if expected[rare].sum() > 5:
        cells.append((counts[rare].sum()[None], expected[rare].sum()[None]))
    chi2 = sum(((seen - want) ** 2 / want).sum().item() for seen, want in cells)
    freedom = sum(len(seen) for seen, _ in cells) - 1
    assert chi2 < freedom + 5 * np.sqrt(2 * freedom), (chi2, freedom)


@pytest.mark.slow
def test_draws_over_seeds_too() -> None:
    """One position under many seeds is as good a source as many positions under one seed."""
    logits = torch.tensor([[0.0, 0.5, 1.0, -1.0, 0.2]])
    requests = [(SamplingParams(temperature=1.0, seed=seed), [17]) for seed in range(50_000)]
    counts = torch.bincount(choose(logits.expand(50_000, -1), Selection.build(requests, CPU)), minlength=5).double()
    expected = torch.softmax(logits[0].double(), -1) * 50_000
    assert ((counts - expected) ** 2 / expected).sum() < 4 + 5 * np.sqrt(8)


def test_neighbouring_draws_are_independent() -> None:
    """Pairs of consecutive positions fill the product distribution."""
    logits = torch.tensor([[0.3, 0.0, -0.5, 0.8]])
    drawn = choose(logits.expand(200_000, -1), selection(SamplingParams(temperature=1.0, seed=9), range(200_000)))
    pairs = torch.bincount(drawn[:-1] * 4 + drawn[1:], minlength=16).double()
    probs = torch.softmax(logits[0].double(), -1)
    expected = torch.outer(probs, probs).flatten() * 199_999
    assert ((pairs - expected) ** 2 / expected).sum() < 15 + 5 * np.sqrt(30)


def test_noise_has_gumbel_moments() -> None:
    keys = torch.tensor([noise_key(3, position) for position in range(500)])
    noise = gumbel(keys[:, None], torch.arange(2000)[None]).double()
    assert abs(noise.mean() - np.euler_gamma) < 0.005
    assert abs(noise.std() - np.pi / np.sqrt(6)) < 0.005
    assert torch.isfinite(noise).all()
    centred = noise - noise.mean()
    assert abs((centred[1:] * centred[:-1]).mean()) < 0.01
    assert abs((centred[:, 1:] * centred[:, :-1]).mean()) < 0.01


@pytest.mark.parametrize("params", CASES, ids=str)
def test_limits_are_those_of_transformers(params: SamplingParams) -> None:
    logits = torch.randn(30, 64, generator=torch.Generator().manual_seed(1)) * 3
    chosen = selection(params, range(30))
    mine = torch.softmax(limit(logits / params.temperature, chosen), -1)
    assert torch.equal(mine > 0, allowed_probs(logits, params) > 0)


def test_greedy_is_argmax_also_beside_sampled_rows() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(2))
    mixed = Selection.build([(SamplingParams(), [1, 2, 3]), (SamplingParams(temperature=0.9, seed=8), [1, 2, 3])], CPU)
    chosen = choose(logits, mixed)
    assert torch.equal(chosen[:3], logits[:3].argmax(-1))
    alone = choose(logits[3:], selection(SamplingParams(temperature=0.9, seed=8), [1, 2, 3]))
    assert torch.equal(chosen[3:], alone)


def test_noise_depends_on_seed_position_and_token_only() -> None:
    logits = torch.randn(1, 97, generator=torch.Generator().manual_seed(3)).expand(5, -1)
    params = SamplingParams(temperature=2.0, seed=2**40 + 5)
    one = choose(logits, selection(params, [4, 9, 4, 300, 9]))
    assert one[0] == one[2] and one[1] == one[4]
    many = torch.cat([choose(logits[:1], selection(params, [p])) for p in (4, 9, 4, 300, 9)])
    assert torch.equal(one, many)
    different = [choose(logits[:1].expand(64, -1), selection(SamplingParams(temperature=2.0, seed=s), range(64)))
                 for s in (5, 2**32 + 5, 2**40 + 5)]  # fmt: skip
    assert not torch.equal(different[0], different[1]) and not torch.equal(different[1], different[2])


def test_candidates() -> None:
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(4)) * 3
    tokens, scores = candidates(logits, 5)
    probs = torch.softmax(logits, -1)
    best = probs.sort(-1, descending=True)
    assert torch.equal(tokens, best.indices[:, :5])
    recovered = torch.exp(scores.float() / -SCORE_STEPS)
    expected = best.values[:, :5].clamp_min(float(np.exp(-255 / SCORE_STEPS)))
    assert torch.allclose(recovered, expected, rtol=0.04)
    assert candidates(logits, 64)[0].shape == (4, 30)


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
@pytest.mark.slow(first=3)
def test_no_id_has_changed_since_it_was_first_written(params: SamplingParams) -> None:
    generator = torch.Generator().manual_seed(8)
    for start in range(0, 1600, 400):
        logits = peaked(generator, 400, 2000)
        selection = Selection.build([(params, range(start, start + 400))])
        assert torch.equal(pick(logits, selection), pick_as_before(logits, selection))


# Kernels that a GPU's self-check must refuse. Each is right where a row is one block and ids are short.


def last_block_of_equals(logits: torch.Tensor, selection: Selection) -> torch.Tensor:
    best = [block.max(-1) for block in logits.split(4096, -1)]
    tops = torch.stack([each.values for each in best], 1)
    last = tops.shape[1] - 1 - tops.flip(1).argmax(1)
    found = torch.stack([4096 * place + each.indices for place, each in enumerate(best)], 1)
    chosen = found.gather(1, last[:, None])[:, 0]
    return torch.where(selection.temperature > 0, specification.pick(logits, selection), chosen)


def first_block_alone(logits: torch.Tensor, selection: Selection) -> torch.Tensor:
    return specification.pick(logits[:, :4096], selection)


def ids_of_16_bits(logits: torch.Tensor, selection: Selection) -> torch.Tensor:
    return specification.pick(logits, selection) % (1 << 16)


@pytest.mark.parametrize("mutant", [None, last_block_of_equals, first_block_alone, ids_of_16_bits])
def test_a_kernel_is_tried_over_many_blocks_with_ties(
    mutant: Callable[[torch.Tensor, Selection], torch.Tensor] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(logits: torch.Tensor, selection: Selection) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, totals = specification.choose(logits, selection)
        return chosen if mutant is None else mutant(logits, selection), totals

    with pytest.raises(RuntimeError, match="other tokens of ") if mutant is not None else nullcontext():
        check_pick(choose, CPU)
    monkeypatch.setattr(choice_module, "TRIED", TRIED[:1])
    check_pick(choose, CPU)


def first_of_equals(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    best = logits.sort(dim=-1, descending=True, stable=True)
    return best.values[:, :count], best.indices[:, :count], logits.logsumexp(-1)


def last_of_equals(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    top, tokens, total = first_of_equals(logits.flip(1), count)
    return top, logits.shape[1] - 1 - tokens, total


def next_of_late_ids(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    top, tokens, total = first_of_equals(logits, count)
    return top, tokens + (tokens >= 1 << 16), total


@pytest.mark.parametrize("kernel", [first_of_equals, last_of_equals, next_of_late_ids])
def test_the_kernel_of_likely_tokens_is_tried_with_ties(
    kernel: Callable[..., tuple[torch.Tensor, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lpr.model.kernels.import_module", lambda name: SimpleNamespace(likeliest=kernel))
    found = gpu_likeliest.__wrapped__(CPU)
    assert found is (kernel if kernel is first_of_equals else specification.likeliest)
