"""Further endpoints: models, tokens, health, metrics, cancelling, and the page."""

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

import lpr
from lpr.files import asset
from lpr.protocol import ErrorCode
from lpr.serve import limits
from lpr.serve.api.chat import chat_ids
from lpr.serve.api.context import aside, context_of
from lpr.serve.api.parsing import JsonRoute
from lpr.serve.bodies.completions import DetokenizeBody, TokenizeBody
from lpr.serve.errors import ApiError, bad
from lpr.serve.text.fim import FAMILIES
from lpr.serve.text.served import Served

router = APIRouter(route_class=JsonRoute)
health = APIRouter()  # what load balancers ask
measuring = APIRouter()  # what Prometheus asks


@router.get("/v1/models", summary="The served models")
@router.get("/models", include_in_schema=False)
async def models(request: Request) -> dict[str, Any]:
    """List every name under which the model is served, and its adapters."""
    served = context_of(request).ready()
    return {"object": "list", "data": [_model(served, name) for name in (*served.names, *served.adapters())]}


@router.get("/v1/models/{model:path}", summary="One served model")
async def model(model: str, request: Request) -> dict[str, Any]:
    """Describe the model of that name, or answer 404."""
    served = context_of(request).ready()
    return _model(served, served.check_model(model))


def _model(served: Served, name: str) -> dict[str, Any]:
    facts = served.facts
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "lpr",
        "root": name,
        "parent": None if name in served.names else served.names[0],
        "max_model_len": facts.max_length,
        "lpr": {
            "mesh": {"lp": facts.lp, "tp": facts.tp},
            "dtype": facts.dtype,
            "device": facts.device,
            "fill_in_the_middle": served.filler.family.name if served.filler is not None else None,
            "chat": bool(served.templates),
            "tool_calls": served.family.format.name if served.family.format is not None else None,
        },
    }


@router.post("/tokenize", summary="Text or a conversation as tokens", response_model=dict[str, Any])
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """Tokenise vLLM's `prompt` or `messages`, or llama.cpp's `content`."""
    served = context_of(request).ready()
    served.check_model(body.model)
    for name in ("prompt", "content"):
        length = len(getattr(body, name) or "")
        if length > max(limits.TOKENIZED.most, served.most_characters):
            raise bad(name, f"{name}: {length} characters are more than the {limits.TOKENIZED.most} that are taken")
    chat = await chat_ids(request, served, body) if body.messages is not None else None
    return Response(await aside(request, _tokenized, served, body, chat), media_type="application/json")


def _tokenized(served: Served, body: TokenizeBody, chat: list[int] | None) -> bytes:
    if chat is not None:
        ids = chat
    elif body.content is not None:
        ids = served.tokens.encode(body.content, bool(body.add_special))
    else:
        ids = served.tokens.encode(body.prompt or "", body.add_special_tokens is not False)
    answer: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": served.facts.max_length}
    if body.return_token_strs:
        answer["token_strs"] = [served.tokens.text_of(token) for token in ids]
    return msgspec.json.encode(answer)  # here, as it takes long for many tokens


@router.post("/detokenize", summary="Tokens as text")
async def detokenize(body: DetokenizeBody, request: Request) -> dict[str, Any]:
    """Show the text of `tokens`, as vLLM's `prompt` and as llama.cpp's `content`."""
    served = context_of(request).ready()
    served.check_model(body.model)
    text = await aside(request, _detokenized, served, body)
    return {"prompt": text, "content": text}


def _detokenized(served: Served, body: DetokenizeBody) -> str:
    served.check_ids(body.tokens, "tokens")
    return served.tokens.decode(body.tokens)


@router.delete("/v1/requests/{request_id}", summary="Cancel a running request")
@router.delete("/v1/completions/{request_id}", include_in_schema=False)
@router.delete("/v1/chat/completions/{request_id}", include_in_schema=False)
async def cancel(request_id: str, request: Request) -> dict[str, Any]:
    """End a running request by its id: the answer's, or the X-Request-Id, with all that came with it."""
    if not context_of(request).cancel(request, request_id):
        raise ApiError(ErrorCode.REQUEST_NOT_FOUND, f"no request {request_id!r} is running", "request_id")
    return {"id": request_id, "object": "request.deleted", "deleted": True}


@health.get("/health", summary="Ready, as load balancers ask")
@health.get("/readyz", summary="Ready for requests")
async def readyz(request: Request) -> Response:
    """Answer 200 if the model is loaded, the ranks answer and nothing is shutting down, else 503 and why.

    A mesh that has lost ranks is ready with those that are left, which `ranks` counts.
    """
    service = context_of(request).service
    reason = service.ready_reason()
    if reason is not None:
        return JSONResponse({"status": "unavailable", "reason": reason}, 503, {"Retry-After": "5"})
    state = {"status": "ok", "running": service.num_running, "waiting": service.num_waiting}
    return JSONResponse({**state, "ranks": {"present": service.mesh.num_ranks, "wanted": service.mesh.num_wanted}})


@health.get("/livez", summary="Alive")
async def livez(request: Request) -> Response:
    """Answer 200 while the ranks load, work, wait or are started again, 503 once they are silent or hang in a step."""
    reason = context_of(request).service.mesh.live_reason()
    if reason is not None:
        return JSONResponse({"status": "stopped", "reason": reason}, 503)
    return JSONResponse({"status": "ok"})


@measuring.get("/metrics", summary="Metrics for Prometheus", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Show all metrics, vLLM's names first."""
    return Response(context_of(request).metrics.text(), media_type=CONTENT_TYPE_LATEST)


@router.get("/version", summary="Version of lpr")
async def version() -> dict[str, str]:
    """Say which lpr this is."""
    return {"version": lpr.__version__, "name": "lpr"}


@router.get("/fim", summary="Known families of fill-in-the-middle models")
async def fim_families() -> dict[str, Any]:
    """List the table of fill-in-the-middle templates."""
    return {"families": [{"name": family.name, "order": family.order, "source": family.source} for family in FAMILIES]}


@router.get("/", include_in_schema=False)
async def page() -> HTMLResponse:
    """Show the page for trying it out."""
    return HTMLResponse(*_page())


@cache
def _page() -> tuple[str, int, dict[str, str]]:
    """The page, its status, and headers: a browser runs its own script only, and shows it in no other page."""
    text = asset("serve.html").read_text(encoding="utf-8")
    script, style = (
        " ".join(f"'sha256-{b64encode(sha256(part.encode()).digest()).decode()}'" for part in parts)
        for parts in (re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL) for tag in ("script", "style"))
    )
    policy = f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:"
    headers = {
        "Content-Security-Policy": f"{policy}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
    }
    return text, 200, headers
