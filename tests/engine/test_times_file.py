"""Step times on disk: read by rank 0 for all, written back as they became, and never needed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

import lpr.engine.sizing
import lpr.engine.times_file
from lpr import DecodeConfig, Engine, SamplingParams
from lpr.core.constants import KNOTS
from lpr.core.step_times import StepTimes
from lpr.engine.times_file import StartTimes
from tests.conftest import MEASURING
from tests.fakes.models import tiny_model
from tests.fakes.worlds import ThreadWorld, run_ranks

DECODE = DecodeConfig(max_nodes=8, max_length=64, max_batch_size=1)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache on a machine that does nothing else: a busy one's times are not kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, seconds in MEASURING.items():
        monkeypatch.setattr(lpr.engine.sizing, name, seconds)
    forwards_are(monkeypatch, lambda number: 1)
    return tmp_path


def forwards_are(monkeypatch: pytest.MonkeyPatch, delay: Callable[[int], float]) -> None:
    """From now on, n tokens of a batch take 2 + batch + 0.1 n ms, each forward as late as its number says."""
    timed: list[int] = []

    def time_forward(model: object, batch: int, count: int, kv: int) -> float:
        timed.append(count)
        return (2 + batch + 0.1 * count) / 1e3 * delay(len(timed))

    monkeypatch.setattr(lpr.engine.sizing, "time_forward", time_forward)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """An entry per measurement from now on."""
    measure, calls = lpr.engine.times_file.measure_step_times, []

    def count(*args: object) -> tuple[StepTimes, bool]:
        calls.append(None)
        return measure(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(lpr.engine.times_file, "measure_step_times", count)
    return calls


def start_while(monkeypatch: pytest.MonkeyPatch, delay: Callable[[int], float]) -> Engine:
    """An engine that starts while forwards are so late."""
    forwards_are(monkeypatch, delay)
    return Engine.from_model(tiny_model(), decode=DecodeConfig(max_nodes=8, max_length=64, max_batch_size=3))


def test_an_engine_that_starts_again_reads_what_the_first_one_found(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = counted(monkeypatch)
    first = Engine.from_model(tiny_model(), decode=DECODE)
    (file,) = home.rglob("*.json")
    assert json.loads(file.read_text()) == first.step_times.to_json() and len(calls) == 1
    first.generate([[5, 6, 7]], SamplingParams(max_new_tokens=40))
    first.close()
    second = Engine.from_model(tiny_model(seed=1), decode=DECODE)
    assert len(calls) == 1, "other weights of the same shapes take the same time"
    assert second.step_times.to_json() == json.loads(file.read_text())
    Engine.from_model(tiny_model(hidden_size=32), decode=DECODE)
    assert len(calls) == 2, "another shape does not"


def test_a_table_from_disk_that_is_wrong_is_corrected_by_steps(home: Path) -> None:
    """It was measured on another day: what steps take is followed from the first one on, and kept at the end."""
    Engine.from_model(tiny_model(), decode=DECODE)
    (file,) = home.rglob("*.json")
    table = json.loads(file.read_text())
    slow = StepTimes({key: [100 * ms for ms in row] for key, row in StepTimes.from_json(table).rows.items()})
    file.write_text(json.dumps(slow.to_json()))
    engine = Engine.from_model(tiny_model(), decode=DECODE)
    assert engine.step_times.to_json() == slow.to_json()
    for _ in range(4):
        engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=56))
    engine.close()
    before, after = slow.time(1, 1, 1), StepTimes.from_json(json.loads(file.read_text())).time(1, 1, 1)
    assert after < before / 2 and after == engine.step_times.time(1, 1, 1)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"nodes": [1, 2], "rows": []}', b"\xff"])
def test_a_damaged_file_is_measured_anew(home: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    calls = counted(monkeypatch)
    Engine.from_model(tiny_model(), decode=DECODE)
    (file,) = home.rglob("*.json")
    file.write_bytes(content)
    Engine.from_model(tiny_model(), decode=DECODE)
    assert len(calls) == 2 and StepTimes.from_json(json.loads(file.read_text())).rows


@pytest.mark.parametrize("part", [0.0, 0.1, 0.3])
def test_forwards_that_were_disturbed_do_not_count(home: Path, monkeypatch: pytest.MonkeyPatch, part: float) -> None:
    rng = random.Random(0)
    engine = start_while(monkeypatch, lambda number: 1 + 9 * (rng.random() < part))
    for batch, count in ((1, 1), (1, 2), (1, 4), (3, 3), (3, 6)):
        assert engine.step_times.time(count, batch) == pytest.approx(2 + batch + 0.1 * count, rel=0.01)
    assert len(list(home.rglob("*.json"))) == 1


@pytest.mark.parametrize(
    "delay",
    [
        pytest.param(lambda number: 1.3 ** (number % 40), id="no two times agree"),
        pytest.param(lambda number: 1 + 4 * (number < 26), id="a program ended before the batch was measured"),
    ],
)
def test_times_of_a_busy_machine_are_not_kept(
    home: Path, monkeypatch: pytest.MonkeyPatch, delay: Callable[[int], float]
) -> None:
    calls = counted(monkeypatch)
    for _ in range(2):
        engine = start_while(monkeypatch, delay)
        assert engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=8))[0].stats.num_tokens == 8
        engine.close()
    assert len(calls) == 2 and not list(home.rglob("*.json"))


def test_a_file_of_times_that_cannot_be_right_is_measured_anew(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch)
    Engine.from_model(tiny_model(), decode=DECODE)
    (file,) = home.rglob("*.json")
    file.write_text(json.dumps(StepTimes({(1, 256): [1.0] + [20.0] * (len(KNOTS) - 1)}).to_json()))
    assert Engine.from_model(tiny_model(), decode=DECODE).step_times.fault() is None
    assert len(calls) == 2


def test_what_a_row_beyond_16_costs_is_measured(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A jump between two numbers of tokens is no slope, of a batch neither."""

    def time_forward(model: object, batch: int, count: int, kv: int) -> float:
        return (10 + batch + 5 * (count > 16) + 0.1 * count) / 1e3

    monkeypatch.setattr(lpr.engine.sizing, "time_forward", time_forward)
    decode = DecodeConfig(max_nodes=64, max_length=512, max_batch_size=3)
    times = Engine.from_model(tiny_model(), decode=decode).step_times
    for batch in (1, 3):
        assert times.time(16, batch) == pytest.approx(11.6 + batch)
        assert times.time(17, batch) == pytest.approx(16.7 + batch)


