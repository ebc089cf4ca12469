"""Validation of clients' bodies, and the tasks of the sandbox process that runs it (lpr.serve.sandboxed)."""

import importlib
import json
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from lpr.fleet.affinity import prefix_keys
from lpr.protocol import ErrorCode
from lpr.serve import limits
from lpr.serve.bodies import adapters, completions, infill, messages, responses
from lpr.serve.bodies.fields import Body
from lpr.serve.bodies.packed import pack, unpack
from lpr.serve.errors import ApiError, from_validation, too_long
from lpr.serve.text.chat_template import ChatTemplates
from lpr.serve.text.conversation import prompt_of


class _Model(NamedTuple):
    max_length: int
    templates: ChatTemplates
    most_characters: int


_model: _Model | None = None
_NOT_JSON: dict[type[Exception], str] = {
    UnicodeDecodeError: "it is not UTF-8", ValueError: "a number has too many digits",
    RecursionError: "it is nested too deeply",
}  # fmt: skip


def prepare(
    max_length: int, sources: dict[str, str], special_tokens: dict[str, str], most_characters: int,
    fits: dict[str, Any] | None, grammars: tuple[str, int, list[int]] | None,
) -> None:  # fmt: skip
    """Set the served model's longest sequence (tokens), chat templates and longest prompt (characters).

    `fits` is the result of `learn`, once known. `grammars` are the arguments of lpr.serve.text.grammar_tasks.prepare;
    None if llguidance is not installed.
    """
    global _model
    _model = _Model(max_length, ChatTemplates(sources, special_tokens), most_characters)
    if fits is not None:
        _model.templates.know(fits)
    if grammars is not None:
        _grammar_tasks().prepare(*grammars)


def read_json(body: bytes) -> Any:
    """The value of a body's JSON in UTF-8; raises ApiError."""
    try:
        value = json.loads(body.decode())
    except (ValueError, RecursionError) as failure:
        why = getattr(failure, "msg", None) or _NOT_JSON[type(failure)]  # a JSONDecodeError says it itself
        raise ApiError(ErrorCode.INVALID_JSON, f"the body is not JSON: {why}") from None
    if body.count(b"[") + body.count(b"{") > limits.DEPTH.most:
        _check_depth(value)
    if b"\\ud" in body.lower() or b"\xed" in body:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            why = "the body holds half of a surrogate pair, which is no text"
            raise ApiError(ErrorCode.INVALID_JSON, why) from None
    return value


def check_body(kind: str, body: bytes, has_keys: bool = False) -> bytes:
    """Validate a body of `kind`, a class name of lpr.serve.bodies; returns it packed. Raises ApiError.

    The result is a pair: [body], or for a conversation [body and chat without messages, the prompt, the error instead
    of a prompt]; and the keys of the prefix, if a router needs them.
    """
    value = read_json(body)
    if _model is not None and isinstance(value, dict):
        _check_ids(value.get("prompt"), _model.max_length)
    try:
        checked = _adapter(kind).validate_python(value, from_attributes=True)  # as FastAPI: same messages
    except ValidationError as failure:
        raise from_validation(failure.errors(include_url=False, include_input=False)[0]) from None
    keys = prefix_keys(value) if has_keys else []
    del value
    return _packed([_rendered(checked) or [checked, None, None, None], keys])


def render(packed: bytes) -> str:
    """The prompt of a conversation, by the model's template; raises ApiError."""
    assert _model is not None, "tasks come after what they need"
    return prompt_of(_model.templates, unpack(packed), _model.most_characters)


def compile_grammar(kind: str, text: str) -> str:
    return str(_grammar_tasks().compile_grammar(kind, text))


def learn() -> dict[str, Any]:
    """The forms that the chat templates accept, for `prepare`."""
    assert _model is not None, "tasks come after what they need"
    return _model.templates.learnt()


TASKS = {"check_body": check_body, "learn": learn, "render": render, "compile_grammar": compile_grammar}


def chat_of(body: Body) -> completions.ChatBody | completions.TokenizeBody | None:
    """The chat that a validated body asks for; None for one without a conversation."""
    if isinstance(body, messages.CountBody):
        return messages.as_chat(body)
    if isinstance(body, responses.ResponsesBody):
        return responses.as_chat(body)
    return body if isinstance(body, (completions.ChatBody, completions.TokenizeBody)) and body.messages else None


def _rendered(body: Body) -> list[Any] | None:
    """The first part of `check_body`'s result for a conversation; None for other bodies, and before `prepare`.

    The chat keeps its last message if the answer continues it.
    """
    if _model is None or not _model.templates.is_known or (chat := chat_of(body)) is None:
        return None
    text = refused = None
    try:
        text = prompt_of(_model.templates, chat, _model.most_characters)
    except ApiError as failure:  # the front raises it at the usual place
        refused = [failure.code.value, failure.message, failure.param]
    kept = chat.messages[-1:] if chat.messages and chat.continue_final_message else []
    setattr(body, "input" if isinstance(body, responses.ResponsesBody) else "messages", [])
    chat.messages = kept
    return [body, chat if chat is not body else None, text, refused]


def _packed(value: Any) -> bytes:
    try:
        return pack(value)
    except (OverflowError, RecursionError):
        why = "a number has too many digits, or values are nested too deeply"
        raise ApiError(ErrorCode.INVALID_VALUE, f"the body cannot be used: {why}") from None


def _grammar_tasks() -> Any:
    return importlib.import_module("lpr.serve.text.grammar_tasks")  # its package is optional


def _check_depth(value: Any) -> None:
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(limits.DEPTH.most):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [each for each in chain.from_iterable(inner) if isinstance(each, (dict, list))]
        if not level:
            return
    raise ApiError(ErrorCode.INVALID_JSON, f"the body is nested deeper than {limits.DEPTH.most} levels")


def _check_ids(prompt: Any, max_length: int) -> None:
    """Raise ApiError for a prompt of too many token ids, before each is validated."""
    several = isinstance(prompt, list) and prompt and isinstance(prompt[0], list)
    for each in prompt if several else [prompt]:
        if isinstance(each, list) and len(each) > max_length:
            raise too_long(f"{len(each)} tokens", max_length)


@cache
def _adapter(kind: str) -> TypeAdapter[Any]:
    modules = (adapters, completions, infill, messages, responses)
    return TypeAdapter(next(found for module in modules if (found := getattr(module, kind, None)) is not None))
