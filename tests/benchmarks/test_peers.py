"""lpr beside its peers (benchmarks.peers), without any peer."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import RESULTS, read_json
from benchmarks.peers import arctic, lade, own, pia, process
from benchmarks.peers.__main__ import BEGIN, DOCS, END, PEERS, PeersOptions, found_before, keep, main
from benchmarks.peers.arctic import follow
from benchmarks.peers.environment import copy, installed, older, weights_for
from benchmarks.peers.process import PeerError, Process
from benchmarks.peers.rounds import Outputs, Rounds, Task, row_of, software_of
from benchmarks.peers.worker import cut
from benchmarks.report.parts import markdown, renew
from benchmarks.report.tables import peers_table
from lpr import InputError

FACTS = {"model": "m", "weights": "w", "data": "d.jsonl", "chat_template": True, "max_new_tokens": 4}
TASK = Task(prompts=[[4, 5], [6]], max_new_tokens=4, stop_ids=[0], separators=[9], facts=FACTS)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["run"], "run needs --work"),
        (["install", "--work", "here", "--source", "lade"], "--source lade: PEER=DIR is wanted"),
        (["install", "--work", "here", "--only", "vllm"], "no such peer: vllm; there are lpr"),
        (["run", "--work", "here"], "not installed in here: lade, pia, arctic"),
        (["run", "--work", "here", "--only", "lpr", "--variants", "quick"], "no such variant: 'quick'"),
        (["run", "--work", "here", "--only", "lpr"], "run needs --model"),
        (["run", "--work", "here", "--only", "lpr", "--model", "m", "--data", "d"], "m is no model folder"),
        (["run", "--work", "here", "--only", "lpr", "--model", "m", "--data", "d", "--prompts", "0"], "nothing to"),
        (["table", "--output", "missing.json"], "cannot read missing.json"),
        (["guess"], "guess"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert complaint in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_every_peer_is_pinned_and_says_what_is_done_otherwise() -> None:
    said = Path(own.__file__).with_name("README.md").read_text(encoding="utf-8")
    for peer in PEERS.values():
        assert peer.variants and peer.why
        if peer.repository:
            assert re.fullmatch("[0-9a-f]{40}", peer.commit) and peer.requirements
            assert f"## {peer.name}: {peer.repository}, commit {peer.commit}\n\n* " in said


def test_a_checkout_must_be_the_peers(tmp_path: Path) -> None:
    (tmp_path / "lade").mkdir()
    (tmp_path / "lade" / "__init__.py").write_text("")
    copy(lade.PEER, tmp_path, tmp_path / "packages")
    assert (tmp_path / "packages" / "lade" / "__init__.py").exists()
    with pytest.raises(InputError, match="no checkout of https://github.com/alipay/.*no folder lookahead/lookahead"):
        copy(pia.PEER, tmp_path, tmp_path / "others")


def test_an_installation_is_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "peers.json"
    assert main(["install", "--work", str(tmp_path), "--only", "lpr", "--output", str(output)]) == 0
    assert capsys.readouterr().out == "" and not output.exists()


def test_an_installation_counts_for_its_own_recipe_only(tmp_path: Path) -> None:
    mark = tmp_path / "lade" / "installed.json"
    mark.parent.mkdir()
    mark.write_text(json.dumps({"identity": lade.PEER.identity, "commit": "c"}))
    assert installed(lade.PEER, tmp_path) and software_of(lade.PEER, tmp_path) == "c"
    mark.write_text(json.dumps({"identity": pia.PEER.identity, "commit": "c"}))
    assert installed(lade.PEER, tmp_path) is None


def test_the_older_form_of_a_configuration(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "dtype": "bfloat16",
        "rope_parameters": {"rope_theta": 1e5, "rope_type": "default"},
    }
    assert older(config) == {"model_type": "llama", "rope_theta": 1e5}
    made = older(config, "mistral")
    assert made["model_type"] == "mistral" and made["sliding_window"] is None
    with pytest.raises(InputError, match="llama3"):
        older({"rope_parameters": {"rope_type": "llama3"}})
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    (model / "model.safetensors").write_bytes(b"weights")
    for _ in range(2):  # a second run finds the first one's
        folder = weights_for(pia.PEER, model, tmp_path)
    assert read_json(folder / "config.json")["architectures"] == ["MistralForCausalLM"]
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert weights_for(own.PEER, model, tmp_path) == model


def test_a_replayed_draft_is_followed_along_the_text() -> None:
    tokens, parents = [5, 6, 7, 6], [-1, 0, 1, -1]
    assert follow(tokens, parents, [5, 6, 8]) == [5, 6]
    assert follow(tokens, parents, [6, 7]) == [6], "the second 7 is below another 6"
    assert follow(tokens, parents, [8]) == [] and follow([], [], [1]) == []


def test_outputs_are_cut_alike() -> None:
    request = {"max_new_tokens": 4, "stop_ids": [0]}
    assert cut([1, 2, 3, 4, 5], request) == [1, 2, 3, 4]
    assert cut([1, 0, 3, 0], request) == [1, 0], "the end token is part of it"


def fake(folder: str, log: Path) -> Process:
    return Process(Path(sys.executable), "tests.fakes.fake_peer", Path(folder), 0, log)


def test_a_process_answers_fails_dies_or_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log.txt"
    with fake("good", log) as peer:
        answer = peer.complete(TASK.request(0, "v", 0.0, 1))
        assert answer["ids"] == [4, 5, 7, 0] and answer["steps"] == 3 and peer.software["python"]
        with pytest.raises(PeerError, match="RuntimeError: out of luck"):
            peer.complete({"prompt": [1]})
        assert peer.complete(TASK.request(1, "v", 0.0, 1))["ids"] == [6, 7, 0], "a failure ends a request only"
        with pytest.raises(PeerError, match="its process ended: gone"):
            peer.complete({"prompt": [3]})
        with pytest.raises(PeerError, match="ended"):
            peer.complete({"prompt": [4]})
    with pytest.raises(PeerError, match="ended: ValueError: no such model"):
        fake("broken", log)
    monkeypatch.setattr(process, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(process, "STOP_SECONDS", 0.1)
    with fake("good", log) as peer, pytest.raises(PeerError, match="no answer within 0.1 s"):
        peer.complete({"prompt": [2]})


class Scripted:
    """A process that takes two steps for each output: that of `ids` for every prompt."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids, self.requests = list(ids), list[dict[str, Any]]()

    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(request)
        return {"ids": self.ids, "steps": 2, "seconds": 0.1}

    def close(self) -> None:
        pass


