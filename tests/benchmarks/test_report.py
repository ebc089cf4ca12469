"""The report: every section, what is missing or failed, and a page that needs nothing but itself."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from html import unescape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report.__main__ import main

pytest.importorskip("matplotlib", reason="the pictures need matplotlib: pip install 'lpr[bench]'")

from PIL import Image

from benchmarks.report import plots
from benchmarks.report.page import SECTIONS, Report
from benchmarks.report.parts import Bars, Lines, failures

Json = dict[str, Any]
CIRCUMSTANCES = {
    "date": "2031-02-03 04:05 UTC", "commit": "abc1234", "command": "python -m benchmarks.made --up", "cpu": "3 x Quux",
    "gpu": "Frobnicator 9", "threads": 5, "python": "3.11.9", "torch": "2.99", "transformers": "5.99",
}  # fmt: skip
RANKS = {1: 2.0, 2: 2.5, 4: 3.0, 8: 3.5}


def synthetic() -> dict[str, Json]:
    """A small result of every benchmark with a picture, and of others."""
    load = {"dtype": "float32", "data": "d", "temperature": 0.0, "clients": 4, "prompts": 2, "pass": "cold"}
    found: dict[str, Json] = {
        "strong_scaling": {"data": "d.jsonl", "num_prompts": 3, "max_new_tokens": 16, "runs": [
            {"temperature": t, "budget_per_rank": 32, "num_ranks": n, "tokens_per_step": value, "nodes_per_step": 30.0,
             "nodes_of_largest_shard": 31.0, "evaluated_redundantly": 0.1, "payload_bytes_per_rank": 2048}
            for t in (0.0, 0.8) for n, value in RANKS.items()]},
        "decode": {"data": "d.jsonl", "num_prompts": 3, "max_new_tokens": 16, "device": "cpu", "dtype": "torch.float32",
                   "results": [{"name": name, "median_seconds": 1.0, "speedup_over_transformers": 1.25,
                                "speedup_over_autoregressive": 1.5, "tokens_per_step": None,
                                "prompts_with_other_tokens": 0} for name in ("transformers greedy", "lpr auto")]},
        "replay": {"note": "a remark", "runs": [
            {"traces": "t.jsonl", "warm": warm, "num_warm_tokens": tokens, "tokens_per_step": 4.5, "budget": 64,
             "num_tasks": 2, "drafted_per_step": 60.0, "draft_ms_per_step": 0.2, "draft_ms_p99": 0.4,
             "limit_tokens_per_step": 9.25, "share_of_limit": 0.5}
            for warm, tokens in ((None, 0), ("t.jsonl", 9))]},
        "servers": {"model": "m", "max_new_tokens": 8, "runs": [
            {**load, "name": name, "tokens_per_second": speed, "first_token_ms": first}
            for name, speed, first in (("lpr", 30.0, 20.0), ("vllm-plain", 20.0, 40.0), ("llama-plain", 10.0, 25.0))]},
        "gpu_check": {
            "t": {"nodes": [1, 2, 4], "rows": [{"batch": 1, "kv": 256, "ms": [3.0, 3.1, 3.5]}]}, "sections": {
                "exact": {"dtype": "torch.bfloat16", "usual": {"window": {
                    "outputs_that_differ": 5, "prompts": 8, "logits_that_differ": 711, "logits_compared": 763}}},
                "end_to_end": {"lpr auto": {"tokens_per_s": 7748.4, "tokens_per_step": 7.73}, "seconds": 2.0}}},
        "chaos": {"kills": 17, "leaks": {"ports": 0}},
    }  # fmt: skip
    return {name: {"benchmark": name, **facts, **CIRCUMSTANCES} for name, facts in found.items()}


def write(folder: Path, results: dict[str, Json]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, facts in results.items():
        (folder / f"{name}.json").write_text(json.dumps(facts), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of all synthetic results, small pictures, made by the command."""
    folder = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "DPI", 40)
        assert main(["--results", str(write(folder / "in", synthetic())), "--output", str(folder / "out")]) == 0
    return folder / "out"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Report]:
    """A report of some results, its pictures left out."""
    monkeypatch.setattr("benchmarks.report.page.png", lambda panels: b"")
    return lambda **results: Report({f"{name}.json": facts for name, facts in results.items()})


def text_of(html: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())


def test_every_section_is_there_with_its_numbers(made: Path) -> None:
    html = (made / "index.html").read_text()
    for name in SECTIONS:
        assert f'<section id="{name}">' in html and f'href="#{name}"' in html
    text = text_of(html)
    assert "cannot be shown" not in text and "failed" not in text
    for number in ("1.75x", "3.50", "4.50", "9.25", "1.25x", "711 of 763", "7748", "7.73", "1.50x", "0.80x"):
        assert number in text, number
    for fact in ("abc1234", "2031-02-03 04:05 UTC", "Frobnicator 9", "3 x Quux", "python -m benchmarks.made --up"):
        assert text.count(fact) >= 2 * len(synthetic()), f"{fact}: below the pictures and in the table of files"


