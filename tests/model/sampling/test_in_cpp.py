"""Sampling in C++ against its specification, id for id, on logits made to be difficult."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from lpr import native
from lpr.config import SamplingParams
from lpr.core.accept import NOT_A_NUMBER
from lpr.model.heads.guesses import likeliest
from lpr.model.sampling import in_cpp, specification
from lpr.model.sampling.choice import pick, score_steps
from lpr.model.sampling.selection import Selection
from tests.fakes.difficult_logits import PARAMS, draws, peaked

pytestmark = pytest.mark.skipif(native.choose_rows is None, reason="there is no C++ compiler")
FLAT = SamplingParams(temperature=0.8, top_p=0.3, seed=6)


@settings(max_examples=200, deadline=None)
@given(draws())
def test_the_same_ids_as_the_specification(drawn: tuple[torch.Tensor, Selection]) -> None:
    logits, selection = drawn
    if selection.sampled:
        assert torch.equal(in_cpp.draw(logits, selection), specification.pick(logits, selection))


@pytest.mark.parametrize("params", [*PARAMS, FLAT], ids=range(len(PARAMS) + 1))
@pytest.mark.parametrize("scale", [0.1])
@pytest.mark.slow(first=2)
def test_a_large_vocabulary(params: SamplingParams, scale: float) -> None:
    """With a scale of 0.1 limits allow most of the tokens, and what they refuse comes up."""
    logits = peaked(torch.Generator().manual_seed(4), 6, 262_144) * scale
    selection = Selection.build([(params, [0, 1, 1, 2, 2, 3])])
    assert torch.equal(in_cpp.draw(logits, selection), specification.pick(logits, selection))


@pytest.mark.parametrize("params", [*PARAMS, FLAT], ids=range(len(PARAMS) + 1))
def test_rows_in_doubt_are_rare_and_others_need_no_second_look(
    params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_cpp, "specification", None)
    for seed, scale in enumerate((1.0, 0.3, 0.02)):
        logits = peaked(torch.Generator().manual_seed(seed), 64, 20_000) * scale
        in_cpp.draw(logits, Selection.build([(params, range(64))]))


@pytest.mark.parametrize("count", [1, 3])
def test_threads_and_rows_without_a_choice(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: count)
    logits = peaked(torch.Generator().manual_seed(9), 8, 9000)
    logits[7] = -torch.inf
    logits[1, 77], logits[3], logits[4, 5] = torch.nan, -torch.inf, torch.inf
    for params in PARAMS:
        requests = [(params, [i]) for i in range(6)] + [(SamplingParams(), [6]), (SamplingParams(), [7])]
        selection = Selection.build(requests)
        chosen = in_cpp.draw(logits, selection)
        assert torch.equal(chosen, specification.pick(logits, selection))
        assert [code == NOT_A_NUMBER for code in chosen.tolist()] == [
            False,
            True,
            False,
            True,
            True,
            False,
            False,
            True,
        ]


def test_ties_go_to_the_specification() -> None:
    """Totals that are equal in float32 and not in float64: huge scores swallow the noise."""
    logits = torch.full((3, 5000), 1e9)
    logits[:, 4000:] = -torch.inf
    for params in PARAMS:
        selection = Selection.build([(params, range(3))])
        assert torch.equal(in_cpp.draw(logits, selection), specification.pick(logits, selection))


def test_a_view_with_a_stride() -> None:
    logits = peaked(torch.Generator().manual_seed(1), 8, 3000)
    for view in (logits[::2], logits[:, 100:2900], logits.T.contiguous().T):
        selection = Selection.build([(PARAMS[1], range(len(view)))])
        assert torch.equal(pick(view, selection), specification.pick(view, selection))


# Seeded faults.


def changed(place: int, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[pytest.MonkeyPatch], None]:
    """A fault in one of the arguments of the extension: temperature, keys, top-k, top-p, min-p."""

    def fault(patch: pytest.MonkeyPatch) -> None:
        inner: Any = native.choose_rows

        def mutant(*given: Any) -> None:
            arguments = list(given)
            arguments[4 + place] = np.ascontiguousarray(change(given[4 + place])).astype(given[4 + place].dtype)
            inner(*arguments)

        patch.setattr(native, "choose_rows", mutant)

    return fault


def doubt_is_ignored(patch: pytest.MonkeyPatch) -> None:
    inner: Any = native.choose_rows

    def mutant(*given: Any) -> None:
        inner(*given)
        given[-1][given[-1] == -2] = 1

    patch.setattr(native, "choose_rows", mutant)


@pytest.mark.parametrize(
    "fault, params",
    [
        (changed(0, lambda t: t * np.float32(1.02)), PARAMS[0]),
        (changed(1, lambda keys: keys + 1), PARAMS[0]),
        (changed(2, lambda k: k + 3), PARAMS[2]),
        (changed(3, lambda p: p * np.float32(0.97)), PARAMS[1]),
        (changed(4, lambda p: p * 3), PARAMS[4]),
        (doubt_is_ignored, PARAMS[1]),
    ],
)
@pytest.mark.slow(first=3)
def test_faults_are_noticed(
    fault: Callable[[pytest.MonkeyPatch], None], params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(10)
    logits = torch.cat([peaked(generator, 80, 9000) * scale for scale in (1.0, 0.5, 0.3)])
    logits = torch.cat([logits, torch.full((40, 9000), 1e9)])
    selection = Selection.build([(params, range(len(logits)))])
    expected = specification.pick(logits, selection)
    assert torch.equal(in_cpp.draw(logits, selection), expected)
    fault(monkeypatch)
    assert not torch.equal(in_cpp.draw(logits, selection), expected)


def test_plain_decoding_and_trees_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_cpp, "specification", None)
    for count in (1, 33):
        logits = peaked(torch.Generator().manual_seed(count), count, 5000)
        selection = Selection.build([(PARAMS[1], range(count))])
        assert torch.equal(pick(logits, selection), specification.pick(logits, selection))


def test_a_part_of_the_vocabulary_has_its_own_tokens_noise() -> None:
    logits = peaked(torch.Generator().manual_seed(2), 8, 3000)
    for params in PARAMS:
        selection = Selection.build([(params, range(8))]).from_token(1024)
        assert torch.equal(in_cpp.draw(logits, selection), specification.pick(logits, selection))


# Candidates.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("vocabulary", [5, 256, 9001])
def test_candidates_are_the_most_likely_tokens(dtype: torch.dtype, vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(6, vocabulary + 3, generator=generator).mul(4).to(dtype)[:, :vocabulary]
    logits[1, 2:] = -torch.inf
    tokens, scores = in_cpp.candidates(logits, 8)
    top, _ = logits.float().topk(min(8, vocabulary), -1)
    assert torch.equal(logits.float().gather(1, tokens.long()), top)
    expected = score_steps(top - logits.float().logsumexp(-1, keepdim=True))
    assert (scores.int() - expected.int()).abs().max() <= 1  # a logarithm on the border of two steps
    ties = torch.zeros(1, vocabulary, dtype=dtype)
    assert in_cpp.candidates(ties, 3)[0].tolist() == [[0, 1, 2]]


def test_candidates_of_broken_rows_are_tokens() -> None:
    logits = torch.zeros(3, 300)
    logits[0, 7], logits[1], logits[2, 9] = torch.nan, -torch.inf, torch.inf
    tokens, scores = in_cpp.candidates(logits, 4)
    assert tokens.min() >= 0 and tokens.max() < 300 and all(len(set(row)) == 4 for row in tokens.tolist())
    assert scores[:2].eq(255).all()


def test_the_likeliest_token_in_half_precision() -> None:
    logits = torch.randn(40, 5003, generator=torch.Generator().manual_seed(12)).bfloat16()
    logits[3, 4999], logits[5], logits[6, 2:] = torch.nan, -torch.inf, 9.0
    expected = specification.pick(logits, Selection.build([]))
    assert torch.equal(in_cpp.best_tokens(logits), expected)
    assert torch.equal(in_cpp.best_tokens(logits[:, ::2]), specification.pick(logits[:, ::2], Selection.build([])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [5, 300, 9001])
@pytest.mark.parametrize("is_limited", [False, True])
def test_guesses_are_those_of_the_specification(
    dtype: torch.dtype, size: int, is_limited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(13)
    logits = torch.randn(7, size, generator=generator).mul(5).to(dtype)
    vocabulary = 3 * torch.arange(size) + 7 if is_limited else None
    for params in (SamplingParams(), SamplingParams(temperature=0.8, seed=5), SamplingParams(temperature=1.3, seed=-1)):
        selection = Selection.build([(params, range(7))])
        found = by_token(likeliest(logits, selection, vocabulary))
        with monkeypatch.context() as patch:
            patch.setattr(native, "guess_rows", None)
            expected = by_token(likeliest(logits, selection, vocabulary))
        # By token, as equal ones come in another order; both leave out what only rare noise would lift, one by rank,
        # one by score.
        differences = (found - expected).abs()
        assert differences.max() < 5e-2 and differences.sum(1).mean() < 2e-2


def by_token(guesses: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The shares [n, tokens] of the guesses of `likeliest`, in the place of each token."""
    return torch.zeros(len(guesses[0]), 30_000).scatter_(1, *guesses)


