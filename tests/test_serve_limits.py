"""Every limit of the service (lpr.serve.limits): at it a request is taken, beyond it it is refused at little cost."""

import asyncio
import json
import time

import pytest
from fake_driver import facts, served

from lpr.serve import limits
from lpr.serve.bodies import ResponseFormat
from lpr.serve.errors import ApiError
from lpr.serve.text.grammars import Grammars

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
    for name in ("prompt", "content"):
        post(service, "/tokenize", {name: "a b " * (limits.TOKENIZED.most // 4)}, 200)
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
    post(service, path, {**CHAT, "tools": [[]] * 100_000}, 400, "tools")


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


def why_refused(**changed):
    """Why a large grammar is refused under other limits."""
    with pytest.MonkeyPatch.context() as patch:
        for name, most in changed.items():
            patch.setattr(limits, name, getattr(limits, name)._replace(most=most))
        grammars = Grammars()

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


@pytest.mark.parametrize("expression", ["{{ 'a' * n }}", "{{ ([1] * n) | length }}", "{{ 'a' * (n ** n) }}"])
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
