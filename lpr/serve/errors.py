"""Errors in OpenAI's shape: HTTP status, and a body with message, type, param and code."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from starlette.responses import JSONResponse

from lpr.protocol import ErrorCode

_CODES = {
    401: (ErrorCode.MISSING_KEY, ErrorCode.INVALID_KEY),
    404: (ErrorCode.MODEL_NOT_FOUND, ErrorCode.REQUEST_NOT_FOUND),
    408: (ErrorCode.BODY_TIMEOUT,),
    413: (ErrorCode.BODY_TOO_LARGE,),
    415: (ErrorCode.MEDIA_TYPE,),
    421: (ErrorCode.HOST,),
    429: (ErrorCode.OVERLOADED,),
    499: (ErrorCode.CANCELLED,),
    500: (ErrorCode.GENERATION_FAILED, ErrorCode.INTERNAL),
    503: (ErrorCode.NO_MESH, ErrorCode.LOADING, ErrorCode.SHUTTING_DOWN, ErrorCode.DRAINED, ErrorCode.RANKS_LOST),
    504: (ErrorCode.TIMEOUT,),
}
STATUS = {code: status for status, codes in _CODES.items() for code in codes}
"""HTTP status of each error code; 400 for all others."""
SHOWN: dict[ErrorCode, str | None] = {
    ErrorCode.BAD_REQUEST: None, ErrorCode.BODY_TIMEOUT: None, ErrorCode.NO_MESH: "queue_full",
    ErrorCode.DRAINED: "unavailable", ErrorCode.RANKS_LOST: "unavailable",
}  # fmt: skip
"""`code` in the body, if it differs from the error code."""
_SHARED = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 504: "timeout_error"}
KINDS = _SHARED | {408: "timeout_error", 503: "service_unavailable"}  # `type` in the body, by status
ANTHROPIC_KINDS = _SHARED | {413: "request_too_large", 499: "api_error", 503: "overloaded_error"}
"""The same in Anthropic's API."""
RETRY_AFTER = 5  # default Retry-After of a 503 in seconds
LONGEST_MESSAGE, LONGEST_NAME = 1000, 200
"""Most characters of an error's message and of a field's name, which may contain a client's input."""
TAG = "one-"  # prefix of union tags, which are removed from field names; no field name has a minus
_NAMED = re.compile(r"([a-z][a-z0-9_.]*): ")  # how the message of an error about a whole body names a field
_TYPE_NAMES = ("str", "int", "float", "bool", "none")


class ApiError(Exception):
    """A request that cannot be answered. It becomes an OpenAI-shaped error."""

    def __init__(self, code: ErrorCode, message: str, param: str | None = None, retry_after: int | None = None) -> None:
        """`param` names the field that is wrong. `retry_after` is in seconds."""
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.status = STATUS.get(code, 400)
        self.retry_after = RETRY_AFTER if retry_after is None and self.status == 503 else retry_after
        self.shown_code = SHOWN.get(code, code.value)  # `code` in the body

    def body(self) -> dict[str, Any]:
        return error_body(self.status, self.message, self.param, self.shown_code)

    def response(self, path: str = "") -> JSONResponse:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        body = anthropic_error(self.status, self.message) if path.startswith("/v1/messages") else self.body()
        return JSONResponse(body, self.status, headers)


@contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Context: errors of fields get the names that these have in the client's body, by `names`."""
    try:
        yield
    except ApiError as failure:
        for name, other in names.items():
            if failure.param is not None and f"{failure.param}.".startswith(f"{name}."):
                message, param = failure.message.replace(name, other, 1), other + failure.param[len(name) :]
                raise ApiError(failure.code, message, param, failure.retry_after) from failure
        raise


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    name = None if param is None else _clean(param, LONGEST_NAME)
    return {"error": {"message": _clean(message, LONGEST_MESSAGE), "type": kind, "param": name, "code": code}}


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    kind = ANTHROPIC_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": _clean(message, LONGEST_MESSAGE)}}


def _clean(text: str, most: int) -> str:
    """At most `most` characters of a text, without lone surrogates, which JSON can spell and UTF-8 cannot."""
    short = text if len(text) <= most else text[: most - 3] + "..."
    return short.encode("utf-8", "replace").decode()


def bad(param: str, message: str, code: ErrorCode = ErrorCode.BAD_REQUEST) -> ApiError:
    return ApiError(code, message, param)


def too_long(size: str, max_length: int, param: str = "prompt") -> ApiError:
    """The error of a prompt that leaves no room for an output."""
    message = f"the prompt's {size} leave no room; the model's limit is {max_length}"
    return bad(param, message, ErrorCode.TOO_LONG)


def from_validation(first: Mapping[str, Any]) -> ApiError:
    place = [str(part)[:LONGEST_NAME] for part in first["loc"] if part not in ("body", "query", "path")]
    # Union members appear in the location as type names, which are removed.
    name = ".".join(part for part in place if part not in _TYPE_NAMES and not set(part) & set("[-")) or None
    if first["type"] == "extra_forbidden":
        return ApiError(ErrorCode.UNSUPPORTED_PARAMETER, f"{name}: this field is not supported", name)
    if first["type"] == "missing":
        return ApiError(ErrorCode.MISSING_PARAMETER, f"{name or 'body'}: this field is required", name)
    message = _message(first)
    if name is None and (named := _NAMED.match(message)):
        return ApiError(ErrorCode.INVALID_VALUE, message, named[1])
    return ApiError(ErrorCode.INVALID_VALUE, f"{name}: {message}" if name else message, name)


def _message(first: Mapping[str, Any]) -> str:
    """The message of an error, with JSON's type names instead of Python's."""
    context = first.get("ctx", {})
    match first["type"]:
        case "union_tag_invalid":
            known = context["expected_tags"].replace(TAG, "")
            return f"type {context['tag'].removeprefix(TAG)!r} is none of {known}"
        case "union_tag_not_found":
            return "this is no object with a type"
        case "model_type" | "model_attributes_type" | "dict_type":
            return "this should be an object"
    return str(first["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
