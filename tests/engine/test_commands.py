"""One control path: commands, interleaved streams, aborts on all ranks, prefix reuse, options that arrive."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

import lpr
import lpr.cli.generate
from lpr import DecodeConfig, Engine, EngineOptions, SamplingParams
from lpr.cli.generate import main, parse
from lpr.config import InputError
from lpr.core.step_times import StepTimes
from lpr.engine.commands import Command, Configure, Costs, Drain, Learn, decode, encode
from lpr.engine.exchange import DesyncError
from lpr.engine.replica import Replica
from lpr.engine.request import Request
from lpr.protocol import Abort, Stop, Submit
from lpr.sched.scheduler import Scheduler
from tests.fakes.models import tiny_model
from tests.fakes.worlds import ThreadComm, ThreadWorld, run_ranks

DECODE = DecodeConfig(window_size=3, trie_nodes=12, max_batch_size=2)
PROMPTS = [[3, 5, 7, 9, 11, 13, 5, 7], [2, 4, 6, 8], [50] * 12 + [3, 4], [7, 8, 9] * 5]
LONG = SamplingParams(max_new_tokens=40)


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel) -> list[list[int]]:
    engine = Engine.from_model(model, decode=DecodeConfig.autoregressive(), prefix_reuse=False)
    return [engine.generate([prompt], LONG)[0].token_ids for prompt in PROMPTS]


# The codec.


def test_commands_survive_the_codec() -> None:
    params = SamplingParams(max_new_tokens=3, temperature=0.5, seed=2**64 - 1, stop=("a", "\n"), stop_token_ids=(1, 2))
    commands = [
        Submit(7, [1, 2, 3], params, 2, priority=-1, has_processors=True),
        Submit("a", [1], SamplingParams(), 1),
        Abort("a"),
        Learn(np.array([1, -1, 2], np.int32).tobytes(), replace=True),
        Costs({"nodes": [1, 2], "rows": [{"batch": 1, "kv": 1, "ms": [1.0, 2.0]}]}, given=True),
        Configure(DecodeConfig(window_size=0, trie_nodes="auto", max_length=None)),
        Drain(),
        Stop(),
    ]
    assert decode(encode(commands)) == commands


@given(st.binary(max_size=60))
def test_what_is_no_command_is_refused(message: bytes) -> None:
    try:
        decode(message)
    except msgspec.MsgspecError:
        return
    assert message[:1] == b"\x90", "only an empty list is a message by accident"


# Streams and aborts.


def test_interleaved_streams_keep_their_text() -> None:
    engine = Engine.from_pretrained(lpr.bundled_model(), DECODE, device="cpu")
    prompts, params = ["def f(", "class A:\n"], SamplingParams(max_new_tokens=30)
    alone = [done.text for done in engine.generate(prompts, params)]
    streams, texts = [engine.stream(prompt, params) for prompt in prompts], ["", ""]
    running = [0, 1]
    while running:
        for index in list(running):
            chunk = next(streams[index], None)
            if chunk is None:
                running.remove(index)
            else:
                texts[index] += chunk.text
    assert texts == alone


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_an_abort_reaches_all_ranks_in_the_next_step(
    model: PreTrainedModel, expected: list[list[int]], num_ranks: int
) -> None:
    """Running and waiting requests alike; the neighbours' text is what it was."""

    def program(comm: ThreadComm) -> tuple[list[tuple[str | None, int]], list[list[int]]]:
        engine = Engine.from_model(model, decode=DECODE, comm=comm)
        requests = [engine.submit(prompt, LONG) for prompt in PROMPTS]
        for _ in range(3):
            engine.step()
        engine.abort(requests[0])
        engine.abort(requests[3])
        assert comm.size == 1 or requests[0].finish_reason is None, "all ranks together, not the driver first"
        engine.step()
        seen = [(request.finish_reason, len(request.tokens)) for request in requests]
        while not engine.is_idle:
            engine.step()
        for request in requests:
            assert [token for chunk in request.take() for token in chunk.token_ids] == request.token_ids
        assert not engine.requests and engine.scheduler.is_idle
        return seen, [request.token_ids for request in requests]

    first, *others = run_ranks(ThreadWorld(num_ranks), program)
    assert others == [first] * (num_ranks - 1)
    seen, tokens = first
    assert [reason == "abort" for reason, _ in seen] == [True, False, False, True]
    assert tokens[1:3] == expected[1:3] and 0 < len(tokens[0]) < 40
    assert tokens[3] == expected[3][: len(tokens[3])] and (tokens[3] == []) == (num_ranks == 1), "each rank has slots"
    assert tokens[0] == expected[0][: len(tokens[0])]


