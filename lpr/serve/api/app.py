"""The HTTP application: routes, errors, and what lies around every request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

import lpr
from lpr.serve.api import chat, completions, infill, info
from lpr.serve.api.context import Context
from lpr.serve.api.middleware import Guard, Keys
from lpr.serve.errors import ApiError, answer_api_error, answer_bug, answer_http_error, answer_validation_error

_STREAMS = ("/v1/completions", "/beta/completions", "/v1/chat/completions", "/v1/fim/completions", "/infill")
"""Paths whose answers can be streams."""


@dataclass(frozen=True, kw_only=True)
class Surface:
    """How the application deals with the outside."""

    keys: Keys = field(default_factory=lambda: Keys())
    protect_all: bool = False
    """Ask for a key on health, metrics and the page too."""
    cors: tuple[str, ...] = ()
    """Origins whose pages may ask; "*" is all."""
    max_body: int = 16 << 20
    """Bytes of a request's body."""
    access_log: bool = True
    replica: str = ""
    """This service's name among those that a router chooses from."""


def build(context: Context, surface: Surface) -> ASGIApp:
    """The application around `context`."""
    app = FastAPI(title="lpr", version=lpr.__version__, description="Exact completions in fewer steps.", redoc_url=None)
    app.state.context = context
    for module in (completions, chat, infill, info):
        app.include_router(module.router)
    app.add_exception_handler(ApiError, answer_api_error)
    app.add_exception_handler(RequestValidationError, answer_validation_error)
    app.add_exception_handler(HTTPException, answer_http_error)
    app.add_exception_handler(Exception, answer_bug)
    app.openapi = lambda: _schema(app)  # type: ignore[method-assign]
    guarded: ASGIApp = Guard(
        app,
        keys=surface.keys,
        protect_all=surface.protect_all,
        max_body=surface.max_body,
        log=surface.access_log,
        metrics=context.metrics,
        replica=surface.replica,
    )
    if surface.cors:
        guarded = CORSMiddleware(
            guarded,
            allow_origins=list(surface.cors),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "X-LPR-Replica", "X-LPR-Prefix", "Retry-After"],
        )
    return guarded


def _schema(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI schema: errors are OpenAI's, so FastAPI's own 422 does not occur."""
    if app.openapi_schema is None:
        schema = FastAPI.openapi(app)
        schema["components"]["schemas"]["Error"] = {
            "type": "object",
            "required": ["error"],
            "properties": {
                "error": {
                    "type": "object",
                    "required": ["message", "type", "param", "code"],
                    "properties": {
                        "message": {"type": "string"},
                        "type": {"type": "string"},
                        "param": {"type": ["string", "null"]},
                        "code": {"type": ["string", "null"]},
                    },
                }
            },
        }
        schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        for path, operations in schema["paths"].items():
            for operation in operations.values():
                if path in _STREAMS:
                    operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
                operation["responses"].pop("422", None)
                operation["responses"]["default"] = {"description": "An error.", "content": content}
        for name in ("HTTPValidationError", "ValidationError"):
            schema["components"]["schemas"].pop(name, None)
        app.openapi_schema = schema
    return app.openapi_schema
