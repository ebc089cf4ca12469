"""Request bodies: short ones are parsed here and validated by FastAPI; long ones are parsed and validated by another
process."""

from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, get_type_hints

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope

from lpr.protocol import ErrorCode
from lpr.serve.api.context import unless_gone
from lpr.serve.api.middleware import Parse
from lpr.serve.bodies.fields import Body
from lpr.serve.bodies.packed import unpack
from lpr.serve.checks import read_json
from lpr.serve.errors import ApiError
from lpr.serve.sandbox import ExhaustedError, Sandbox
from lpr.serve.text.tokens import LONG


def parser(sandbox: Sandbox, kinds: Mapping[str, str], has_keys: bool) -> Parse:
    """`kinds` maps paths to class names of lpr.serve.bodies; `sandbox` runs the tasks of `checks`.

    With `has_keys`, answers have the keys of their prompt's prefix in a header, for routers.
    """

    async def parse(scope: Scope, body: bytes, receive: Receive) -> None:
        """Store a body for JsonRequest. Raises ApiError, and DisconnectedError if the client disconnects."""
        kind, state = kinds.get(scope["path"].removeprefix(scope.get("root_path", ""))), scope["state"]
        if kind is None or not body:
            return
        state["size"] = len(body)
        if len(body) <= LONG:
            state["json"] = read_json(body)
            return
        checking = sandbox.run("check_body", kind, body, has_keys, key=state.get("key_name", ""), size=len(body))
        try:
            packed = await unless_gone(receive, checking)
        except ExhaustedError as failure:
            raise ApiError(ErrorCode.INVALID_VALUE, f"the body cannot be checked: it needs {failure}") from failure
        (state["json"], *state["rendered"]), state["prefix_keys"] = unpack(packed)

    return parse


class JsonRequest(Request):
    """A request whose body was already parsed and possibly validated."""

    async def json(self) -> Any:
        """The body's value, or the validated body, which FastAPI does not validate again."""
        state = self.scope.get("state", {})
        return state["json"] if "json" in state else await super().json()


class JsonRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handler


def kinds_of(routers: Iterable[APIRouter]) -> dict[str, str]:
    """By path, the class name of its body."""
    routes = (route for router in routers for route in router.routes if isinstance(route, JsonRoute))
    return {
        route.path: kind.__name__
        for route in routes
        for kind in get_type_hints(route.endpoint).values()
        if isinstance(kind, type) and issubclass(kind, Body)
    }
