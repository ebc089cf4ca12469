"""Errors as OpenAI's clients expect them: a status, and a body that says what, where and of which kind."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    499: "request_cancelled",
    500: "server_error",
    503: "service_unavailable",
    504: "timeout_error",
}
_TYPE_NAMES = ("str", "int", "float", "bool", "none")


class ApiError(Exception):
    """A request that cannot be answered; becomes an OpenAI-shaped error."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        """`param` names the field that is wrong; `retry_after` is in seconds."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """The error as JSON values."""
        kind = KINDS.get(self.status, "server_error")
        return {
            "error": {"message": _clean(self.message), "type": kind, "param": _clean(self.param), "code": self.code}
        }

    def response(self) -> JSONResponse:
        """The error as an answer."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status, headers)


def _clean(text: str | None) -> str | None:
    """The text without lone surrogates, which JSON can spell and UTF-8 cannot."""
    return None if text is None else text.encode("utf-8", "replace").decode()


def bad(param: str, message: str, code: str | None = None) -> ApiError:
    """A 400 that names its field."""
    return ApiError(400, message, param, code)


def from_validation(failure: RequestValidationError) -> ApiError:
    """The first complaint of pydantic, in OpenAI's words."""
    first = failure.errors()[0]
    place = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "it cannot be read")
        return ApiError(400, f"the body is not JSON: {reason}", None, "invalid_json")
    # Members of a union appear in the place as type names, which are no part of any field's name.
    name = ".".join(part for part in place if part not in _TYPE_NAMES and not set(part) & set("[-")) or None
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{name}: this field is not supported", name, "unsupported_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"{name or 'body'}: this field is required", name, "missing_required_parameter")
    message = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return ApiError(400, f"{name}: {message}" if name else message, name, "invalid_value")


async def answer_api_error(_: Request, failure: Exception) -> JSONResponse:
    """Handler for ApiError."""
    assert isinstance(failure, ApiError)
    return failure.response()


async def answer_validation_error(_: Request, failure: Exception) -> JSONResponse:
    """Handler for what pydantic refuses."""
    assert isinstance(failure, RequestValidationError)
    return from_validation(failure).response()


async def answer_bug(_: Request, failure: Exception) -> JSONResponse:
    """Handler for everything that should not happen; the server writes the traceback to stderr."""
    return ApiError(500, f"internal error: {type(failure).__name__}", code="internal_error").response()


async def answer_http_error(request: Request, failure: Exception) -> JSONResponse:
    """Handler for what the router refuses: unknown paths and methods."""
    assert isinstance(failure, HTTPException)
    message = f"{request.method} {request.url.path}: {failure.detail}"
    response = ApiError(failure.status_code, message).response()
    response.headers.update(failure.headers or {})
    return response