def test_workers_know_only_commands(model: PreTrainedModel, expected: list[list[int]]) -> None:
    """Learn, Drain, an output that goes on, and Stop: the other ranks end with the driver's state."""

    def program(comm: ThreadComm) -> Any:
        engine = Engine.from_model(model, decode=DECODE, comm=comm)
        result = None
        if comm.rank:
            engine.work()
        else:
            engine.learn([1, 2, 3], [4, 5])
            done = engine.generate(PROMPTS[:1], LONG)[0]
            assert done.token_ids == expected[0]
            on = engine.submit(PROMPTS[1], LONG, id="goes-on", delivered=expected[1][:17])
            while on.finish_reason is None:
                engine.step()
            assert (on.token_ids, on.num_prompt) == (expected[1], len(PROMPTS[1]))
            assert [token for chunk in on.take() for token in chunk.token_ids] == expected[1][17:]
            unfinished = engine.submit(PROMPTS[2], LONG)
            engine.drain()
            engine.step()
            late = engine.submit(PROMPTS[3], LONG)
            while late.finish_reason is None:
                engine.step()
            assert late.finish_reason == "abort" and unfinished.finish_reason in (None, "length")
            result = "seen"
            engine.close()
            assert unfinished.finish_reason in ("abort", "length")
        return result, engine.replica.drafts.shared.history().tolist(), engine.is_stopped

    ranks = run_ranks(ThreadWorld(3), program)
    assert [each[0] for each in ranks] == ["seen", None, None]
    assert all(each[1:] == ranks[0][1:] for each in ranks) and ranks[0][2]
    assert ranks[0][1][:7] == [1, 2, 3, -1, 4, 5, -1]


def test_another_request_on_one_rank_is_caught(model: PreTrainedModel) -> None:
    def program(comm: ThreadComm) -> None:
        engine = Engine.from_model(model, decode=DECODE, comm=comm)
        engine.generate([[1, 2, 3 + (comm.rank == 1)]], LONG)

    with pytest.raises(DesyncError, match="request 0 of this rank differs from that of rank 0"):
        run_ranks(ThreadWorld(2), program)


def test_commands_travel_with_steps_that_only_fill(model: PreTrainedModel) -> None:
    decode_config = replace(DECODE, prefill_chunk=8, window_size=0, trie_nodes=4)

    def program(comm: ThreadComm) -> int:
        engine = Engine.from_model(model, decode=decode_config, comm=comm)
        long = engine.submit(list(range(1, 90)), LONG)
        engine.step()
        assert long.stats.num_fill_steps == 1 and not long.stats.num_steps
        engine.abort(long)
        engine.step()
        assert long.finish_reason == "abort" and not long.stats.num_steps
        return long.stats.num_fill_steps

    assert run_ranks(ThreadWorld(2), program) == [2, 2]


# Prefix reuse.


HITS = [(1, 0.9), (3, 0.0)]


