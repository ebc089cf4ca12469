"""The core in C++ against the specification in Python: equal to the last bit, whatever is drafted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import lpr.native
from lpr.config import SamplingParams, TreeSizes
from lpr.model.threads import has_team
from tests.fakes.native_pair import NAMES, PURE, Plan, draft_along, native_core, run

try:
    NATIVE: Any = native_core()
except ImportError:  # without a compiler there is one core only, and nothing to compare
    NATIVE = None

needs_native = pytest.mark.skipif(NATIVE is None, reason="the extension was not built")

sizes = st.builds(
    TreeSizes,
    window_size=st.sampled_from([0, 0, 1, 3, 8]),
    ngram_size=st.integers(2, 6),
    guess_set_size=st.integers(0, 6),
    trie_nodes=st.sampled_from([0, 1, 8, 33, 64, 200]),
    branch_length=st.sampled_from([1, 4, 32, 128]),
    num_candidates=st.sampled_from([0, 1, 8]),
    num_guesses=st.sampled_from([0, 0, 1, 12]),
    trie_capacity=st.sampled_from([1, 50, 200, 10_000]),
)
plans = st.builds(
    lambda ranks, **rest: Plan(num_ranks=ranks[0], num_drafting=ranks[1], **rest),
    seed=st.integers(0, 2**32),
    sizes=sizes,
    num_sequences=st.integers(1, 3),
    num_steps=st.just(10),
    ranks=st.sampled_from([(1, 0), (1, 0), (2, 0), (5, 0), (2, 1), (5, 2)]),
    vocabulary=st.sampled_from([2, 8, 60, 2**31 - 1]),
    shares=st.booleans(),
    adaptive=st.booleans(),
    fails=st.booleans(),
    homes_change=st.booleans(),
    repeats=st.sampled_from([0.2, 0.9]),
)


def test_the_extension_is_built_wherever_there_is_a_compiler() -> None:
    if NATIVE is None and shutil.which("g++"):
        pytest.fail(f"pip install -e . builds it; importing it said: {lpr.native.missing}")


def plain_plan(num_ranks: int) -> Plan:
    """Steps without any source of drafts, for which the extension makes no drafter unless ranks compare it."""
    sizes = TreeSizes(window_size=0, trie_nodes=0, num_candidates=0)
    return Plan(
        seed=1, sizes=sizes, num_sequences=3, num_steps=10, num_ranks=num_ranks, vocabulary=60, homes_change=True
    )


@needs_native
@settings(max_examples=20, deadline=None)
@given(plan=plans)
@example(plan=plain_plan(1))
@example(plan=plain_plan(3))
def test_steps_are_equal(plan: Plan) -> None:
    assert_equal(run(PURE, plan), run(NATIVE, plan))


@needs_native
@pytest.mark.parametrize("num_ranks, num_drafting", [(2, 1), (4, 2)])
def test_what_ranks_that_only_draft_have_found_is_the_same(num_ranks: int, num_drafting: int) -> None:
    """The trees that follow hold it: without these ranks' blocks they are others."""
    sizes = TreeSizes(trie_nodes=16, num_guesses=12)
    plan = Plan(seed=3, sizes=sizes, num_ranks=num_ranks, num_drafting=num_drafting, vocabulary=60, repeats=0.2)
    expected = of_the_specification(plan)
    assert_equal(expected, run(NATIVE, plan))
    assert expected != run(PURE, replace(plan, leaves_out=True))


@needs_native
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    capacity=st.sampled_from([1, 2, 30, 200, 3000]),
    vocabulary=st.sampled_from([2, 6, 100, 2**31 - 1]),
)
def test_drafters_and_suffix_indexes_are_equal(seed: int, capacity: int, vocabulary: int) -> None:
    assert_equal(*(draft_along(core, seed, capacity, vocabulary) for core in (PURE, NATIVE)))


@cache
def of_the_specification(plan: Plan) -> Any:
    return run(PURE, plan)


@needs_native
@pytest.mark.parametrize(
    "name",
    [
        "novelties",
        "node_places",
        "max_match",
        "shipped_frequencies",
        "trust_memory",
        "num_bands",
        "several",
        "delay",
        "sibling_trust",
        "pair_bits",
        "head_weight",
    ],
)
@pytest.mark.slow(first=5)
def test_a_core_with_one_other_number_is_found_out(name: str) -> None:
    """The comparison itself can fail: each of these numbers decides what is drafted."""
    numbers = lpr.native.numbers()
    sizes = TreeSizes(trie_nodes=64, num_guesses=8 * (name == "head_weight"))
    plan = Plan(seed=1, sizes=sizes, vocabulary=40, adaptive=name in ("trust_memory", "num_bands"), num_steps=40)
    expected = of_the_specification(plan)
    value = numbers[name]
    if isinstance(value, (list, tuple)):
        if name == "shipped_frequencies":
            other: Any = [[float(np.nextafter(each, 0)) for each in row] for row in value]
        else:
            other = [each + type(each)(1) if i % 3 else each for i, each in enumerate(value)]
    else:
        less = value // 2 if name == "num_bands" else value - 1  # no tree here reaches the last band
        other = less if isinstance(value, int) else value * 0.9
    try:
        NATIVE.set_constants({**numbers, name: other})
        assert run(NATIVE, plan) != expected
    finally:
        NATIVE.set_constants(numbers)


