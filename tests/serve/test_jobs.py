"""Lost drivers and lost ranks behind the front: streams go on, and nothing reaches a client twice or not at all."""

import asyncio
import errno
import json
import tempfile
import threading

import httpx
import pytest

from lpr.protocol import Chunk, TokenLogprobs
from lpr.serve import keeper
from lpr.serve.jobs import acquit, blame, most_suspect
from lpr.serve.messages import Load, Pulse, Stepped, frame
from tests.fakes.fake_driver import FakeDriver, FakeRanks, facts, served, wait_for

TEXT = "return x + 1\n    if y: return [z for z in range(10)]\n"
PROMPT = "def f(x):\n    "


class Stream(threading.Thread):
    """One streamed completion, read in a thread; `body` and `found()` are what a client sees of it."""

    def __init__(self, url, **body):
        super().__init__(daemon=True)
        self.body = {
            "prompt": PROMPT,
            "stream": True,
            "return_token_ids": True,
            "logprobs": 1,
            "temperature": 0.8,
            "max_tokens": 64,
            **body,
        }
        self.events = []
        self.error = None
        self.status = None
        self.done = False
        self._url = url
        self.start()

    def run(self):
        with httpx.stream("POST", self._url + "/v1/completions", json=self.body, timeout=60) as response:
            self.status = response.status_code
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    self.done = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        self.error = event["error"]
                    else:
                        self.events.append(event["choices"][0])

    def found(self):
        """Ids, text, log-probabilities, offsets and end, without the borders of steps."""
        self.join(60)
        assert not self.is_alive(), "the stream did not end"
        logprobs = [event["logprobs"] for event in self.events]
        return {
            "ids": [token for event in self.events for token in event["token_ids"]],
            "text": "".join(event["text"] for event in self.events),
            "logprobs": [value for each in logprobs for value in each["token_logprobs"]],
            "offsets": [value for each in logprobs for value in each["text_offset"]],
            "finish": self.events[-1]["finish_reason"] if self.events else None,
            "done": self.done,
        }


class Script:
    """Prepares drivers: each counts the chunks that it says, and may call `at[number]` in place of the next step."""

    def __init__(self, **changes):
        self.changes = {"text": TEXT, "pause": 0.002, **changes}
        self.at = {}
        self.count = 0
        self.before = None
        self.service = None

    def __call__(self, driver):
        for name, value in self.changes.items():
            setattr(driver, name, value)

        def before_step(running):
            if self.before is not None:
                self.before(running)
            self.count += 1
            if (fault := self.at.pop(self.count, None)) is not None:
                fault(self.service.starts[-1])
                raise asyncio.CancelledError  # this driver takes no step any more

        driver.before_step = before_step

    def arm(self, *faults):
        """Let faults (number of the step from now on, what happens there) come about."""
        self.count = 0
        self.at = dict(faults)


def end(ranks):
    ranks.end(-9)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(keeper, "LAST_WORDS", 0.01)
    monkeypatch.setattr(keeper, "LOOK_EVERY", 0.05)


@pytest.fixture
def script():
    return Script()


def test_a_driver_that_vanishes_anywhere_costs_a_stream_nothing(quick, script):
    """Before the first chunk, in mid-stream, in the last one; all ranks lost, or another one takes over."""
    script.changes["per_step"] = 3
    with served(facts(), script) as service:
        script.service = service
        wanted = Stream(service.url).found()
        assert wanted["done"] and wanted["text"] == TEXT and wanted["finish"] == "stop"
        num_steps = script.count
        assert num_steps >= 6
        for number in range(1, num_steps + 1):
            script.arm((number, end))
            assert Stream(service.url).found() == wanted, f"all ranks lost at step {number}"
            for ahead in (-1, 0, 4):
                script.arm((number, lambda ranks, ahead=ahead: ranks.take_over(ahead)))
                assert Stream(service.url).found() == wanted, f"driver lost at step {number}, ranks {ahead} ids ahead"
        assert len(service.starts) == 1 + num_steps
        text = service.client.get("/metrics").text
        assert f'event="restart",model_name="fake"}} {num_steps}.0' in text
        assert f'event="takeover",model_name="fake"}} {3.0 * num_steps}' in text
        assert f'lpr:pause_seconds_count{{engine="0",model_name="fake"}} {4.0 * num_steps}' in text


