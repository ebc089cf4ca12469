"""Limited choices in a vocabulary that ranks hold in parts, by Triton kernels (interpreted without a GPU)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from lpr import DecodeConfig, Engine, SamplingParams
from lpr.core.accept import NOT_A_NUMBER
from lpr.model.graph_inputs import static_shape
from lpr.model.input_builder import Row
from lpr.model.kv_cache import KVCache
from lpr.model.sampling import parts, specification
from lpr.model.sampling.selection import TOP_K, Selection
from tests.fakes.difficult_logits import PARAMS, draws, peaked
from tests.fakes.models import tiny_model

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs the package triton", allow_module_level=True)
from lpr.model.kernels import parts_code, sampling_kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NARROW = SamplingParams(temperature=1.0, top_p=0.2, seed=3)
BOTH = SamplingParams(temperature=1.3, top_k=20, top_p=0.7, seed=4)
FEW = SamplingParams(temperature=1.5, top_k=3, seed=6)
Edges = tuple[int, ...]
SHORT = 12
"""Tokens listed per row, a fifth of what ranks list: the interpreter takes its time for each."""


def together(
    logits: torch.Tensor, selection: Selection, edges: Edges, k: int = 0, length: int = SHORT
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As the ranks of a replica with such parts would choose."""
    logits, selection = logits.to(DEVICE), selection.to(DEVICE)
    held = [(logits[:, first:last], first) for first, last in pairwise(edges)]
    lists = torch.stack([parts.list_in_part(mine, selection, first, k, length) for mine, first in held])
    weights = torch.stack([parts.weigh_in_part(mine, selection, first, lists, length) for mine, first in held])
    return parts.choose_within_limits(lists, weights, selection, k, length)


def edges_of(vocabulary: int, count: int) -> Edges:
    """As torch shards rows: equal parts, of which the last may be shorter."""
    share = -(-vocabulary // count)
    return (*range(0, vocabulary, share), vocabulary)


# The interpreter is numpy, which warns of the NaN and infinities that the kernels are given on purpose.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@settings(max_examples=8, deadline=None)
@given(draws((1, 2, 5, 63, 64, 65, 200, 1500)))
def test_the_choice_of_the_whole_row(drawn: tuple[torch.Tensor, Selection]) -> None:
    logits, selection = drawn
    if not selection.sampled or not parts.may_be_in_parts(selection, with_limits=True):
        return
    expected = specification.pick(logits.to(DEVICE), selection.to(DEVICE)).tolist()
    count = 2 + logits.shape[1] % 2
    assert together(logits, selection, edges_of(logits.shape[1], count), 0, 24)[0].tolist() == expected


def test_a_list_that_is_too_long_says_so() -> None:
    logits = torch.zeros(4, 500)
    selection = Selection.build([(NARROW, range(4))])
    expected = specification.pick(logits, selection).tolist()
    found = together(logits, selection, (0, 250, 500), length=3)[0].tolist()
    assert NOT_A_NUMBER in found and all(
        each in (NOT_A_NUMBER, right) for each, right in zip(found, expected, strict=True)
    )
    assert together(logits, selection, (0, 250, 500))[0].tolist() == expected


def test_what_is_chosen_in_parts() -> None:
    def of(**limits: float) -> Selection:
        return Selection.build([(SamplingParams(temperature=1.0, **limits), [1])])  # type: ignore[arg-type]

    assert parts.may_be_in_parts(of()) and not parts.may_be_in_parts(of(top_p=0.9))
    assert parts.may_be_in_parts(of(top_p=0.9, min_p=0.1, top_k=TOP_K), with_limits=True)
    assert not parts.may_be_in_parts(of(top_k=TOP_K + 1), with_limits=True), "ranks send no more of their scores"
    assert not parts.limits_work(torch.device("cpu"))


def test_totals_are_those_of_the_one_kernel() -> None:
    """Parts without limits are compared by them: those of other logarithms would fall otherwise in a near tie."""
    logits = peaked(torch.Generator().manual_seed(3), 16, 900)
    selection = Selection.build([(SamplingParams(), range(3)), (PARAMS[0], range(13))]).to(DEVICE)
    chosen, totals = sampling_kernel.choose(logits.to(DEVICE), selection)
    expected, theirs = specification.choose(logits.to(DEVICE), selection)
    assert chosen.tolist() == expected.tolist() and torch.allclose(totals, theirs, rtol=1e-5, atol=1e-5)
    logits[4, 7] = torch.nan
    assert sampling_kernel.choose(logits.to(DEVICE), selection)[1].isnan().tolist() == [row == 4 for row in range(16)]
    halves = [
        sampling_kernel.choose(logits[:, first : first + 450].to(DEVICE), selection.from_token(first))[1]
        for first in (0, 450)
    ]
    whole = sampling_kernel.choose(logits.to(DEVICE), selection)[1]
    assert torch.equal(torch.maximum(*halves).nan_to_num(), whole.nan_to_num())


@dataclass
class WholePart:
    """A part of the vocabulary that is all of it, held by one rank; `widths` are the words that it sent per row."""

    first: int = 0
    widths: list[int] = field(default_factory=list)

    def install(self, wanted: Callable[[], bool]) -> None:
        """The head gives all logits anyway."""

    def gather(self, words: torch.Tensor) -> torch.Tensor:
        self.widths.append(words.shape[1])
        return words[None]


@pytest.mark.skipif(DEVICE.type == "cuda", reason="interpreted")
def test_an_engine_sends_lists_and_weights_where_limits_can_be_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "limits_work", lambda device: True)
    monkeypatch.setattr(parts.list_in_part, "__defaults__", (SHORT,))
    monkeypatch.setattr(parts.weigh_in_part, "__defaults__", (SHORT,))
    monkeypatch.setattr(parts.choose_within_limits, "__defaults__", (SHORT,))
    monkeypatch.setattr("lpr.model.sampling.sampler.limits_work", lambda device: True)
    model = tiny_model(spread=0.12)
    limited = SamplingParams(max_new_tokens=4, temperature=0.9, top_p=0.8, top_k=30, seed=7)
    wide = replace(limited, top_k=TOP_K + 1)
    engine = Engine.from_model(model, decode=DecodeConfig.autoregressive())
    expected = [engine.generate([[3, 5, 7]], params)[0].token_ids for params in (limited, wide)]
    part = WholePart()
    engine.model.sampler.part = part  # type: ignore[assignment]
    engine.model.sampler.check_part(engine.model.adapter)
    assert part.widths == [2], "what the ranks agree on"
    sent = []
    for params, ids in zip((limited, wide), expected, strict=True):
        part.widths.clear()
        assert engine.generate([[3, 5, 7]], params)[0].token_ids == ids
        sent.append(sorted(set(part.widths)))
    assert sent == [[2 * SHORT + 2, 3 * SHORT + TOP_K], []]


