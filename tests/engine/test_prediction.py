"""Predictions: drafted from after every kind of edit, counted, cheap where they are wrong, and no cause of a text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from transformers import PreTrainedModel

from lpr import DecodeConfig, Engine, SamplingParams
from lpr.cli.jsonl import read_prompts
from lpr.config import InputError
from lpr.core import constants
from lpr.core import drafting as pure
from lpr.core.tree import TokenTree as PureTree
from lpr.engine.exchange import DesyncError
from lpr.engine.outcomes import Outcomes
from lpr.engine.request import Request
from lpr.native import Drafter, TokenTree
from lpr.protocol import Submit
from tests.fakes.models import plain_ids
from tests.fakes.worlds import ThreadComm, ThreadWorld, run_ranks

SIZES = DecodeConfig(window_size=0, trie_nodes=64, branch_length=64).resolved()
TEXT = list(range(1000, 1060))
EDITS = {
    "nothing": TEXT,
    "insert": [*TEXT[:20], 1, 2, 3, *TEXT[20:]],
    "insert a lot": [*TEXT[:20], *range(1, 41), *TEXT[20:]],
    "delete": [*TEXT[:20], *TEXT[27:]],
    "replace": [*TEXT[:20], 1, 2, *TEXT[22:]],
    "several in a line": [*TEXT[:20], 1, *TEXT[21:24], 2, *TEXT[24:26], *TEXT[29:32], 3, *TEXT[33:]],
    "move": [*TEXT[:10], *TEXT[40:50], *TEXT[10:40], *TEXT[50:]],
    "at both ends": [1, 2, *TEXT[2:-1], 3],
}
MOST_STEPS = {
    "nothing": 1, "insert": 5, "insert a lot": 44, "delete": 3, "replace": 4, "several in a line": 6, "move": 7,
    "at both ends": 4,
}  # fmt: skip
"""A step per token that the prediction lacks, and one or two to find the place again."""


def num_steps(
    output: Sequence[int], prediction: Sequence[int], prompt: Sequence[int] = (5, 6), core: tuple = (Drafter, TokenTree)
) -> int:
    """Steps of a model that writes `output`."""
    drafter = core[0](SIZES, prediction=list(prediction), num_prompt=len(prompt))
    drafter.observe(list(prompt))
    done, root, steps = 0, prompt[-1], 0
    while done < len(output):
        tree = core[1](root)
        drafter.draft(tree, 64)
        path, emitted = [0], [output[done]]
        while (node := tree.find(path[-1], emitted[-1])) >= 0 and done + len(emitted) < len(output):
            path.append(node)
            emitted.append(output[done + len(emitted)])
        drafter.learn(tree, path)
        drafter.observe(emitted)
        root, done, steps = emitted[-1], done + len(emitted), steps + 1
    return steps


@pytest.mark.parametrize("edit", EDITS)
def test_drafting_goes_on_after_an_edit(edit: str) -> None:
    assert num_steps(EDITS[edit], TEXT) <= MOST_STEPS[edit]


@pytest.mark.parametrize(
    ("name", "value", "edit"),
    [("INSERTED_COST", 99, "insert"), ("REPLACED_COST", 99, "replace"), ("NEAR_PLACES", 0, "delete"),
     ("FIRST_STRENGTH", 0, "nothing"), ("LOST_MATCH", 99, "insert a lot"), ("NODE_PLACES", 0, "move")],
)  # fmt: skip
def test_an_alignment_without_a_kind_of_edit_shows(
    monkeypatch: pytest.MonkeyPatch, name: str, value: int, edit: str
) -> None:
    core = pure.Drafter, PureTree
    assert num_steps(EDITS[edit], TEXT, core=core) <= MOST_STEPS[edit]
    monkeypatch.setattr(constants, name, value)
    assert num_steps(EDITS[edit], TEXT, core=core) > MOST_STEPS[edit]


PROMPTS = [[3, 5, 7, 9, 11, 13, 5, 7], [7, 8, 9] * 5, [(i * i) % 97 for i in range(40)]]
PARAMS = [SamplingParams(max_new_tokens=40, temperature=0.8 * (i % 2), seed=i) for i in range(len(PROMPTS))]
DECODE = DecodeConfig(window_size=0, trie_nodes=16, max_batch_size=3)


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel) -> list[list[int]]:
    return plain_ids(model, PROMPTS, PARAMS)


def near(text: list[int]) -> list[int]:
    return [*text[:7], 1, *text[7:20], *text[23:30], 2, 3, *text[32:]]


PREDICTIONS = {
    "right": lambda texts: texts,
    "near": lambda texts: [near(text) for text in texts],
    "wrong": lambda texts: [list(range(50, 90))] * len(texts),
    "another request's": lambda texts: [*texts[1:], texts[0]],
    "none": lambda texts: [None] * len(texts),
}


def complete(model: PreTrainedModel, predictions: list, num_ranks: int) -> list[Request]:
    """Requests with predictions on a world of ranks, which all have had the same; those of rank 0."""

    def program(comm: ThreadComm) -> list[Request]:
        engine = Engine.from_model(model, decode=DECODE, comm=comm)
        submitted = [
            engine.submit(*each, prediction=prediction, details=True)
            for *each, prediction in zip(PROMPTS, PARAMS, predictions, strict=True)
        ]
        while any(request.finish_reason is None for request in submitted):
            engine.step()
        return submitted

    found = run_ranks(ThreadWorld(num_ranks), program)
    seen = [[(each.token_ids, each.predicted) for each in requests] for requests in found]
    assert all(each == seen[0] for each in seen)
    return found[0]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("kind", PREDICTIONS)
@pytest.mark.slow(first=4)
def test_a_prediction_changes_no_text_and_its_tokens_are_counted(
    model: PreTrainedModel, expected: list[list[int]], kind: str, num_ranks: int
) -> None:
    requests = complete(model, PREDICTIONS[kind](expected), num_ranks)
    assert [each.token_ids for each in requests] == expected
    for request in requests:
        drafted, accepted = request.predicted
        count = request.stats.sources.get("prediction")
        assert (drafted, accepted) == ((count.drafted, count.accepted) if count is not None else (0, 0))
        assert accepted == [source for chunk in request.take() for source in chunk.sources or ()].count("prediction")
        if kind == "right":
            assert accepted > 30 and request.stats.num_steps < 6
        elif kind in ("wrong", "none"):
            assert accepted < 5 and (drafted > 0) == (kind == "wrong")


def test_a_draft_that_is_taken_for_the_text_shows(
    model: PreTrainedModel, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = Request.advance

    def mutant(batch: Sequence[Request], outcomes: Outcomes) -> list[Request]:
        for request, outcome in zip(batch, outcomes, strict=True):
            request.tokens[-1] = request.prediction[0]
            outcome.concluded.emitted[-1:] = [request.prediction[0]]
        return advance(batch, outcomes)

    monkeypatch.setattr(Request, "advance", staticmethod(mutant))
    requests = complete(model, PREDICTIONS["wrong"](expected), 1)
    assert [each.token_ids for each in requests] != expected


def test_ranks_with_different_predictions_are_told_apart(model: PreTrainedModel) -> None:
    def program(comm: ThreadComm) -> None:
        engine = Engine.from_model(model, decode=DECODE, comm=comm)
        engine.submit(PROMPTS[0], PARAMS[0], prediction=[4, 5 + comm.rank])
        while not engine.is_idle:
            engine.step()

    with pytest.raises(DesyncError):
        run_ranks(ThreadWorld(2), program)


def go_on(model: PreTrainedModel, expected: list[list[int]]) -> None:
    """As on ranks that were started again: what was drafted before is added, and the prediction's place is found."""
    engine = Engine.from_model(model, decode=DECODE)
    first = engine.submit(PROMPTS[0], PARAMS[0], prediction=near(expected[0]))
    for _ in range(2):
        engine.step()
    command = msgspec.msgpack.decode(msgspec.msgpack.encode(first.submit), type=Submit)
    engine.abort(first)
    assert 0 < command.predicted[1] < 30 and len(command.token_ids) > len(PROMPTS[0])
    delivered = command.token_ids[command.num_prompt :]
    known = {"prediction": command.prediction, "predicted": command.predicted}
    again = engine.submit(PROMPTS[0], PARAMS[0], delivered=delivered, **known)
    while again.finish_reason is None:
        engine.step()
    count = again.stats.sources["prediction"]
    new = tuple(after - before for after, before in zip(again.predicted, command.predicted, strict=True))
    assert again.token_ids == expected[0] and new == (count.drafted, count.accepted)
    assert again.stats.num_steps < 10


