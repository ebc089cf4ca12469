"""The HTTP application: routes, errors and middleware."""

from collections.abc import Sequence

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

import lpr
from lpr.protocol import ErrorCode
from lpr.serve.api import adapters, chat, completions, infill, info, messages, responses
from lpr.serve.api.context import Context
from lpr.serve.api.middleware import Guard, Keys
from lpr.serve.api.parsing import kinds_of, parser
from lpr.serve.errors import ApiError, error_body, from_validation
from lpr.serve.generation import DisconnectedError
from lpr.serve.options import ServeArgs


class ErrorFields(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """An error in OpenAI's shape."""

    error: ErrorFields


def build(context: Context, args: ServeArgs, keys: Keys, replica: str) -> ASGIApp:
    """The application of `context`, which needs one of `keys` if there are any."""
    routers = [completions.router, chat.router, responses.router, messages.router, infill.router]
    routers += [info.router, info.health]
    if args.allow_runtime_lora_updating:
        routers.append(adapters.router)
    if args.metrics_port is None:
        routers.append(info.measuring)
    guarded = _guarded(context, args, keys, replica, routers)
    if not args.cors:
        return guarded
    return CORSMiddleware(
        guarded,
        allow_origins=list(args.cors),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id", "X-LPR-Replica", "X-LPR-Prefix", "Retry-After"],
    )


def build_metrics(context: Context, args: ServeArgs, keys: Keys, replica: str) -> ASGIApp:
    """The application of --metrics-port: metrics and health."""
    return _guarded(context, args, keys, replica, [info.health, info.measuring])


def _guarded(context: Context, args: ServeArgs, keys: Keys, replica: str, routers: Sequence[APIRouter]) -> ASGIApp:
    # Pages that show the schema load scripts from a CDN; the schema itself is at /openapi.json.
    about = "Exact completions in fewer steps."
    app = FastAPI(title="lpr", version=lpr.__version__, description=about, docs_url=None, redoc_url=None)
    app.state.context = context
    for router in routers:
        # Guard checks the key before it reads a body; this only declares the key in the schema.
        bearer, error = Depends(HTTPBearer(auto_error=False)), {"model": Error, "description": "An error."}
        app.include_router(router, dependencies=[bearer], responses={"default": error})
    for kind in (ApiError, DisconnectedError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _answer_error)
    parse = parser(context.checks, kinds_of(routers), context.names_prefix)
    return Guard(app, args, keys, replica, context.metrics, parse)


async def _answer_error(request: Request, failure: Exception) -> Response:
    """Answer ApiError, errors of pydantic and the router, and bugs, whose traceback the server logs."""
    if isinstance(failure, DisconnectedError):
        return Response(status_code=499)
    if isinstance(failure, HTTPException):
        message = f"{request.method} {request.url.path}: {failure.detail}"
        return JSONResponse(error_body(failure.status_code, message), failure.status_code, failure.headers)
    if isinstance(failure, RequestValidationError):
        failure = from_validation(failure.errors()[0])
    elif not isinstance(failure, ApiError):
        failure = ApiError(ErrorCode.INTERNAL, f"internal error: {type(failure).__name__}")
    return failure.response(request.url.path)
