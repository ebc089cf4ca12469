"""Each entry of lpr.serve.limits, as a client meets it: test_NAME for every NAME."""

import asyncio
import contextlib
import json
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

from lpr.protocol import Chunk
from lpr.sched.queue import MOST_PRIORITY, Waiting
from lpr.serve import limits
from lpr.serve.api import middleware
from lpr.serve.bodies.completions import ResponseFormat
from lpr.serve.connections import SECONDS, Waits
from lpr.serve.errors import ApiError
from lpr.serve.sandbox import sandbox
from lpr.serve.stderr import Unblocking
from lpr.serve.text import conversation
from lpr.serve.text.grammars import Grammars
from tests.fakes.fake_driver import facts, served, wait_for
from tests.fakes.paths import ROOT

LIVEZ = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
PROMPT = "def f(x):\n    "
POST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)


@contextlib.contextmanager
def links(port, count):
    """So many open connections."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10)) for _ in range(count)]


def status(link):
    """The status of the answer on a connection; 0 if it is closed without one."""
    with contextlib.suppress(ConnectionError):
        line = link.recv(65536).split(b" ")
        return int(line[1]) if len(line) > 1 else 0
    return 0


def shorten(monkeypatch, waits, entry):
    """Let connections wait for half a second, instead of what `entry` says."""
    assert SECONDS[waits] == entry.most
    monkeypatch.setitem(SECONDS, waits, 0.5)


@contextlib.contextmanager
def front_apart(files):
    """A front with a fake driver, in a process that may open so many files: its address, and what it has printed."""
    # In one write: an unbuffered stream would let logs come between the parts.
    code = "from tests.fakes.fake_driver import served\n"
    code += "with served() as it: print(f'at {it.url}\\n', end='', flush=True), input()"
    command = ["sh", "-c", f'ulimit -n {files} && exec "$@"', "sh", sys.executable, "-c", code]
    environment, pipe = {**os.environ, "PYTHONPATH": str(ROOT)}, subprocess.PIPE
    with subprocess.Popen(
        command, env=environment, text=True, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT
    ) as process:
        lines = []
        try:
            while (line := process.stdout.readline()) and "at http" not in line:  # logs may come before it in a line
                lines.append(line)
            assert line, lines
            yield line.partition("at http")[1][3:] + line.partition("at http")[2].split()[0], lambda: "".join(lines)
        finally:
            process.kill()


def test_connections():
    wanted = 1100
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < wanted + 200:
        pytest.skip(f"this machine allows {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted + 200), hard))
    with front_apart(1024) as (url, log), links(httpx.URL(url).port, wanted) as idle:
        assert "--max-connections 2048: only " in log()
        took = []
        for _ in range(20):
            began = time.monotonic()
            httpx.get(url + "/livez", timeout=10).raise_for_status()  # a connection of its own
            took.append(time.monotonic() - began)
        assert max(took) < 1, took
        answer = httpx.post(url + "/v1/completions", json={"prompt": PROMPT, "max_tokens": 4}, timeout=60)
        assert answer.status_code == 200 and status(idle[0]) == 0
        idle[-1].sendall(LIVEZ)
        assert status(idle[-1]) == 200
        replaced = r'^lpr:connections_ended_total{.*reason="replaced"} [1-9]'
        assert re.search(replaced, httpx.get(url + "/metrics", timeout=10).text, re.M)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_metrics_connections():
    with served(metrics_port=0, connect=False) as service:
        port = service.front.metrics_port
        with links(port, limits.METRICS_CONNECTIONS.most) as idle, links(service.front.port, 3):
            text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
            assert re.search(r'^lpr:connections{.*state="waiting"} 3.0$', text, re.M)
            assert status(idle[0]) == 0


@pytest.mark.parametrize("size, expected", [(limits.HEAD.most - 100, 200), (limits.HEAD.most, 431)])
def test_head(size, expected):
    with served(connect=False) as service:
        assert service.client.get("/livez", headers={"A": "b" * (size - 200)}).status_code in (200, expected)
        response = service.client.get("/livez", headers={"A": "b" * size})
        assert response.status_code == 431 and response.json()["error"]["type"] == "invalid_request_error"


def test_headers():
    with served(connect=False) as service:
        for count, expected in ((limits.HEADERS.most - 10, 200), (limits.HEADERS.most + 1, 431)):
            assert service.client.get("/livez", headers=[("A", "b")] * count).status_code == expected


def test_ahead(caplog):
    with served(connect=False) as service, links(service.front.port, 2) as (client, greedy):
        client.sendall(LIVEZ * limits.AHEAD.most)
        data = b""
        while data.count(b'{"status":"ok"}') < limits.AHEAD.most and (new := client.recv(65536)):
            data += new
        assert data.count(b"HTTP/1.1 200") == limits.AHEAD.most
        with contextlib.suppress(OSError):
            for _ in range(400):
                greedy.settimeout(0.3)
                greedy.sendall(LIVEZ * 2000)
        began = time.monotonic()
        service.client.get("/livez").raise_for_status()
        assert time.monotonic() - began < 1 and not [line for line in caplog.records if line.levelname == "ERROR"]


def test_head_seconds(monkeypatch):
    shorten(monkeypatch, Waits.HEAD, limits.HEAD_SECONDS)
    with served(connect=False) as service, links(service.front.port, 2) as (silent, slow):
        slow.sendall(b"GET /livez HTTP/1.1\r\n")
        assert status(slow) == 408 and status(silent) == 0


def test_idle_seconds(monkeypatch):
    shorten(monkeypatch, Waits.IDLE, limits.IDLE_SECONDS)
    with served(connect=False) as service, links(service.front.port, 1) as (link,):
        link.sendall(LIVEZ)
        assert status(link) == 200 and status(link) == 0


def test_unread_seconds(monkeypatch):
    shorten(monkeypatch, Waits.UNREAD, limits.UNREAD_SECONDS)
    with served(connect=False) as service, links(service.front.port, 1) as (link,):
        size = len(service.client.get("/openapi.json").content)
        link.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 300)
        time.sleep(2)
        received = 0
        with contextlib.suppress(ConnectionError):
            while data := link.recv(1 << 20):
                received += len(data)
        assert 0 < received < 300 * size


def test_body_seconds(monkeypatch):
    assert limits.BODY_SECONDS.most == middleware.BODY_SECONDS
    monkeypatch.setattr(middleware, "BODY_SECONDS", 0.3)
    with served(connect=False) as service, links(service.front.port, 1) as (link,):
        link.sendall(POST % 10 + b"{")
        assert status(link) == 408


def test_bodies(monkeypatch):
    monkeypatch.setattr(limits, "BODIES", limits.BODIES._replace(most=4000))
    with served(max_body=1000) as service, links(service.front.port, 5) as slow:
        for link in slow[:4]:
            link.sendall(POST % 1000 + b" " * 999)
            time.sleep(0.05)
        assert service.client.post("/v1/completions", json={"prompt": PROMPT}).status_code == 200
        slow[4].sendall(POST % 1000 + b" " * 999)
        assert status(slow[0]) == 408  # the oldest makes room
        slow[1].settimeout(0.1)
        with pytest.raises(TimeoutError):
            status(slow[1])


def key(name):
    return {"Authorization": f"Bearer {name}"}


def ask_in_thread(service, name, **body):
    """Ask with a key; returns a function that waits for the answer."""
    answers = []
    url, body = service.url + "/v1/completions", {"prompt": "p", "max_tokens": 4, **body}
    thread = threading.Thread(target=lambda: answers.append(httpx.post(url, json=body, headers=key(name), timeout=120)))
    thread.start()

    def answer():
        thread.join(30)
        return answers[0]

    answer.early = answers
    return answer


def wait_until_open(service, answers, count):
    """Wait until `count` requests are open, of which `answers` are some, and fail if one of these is answered."""
    wait_for(lambda: num_open(service) == count or any(each.early for each in answers))
    assert not [found.text for each in answers for found in each.early]


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
            wait_until_open(service, answers, most)
            refused(service, "a", f"--max-requests-per-key is {most}")
            answers += [ask_in_thread(service, "b") for _ in range(most)]
            wait_until_open(service, answers, 2 * most)
            response = service.client.post("/v1/completions", json={"prompt": "p", "n": most + 1}, headers=key("b"))
            assert response.status_code in (400, 429)
            service.driver.hold = False
            assert [answer().status_code for answer in answers] == [200] * 2 * most
    with served(api_key="a", max_queue=1) as service:  # a lone key gets everything
        service.driver.hold = True
        answers = [ask_in_thread(service, "a") for _ in range(6)]
        wait_until_open(service, answers, 6)
        service.driver.hold = False
        assert [answer().status_code for answer in answers] == [200] * 6


def test_key_tokens():
    long = [7] * 30
    for flags, most in (({"max_queued_tokens": 100}, 50), ({"max_tokens_per_key": 50}, 50)):
        with served(api_key="a,b", **flags) as service:
            service.driver.hold = True
            answers = [ask_in_thread(service, "a") for _ in range(5)]  # the slots, and the one on hand
            wait_until_open(service, answers, 5)
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


CHAT = {"messages": [{"role": "user", "content": "a"}]}


@pytest.fixture(scope="module")
def service():
    with served() as running:
        yield running


def post(service, path, body, status, param=None):
    """The error of a body, if `status` is that of one."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = service.client.post(path, content=content, headers={"Content-Type": "application/json"}, timeout=60)
    assert answer.status_code == status, answer.text[:500]
    if status == 200:
        return None
    error = answer.json()["error"]
    assert len(error["message"]) <= 1000 and (param is None or error["param"] == param), error
    return error["message"]