def test_the_page_needs_nothing_but_itself(made: Path) -> None:
    html = (made / "index.html").read_text()
    links = re.findall(r"""(?:src|srcset|href|action|data)\s*=\s*["']?([^"'>\s]+)""", html)
    assert links and all(link.startswith(("data:image/png;base64,", "#")) for link in links)
    assert not re.search(r"https?://|<script|@import|url\(", html)


def test_pictures_are_valid_and_the_same_as_in_the_page(made: Path) -> None:
    files = sorted(made.glob("*.png"))
    assert len(files) == 5
    html = (made / "index.html").read_text()
    for file in files:
        with Image.open(io.BytesIO(file.read_bytes())) as picture:
            picture.load()
            assert picture.format == "PNG" and len(picture.convert("L").getcolors()) > 8
    assert html.count("data:image/png") == len(files)


def test_missing_results_are_named_with_their_command(report: Callable[..., Report]) -> None:
    made = report(replay=synthetic()["replay"])
    missing = {name: section.command(name) for name, section in SECTIONS.items() if name != "replay"}
    assert made.notes == [f"{name}.json is missing; it is made by: {how}" for name, how in missing.items()]
    text = text_of(made.html("in"))
    assert all(f"{name}.json is missing" in text and how in text for name, how in missing.items())
    assert "replay.json is missing" not in text


def test_commands_name_programs_that_exist() -> None:
    assert not {name for name in SECTIONS if find_spec(f"benchmarks.{name}") is None}


def test_failed_entries_are_shown_as_failed_beside_the_others(report: Callable[..., Report]) -> None:
    results = synthetic()
    results["decode"]["results"].append({"name": "lpr trie 16", "failed": "OutOfMemoryError: <no> room"})
    results["host"] = {"benchmark": "host", "failed": "killed after 600 s", **CIRCUMSTANCES}
    for run in results["strong_scaling"]["runs"]:
        run["failed"] = "a rank was lost"
    made = report(**results)
    assert "failed: decode.json, lpr trie 16: OutOfMemoryError: <no> room" in made.notes
    assert "failed: host.json: killed after 600 s" in made.notes
    html = made.html("in")
    assert "<no>" not in html and "OutOfMemoryError: &lt;no&gt; room" in html
    assert "lpr auto" in html and "killed after 600 s" in html
    assert not any("cannot be shown" in note for note in made.notes), "what failed is said once, as failed"


def test_failures_are_found_at_any_depth() -> None:
    rows = [{"heads": "7B", "nodes": 1, "triton": {"us": 3}, "sdpa": {"failed": "no"}}]
    assert list(failures({"benchmark": "attention", "rows": rows})) == [("7B sdpa", "no")]
    assert list(failures(synthetic())) == []


def test_a_result_of_an_older_form_is_named_with_its_own_command(report: Callable[..., Report]) -> None:
    results = synthetic()
    for run in results["replay"]["runs"]:
        del run["budget"]
    note = "replay.json cannot be shown: it lacks 'budget'; it is made by: python -m benchmarks.made --up"
    assert note in report(**results).notes


def test_results_without_a_section_are_tables(report: Callable[..., Report]) -> None:
    strange = {
        "benchmark": "strange",
        "size": 12345.0,
        "runs": [{"a": 1, "b": {"c": 2.5}}, {"b": [[8]]}],
        **CIRCUMSTANCES,
    }
    text = text_of(report(strange=strange).html("in"))
    assert "Further results" in text and "12,345" in text and "c 2.5" in text and "1 entries, see the file" in text
    assert text.count("Frobnicator 9") == 2


def test_pictures_of_two_results_of_one_benchmark_have_names_of_their_own(report: Callable[..., Report]) -> None:
    again = synthetic()["strong_scaling"]
    again["runs"] = [{**run, "tokens_per_step": run["tokens_per_step"] + 1} for run in again["runs"]]
    names = set(report(strong_scaling=synthetic()["strong_scaling"], strong_scaling_gpu=again).pictures)
    assert {"strong_scaling_0.png", "strong_scaling_gpu_0.png"} <= names


def test_the_same_panels_give_the_same_bytes() -> None:
    panels = [Lines("l", "x", "y", {"a": [(1, 2.0), (2, 3.0)], "none": []}), Bars("b", "x", [("n", 1.5, "1.5")])]
    assert plots.png(panels) == plots.png(panels) != plots.png(panels[:1])


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: None, "has no result files"),
        (lambda folder: (folder / "a.json").write_text("{"), "cannot read"),
        (lambda folder: (folder / "a.json").write_bytes(b"\xff{}"), "cannot read"),
        (lambda folder: (folder / "a.json").write_text("[]"), "a JSON object was expected"),
    ],
)
def test_bad_input_is_one_line(
    prepare: Callable[[Path], Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(tmp_path)
    assert main(["--results", str(tmp_path), "--output", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and message in err and err.startswith("benchmarks.report: ")
    assert not (tmp_path / "out").exists()


def test_an_output_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.report.page.png", lambda panels: b"")
    (tmp_path / "out").write_text("a file")
    assert main(["--results", str(write(tmp_path / "in", synthetic())), "--output", str(tmp_path / "out")]) == 2
    assert "cannot write to" in capsys.readouterr().err.splitlines()[-1]
