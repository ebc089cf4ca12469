"""What all benchmarks share: the runner, the race and the counted steps."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console
from transformers import PreTrainedModel

from benchmarks.common import DataOptions, Options, attempt, read_options, run_main
from benchmarks.decode import run_race
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


def test_contestants_take_turns_and_the_first_prompt_does_not_count() -> None:
    log: list[str] = []

    def contestant(name: str, ids: list[int]) -> Callable[..., tuple[list[int], int]]:
        return lambda prompt, params: (log.append(name) or ids, 3)  # type: ignore[func-returns-value]

    tallies = run_race({"a": contestant("a", [1, 2]), "b": contestant("b", [1, 3])}, [[7], [8]], [SamplingParams()] * 2)
    assert log == ["a", "b", "b", "a"], "the order changes from prompt to prompt"
    assert (tallies["a"].num_tokens, tallies["a"].num_steps, len(tallies["a"].seconds)) == (2, 3, 1)
    assert (tallies["a"].num_different, tallies["b"].num_different) == (0, 2)


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


@pytest.mark.parametrize("exact", [[], ["--exact"]], ids=["as usual", "exact"])
@pytest.mark.slow(first=1)
def test_exact_mode_is_a_flag_of_every_command_that_decodes(exact: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag that is parsed and lost on its way would pass for evidence of exact mode."""
    wanted = bool(exact)
    assert parse_generate(["--prompt", "x", *exact]).options.exact is wanted
    assert parse_serve(exact).engine.exact is wanted
    words = ["--data", "file", "--device", "cpu", *exact]
    options = read_options("made", DataOptions, words)
    assert load_engine(options, plain()).model.exact is wanted
    assert engines_over(load_model(options), {"one": plain()})["one"].model.exact is wanted


def test_a_missing_package_is_one_line() -> None:
    """Without the extra: "bench" says what to install."""
    program = (
        "import runpy, sys; sys.modules['httpx'] = None; runpy.run_module('benchmarks.chaos', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == "benchmarks: the package httpx is missing: pip install -e '.[bench]'\n"
