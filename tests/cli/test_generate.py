"""The command, in this process: what it prints, writes and returns."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import lpr
import lpr.cli.generate
import lpr.cli.jobs
from lpr import DecodeConfig, Engine, SamplingParams
from lpr.cli.generate import main, parse
from lpr.cli.jobs import Keeping
from lpr.config import InputError
from lpr.core.suffix_index import MAX_MATCH
from lpr.dist.runtime import World
from lpr.engine.trie_file import read_trie
from tests.fakes.paths import ROOT
from tests.fakes.prompts import PROMPTS


def write_prompts(path: Path, prompts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"prompt": prompt, "task_id": i}) + "\n" for i, prompt in enumerate(prompts)))
    return path


def test_completes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = write_prompts(tmp_path / "in.jsonl", PROMPTS[:5]), tmp_path / "out.jsonl"
    arguments = ["--prompts", str(source), "--output", str(target), "--max-new-tokens", "20", "--temperature", "0.7"]
    assert main([*arguments, "--seed", "3", "--json", "--max-batch-size", "2"]) == 0
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert [row["prompt"] for row in rows] == PROMPTS[:5]
    assert [row["task_id"] for row in rows] == list(range(5))
    engine = Engine.from_pretrained(lpr.bundled_model(), DecodeConfig.autoregressive())
    for row in rows:
        expected = engine.generate([row["prompt"]], SamplingParams(max_new_tokens=20, temperature=0.7, seed=3))[0]
        assert (row["token_ids"], row["text"]) == (expected.token_ids, expected.text)
        assert row["finish_reason"] == expected.finish_reason
        assert row["tokens_per_step"] == round(len(row["token_ids"]) / row["num_steps"], 4)
        assert row["world_size"] == 1 and row["mesh"] == {"lp": 1, "tp": 1}
    out, err = capsys.readouterr()
    summary = json.loads(out)
    assert summary["num_tokens"] == sum(len(row["token_ids"]) for row in rows)
    assert summary["completed"] == 5
    assert err == "", "no bar and no colour where there is no terminal"


def test_bad_lines_are_named_and_the_others_completed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    long = json.dumps({"prompt": "x = 1\n" * 5000})
    source.write_text(f'{{"prompt": "a = "}}\nnonsense\n{{"prompt": ""}}\n{long}\n{{"prompt": "b = "}}\n')
    assert main(["--prompts", str(source), "--output", str(target), "--max-new-tokens", "4"]) == 2
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert [row["line"] for row in rows] == [1, 2, 3, 4, 5]
    assert ["text" in row for row in rows] == [True, False, False, False, True]
    err = capsys.readouterr().err.splitlines()
    assert err[0].startswith("lpr.generate: line 2 is not JSON")
    assert err[1].startswith("lpr.generate: line 3: the prompt is empty")
    assert err[2].startswith("lpr.generate: line 4: the prompt's")
    assert err[3].startswith("2 of 5 prompts, 8 tokens in ")
    assert len(err) == 4


def restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next job be a second attempt, as torchrun begins one. Its variable alone would be a leftover."""
    again = World(rank=0, size=1, local_rank=0, attempt=1, launched=False)
    monkeypatch.setattr(World, "from_environment", lambda: again)


def test_a_restarted_job_still_reports_its_bad_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('nonsense\n{"prompt": "a = "}\n')
    arguments = ["--prompts", str(source), "--output", str(target), "--max-new-tokens", "4", "--json"]
    assert main(arguments) == 2
    before = target.read_bytes()
    restart(monkeypatch)
    capsys.readouterr()
    assert main(arguments) == 2
    assert target.read_bytes() == before
    assert json.loads(capsys.readouterr().out)["completed"] == 1