def test_ids_without_their_end_are_not_sent_again(quick, script):
    script.changes["end_apart"] = True
    with served(facts(), script) as service:
        script.service = service
        wanted = Stream(service.url).found()
        num_steps = script.count
        for fault in (end, lambda ranks: ranks.take_over()):
            script.arm((num_steps, fault))  # all ids are there, and the end is not
            assert Stream(service.url).found() == wanted


def test_many_streams_survive_several_losses_in_a_row_and_keep_their_order(quick, script):
    script.changes["hold"] = True
    with served(facts(), script) as service:
        script.service = service
        streams = []
        for number in range(9):
            streams.append(Stream(service.url, prompt=f"p{number}", priority=-1 if number == 8 else 0))
            wait_for(
                lambda number=number: service.front.service.num_waiting + service.front.service.num_running > number
            )
        first = service.starts[0].drivers[0]
        wait_for(lambda: len(first.submitted) == 9)  # the front counts a request before the driver has it
        given = [submit.id for submit in first.submitted]
        assert first.begun == given[:4]
        script.changes["hold"] = False
        service.call(lambda: service.starts[0].end(1))
        script.arm((3, end), (5, lambda ranks: ranks.take_over(1)), (6, lambda ranks: ranks.take_over()), (9, end))
        assert [stream.found()["text"] for stream in streams] == [TEXT] * 9
        second = service.starts[1].drivers[0]
        assert [submit.id for submit in second.submitted[:9]] == given == second.resumed
        order = list(dict.fromkeys(id for ranks in service.starts for driver in ranks.drivers for id in driver.begun))
        assert order == [*given[:4], 9, *given[4:8]], "what waited keeps its order, the urgent one first"


def test_a_cancelled_request_does_not_come_back(quick, script):
    script.changes["hold"] = True
    with served(facts(), script) as service:
        stream = Stream(service.url, request_id="gone")
        kept = Stream(service.url)
        wait_for(lambda: len(service.starts[0].drivers[0].submitted) == 2)
        service.call(lambda: service.starts[0].drivers[0].vanish())
        wait_for(lambda: service.client.get("/readyz").status_code == 503)
        assert "takes over" in service.client.get("/readyz").json()["reason"]
        assert service.client.delete("/v1/requests/gone").status_code == 200
        script.changes["hold"] = False
        service.call(lambda: service.starts[0].take_over())
        assert kept.found()["text"] == TEXT and stream.found()["finish"] == "abort"
        driver = service.starts[0].drivers[-1]
        assert driver.resumed == [submit.id for submit in driver.submitted] and len(driver.resumed) == 1


def test_a_text_that_is_complete_does_not_come_back(quick, script):
    """The driver is lost before it says what the text took: the client has its answer, and no rank goes on with it."""
    script.changes |= {"text": "return x\nprint(1)\nfoo = 3\n", "per_step": 8}
    with served(facts(), script) as service:
        driver = service.starts[0].drivers[0]
        script.before = lambda running: setattr(driver, "hold", True)  # after one step
        answers, body = [], {"input_prefix": "def f(x):\n", "input_suffix": "\n", "prompt": "    ", "n_indent": 4}
        thread = threading.Thread(
            target=lambda: answers.append(httpx.post(service.url + "/infill", json=body, timeout=60))
        )
        thread.start()
        wait_for(lambda: driver.finished)
        assert not answers
        service.call(driver.vanish)
        thread.join(60)
        assert answers[0].status_code == 200 and answers[0].json()["content"] == "return x\n"
        service.call(lambda: service.starts[0].take_over())
        wait_for(lambda: len(service.starts[0].drivers) == 2 and service.starts[0].drivers[1].resumed is not None)
        assert service.starts[0].drivers[1].resumed == [] and not service.front.service.num_waiting


