"""The whole service, with ranks and a model: its texts are those of `Engine.generate`, whoever else is served."""

import json
import random
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

import lpr
from tests.fakes import other_clients as clients
from tests.fakes.adapters import ATTENTION, write_adapter
from tests.fakes.serving import SIZES, make_model, serving

PROMPTS = (
    "def fibonacci(n):\n    ",
    "class Stack:\n    def __init__(self):\n",
    "import os\n\n\ndef read(path):\n",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    ",
    "for i in range(10):\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(model):
    return lpr.Engine.from_pretrained(str(model), lpr.DecodeConfig(window_size=0, trie_nodes=16), dtype="float32")


def bodies(count, seed=0):
    """Requests of all kinds: greedy and sampled, with and without stop strings, penalties and limits."""
    dice = random.Random(seed)
    for index in range(count):
        body = {
            "prompt": dice.choice(PROMPTS) + dice.choice(("", "x = ", "# note\n    ")),
            "max_tokens": dice.choice((5, 24, 60)),
            "temperature": dice.choice((0, 0, 0.8, 1.2)),
            "seed": index,
        }
        if dice.random() < 0.3:
            body["stop"] = dice.choice(("\n\n", ["return", "self."]))
        if dice.random() < 0.3:
            body |= {"top_p": 0.9, "top_k": 20}
        if dice.random() < 0.2:
            body |= {"repetition_penalty": 1.3, "min_tokens": 4}
        yield body


def params_of(body):
    stop = body.get("stop", ())
    return lpr.SamplingParams(
        max_new_tokens=body["max_tokens"],
        temperature=body["temperature"],
        seed=body["seed"],
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        top_p=body.get("top_p", 1.0),
        top_k=body.get("top_k", 0),
        repetition_penalty=body.get("repetition_penalty", 1.0),
        min_new_tokens=body.get("min_tokens", 0),
    )


def expected(engine, asked):
    return engine.generate([body["prompt"] for body in asked], [params_of(body) for body in asked])


def texts_equal_generate_under_concurrency_with_prefix_hits_and_cancelled_neighbours(service, engine, count=30):
    asked = list(bodies(count))
    wanted = expected(engine, asked)
    stop = threading.Event()

    def disturb(seed):
        dice = random.Random(seed)
        while not stop.is_set():
            body = {"prompt": dice.choice(PROMPTS), "max_tokens": 400, "ignore_eos": True, "stream": True}
            with httpx.stream("POST", service.url + "/v1/completions", json=body, timeout=60) as response:
                for number, _ in enumerate(response.iter_lines()):
                    if number >= 2 * dice.randrange(1, 6):
                        break  # and so drop the connection

    def ask(body):
        answer = httpx.post(service.url + "/v1/completions", json={**body, "return_token_ids": True}, timeout=120)
        return answer.json()

    neighbours = [threading.Thread(target=disturb, args=(seed,)) for seed in range(2)]
    for neighbour in neighbours:
        neighbour.start()
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(ask, asked))
    stop.set()
    for neighbour in neighbours:
        neighbour.join(60)
    for body, answer, one in zip(asked, answers, wanted, strict=True):
        choice = answer["choices"][0]
        assert choice["token_ids"] == one.token_ids, body
        assert (choice["text"], choice["finish_reason"]) == (one.text, one.finish_reason), body
    assert sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers) > 0, "no prefix was hit"


def a_stream_is_the_same_text_in_one_event_per_step(service, engine):
    for body in list(bodies(3, seed=1)):
        one = expected(engine, [body])[0]
        text, ids, reasons = "", [], []
        with httpx.stream("POST", service.url + "/v1/completions", timeout=60,
                          json={**body, "stream": True, "return_token_ids": True}) as response:  # fmt: skip
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    choice = json.loads(line[6:])["choices"][0]
                    text += choice["text"]
                    ids += choice["token_ids"]
                    reasons.append(choice["finish_reason"])
        assert (text, ids) == (one.text, one.token_ids)
        assert reasons[-1] == one.finish_reason and set(reasons[:-1]) <= {None}


def openais_client_completes_streams_chats_and_gets_its_exceptions(service, engine):
    import openai

    client = openai.OpenAI(base_url=service.url + "/v1", api_key="none", max_retries=0)
    body = {"prompt": PROMPTS[0], "max_tokens": 20, "temperature": 0.8, "seed": 5}
    one = expected(engine, [body])[0]
    assert client.completions.create(model="tiny", **body).choices[0].text == one.text
    stream = client.completions.create(model="tiny", stream=True, stream_options={"include_usage": True}, **body)
    events = list(stream)
    assert "".join(event.choices[0].text for event in events[:-1]) == one.text
    assert events[-1].usage.completion_tokens == 20
    messages = [{"role": "user", "content": "write"}]
    prompt = {"prompt": "# user: write\ndef ", "max_tokens": 12, "temperature": 0, "seed": 0}
    wanted = expected(engine, [prompt])[0].text
    chat = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=12, temperature=0)
    assert chat.choices[0].message.content == wanted
    deltas = client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, temperature=0, stream=True)
    assert "".join(event.choices[0].delta.content or "" for event in deltas) == wanted
    assert [each.id for each in client.models.list()] == ["tiny"]
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt", prompt="a")
    with pytest.raises(openai.BadRequestError, match="nonsense"):
        client.completions.create(model="tiny", prompt="a", extra_body={"nonsense": 1})
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model="tiny", prompt="a", max_tokens=10**6)
    with client.completions.create(model="tiny", prompt="a", max_tokens=3000, stream=True) as left:
        next(iter(left))
    wait_until_idle(service)


