"""The processes that do what a client can make slow, large or deep: they fail, and the service does not."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import httpx
import msgspec
import pytest

import lpr.serve.sandbox
from lpr.serve import checks, limits
from lpr.serve.api import parsing
from lpr.serve.api.context import unless_gone
from lpr.serve.bodies import packed
from lpr.serve.bodies.completions import ResponseFormat
from lpr.serve.errors import ApiError
from lpr.serve.generation import DisconnectedError
from lpr.serve.sandbox import ExhaustedError, Sandbox, sandbox
from lpr.serve.text.grammars import Grammars
from lpr.serve.text.served import Served
from tests.fakes.fake_driver import facts, served
from tests.fakes.paths import ROOT


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def run(work, seconds=0.5, memory=64 << 20, size=1, weights=None):
    """What `work(sandbox)` returns."""

    async def main():
        sandbox = Sandbox("tests.fakes.sandbox_tasks", seconds, memory, size, weights)
        try:
            return await asyncio.wait_for(work(sandbox), 60)
        finally:
            await sandbox.close()

    return asyncio.run(main())


@pytest.mark.parametrize(
    "name, args, why",
    [
        ("spin", [], "more than 0.1 s"),
        ("spin_in_c", [], "more than 0.1 s"),
        ("sleep", [3600], "more time"),
        ("take", [256 << 20], "more memory"),
        ("take", [2**62], "more memory"),
        ("recurse", [], "more depth"),
        ("segfault", [], "more depth"),
        ("leave", [], "more memory"),
    ],
)
@pytest.mark.slow(first=4)
def test_a_task_that_needs_too_much_ends_alone(name, args, why):
    async def work(sandbox):
        before = await sandbox.run("tell")
        for _ in range(4):
            began = time.monotonic()
            with pytest.raises(ExhaustedError) as found:
                await sandbox.run(name, *args)
            assert time.monotonic() - began < 20
            if why in str(found.value):  # else a busy machine has not given it that time within its patience
                break
        assert why in str(found.value)
        after = await sandbox.run("tell")
        assert after[1] == before[1] and after[0] != before[0], "each task has a process of its own, of one parent"

    run(work, seconds=0.1)


def test_what_a_task_returns_or_refuses_comes_back():
    async def work(sandbox):
        large = [b"x" * (4 << 20), {"a": [1, None, 2.5]}]
        assert await sandbox.run("echo", large) == large
        with pytest.raises(ApiError) as caught:
            await sandbox.run("refuse")
        assert (caught.value.status, caught.value.message, caught.value.param) == (400, "it is too long", "prompt")
        with pytest.raises(RuntimeError, match="(?s)fail failed in its sandbox: .*KeyError"):
            await sandbox.run("fail")

    run(work)


def test_every_process_is_prepared_and_has_no_keys(monkeypatch):
    monkeypatch.setenv("LPR_API_KEY", "secret")

    async def work(sandbox):
        assert (await sandbox.run("tell"))[3] == []
        sandbox.prepare("tokenizer", 3)
        known = await sandbox.run("tell")
        assert known[3] == ["tokenizer", 3] and "LPR_API_KEY" not in known[2]
        os.kill(known[1], signal.SIGKILL)
        for _ in range(3):  # the task that finds out is refused for the moment
            try:
                again = await sandbox.run("tell")
                break
            except ApiError as failure:
                assert failure.status == 429 and failure.retry_after
        assert again[1] != known[1] and again[3] == ["tokenizer", 3]

    run(work)


def test_a_process_whose_end_is_noticed_first_is_not_killed_again(monkeypatch):
    """asyncio then raises ProcessLookupError."""
    kill = asyncio.subprocess.Process.kill

    def late(process):
        kill(process)
        raise ProcessLookupError

    async def work(sandbox):
        known = await sandbox.run("tell")
        monkeypatch.setattr(asyncio.subprocess.Process, "kill", late)
        os.kill(known[1], signal.SIGKILL)
        with pytest.raises(ApiError, match="could not be checked now"):
            await sandbox.run("tell")

    run(work)


def test_only_so_many_tasks_wait():
    async def work(sandbox):
        tasks = [asyncio.create_task(sandbox.run("sleep", 0.01)) for _ in range(limits.ASIDE.most + 5)]
        found = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [each for each in found if each is not None]
        assert len(refused) == 5 and all(each.status == 429 and each.retry_after for each in refused)
        assert sandbox.num_waiting == 0 and await sandbox.run("echo", 1) == 1

    run(work)


def test_a_client_that_goes_leaves_its_place_and_no_result_is_taken_for_anothers():
    async def work(sandbox):
        async def receive():
            await asyncio.sleep(0.1)
            return {"type": "http.disconnect"}

        with pytest.raises(DisconnectedError):
            await unless_gone(receive, sandbox.run("sleep", 0.3))
        assert sandbox.num_waiting == 1, "it keeps its turn"
        assert await sandbox.run("echo", "mine") == "mine"
        tasks = [asyncio.create_task(sandbox.run("echo", number)) for number in range(20)]
        await asyncio.sleep(0.005)
        for task in tasks[::2]:
            task.cancel()
        assert await asyncio.gather(*tasks[1::2]) == list(range(1, 20, 2))

    run(work)


def test_the_process_ends_with_the_service_however_that_ends():
    script = (
        "import asyncio, time\n"
        "from lpr.serve.sandbox import Sandbox\n"
        "async def main():\n"
        "    sandbox = Sandbox('tests.fakes.sandbox_tasks', 30.0, 1 << 26)\n"
        "    print((await sandbox.run('tell'))[1], flush=True)\n"
        "    await sandbox.run('spin')\n"
        "asyncio.run(main())\n"
    )
    service = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    child = int(service.stdout.readline())
    time.sleep(0.3)
    service.kill()
    service.wait()
    service.stdout.close()
    end = time.monotonic() + 20
    while os.path.exists(f"/proc/{child}") and Path(f"/proc/{child}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < end, "the process outlives its service"
        time.sleep(0.05)


# Grammars.


def compiler():
    return sandbox("lpr.serve.text.grammar_tasks", limits.GRAMMAR_TIME, limits.GRAMMAR_MEMORY)


def chain(length):
    """A grammar of rules that name each other in a chain; 3500 are 57 KB and ended the front."""
    rules = "\n".join(f'r{index}: "x" r{index + 1}' for index in range(length))
    return f'start: r0\n{rules}\nr{length}: "y"\n'


def references(length):
    """A JSON schema of references in a chain."""
    links = {f"d{index}": {"$ref": f"#/$defs/d{index + 1}"} for index in range(length)}
    return {"$defs": {**links, f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def as_schema(schema):
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


def deep(levels):
    schema = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.fixture(scope="module")
def service():
    with served() as running:
        yield running


def ask(service, wanted, **more):
    body = {"prompt": "a", "max_tokens": 4, "response_format": wanted, **more}
    return service.client.post("/v1/completions", json=body, timeout=60)


REFUSED = {
    "a chain of rules": {"type": "grammar", "grammar": chain(3500)},
    "a chain of references": as_schema(references(1000)),
    "too many rules": {"type": "grammar", "grammar": chain(limits.RULES.most)},
    "too many references": as_schema(references(limits.REFERENCES.most)),
    "a deep schema": as_schema(deep(500)),
    "a deep expression": {"type": "regex", "regex": "(" * 5000 + "a" + ")" * 5000},
    "deep GBNF": {"type": "grammar", "grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000},
    "deep Lark": {"type": "grammar", "grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000},
    "a mask that takes too long": {"type": "regex", "regex": "(?:a?){500}a{500}"},
    "no grammar": {"type": "grammar", "grammar": "start: nothing"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_grammar_that_would_end_or_hold_up_the_service_is_refused(service, name):
    began = time.monotonic()
    answer = ask(service, REFUSED[name])
    assert answer.status_code == 400 and time.monotonic() - began < 20, answer.text
    error = answer.json()["error"]
    assert len(error["message"]) < 1000 and "\n" not in error["message"]
    assert name == "a deep schema" or error["param"].startswith("response_format."), error
    assert ask(service, {"type": "regex", "regex": "[a-z]+"}).status_code == 200


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "grammar", "grammar": chain(200)},
        as_schema(references(100)),
        as_schema(deep(60)),
        {"type": "grammar", "grammar": 'root ::= "yes" | "no"'},
        {"type": "json_object"},
        as_schema({"type": "object", "properties": {"a": {"enum": [f"value {index}" for index in range(2000)]}}}),
    ],
)
def test_an_ordinary_grammar_is_compiled_as_before(service, wanted):
    import llguidance

    answer = ask(service, wanted)
    assert answer.status_code == 200, answer.text
    sent = service.driver.submitted[-1].params.grammar
    matcher = llguidance.LLMatcher
    if wanted["type"] == "grammar" and "::=" not in wanted["grammar"]:
        assert json.loads(sent) == {"grammars": [{"lark_grammar": wanted["grammar"]}]}
    elif wanted["type"] == "json_schema":
        assert sent == matcher.grammar_from_json_schema(wanted["json_schema"]["schema"])
    assert not matcher.validate_grammar(sent)


def test_a_grammar_is_compiled_once_for_all_prompts_choices_and_clients():
    async def main():
        grammars, count = Grammars(compiler()), 0
        run = grammars.sandbox.run

        async def counted(*args, **more):
            nonlocal count
            count += 1
            return await run(*args, **more)

        grammars.sandbox.run = counted
        wanted = ResponseFormat(type="regex", regex="[ab]+")
        found = await asyncio.gather(*(grammars.compiled(wanted) for _ in range(200)))
        assert len(set(found)) == 1 and found[0] and await grammars.compiled(wanted) == found[0]
        bad = ResponseFormat(type="regex", regex="(")
        for _ in range(3):
            with pytest.raises(ApiError, match="regex"):
                await grammars.compiled(bad)
        assert count == 2
        one = asyncio.create_task(grammars.compiled(ResponseFormat(type="regex", regex="a+")))
        two = asyncio.create_task(grammars.compiled(ResponseFormat(type="regex", regex="a+")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        one.cancel()
        assert await two and count == 3
        await grammars.sandbox.close()

    asyncio.run(main())


def test_slow_grammars_hold_up_neither_the_loop_nor_bodies(service):
    stop, waits = threading.Event(), []

    def attack(seed):
        number = 0
        while not stop.is_set():
            number += 1
            wanted = {"type": "grammar", "grammar": chain(3000) + f"\n// {seed} {number}\n"}
            httpx.post(service.url + "/v1/completions", json={"prompt": "a", "response_format": wanted}, timeout=60)

    threads = [threading.Thread(target=attack, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    with httpx.Client(base_url=service.url, timeout=60) as client:
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            began = time.monotonic()
            assert client.get("/livez").status_code == 200
            waits.append(time.monotonic() - began)
            long = {"prompt": [1] * 100, "max_tokens": 1, "user": "x" * 100}
            content = json.dumps(long).encode() + b" " * 20000
            headers = {"Content-Type": "application/json"}
            assert client.post("/v1/completions", content=content, headers=headers).status_code == 200
    stop.set()
    for thread in threads:
        thread.join(60)
    assert sorted(waits)[len(waits) // 2] < 0.2 and max(waits) < 2


def test_the_driver_and_the_front_live_on(service):
    assert service.client.get("/readyz").status_code == 200
    assert service.front.context.served.facts == facts(tokenizer=service.front.context.served.facts.tokenizer)


# Bodies.


LONG_WRONG = [
    ("/v1/completions", {"prompt": [1.5] * 300_000}, "prompt"),
    ("/v1/completions", {"prompt": [[]] * 300_000}, "prompt"),
    ("/v1/completions", {"prompt": "a", "stop": [1] * 300_000}, "stop"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {str(key): "x" for key in range(100_000)}}, "logit_bias"),
    ("/v1/completions", {"prompt": "a", **{f"field{index}": 1 for index in range(100_000)}}, "field0"),
    ("/v1/completions", {"prompt": [1] * 300_000}, "prompt"),
    ("/v1/chat/completions", {"messages": [1] * 300_000}, "messages"),
    ("/infill", {"input_prefix": "", "input_suffix": "", "input_extra": [[]] * 300_000}, "input_extra.0"),
    ("/detokenize", {"tokens": ["a"] * 300_000}, "tokens.0"),
    ("/tokenize", {"prompt": "a", "x" * 1_000_000: 1}, None),
    ("/v1/completions", {"prompt": "a", "model": "x" * 1_000_000}, "model"),
]


@pytest.mark.parametrize("path, body, param", LONG_WRONG)
@pytest.mark.slow(first=4)
def test_a_long_wrong_body_is_refused_without_a_stall(service, path, body, param):
    """The front's loop has no turn of a second, counted in its own processor time: a wait on the clock also tells of a
    busy machine, where it was 2.2 s."""
    content, stamps, stop = json.dumps(body, separators=(",", ":")).encode(), [], threading.Event()

    def tick():
        stamps.append(time.thread_time())
        if not stop.is_set():
            asyncio.get_running_loop().call_later(0.001, tick)

    service.call(tick)
    answer = service.client.post(path, content=content, headers={"Content-Type": "application/json"}, timeout=60)
    stop.set()
    assert answer.status_code == 400 and len(answer.content) < 2000, answer.text[:300]
    found = answer.json()["error"]["param"]
    assert found == param if param is not None else found.startswith("xxx")
    assert len(stamps) > 2 and max(later - stamp for stamp, later in pairwise(stamps)) < 1.0


SHORT = [
    ("/v1/completions", b"{"),
    ("/v1/completions", b"[1]"),
    ("/v1/completions", b"null"),
    ("/v1/completions", b'"a"'),
    ("/v1/completions", b"\xff"),
    ("/v1/completions", b'{"prompt": "\\ud800"}'),
    ("/v1/completions", b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}"),
    ("/v1/completions", b'{"prompt": "a", "max_tokens": -2}'),
    ("/v1/completions", b'{"prompt": "a", "temperature": NaN}'),
    ("/v1/completions", b'{"prompt": "a", "temperature": 1e999}'),
    ("/v1/completions", b'{"prompt": "a", "seed": 99999999999999999999999999}'),
    ("/v1/completions", b'{"prompt": [1, "a"]}'),
    ("/v1/completions", b'{"prompt": {}}'),
    ("/v1/completions", b'{"nonsense": 1}'),
    ("/v1/completions", b'{"prompt": "a", "logit_bias": {"-1": 2}}'),
    ("/v1/completions", b'{"prompt": "a", "stream_options": {}}'),
    ("/v1/completions", b'{"prompt": "a", "response_format": {"type": "regex"}}'),
    ("/v1/chat/completions", b'{"messages": []}'),
    ("/v1/chat/completions", b'{"messages": [{"role": "x", "content": 1}]}'),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}'),
    ("/tokenize", b'{"prompt": "a", "content": "b"}'),
    ("/infill", b'{"input_prefix": "a"}'),
]


@pytest.mark.parametrize("path, content", SHORT)
def test_a_long_body_gets_the_error_of_a_short_one(service, path, content):
    headers = {"Content-Type": "application/json"}
    short = service.client.post(path, content=content, headers=headers)
    long = service.client.post(path, content=content + b" " * 20_000, headers=headers)
    assert short.status_code == long.status_code == 400
    assert short.json() == long.json()


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a", "temperature": 0.5, "seed": 2**63, "logit_bias": {"5": 1.5}, "stop": ["x", "y"]},
        {"prompt": '\u00e9\U0001f600 \\ " \n', "max_tokens": 3, "unknown": None},
        {"prompt": [[1, 2], [3]], "n": 2, "seed": 5},
    ],
)
def test_a_long_body_means_what_a_short_one_means(service, body):
    sent = []
    for padding in (b"", b" " * 20_000):
        begun = len(service.driver.submitted)
        content, headers = json.dumps(body).encode() + padding, {"Content-Type": "application/json"}
        service.client.post("/v1/completions", content=content, headers=headers).raise_for_status()
        sent.append([(each.token_ids, each.params) for each in service.driver.submitted[begun:]])
    assert sent[0] == sent[1] if "seed" in body else [ids for ids, _ in sent[0]] == [ids for ids, _ in sent[1]]


def test_a_request_for_more_texts_than_there_is_room_is_counted_first(service):
    bias = {str(token): 1.0 for token in range(limits.LOGIT_BIAS.most)}
    body = {"prompt": ["a"] * limits.CHOICES.most, "n": limits.CHOICES.most, "logit_bias": bias}
    began = time.monotonic()
    answer = service.client.post("/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400 and "--max-queue" in answer.json()["error"]["message"]
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("name", ["bos_token", "eos_token", "messages", "raise_exception", "additional_special_tokens"])
def test_what_the_tokenizer_sets_in_a_template_is_not_the_clients(service, name):
    body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {name: "x"}}
    answer = service.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "chat_template_kwargs"


def test_a_template_that_fails_is_the_requests_error():
    for template in ("{{ 1 / 0 }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"):
        with served(facts(chat_templates={"default": template})) as service:
            for more in ({}, {"chat_template_kwargs": {"n": 1}}):
                body = {"messages": [{"role": "user", "content": "a"}], **more}
                answer = service.client.post("/v1/chat/completions", json=body, timeout=60)
                assert answer.status_code == 400, answer.text


# The pool, and what comes out of it.


def test_a_key_with_long_tasks_delays_no_other():
    async def work(sandbox):
        sandbox.prepare()
        await sandbox.start()
        slow = [asyncio.create_task(sandbox.run("sleep", 0.4, key="a")) for _ in range(20)]
        await asyncio.sleep(0.05)
        began = time.monotonic()
        assert await sandbox.run("echo", 1, key="b") == 1
        assert not any(task.done() for task in slow) or time.monotonic() - began < 0.35
        assert sandbox.num_waiting > 10
        for task in slow:
            task.cancel()

    run(work, seconds=5.0, size=3, weights={"a": 1.0, "b": 1.0})


def test_a_process_that_is_stopped_delays_one_task(monkeypatch):
    monkeypatch.setattr(lpr.serve.sandbox, "patience", lambda seconds: 0.2)  # beside SPARE_SECONDS

    async def work(sandbox):
        sandbox.prepare()
        await sandbox.start()
        os.kill((await sandbox.run("tell"))[1], signal.SIGSTOP)
        stuck = asyncio.create_task(sandbox.run("echo", 0))
        await asyncio.sleep(0.01)
        assert [await sandbox.run("echo", number) for number in range(20)] == list(range(20))
        assert not stuck.done()
        with pytest.raises(ApiError, match="could not be checked now"):
            await stuck

    run(work, size=2)


def test_what_a_task_may_not_do():
    """It writes no files, has no network and reaches no other process; it could not gain privileges either."""

    async def work(sandbox):
        no_new_privileges, whys = await sandbox.run("confined")
        assert no_new_privileges == 1 and whys == ["File too large", *["Operation not permitted"] * 3]
        if subprocess.run(["unshare", "-rn", "true"], check=False).returncode == 0:
            assert await sandbox.run("interfaces") == ["lo"]

    run(work)


BODIES = [
    ("ChatBody", {"messages": [{"role": "user", "content": [{"type": "text", "text": "é"}]}], "max_tokens": 2**62}),
    ("ChatBody", {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function":
        {"name": "f", "parameters": {"a": [1.5, None, {"b": "😀"}]}}}], "tool_choice": "auto", "stop": ["x"]}),
    ("CompletionBody", {"prompt": [[1, 2], [3]], "logit_bias": {"5": 1.5}, "response_format": {
        "type": "json_schema", "json_schema": {"schema": {"type": "object"}}}}),
    ("MessagesBody", {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}],
        "max_tokens": 3, "thinking": {"type": "enabled"}}),
    ("ResponsesBody", {"input": [{"role": "user", "content": "a"}], "text": {"format": {"type": "text"}}}),
    ("InfillBody", {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "c"}]}),
]  # fmt: skip


@pytest.mark.parametrize("kind, given", BODIES)
def test_a_validated_body_is_the_same_after_it_was_packed(kind, given):
    body = checks._adapter(kind).validate_python(given)
    again = packed.unpack(packed.pack([body, ["key"]]))[0]
    assert again == body and type(again) is type(body) and again.model_fields_set == body.model_fields_set


HALF = "{{ messages[0].content }}{{ messages[-1].content }}"
TURNS = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]


@pytest.fixture(scope="module")
def half():
    with served(facts(chat_templates={"default": HALF})) as running:
        yield running


@pytest.mark.parametrize(
    "path, body, place",
    [
        ("/v1/chat/completions", {"messages": [{"role": "system", "content": "s"}, *TURNS]}, "messages.1.content"),
        ("/v1/messages", {"system": "s", "messages": TURNS, "max_tokens": 1}, "messages.0.content"),
        ("/v1/responses", {"instructions": "s", "input": TURNS}, "input.0.content"),
    ],
)
def test_a_text_that_the_prompt_of_a_long_body_lacks_is_named_by_its_place(half, path, body, place):
    """The places travel with the chat, whose messages stay in the other process."""
    answers = []
    for padding in (b"", b" " * 20_000):
        content, headers = json.dumps(body).encode() + padding, {"Content-Type": "application/json"}
        answers.append(half.client.post(path, content=content, headers=headers, timeout=60))
    assert [answer.status_code for answer in answers] == [400, 400] and place in answers[0].text, answers[0].text
    assert answers[0].json() == answers[1].json()


def test_the_places_of_a_packed_chat_are_kept():
    body = checks._adapter("MessagesBody").validate_python({"system": "s", "messages": TURNS, "max_tokens": 1})
    chat = checks.chat_of(body)
    again = packed.unpack(packed.pack(chat))
    assert again == chat and again.places == chat.places and again.places["messages.1"] == "messages.0"


def test_only_bodies_are_made_of_what_another_process_says():
    with pytest.raises(TypeError):
        packed.pack(object())
    for name in ("os.system", "lpr.serve.errors.ApiError", "builtins.object"):
        data = msgspec.msgpack.encode([name, {}, [], None])
        with pytest.raises(KeyError):
            packed.unpack(msgspec.msgpack.encode(msgspec.msgpack.Ext(1, data)))


def test_a_long_body_is_validated_once(service, monkeypatch):
    """The endpoint has the very object that the other process has checked."""
    unpacked, used = [], []
    monkeypatch.setattr(parsing, "unpack", lambda data: unpacked.append(packed.unpack(data)) or unpacked[-1])
    params = Served.params
    monkeypatch.setattr(
        Served, "params", lambda self, body, *args, **more: used.append(body) or params(self, body, *args, **more)
    )
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        content = json.dumps({**body, "max_tokens": 2}).encode() + b" " * 20_000
        answer = service.client.post(path, content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 200 and unpacked[-1][0][0] is used[-1]


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def conversation(arguments):
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    return {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}],
        "max_tokens": 1,
    }


@pytest.mark.parametrize("padding", [0, 20_000])
@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/chat/completions", conversation('{"a":[' + "[]," * limits.CALL_VALUES.most + "[]]}")),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "assistant", "content": [
            {"type": "tool_use", "id": "c", "name": "f", "input": {"a": [[]] * (limits.CALL_VALUES.most + 1)}}]}]}),
        ("/v1/responses", {"input": [{"type": "function_call", "call_id": "c", "name": "f",
            "arguments": '{"a":[' + "[]," * limits.CALL_VALUES.most + "[]]}"}]}),
    ],
)  # fmt: skip
def test_json_within_json_is_counted(service, path, body, padding):
    content = json.dumps(body).encode() + b" " * padding
    answer = service.client.post(path, content=content, headers={"Content-Type": "application/json"}, timeout=60)
    assert answer.status_code == 400 and f"{limits.CALL_VALUES.most} values" in answer.text, answer.text[:300]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "utf-8-sig"])
def test_a_body_is_utf_8(service, encoding):
    content = '{"prompt": "a\\ud83d", "max_tokens": 1}'.encode(encoding)
    answer = service.client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json"


@pytest.fixture(scope="module")
def verbatim():
    with served(facts(chat_templates={"default": "{{ messages }}"}, max_length=1 << 20)) as running:
        yield running


@pytest.mark.parametrize("arguments", ['{"a": "\\ud83d"}', '{"a": 1' + "0" * 5000 + "}", '{"a": 1e999}', "[" * 5000])
@pytest.mark.slow(first=2)
def test_odd_arguments_of_a_call_are_no_fault(verbatim, arguments):
    for padding in (0, 20_000):
        content = json.dumps(conversation(arguments)).encode() + b" " * padding
        headers = {"Content-Type": "application/json"}
        answer = verbatim.client.post("/v1/chat/completions", content=content, headers=headers)
        assert answer.status_code == 200, answer.text[:300]
