"""A vocabulary in parts: what ranks choose among their own tokens and put together is the choice of the whole row."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
import torch

from lpr import DecodeConfig, Engine, SamplingParams, native
from lpr.core.accept import NOT_A_NUMBER
from lpr.model.sampling import choice, parts, specification
from lpr.model.sampling.selection import Selection
from tests.fakes.difficult_logits import peaked
from tests.fakes.models import tiny_model

EDGES = {"even": (0, 1000, 2000, 3000), "uneven": (0, 1024, 2048, 2999, 3000)}
PARAMS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.8, seed=3),
    "hot": SamplingParams(temperature=2.5, seed=4),
}


def rows_of(seed: int) -> torch.Tensor:
    """Peaked rows, flat ones, one of equal logits, and one whose tokens are all but two forbidden."""
    logits = peaked(torch.Generator().manual_seed(seed), 12, 3000)
    logits[8:] *= 0.2
    logits[10] = 1.0
    logits[11, 1:2990] = -torch.inf
    return logits


def together(logits: torch.Tensor, selection: Selection, edges: tuple[int, ...], fixed: bool, k: int = 8) -> tuple:
    """As the ranks of a replica with such parts would find it."""
    sent = [parts.choose_in_part(logits[:, first:last], selection, first, k, fixed) for first, last in pairwise(edges)]
    return parts.choose_among_parts(torch.stack(sent), selection, k)


@pytest.mark.parametrize("edges", EDGES)
@pytest.mark.parametrize("way", ["as usual", "in Python", "for a graph"])
@pytest.mark.parametrize("name", PARAMS)
def test_the_choice_of_the_whole_row(name: str, way: str, edges: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "in Python":
        monkeypatch.setattr(native, "choose_rows", None)
    for seed in range(4):
        logits = rows_of(seed)
        selection = Selection.build([(PARAMS[name], range(5, 17))])
        chosen, tokens, scores = together(logits, selection, EDGES[edges], way == "for a graph")
        assert chosen.tolist() == specification.pick(logits, selection).tolist()
        whole, whole_scores = choice.candidates(logits, 8)
        assert tokens[:10].tolist() == whole[:10].tolist(), "row 10 has ties only"
        assert (scores.int() - whole_scores.int()).abs().max() <= 1, "sums of parts are rounded"


def test_rows_of_both_kinds_and_without_candidates() -> None:
    logits = rows_of(9)
    selection = Selection.build([(PARAMS["greedy"], range(4)), (PARAMS["sampled"], range(8))])
    chosen, tokens, scores = together(logits, selection, EDGES["uneven"], False, 0)
    assert chosen.tolist() == specification.pick(logits, selection).tolist()
    assert tokens.shape == scores.shape == (12, 0)


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_rows_without_a_choice(name: str, value: float) -> None:
    logits = rows_of(1)
    logits[3, 2500] = value
    if value == -torch.inf:
        logits[3] = value
    selection = Selection.build([(PARAMS[name], range(12))])
    chosen = together(logits, selection, EDGES["even"], False)[0]
    expected = specification.pick(logits, selection)
    assert chosen.tolist() == expected.tolist()
    assert (expected[3] == NOT_A_NUMBER) == (name != "greedy" or value != torch.inf)
    logits = rows_of(1)
    logits[3, : EDGES["even"][1]] = -torch.inf  # one part alone has nothing: others have
    chosen = together(logits, selection, EDGES["even"], False)[0]
    assert chosen.tolist() == specification.pick(logits, selection).tolist() and chosen[3] >= 0


def test_what_limits_compare_is_not_chosen_in_parts() -> None:
    assert all(parts.may_be_in_parts(Selection.build([(params, [1])])) for params in PARAMS.values())
    for limit in ({"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert not parts.may_be_in_parts(Selection.build([(SamplingParams(temperature=1.0, **limit), [1])]))  # type: ignore[arg-type]
    asked = Selection.build([(PARAMS["sampled"], [1])])
    asked.num_logprobs = 2
    assert not parts.may_be_in_parts(asked)


@dataclass
class WholePart:
    """A part of the vocabulary that is all of it, held by one rank; `widths` are the words that it sent per row."""

    first: int = 0
    widths: list[int] = field(default_factory=list)

    def gather(self, words: torch.Tensor) -> torch.Tensor:
        self.widths.append(words.shape[1])
        return words[None]


def test_an_engine_sends_totals_and_applies_limits_to_whole_rows() -> None:
    sampled = SamplingParams(max_new_tokens=4, temperature=0.9, seed=7)
    limited = replace(sampled, top_p=0.8, top_k=30)
    engine = Engine.from_model(tiny_model(spread=0.12), decode=DecodeConfig.autoregressive())
    expected = [engine.generate([[3, 5, 7]], params)[0].token_ids for params in (sampled, limited)]
    part = WholePart()
    engine.model.sampler.part = part  # type: ignore[assignment]
    engine.model.sampler.check_part(engine.model.adapter)
    assert part.widths == [1], "what the ranks agree on"
    sent = []
    for params, ids in zip((sampled, limited), expected, strict=True):
        part.widths.clear()
        assert engine.generate([[3, 5, 7]], params)[0].token_ids == ids
        sent.append(sorted(set(part.widths)))
    assert sent == [[2], []]


@pytest.mark.parametrize("fault", ["everybody's noise", "the last of equal ones", "its own columns"])
def test_faults_are_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "everybody's noise":
        monkeypatch.setattr(Selection, "from_token", lambda self, first: self)
    elif fault == "the last of equal ones":
        among = parts.choose_among_parts
        turned = lambda sent, *rest: among(torch.where(torch.arange(sent.shape[2]) == 1, -sent, sent), *rest)  # noqa: E731
        monkeypatch.setattr(parts, "choose_among_parts", lambda *args: (-turned(*args)[0], *among(*args)[1:]))
    else:
        inside = parts.choose_in_part
        monkeypatch.setattr(
            parts, "choose_in_part", lambda logits, selection, first, *rest: inside(logits, selection, 0, *rest)
        )
    name = "greedy" if fault == "the last of equal ones" else "sampled"
    with pytest.raises(AssertionError):
        test_the_choice_of_the_whole_row(name, "as usual", "uneven", monkeypatch)
