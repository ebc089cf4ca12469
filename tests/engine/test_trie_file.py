"""The shared trie on disk: the same drafts after a round trip, and nothing but a trie is ever taken for one."""

from __future__ import annotations

import json
import os
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save, save_file
from transformers import PreTrainedModel

import lpr.cli.generate
import lpr.engine.trie_file
from lpr import DecodeConfig, Engine, SamplingParams
from lpr.cli.generate import main
from lpr.cli.jobs import Keeping
from lpr.config import InputError
from lpr.core.drafting import Drafter
from lpr.core.suffix_index import END, SuffixIndex
from lpr.core.tree import TokenTree
from lpr.engine.trie_file import check_writable, fingerprint_of, num_documents, read_trie, trie_path, write_trie
from tests.fakes.models import tiny_model
from tests.fakes.prompts import PROMPTS
from tests.fakes.worlds import ThreadComm, ThreadWorld, run_ranks

FINGERPRINT = "vocabulary of 97"
CONFIG = DecodeConfig(window_size=0, trie_nodes=40)


def text(seed: int, length: int) -> list[int]:
    """Tokens that repeat themselves in part."""
    rng = np.random.default_rng(seed)
    words = [rng.integers(0, 90, size=5).tolist() for _ in range(8)]
    return [token for _ in range(length // 5) for token in words[rng.integers(8)]]


@pytest.fixture
def trie() -> SuffixIndex:
    made = SuffixIndex(1000)
    for seed in range(9):
        made.extend(text(seed % 4, 200))
        made.end_document()
    assert made.base + made.start > 0, "something was forgotten"
    return made


def drafts(trie: SuffixIndex) -> list[tuple[list[int], list[int], list[int], list[float]]]:
    found = []
    for seed in range(4):
        drafter = Drafter(CONFIG, trie)
        for end in (2, 11, 50):
            prompt = text(seed, 100)[:end]
            drafter = Drafter(CONFIG, trie)
            drafter.observe(prompt)
            tree = TokenTree(prompt[-1])
            found.append((tree.tokens, tree.parents, tree.sources, drafter.draft(tree, 40)))
    assert any(len(tree[0]) == 41 for tree in found)
    return found


def test_a_loaded_trie_drafts_exactly_as_the_saved_one(tmp_path: Path, trie: SuffixIndex) -> None:
    path = write_trie(tmp_path / "new" / "folder", trie, FINGERPRINT)
    assert path == tmp_path / "new" / "folder" / "trie.safetensors"
    tokens = read_trie(path, FINGERPRINT)
    loaded = SuffixIndex.from_history(tokens, trie.capacity_tokens)
    assert loaded.history() == trie.history()
    assert drafts(loaded) == drafts(trie)
    for each in (loaded, trie):
        each.extend(text(7, 400))
    assert drafts(loaded) == drafts(trie), "they also go on alike"
    assert list(path.parent.iterdir()) == [path]


def test_the_file_says_what_it_holds_and_is_the_same_for_the_same_trie(tmp_path: Path, trie: SuffixIndex) -> None:
    data = write_trie(tmp_path, trie, FINGERPRINT).read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    facts = json.loads(header["__metadata__"]["lpr_trie"])
    assert facts.pop("checksum")
    tokens = trie.history().tolist()
    assert facts == {"version": 1, "fingerprint": FINGERPRINT, "capacity_tokens": 1000, "num_tokens": len(tokens),
                     "num_documents": tokens.count(END)}  # fmt: skip
    assert header["tokens"]["shape"] == [len(tokens)]
    assert write_trie(tmp_path, trie, FINGERPRINT).read_bytes() == data


def test_an_empty_trie_and_an_open_document(tmp_path: Path) -> None:
    assert read_trie(write_trie(tmp_path, SuffixIndex(5), "")).tolist() == []
    trie = SuffixIndex(9)
    trie.extend([1, 2])
    trie.end_document()
    trie.extend([3])
    tokens = read_trie(write_trie(tmp_path, trie, ""))
    assert tokens.tolist() == [1, 2, END, 3] and num_documents(tokens) == 2


def test_a_flipped_bit_in_any_byte_is_noticed(tmp_path: Path) -> None:
    trie = SuffixIndex(99)
    trie.extend([5, 6, 7, 5, 6])
    path = write_trie(tmp_path, trie, FINGERPRINT)
    good = path.read_bytes()
    for index in range(len(good)):
        bad = bytearray(good)
        bad[index] ^= 1 << index % 7
        path.write_bytes(bad)
        with pytest.raises(InputError) as failure:
            read_trie(path, FINGERPRINT)
        assert "\n" not in str(failure.value) and str(path) in str(failure.value)


def test_every_truncation_is_noticed(tmp_path: Path, trie: SuffixIndex) -> None:
    path = write_trie(tmp_path, trie, FINGERPRINT)
    good = path.read_bytes()
    for length in [*range(0, 400, 7), len(good) - 4, len(good) - 1]:
        path.write_bytes(good[:length])
        with pytest.raises(InputError, match="no trie file, or damaged|is damaged"):
            read_trie(path)
    path.write_bytes(good + b"more")
    with pytest.raises(InputError, match="no trie file, or damaged"):
        read_trie(path)


def with_facts(**changes: object) -> bytes:
    facts = {"version": 1, "fingerprint": FINGERPRINT, **changes}
    return save({"tokens": np.zeros(2, np.int32)}, {"lpr_trie": json.dumps(facts)})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no trie file, or damaged"),
        (pickle.dumps({"tokens": [1, 2]}), "no trie file, or damaged"),
        (b"\0" * 4096, "no trie file, or damaged"),
        (save({"tokens": np.zeros(2, np.int32)}), "is a safetensors file, but no trie of lpr"),
        (save({"w": np.zeros(2)}, {"format": "pt"}), "is a safetensors file, but no trie of lpr"),
        (save({"w": np.zeros(2)}, {"lpr_trie": "nonsense"}), "header is not readable"),
        (save({"w": np.zeros(2)}, {"lpr_trie": "[1]"}), "header is not readable"),
        (with_facts(version=2), "has version 2 and this lpr reads version 1"),
        (with_facts(), "checksum does not fit"),
        (with_facts(fingerprint="vocabulary of 98"), r"vocabulary of 98\) than this model's \(vocabulary of 97"),
    ],
)
def test_what_is_no_trie_of_ours_is_refused_in_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "trie.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as failure:
        read_trie(tmp_path, FINGERPRINT)
    assert "\n" not in str(failure.value)


