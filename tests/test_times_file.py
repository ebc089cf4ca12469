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
from lpr.core.step_times import StepTimes
from lpr.engine.times_file import StartTimes
from tests.conftest import tiny_model
from tests.worlds import ThreadWorld, run_ranks

DECODE = DecodeConfig(max_nodes=8, max_length=64, max_batch_size=1)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache on a machine that does nothing else: a busy one's times are not kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
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
        pytest.param(lambda number: 1 + 9 * (number < 26), id="a program ended before the batch was measured"),
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
    file.write_text(json.dumps(StepTimes({(1, 256): [1.0] + [20.0] * 15}).to_json()))
    assert Engine.from_model(tiny_model(), decode=DECODE).step_times.fault() is None
    assert len(calls) == 2


def test_a_home_that_takes_no_files_is_no_error(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "lpr").write_text("in the way")
    assert Engine.from_model(tiny_model(), decode=DECODE).step_times is not None


def test_all_ranks_decide_by_rank_0s_file(home: Path) -> None:
    models = [[tiny_model(), tiny_model()] for _ in range(2)]  # here: threads would share the generator
    known = StepTimes({(1, 256): [float(1 + index) for index in range(16)]})

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