def complete(service, status, param=None, **fields):
    return post(service, "/v1/completions", {"prompt": "a", "max_tokens": 2, **fields}, status, param)


def test_choices(service):
    complete(service, 400, "n", n=limits.CHOICES.most + 1)
    complete(service, 400, "best_of", best_of=limits.CHOICES.most + 1)
    complete(service, 200, n=limits.CHOICES.most)
    complete(service, 400, prompt=["a"] * (limits.CHOICES.most + 1))
    assert "--max-queue" in complete(service, 400, prompt=["a"] * limits.CHOICES.most, n=limits.CHOICES.most)


@pytest.mark.parametrize(
    "path, fields",
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 10**4299}),
        ("/v1/completions", {"prompt": "a", "min_tokens": 10**4299}),
        ("/v1/completions", {"prompt": "a", "repetition_penalty": 5e-324}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 10**4299}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "id_slot": 10**4299}),
        ("/infill", {"input_prefix": "a", "input_suffix": "b", "id_slot": 2**70}),
        ("/infill", {"input_prefix": "a", "input_suffix": "b", "n_predict": 2**70}),
        ("/infill", {"input_prefix": "a", "input_suffix": "b", "repeat_penalty": 5e-324}),
    ],
)
def test_numbers_that_nothing_can_be_made_of_are_refused(service, path, fields):
    post(service, path, fields, 400, next(reversed(fields)))


