"""Endpoints that load and unload LoRA adapters, under vLLM's paths; only with --allow-runtime-lora-updating."""

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse

from lpr.protocol import ErrorCode
from lpr.serve.api.context import context_of
from lpr.serve.api.parsing import JsonRoute
from lpr.serve.bodies.adapters import LoadAdapterBody, UnloadAdapterBody
from lpr.serve.errors import ApiError, bad
from lpr.serve.messages import LoadAdapter, UnloadAdapter

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/load_lora_adapter", summary="Load a LoRA adapter", response_class=PlainTextResponse)
async def load(body: LoadAdapterBody, request: Request) -> str:
    """Load the adapter in a folder of the ranks' machines, for requests that name it as their model."""
    context, name = context_of(request), body.lora_name
    if name in context.ready().names:
        raise bad("lora_name", f"lora_name: {name!r} is a name of the model itself")
    if name in (context.service.adapters or {}) and not body.load_inplace:
        raise bad("lora_name", f"lora_name: {name!r} is loaded already; load_inplace replaces it")
    await context.service.change_adapter(LoadAdapter(name, body.lora_path))
    return f"Success: LoRA adapter {name!r} added successfully."


@router.post("/v1/unload_lora_adapter", summary="Unload a LoRA adapter", response_class=PlainTextResponse)
async def unload(body: UnloadAdapterBody, request: Request) -> str:
    """Take no further requests for an adapter; those that run go on."""
    context, name = context_of(request), body.lora_name
    if name not in (context.service.adapters or {}):
        raise ApiError(ErrorCode.MODEL_NOT_FOUND, f"no adapter is named {name!r}", "lora_name")
    await context.service.change_adapter(UnloadAdapter(name))
    return f"Success: LoRA adapter {name!r} removed successfully."
