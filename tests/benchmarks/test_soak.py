"""Hostile clients of the service and the soak, partly over a driver without a model."""

import contextlib
import itertools
import socket
import threading
import time

from benchmarks import soak
from benchmarks.hostile.livez import Livez, summary
from benchmarks.hostile.neighbours import KEYS, Case, Tally, ask, first_tokens
from tests.fakes.fake_driver import served
from tests.fakes.hostile.client import Client
from tests.fakes.hostile.probes import PROBES


def client_of(url, key=""):
    """A hostile client that is in a hurry."""
    return Client(url, key, KEYS[1], seed="seed", hold=0.3, links=150)


def test_a_service_without_keys_answers_under_its_own_names_only():
    keyless = [each for each in PROBES.values() if each.is_keyless]
    with served() as service:
        for each in keyless:
            assert each.once(client_of(service.url)) == ({"421": 1}, "")


def test_a_wrong_text_is_found_and_only_that():
    tally, stop = Tally(), threading.Event()
    with served(api_key=KEYS[1]) as service:
        cases = [Case({"prompt": "a", "n": 2}, ("return x + 1\n",) * 2), Case({"prompt": "b"}, ("no",))]
        asking = threading.Thread(target=ask, args=(service.url, cases, "seed", 0.0, tally, stop))
        asking.start()
        time.sleep(0.5)
        stop.set()
        asking.join(20)
    assert tally.counts["answer"] > tally.counts["wrong: answer"] > 0
    assert all("'prompt': 'b'" in problem for problem in tally.problems)
    assert 0 < len(tally.first_tokens) < tally.counts["answer"]


def test_limits_of_the_soak():
    streams = [(at, 0.1 if at < 10 else 0.3) for at in range(20)]
    found = first_tokens(streams, {"alone": (0.0, 10.0), "attacked": (10.5, 19.5)})
    assert found == {"alone_streams": 10, "alone_s": 0.1, "attacked_streams": 9, "attacked_s": 0.3, "ratio": 3.0}
    asked = [(float(at), 1.0 if at % 2 else None) for at in range(100)]
    options = soak.SoakOptions()
    broken = soak.limits_broken(options, {"livez": {"attacked": summary(asked, 50.0)}, "first_token": found})
    assert broken == [
        "/livez failed 25 times", "the 99th percentile of /livez is 30000.0 ms",
        "the median time to the first token is 3.0 times that without hostile clients",
    ]  # fmt: skip
    few = first_tokens(streams[:3], {"alone": (0.0, 9.0), "attacked": (9.0, 9.0)})
    fine = {"livez": {"attacked": summary(asked[1::2])}, "first_token": few}
    assert soak.limits_broken(options, fine) == []


def test_a_stall_counts_as_often_as_a_client_would_have_met_it():
    """A server that answers its third client after a second: the times that pass meanwhile are late too."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            with contextlib.suppress(OSError):
                for number in itertools.count():
                    with server.accept()[0] as link:
                        link.recv(1000)
                        time.sleep(1.0 if number == 2 else 0.0)
                        link.sendall(b"HTTP/1.1 503 no\r\n\r\n" if number == 4 else b"HTTP/1.1 200 OK\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        livez = Livez(f"http://127.0.0.1:{server.getsockname()[1]}", 0.05)
        time.sleep(2.5)
        asked = livez.asked()
    late = [ms for _, ms in asked if ms is not None and ms > 100]
    assert 15 < len(late) <= 21 and 900 < max(late) < 1500 and late == sorted(late, reverse=True)
    found = summary(asked)
    assert found["failed"] == 1 and found["max_ms"] == 30000 and found["late"] >= 1


def test_growth_is_counted_once_the_caches_are_warm():
    samples = [soak.Sample({1: 100.0 + 50 * (at > 2), 2: 10.0 + at}, {1: 9}) for at in range(40)]
    found = soak.growth(samples, "megabytes")
    assert found[1] == 0 and found[2] > 25
