"""Automatic sizes on recorded texts under known step times: what they take is exact, so it can be held to a limit."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

from benchmarks import sizes
from benchmarks.replay import Task
from lpr.core.step_times import StepTimes
from lpr.native import AcceptanceHistory, SuffixIndex


def copying_text(rng: random.Random, length: int) -> list[int]:
    """Long copies of what was before, between stretches that nothing foretells."""
    text = [rng.randrange(1000) for _ in range(60)]
    while len(text) < length:
        if rng.random() < 0.4:
            start = rng.randrange(len(text) - 40)
            text += text[start : start + rng.randrange(10, 40)]
        else:
            text += [rng.randrange(1000) for _ in range(rng.randrange(5, 25))]
    return text


def tasks(copies: bool) -> list[Task]:
    rng = random.Random(3)
    texts = [copying_text(rng, 700) if copies else [rng.randrange(1000) for _ in range(700)] for _ in range(6)]
    return [Task(text[:100], text[100:]) for text in texts]


def race(price: float, copies: bool) -> dict[str, object]:
    learnt = lambda: SuffixIndex(10_000)  # noqa: E731
    found = sizes.compare(tasks(copies), {"": sizes.priced(price)}, learnt, [4, 8, 16, 32, 64], 128, lambda: None)
    return found[0]


@pytest.mark.parametrize("price", [0.2, 1.0, 3.0, 10.0])
def test_automatic_sizes_keep_up_with_the_best_fixed_one(price: float) -> None:
    """A budget that took the rate of its last step for granted never drafted again after a copy: 0.16x."""
    found = race(price, copies=True)
    assert found["auto_over_best_fixed"] >= 0.95, found  # type: ignore[operator]
    assert found["best_fixed_over_plain"] > 1.2, "there is something to win"  # type: ignore[operator]


@pytest.mark.parametrize("price", [0.2, 1.0, 3.0, 10.0, 50.0])
def test_automatic_sizes_are_never_slower_than_plain_decoding(price: float) -> None:
    found = sizes.automatic(tasks(copies=False), sizes.priced(price), SuffixIndex(10_000), 128)
    assert found["over_plain"] >= 0.97, found


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sizes, "load_tokenizer", lambda name: lambda text: [ord(each) for each in text])
    monkeypatch.setattr(sizes, "default_tokenizer", lambda: "letters")
    traces, costs = tmp_path / "t.jsonl", tmp_path / "costs.json"
    line = {"prompt": "for i in range(3): print(i)\n", "completion": "for j in range(3): print(j)\n" * 3}
    traces.write_text((json.dumps(line) + "\n") * 3)
    costs.write_text(json.dumps(StepTimes({(1, 256): sizes.priced(2).row(1, 256)}).to_json()))
    arguments = ["--traces", str(traces), "--warm-first", "1", "--last", "2", "--sizes", "4", "8", "--prices", "1"]
    monkeypatch.setattr(sys, "argv", ["sizes", *arguments, "--costs", str(costs)])
    assert sizes.main() == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    cold, warm = result["runs"]
    assert (cold["num_warm_tasks"], warm["num_warm_tasks"], cold["num_tasks"]) == (0, 1, 2)
    assert [each["costs"] for each in cold["races"]] == ["1 % a node", "costs.json"]
    assert all(
        w["auto"]["over_plain"] > c["auto"]["over_plain"] for w, c in zip(warm["races"], cold["races"], strict=True)
    )
    costs.write_text("[]")
    assert sizes.main() == 2
    assert "--costs" in capsys.readouterr().err


def test_one_long_promise_that_failed_is_soon_forgiven() -> None:
    history = AcceptanceHistory()
    history.record_step(50.0, 0, 0.95)
    assert history.trust() > 0.4
    for _ in range(200):
        history.record_step(0.0, 0, 0.95)
    assert history.trust() > 0.8, "plain steps forget it"
    for _ in range(100):
        history.record_step(1.0, 0, 0.95)
    assert history.trust() < 0.15, "failing again and again is believed"
