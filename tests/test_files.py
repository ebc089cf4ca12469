from __future__ import annotations

import json
from pathlib import Path

import pytest

from lpr.cli.jsonl import OrderedWriter, PromptLine, read_prompts
from lpr.config import InputError


def lines(count: int) -> list[PromptLine]:
    return [PromptLine(number, prompt=f"p{number}") for number in range(1, count + 1)]


def record(number: int) -> dict[str, object]:
    return {"line": number, "prompt": f"p{number}"}


def numbers(path: Path) -> list[int]:
    return [json.loads(line)["line"] for line in path.read_text().splitlines()]


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
    path.write_text('{"line": 1, "prompt": "other"}\n{"no": "line"}\n7\n')
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


def test_a_disk_that_fills_up_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.jsonl"
    with OrderedWriter(path, lines(3)) as writer:
        writer.write(1, record(1))

        class Full:
            def write(self, data: bytes) -> int:
                raise OSError(28, "No space left on device")

            def close(self) -> None:
                pass

        file, writer._file = writer._file, Full()  # type: ignore[assignment]
        with pytest.raises(InputError, match=r"No space left on device; 1 of 3 lines are complete there"):
            writer.write(2, record(2))
        writer._file = file
    assert numbers(path) == [1]
