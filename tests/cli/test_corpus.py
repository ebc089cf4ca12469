"""`python -m lpr.corpus`: text files in, one trie file out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import lpr
import lpr.cli.corpus
from lpr.cli.corpus import main
from lpr.core.suffix_index import END
from lpr.engine.trie_file import fingerprint_of, read_trie
from lpr.model.loader import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(lpr.bundled_model())


def documents(folder: Path, tokenizer) -> list[str]:
    """The text of each document of a trie file."""
    tokens = read_trie(folder, fingerprint_of(tokenizer, 0)).tolist()
    found: list[list[int]] = [[]]
    for token in tokens:
        if token == END:
            found.append([])
        else:
            found[-1].append(token)
    assert found.pop() == [], "every document is ended"
    return [tokenizer.decode(document) for document in found]


def test_files_and_folders_become_documents_in_order(tmp_path: Path, tokenizer, capsys) -> None:
    (tmp_path / "src" / "deep").mkdir(parents=True)
    (tmp_path / "src" / ".git").mkdir()
    (tmp_path / "src" / ".git" / "hidden.py").write_text("hidden = 1\n")
    (tmp_path / "src" / "b.py").write_text("b = 2\n")
    (tmp_path / "src" / "deep" / "a.py").write_text("a = 1\n")
    (tmp_path / "src" / "c.txt").write_text("not python\n")
    (tmp_path / "last.txt").write_text("last\n")
    arguments = [str(tmp_path / "src"), str(tmp_path / "last.txt"), "--glob", "*.py", "--output", str(tmp_path / "t")]
    assert main([*arguments, "--json"]) == 0
    assert documents(tmp_path / "t", tokenizer) == ["b = 2\n", "a = 1\n", "last\n"]
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert err == "" and record["files"] == record["documents"] == record["held_documents"] == 3
    assert record["held_tokens"] == record["tokens"] + 3
    # Once more: it is added; --fresh forgets; a small capacity keeps the newest.
    assert main(arguments) == 0
    assert len(documents(tmp_path / "t", tokenizer)) == 6
    assert "3 documents of 3 files" in capsys.readouterr().err
    assert main([*arguments, "--fresh"]) == 0
    assert len(documents(tmp_path / "t", tokenizer)) == 3
    assert main([*arguments, "--capacity", "4"]) == 0
    tokens = read_trie(tmp_path / "t").tolist()
    assert len(tokens) <= 4 and tokenizer.decode(tokens[-3:-1]) == "last\n"


def test_what_is_no_text_is_named_and_skipped(tmp_path: Path, tokenizer, capsys) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "binary").write_bytes(b"ab\0c")
    (tmp_path / "in" / "empty").write_bytes(b"")
    (tmp_path / "in" / "latin1").write_bytes("é".encode("latin-1") + b" plain")
    (tmp_path / "in" / "torn").write_bytes("fin é".encode()[:-1])
    (tmp_path / "in" / "text").write_text("é = 1\n")
    assert main([str(tmp_path / "in"), "--output", str(tmp_path / "t"), "--json"]) == 0
    assert documents(tmp_path / "t", tokenizer) == ["é = 1\n"]
    out, err = capsys.readouterr()
    assert [line.split(": ", 2)[1].rsplit("/", 1)[1] for line in err.splitlines()] == [
        "binary", "empty", "latin1", "torn"]  # fmt: skip
    assert "a binary file" in err and "not UTF-8" in err
    assert json.loads(out)["skipped"] == 4


def test_a_field_of_json_lines(tmp_path: Path, tokenizer, capsys) -> None:
    lines = ['{"text": "x = 1", "n": 1}', "", "nonsense", '{"other": "y"}', "[]", '{"text": "z = 3"}', '{"text": 4}']
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    arguments = [str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "t"), "--field", "text"]
    assert main(arguments) == 0
    assert documents(tmp_path / "t", tokenizer) == ["x = 1", "z = 3"]
    err = capsys.readouterr().err
    assert "in.jsonl, line 3: not JSON" in err
    for number in (4, 5, 7):
        assert f"in.jsonl, line {number}: no text in 'text'" in err


def test_a_long_file_is_read_in_pieces_and_stays_one_document(
    tmp_path: Path, tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lpr.cli.corpus, "PIECE", 100)
    monkeypatch.setattr(lpr.cli.corpus, "BATCH", 250)
    text = "".join(f"value_{i} = {i}\n" for i in range(60)) + "x" * 1000 + "\nend = 1\n"
    (tmp_path / "a.py").write_text(text)
    (tmp_path / "b.py").write_text("b = 1")
    longest = []
    original = lpr.cli.corpus.batches

    def watched(pieces):
        for batch in original(pieces):
            longest.append(sum(len(piece.text) for piece in batch))
            yield batch

    monkeypatch.setattr(lpr.cli.corpus, "batches", watched)
    assert main([str(tmp_path / "a.py"), str(tmp_path / "b.py"), "--output", str(tmp_path / "t")]) == 0
    assert documents(tmp_path / "t", tokenizer) == [text, "b = 1"]
    assert len(longest) > 3 and max(longest) <= 250 + 300


def test_bad_input_is_one_line_and_code_2(tmp_path: Path, capsys) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "binary").write_bytes(b"\0")
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "bad.safetensors").write_bytes(b"nonsense")
    good = str(tmp_path / "a.txt")
    target = ["--output", str(tmp_path / "t")]
    for arguments, message in [
        (target, "no files given"),
        ([str(tmp_path / "none"), *target], "cannot read"),
        ([str(tmp_path / "in"), "--glob", "*.py", *target], "no file in the folder"),
        ([str(tmp_path / "in"), "--glob", "/x", *target], "--glob '/x' is no pattern"),
        (["/dev/null", *target], "is neither a file nor a folder"),
        ([good, "--output", "/proc/none"], "cannot write a trie to"),
        ([good, "--output", str(tmp_path / "bad.safetensors")], "no trie file, or damaged"),
        ([good, "--model", "/none", *target], "model folder '/none' does not exist"),
        ([good, "--capacity", "0", *target], "--capacity 0 must be at least 1"),
    ]:
        assert main(arguments) == 2
        out, err = capsys.readouterr()
        assert message in err and out == "" and len(err.splitlines()) == 1, err
    assert main([str(tmp_path / "in"), *target]) == 2
    assert "none of the 1 files holds text to learn from" in capsys.readouterr().err
    assert main([good]) == 2
    assert "--output" in capsys.readouterr().err
    assert not list((tmp_path / "t").iterdir())


def test_an_interrupted_run_leaves_the_old_trie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    (tmp_path / "a.txt").write_text("text")
    arguments = [str(tmp_path / "a.txt"), "--output", str(tmp_path / "t")]
    assert main(arguments) == 0
    before = (tmp_path / "t" / "trie.safetensors").read_bytes()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(lpr.cli.corpus, "feed", interrupt)
    assert main(arguments) == 130
    assert "interrupted" in capsys.readouterr().err
    assert (tmp_path / "t" / "trie.safetensors").read_bytes() == before
