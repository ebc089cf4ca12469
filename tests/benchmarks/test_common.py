"""What all benchmarks share: the runner, the race and the counted steps."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.ablation import complete, figures_of
from benchmarks.limit import fewest_steps
from benchmarks.processes.launch import RunFailedError
from benchmarks.race import Output, run_race
from rich.console import Console
from transformers import PreTrainedModel

from benchmarks import ablation, exactness, fleet, serve
from benchmarks.common import DataOptions, Options, attempt, read_options, run_main
from benchmarks.engines import count_steps, engines_over, load_engine, load_model, params_for, plain, split_budget
from lpr import Engine, InputError, SamplingParams
from lpr.cli.generate import parse as parse_generate
from lpr.engine.hooks import StepHooks
from lpr.serve.options import parse as parse_serve
from tests.fakes.paths import ROOT


def broken() -> dict[str, Any]:
    raise ValueError("first line\nsecond line")


def test_a_failure_is_recorded_and_decides_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    def measure(options: Options, console: Console) -> dict[str, Any]:
        return {"runs": [{"name": "good", "value": 1}, {"name": "bad", **attempt(broken)}]}

    assert run_main("made", Options, measure, []) == 1
    out, err = capsys.readouterr()
    result = json.loads(out.splitlines()[-1])
    assert result["runs"][1]["failed"] == "ValueError: first line" and {"cpu", "commit", "command"} <= set(result)
    assert "failed: bad: ValueError: first line" in err and "good" in err
    assert run_main("made", Options, measure, ["--json"]) == 1
    assert capsys.readouterr().err == ""


def test_bad_input_is_one_line_and_not_a_failed_entry(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> dict[str, Any]:
        raise InputError("no such thing")

    assert run_main("made", Options, lambda options, console: attempt(refuse), []) == 2
    out, err = capsys.readouterr()
    assert out == "" and err == "benchmarks.made: no such thing\n"


class Fake:
    """Takes `turns` turns per prompt and emits `ids`."""

    def __init__(self, name: str, turns: int, ids: list[int], log: list[str]) -> None:
        self.name, self.turns, self.ids, self.log = name, turns, ids, log

    def start(self, prompt: list[int], params: SamplingParams) -> Callable[[], Output | None]:
        left = self.turns

        def turn() -> Output | None:
            nonlocal left
            left -= 1
            self.log.append(self.name)
            return None if left else Output(self.ids, self.turns, 2 * self.turns)

        return turn


def test_contestants_take_turns_and_the_first_prompt_does_not_count() -> None:
    log: list[str] = []
    race = run_race(
        {"a": Fake("a", 3, [1, 2], log), "b": Fake("b", 2, [1, 3], log)}, [[7], [8]], [SamplingParams()] * 2
    )
    assert log[:5] == ["a", "b", "b", "a", "a"], "the order changes from round to round"
    assert race.num_tokens == 2 and race.tallies["a"].num_steps == 3 and race.tallies["b"].num_nodes == 4
    assert (race.tallies["a"].num_different, race.tallies["b"].num_different) == (0, 2)
    assert len(race.tallies["a"].seconds) == 1


def test_counted_steps_are_those_of_the_engine(llama: PreTrainedModel) -> None:
    engine = Engine.from_model(llama, decode=split_budget("trie", 16))
    prompts: Any = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 9, 9, 9]]
    counted: dict[int, Any] = {}
    for num_ranks in (1, 2):
        params = params_for(2, 24, 0.0, ignore_eos=True)
        total, counter = count_steps(engine, split_budget("trie", 16), prompts, params, num_ranks, lambda: None)
        assert counter.num_nodes == total.num_nodes and total.num_tokens == 48
        assert counter.num_evaluated >= counter.num_nodes and counter.largest_shards <= counter.num_evaluated
        counted[num_ranks] = counter
    assert counted[1].num_pending == 0 == counted[1].num_evaluated - counted[1].num_nodes, "one rank lacks nothing"
    assert counted[2].num_pending > 0 and type(engine.hooks) is StepHooks


def test_requests_side_by_side_take_the_steps_that_each_takes_alone(llama: PreTrainedModel) -> None:
    engine = Engine.from_model(llama, decode=split_budget("trie", 16))
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 9, 9, 9], [5, 6, 7, 5, 6, 7, 5, 6]]
    params = params_for(3, 24, 0.0, ignore_eos=True)
    found = {}
    for together, is_cold in ((1, True), (3, True), (1, False)):
        decode = replace(split_budget("trie", 16), max_batch_size=together)
        outputs = complete(engine, decode, prompts, params, is_cold, lambda: None)
        found[together, is_cold] = [(output.token_ids, output.stats.num_steps) for output in outputs]
        figures = figures_of(prompts, outputs, is_cold)
        fewest = [fewest_steps(prompt, output.token_ids) for prompt, output in zip(prompts, outputs, strict=True)]
        if not is_cold:
            fewest[2] = 1  # the first output again, which is known then
        assert figures["num_tokens"] == 72 and figures["num_steps"] == sum(
            steps for _, steps in found[together, is_cold]
        )
        assert figures["limit_tokens_per_step"] == round(72 / sum(fewest), 4)
        assert figures["share_of_limit"] == round(sum(fewest) / figures["num_steps"], 4)
    alone = found[1, True]
    assert found[3, True] == alone and alone[0] == alone[2], "no request drafts from another's output"
    learnt = found[1, False]
    assert learnt[2][0] == alone[2][0] and learnt[2][1] < alone[2][1], "but where that is not asked for"


def test_together_needs_cold(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["ablation", "--data", "none.jsonl", "--together", "2"])
    assert ablation.main() == 2
    assert capsys.readouterr().err.startswith("benchmarks.ablation: --together needs --cold")


@pytest.mark.parametrize("exact", [[], ["--exact"]], ids=["as usual", "exact"])
def test_exact_mode_is_a_flag_of_every_command_that_decodes(exact: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag that is parsed and lost on its way would pass for evidence of exact mode."""
    wanted = bool(exact)
    assert parse_generate(["--prompt", "x", *exact]).options.exact is wanted
    assert parse_serve(exact).engine.exact is wanted
    words = ["--data", "file", "--device", "cpu", *exact]
    options = read_options("made", DataOptions, words)
    assert load_engine(options, plain()).model.exact is wanted
    assert engines_over(load_model(options), {"one": plain()})["one"].model.exact is wanted
    commands = [serve.flags_of("plain", read_options("serve", serve.ServeOptions, words))]

    def started(command: list[str], *_: Any, **__: Any) -> Any:
        commands.append(command)
        raise RunFailedError("not started")

    monkeypatch.setattr(fleet, "execute", started)
    asked = read_options("fleet", fleet.FleetOptions, words)
    fleet.attempt(fleet.Case("x", 0.0, 1, 1, fleet.PLAIN), asked, 1, Path("/tmp/none"), Path("x"))
    assert [("--exact" in command) for command in commands] == [wanted] * 2


def test_a_missing_package_is_one_line() -> None:
    """Without the extra: "bench" says what to install."""
    program = (
        "import runpy, sys; sys.modules['httpx'] = None; runpy.run_module('benchmarks.chaos', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == "benchmarks: the package httpx is missing: pip install -e '.[bench]'\n"


@pytest.mark.parametrize("name", ["commit", "cpu"])
def test_figures_of_another_program_or_machine_are_not_continued(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They would have this one's commit and date."""
    path = tmp_path / "exactness.json"
    words = ["--dtypes", "float32", "--prompts", "0", "--rounds", "0", "--output", str(path), "--json"]
    assert exactness.main(words) == 0 == exactness.main(words)
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: "another"}))
    capsys.readouterr()
    assert exactness.main(words) == 2
    assert f"exactness.json is of another {name}; give another --output" in capsys.readouterr().err
