from __future__ import annotations

import json
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lpr.cli.jsonl import OrderedWriter, PromptLine, read_prompts
from lpr.config import InputError
from lpr.core.suffix_index import SuffixIndex
from lpr.engine.trie_file import write_trie
from lpr.files import replace_file
from lpr.fleet.snapshots import Folder


def lines(count: int) -> list[PromptLine]:
    return [PromptLine(number, prompt=f"p{number}") for number in range(1, count + 1)]


def record(number: int) -> dict[str, object]:
    return {"line": number, "prompt": f"p{number}"}


def numbers(path: Path) -> list[int]:
    return [json.loads(line)["line"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_what_only_python_takes_for_json_is_a_bad_line(constant: str, tmp_path: Path) -> None:
    """It would be echoed, and the output's line would not be JSON."""
    path = tmp_path / "in.jsonl"
    path.write_text(f'{{"prompt": "a", "note": {constant}}}\n{{"prompt": "b"}}\n')
    first, second = read_prompts(path)
    assert first.error == f"line 1 is not JSON: {constant} is no number of JSON" and second.error is None


def test_reads_prompts_and_names_bad_lines(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(
        b'{"prompt": "a", "task_id": 7}\n\n{"prompt": 3}\nnot json\n[1]\n{"prompt": "\xff"}\n{"prompt": "b\\n"}\r\n'
    )
    good = [(line.number, line.prompt, line.extra) for line in read_prompts(path) if line.error is None]
    assert good == [(1, "a", {"task_id": 7}), (7, "b\n", {})]
    errors = [line.error for line in read_prompts(path) if line.error]
    assert errors[0] == 'line 3 has no string "prompt"'
    assert errors[1].startswith("line 4 is not JSON: ")
    assert errors[2] == 'line 5 has no string "prompt"'
    assert errors[3].startswith("line 6 is not UTF-8: ")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be"])
def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "in.jsonl"
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    path.write_bytes((mark + '{"prompt": "é a("}\r\n\ufeff{"prompt": "b"}\r\n').encode(encoding))
    assert [(line.prompt, line.error) for line in read_prompts(path)] == [("é a(", None), ("b", None)]


def parsed(tmp_path: Path, record: object) -> PromptLine:
    (tmp_path / "in.jsonl").write_text(json.dumps(record))
    return read_prompts(tmp_path / "in.jsonl")[0]


def test_openais_names_are_obeyed(tmp_path: Path) -> None:
    fields = {"prompt": "a", "max_tokens": 5, "seed": 3, "stop": ["x"], "logit_bias": {"7": -1}, "temperature": None}
    wanted = {"max_new_tokens": 5, "seed": 3, "stop": ("x",), "logit_bias": ((7, -1.0),)}
    assert parsed(tmp_path, {**fields, "n": 1, "suffix": None}).sampling == wanted
    batch = {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {**fields, "model": "m"}}
    line = parsed(tmp_path, batch)
    assert (line.prompt, line.sampling, line.extra["custom_id"], line.error) == ("a", wanted, "c", None)
    assert parsed(tmp_path, {"prompt": "a", "max_tokens": 5, "max_new_tokens": 6}).sampling == {"max_new_tokens": 6}


@pytest.mark.parametrize(
    "record, name",
    [
        ({"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ({"prompt": "a", "n": 2}, "n"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "max_tokens": "5"}, "max_new_tokens"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"url": "/v1/chat/completions", "body": {"messages": []}}, "url"),
        ({"url": "/v1/completions", "body": {"prompt": "a", "foo": 1}}, "body.foo"),
    ],
)
def test_openais_names_that_are_not_obeyed_are_refused(tmp_path: Path, record: object, name: str) -> None:
    error = parsed(tmp_path, record).error
    assert error is not None and error.startswith(f"line 1: {name}")


def test_a_column_named_error_is_no_error(tmp_path: Path) -> None:
    line = parsed(tmp_path, {"prompt": "a", "error": "of an earlier run", "id": 1})
    assert (line.error, line.extra) == (None, {"id": 1})


def test_prompt_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read prompts from .*: No such file"):
        read_prompts(tmp_path / "none")
    with pytest.raises(InputError, match="Is a directory"):
        read_prompts(tmp_path)
    (tmp_path / "empty").write_text("\n \n")
    with pytest.raises(InputError, match="holds no prompts"):
        read_prompts(tmp_path / "empty")


def test_writes_in_order_as_soon_as_possible(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with OrderedWriter(path, lines(5)) as writer:
        writer.write(2, record(2))
        assert numbers(path) == []
        writer.write(1, record(1))
        assert numbers(path) == [1, 2]
        writer.write(5, record(5))
        writer.write(4, record(4))
        assert numbers(path) == [1, 2]
        assert writer.done == {1, 2, 4, 5}
    assert numbers(path) == [1, 2, 4, 5], "what was finished is on disk after an interruption"


def test_resumes_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    done = [json.dumps(record(n)) for n in (1, 2, 4)]
    path.write_text("\n".join(done) + '\n{"line": 5, "pro')
    with OrderedWriter(path, lines(5), resume=True) as writer:
        assert writer.done == {1, 2, 4}
        assert numbers(path) == [1, 2]
        writer.write(3, record(3))
        assert numbers(path) == [1, 2, 3, 4]
        writer.write(5, record(5))
    assert path.read_text() == "".join(json.dumps(record(n)) + "\n" for n in range(1, 6))


def test_resume_ignores_another_jobs_output(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text('{"line": 1, "prompt": "other"}\n{"no": "line"}\n7\n{"line": [1]}\n' + "[" * 100_000 + "\n")
    with OrderedWriter(path, lines(2), resume=True) as writer:
        assert writer.done == set()
    assert path.read_text() == ""


def test_a_fresh_run_replaces_the_output(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(json.dumps(record(1)) + "\n")
    with OrderedWriter(path, lines(2)):
        assert path.read_text() == ""


def test_outputs_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot write to .*: No such file or directory"):
        OrderedWriter(tmp_path / "none" / "out.jsonl", lines(1))
    with pytest.raises(InputError, match="cannot write to"):
        OrderedWriter(tmp_path, lines(1))
    with pytest.raises(InputError, match="No space left on device"):
        OrderedWriter(Path("/dev/full"), lines(1))


@pytest.fixture
def small_disk() -> Iterator[None]:
    """No file may grow beyond 100 kB: a write takes what fits, the next one fails (the interpreter ignores SIGXFSZ)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("small_disk")
def test_a_line_that_does_not_fit_is_taken_back_and_none_follows(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    writer = OrderedWriter(path, lines(9))
    with pytest.raises(InputError, match="File too large; 3 of 9 lines are complete there"), writer:
        for number in (5, 6, 1, 2, 3):
            writer.write(number, record(number) | {"text": "x" * (10 if number > 4 else 30_000)})
        assert numbers(path) == [1, 2, 3]
        writer.write(4, record(4) | {"text": "y" * 30_000})
    assert numbers(path) == [1, 2, 3] and path.read_bytes().endswith(b"\n"), "the small lines 5 and 6 would fit"


@pytest.mark.usefixtures("small_disk")
def test_what_waits_is_written_on_close_as_far_as_it_fits(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    writer = OrderedWriter(path, lines(9))
    with pytest.raises(InputError, match="2 of 9 lines are complete there"), writer:
        for number in range(2, 6):
            writer.write(number, record(number) | {"text": "x" * 40_000})
    assert numbers(path) == [2, 3]


@pytest.mark.usefixtures("small_disk")
def test_an_output_that_does_not_fit_leaves_the_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(record(number) | {"text": "x" * 20_000}) + "\n" for number in (1, 2)))
    with pytest.raises(InputError, match="cannot write to .*: File too large"):
        OrderedWriter(path, lines(2), resume=True)
    assert numbers(path) == [1, 2] and list(tmp_path.iterdir()) == [path], "the earlier output is as it was"


def test_a_pipe_whose_reader_leaves_says_that_the_line_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer = OrderedWriter(path, lines(2))
    waiting = threading.Timer(0.2, os.close, [reader])  # after the pipe is full
    waiting.start()
    with pytest.raises(InputError, match="Broken pipe; its last line is cut; 1 of 2 lines are complete there"), writer:
        writer.write(1, record(1))
        writer.write(2, record(2) | {"text": "x" * 2_000_000})
    waiting.join(10)


def test_short_writes_make_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "out.jsonl", os.write
    with OrderedWriter(path, lines(2)) as writer:
        monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:7]))
        writer.write(1, record(1))
        writer.write(2, record(2))
        monkeypatch.undo()
    assert path.read_text() == "".join(json.dumps(record(number)) + "\n" for number in (1, 2))


def test_an_output_goes_through_its_own_link_and_through_no_other(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    other = tmp_path / "other"
    other.write_text("mine")
    path, target = tmp_path / "out.jsonl", tmp_path / "real" / "target"
    path.symlink_to(target)
    for name in ("out.jsonl.new", "real/target.new"):
        (tmp_path / name).symlink_to(other)
    with OrderedWriter(path, lines(1)) as writer:
        writer.write(1, record(1))
    assert path.is_symlink() and numbers(target) == [1] and other.read_text() == "mine"
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(InputError, match="cannot write to .*: Too many levels of symbolic links"):
        OrderedWriter(path, lines(1))


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_results_keep_their_mode_and_what_users_said_is_for_the_owner_only(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        for name, expected in (("new", 0o640), ("old", 0o604)):
            path = tmp_path / name
            if name == "old":
                path.touch()
                path.chmod(0o604)
            with OrderedWriter(path, lines(1)):
                assert mode(path) == expected
        for path in (tmp_path / "old", tmp_path / "a" / "b" / "kept"):
            replace_file(path, b"text", private=True)
            assert mode(path) == 0o600 and path.read_bytes() == b"text"
        assert mode(tmp_path / "a") == mode(tmp_path / "a" / "b") == 0o700
        replace_file(tmp_path / "c" / "page", b"text")
        assert (mode(tmp_path / "c"), mode(tmp_path / "c" / "page")) == (0o750, 0o640)
    finally:
        os.umask(before)
    snapshots, trie = Folder(tmp_path / "snapshots"), tmp_path / "tries"
    snapshots.write("name", b"drafts")
    written = write_trie(trie, SuffixIndex(4), "")
    assert [mode(each) for each in (tmp_path / "snapshots", trie)] == [0o700] * 2
    assert mode(tmp_path / "snapshots" / "name") == mode(written) == 0o600
    written.chmod(0o644)
    assert mode(write_trie(trie, SuffixIndex(4), "")) == 0o600
