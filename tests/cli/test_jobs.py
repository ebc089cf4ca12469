"""`lpr.generate --survive`: what it refuses, and how a rank takes over the job of a lost driver."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from lpr import DecodeConfig, Engine, SamplingParams
from lpr.cli.generate import parse, supervise
from lpr.cli.jobs import FileJob, Keeping
from lpr.cli.jsonl import OrderedWriter, read_prompts
from lpr.config import InputError
from lpr.dist.runtime import World

ALONE = World(0, 1, 0, 0, False)


@pytest.mark.parametrize(
    ("flags", "world", "why"),
    [
        ([], World(0, 2, 0, 0, True), "torchrun ends all when one is lost: run it without"),
        ([], ALONE, "--survive is for jobs: give --prompts"),
        (["--prompts", "in.jsonl", "--output", "out.jsonl", "--lp", "0"], ALONE, "both must be at least 1"),
    ],
)
def test_what_cannot_survive_is_refused(flags: list[str], world: World, why: str) -> None:
    with pytest.raises(InputError, match=why) as refused:
        supervise(parse(["--survive", *flags]), [], world)
    assert "\n" not in str(refused.value)


def test_a_rank_takes_over_a_file(llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that the lost driver has written stay, requests that run go on, and the others are submitted."""
    monkeypatch.setattr(Engine, "encode", lambda self, prompt: [ord(letter) % 90 for letter in prompt])
    prompts, params = tmp_path / "in.jsonl", SamplingParams(max_new_tokens=6)
    prompts.write_text("".join(json.dumps({"prompt": word}) + "\n" for word in ("one", "two", "three", "four")))
    decode = DecodeConfig(window_size=0, trie_nodes=8, max_batch_size=2)

    def job(output: str, resume: bool = False) -> FileJob:
        writer = OrderedWriter(tmp_path / output, read_prompts(prompts), resume=resume)
        return FileJob(writer, params, {}, Keeping(), as_json=False, takes_over=resume)

    def written(output: str) -> list[list[int]]:
        return [json.loads(line)["token_ids"] for line in (tmp_path / output).read_text().splitlines()]

    job("whole.jsonl").run(Engine.from_model(llama, decode=decode))
    expected = written("whole.jsonl")
    first = (tmp_path / "whole.jsonl").read_text().splitlines()[0]
    (tmp_path / "out.jsonl").write_text(first + "\n")
    survivor = Engine.from_model(llama, decode=decode)
    survivor.learn([1, 2, 3])  # it has worked before
    running = [survivor.submit(word, params, id=number) for number, word in ((2, "two"), (3, "three"))]
    survivor.step()
    rest = job("out.jsonl", resume=True)
    assert rest.run(survivor) == 0
    assert written("out.jsonl") == expected
    assert all(request.finish_reason == "length" for request in running), "they were not submitted again"
    assert rest.total.num_tokens == 3 * 6


@pytest.mark.parametrize("takes_over", [False, True])
def test_only_a_job_that_begins_again_learns_what_it_had_written(
    takes_over: bool, llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trie first, and behind it the lines that are done; a survivor has drafted from both all the time."""
    prompts, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text(json.dumps({"prompt": "one"}) + "\n")
    output.write_text(json.dumps({"line": 1, "prompt": "one", "text": "", "token_ids": [4, 5]}) + "\n")
    engine = Engine.from_model(llama, decode=DecodeConfig(window_size=0, trie_nodes=8))
    engine.learn([1, 2, 3])
    monkeypatch.setattr(engine, "encode", lambda text: [9])
    trie = engine.save_trie(tmp_path / "kept.safetensors")
    calls: list[object] = []
    monkeypatch.setattr(engine, "load_trie", lambda path: calls.append(path))
    monkeypatch.setattr(engine, "learn", lambda *outputs: calls.append(list(outputs)))
    writer = OrderedWriter(output, read_prompts(prompts), resume=True)
    job = FileJob(writer, SamplingParams(), {}, Keeping(trie), as_json=False, takes_over=takes_over)
    assert job.run(engine) == 0
    assert calls == ([] if takes_over else [trie, [[9, 4, 5]]])