def rounds_of(work: Path, processes: dict[str, Any]) -> Rounds:
    return Rounds(work, work, TASK, processes=processes)


def test_rounds_are_kept_and_replays_are_given_the_plain_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.peers.rounds.software_of", lambda peer, work: f"{peer.name} 1")
    processes = {"lpr": Scripted([1, 2, 3]), "lade": Scripted([1, 2, 4]), "arctic": Scripted([1, 2, 3])}
    rounds = rounds_of(tmp_path, processes)
    plain = row_of(rounds, own.PEER, own.PLAIN, 0.8, [1, 2])
    assert plain["tokens_per_step"] == 1.5 and plain["by_seed"] == [1.5, 1.5]
    assert (plain["outputs"], plain["different"]) == (4, 0)
    assert [each["fresh"] for each in processes["lpr"].requests] == [True, False] * 2
    replayed = row_of(rounds, arctic.PEER, "suffix decoding", 0.8, [1])
    assert "outputs" not in replayed and processes["arctic"].requests[0]["text"] == [1, 2, 3]
    greedy = row_of(rounds, lade.PEER, "W15 N5 G15", 0.0, [1])
    assert (greedy["outputs"], greedy["different"]) == (2, 2)
    assert "different" not in row_of(rounds, lade.PEER, "W15 N5 G15", 0.8, [1]), "other random numbers"
    again: Outputs = rounds_of(tmp_path, {}).outputs(own.PEER, own.PLAIN, 0.8, 2)
    assert [each["ids"] for each in again] == [[1, 2, 3]] * 2
    monkeypatch.setattr("benchmarks.peers.rounds.software_of", lambda peer, work: f"{peer.name} 2")
    newer = {"lpr": Scripted([9])}
    assert rounds_of(tmp_path, newer).outputs(own.PEER, own.PLAIN, 0.8, 2)[0]["ids"] == [9], "its code has changed"