def test_while_the_ranks_are_away_requests_queue_and_health_says_why(quick, script):
    loading = threading.Event()
    with served(facts(), script, max_queue=1) as service:
        script.changes["hold"] = True
        begun = Stream(service.url)
        wait_for(lambda: service.starts[0].drivers[0].submitted)
        path = service.starts[0]._path
        keep = service.front._make_ranks

        def held(path):
            ranks = keep(path)
            start = ranks.start

            async def later():
                while not loading.is_set():
                    await asyncio.sleep(0.01)
                await start()

            ranks.start = later
            return ranks

        service.front._keeper._make = held
        service.call(lambda: service.starts[0].end(-9))
        wait_for(lambda: "all ranks were lost" in service.client.get("/readyz").text)
        response = service.client.get("/readyz")
        assert response.status_code == 503 and response.headers["retry-after"]
        assert service.client.get("/livez").status_code == 200, "a restart from outside would not help"
        assert 'lpr:ranks{engine="0",model_name="fake",state="missing"} 1.0' in service.client.get("/metrics").text
        queued = [Stream(service.url) for _ in range(5)]
        wait_for(lambda: service.front.service.num_waiting == 6)
        refused = service.client.post("/v1/completions", json={"prompt": PROMPT})
        assert refused.status_code == 503 and refused.headers["retry-after"]
        script.changes["hold"] = False
        loading.set()
        assert [stream.found()["text"] for stream in (begun, *queued)] == [TEXT] * 6
        assert service.client.get("/readyz").json()["ranks"] == {"present": 1, "wanted": 1}
        assert not path.exists() and service.starts[1]._path != path


def test_the_request_that_kills_the_ranks_fails_alone(quick, script):
    with served(facts(max_batch_size=4), script) as service:
        script.service = service
        poison = service.front.context.served.tokens.encode("poison")

        def before(running):
            if any(submit.token_ids[: submit.num_prompt] == poison for submit in running):
                service.starts[-1].end(-11)
                raise asyncio.CancelledError

        script.before = before
        script.changes["hold"] = True
        service.starts[0].drivers[0].hold = True
        streams = [Stream(service.url, prompt="poison" if number == 1 else f"good {number}") for number in range(7)]
        wait_for(lambda: service.front.service.num_waiting == 3 and service.front.service.num_running == 4)
        script.changes["hold"] = False
        service.starts[0].drivers[0].hold = False
        for number, stream in enumerate(streams):
            found = stream.found()
            if stream.body["prompt"] == "poison":
                assert found["ids"] == [] and stream.done and "SIGSEGV" in stream.error["message"]
                assert stream.error["type"] == "server_error"
            else:
                assert found["text"] == TEXT, number
        assert (
            'lpr:rank_events_total{engine="0",event="poison",model_name="fake"} 1.0'
            in service.client.get("/metrics").text
        )
        answer = service.client.post("/v1/completions", json={"prompt": "poison"})
        assert answer.status_code == 500 and "2 times on it alone" in answer.json()["error"]["message"]
        assert service.client.get("/readyz").status_code in (200, 503) and service.front._failure is None


def test_ranks_that_do_not_start_again_end_the_service_with_a_line(quick, script, monkeypatch, capsys):
    monkeypatch.setattr(keeper, "LONGEST_BACKOFF", 0.01)
    with served(facts(), script, max_failed_starts=3) as service:
        script.changes["hold"] = True
        stream = Stream(service.url)
        wait_for(lambda: service.starts[0].drivers[0].submitted)
        keep = service.front._make_ranks

        def broken(path):
            ranks = keep(path)

            async def fail():
                ranks.end(1)

            ranks.start = fail
            return ranks

        service.front._keeper._make = broken
        service.call(lambda: service.starts[0].end(1))
        stream.join(20)
        assert stream.error["type"] == "service_unavailable" and stream.done
        assert service.ended() == 1
    said = capsys.readouterr().err
    assert "3 starts of the ranks in a row have failed, the last one because they ended with code 1" in said
    assert len(service.starts) == 4


def test_ranks_that_cannot_be_started_count_as_failed_starts(quick, script, monkeypatch, capsys):
    """Out of memory there is no new process; the service says so, and ends when that goes on."""
    monkeypatch.setattr(keeper, "LONGEST_BACKOFF", 0.01)
    with served(facts(), script, max_failed_starts=3) as service:
        wait_for(lambda: service.front.service.mesh.up)

        async def fail(ranks):
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

        monkeypatch.setattr(FakeRanks, "start", fail)
        service.call(lambda: service.starts[0].end(-9))
        assert service.ended() == 1
    assert "the last one because they could not be started (Cannot allocate memory)" in capsys.readouterr().err