def test_stops(service):
    complete(service, 200, stop=["x"] * limits.STOPS.most)
    complete(service, 400, stop=["x"] * (limits.STOPS.most + 1))


def test_stop_length(service):
    complete(service, 200, stop="x" * limits.STOP_LENGTH.most)
    complete(service, 400, stop="x" * (limits.STOP_LENGTH.most + 1))


def test_label(service):
    for name in ("user", "prompt_cache_key"):
        complete(service, 200, **{name: "x" * limits.LABEL.most})
        complete(service, 400, name, **{name: "x" * (limits.LABEL.most + 1)})
    complete(service, 400, "model", model="x" * (limits.LABEL.most + 1))


def test_logit_bias(service):
    most = limits.LOGIT_BIAS.most
    complete(service, 200, logit_bias={str(token): 1 for token in range(most)})
    complete(service, 400, "logit_bias", logit_bias={str(token): 1 for token in range(most + 1)})
    message = complete(service, 400, "logit_bias", logit_bias={"9" * 100_000: 1})
    assert "no token id" in message and len(message) < 200
    complete(service, 400, "logit_bias", logit_bias={"9" * 5_000: 1})


def test_stop_ids(service):
    complete(service, 200, stop_token_ids=list(range(limits.STOP_IDS.most)))
    complete(service, 400, "stop_token_ids", stop_token_ids=list(range(limits.STOP_IDS.most + 1)))