@pytest.mark.parametrize("num_ranks, temperature", HITS)
def test_a_hit_equals_a_miss(num_ranks: int, temperature: float) -> None:
    """Prompts that grow, that share a beginning with a running one, and that come again, with neighbours cancelled."""
    model = tiny_model(seed=5, spread=0.12)
    base = [(7 * i * i) % 97 for i in range(60)]
    prompts = [base[:20], base[:40], base, [*base[:30], 5, 6], base[:40], [9, 9, 9], [*base, 1, 2, 3], base[:20]]
    params = [SamplingParams(max_new_tokens=20, temperature=temperature, seed=i) for i in range(len(prompts))]
    plain = Engine.from_model(model, decode=DecodeConfig.autoregressive(), prefix_reuse=False)
    expected = [plain.generate([prompt], each)[0].token_ids for prompt, each in zip(prompts, params, strict=True)]

    def program(comm: ThreadComm) -> tuple[list[list[int]], list[int]]:
        engine = Engine.from_model(model, decode=replace(DECODE, max_batch_size=3, prefill_chunk=16), comm=comm)
        requests = []
        for index, each in enumerate(zip(prompts, params, strict=True)):
            requests.append(engine.submit(*each))
            neighbour = engine.submit([*base[: 10 + index], 3], LONG)
            for _ in range(3):
                engine.step()
            engine.abort(neighbour)
        while not engine.is_idle:
            engine.step()
        return [request.token_ids for request in requests], [request.num_cached_tokens for request in requests]

    ranks = run_ranks(ThreadWorld(num_ranks), program)
    assert all(tokens == expected for tokens, _ in ranks)
    assert all(cached == ranks[0][1] for _, cached in ranks)
    assert sum(count > 15 for count in ranks[0][1]) >= 4, ranks[0][1]


def test_what_follows_the_end_is_not_reused(model: PreTrainedModel, expected: list[list[int]]) -> None:
    """A step can commit tokens behind a stop; the next prompt may repeat them, but their K/V does not count."""
    stop = expected[0][5]
    first = expected[0].index(stop)
    engine = Engine.from_model(model, decode=DECODE)
    [done] = engine.generate(PROMPTS[:1], replace(LONG, stop_token_ids=(stop,)))
    assert done.token_ids == expected[0][: first + 1]
    follow = [*PROMPTS[0], *expected[0][:30]]
    request = engine.submit(follow, SamplingParams(max_new_tokens=10))
    while request.finish_reason is None:
        engine.step()
    assert request.num_cached_tokens <= len(PROMPTS[0]) + first + 1
    assert request.token_ids == expected[0][30:40]


def test_mutant_a_prefix_that_one_rank_forgets(model: PreTrainedModel) -> None:
    def program(comm: ThreadComm) -> None:
        engine = Engine.from_model(model, decode=DECODE, comm=comm)
        engine.generate(PROMPTS[:1], LONG)
        if comm.rank == 1:
            engine.scheduler.placement.forget()
        engine.generate([[*PROMPTS[0], 1, 2]], LONG)

    with pytest.raises(DesyncError, match="rank 1"):
        run_ranks(ThreadWorld(3), program)