def test_a_request_goes_on_with_its_counts(model: PreTrainedModel, expected: list[list[int]]) -> None:
    go_on(model, expected)


def test_lost_counts_and_a_lost_place_show(
    model: PreTrainedModel, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    init = Request.__init__

    def mutant(self: Request, command: Submit, *rest: object) -> None:
        init(self, command, *rest)  # type: ignore[arg-type]
        self.predicted = (0, 0)

    monkeypatch.setattr(Request, "__init__", mutant)
    with pytest.raises(AssertionError):
        go_on(model, expected)


@pytest.mark.parametrize("prediction", [5, {"a": 1}, [1.5], [10**6], "text without a tokenizer"])
def test_a_bad_prediction_is_one_line(model: PreTrainedModel, prediction: object) -> None:
    engine = Engine.from_model(model, decode=DECODE)
    with pytest.raises(InputError) as failure:
        engine.submit(PROMPTS[0], PARAMS[0], prediction=prediction)  # type: ignore[arg-type]
    assert "\n" not in str(failure.value) and engine.is_idle


def test_a_line_of_prompts_may_have_a_prediction(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    rows = [{"prompt": "a", "prediction": each} for each in ([1, 2], "b", 5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    lines = read_prompts(path)
    assert [line.prediction for line in lines] == [[1, 2], "b", 5]
    assert [line.extra["prediction"] for line in lines] == [[1, 2], "b", 5]