def test_a_peer_that_fails_has_a_row_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Rounds, peer: Any) -> Any:
        raise PeerError("no answer within 900 s")

    monkeypatch.setattr(Rounds, "process", fail)
    row = row_of(rounds_of(tmp_path, {}), lade.PEER, "W15 N5 G15", 0.0, [1])
    assert row["failed"] == "no answer within 900 s" and "tokens_per_step" not in row


def result() -> dict[str, Any]:
    def row(peer: str, variant: str, temperature: float, *by_seed: float, **more: int) -> dict[str, Any]:
        mean = sum(by_seed) / len(by_seed)
        return {"peer": peer, "variant": variant, "temperature": temperature, "tokens_per_step": mean,
                "by_seed": list(by_seed), "seeds": list(range(len(by_seed))), **more}  # fmt: skip

    return {
        "benchmark": "peers", **FACTS, "first_prompt": 60, "num_prompts": 8,
        "rows": [
            row("lpr", "automatic", 0.0, 5.5, outputs=8, different=1), row("lpr", "automatic", 0.8, 2.5, 3.5),
            row("pia", "64/12", 0.0, 1.6, outputs=8, different=0),
            {"peer": "lade", "variant": "W15 N5 G15", "temperature": 0.0, "failed": "it died"},
        ],
        "wall_clock": [
            {"peer": "lpr", "variant": "automatic", "prompt": at, "seconds": 2.0 * at, "base_seconds": 8.0 * at}
            for at in (68, 69)
        ],
    }  # fmt: skip


def test_the_table_has_a_line_per_variant() -> None:
    made = peers_table(result())
    assert made.columns == ["", "greedy", "temperature 0.8", "ids as plain decoding", "speed over generate, of prompts"]
    assert made.rows == [
        ["lpr, automatic", "5.50", "3.00 (2.50 to 3.50, 2 seeds)", "7 of 8", "4.00x of 2"],
        ["pia, 64/12", "1.60", "", "8 of 8", ""],
    ]


def test_entries_are_renewed_one_by_one(tmp_path: Path) -> None:
    same = {"variant": "v", "temperature": 0.0}
    rows = [{"peer": "a", **same, "value": 1}, {"peer": "b", **same, "value": 2}]
    keep(rows, {"peer": "a", **same, "value": 3})
    keep(rows, {"peer": "a", **same, "variant": "w", "value": 4})
    assert [row["value"] for row in rows] == [3, 2, 4]
    file = tmp_path / "peers.json"
    options = PeersOptions(output=str(file), what="run")
    assert found_before(options, FACTS)["rows"] == []
    file.write_text(json.dumps({**result(), "date": "earlier"}))
    assert len(found_before(options, FACTS)["rows"]) == 4
    with pytest.raises(InputError, match="is of another task"):
        found_before(options, {**FACTS, "weights": "others"})
    with pytest.raises(InputError, match="'first_prompt': 60"):
        found_before(replace(options, skip=68), FACTS)


@pytest.mark.parametrize("content", ["{}", "[]", '{"rows": []}'])
def test_a_file_that_is_no_result_is_one_line(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "peers.json"
    file.write_text(content)
    assert main(["table", "--output", str(file)]) == 2
    err = capsys.readouterr().err
    assert err == f"benchmarks.peers: {file} is no result of benchmarks.peers run\n"


def test_the_page_says_what_was_measured(tmp_path: Path) -> None:
    measured = read_json(RESULTS / "peers.json")
    assert markdown(peers_table(measured)) in DOCS.read_text(encoding="utf-8"), "python -m benchmarks.peers table"
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    renew(page, (BEGIN, END), [peers_table(result())])
    assert (
        "old" not in page.read_text() and page.read_text().startswith("before") and page.read_text().endswith("after\n")
    )
    page.write_text("no marks")
    with pytest.raises(InputError, match="no place for the table"):
        renew(page, (BEGIN, END), [peers_table(result())])