def test_messages(service):
    message, most = {"role": "user", "content": ""}, limits.MESSAGES.most
    path = "/v1/chat/completions"
    assert "context" in post(service, path, {"messages": [message] * most}, 400)
    assert f"more than {most}" in post(service, path, {"messages": [message] * (most + 1)}, 400, "messages")
    parts = [{"role": "user", "content": [{"type": "text", "text": ""}] * most}]
    assert f"more than {most}" in post(service, path, {"messages": parts}, 400, "messages")


def test_pieces(service):
    body = {"input_prefix": "a", "input_suffix": "b", "n_predict": 2}
    post(service, "/infill", {**body, "input_extra": [{"text": "a"}] * limits.PIECES.most}, 200)
    post(service, "/infill", {**body, "input_extra": [{"text": "a"}] * (limits.PIECES.most + 1)}, 400, "input_extra")


def test_ids():
    with served(facts(max_length=8192)) as service:  # more than one context holds, so there are several prompts
        prompts, path = [[1] * 8000] * 65, "/v1/completions"
        post(service, path, {"prompt": prompts, "max_tokens": 2}, 200)
        message = post(service, path, {"prompt": [*prompts, [1] * 8000], "max_tokens": 2}, 400, "prompt")
        assert str(limits.IDS.most) in message and 65 * 8000 <= limits.IDS.most < 66 * 8000