def test_a_keeper_that_fails_ends_the_service(quick, script, monkeypatch, capsys):
    with served(facts(), script) as service:
        wait_for(lambda: service.front.service.mesh.up)
        monkeypatch.setattr(service.front._keeper, "_make", lambda path: 1 // 0)
        service.call(lambda: service.starts[0].end(-9))
        assert service.ended() == 1
    assert "internal error: ZeroDivisionError" in capsys.readouterr().err


def test_a_long_folder_for_temporary_files_does(quick, script, monkeypatch, tmp_path):
    """The name of a socket has 107 bytes at most."""
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with served(facts(), script) as service:
        wait_for(lambda: service.front.service.mesh.up)
        assert service.client.get("/readyz").status_code == 200


def test_another_width_of_the_mesh_has_other_slots(quick, script):
    """Elastic replicas bring slots of their own, and come back fewer or more than they were."""
    with served(facts(lp=3, max_batch_size=6), script) as service:
        script.changes["hold"] = True
        first = service.starts[0].drivers[0]
        first.hold = True
        streams = [Stream(service.url) for _ in range(8)]
        wait_for(lambda: len(first.submitted) == 8 and service.front.service.num_running == 6)
        first.pulses = False
        lost = Stepped([], Load([1, 2, 3, 4], num_slots=4, num_ranks=2, epoch=1))
        service.call(lambda: first._writer.write(frame(lost)))
        wait_for(lambda: service.front.service.num_running == 4)
        keep = service.front._make_ranks

        def fewer(path):
            ranks = keep(path)
            ranks._said = facts(lp=1, max_batch_size=2)
            return ranks

        service.front._keeper._make = fewer
        script.changes["hold"] = False
        service.call(lambda: service.starts[0].end(-9))
        assert [stream.found()["text"] for stream in streams] == [TEXT] * 8
        assert service.front.service.mesh.num_slots == 2 and service.front._failure is None


def test_ranks_that_came_back_with_another_model_are_refused(quick, script, capsys):
    with served(facts(), script) as service:
        service.starts[0]._said = facts(vocab_size=4000)
        keep = service.front._make_ranks

        def other(path):
            ranks = keep(path)
            ranks._said = facts(eos_token_ids=[1])
            return ranks

        service.front._keeper._make = other
        service.call(lambda: service.starts[0].end(-9))
        assert service.ended() == 2
    assert "came back with another eos token ids, so no output can go on" in capsys.readouterr().err


def test_a_driver_that_stands_still_is_replaced(quick, script, monkeypatch):
    monkeypatch.setattr("lpr.serve.mesh_state.STALE_PULSE", 0.4)
    with served(facts(), script) as service:
        monkeypatch.setattr(keeper, "SILENT_SECONDS", 1.0)
        driver = service.starts[0].drivers[0]
        driver.hold, driver.pulses = True, False
        stream = Stream(service.url)
        wait_for(lambda: service.client.get("/livez").status_code == 503, 5)
        assert stream.found()["text"] == TEXT and len(service.starts) == 2


def test_a_step_that_does_not_end_is_not_life(script):
    with served(facts(), script, timeout=300) as service:
        driver = service.starts[0].drivers[0]
        driver.pulses = False
        load = Load([1], last_step=299.0)
        service.call(lambda: driver._writer.write(frame(Pulse(load))))
        wait_for(lambda: service.front.service.mesh.load.last_step == 299.0)
        assert service.client.get("/livez").status_code == 200, "a long prefill is no death"
        load = Load([1], last_step=301.0)
        service.call(lambda: driver._writer.write(frame(Pulse(load))))
        wait_for(lambda: service.client.get("/livez").status_code == 503)
        assert "no step has ended" in service.client.get("/readyz").json()["reason"]


def test_what_an_earlier_driver_still_says_is_not_heard(quick, script):
    script.changes["hold"] = True
    with served(facts(), script) as service:
        stream = Stream(service.url)
        ranks = service.starts[0]
        wait_for(lambda: ranks.drivers[0].submitted)
        old = ranks.drivers[0]
        service.call(lambda: ranks.take_over(keep=True))
        wait_for(lambda: len(ranks.drivers) == 2 and ranks.drivers[1].submitted)
        id = ranks.drivers[1].submitted[0].id
        service.call(lambda: old.say(Chunk(id, [7, 8], "wrong", "stop")))
        stranger = FakeDriver(ranks._path, facts(), epoch=0)  # one of the first epoch that comes late
        service.call(lambda: ranks._tasks.append(asyncio.ensure_future(stranger.run())))
        wait_for(lambda: stranger._writer is not None)
        for driver in ranks.drivers:
            driver.hold = False
        assert stream.found()["text"] == TEXT and not stranger.submitted


def test_doubled_tokens_are_cut_and_missing_ones_are_asked_for_again(quick, script):
    script.changes["hold"] = True
    with served(facts(), script) as service:
        stream = Stream(service.url)
        ranks = service.starts[0]
        wait_for(lambda: ranks.drivers[0].submitted)
        driver = ranks.drivers[0]
        id = driver.submitted[0].id
        whole, _ = driver.running[id], driver.running.pop(id)
        ids = driver._tokenizer.encode(TEXT).ids

        def chunk(start, end, at=0):
            logprobs = [TokenLogprobs(-0.5, [(token, -0.5)]) for token in ids[start:end]]
            before, text = driver._said(start), driver._said(end)[len(driver._said(start)) :]
            return Chunk(id, ids[start:end], text, logprobs=logprobs, start=start, start_character=len(before))

        for first, last in ((0, 3), (0, 3), (1, 5), (2, 4), (5, 6)):
            service.call(lambda first=first, last=last: driver.say(chunk(first, last)))
        wait_for(lambda: sum(len(event["token_ids"]) for event in stream.events) == 6)
        service.call(lambda: driver.say(chunk(8, 9)))
        wait_for(lambda: not service.front.service.mesh.up)
        script.changes["hold"] = False
        driver.running[id] = (whole[0], 6)
        service.call(lambda: ranks.take_over())
        found = stream.found()
        assert found["ids"] == ids and found["text"] == TEXT and len(found["logprobs"]) == len(ids)
        assert found["offsets"] == sorted(set(found["offsets"]))


class Request:
    def __init__(self, name):
        self.name, self.deaths, self.lone_deaths = name, 0, 0


@pytest.mark.parametrize("num_good", [0, 1, 5])
@pytest.mark.parametrize("num_poisons", [1, 3])
def test_suspects_are_tried_alone_until_the_poison_is_found(num_good, num_poisons):
    """A run of the rules: ranks die on each poison before it shows a token."""
    poisons = [Request(f"poison {number}") for number in range(num_poisons)]
    everything = [Request(f"good {number}") for number in range(num_good)] + poisons
    left, failed, deaths = list(everything), [], 0
    while any(poison in left for poison in poisons):
        suspect = most_suspect(left)
        running = [suspect] if suspect is not None else list(left)
        if not any(request in poisons for request in running):
            acquit(running[0])  # it showed a token
            continue
        deaths += 1
        assert deaths <= 4 * len(everything) * num_poisons
        found = blame(running, left)
        if found is not None:
            failed.append(found)
            left.remove(found)
    assert sorted(request.name for request in failed) == sorted(request.name for request in poisons)
    assert all(request in left for request in everything if request not in poisons)


def test_one_death_makes_nobody_a_suspect():
    request = Request("unlucky")
    for _ in range(10):
        assert blame([request], [request]) is None and most_suspect([request]) is None
        acquit(request)  # it goes on
    assert blame([request], [request]) is None and blame([request], [request]) is request


def test_who_dies_in_company_is_never_convicted():
    both = [Request("one"), Request("other")]
    for _ in range(10):
        assert blame(both, both) is None
    assert most_suspect(both) is both[0] and blame(both[:1], both) is None and blame(both, both) is None
    assert blame(both[:1], both) is None, "not twice in a row alone"
