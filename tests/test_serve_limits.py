"""Each limit of the service (lpr.serve.limits): what is within is taken, and what is beyond gets its answer."""

from __future__ import annotations

import threading
import time

import httpx
from fake_driver import served

from lpr.engine.waiting import MOST_PRIORITY, Waiting
from lpr.serve import limits


def key(name):
    return {"Authorization": f"Bearer {name}"}


def ask_in_thread(service, name, **body):
    """Ask with a key; returns a function that waits for the answer."""
    answers = []
    url, body = service.url + "/v1/completions", {"prompt": "p", "max_tokens": 4, **body}
    thread = threading.Thread(target=lambda: answers.append(httpx.post(url, json=body, headers=key(name), timeout=30)))
    thread.start()

    def answer():
        thread.join(30)
        return answers[0]

    return answer


def wait_for(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.005)


def num_open(service):
    return service.front.service.num_running + service.front.service.num_waiting


def refused(service, name, words, **body):
    response = service.client.post("/v1/completions", json={"prompt": "p", **body}, headers=key(name))
    assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1, response.text
    assert words in response.json()["error"]["message"]


def test_key_requests():
    # By default a key of several holds half of slots, queue and the one on hand: here 4 + 5 + 1.
    for flags, most in (({"max_queue": 5}, 5), ({"max_requests_per_key": 2}, 2)):
        with served(api_key="a,b", **flags) as service:
            service.driver.hold = True
            answers = [ask_in_thread(service, "a") for _ in range(most)]
            wait_for(lambda: num_open(service) == most)  # noqa: B023
            refused(service, "a", f"--max-requests-per-key is {most}")
            answers += [ask_in_thread(service, "b") for _ in range(most)]
            wait_for(lambda: num_open(service) == 2 * most)  # noqa: B023
            response = service.client.post("/v1/completions", json={"prompt": "p", "n": most + 1}, headers=key("b"))
            assert response.status_code in (400, 429)
            service.driver.hold = False
            assert [answer().status_code for answer in answers] == [200] * 2 * most
    with served(api_key="a", max_queue=1) as service:  # a lone key gets everything
        service.driver.hold = True
        answers = [ask_in_thread(service, "a") for _ in range(6)]
        wait_for(lambda: num_open(service) == 6)
        service.driver.hold = False
        assert [answer().status_code for answer in answers] == [200] * 6


def test_key_tokens():
    long = [7] * 30
    for flags, most in (({"max_queued_tokens": 100}, 50), ({"max_tokens_per_key": 50}, 50)):
        with served(api_key="a,b", **flags) as service:
            service.driver.hold = True
            answers = [ask_in_thread(service, "a") for _ in range(5)]  # the slots, and the one on hand
            wait_for(lambda: num_open(service) == 5)
            answers.append(ask_in_thread(service, "a", prompt=long))
            wait_for(lambda: service.front.service.num_queued_tokens == 30)
            refused(service, "a", f"--max-tokens-per-key is {most}", prompt=long)
            answers.append(ask_in_thread(service, "b", prompt=long))
            wait_for(lambda: service.front.service.num_queued_tokens == 60)
            service.driver.hold = False
            assert [answer().status_code for answer in answers] == [200] * 7


def test_priority():
    most = limits.PRIORITY.most
    with served() as service:
        for given, sent in ((-(2**63), -most), (-most, -most), (3, 3), (2**63 - 1, most)):
            body = {"prompt": "p", "priority": given}
            assert service.client.post("/v1/completions", json=body).status_code == 200
            assert service.driver.submitted[-1].priority == sent
    assert most == MOST_PRIORITY

    class Asked:
        share, arrived, priority = "", 0.0, -(2**62)

    queue = Waiting()
    queue.add(Asked())
    assert [place for place, _, _ in queue] == [-100.0]


def test_delivered():
    with served() as service:
        body = {"prompt": "p", "temperature": 0, "max_tokens": 400}
        many = {**body, "delivered_token_ids": [7] * (limits.DELIVERED.most + 1)}
        response = service.client.post("/v1/completions", json=many)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "delivered_token_ids")
        response = service.client.post("/v1/completions", json={**body, "delivered_token_ids": [7] * 401})
        assert "more than max_tokens" in response.json()["error"]["message"]