def test_tokenized(service):
    post(service, "/tokenize", {"prompt": "a b " * (limits.TOKENIZED.most // 4)}, 200)
    for name in ("prompt", "content"):
        post(service, "/tokenize", {name: "a b " * (limits.TOKENIZED.most // 4) + "a"}, 400, name)


def test_detokenized(service):
    post(service, "/detokenize", {"tokens": [1] * limits.DETOKENIZED.most}, 200)
    post(service, "/detokenize", {"tokens": [1] * (limits.DETOKENIZED.most + 1)}, 400, "tokens")


def test_fields(service):
    body = {"input_prefix": "a", "input_suffix": "b", "n_predict": 2}
    for name in ("samplers", "response_fields"):
        post(service, "/infill", {**body, name: ["top_k"] * limits.FIELDS.most}, 200)
        post(service, "/infill", {**body, name: ["top_k"] * (limits.FIELDS.most + 1)}, 400, name)
    post(service, "/v1/chat/completions", {**CHAT, "modalities": ["text"] * (limits.FIELDS.most + 1)}, 400)


def nested(levels):
    """A completion whose JSON has so many levels, in a field that may hold anything."""
    value = b'{"a": ' * (levels - 1) + b"1" + b"}" * (levels - 1)
    return b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": ' + value + b"}"


def test_depth(service):
    path = "/v1/chat/completions"
    post(service, path, nested(limits.DEPTH.most), 200)
    for padding in (b"", b" " * 20_000):  # checked here, and in a process of its own
        assert "nested" in post(service, path, nested(limits.DEPTH.most + 1) + padding, 400)
        assert "nested" in post(service, path, nested(5000) + padding, 400)
        assert "nested" in post(service, path, b"[" * 100_000 + padding, 400)


def test_template_values(service):
    values = [1] * (limits.TEMPLATE_VALUES.most - 2)
    path = "/v1/chat/completions"
    post(service, path, {**CHAT, "chat_template_kwargs": {"a": values}}, 200)
    post(service, path, {**CHAT, "chat_template_kwargs": {"a": [*values, 1]}}, 400, "chat_template_kwargs")
    for route, body in (("/v1/messages", {**CHAT, "max_tokens": 3}), ("/v1/responses", {"input": "u"})):
        name = "context_management" if "messages" in route else "metadata"
        post(service, route, {**body, name: values}, 200)
        post(service, route, {**body, name: [*values, 1, 1]}, 400, None if "messages" in route else name)


def declared(count, **schema):
    return [{"name": f"f{at}", "input_schema": {"type": "object", **schema}} for at in range(count)]


def test_tools():
    with served(
        facts(chat_templates={"default": "{{ tools }}<tool_call>{{ messages }}"}, max_length=1 << 20)
    ) as service:
        for count, status in ((limits.TOOLS.most, 200), (limits.TOOLS.most + 1, 400)):
            tools = declared(count)
            flat = [{"type": "function", "name": each["name"], "parameters": each["input_schema"]} for each in tools]
            nested = [{"type": "function", "function": {"name": each["name"]}} for each in tools]
            answers = [
                service.client.post("/v1/messages", json={**CHAT, "max_tokens": 3, "tools": tools}),
                service.client.post("/v1/responses", json={"input": "u", "tools": flat}),
                service.client.post("/v1/chat/completions", json={**CHAT, "tools": nested}),
            ]
            assert [answer.status_code for answer in answers] == [status] * 3, [a.text[:300] for a in answers]


def test_tool_values(service):
    for route, body in (("/v1/messages", {**CHAT, "max_tokens": 3}), ("/v1/messages/count_tokens", CHAT)):
        wide = declared(1, enum=list(range(limits.TOOL_VALUES.most)))
        answer = service.client.post(route, json={**body, "tools": wide})
        assert answer.status_code == 400 and "more than" in answer.json()["error"]["message"]


def test_context(service):
    """A text is refused by its characters before it is encoded, where a token's length has an end."""
    lengths = service.front.context.served.tokens.lengths
    most = lengths.longest * service.front.context.served.facts.max_length
    began = time.monotonic()
    for text in ("\u00e9" * (most + 1), "a" * (1 << 20), "ab " * 300_000):
        assert "characters" in complete(service, 400, "prompt", prompt=text)
        assert "characters" in complete(service, 400, "prompt", prompt=["a", text])
        assert "characters" in complete(service, 400, "suffix", suffix=text)
        body = {"messages": [{"role": "user", "content": text}]}
        assert "characters" in post(service, "/v1/chat/completions", body, 400, "messages")
    assert time.monotonic() - began < 20


def compiles(service, status, wanted):
    return complete(service, status, response_format=wanted)


def test_grammar(service):
    rule, most = 'start: "a"\n', limits.GRAMMAR.most
    compiles(service, 200, {"type": "grammar", "grammar": rule + "// " + "x" * (most - len(rule) - 3)})
    compiles(service, 400, {"type": "grammar", "grammar": rule + "// " + "x" * most})
    schema = {"type": "string", "description": "x" * most}
    assert "longer" in compiles(service, 400, {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}})


def test_regex(service):
    compiles(service, 200, {"type": "regex", "regex": "a" * 1000})
    compiles(service, 400, {"type": "regex", "regex": "a" * (limits.REGEX.most + 1)})


def test_rules(service):
    rules = [f'r{index}: "x"' for index in range(limits.RULES.most)]
    some, many = ("\n".join(['start: "a"', *rules[:count]]) for count in (limits.RULES.most - 1, limits.RULES.most))
    assert "rules" not in (compiles(service, 200, {"type": "grammar", "grammar": some}) or "")
    assert "rules" in compiles(service, 400, {"type": "grammar", "grammar": many})


def test_references(service):
    def schema(count):
        properties = {f"p{index}": {"$ref": "#/$defs/a"} for index in range(count)}
        found = {"$defs": {"a": {"type": "string"}}, "type": "object", "properties": properties}
        return {"type": "json_schema", "json_schema": {"name": "s", "schema": found}}

    compiles(service, 200, schema(300))
    assert "references" in compiles(service, 400, schema(limits.REFERENCES.most + 1))


LARGE = "\n".join(
    ["start: " + " | ".join(f"r{index}" for index in range(2000))]
    + [f'r{index}: "x{index}" | /[a-z]+{index}/' for index in range(2000)]
)


def compiler():
    return sandbox("lpr.serve.text.grammar_tasks", limits.GRAMMAR_TIME, limits.GRAMMAR_MEMORY)


def why_refused(**changed):
    """Why a large grammar is refused under other limits."""
    with pytest.MonkeyPatch.context() as patch:
        for name, most in changed.items():
            patch.setattr(limits, name, getattr(limits, name)._replace(most=most))
        grammars = Grammars(compiler())

    async def compiled():
        try:
            await grammars.compiled(ResponseFormat(type="grammar", grammar=LARGE))
        finally:
            await grammars.sandbox.close()

    with pytest.raises(ApiError) as caught:
        asyncio.run(compiled())
    assert caught.value.status == 400 and caught.value.param == "response_format.grammar"
    return caught.value.message


def test_grammar_time():
    assert why_refused(GRAMMAR_TIME=1) == "response_format.grammar: it needs more than 0.001 s"


def test_grammar_memory():
    assert "memory" in why_refused(GRAMMAR_MEMORY=1)


def overflow(expression, **changed):
    """What a client is told whose variables make the work of a template large."""
    with pytest.MonkeyPatch.context() as patch:
        for name, most in changed.items():
            patch.setattr(limits, name, getattr(limits, name)._replace(most=most))
        template = expression + "{% for message in messages %}{{ message['content'] }}{% endfor %}"
        with served(facts(chat_templates={"default": template})) as service:
            body = {**CHAT, "chat_template_kwargs": {"n": 10**10}}
            message = post(service, "/v1/chat/completions", body, 400)
            assert service.client.get("/livez").status_code == 200
            return message


def test_body_time():
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    assert "more than 0.3 s" in overflow(loop, BODY_TIME=300)


@pytest.mark.parametrize("expression", ["{{ 'a' * n }}", "{{ 'a' * (n ** n) }}"])
@pytest.mark.slow(first=1)
def test_body_memory(expression):
    began = time.monotonic()
    assert overflow(expression, BODY_MEMORY=64, BODY_TIME=1000)
    assert time.monotonic() - began < 30


def test_aside(service):
    """See test_serve_sandbox.test_only_so_many_tasks_wait; threads have the same limit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "ASIDE", limits.ASIDE._replace(most=0))
        body = json.dumps({"prompt": "a"}).encode() + b" " * 20_000
        assert "wait" in post(service, "/v1/completions", body, 429)


def test_aside_bytes():
    """See test_serve_turns.test_only_the_greedy_key_is_refused."""
    assert limits.ASIDE_BYTES.most >= 2 * limits.BODY.most


def test_processes():
    """See test_serve_turns.test_of_several_keys_none_has_all_workers."""
    with served(connect=False) as service:
        assert len(service.front.context.checks._workers) == limits.PROCESSES.most > 1


def test_call_values():
    """See test_serve_sandbox.test_json_within_json_is_counted."""
    assert conversation.num_values([[]] * limits.CALL_VALUES.most, limits.CALL_VALUES.most) > limits.CALL_VALUES.most


@pytest.mark.parametrize("size, status", [(8, 400), (512, 200)])
def test_framing(service, size, status):
    """A body of chunks of 8 bytes is as long around them as in them."""
    body = json.dumps({"prompt": "a", "max_tokens": 2}).encode().ljust(8192)
    chunks = (body[at : at + size] for at in range(0, len(body), size))
    answer = service.client.post("/v1/completions", content=chunks, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text


def test_a_body_with_two_lengths_closes_its_connection(service):
    with links(service.front.port, 1) as (link,):
        head = POST.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n") % 4
        link.sendall(head + b"2\r\n{}\r\n0\r\n\r\n" + LIVEZ)
        data = b""
        while new := link.recv(65536):
            data += new
        assert data.startswith(b"HTTP/1.1 400") and data.count(b"HTTP/1.1 ") == 1


def test_logprobs(service):
    length, most = facts().max_length, limits.LOGPROBS.most
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "LOGPROBS", limits.LOGPROBS._replace(most=60))
        complete(service, 200, prompt=[7] * 10, echo=True, logprobs=5, max_tokens=0)
        message = complete(service, 400, "logprobs", prompt=[[7] * 10, [7]], echo=True, logprobs=5)
        assert "66 log-probabilities" in message
        complete(service, 200, prompt=[[7] * 10, [7]], logprobs=5)
    assert most > 2 * length


def test_unread():
    """Of all that is left unread, the longest goes first: its client is told, and the ranks work on others."""
    with served() as service, pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "UNREAD", limits.UNREAD._replace(most=20_000))
        service.driver.hold = True
        answers = [ask_in_thread(service, "a", stream=True) for _ in range(2)]
        wait_for(lambda: num_open(service) == 2)

        def fill():
            jobs = list(service.front.service._jobs)
            for job, count in zip(jobs, (30, 10), strict=True):
                for start in range(count):
                    text = "x" * 100
                    chunk = Chunk(job.id, [7], text, start=start, start_character=100 * start)
                    service.front.service._deliver(chunk)

        service.call(fill)
        wait_for(lambda: num_open(service) == 1)
        service.driver.hold = False
        texts = [answer().text for answer in answers]
        assert sorted("does not read" in text for text in texts) == [False, True]


def test_log():
    reader, writer = os.pipe()
    stream = os.fdopen(writer, "w")
    written = Unblocking(stream)
    began = time.monotonic()
    for _ in range(200):
        for _ in range(limits.LOG.most // 50):
            print("x" * 1000, file=written, flush=True)
    assert time.monotonic() - began < 5 and written._num_dropped
    data = b""
    while b"were dropped" not in data:
        data += os.read(reader, 1 << 20)
        written.write("y")
    with os.fdopen(reader, "rb") as unread:
        rest = threading.Thread(target=unread.read)
        rest.start()
        written.close(30)
        stream.close()
        rest.join()


def test_a_stderr_that_fails_is_no_error():
    class Full:
        def write(self, text):
            raise OSError(28, "No space left on device")

        def flush(self):
            pass

    written = Unblocking(Full())
    print("a", file=written)
    written.close()


def test_logged_path(capfd):
    with served(connect=False, access_log=True) as service:
        path = "/" + "%00" * 3000
        service.client.get(path)
    line = next(line for line in capfd.readouterr().err.splitlines() if "u0000" in line)
    assert len(json.loads(line)["path"]) == limits.LOGGED_PATH.most and len(line) < 2000


def test_body(service):
    body = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
    post(service, "/v1/completions", body.ljust(limits.BODY.most), 200)
    assert "--max-body" in post(service, "/v1/completions", body.ljust(limits.BODY.most + 1), 413)


def test_queue():
    with served(max_queue=2) as service:
        service.driver.hold = True
        answers = [ask_in_thread(service, "a") for _ in range(7)]  # four slots, one on hand, two that wait
        wait_until_open(service, answers, 7)
        refused(service, "a", "--max-queue is 2")
        service.driver.hold = False
        assert [answer().status_code for answer in answers] == [200] * 7


def test_queued_tokens():
    with served(max_queued_tokens=50) as service:
        service.driver.hold = True
        answers = [ask_in_thread(service, "a") for _ in range(5)]
        wait_for(lambda: (service.front.service.num_running, num_open(service)) == (4, 5))
        answers.append(ask_in_thread(service, "a", prompt=[7] * 30))
        wait_for(lambda: service.front.service.num_queued_tokens == 30)
        refused(service, "a", "--max-queued-tokens is 50", prompt=[7] * 30)
        service.driver.hold = False
        assert [answer().status_code for answer in answers] == [200] * 6


def test_each_limit_has_its_test():
    assert {f"test_{name.lower()}" for name in limits.table()} <= set(globals())
