"""The chaos benchmark's own measures: what a pause is, what counts as different, what counts as left behind."""

import subprocess
import sys
from collections import Counter

import psutil
import pytest

from benchmarks import chaos
from benchmarks.chaos import Clients, Output, bodies, pauses
from benchmarks.processes.leaks import Traces


def test_a_pause_is_the_longest_silence_from_a_loss_to_the_next():
    events = [0.0, 1.0, 1.5, 4.0, 4.1, 9.0]
    assert list(pauses(events, [1.2, 3.9], 10.0)) == pytest.approx([2.4, 4.9])
    assert list(pauses([], [1.0], 3.0)) == [2.0] and list(pauses(events, [], 10.0)) == []


def test_bodies_are_of_all_kinds_and_the_same_for_a_seed():
    made = bodies(24, 0)
    assert made == bodies(24, 0) != bodies(24, 1)
    assert Counter(body["temperature"] for body in made) == {0: 12, 0.8: 12}
    for name in ("presence_penalty", "stop", "logprobs", "top_p", "min_tokens"):
        assert any(name in body for body in made), name


def test_every_difference_counts_but_the_last_bits_of_log_probabilities():
    wanted = Output("ab", [1, 2], "stop", [0, 1], [-0.5, -0.25], 2)
    clients = Clients("http://127.0.0.1:1", [{}])
    clients.compare({}, Output("ab", [1, 2], "stop", [0, 1], [-0.5, -0.250001], 2), wanted)
    assert not clients.different and 0 < clients.largest_difference < chaos.LOGPROB_TOLERANCE
    for changed in ({"text": "a"}, {"ids": [1, 3]}, {"finish": "length"}, {"offsets": [0, 2]}, {"num_tokens": 3}):
        clients.compare({}, Output(**{**vars(wanted), **changed}), wanted)
    assert len(clients.different) == 5
    clients.compare({}, Output(failed="HTTP 503"), wanted)
    assert clients.failed == ["HTTP 503"]


def test_what_is_left_behind_is_counted(tmp_path):
    code = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(1, flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline()
        traces = Traces(psutil.Process(child.pid), tmp_path)
        traces.look()
        (tmp_path / "file").touch()
        left = traces.left()
        assert (left["processes"], left["ports"], left["files"]) == (1, 1, 1)
    finally:
        child.kill()
        child.wait(20)
        child.stdout.close()
    (tmp_path / "file").unlink()
    assert {**traces.left(), "shared_memory": 0} == {"processes": 0, "ports": 0, "files": 0, "shared_memory": 0}


@pytest.mark.parametrize("words", [["--minutes", "0"], ["--ranks", "0"], ["--every", "-1"], ["--nonsense"]])
def test_bad_input_is_one_line_and_code_2(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["chaos.py", *words])
    assert chaos.main() == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith("benchmarks.chaos: ")


def test_only_ranks_are_hit():
    class Process:
        def __init__(self, *words, status="running"):
            self.cmdline, self.status = lambda: list(words), lambda: status

    assert chaos.is_rank(Process("python", "-m", "lpr.serve.ranks.rank", "--lp", "3"))
    assert not chaos.is_rank(Process("python", "-m", "lpr.dist.supervisor", "3", "1", "lpr.serve.ranks.rank"))
    assert not chaos.is_rank(Process("python", "-m", "lpr.serve", "--lp", "3"))
    assert not chaos.is_rank(Process("python", "-m", "lpr.serve.ranks.rank", status=psutil.STATUS_STOPPED))
