"""The HTTP application: routes, errors and middleware."""

from __future__ import annotations

from fastapi import Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

import lpr
from lpr.serve.api import chat, completions, infill, info
from lpr.serve.api.context import Context
from lpr.serve.api.middleware import Guard, Keys
from lpr.serve.errors import ApiError, answer_error
from lpr.serve.options import ServeArgs


class ErrorFields(BaseModel):
    """The fields of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """An error in OpenAI's shape."""

    error: ErrorFields


def build(context: Context, args: ServeArgs, keys: Keys, replica: str) -> ASGIApp:
    """The application of `context`, which needs one of `keys` if there are any."""
    app = FastAPI(title="lpr", version=lpr.__version__, description="Exact completions in fewer steps.", redoc_url=None)
    app.state.context = context
    for module in (completions, chat, infill, info):
        # The key is checked by Guard, before a body is read; here the schema says that there may be one.
        bearer, error = Depends(HTTPBearer(auto_error=False)), {"model": Error, "description": "An error."}
        app.include_router(module.router, dependencies=[bearer], responses={"default": error})
    for kind in (ApiError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer_error)
    guarded: ASGIApp = Guard(app, args, keys, replica, context.metrics)
    if args.cors:
        guarded = CORSMiddleware(
            guarded,
            allow_origins=list(args.cors),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "X-LPR-Replica", "X-LPR-Prefix", "Retry-After"],
        )
    return guarded