def test_a_trie_without_its_tensor_is_refused(tmp_path: Path) -> None:
    save_file({"other": np.zeros(2, np.int32)}, tmp_path / "trie.safetensors",
              {"lpr_trie": json.dumps({"version": 1, "fingerprint": FINGERPRINT})})  # fmt: skip
    with pytest.raises(InputError, match="no trie file, or damaged"):
        read_trie(tmp_path)


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_failure_while_writing_leaves_the_old_file(
    tmp_path: Path, trie: SuffixIndex, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    path = write_trie(tmp_path, SuffixIndex(3), FINGERPRINT)
    old = path.read_bytes()

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(InputError, match=r"cannot write a trie to .*: No space left on device"):
        write_trie(tmp_path, trie, FINGERPRINT)
    monkeypatch.undo()
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path], "nothing is left lying about"


def test_writers_of_the_same_file_never_mix(tmp_path: Path) -> None:
    tries = []
    for seed in range(4):
        trie = SuffixIndex(100_000)
        trie.extend([seed] * (20_000 + 5000 * seed))
        tries.append(trie)
    write_trie(tmp_path, tries[0], FINGERPRINT)
    failures: list[BaseException] = []

    def write_often(trie: SuffixIndex) -> None:
        try:
            for _ in range(20):
                write_trie(tmp_path, trie, FINGERPRINT)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=write_often, args=(trie,)) for trie in tries]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert len(set(read_trie(tmp_path, FINGERPRINT).tolist())) == 1
    for thread in threads:
        thread.join(60)
    assert not failures and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("path", ["/dev/null", "/proc/none/trie.safetensors"])