def test_nothing_is_likely_in_a_row_that_is_not_of_numbers() -> None:
    logits = torch.zeros(3, 300)
    logits[0, 7], logits[1], logits[2, 9] = torch.nan, -torch.inf, torch.inf
    for params in (SamplingParams(), SamplingParams(temperature=1, seed=3)):
        tokens, shares = likeliest(logits, Selection.build([(params, range(3))]))
        assert tokens.min() >= 0 and tokens.max() < 300 and not shares.any()


@pytest.mark.parametrize("params", [SamplingParams(), *PARAMS, FLAT], ids=range(len(PARAMS) + 2))
@pytest.mark.parametrize("size", [3, 300, 20_000])
def test_drafts_are_the_choice_and_the_likeliest_others(params: SamplingParams, size: int) -> None:
    logits = peaked(torch.Generator().manual_seed(21), 40, size) if size > 3 else torch.randn(40, 3)
    selection = Selection.build([(params, range(40))])
    tokens, odds = in_cpp.drafts(logits, selection, 4)
    assert tokens.shape == odds.shape == (40, min(4, size))
    assert (tokens[:, 0] == specification.pick(logits, selection)).float().mean() >= 0.97
    totals = logits.double()
    if params.temperature:
        everything = torch.arange(size).expand(40, -1)
        noise = specification.gumbel(selection.keys[selection.key_of][:, None], everything)
        totals = totals / max(params.temperature, 1e-30) + noise
    found, expected = totals.gather(1, tokens).sort(1, descending=True)[0], totals.topk(min(4, size))[0]
    assert torch.allclose(found[:, :-1], expected[:, :-1], rtol=1e-4, atol=1e-4), "limits may replace the last one"
    odd = (totals.gather(1, tokens) - expected[:, :1]).exp()
    assert torch.allclose(odds.double(), odd, rtol=1e-2, atol=1e-3)


def test_nothing_is_drafted_by_a_row_that_is_not_of_numbers() -> None:
    logits = torch.zeros(3, 300)
    logits[0, 7], logits[1], logits[2, 9] = torch.nan, -torch.inf, torch.inf
    for params in (SamplingParams(), SamplingParams(temperature=1, seed=3)):
        tokens, odds = in_cpp.drafts(logits, Selection.build([(params, range(3))]), 4)
        assert (tokens == NOT_A_NUMBER).all() and not odds.any()
