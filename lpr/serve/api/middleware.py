"""Middleware: request ids, keys, the size of bodies, and the access log."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lpr.config import InputError
from lpr.protocol import ErrorCode
from lpr.serve.errors import ApiError
from lpr.serve.generation import DisconnectedError
from lpr.serve.metrics import Metrics
from lpr.serve.options import ServeArgs

OPEN_PATHS = frozenset(("/", "/health", "/livez", "/readyz", "/metrics"))
"""Paths that need no key unless all are protected."""
_UNLOGGED = OPEN_PATHS - {"/"}
"""Probes come every few seconds and would hide other requests."""
_HARMLESS = re.compile(r"[A-Za-z0-9._:-]{1,200}")
"""Ids of requests that are taken from clients."""
BODY_SECONDS = 30.0
"""Time for a request's body to arrive."""
Parse = Callable[[Scope, bytes, Receive], Awaitable[None]]
"""Checks a request's body, and notes its value in the scope; raises ApiError or DisconnectedError."""


class Keys:
    """The API keys."""

    def __init__(self, keys: Iterable[tuple[str, str]] = ()) -> None:
        """Keep the digests of `keys`, pairs of name and key. Equal lengths are compared in constant time."""
        self._digests = [(name, _digest(key)) for name, key in keys]
        self.names = list(dict.fromkeys(name for name, _ in self._digests))

    def __bool__(self) -> bool:
        """True if requests need a key."""
        return bool(self._digests)

    def name_of(self, key: str) -> str | None:
        """The name of a key, or None; takes the same time for every key, known or not."""
        given = _digest(key)
        found = None
        for name, digest in self._digests:
            if hmac.compare_digest(digest, given):
                found = name
        return found

    @classmethod
    def read(cls, given: str | None, path: Path | None) -> Keys:
        """Read keys separated by commas, and a file with "key" or "name key" per line. Raises InputError.

        White space around a key is dropped: no header can send it, and secrets often end with a new line. A name may
        have several keys, such as an old and a new one.
        """
        keys = [(_name(key), key) for key in map(str.strip, (given or "").split(",")) if key]
        if path is not None:
            try:
                lines = path.read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as failure:
                reason = getattr(failure, "strerror", None) or failure
                raise InputError(f"cannot read --api-key-file {path}: {reason}") from failure
            for number, line in enumerate(lines, 1):
                words = line.split()
                if not words or words[0].startswith("#"):
                    continue
                if len(words) > 2:
                    raise InputError(f'--api-key-file {path}, line {number}: not "key" or "name key"')
                keys.append((words[0] if len(words) == 2 else _name(words[0]), words[-1]))
            if not keys:
                raise InputError(f"--api-key-file {path} holds no key")
        return cls(keys)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _name(key: str) -> str:
    """The name of a key without one. It does not reveal the key."""
    return "key-" + _digest(key).hex()[:8]


class Guard:
    """ASGI middleware: gives a request its id, checks its key, reads its body, and logs the answer."""

    def __init__(self, app: ASGIApp, args: ServeArgs, keys: Keys, replica: str, metrics: Metrics, parse: Parse) -> None:
        """Guard `app` of the service that a router knows as `replica`; `parse` parses bodies."""
        self._parse = parse
        self._app = app
        self._args = args
        self._keys = keys
        self._replica = replica
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        state = scope.setdefault("state", {})
        given = headers.get("x-request-id", "")
        state["request_id"] = given if _HARMLESS.fullmatch(given) else uuid.uuid4().hex
        status = 0

        async def numbered(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *self._own_headers(state)]
            await send(message)

        try:
            state["key_name"] = self._check_key(scope, headers)
            _check_type(scope, headers)
            await self._app(scope, await self._with_body(scope, headers, receive), numbered)
        except ApiError as failure:
            await failure.response()(scope, receive, numbered)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.answered(route, status)
            if self._args.access_log and scope["path"] not in _UNLOGGED:
                self._write(scope, state, status, time.monotonic() - began)

    def _own_headers(self, state: Mapping[str, Any]) -> Iterator[tuple[bytes, bytes]]:
        """Headers of every answer: the request's id, the replica, and the keys for routing by prefix."""
        yield b"x-request-id", state["request_id"].encode()
        if self._replica:
            yield b"x-lpr-replica", self._replica.encode("ascii", "replace")
        if state.get("prefix_keys"):
            yield b"x-lpr-prefix", ",".join(state["prefix_keys"]).encode()

    def _check_key(self, scope: Scope, headers: Mapping[str, str]) -> str:
        is_open = scope["path"] in OPEN_PATHS and not self._args.protect_all
        if not self._keys or scope["method"] == "OPTIONS" or is_open:
            return ""
        scheme, _, value = headers.get("authorization", "").partition(" ")
        key = value.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        name = self._keys.name_of(key)
        if name is None:
            code = ErrorCode.INVALID_KEY if key else ErrorCode.MISSING_KEY
            raise ApiError(code, "give a valid key as Authorization: Bearer KEY")
        return name

    async def _with_body(self, scope: Scope, headers: Mapping[str, str], receive: Receive) -> Receive:
        """Read the whole body; returns a `receive` that gives it and then what follows. Raises ApiError."""
        limit, length = self._args.max_body, headers.get("content-length", "0")
        too_large = ApiError(ErrorCode.BODY_TOO_LARGE, f"the body is larger than --max-body {limit} bytes")
        if length.isdecimal() and int(length) > limit:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return receive
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > limit:
                        raise too_large
        except TimeoutError as failure:
            late = f"the body did not arrive within {BODY_SECONDS:g} s"
            raise ApiError(ErrorCode.BODY_TIMEOUT, late) from failure
        try:
            await self._parse(scope, bytes(body), receive)
        except DisconnectedError:
            return receive
        pending = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replayed() -> Message:
            return pending.pop() if pending else await receive()

        return replayed

    def _write(self, scope: Scope, state: dict[str, Any], status: int, seconds: float) -> None:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()) + "Z",
            "id": state["request_id"],
            "method": scope["method"],
            "path": scope["path"],
            "status": status or 499,
            "ms": round(1e3 * seconds, 1),
            "key": state.get("key_name", ""),
            "client": (scope.get("client") or [""])[0],
            **({"user": state["user"]} if state.get("user") else {}),
            **state.get("log", {}),
        }
        print(json.dumps(line), file=sys.stderr, flush=True)


def _check_type(scope: Scope, headers: Mapping[str, str]) -> None:
    """Raise ApiError for a body that is not declared as JSON.

    Browsers send other types across sites without a preflight, so any page could use a local service.
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if scope["method"] == "POST" and kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(ErrorCode.MEDIA_TYPE, "send the body as Content-Type: application/json")