def test_an_unwritable_place_is_refused_before_any_work(path: str, tmp_path: Path) -> None:
    link = tmp_path / "trie.safetensors"
    link.symlink_to(path)
    with pytest.raises(InputError, match="cannot write a trie to"):
        check_writable(link)
    with pytest.raises(InputError, match="cannot write a trie to"):
        write_trie(link, SuffixIndex(1), "")
    assert link.is_symlink() and Path("/dev/null").is_char_device()


def test_a_check_leaves_no_trace_and_a_link_stays_a_link(tmp_path: Path, trie: SuffixIndex) -> None:
    (tmp_path / "real").mkdir()
    check_writable(tmp_path / "real")
    assert list((tmp_path / "real").iterdir()) == []
    link = tmp_path / "link.safetensors"
    link.symlink_to(tmp_path / "real" / "x.safetensors")
    write_trie(link, trie, "")
    assert link.is_symlink() and len(read_trie(tmp_path / "real" / "x.safetensors")) == len(trie)


# The engine.

PARAMS = SamplingParams(max_new_tokens=30)
DECODE = DecodeConfig(window_size=0, trie_nodes=16, max_batch_size=2)


def test_an_engine_with_a_loaded_trie_takes_the_steps_of_the_one_that_saved_it(
    tmp_path: Path, llama: PreTrainedModel
) -> None:
    first = Engine.from_model(llama, decode=DECODE)
    cold = first.generate([[3, 4, 5]], PARAMS)[0]
    first.save_trie(tmp_path)
    warm = first.generate([[3, 4, 5]], PARAMS)[0]
    other = Engine.from_model(llama, decode=DECODE)
    other.load_trie(tmp_path)
    loaded = other.generate([[3, 4, 5]], PARAMS)[0]
    assert cold.token_ids == warm.token_ids == loaded.token_ids
    assert warm.stats.num_steps == loaded.stats.num_steps < cold.stats.num_steps
    assert warm.stats.sources == loaded.stats.sources
    small = Engine.from_model(llama, decode=DecodeConfig(trie_capacity=10))
    small.load_trie(tmp_path)
    history = first.replica.drafts.shared.history().tolist()
    assert small.replica.drafts.shared.history().tolist() == history[:34][-10:], "the newest tokens"


def test_a_trie_of_another_vocabulary_or_while_requests_run_is_refused(tmp_path: Path, llama: PreTrainedModel) -> None:
    engine = Engine.from_model(llama, decode=DECODE)
    other = Engine.from_model(tiny_model(vocab_size=64))
    engine.save_trie(tmp_path)
    with pytest.raises(
        InputError, match=r"another vocabulary \(vocabulary of 97\) than this model's \(vocabulary of 6"
    ):
        other.load_trie(tmp_path)
    with pytest.raises(InputError, match="cannot read the trie"):
        engine.load_trie(tmp_path / "none")
    outside = SuffixIndex(9)
    outside.extend([97])
    write_trie(tmp_path / "outside", outside, engine.fingerprint)
    with pytest.raises(InputError, match="token ids outside the vocabulary of 97"):
        engine.load_trie(tmp_path / "outside")
    engine.submit([1], PARAMS)
    with pytest.raises(RuntimeError, match="without requests"):
        engine.load_trie(tmp_path)


def test_the_fingerprint_does_not_depend_on_how_the_tokenizer_was_used() -> None:
    from lpr.model.loader import load_tokenizer

    tokenizer = load_tokenizer(lpr.bundled_model())
    before = fingerprint_of(tokenizer, 0)
    tokenizer(["a b", "a"], truncation=True, max_length=1, padding="max_length")
    assert fingerprint_of(tokenizer, 0) == before
    tokenizer.add_tokens(["<new>"])
    assert fingerprint_of(tokenizer, 0) != before