def wait_until_idle(service):
    for _ in range(500):
        state = service.client.get("/readyz").json()
        if state["running"] == state["waiting"] == 0:
            return
        threading.Event().wait(0.02)
    raise AssertionError(f"requests are left: {state}")


def greedy(engine, prompt, count):
    return engine.generate([prompt], lpr.SamplingParams(max_new_tokens=count))[0].text


def openais_node_client_gets_the_same_texts(service, engine):
    if clients.node_modules() is None:
        return  # tests/slow/test_clients.py is skipped then, and says why
    found = clients.ask_with_node(service.url)
    assert found["text"] == found["stream"] == greedy(engine, "def f(x):\n    ", 6)
    assert found["chat"] == found["chatStream"] == greedy(engine, "# user: u\ndef ", 6)
    wait_until_idle(service)


def litellm_gets_the_same_texts(service, engine):
    if not clients.has("litellm"):
        return
    found = clients.ask_with_litellm(service.url)
    assert found["text"] == found["stream"] == greedy(engine, "def f(x):", 6)
    assert found["chat"] == found["chat_stream"] == greedy(engine, "# user: u\ndef ", 6)


def llama_vim_gets_the_same_text(service, engine):
    if clients.vim_plugin() is None:
        return
    # The plug-in leaves out the white space of a blank line, and may cut the text after a line once its time is up.
    before, after = "def f(x):\n", "\nprint(f(2))\n"
    body = {"input_prefix": before, "input_suffix": after, "n_predict": 128}
    wanted = service.client.post("/infill", json=body).json()["content"]
    shown = clients.fill_with_vim(service.url, before + "    " + after)
    text = shown.removeprefix(before).removesuffix(after)
    assert shown == before + text + after and text.strip() and wanted.startswith(text), (shown, wanted)


def filling_in_equals_generate_with_the_familys_prompt(service, engine):
    tokenizer = engine.tokenizer
    before, after = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))\n"
    ids = [
        tokenizer.convert_tokens_to_ids("<|fim_prefix|>"), *tokenizer(before)["input_ids"],
        tokenizer.convert_tokens_to_ids("<|fim_suffix|>"), *tokenizer(after)["input_ids"],
        tokenizer.convert_tokens_to_ids("<|fim_middle|>"),
    ]  # fmt: skip
    ends = ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    stops = tuple(tokenizer.convert_tokens_to_ids(name) for name in ends)
    one = engine.generate([ids], lpr.SamplingParams(max_new_tokens=16, stop_token_ids=stops))[0]
    body = {"prompt": before, "suffix": after, "max_tokens": 16, "temperature": 0}
    assert service.client.post("/v1/completions", json=body).json()["choices"][0]["text"] == one.text
    vim = {"input_prefix": "def add(a, b):\n", "prompt": "    return ", "input_suffix": after, "n_predict": 16}
    assert service.client.post("/infill", json=vim).json()["content"] == one.text