def test_what_longer_text_costs_lies_on_a_line(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two numbers of tokens tell it for all: attention reads the text once per token. A start is short so.

    A batch is timed at some numbers of tokens, and has the jumps of a single sequence between them.
    """
    timed: list[tuple[int, int, int]] = []

    def time_forward(model: object, batch: int, count: int, kv: int) -> float:
        timed.append((batch, count, kv))
        each = 0.1 + 0.2 * kv / 1024 + 0.01 * batch
        return (10 + batch + 5 * (count > 16) + 3 * (count > 32) + each * count) / 1e3

    monkeypatch.setattr(lpr.engine.sizing, "time_forward", time_forward)
    decode = DecodeConfig(max_nodes=64, max_length=2048, max_batch_size=3)
    times = Engine.from_model(tiny_model(max_position_embeddings=2048), decode=decode).step_times
    for batch, kv, each in ((1, 256, 0.16), (1, 640, 0.235), (1, 1024, 0.31), (3, 256, 0.18), (3, 640, 0.255)):
        for count in (3, 16, 17, 32, 33, 49, 64):
            expected = 10 + batch + 5 * (count > 16) + 3 * (count > 32) + each * count
            assert times.time(count, batch, kv) == pytest.approx(expected, rel=1e-3)
    assert {(batch, count) for batch, count, kv in timed if kv == 1024} == {(1, 1), (1, 64), (3, 3), (3, 64)}
    assert (3, 17, 256) in timed and (3, 33, 256) not in timed


def test_the_first_node_of_a_larger_batch_is_measured(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs more than others, whatever the batch: 3 ms between 16 and 17 tokens of 16 sequences, not of one."""

    def time_forward(model: object, batch: int, count: int, kv: int) -> float:
        return (10 + batch + 3 * (count > batch) + 0.1 * count) / 1e3

    monkeypatch.setattr(lpr.engine.sizing, "time_forward", time_forward)
    decode = DecodeConfig(max_nodes=64, max_length=512, max_batch_size=16)
    times = Engine.from_model(tiny_model(), decode=decode).step_times
    assert times.time(17, 16) - times.time(16, 16) == pytest.approx(3.1, abs=0.01)
    assert times.time(32, 16) - times.time(17, 16) == pytest.approx(1.5, abs=0.01)
    assert [size for size, _ in times.rows] == [1, 8, 16]


@pytest.mark.parametrize("slow, rounds", [(0.5, 24), (20.0, 2)])
def test_the_smallest_trees_are_timed_until_their_times_are_sure(
    slow: float, rounds: int, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain step that is late six times, so that a first node seems free; a slow model does not wait for more."""
    calls: list[int] = []

    def time_forward(model: object, batch: int, count: int, kv: int) -> float:
        calls.append(count)
        late = 0.4 * (count == 1 and calls.count(1) <= 6)
        return slow * (2 + 0.3 * min(count, 4) + late + 0.1 * count) / 1e3

    monkeypatch.setattr(lpr.engine.sizing, "time_forward", time_forward)
    decode = DecodeConfig(max_nodes=64, max_length=256, max_batch_size=1)
    times = Engine.from_model(tiny_model(), decode=decode).step_times
    assert calls.count(1) == rounds + 1 and calls.count(2) == rounds, "once more to set libraries up"
    assert (times.time(2, 1) > 1.1 * times.time(1, 1)) == (rounds > 6)


def test_a_home_that_takes_no_files_is_no_error(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "lpr").write_text("in the way")
    assert Engine.from_model(tiny_model(), decode=DECODE).step_times is not None


def test_all_ranks_decide_by_rank_0s_file(home: Path) -> None:
    models = [[tiny_model(), tiny_model()] for _ in range(2)]  # here: threads would share the generator
    known = StepTimes({(1, 256): [float(1 + index) for index in range(len(KNOTS))]})

    def start(comm):  # type: ignore[no-untyped-def]
        first, second = models[comm.rank]
        engine = Engine.from_model(first, decode=DECODE, comm=comm)
        if comm.rank == 0:
            engine.replica.start_times.keep(known)
        again = Engine.from_model(second, decode=DECODE, comm=comm)
        return again.step_times.to_json()

    found = run_ranks(ThreadWorld(2), start)
    assert found == [known.to_json()] * 2


def test_only_rank_0_writes(home: Path) -> None:
    engine = Engine.from_model(tiny_model(), decode=DECODE)
    (file,) = home.rglob("*.json")
    file.unlink()

    class Other(type(engine.comm)):  # type: ignore[misc]
        rank, size = 1, 2

    times = StartTimes(None, Other())
    times.path = file
    times.keep(engine.step_times)
    assert not list(home.rglob("*.json"))