def check_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is begun again behind its second line must know what an undisturbed one knows."""
    source, target = write_prompts(tmp_path / "in.jsonl", PROMPTS[:3]), tmp_path / "out.jsonl"
    sizes = ["--window-size", "4", "--trie-nodes", "12"]  # automatic ones follow the clock, and steps are compared
    arguments = ["--prompts", str(source), "--output", str(target), "--max-new-tokens", "12", "--max-batch-size", "1"]
    arguments += sizes
    assert main([*arguments, "--trie", str(tmp_path / "whole")]) == 0
    undisturbed = target.read_bytes()
    target.write_bytes(b"".join(undisturbed.splitlines(keepends=True)[:2]))
    restart(monkeypatch)
    assert main([*arguments, "--trie", str(tmp_path / "again")]) == 0
    assert target.read_bytes() == undisturbed
    whole, again = (read_trie(tmp_path / name) for name in ("whole", "again"))
    assert whole.tolist() == again.tolist(), "what was learnt differs"
    first = json.loads(undisturbed.splitlines()[0])
    tokenizer = AutoTokenizer.from_pretrained(lpr.bundled_model())
    context = tokenizer(PROMPTS[0])["input_ids"][-MAX_MATCH:]
    assert whole.tolist()[: len(context) + 12] == [*context, *first["token_ids"]]


def test_a_restarted_job_learns_outputs_behind_their_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check_restart(tmp_path, monkeypatch)


def test_a_restarted_job_that_forgets_the_prompts_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lpr.cli.jobs, "as_learnt", lambda prompt_ids, token_ids: token_ids)
    with pytest.raises(AssertionError, match="what was learnt differs|assert b"):
        check_restart(tmp_path, monkeypatch)


def test_shows_a_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--prompt", "def add(a, b):\n", "--max-new-tokens", "12"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("def add(a, b):\n")
    assert "autoregressive" in out and "lookahead" in out and "yes" in out
    assert "\x1b" not in out


def test_the_demonstration_is_one_piece_of_code(capsys: pytest.CaptureFixture[str]) -> None:
    """The bundled model may begin another file in the middle of a line, which reads as a second completion."""
    assert main(["--json", "--device", "cpu"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["runs"][0]["equal"] is True
    assert record["finish_reason"] == "stop" and record["text"].endswith("\n")
    assert not re.search(r"\S(import|from) ", record["text"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--window-size", "-2"], "window_size=-2 must be int >= 0"),
        (["--temperature", "-1"], "temperature=-1.0 must be float >= 0"),
        (["--max-new-tokens", "many"], "--max-new-tokens"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--prompts", "x.jsonl"], "--prompts needs --output"),
        (["--output", "x.jsonl"], "--output needs --prompts"),
        (["--prompts", "x.jsonl", "--output", "./x.jsonl"], "are the same file, x.jsonl: the prompts would be lost"),
        (["--prompts", "x.jsonl", "--output", "-"], "--output - is no file"),
        (["--prompts", "/none.jsonl", "--output", "/tmp/x.jsonl"], "cannot read prompts from /none.jsonl"),
        (["--model", "/no/such/model"], "model folder '/no/such/model' does not exist"),
        (["--config", "/none.toml"], "cannot read --config /none.toml"),
        (["--prompt", ""], "the prompt is empty"),
        (["--tp", "3"], "--tp 3 does not divide the 1 ranks of this job"),
        (["--tp", "0"], "--tp 0 does not divide"),
    ],
)
def test_bad_input_is_one_message_and_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert out == "" and "Traceback" not in err


def test_output_is_checked_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lpr.cli.generate, "Engine", None)
    source = write_prompts(tmp_path / "in.jsonl", ["a"])
    assert main(["--prompts", str(source), "--output", "/dev/full"]) == 2
    assert "No space left on device" in capsys.readouterr().err


def test_config_files(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('model = "m"\nwindow_size = 7\nmax_new_tokens = 9\nstop = ["x"]\nrepetition_penalty = 1.5\n')
    args = parse(["--config", str(path), "--max-new-tokens", "11", "--stop-token-ids", "3", "4"])
    assert (args.sampling.repetition_penalty, args.sampling.stop_token_ids) == (1.5, (3, 4))
    assert (args.model, args.decode.window_size) == ("m", 7)
    assert (args.sampling.max_new_tokens, args.sampling.stop) == (11, ("x",))
    for text, message in {
        "window = 7": "unknown key 'window'",
        "window_size = -7": "window_size=-7 must be int >= 0",
        'window_size = "7"': "window_size = '7': Invalid",
        "stop = [1]": "stop = .1.: Expected `str`",
        "costs = 1": "costs = 1: Expected `str`",
        "mesh = { lp = 2 }": "mesh must be like",
        "tp = 2\nmesh = { lp = 2, tp = 1 }": "tp is given twice",
        "= 3": "is not TOML",
    }.items():
        path.write_text(text)
        with pytest.raises(InputError, match=message):
            parse([f"--config={path}"])


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda p: p.stem)
def test_named_runs_are_valid(path: Path) -> None:
    args = parse(["--config", str(path), "--trie-nodes", "3"])
    assert args.model and args.decode.trie_nodes == 3
    assert args.decode.window_size > 0


def test_steps_by_a_given_table_are_repeatable(tmp_path: Path) -> None:
    prompts, costs = write_prompts(tmp_path / "in.jsonl", PROMPTS[:2]), tmp_path / "costs.json"
    rows = [{"batch": 1, "kv": 256, "ms": [5.0, 6.0, 40.0]}]
    costs.write_text(json.dumps({"nodes": [1, 16, 256], "rows": rows}))
    outputs = []
    for name in ("one.jsonl", "two.jsonl"):
        arguments = ["--prompts", str(prompts), "--output", str(tmp_path / name), "--max-new-tokens", "30"]
        assert main([*arguments, "--costs", str(costs), "--device", "cpu"]) == 0
        outputs.append((tmp_path / name).read_text())
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("text", "message"), [(None, "cannot read --costs"), ("{", "--costs .*: Expecting"), ("[]", "step times")]
)
def test_a_table_that_is_none_is_named(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = tmp_path / "costs.json"
    if text is not None:
        costs.write_text(text)
    assert main(["--prompt", "x", "--costs", str(costs), "--device", "cpu"]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_lines_are_checked_with_the_flags_and_keep_their_fields(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        '{"prompt": "a = ", "min_new_tokens": 9, "logprobs": 1}\n{"prompt": "a\\ud800", "id": 7}\n'
        '{"prompt": "b", "temperature": "hot", "id": 8}\n{"prompt": "c", "min_new_tokens": 13, "id": 9}\n'
        '{"prompt": "d = ", "stop_token_ids": [3000000000], "id": 10}\n'
    )
    flags = ["--max-new-tokens", "12", "--window-size", "0", "--trie-nodes", "8"]
    assert main(["--prompts", str(source), "--output", str(target), *flags]) == 2
    good, *bad = [json.loads(line) for line in target.read_text().splitlines()]
    assert len(good["token_ids"]) == len(good["logprobs"]) == 12
    assert all(each["logprob"] <= each["top"][0][1] <= 0 and len(each["top"]) == 1 for each in good["logprobs"])
    assert [(row["id"], row["finish_reason"]) for row in bad] == [(each, "error") for each in (7, 8, 9, 10)]
    assert "Unicode" in bad[0]["error"] and "min_new_tokens=13" in bad[2]["error"]
    assert "stop_token_ids" in bad[3]["error"]


def test_a_shown_prompt_keeps_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    """Warming up and comparing go by the user's flags; what is printed is the text itself."""
    prompt = "if x:\n\ty[a:key:b]\n"
    flags = ["--prompt", prompt, "--max-new-tokens", "12", "--min-new-tokens", "10", "--max-length", "64"]
    assert main([*flags, "--window-size", "0", "--trie-nodes", "8"]) == 0
    assert capsys.readouterr().out.startswith(prompt)
    assert main(["--prompt", "x = 1\n" * 8, *flags[2:], "--json", "--logprobs", "0"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert len(record["logprobs"]) == len(record["token_ids"])


def test_plain_decoding_is_compared_at_the_same_length(monkeypatch: pytest.MonkeyPatch) -> None:
    configured = []
    monkeypatch.setattr(Engine, "configure", lambda self, decode: configured.append(decode))
    job = lpr.cli.jobs.ShowJob("a = ", SamplingParams(max_new_tokens=4), DecodeConfig(max_length=96), Keeping(), True)
    assert job.run(Engine.from_pretrained(lpr.bundled_model(), DecodeConfig.autoregressive())) == 0
    assert {each.max_length for each in configured} == {96} and configured[-1].resolved().num_nodes == 1


def test_the_built_in_prompt_is_sampled_unless_flags_say_otherwise(tmp_path: Path) -> None:
    def found(*flags: str) -> tuple[int, float]:
        sampling = parse(list(flags)).sampling
        return sampling.max_new_tokens, sampling.temperature

    config = tmp_path / "flags.toml"
    config.write_text("temperature = 0.0\n")
    assert found() == (200, 0.6) and found("--prompt", "a") == (64, 0.0)
    assert found("--temperature", "0") == (200, 0.0) and found("--max-new-tokens", "64") == (64, 0.6)
    assert found("--config", str(config)) == (200, 0.0)
