"""Fields of bodies: each that a documented client knows is obeyed, without effect, or refused by its name."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, get_type_hints

import pytest

from lpr.serve.api import adapters, chat, completions, infill, info, messages, responses
from lpr.serve.api.parsing import kinds_of
from lpr.serve.bodies.completions import ChatBody, CompletionBody
from lpr.serve.bodies.fields import Harmless, Only, Sampled
from lpr.serve.bodies.infill import FimBody, InfillBody
from lpr.serve.bodies.messages import CountBody, MessagesBody
from lpr.serve.bodies.packed import unpack
from lpr.serve.bodies.responses import ResponsesBody
from lpr.serve.checks import check_body
from lpr.serve.errors import ApiError
from tests.fakes.paths import ROOT

SAY = [{"role": "user", "content": "a"}]
LEAST: dict[type[Harmless], dict[str, Any]] = {
    CompletionBody: {"prompt": "a"},
    ChatBody: {"messages": SAY},
    ResponsesBody: {"input": "a"},
    MessagesBody: {"messages": SAY, "max_tokens": 9},
    CountBody: {"messages": SAY},
    InfillBody: {"input_prefix": "a", "input_suffix": "b"},
    FimBody: {"prompt": "a"},
}
PATHS = {
    CompletionBody: "`/v1/completions`, `/beta/completions`",
    ChatBody: "`/v1/chat/completions`",
    ResponsesBody: "`/v1/responses`",
    MessagesBody: "`/v1/messages`",
    CountBody: "`/v1/messages/count_tokens`",
    InfillBody: "`/infill`",
    FimBody: "`/v1/fim/completions`",
}
SAMPLES = (1, -1, 0.5, "a", "auto", True, False, [], ["a"], [{}], {}, {"type": "a"}, {"a": 1})


def refused(kind: type[Harmless], **fields: Any) -> str | None:
    """The name of the field that is refused; None if the body is taken."""
    try:
        check_body(kind.__name__, json.dumps({**LEAST[kind], **fields}).encode())
    except ApiError as failure:
        assert failure.status == 400 and failure.param is not None, failure.message
        assert failure.param.split(".")[0] in failure.message
        return failure.param.split(".")[0]
    return None


def params(kind: Any) -> set[str]:
    """The names of a TypedDict's keys."""
    return set(kind.__required_keys__ | kind.__optional_keys__)


def sdk_params() -> list[tuple[type[Harmless], str]]:
    openai, anthropic = pytest.importorskip("openai"), pytest.importorskip("anthropic")
    types, claude = openai.types, anthropic.types
    kinds = {
        CompletionBody: types.completion_create_params.CompletionCreateParamsStreaming,
        ChatBody: types.chat.completion_create_params.CompletionCreateParamsStreaming,
        ResponsesBody: types.responses.response_create_params.ResponseCreateParamsStreaming,
        MessagesBody: claude.message_create_params.MessageCreateParamsStreaming,
        CountBody: claude.message_count_tokens_params.MessageCountTokensParams,
    }
    beta = claude.beta.message_create_params.MessageCreateParamsStreaming
    found = [(kind, name) for kind, typed in kinds.items() for name in sorted(params(typed))]
    return found + [(MessagesBody, name) for name in sorted(params(beta))]


def test_each_parameter_of_the_sdks_is_taken_or_refused_by_its_name() -> None:
    found = sdk_params()
    assert len(found) > 100
    for kind, name in found:
        for value in SAMPLES:
            seen = refused(kind, **{name: value})
            assert seen in (None, name), (kind.__name__, name, value, seen)
        if name not in LEAST[kind]:
            assert refused(kind, **{name: None}) is None, (kind.__name__, name)


SAFE = {
    "user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "prompt_cache_retention": "24h", "verbosity": "low",
    "service_tier": "flex", "metadata": {"a": "b"}, "store": False, "cache_control": {"type": "ephemeral"}, "seed": -1,
    "cache_prompt": True, "id_slot": -1, "t_max_prompt_ms": 500, "timings_per_token": False, "dynatemp_range": 0,
    "dynatemp_exponent": 1, "typical_p": 1, "xtc_probability": 0, "xtc_threshold": 0.1, "repeat_last_n": 64,
    "dry_multiplier": 0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1, "mirostat": 0,
    "n_probs": 0,
    "length_penalty": 1, "use_beam_search": False, "include_reasoning": True, "samplers": "edkypmxt", "stream": False,
}  # fmt: skip
COUNTED = {"seed", "stream", "samplers", "user", "prompt_cache_key"}


