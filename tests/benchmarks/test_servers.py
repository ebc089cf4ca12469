"""The comparison of servers, against servers that answer without a model."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks.processes.services import Server, ServerEndedError, free_port, started
from benchmarks.report.parts import renew
from benchmarks.report.tables import summary
from benchmarks.servers.__main__ import MARKS, agreement, main
from benchmarks.servers.configurations import CONFIGURATIONS, Places, command_of
from lpr import InputError, bundled_model

TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


class Fake(BaseHTTPRequestHandler):
    """Streams a text that depends on the prompt's length, two tokens an event."""

    word = "a"
    broken = False

    def do_GET(self) -> None:
        self._send(b'{"data": [{"id": "fake"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["model"] == "fake" and isinstance(body["prompt"][0], int)
        words = [self.word * (len(body["prompt"]) % 3 + 1)] * (body["max_tokens"] // 2)
        events: list[dict[str, Any]] = [{"choices": [{"text": ""}]}, *({"choices": [{"text": word}]} for word in words)]
        events.append({"choices": [], "usage": {"completion_tokens": 2 * len(words)}})
        if self.broken:
            events[2:] = [{"error": {"message": "out of luck"}}]
        self._send(b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in events) + b"data: [DONE]\n\n")

    def _send(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def fake(**features: Any) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Fake", (Fake,), features))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer that has a chat template; nobody reads weights."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("model")
    tokenizer = AutoTokenizer.from_pretrained(bundled_model())
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "set.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"def f{'x' * n}(a): " * (n + 1)}) + "\n" for n in range(12)))
    return path


def run(model: Path, data: Path, output: Path, *more: str) -> int:
    words = ["--model", str(model), "--sets", str(data), "--clients", "1", "2", "--prompts", "3", "--tokens", "8"]
    return main([*words, "--dtypes", "float32", "--output", str(output), "--json", *more])


def test_each_load_is_put_to_every_server_in_turn(model: Path, data: Path, tmp_path: Path) -> None:
    output = tmp_path / "servers.json"
    with fake() as one, fake() as two, fake(word="b") as three:
        urls = [f"lpr-plain={one}", f"lpr={two}", f"vllm-plain={three}"]
        assert run(model, data, output, "--urls", *urls) == 0
    found = json.loads(output.read_text())
    runs = found["runs"]
    assert len(runs) == 3 * 2 * 2 * 2  # servers, temperatures, clients, passes
    assert {run["tokens"] for run in runs} == {24}
    assert all(run["tokens_per_second"] > 0 and run["first_token_ms"] > 0 for run in runs)
    equal = {run["name"]: run.get("equal_texts") for run in runs}
    assert equal == {"lpr-plain": None, "lpr": 3, "vllm-plain": 0}
    firsts = [run["name"] for run in runs[::6]]
    assert len(set(firsts)) == 3, "another server begins each load"
    fastest, first, over_plain, plain = short = summary(found)
    assert fastest.columns == ["", "1 client, cold", "1 client, warm", "2 clients, cold", "2 clients, warm"]
    assert [row[0] for row in fastest.rows] == ["set, greedy", "set, temperature 0.8"]
    assert fastest.title.startswith("float32, ") and "beside vllm-plain: tokens per second" in fastest.title
    by_load = {(run["temperature"], run["clients"], run["pass"], run["name"]): run["tokens_per_second"] for run in runs}
    (ours,), (theirs,) = (
        [run["first_token_ms"] for run in runs if run["name"] == name and run["case"] == runs[0]["case"]]
        for name in ("lpr", "vllm-plain")
    )
    assert first.rows[0][1] == f"{ours / theirs:.2f}x"
    for table, over, under in ((fastest, "lpr", "vllm-plain"), (over_plain, "lpr", "lpr-plain")):
        assert table.rows[1][3] == f"{by_load[0.8, 2, 'cold', over] / by_load[0.8, 2, 'cold', under]:.2f}x"
    assert plain.rows[0][2] == f"{by_load[0, 1, 'warm', 'lpr-plain'] / by_load[0, 1, 'warm', 'vllm-plain']:.2f}x"
    page = tmp_path / "page.md"
    page.write_text(f"before\n{MARKS[0]}\nformer table\n{MARKS[1]}\nafter\n")
    renew(page, MARKS, short)
    assert "| set, temperature 0.8 | " in page.read_text() and "former" not in page.read_text()


def test_prompts_are_asked_once_where_that_is_asked_for(model: Path, data: Path, tmp_path: Path) -> None:
    output = tmp_path / "servers.json"
    with fake() as one:
        assert run(model, data, output, "--urls", f"lpr={one}", "--passes", "cold") == 0
    assert {run["pass"] for run in json.loads(output.read_text())["runs"]} == {"cold"}


def test_a_server_that_fails_is_a_row_that_says_so(model: Path, data: Path, tmp_path: Path) -> None:
    output = tmp_path / "servers.json"
    short = ("--temperatures", "0", "--clients", "1")
    with fake() as good, fake(broken=True) as bad:
        assert run(model, data, output, "--urls", f"lpr={good}", f"vllm-plain={bad}", *short) == 1
        failed = {run["name"]: run.get("failed") for run in json.loads(output.read_text())["runs"]}
        assert failed == {"lpr": None, "vllm-plain": "RuntimeError: 3 of 3 requests failed: out of luck"}
        # A further run replaces what it measures again and keeps the rest.
        assert run(model, data, output, "--urls", f"vllm-plain={good}", *short, "--add") == 0
    runs = json.loads(output.read_text())["runs"]
    assert [run["name"] for run in runs] == ["lpr", "lpr", "vllm-plain", "vllm-plain"]
    assert not any("failed" in run for run in runs)


def test_a_server_that_ends_or_never_gets_ready(tmp_path: Path) -> None:
    for words, seconds, message in (
        ("print('no such weights'); raise SystemExit(3)", 30.0, "ended with code 3: no such weights"),
        ("import time; print('loading', flush=True); time.sleep(60)", 0.5, "not ready in time: loading"),
    ):
        log = tmp_path / "log"
        command = [sys.executable, "-u", "-c", words]
        begun = started("x", command, {}, free_port(), "/health", log, seconds)
        with pytest.raises(ServerEndedError, match=message), begun:
            pass
    begun = started("x", [str(tmp_path / "none")], {}, 1, "/health", tmp_path / "log", 1.0)
    with pytest.raises(InputError, match="cannot start"), begun:
        pass


def test_a_ready_server_is_stopped(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "health").write_text("ok")
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "-d", str(tmp_path)]
    with started("x", command, {}, port, "/health", tmp_path / "log", 30.0) as server:
        assert isinstance(server, Server) and server.ready_seconds is not None
        server.check()
    with pytest.raises(ServerEndedError, match="ended with code"):
        server.check()


def test_commands(tmp_path: Path) -> None:
    places = Places(tmp_path, vllm=tmp_path, llama=tmp_path, threads=2)
    with pytest.raises(InputError, match="has no bin/vllm"):
        command_of("vllm-plain", "float32", 80, places)
    (tmp_path / "bin").mkdir()
    for name in ("bin/vllm", "llama-server", "float32.gguf"):
        (tmp_path / name).touch()
    for name in CONFIGURATIONS:
        command, environment = command_of(name, "float32", 80, places)
        assert "80" in command and str(tmp_path) in environment.get("PATH", "") + " ".join(command)
    command, _ = command_of("vllm-ngram5", "float32", 80, places)
    assert json.loads(command[-1])["num_speculative_tokens"] == 5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--peers", "tgi"], "--peers 'tgi' is none of lpr-plain"),
        (["--peers", "vllm-plain"], "--vllm is not given; see --help"),
        (["--urls", "lpr"], "--urls 'lpr' is not NAME=URL"),
        (["--urls", "lpr=http://x", "--prompts", "9"], "has 12 prompts, so its 4 loads have at most 3 each"),
        (["--urls", "lpr=http://x", "--passes", "warm"], "--passes must be cold, or cold and warm"),
        (["--add", "--urls", "lpr=http://x", "--clients", "0"], "must be at least 1"),
    ],
)
def test_bad_options_are_one_line(
    words: list[str], message: str, model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model, data, tmp_path / "out.json", *words) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_agreement_is_the_part_before_the_first_difference() -> None:
    assert agreement(["abcd", "xy", ""], ["abcd", "xz", ""]) == {"equal_texts": 2, "equal_part": 0.833}
