"""Checks of what clients send, and the tasks of the process that does them aside (see lpr.serve.sandboxed)."""

from __future__ import annotations

import json
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from lpr.protocol import ErrorCode
from lpr.serve import limits
from lpr.serve.bodies import completions, infill, messages, responses
from lpr.serve.errors import ApiError, from_validation, too_long
from lpr.serve.text.chat_template import ChatTemplates, render_prompt


class _Model(NamedTuple):
    """The served model, as far as these tasks know it."""

    max_length: int
    templates: ChatTemplates


_model: _Model | None = None


def prepare(
    max_length: int, sources: dict[str, str], special_tokens: dict[str, str], fits: dict[str, Any] | None
) -> None:
    """Note the served model's longest sequence, in tokens, its chat templates and, once it is known, what they read."""
    global _model
    _model = _Model(max_length, ChatTemplates(sources, special_tokens))
    if fits is not None:
        _model.templates.know(fits)


def read_json(body: bytes) -> Any:
    """The value of a body's JSON; raises ApiError."""
    try:
        value = json.loads(body)
    except json.JSONDecodeError as failure:
        raise _not_json(failure.msg) from None
    except UnicodeDecodeError:
        raise _not_json("it is not UTF-8") from None
    except ValueError:
        raise _not_json("a number has too many digits") from None
    except RecursionError:
        raise _not_json("it is nested too deeply") from None
    if body.count(b"[") + body.count(b"{") > limits.DEPTH.most:
        _check_depth(value)
    if b"\\ud" in body.lower() or b"\xed" in body:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            message = "the body holds half of a surrogate pair, which is no text"
            raise ApiError(ErrorCode.INVALID_JSON, message) from None
    return value


def check_body(kind: str, body: bytes) -> None:
    """Raise ApiError for a body that is not of `kind`, the name of a class of lpr.serve.bodies."""
    value = read_json(body)
    if _model is not None and isinstance(value, dict):
        _check_ids(value.get("prompt"), _model.max_length)
    try:
        _adapter(kind).validate_python(value, from_attributes=True)  # as FastAPI calls it, so with the same messages
    except ValidationError as failure:
        first = failure.errors(include_url=False, include_input=False)[0]
        raise from_validation(first) from None


def render(messages: list[dict[str, Any]], variables: dict[str, Any], most: int) -> str:
    """The prompt of a conversation, by the model's template; raises ApiError."""
    assert _model is not None, "tasks come after what they need"
    return render_prompt(_model.templates, messages, variables, most)


def learn() -> dict[str, Any]:
    """What the chat templates read, for `prepare`."""
    assert _model is not None, "tasks come after what they need"
    return _model.templates.learnt()


TASKS = {"check_body": check_body, "learn": learn, "render": render}


def _not_json(why: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_JSON, f"the body is not JSON: {why}")


def _check_depth(value: Any) -> None:
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(limits.DEPTH.most):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [each for each in chain.from_iterable(inner) if isinstance(each, (dict, list))]
        if not level:
            return
    raise ApiError(ErrorCode.INVALID_JSON, f"the body is nested deeper than {limits.DEPTH.most} levels")


def _check_ids(prompt: Any, max_length: int) -> None:
    """Raise ApiError for token ids that no context holds, before each is looked at."""
    several = isinstance(prompt, list) and prompt and isinstance(prompt[0], list)
    for each in prompt if several else [prompt]:
        if isinstance(each, list) and len(each) > max_length:
            raise too_long(f"{len(each)} tokens", max_length)


@cache
def _adapter(kind: str) -> TypeAdapter[Any]:
    modules = (completions, infill, messages, responses)
    return TypeAdapter(next(found for module in modules if (found := getattr(module, kind, None)) is not None))
