"""Seeded faults: each breaks one rule of the step, and the comparison that guards the rule must notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import lpr.engine.step
import lpr.model.input_builder
import lpr.model.sampling.specification
import lpr.native
from lpr import DecodeConfig, Engine, SamplingParams
from lpr.core.window import JacobiWindow
from lpr.engine.exchange import Exchange
from lpr.model.kv_cache import KVCache
from lpr.model.step_inputs import Rows
from lpr.native import StepDraft
from tests.core.test_window import check_on_known_text
from tests.fakes.altered_gather import change_received
from tests.fakes.models import stock_greedy, tiny_model

PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [(3 * i) % 89 for i in range(40)], [9, 9, 4, 2] * 6]
DECODE = DecodeConfig(window_size=6, trie_nodes=24)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model(seed=7, spread=0.12)


@pytest.fixture(scope="module")
def engine(model: PreTrainedModel) -> Engine:
    """With masks, where some of the faults are; those over pages: tests/model/attention/test_native.py."""
    return Engine.from_model(model, decode=DECODE, attention="sdpa")


@pytest.fixture(scope="module")
def greedy(model: PreTrainedModel) -> list[list[int]]:
    return [stock_greedy(model, prompt, 60) for prompt in PROMPTS]


def check_greedy(engine: Engine, expected: list[list[int]]) -> None:
    engine.configure(DECODE)
    done = engine.generate(PROMPTS, SamplingParams(max_new_tokens=60))
    assert [each.token_ids for each in done] == expected


def check_sampled(engine: Engine) -> None:
    params = [SamplingParams(max_new_tokens=40, temperature=0.9, seed=seed) for seed in range(len(PROMPTS))]
    texts = []
    for decode in (DecodeConfig.autoregressive(), DECODE):
        engine.configure(decode)
        texts.append([each.token_ids for each in engine.generate(PROMPTS, params)])
    assert texts[0] == texts[1]


def test_without_a_fault(engine: Engine, greedy: list[list[int]]) -> None:
    check_greedy(engine, greedy)
    check_sampled(engine)
    check_on_known_text(6, 5, [0, 1, 2, 0, 3, 0])


def wrong_position(patch: pytest.MonkeyPatch) -> None:
    build = lpr.engine.step.Rows

    def mutant(*args: Any) -> Rows:
        rows = build(*args)
        for row in rows:  # views of the columns
            row.positions[row.num_entries - row.num_results + 1 :] += 1
        return rows

    patch.setattr(lpr.engine.step, "Rows", mutant)


def depth_counted_from_the_pending_chain(patch: pytest.MonkeyPatch) -> None:
    build = lpr.engine.step.Rows

    def mutant(*args: Any) -> Rows:
        rows = build(*args)
        for row in rows:  # views of the columns
            above = row.num_entries - row.num_results
            row.positions[above + 1 :] -= above
        return rows

    patch.setattr(lpr.engine.step, "Rows", mutant)


def dropped_ancestor(patch: pytest.MonkeyPatch) -> None:
    build = lpr.model.input_builder.ancestor_matrix

    def mutant(parents: list[int]):  # type: ignore[no-untyped-def]
        matrix = build(parents).copy()
        for node, parent in enumerate(parents):
            if parent >= 0 and parents[parent] >= 0 and node % 3 == 0:
                matrix[node, parents[parent]] = False
        return matrix

    patch.setattr(lpr.model.input_builder, "ancestor_matrix", mutant)


def visible_sibling(patch: pytest.MonkeyPatch) -> None:
    build = lpr.model.input_builder.ancestor_matrix

    def mutant(parents: list[int]):  # type: ignore[no-untyped-def]
        matrix = build(parents).copy()
        for node in range(2, len(parents)):
            if parents[node] == parents[node - 1]:
                matrix[node, node - 1] = True
        return matrix

    patch.setattr(lpr.model.input_builder, "ancestor_matrix", mutant)


def wrong_compaction_row(patch: pytest.MonkeyPatch) -> None:
    move = KVCache.move
    patch.setattr(KVCache, "move", lambda self, rows: move(self, rows + np.array([[1], [0]])))


def no_compaction(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCache, "move", lambda self, rows: None)


def accepts_an_unchosen_child(patch: pytest.MonkeyPatch) -> None:
    def mutant(exchange: Exchange, draft: StepDraft, values: np.ndarray) -> None:
        """The model is said to have chosen the root's first child, whatever it chose."""
        for index, tree in enumerate(draft.trees):
            if len(tree) > 1 and tree.find(0, int(values[0, index, 0, 0])) < 0:
                values[0, index, 0, 0] = tree.tokens[1]

    change_received(patch, mutant)


@pytest.mark.parametrize(
    "fault",
    [
        wrong_position,
        depth_counted_from_the_pending_chain,
        dropped_ancestor,
        visible_sibling,
        wrong_compaction_row,
        no_compaction,
        accepts_an_unchosen_child,
    ],
)
def test_greedy_equality_notices(
    fault: Callable[[pytest.MonkeyPatch], None],
    engine: Engine,
    greedy: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check_greedy(engine, greedy)


def unkeyed_noise(patch: pytest.MonkeyPatch) -> None:
    def mutant(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.random.default_rng().gumbel(size=(len(keys), tokens.shape[1])).astype(np.float32))

    patch.setattr(lpr.native, "choose_rows", None)  # the extension's noise cannot be replaced
    patch.setattr(lpr.model.sampling.specification, "gumbel", mutant)


def noise_keyed_by_the_parents_position(patch: pytest.MonkeyPatch) -> None:
    """Position of the node instead of the token after it, below the root only: a tree and a chain then differ."""
    select = lpr.engine.step.selection

    def mutant(batch, rows):  # type: ignore[no-untyped-def]
        chosen = select(batch, rows)
        start = 0
        for row in rows:
            if row.num_results > 1:
                chosen.key_of[start + 1 : start + row.num_results] = chosen.key_of[start]
            start += row.num_results
        return chosen

    patch.setattr(lpr.engine.step, "selection", mutant)


@pytest.mark.parametrize("fault", [unkeyed_noise, noise_keyed_by_the_parents_position])
def test_sampling_equality_notices(
    fault: Callable[[pytest.MonkeyPatch], None], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check_sampled(engine)


@pytest.mark.parametrize("shift", [-1, 1])
def test_known_text_notices_a_window_off_by_one(shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    advance = JacobiWindow.advance

    def mutant(self, tree, next_tokens, committed, context):  # type: ignore[no-untyped-def]
        return advance(self, tree, next_tokens, range(max(1, len(committed) + shift)), context)

    monkeypatch.setattr(JacobiWindow, "advance", mutant)
    with pytest.raises(AssertionError):
        check_on_known_text(6, 5, [0, 1, 2, 0, 3, 0])
