"""Guesses that a GPU makes without the host: the drafts of the form that asks it at each depth."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from lpr import DecodeConfig, Engine
from lpr.core.heads import HeadDraft
from lpr.engine.options import EngineOptions
from lpr.model.heads import guesses
from lpr.model.heads.guesses import Chain, Guesser
from lpr.model.loader import Loaded
from lpr.model.step_inputs import Row
from tests.fakes.pretend_gpu import PretendGpu, gpu, guard, quick_start, to_gpu
from tests.model.heads.test_heads import PARAMS, PROMPTS, ids, loaded, plain

__all__ = ["gpu", "guard", "loaded", "plain", "quick_start"]

SIZES: dict[str, Any] = {"window_size": 0, "trie_nodes": 16, "max_batch_size": 3, "prefill_chunk": 64}
DECODE = DecodeConfig(**SIZES, max_length=64, kv_tokens=512, draft_heads="on")
Noted = dict[tuple[int, ...], tuple[HeadDraft, int]]


def run(loaded: Loaded, machine: PretendGpu | None, monkeypatch: pytest.MonkeyPatch) -> tuple[list[list[int]], Noted]:
    """The ids of an engine, and by text of a chain's end the draft behind it, with what the host has waited for."""
    found: Noted = {}
    guess = Guesser.guess

    def noted(self: Guesser, chains: Sequence[Chain], *rest: Any) -> list[HeadDraft]:
        before = len(machine.events) if machine is not None else 0
        drafts = guess(self, chains, *rest)
        kinds = [kind for kind, _ in machine.events[before:]] if machine is not None else []
        waits = sum(kind in ("wait", "read", "pageable") for kind in kinds)
        for chain, draft in zip(chains, drafts, strict=True):
            if chain.params is not None:
                end = chain.row.slot, chain.row.num_cached + len(chain.tokens), chain.params.seed, chain.tokens[-1]
                found[end] = draft, waits
        return drafts

    monkeypatch.setattr(Guesser, "guess", noted)
    engine = Engine(loaded, DECODE, EngineOptions(swap_space=0))
    found.clear()
    done = ids(engine.generate(PROMPTS[:3], [replace(each, max_new_tokens=20) for each in PARAMS[:3]]))
    if machine is not None:
        assert engine.model.graph_reason is None and engine.model.attention == "triton"
    monkeypatch.setattr(Guesser, "guess", guess)
    return done, found


def at_each_depth(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Guesser, "_packs", False)


def unknown_ancestors(patch: pytest.MonkeyPatch) -> None:
    """Guesses that see no other one have other successors."""

    def mutant(each: Any, **how: Any) -> Any:
        if "made" in how:
            each.blocks[0].tree_mask.bits.zero_()
        return replace(each, **how)

    patch.setattr(guesses, "replace", mutant)


def noise_of_the_second_depth(patch: pytest.MonkeyPatch) -> None:
    inner = Guesser._selections

    def mutant(self: Guesser, active: Any, depths: int, width: int) -> Any:
        first, second, *_ = inner(self, active, depths, width)
        return [first, *[second] * (depths - 1)]

    patch.setattr(Guesser, "_selections", mutant)


def all_paths_alike(patch: pytest.MonkeyPatch) -> None:
    """The device follows others than the host believes."""
    sort = torch.Tensor.sort
    patch.setattr(torch.Tensor, "sort", lambda each, *how, **more: sort(each, *how, **(more | {"descending": False})))


@pytest.mark.parametrize("fault", [None, at_each_depth, unknown_ancestors, noise_of_the_second_depth, all_paths_alike])
@pytest.mark.usefixtures("quick_start")
@pytest.mark.slow(first=2)
def test_drafts_are_those_of_a_cpu_and_the_host_waits_once(
    fault: Any, loaded: Loaded, plain: list[list[int]], gpu: PretendGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three requests, one of them sampled."""
    there = replace(loaded, model=to_gpu(copy.deepcopy(loaded.model)), head=to_gpu(copy.deepcopy(loaded.head)))
    if fault is not None:
        fault(monkeypatch)
    done, found = run(there, gpu, monkeypatch)
    assert done == [each[:20] for each in plain[:3]], "guesses change no token"
    _, expected = run(loaded, None, monkeypatch)
    shared = found.keys() & expected.keys()
    assert len(shared) > 6, (len(found), len(expected))
    assert sum(len(expected[end][0].tokens) > 10 for end in shared) > 4
    are_equal = True
    for end in shared:
        (draft, waits), (wanted, _) = found[end], expected[end]
        same = (draft.tokens, draft.parents) == (wanted.tokens, wanted.parents)
        are_equal = are_equal and same and draft.steps == pytest.approx(wanted.steps, abs=4) and waits == 1
    assert are_equal == (fault is None)


@pytest.mark.parametrize("entries", [[0, 1], [0, 2]])
def test_states_that_wait_are_copies(entries: list[int]) -> None:
    """A captured step writes its hidden states to the place of the last one's."""
    guesser = Guesser.__new__(Guesser)
    guesser._late, hidden = {}, torch.arange(6.0).view(3, 2)
    late = guesser._join(Chain(Row.chain(0, 5, [1, 2, 3], 1), entries, [2, 7], None), {0: hidden})
    hidden.zero_()
    assert late.states[0].tolist() == [[0.0, 1.0], [2.0 * entries[1], 2.0 * entries[1] + 1]]