def test_mutant_stale_keys_and_values(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that counts as holding a prefix it does not hold changes the text."""
    admit = Scheduler.admit

    def wrong(self: Scheduler[Request]) -> Any:
        found = admit(self)
        return found and (found[0], [len(found[0].tokens) - 1] * self.limits.num_ranks)

    engine = Engine.from_model(model, decode=DECODE)
    right = engine.generate(PROMPTS[1:2], LONG)[0].token_ids
    monkeypatch.setattr(Scheduler, "admit", wrong)
    assert Engine.from_model(model, decode=DECODE).generate(PROMPTS[1:2], LONG)[0].token_ids != right


# Options.


def test_every_option_arrives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each flag of EngineOptions, given on the command line, reaches the engine."""
    costs = tmp_path / "costs.json"
    table = StepTimes.from_json({"nodes": [1, 8], "rows": [{"batch": 1, "kv": 256, "ms": [1.0, 2.0]}]})
    costs.write_text(json.dumps(table.to_json()))
    given = {"dtype": "float32", "device": "cpu", "attention": "sdpa", "graphs": False, "compile": "on",
             "tp_backend": "deepspeed", "costs": costs, "prefix_reuse": False, "exact": True,
             "revision": "abc", "kv_memory": 0.25, "swap_space": 2.5, "self_draft": "int8", "draft_ranks": 2,
             "lora_modules": ("a=/x",), "enable_lora": True, "kv_dtype": "fp8"}  # fmt: skip
    assert set(given) == {field.name for field in fields(EngineOptions)}, "a new option needs a value here"
    flags = []
    for name, value in given.items():
        flag = name.replace("_", "-")
        value = " ".join(value) if isinstance(value, tuple) else value
        flags += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    seen = []

    def stop(*args: object, **kwargs: object) -> None:
        seen.extend([args, kwargs])
        raise InputError("seen")

    monkeypatch.setattr(Engine, "from_pretrained", stop)
    assert main(["--prompt", "a", *flags]) == 2
    options = seen[0][2]
    for name, value in given.items():
        found = getattr(options, name)
        assert (found.to_json() == table.to_json()) if name == "costs" else found == value, name


def test_compile_is_not_dropped() -> None:
    """On a CPU there is nothing to compile, and the command says so instead of ignoring it."""
    with pytest.raises(InputError, match="compile works on captured steps"):
        Engine.from_pretrained(lpr.bundled_model(), DECODE, device="cpu", compile="on")


def test_only_rank_0_reads_the_step_times(model: PreTrainedModel, tmp_path: Path) -> None:
    table = {"nodes": [1, 64], "rows": [{"batch": 1, "kv": 256, "ms": [1.0, 3.0]}]}
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(table))

    def program(comm: ThreadComm) -> Any:
        costs = path if comm.rank == 0 else None
        engine = Engine.from_model(model, decode=DecodeConfig(max_nodes=32), comm=comm, costs=costs)
        assert engine.step_times is not None
        return engine.step_times.to_json(), engine.sizes

    first, *others = run_ranks(ThreadWorld(3), program)
    assert others == [first] * 2
    path.write_text("{}")
    with pytest.raises(InputError, match="--costs .*costs.json: not a table of step times"):
        run_ranks(ThreadWorld(2), program)


def test_lines_of_a_file_say_how_they_are_sampled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines: list[dict[str, Any]] = [
        {"prompt": "def f("},
        {"prompt": "def f(", "max_new_tokens": 5, "note": 1},
        {"prompt": "def f(", "temperature": 1.2, "seed": 3},
        {"prompt": "def f(", "stop": ["\n"]},
        {"prompt": "def f(", "temperature": "hot"},
        {"prompt": "def f(", "max_new_tokens": 0},
        {"prompt": "def f(", "seed": 1.5},
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["--prompts", str(source), "--output", str(target), "--max-new-tokens", "20"]) == 2
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    engine = Engine.from_pretrained(lpr.bundled_model(), device="cpu")
    wanted = [SamplingParams(max_new_tokens=20), SamplingParams(max_new_tokens=5),
              SamplingParams(max_new_tokens=20, temperature=1.2, seed=3),
              SamplingParams(max_new_tokens=20, stop=("\n",))]  # fmt: skip
    done = engine.generate(["def f("] * 4, wanted)
    assert [row["text"] for row in rows[:4]] == [each.text for each in done]
    assert len({row["text"] for row in rows[:4]}) == 4 and rows[1]["note"] == 1
    assert [row["error"] for row in rows[4:]] == [
        "line 5: temperature='hot' must be float, got str",
        "line 6: max_new_tokens=0 must be int >= 1",
        "line 7: seed=1.5 must be int, got float",
    ]


def test_parse_keeps_the_groups_apart(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('dtype = "float32"\ncosts = "a.json"\ncompile = "on"\nload_timeout = 5.0\n')
    args = parse(["--config", str(path), "--compile", "off"])
    assert args.options == EngineOptions(dtype="float32", costs=Path("a.json"), compile="off")
    assert args.load_timeout == 5.0


# What others see of us.


def test_the_drop_in_keeps_its_engine(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second call of the same size configures nothing anew."""
    configured = []
    apply = Replica.apply

    def counted(self: Replica, command: Command) -> None:
        if isinstance(command, Configure):
            configured.append(command.decode)
        apply(self, command)

    monkeypatch.setattr(Replica, "apply", counted)
    for _ in range(3):
        model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=8, custom_generate=lpr.Lookahead(DECODE))
    assert len(configured) == 1