@pytest.mark.parametrize("kind", LEAST, ids=lambda kind: kind.__name__)
def test_what_clients_send_to_every_route_is_taken_by_every_route(kind: type[Harmless]) -> None:
    for name, value in SAFE.items():
        if (kind is CountBody or (kind is InfillBody and name in ("user", "prompt_cache_key"))) and name in COUNTED:
            continue
        assert refused(kind, **{name: value}) is None, name
        assert refused(kind, **{name: None}) is None, name
    for name, value in (("typical_p", 0.9), ("mirostat", 2), ("xtc_probability", 0.5), ("n_probs", 3), ("nonsense", 1)):
        assert refused(kind, **{name: value}) == name
    if kind is not CountBody:
        assert refused(kind, repeat_last_n=64, repeat_penalty=1.1) == "repeat_last_n"
        assert refused(kind, samplers="q") == "samplers"


def test_llama_vscodes_bodies() -> None:
    ask = [
        {"role": "system", "content": "You are an expert coder."},
        {"role": "user", "content": "Rename x to y: x = 1"},
    ]
    edit = {
        "messages": ask, "stream": False, "cache_prompt": True, "samplers": "edkypmxt", "temperature": 0.8,
        "dynatemp_range": 0, "dynatemp_exponent": 1, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "typical_p": 1,
        "xtc_probability": 0, "xtc_threshold": 0.1, "repeat_last_n": 64, "repeat_penalty": 1, "presence_penalty": 0,
        "frequency_penalty": 0, "dry_multiplier": 0, "dry_base": 1.75, "dry_allowed_length": 2,
        "dry_penalty_last_n": -1, "max_tokens": -1, "timings_per_token": False,
    }  # fmt: skip
    ahead = {"messages": ask, "n_predict": 0, "samplers": [], "cache_prompt": True, "t_max_prompt_ms": 500}
    assert refused(ChatBody, **edit) is None and refused(ChatBody, **ahead, t_max_predict_ms=1) is None
    assert refused(ChatBody, messages=ask, t_max_predict_ms=1) == "t_max_predict_ms"


def test_continues_bodies() -> None:
    """Continue's chat, and its completion by DeepSeek's API."""
    parts = [{"type": "text", "text": "explain"}, {"type": "text", "text": "this"}]
    answered = {"role": "assistant", "content": "ok", "tool_calls": [], "annotations": [], "refusal": None}
    body = {"messages": [{"role": "user", "content": parts}, answered, *SAY], "model": "m", "max_tokens": 4096,
            "stream": True, "stream_options": {"include_usage": True}, "stop": None, "parallel_tool_calls": None,
            "tools": [{"type": "function", "function": {"name": "f", "return": {"type": "string"}}}]}  # fmt: skip
    assert refused(ChatBody, **body) is None
    fim = {"model": "m", "prompt": "def f(", "suffix": "\n", "max_tokens": 1024, "temperature": 0.01, "stop": ["\n\n"],
           "stream": True, "frequency_penalty": None, "logprobs": None}  # fmt: skip
    assert refused(CompletionBody, **fim) is None


def test_an_image_is_refused_by_the_place_of_its_part() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    with pytest.raises(ApiError, match="image_url") as failed:
        check_body("ChatBody", json.dumps({"messages": [{"role": "user", "content": content}]}).encode())
    assert failed.value.param == "messages.0.content.1"


def written() -> str:
    """The tables of docs/serving.md."""

    def listed(names: Iterable[str]) -> str:
        return ", ".join(f"`{name}`" for name in names)

    hints = get_type_hints(Harmless, include_extras=True)
    only = {name: each.values for name, hint in hints.items() for each in hint.__metadata__ if isinstance(each, Only)}
    common = [name for name in Sampled.model_fields if name not in hints]
    values = [f"{name}: {' or '.join(map(json.dumps, given))}" for name, given in only.items()]
    rows = ["| on every route | fields |", "|---|---|"]
    rows.append(f"| without effect | {listed(name for name in hints if name not in only)} |")
    rows.append(f"| only with the value that asks for nothing | {listed(values)} |")
    rows.append(f"| obeyed, but not by `/infill` and `count_tokens` | {listed(common)} |")
    rows += ["", "| route | its own fields |", "|---|---|"]
    for kind, path in PATHS.items():
        fields = {field.alias or name: field for name, field in kind.model_fields.items() if name not in common}
        own = [name for name, field in fields.items() if field is not Harmless.model_fields.get(name)]
        own = [name for name in own if name not in hints or kind.__annotations__.get(name)]
        rows.append(f"| {path} | {listed(own)} |")
    return "\n".join(rows)


def test_the_documentation_shows_all_fields() -> None:
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    found = page.partition("<!-- fields -->\n")[2].partition("\n<!-- end of fields -->")[0]
    assert found == written(), written()


def test_every_long_body_can_be_checked_aside() -> None:
    """A long body that loads an adapter had no class there, and was answered with a 500."""
    routers = [module.router for module in (adapters, chat, completions, infill, info, messages, responses)]
    for path, kind in kinds_of(routers).items():
        with pytest.raises(ApiError) as failure:
            check_body(kind, b'{"no such field": 1}')
        assert failure.value.status == 400, path
    packed = check_body("LoadAdapterBody", json.dumps({"lora_name": "a", "lora_path": "é" * 4096}).encode())
    assert unpack(packed)[0][0].lora_name == "a"