def test_rank_0_alone_needs_the_file(tmp_path: Path, llama: PreTrainedModel) -> None:
    engine = Engine.from_model(llama, decode=DECODE)
    engine.generate([[3, 4, 5]], PARAMS)
    engine.save_trie(tmp_path)

    def program(comm: ThreadComm) -> tuple[list[int], list[int], int]:
        engine = Engine.from_model(llama, decode=DECODE, comm=comm)
        if comm.rank:
            engine.work()
            return engine.replica.drafts.shared.history().tolist(), [], 0
        engine.load_trie(tmp_path)
        history = engine.replica.drafts.shared.history().tolist()
        [done] = engine.generate([[3, 4, 5]], PARAMS)
        engine.close()
        return history, done.token_ids, done.stats.num_steps

    ranks = run_ranks(ThreadWorld(3), program)
    saved = engine.replica.drafts.shared.history().tolist()
    assert ranks[0][0] == saved and ranks[0][1] == saved[3:-1]
    assert all(history[: len(saved)] == saved for history, _, _ in ranks)
    assert ranks[0][2] < 10


# The command.


def test_the_command_drafts_from_what_its_last_run_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS[:3]))
    arguments = ["--prompts", str(source), "--max-new-tokens", "24", "--window-size", "0", "--trie-nodes", "12",
                 "--trie", str(tmp_path / "trie"), "--json"]  # fmt: skip
    found = []
    for run in range(2):
        assert main([*arguments, "--output", str(tmp_path / f"{run}.jsonl")]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[1]["num_steps"] < found[0]["num_steps"] and found[1]["num_tokens"] == found[0]["num_tokens"]
    texts = [[json.loads(line)["token_ids"] for line in (tmp_path / f"{run}.jsonl").read_text().splitlines()]
             for run in range(2)]  # fmt: skip
    assert texts[0] == texts[1]
    assert num_documents(read_trie(tmp_path / "trie")) == 6

    shown = ["--prompt", PROMPTS[0], "--max-new-tokens", "24", "--trie", str(tmp_path / "trie"), "--json"]
    assert main(shown) == 0
    assert json.loads(capsys.readouterr().out)["sources"]["shared_trie"]["accepted"] > 0
    assert num_documents(read_trie(tmp_path / "trie")) == 7


def test_a_bad_trie_stops_the_command_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lpr.cli.generate, "Engine", None)
    (tmp_path / "trie.safetensors").write_bytes(b"nonsense")
    for path, message in ((tmp_path, "no trie file, or damaged"), ("/proc/none", "cannot write a trie to")):
        assert main(["--trie", str(path), "--prompt", "a"]) == 2
        out, err = capsys.readouterr()
        assert message in err and out == "" and len(err.splitlines()) == 1


def test_a_trie_of_another_model_stops_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trie(tmp_path, SuffixIndex(5), "tokenizer 0123456789abcdef")
    before = trie_path(tmp_path).read_bytes()
    assert main(["--trie", str(tmp_path), "--prompt", "a"]) == 2
    assert "was made with another vocabulary" in capsys.readouterr().err
    assert trie_path(tmp_path).read_bytes() == before


def test_an_interrupted_run_keeps_what_it_learnt_and_a_failed_one_the_old_file(
    tmp_path: Path, llama: PreTrainedModel
) -> None:
    engine = Engine.from_model(llama, decode=DECODE)
    engine.learn([1, 2, 3])
    with pytest.raises(KeyboardInterrupt), Keeping(tmp_path).around(engine):
        raise KeyboardInterrupt
    assert read_trie(tmp_path).tolist() == [1, 2, 3, END]
    with pytest.raises(ZeroDivisionError), Keeping(tmp_path).around(engine):
        engine.learn([4])
        raise ZeroDivisionError
    assert read_trie(tmp_path).tolist() == [1, 2, 3, END]