def test_graphs_with_limits_are_others_where_a_vocabulary_is_in_parts() -> None:
    row = Row(0, 5, [1, 2], [-1, 0], [5, 6], 2)
    shapes = []
    for limits in ({}, {"top_p": 0.9}, {"top_k": TOP_K + 1}):
        selection = Selection.build([(SamplingParams(temperature=1.0, **limits), [6, 7])])  # type: ignore[arg-type]
        shape = static_shape([row], selection, 8, 2, 512, 64, tree_bits=True, in_parts=True)
        assert shape is not None and shape == replace(shape)
        words = torch.zeros(shape.num_words, dtype=torch.int32)
        cache = KVCache(2, 512)
        shape.place(words.numpy(), [row], selection, cache)
        read = shape.read(words, cache)[1]
        assert (read.filtered, read.is_wide) == (bool(limits), "top_k" in limits)
        assert parts.may_be_in_parts(read, with_limits=True) == ("top_k" not in limits)
        shapes.append(shape)
    assert len(set(shapes)) == 3
    assert static_shape([row], selection, 8, 2, 512, 64, tree_bits=True) == replace(shapes[1], is_wide=False)


# Seeded faults.


def difficult() -> torch.Tensor:
    generator = torch.Generator().manual_seed(10)
    levels = torch.randint(0, 4, (3, 60), generator=generator).float()  # many ties among few tokens
    ties = torch.cat([levels, torch.full((3, 180), -torch.inf), levels], 1)
    return torch.cat([peaked(generator, 3, 300) * 0.3, ties])


def found_and_expected(params: SamplingParams) -> tuple[list[int], list[int]]:
    logits = difficult()
    selection = Selection.build([(params, range(len(logits)))])
    found = together(logits, selection, (0, 100, 200, 300))[0].tolist()
    return found, specification.pick(logits, selection).tolist()


@pytest.mark.parametrize("params", [NARROW, BOTH, FEW])
@pytest.mark.slow(first=1)
def test_without_a_fault(params: SamplingParams) -> None:
    found, expected = found_and_expected(params)
    assert found == expected


IN_KERNELS = {
    "noise of the part's own columns": ("vocabulary, first_token, BLOCK\n", "vocabulary, 0, BLOCK\n", NARROW),
    "tokens of the part": ("token + first_token)", "token)", NARROW),
    "the best of all alone": ("left -= 1", "left = tl.where(left > LENGTH, left - 1, 0)", NARROW),
    "borders by the part's columns": ("tl.load(tokens_at + at) - first_token", "tl.load(tokens_at + at)", NARROW),
    "top-p of the whole": ("_ordered(tl.load(kept_at + row))", "tl.full([], LEAST, tl.int64)", BOTH),
}


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the interpreter reads the changed source")
@pytest.mark.parametrize("name", IN_KERNELS)
@pytest.mark.slow(first=3)
def test_faults_of_the_kernels_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old, new, params = IN_KERNELS[name]
    source = Path(parts_code.__file__).read_text()
    assert source.count(old) >= 1
    path = tmp_path / "mutant.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location("mutant", path)
    assert spec is not None and spec.loader is not None
    mutant = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutant)
    for kernel in ("list_winners", "weigh_prefixes"):
        monkeypatch.setattr(sampling_kernel, kernel, getattr(mutant, kernel))
    found, expected = found_and_expected(params)
    assert found != expected


def its_own_weights_only(patch: pytest.MonkeyPatch) -> None:
    within = parts.choose_within_limits
    patch.setattr(parts, "choose_within_limits", lambda lists, weights, *rest: within(lists, weights[:1], *rest))


def the_first_ranks_kth(patch: pytest.MonkeyPatch) -> None:
    listed = parts._listed

    def mutant(sent: torch.Tensor, selection: Selection, length: int) -> object:
        found, _, top = listed(sent, selection, length)
        return found, listed(sent[:1], selection, length)[1], top

    patch.setattr(parts, "_listed", mutant)


@pytest.mark.parametrize("fault, params", [(its_own_weights_only, NARROW), (the_first_ranks_kth, FEW)])
def test_faults_of_what_meets_are_noticed(
    fault: Callable[[pytest.MonkeyPatch], None], params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    found, expected = found_and_expected(params)
    assert found != expected
