"""A trace tells what the engine did, in one page that asks nothing of a network."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from transformers import PreTrainedModel

import lpr.cli.generate
import lpr.engine.step
from lpr import Completion, DecodeConfig, Engine, SamplingParams
from lpr.cli.generate import main
from lpr.cli.trace import PLACEHOLDER, Recorder, page, trace_data
from lpr.engine.hooks import StepHooks
from tests.fakes.prompts import PROMPTS
from tests.fakes.worlds import ThreadComm, ThreadWorld, run_ranks

DECODE = DecodeConfig(window_size=4, ngram_size=3, guess_set_size=4, trie_nodes=12, max_batch_size=2)
PARAMS = SamplingParams(max_new_tokens=40)


class Page(HTMLParser):
    """The data of a page, and every address that it could load something from."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.tags: list[str] = []
        self.feed(html)
        self.data = json.loads(next(text for attributes, text in self.scripts if attributes.get("id") == "data"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [f"{name}={value}" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_data(self, text: str) -> None:
        if self.scripts and not self.scripts[-1][1]:
            self.scripts[-1] = (self.scripts[-1][0], text)


def record(engine: Engine, prompts: list[list[int]], max_steps: int = 500) -> tuple[Recorder, list[Completion]]:
    recorder = engine.hooks = Recorder(max_steps)
    return recorder, engine.generate(prompts, PARAMS)


def test_the_data_is_what_the_engine_did(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = lpr.engine.step.end_step

    def watched(*args):
        result = original(*args)
        seen.extend(outcome.concluded for outcome in result.outcomes)
        return result

    monkeypatch.setattr("lpr.engine.replica.end_step", watched)
    engine = Engine.from_model(llama, decode=DECODE)
    recorder, done = record(engine, [[3, 4, 5, 6], [7, 8]])
    data = json.loads(json.dumps(trace_data(recorder, engine)))
    assert [request["steps"].__len__() for request in data["requests"]] == [each.stats.num_steps for each in done]
    steps = [step for request in data["requests"] for step in request["steps"]]
    assert sum(step["batch"] for step in steps[: done[0].stats.num_steps]) > done[0].stats.num_steps, "a shared batch"
    for concluded in seen:
        expected = (concluded.tree.tokens, concluded.tree.parents, concluded.tree.sources, concluded.path)
        step = next(s for s in steps if (s["tokens"], s["parents"], s["sources"], s["path"]) == expected)
        assert step["next"] == concluded.next_tokens
        assert step["emitted"] == concluded.emitted[: len(step["emitted"])]
        assert step["owners"] == [0] * len(concluded.tree) and step["ancestors"] == [[]]
        assert list(step["ms"]) == ["draft", "forward", "gather", "commit"] and min(step["ms"].values()) >= 0
        assert len(step["probabilities"]) == len(concluded.tree) and step["probabilities"][0] == 1
        for parent, node in zip(step["path"], step["path"][1:], strict=False):
            assert step["next"][parent] == step["tokens"][node], "accepted is what the model says"
    assert len(seen) == len(steps)
    for request, completion in zip(data["requests"], done, strict=True):
        assert [token for step in request["steps"] for token in step["emitted"]] == completion.token_ids
        assert [token for token, _ in request["output"]] == completion.token_ids
        assert request["finish_reason"] == "length" and request["prompt"] == " ".join(map(str, completion.prompt))
    accepted = [step["sources"][node] for step in steps for node in step["path"][1:]]
    counted = {data["sources"][source]: accepted.count(source) for source in set(accepted)}
    for name, count in counted.items():
        assert count == sum(each.stats.sources[name].accepted for each in done if name in each.stats.sources)


def test_every_rank_knows_what_all_ranks_evaluated(llama: PreTrainedModel) -> None:
    def program(comm: ThreadComm) -> dict:
        engine = Engine.from_model(llama, decode=DECODE, comm=comm)
        recorder, _ = record(engine, [[3, 4, 5, 6]])
        data = trace_data(recorder, engine)
        for step in data["requests"][0]["steps"]:
            del step["ms"]  # each rank's own
        return data

    ranks = run_ranks(ThreadWorld(3), program)
    assert ranks[0] == ranks[1] == ranks[2] and ranks[0]["ranks"] == 3
    shared = 0
    for step in ranks[0]["requests"][0]["steps"]:
        for rank in range(3):
            owned = [node for node, owner in enumerate(step["owners"]) if owner == rank]
            ancestors = step["ancestors"][rank]
            assert not set(owned) & set(ancestors) and len(owned) + len(ancestors) == step["evaluated"][rank]
            evaluated = {*owned, *ancestors}
            assert 0 in evaluated and all(step["parents"][node] in evaluated for node in evaluated if node)
            shared += len(ancestors)
    assert shared > 0


def test_recording_is_bounded_and_changes_nothing(llama: PreTrainedModel) -> None:
    engine = Engine.from_model(llama, decode=DECODE)
    expected = engine.generate([[3, 4, 5, 6], [7, 8]], PARAMS)
    engine.configure(DECODE)
    recorder, done = record(engine, [[3, 4, 5, 6], [7, 8]], max_steps=7)
    assert [each.token_ids for each in done] == [each.token_ids for each in expected]
    assert [each.stats for each in done] == [each.stats for each in expected]
    data = trace_data(recorder, engine)
    steps = sum(len(request["steps"]) for request in data["requests"])
    assert steps == 7 and data["num_left_out"] == sum(each.stats.num_steps for each in done) - 7 > 0
    assert [len(request["output"]) for request in data["requests"]] == [
        sum(len(step["emitted"]) for step in request["steps"]) for request in data["requests"]]  # fmt: skip


def test_the_page_holds_any_text_and_nothing_from_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nasty = '</script><script>alert("x")</script><!-- <script> \u2028 & é 漢 {{ trace }}'
    source, path = tmp_path / "in.jsonl", tmp_path / "deep" / "trace.html"
    source.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in [nasty, PROMPTS[0]]))
    arguments = ["--prompts", str(source), "--output", str(tmp_path / "out.jsonl"), "--trace", str(path)]
    assert main([*arguments, "--max-new-tokens", "16", "--window-size", "3", "--trie-nodes", "8"]) == 0
    html = path.read_text()
    shown = Page(html)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().split("\n")[:-1]]
    for request, row in zip(shown.data["requests"], rows, strict=True):
        assert request["prompt"] == row["prompt"]
        assert "".join(text for _, text in request["output"]) == row["text"]
        assert [token for token, _ in request["output"]] == row["token_ids"]
    assert len(shown.scripts) == 2 and shown.addresses == []
    template = html.replace(json.dumps(shown.data).replace("<", "\\u003c"), "")
    assert len(template) < len(html), "the data is embedded as it was made"
    for word in ("http:", "https:", "url(", "@import", "import(", "fetch(", "XMLHttpRequest", "WebSocket", "innerHTML",
                 "insertAdjacentHTML", "document.write", "eval("):  # fmt: skip
        assert word not in template, word
    assert "default-src 'none'" in template, "and a browser would refuse to load anything"
    assert set(shown.tags) & {"link", "img", "iframe", "object", "embed", "base"} == set()
    assert not re.search(r"[^\x00-\x7f]", html[html.index('id="data"') : html.index("</script>")])


def test_one_prompt_shows_the_lookahead_run_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.html"
    assert main(["--prompt", PROMPTS[0], "--max-new-tokens", "16", "--trace", str(path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    (request,) = Page(path.read_text()).data["requests"]
    assert len(request["steps"]) == result["runs"][0]["num_steps"]
    assert [token for token, _ in request["output"]] == result["token_ids"]
    assert (
        main(
            [
                "--prompt",
                "a",
                "--max-new-tokens",
                "24",
                "--trie-nodes",
                "4",
                "--window-size",
                "0",
                "--trace",
                str(path),
                "--trace-steps",
                "2",
            ]
        )
        == 0
    )
    shown = Page(path.read_text()).data
    assert len(shown["requests"][0]["steps"]) == 2 and shown["num_left_out"] > 0


def test_a_run_that_is_interrupted_still_shows_its_steps(tmp_path: Path, llama: PreTrainedModel) -> None:
    engine = Engine.from_model(llama, decode=DECODE)
    with pytest.raises(KeyboardInterrupt), lpr.cli.trace.traced(tmp_path / "t.html", 9, engine):
        engine.submit([1, 2, 3], PARAMS)
        engine.step()
        raise KeyboardInterrupt
    shown = Page((tmp_path / "t.html").read_text()).data
    assert len(shown["requests"][0]["steps"]) == 1 and shown["requests"][0]["finish_reason"] is None
    assert type(engine.hooks) is StepHooks
    with lpr.cli.trace.traced(tmp_path / "none.html", 9, Engine.from_model(llama)):
        pass
    assert Page((tmp_path / "none.html").read_text()).data["requests"] == []


def test_bad_input_stops_the_command_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lpr.cli.generate, "Engine", None)
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    files = ["--prompts", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    for arguments, message in [
        (["--trace", "/proc/none/t.html"], "cannot write a trace to /proc/none/t.html"),
        (["--trace", str(tmp_path)], "it exists and is no file"),
        (["--trace", str(tmp_path / "t.html"), "--trace-steps", "0"], "--trace-steps 0 must be at least 1"),
        ([*files, "--trace", files[3]], "--trace and --output are the same file"),
        ([*files, "--trace", files[1]], "--trace and --prompts are the same file"),
    ]:
        assert main(arguments) == 2
        out, err = capsys.readouterr()
        assert message in err and out == "" and len(err.splitlines()) == 1
    assert sorted(each.name for each in tmp_path.iterdir()) == ["in.jsonl"]


def test_a_page_without_requests_is_still_a_page(llama: PreTrainedModel) -> None:
    html = page(trace_data(Recorder(), Engine.from_model(llama)))
    assert PLACEHOLDER not in html and Page(html).data["requests"] == []
