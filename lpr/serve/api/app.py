"""The HTTP application: routes, errors and middleware."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

import lpr
from lpr.serve.api import chat, completions, infill, info
from lpr.serve.api.context import Context
from lpr.serve.api.middleware import Guard, Surface
from lpr.serve.errors import ApiError, answer_api_error, answer_bug, answer_http_error, answer_validation_error


class ErrorFields(BaseModel):
    """The fields of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """An error in OpenAI's shape."""

    error: ErrorFields


def build(context: Context, surface: Surface) -> ASGIApp:
    """The application of `context`."""
    app = FastAPI(title="lpr", version=lpr.__version__, description="Exact completions in fewer steps.", redoc_url=None)
    app.state.context = context
    for module in (completions, chat, infill, info):
        app.include_router(module.router, responses={"default": {"model": Error, "description": "An error."}})
    app.add_exception_handler(ApiError, answer_api_error)
    app.add_exception_handler(RequestValidationError, answer_validation_error)
    app.add_exception_handler(HTTPException, answer_http_error)
    app.add_exception_handler(Exception, answer_bug)
    guarded: ASGIApp = Guard(app, surface, context.metrics)
    if surface.cors:
        guarded = CORSMiddleware(
            guarded,
            allow_origins=list(surface.cors),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "X-LPR-Replica", "X-LPR-Prefix", "Retry-After"],
        )
    return guarded
