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
            await asyncio.sleep(0.01)
            yield b'{"ok": true}'

    front = launched.Front(Meshes(), launched.Settings(flags="--api-key secret --max-body 2000 --no-access-log"))

    async def app(scope, receive, send):
        response = await front(Request(scope, receive))
        await response(scope, receive, send)

    yield app, asked
    sys.modules.pop("serve_ray", None)


def ask(app, *request, **more):
    async def answered():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(*request, **more)

    return asyncio.run(answered())


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

    answer = ask(
        app, "POST", "/v1/completions", content=content, headers={"content-type": "application/json", **headers}
    )
    assert answer.status_code == status, answer.text
    assert bool(asked) == (status == 200)
    assert not asked or json.loads(asked[0][3])["prompt"] == "a"


@pytest.mark.parametrize("body", [b"", b"not read"])
def test_an_answer_without_a_body_in_its_request_comes_whole(application, body):
    """A stream ends when its client has gone, and a guard had said so as soon as there was no body to read."""
    app, asked = application
    answer = ask(app, "GET", "/v1/models", content=body, headers=KEY)
    assert (answer.status_code, answer.content, len(asked)) == (200, b'{"ok": true}', 1)