@needs_native
def test_what_cannot_be_is_refused_alike() -> None:
    for core in (PURE, NATIVE):
        with pytest.raises(ValueError, match="capacity_tokens=0 must be at least 1"):
            core.SuffixIndex(0)


def test_the_environment_chooses_the_specification() -> None:
    code = (
        "import lpr.native, lpr.core.tree; print(lpr.native.TokenTree is lpr.core.tree.TokenTree, lpr.native.missing)"
    )
    for choice, said in (("1", "True None"), ("0", f"{NATIVE is None} {lpr.native.missing}")):
        environment = {**os.environ, "LPR_PURE_PYTHON": choice}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, check=True
        )
        assert done.stdout.strip() == said


PROGRAM = """
import json
import lpr.native
from lpr import DecodeConfig, Engine, SamplingParams
from lpr.dist.runtime import World, join
from tests.fakes.models import tiny_model

with join(World.from_environment(), "cpu", 120.0) as comm:
    decode = DecodeConfig(window_size=4, trie_nodes=24, max_batch_size=2, max_length=256)
    engine = Engine.from_model(tiny_model(spread=0.12), decode=decode, comm=comm)
    params = [SamplingParams(max_new_tokens=20, temperature=t, seed=3) for t in (0.0, 0.8, 0.0)]
    done = engine.generate([[5, 6, 7] * 4, [9, 9, 4, 2] * 3, list(range(30))], params)
    engine.close()
print(json.dumps([lpr.native.is_native, [[each.token_ids, each.stats.num_steps] for each in done]]))
"""


@needs_native
def test_pairs_chosen_to_share_a_place_cost_as_much_as_others() -> None:
    """Those that share one by a multiplication without a key took 40 times as long."""
    from lpr.native import SuffixIndex

    right, chosen = np.arange(49152, dtype=np.uint64), []
    for left in range(2000):
        with np.errstate(over="ignore"):
            hashed = ((np.uint64(left) << np.uint64(32)) | right) * np.uint64(0x9E3779B97F4A7C15)
        here = (hashed >> np.uint64(58) == 5) & ((hashed >> np.uint64(20)) & np.uint64(2**18 - 1) < 2**11)
        chosen += [(left, token, -1) for token in np.flatnonzero(here)]
    dice = np.random.default_rng(0)
    others = np.stack(
        [dice.integers(0, 2000, len(chosen)), dice.integers(0, 49152, len(chosen)), [-1] * len(chosen)], 1
    )

    def took(pairs: object) -> float:
        history, best = np.array(pairs, np.int32).reshape(-1), 1e9
        for _ in range(5):
            index = SuffixIndex(10**6)
            began = time.thread_time()
            index.insert(history)
            best = min(best, time.thread_time() - began)
        return best

    assert len(chosen) > 10_000 and took(chosen) < 8 * took(others)


def test_what_native_offers_the_specification_has() -> None:
    set_by_init = {"first_times", "tokens", "num_computed_tokens", "probabilities", "times", "plain_part", "care_at"}
    set_by_init |= {"ending", "grown", "with_nan", "num_steps", "num_emitted"}
    for name in NAMES:
        pure, native = getattr(PURE, name), getattr(NATIVE, name)
        offered = {each for each in dir(native) if not each.startswith("_")} if isinstance(native, type) else set()
        fields = set(getattr(pure, "__dataclass_fields__", ()))
        assert offered <= set(dir(pure)) | fields | set_by_init, name


def assert_equal(first: list[Any], second: list[Any]) -> None:
    assert len(first) == len(second)
    for index, (one, other) in enumerate(zip(first, second, strict=True)):
        assert one == other, f"record {index}"


@needs_native
def test_threads_change_no_result() -> None:
    """They draft the trees of a step and conclude them, each with a state of its own; the shared text is read."""
    assert has_team()
    many = TreeSizes(window_size=3, guess_set_size=3, trie_nodes=24, trie_capacity=700, num_candidates=2)
    plan = Plan(seed=11, sizes=many, num_sequences=16, num_steps=8, vocabulary=30, fails=True, num_threads=4)
    assert_equal(run(PURE, plan), run(NATIVE, plan))


@needs_native
def test_an_exception_of_a_thread_reaches_the_caller() -> None:
    """If it left the thread, the process would end."""
    assert has_team()
    wrong = TreeSizes(window_size=0, trie_nodes=24)
    known = SamplingParams(), wrong, 1, None, None, 200, frozenset(), [], 2
    states = [NATIVE.SequenceState([3, -5], *known) for _ in range(16)]
    with pytest.raises(ValueError, match="a token is negative"):
        NATIVE.draft_step(states, NATIVE.Budgets(wrong, 1, None), 0, [list(range(16))], 30, 0, 0, None, 4)