def logprobs_penalties_and_bias_are_the_engines(service, engine):
    body = {
        "prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0.8, "seed": 3, "logprobs": 2,
        "presence_penalty": 0.5, "frequency_penalty": 0.25, "logit_bias": {"66": 3, "70": -5},
    }  # fmt: skip
    params = lpr.SamplingParams(
        max_new_tokens=12, temperature=0.8, seed=3, logprobs=2, presence_penalty=0.5, frequency_penalty=0.25,
        logit_bias=((66, 3.0), (70, -5.0)),
    )  # fmt: skip
    one = engine.generate([body["prompt"]], params)[0]
    choice = service.client.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["text"] == one.text
    found = choice["logprobs"]
    assert found["token_logprobs"] == pytest.approx([each.logprob for each in one.logprobs], abs=1e-4)
    assert "".join(found["tokens"]) == one.text
    steps = []
    with httpx.stream("POST", service.url + "/v1/completions", json={**body, "stream": True}, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                steps.append(json.loads(line[6:])["choices"][0]["logprobs"])
    assert [value for step in steps for value in step["text_offset"]] == found["text_offset"]
    assert [value for step in steps for value in step["token_logprobs"]] == pytest.approx(
        found["token_logprobs"], abs=1e-4
    )
    ids = engine.encode(body["prompt"])
    scoring = lpr.SamplingParams(max_new_tokens=len(ids) - 1, forced_ids=ids[1:], logprobs=2)
    scored = [each.logprob for each in engine.generate([ids[:1]], scoring)[0].logprobs]
    whole = service.client.post("/v1/completions", json={**body, "echo": True}).json()["choices"][0]
    assert whole["text"] == body["prompt"] + one.text
    assert whole["logprobs"]["token_logprobs"][1 : len(ids)] == pytest.approx(scored, abs=1e-4)
    assert whole["logprobs"]["token_logprobs"][len(ids) :] == pytest.approx(found["token_logprobs"], abs=1e-4)
    best = service.client.post("/v1/completions", json={**body, "n": 1, "best_of": 3, "logprobs": None}).json()
    assert len(best["choices"]) == 1 and best["usage"]["completion_tokens"] == 36


def a_response_format_is_kept(service, engine):
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}},
              "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    body = {"prompt": "# json\n", "max_tokens": 120, "temperature": 0.7, "seed": 1, "response_format": form}
    choice = service.client.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["finish_reason"] == "stop" and set(json.loads(choice["text"])) == {"a", "b"}
    chat = {"messages": [{"role": "user", "content": "u"}], "max_tokens": 40, "temperature": 0.7, "seed": 2}
    chat["response_format"] = {"type": "regex", "regex": "[a-c]{3}[0-9]"}
    text = service.client.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]["content"]
    assert re.fullmatch("[a-c]{3}[0-9]", text)
    for lark in ('start: "ab" | "cd"', 'root ::= "ab" | "cd"'):
        body["response_format"] = {"type": "grammar", "grammar": lark}
        assert service.client.post("/v1/completions", json=body).json()["choices"][0]["text"] in ("ab", "cd")


def an_adapter_is_a_model_of_every_route(service, engine):
    body = {"input_prefix": PROMPTS[0], "input_suffix": "", "n_predict": 8, "temperature": 0, "seed": 1}
    texts = [service.client.post("/infill", json={**body, "model": each}).json()["content"] for each in ("tiny", "sql")]
    assert texts[0] != texts[1]
    assert service.client.get("/v1/models/sql").json()["parent"] == "tiny"
    assert service.client.post("/infill", json={**body, "model": "x"}).status_code == 404


def warming_the_cache_makes_the_next_prompt_hit(service, engine):
    before = "\n".join(f"value_{index} = {index} * {index}" for index in range(40)) + "\n"
    vim = {"input_prefix": before, "input_suffix": "", "n_predict": 0}
    service.client.post("/infill", json=vim).raise_for_status()
    answer = service.client.post("/infill", json={**vim, "prompt": "print(", "n_predict": 4}).json()
    assert answer["timings"]["cache_n"] > 100 > answer["timings"]["prompt_n"]


def time_is_a_limit_after_a_line(service, engine):
    body = {"input_prefix": PROMPTS[0], "input_suffix": "", "n_predict": 3000, "t_max_predict_ms": 1, "stop": []}
    answer = service.client.post("/infill", json=body).json()
    assert "\n" in answer["content"] and answer["tokens_predicted"] < 1000
    wait_until_idle(service)


def sigterm_finishes_what_is_open_and_leaves_nothing(service, engine):
    answers = []
    body = {"prompt": PROMPTS[0], "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    thread = threading.Thread(
        target=lambda: answers.append(httpx.post(service.url + "/v1/completions", json=body, timeout=60))
    )
    thread.start()
    for _ in range(500):
        if service.client.get("/readyz").json().get("running"):
            break
        threading.Event().wait(0.01)
    assert service.stop(signal.SIGTERM) == 0, service.log()
    thread.join(10)
    params = lpr.SamplingParams(max_new_tokens=200, ignore_eos=True)
    assert answers[0].json()["choices"][0]["text"] == engine.generate([PROMPTS[0]], params)[0].text


# Starting a service costs 10 to 30 seconds of processor time, so all that can share one does.


def test_two_ranks(model, engine, tmp_path):
    adapter = write_adapter(tmp_path, engine.model.model, [*ATTENTION, "down_proj"], 0, 0.08)
    flags = ("--served-model-name", "tiny", "--max-batch-size", "4", "--lora-modules", f"sql={adapter}")
    with serving(model, *flags, *SIZES, lp=2) as service:
        texts_equal_generate_under_concurrency_with_prefix_hits_and_cancelled_neighbours(service, engine, 12)
        a_stream_is_the_same_text_in_one_event_per_step(service, engine)
        logprobs_penalties_and_bias_are_the_engines(service, engine)
        a_response_format_is_kept(service, engine)
        an_adapter_is_a_model_of_every_route(service, engine)
        warming_the_cache_makes_the_next_prompt_hit(service, engine)
        sigterm_finishes_what_is_open_and_leaves_nothing(service, engine)
