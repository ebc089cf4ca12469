"""Guesses that a GPU makes without the host: the drafts of the form that asks it at each depth."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from lpr import DecodeConfig, Engine, SamplingParams
from lpr.core.heads import HeadDraft
from lpr.engine.options import EngineOptions
from lpr.model import reserve
from lpr.model.eager_forward import EagerForward
from lpr.model.graphs import MAX_GRAPHS, GraphForward
from lpr.model.heads import guesses
from lpr.model.heads.guesses import DEPTH, FOLLOWED, Chain, Guesser, GuessShape
from lpr.model.heads.head import DraftHead
from lpr.model.loader import Loaded
from lpr.model.sampling.selection import Selection
from lpr.model.step_inputs import Row
from tests.fakes.pretend_gpu import PretendGpu, guard, quick_start, short_steps, to_gpu
from tests.fakes.pretend_gpu import gpu as small_gpu
from tests.model.heads.test_heads import PARAMS, PROMPTS, ids, loaded, plain

__all__ = ["guard", "loaded", "plain", "quick_start", "short_steps", "small_gpu"]

SIZES: dict[str, Any] = {"window_size": 0, "trie_nodes": 16, "max_batch_size": 3, "prefill_chunk": 64}
DECODE = DecodeConfig(**SIZES, max_length=64, kv_tokens=512, draft_heads="on")


@pytest.fixture
def gpu(small_gpu: PretendGpu) -> PretendGpu:
    """With room for the graphs of guesses."""
    small_gpu.memory = 4 << 30, 6 << 30
    return small_gpu


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


def noise_of_the_first_depth(patch: pytest.MonkeyPatch) -> None:
    noise = Selection.noise.fget
    assert noise is not None

    def mutant(self: Selection) -> Any:
        found = noise(self)
        if found is None or len(found[1]) % DEPTH:
            return found
        return found[0], found[1].view(-1, DEPTH)[:, :1].expand(-1, DEPTH).flatten()

    patch.setattr(Selection, "noise", property(mutant))


def all_paths_alike(patch: pytest.MonkeyPatch) -> None:
    """The device follows others than the host believes."""
    sort = torch.Tensor.sort
    patch.setattr(torch.Tensor, "sort", lambda each, *how, **more: sort(each, *how, **(more | {"descending": False})))


@pytest.mark.parametrize("fault", [None, at_each_depth, unknown_ancestors, noise_of_the_first_depth, all_paths_alike])
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


def kept(forward: GraphForward, made: torch.Tensor) -> torch.Tensor:
    """A tensor that lives as long as the graphs: the machine itself refuses one that does not."""
    vars(forward).setdefault("made", []).append(made)
    return made


def inputs_of_the_capture(self: GraphForward, shape: Any, program: Any, words: Any) -> tuple[Any, Any]:
    """The graph reads words that nobody writes any more."""
    *known, placed, states = program.args
    return partial(program.func, *known, kept(self, placed.clone()), states), words


def states_of_the_capture(self: GraphForward, shape: Any, program: Any, words: Any) -> tuple[Any, Any]:
    *known, states = program.args
    return partial(program.func, *known, kept(self, states.clone())), words


def a_depth_too_few(self: GraphForward, shape: Any, program: Any, words: Any) -> tuple[Any, Any]:
    """The last forward is missing: guesses follow from states before it."""
    inner = program.func

    def mutant(*how: Any) -> torch.Tensor:
        step, calls = DraftHead.step, iter(range(shape.depths))

        def skips(each: DraftHead, embeddings: torch.Tensor, hidden: torch.Tensor, inputs: Any) -> torch.Tensor:
            return hidden if next(calls) == shape.depths - 1 > 0 else step(each, embeddings, hidden, inputs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DraftHead, "step", skips)
            found: torch.Tensor = inner(*how)
        return found

    return partial(mutant, *program.args), words


def keys_of_the_step_before(self: GraphForward, shape: Any, program: Any, words: Any) -> tuple[Any, Any]:
    """Of the last guesses of this shape."""
    known = vars(self).setdefault("known", {})
    last, known[shape] = known.get(shape, words), words
    end = len(words) - shape.grown.num_keys
    return program, np.concatenate([words[:end], last[end:]])


REPLAYED = [inputs_of_the_capture, states_of_the_capture, a_depth_too_few, keys_of_the_step_before]
MANY = [[(seed * i + seed) % 97 for i in range(8 + seed)] for seed in range(3, 9)]


@pytest.mark.parametrize("fault", [None, *REPLAYED])
@pytest.mark.usefixtures("quick_start", "short_steps")
@pytest.mark.slow
def test_replays_are_bit_by_bit_what_the_program_makes(
    fault: Any, loaded: Loaded, gpu: PretendGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of greedy and sampled requests, at all depths, while pages run out and requests end; with one upload."""
    params = [SamplingParams(max_new_tokens=8 + 5 * i, temperature=0.9 * (i % 2), seed=i) for i in range(6)]
    asked = [params, [replace(each, temperature=0.0) for each in params]][: 2 if fault is None else 1]
    known = [ids(Engine(loaded, DecodeConfig.autoregressive()).generate(MANY, each)) for each in asked]
    there = replace(loaded, model=to_gpu(copy.deepcopy(loaded.model)), head=to_gpu(copy.deepcopy(loaded.head)))
    are_equal: list[bool] = []
    shapes: Counter[GuessShape] = Counter()
    run_program, graph, grow = GraphForward.run_program, GraphForward._graph, Guesser._grow_at_once

    def compared(self: GraphForward, shape: Any, program: Any, words: Any, states: Any) -> torch.Tensor:
        given = words
        if shape is not None and fault is keys_of_the_step_before:
            given = fault(self, shape, program, words)[1]
        before = len(gpu.events)
        found = run_program(self, shape, program, given, states).clone()
        if shape is None:
            return found
        shapes[shape] += 1
        if shapes[shape] > 1:
            assert [kind for kind, _ in gpu.events[before:] if kind != "wait"] == ["pinned"]
        direct = EagerForward.run_program(self, None, program, words, states)
        are_equal.append(found.shape == direct.shape and found.tolist() == direct.tolist())
        return direct

    def changed(self: GraphForward, shape: Any, program: Any = None) -> Any:
        if program is not None and fault not in (None, keys_of_the_step_before):
            program, _ = fault(self, shape, program, None)
        return graph(self, shape, program)

    def all_depths(self: Guesser, *how: Any) -> None:
        self._depths = 1 + len(are_equal) // 2 % DEPTH
        grow(self, *how)

    monkeypatch.setattr(GraphForward, "run_program", compared)
    monkeypatch.setattr(GraphForward, "_graph", changed)
    monkeypatch.setattr(Guesser, "_grow_at_once", all_depths)
    engine = Engine(there, replace(DECODE, max_batch_size=4, kv_tokens=192), EngineOptions(swap_space=300e3 / 2**30))
    assert [ids(engine.generate(MANY, each)) for each in asked] == known
    assert engine.model.graph_reason is None and engine.scheduler.counts.preemptions > 0
    assert {shape.depths for shape in shapes} == {1, 2, 3, 4, 5} and shapes.total() > 2 * len(shapes)
    assert fault or {shape.known.batch for shape in shapes} == {1, 2, 4}
    assert len({shape.grown.num_keys > 0 for shape in shapes}) == len(asked)
    graphs = engine.model.graphs
    assert graphs is not None and shapes.keys() <= graphs._graphs.keys() and engine.model.num_captures >= len(graphs)
    assert all(are_equal) == (fault is None)


