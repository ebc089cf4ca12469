"""The front of launch/serve_ray.py, with Ray pretended: what it refuses before a mesh is asked."""

import asyncio
import importlib
import json
import sys
from unittest.mock import MagicMock

import httpx
import pytest
from starlette.requests import Request

from tests.fakes.paths import ROOT

RAY = ("", ".exceptions", ".serve", ".serve.config", ".serve.handle", ".util", ".util.placement_group",
       ".util.scheduling_strategies")  # fmt: skip
KEY = {"authorization": "Bearer secret"}


@pytest.fixture
def application(monkeypatch):
    """The front as an ASGI application, and what meshes were asked."""
    for name in RAY:
        monkeypatch.setitem(sys.modules, f"ray{name}", MagicMock())
    monkeypatch.setattr(sys.modules["ray.exceptions"], "RayError", type("RayError", (Exception,), {}))
    monkeypatch.syspath_prepend(str(ROOT / "launch"))
    monkeypatch.delitem(sys.modules, "serve_ray", raising=False)
    launched = importlib.import_module("serve_ray")
    asked = []

    class Meshes:
        def options(self, **more):
            return MagicMock(answer=MagicMock(remote=self.remote))

        async def remote(self, method, path, headers, body):
            asked.append((method, path, headers, body))
            yield 200, {"content-type": "application/json"}
            yield b'{"ok": true}'

    front = launched.Front(Meshes(), launched.Settings(flags="--api-key secret --max-body 2000 --no-access-log"))

    async def app(scope, receive, send):
        response = await front(Request(scope, receive))
        await response(scope, receive, send)

    yield app, asked
    sys.modules.pop("serve_ray", None)


CASES = [
    ({}, {"prompt": "a"}, 401),
    (KEY, {"prompt": "a"}, 200),
    (KEY, {"prompt": "a" * 3000}, 413),
    (KEY, "[" * 1900, 400),
    (KEY, {"prompt": "a", "stream": True, "delivered_token_ids": 5}, 200),
    (KEY, {"prompt": "a", "stream": True, "delivered_token_ids": ["a"]}, 200),
    (KEY | {"content-type": "text/plain"}, {"prompt": "a"}, 415),
]


@pytest.mark.parametrize("headers, body, status", CASES)
def test_what_a_mesh_would_refuse_is_refused_in_front(application, headers, body, status):

    app, asked = application
    content = body if isinstance(body, str) else json.dumps(body)

    async def ask():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            given = {"content-type": "application/json", **headers}
            return await client.post("/v1/completions", content=content, headers=given)

    answer = asyncio.run(ask())
    assert answer.status_code == status, answer.text
    assert bool(asked) == (status == 200)
    assert not asked or json.loads(asked[0][3])["prompt"] == "a"
