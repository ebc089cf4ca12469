"""The programs that load the service, over a driver without a model: loads, hostile clients, and what they count."""

import json
import threading

import pytest
from fake_driver import served

from benchmarks import serve, soak
from benchmarks.hostile import MAX_BODY, Hostile


def test_every_load_of_the_benchmark_is_counted(tmp_path, capsys, monkeypatch):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"def f{number}(x):\n    return x\n"}) + "\n" for number in range(5)))
    monkeypatch.setattr(serve, "KEY_SECONDS", 0.02)
    loads = ["closed:2", "poisson:50", "burst:2", "typing:2"]
    with served() as service:
        command = ["benchmarks.serve", "--data", str(data), "--url", service.url, "--json", "--rounds", "2"]
        monkeypatch.setattr("sys.argv", [*command, "--requests", "4", "--loads", *loads])
        assert serve.main() == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    runs = {run["case"]: run for run in result["runs"]}
    assert list(runs) == loads and result["num_failed"] == 0
    for load in loads[:3]:
        assert (runs[load]["requests"], runs[load]["completed"], runs[load]["tokens_per_step"]) == (8, 8, 2.0)
        assert runs[load]["ttft_ms"]["p50"] <= runs[load]["end_to_end_ms"]["p99"]
    typed = runs["typing:2"]
    assert typed["requests"] == 2 * 2 * 4 == typed["completed"] + typed["cancelled"]


def test_a_failed_request_is_counted_and_not_averaged():
    answers = [serve.Answer(ttft=0.1, seconds=0.2, num_tokens=4, num_steps=2), serve.Answer(failed="HTTP 500")]
    options = serve.ServeOptions(data="none")
    found = serve.summary([serve.Round(answers, 1.0), serve.Round(answers[:1], 1.0)], options)
    assert (found["requests"], found["completed"], found["num_failed"]) == (3, 2, 1)
    assert found["end_to_end_ms"]["p50"] == 200 and found["goodput_per_second"] == 1.0
    with pytest.raises(RuntimeError, match="HTTP 500"):
        serve.summary([serve.Round(answers[1:], 1.0)], options)


def test_no_hostile_client_gets_more_than_it_should():
    """Each way of doing harm, twice; then the service is idle and answers as before."""
    tally, stop = soak.Tally(), threading.Event()
    with served(api_key=soak.KEY, max_body=MAX_BODY) as service:
        service.driver.pause = 0.01
        hostile = Hostile(service.url, soak.KEY, "seed", tally.count, stop)
        stop.set()  # so that nobody waits, but to be dropped
        for way in hostile.ways:
            for _ in range(2):
                try:
                    way()
                except OSError:
                    tally.count(f"{way.__name__}: hung up on")
        assert not tally.problems
        assert {"status 401", "status 413", "dropped", "unread"} <= set(tally.counts), tally.counts
        running = type("Running", (), {"url": service.url})
        held = soak.left_open(running, 10.0)
        assert (held["running"], held["waiting"]) == (0, 0)
        cases = [soak.Case({"prompt": "a", "n": 2}, ("return x + 1\n",) * 2), soak.Case({"prompt": "b"}, ("no",))]
        stop.clear()
        asking = threading.Thread(target=soak.ask, args=(service.url, cases, "seed", 0.0, tally, stop))
        asking.start()
        stop.wait(0.5)
        stop.set()
        asking.join(20)
    assert tally.counts["answer"] > tally.counts["wrong: answer"] > 0, "the wrong text is found, and only that"


def test_growth_is_counted_once_the_caches_are_warm():
    samples = [soak.Sample(at, {1: 100.0 + 50 * (at > 2), 2: 10.0 + at}, {1: 9}) for at in range(40)]
    found = soak.growth(samples, "megabytes")
    assert found[1] == 0 and found[2] > 25