@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.usefixtures("quick_start", "short_steps")
def test_results_of_a_step_outlive_the_guesses(
    fault: bool, loaded: Loaded, plain: list[list[int]], gpu: PretendGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks gather them after the head's replay, which writes to the memory that all graphs share."""
    there = replace(loaded, model=to_gpu(copy.deepcopy(loaded.model)), head=to_gpu(copy.deepcopy(loaded.head)))
    inner = GraphForward._kept
    if fault:
        monkeypatch.setattr(
            GraphForward, "_kept", lambda self, name, each: inner(self, name, each) if name == "hidden" else each
        )
    done = ids(
        Engine(there, DECODE, EngineOptions(swap_space=0)).generate(
            PROMPTS[:1], [replace(PARAMS[0], max_new_tokens=12)]
        )
    )
    assert (done == [plain[0][:12]]) == (not fault)


@pytest.mark.usefixtures("quick_start", "short_steps")
def test_memory_of_guesses_is_told(loaded: Loaded, gpu: PretendGpu) -> None:
    """Of their graphs, and of the logits of a depth for a power of two of sequences; none while they are off."""
    there = replace(loaded, model=to_gpu(copy.deepcopy(loaded.model)), head=to_gpu(copy.deepcopy(loaded.head)))
    engine = Engine(there, DECODE, EngineOptions(swap_space=0))
    on = engine.model.memory_needs(3, 16, 16, 64, 0)
    assert engine.model.guesser is not None and engine.model.guesser.num_guesses == 48
    engine.configure(replace(DECODE, draft_heads="off"))
    off = engine.model.memory_needs(3, 16, 16, 64, 0)
    assert on is not None and off is not None
    assert on.graphs - off.graphs == (MAX_GRAPHS - reserve.MOST_COMMON) * reserve.GRAPH_BYTES
    assert on.logits - off.logits == 4 * (48 // FOLLOWED) * 97 * (4 + 4 + 4) and on.steps > off.steps


@pytest.mark.usefixtures("quick_start", "short_steps")
def test_guesses_that_cannot_be_captured_are_launched_directly(
    loaded: Loaded, plain: list[list[int]], gpu: PretendGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And steps keep their graphs."""
    there = replace(loaded, model=to_gpu(copy.deepcopy(loaded.model)), head=to_gpu(copy.deepcopy(loaded.head)))
    inner = Guesser._follow_and_guess

    def waits(self: Guesser, *how: Any) -> torch.Tensor:
        found = inner(self, *how)
        assert found.sum().item()
        return found

    monkeypatch.setattr(Guesser, "_follow_and_guess", waits)
    engine = Engine(there, DECODE, EngineOptions(swap_space=0))
    done, params = [], [replace(PARAMS[0], max_new_tokens=20)]
    for _ in range(2):
        replays = gpu.num_replays
        done.append(ids(engine.generate(PROMPTS[:1], params)))
    assert done == [[plain[0][:20]]] * 2 and gpu.num_replays > replays
    assert engine.model.graph_reason is not None and "capturing" in engine.model.graph_reason


@pytest.mark.parametrize("entries", [[0, 1], [0, 2]])
def test_states_that_wait_are_copies(entries: list[int]) -> None:
    """A captured step writes its hidden states to the place of the last one's."""
    guesser = Guesser.__new__(Guesser)
    guesser._late, hidden = {}, torch.arange(6.0).view(3, 2)
    late = guesser._join(Chain(Row.chain(0, 5, [1, 2, 3], 1), entries, [2, 7], None), {0: hidden})
    hidden.zero_()
    assert late.states[0].tolist() == [[0.0, 1.0], [2.0 * entries[1], 2.0 * entries[1] + 1]]
