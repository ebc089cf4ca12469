"""Middleware: request ids, hosts, keys, bodies, and the access log."""

import asyncio
import hashlib
import hmac
import ipaddress
import json
import re
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lpr.config import InputError, read_text
from lpr.protocol import ErrorCode
from lpr.serve import limits
from lpr.serve.connections import GONE
from lpr.serve.errors import ApiError
from lpr.serve.generation import DisconnectedError
from lpr.serve.metrics import Metrics
from lpr.serve.options import ServeArgs

OPEN_PATHS = frozenset(("/", "/health", "/livez", "/readyz", "/metrics"))
"""Paths without a key check, unless --protect-all is given."""
_UNLOGGED = OPEN_PATHS - {"/"}  # probes are frequent and would flood the log
_HARMLESS = re.compile(r"[A-Za-z0-9._:-]{1,200}")  # ids of requests that are taken from clients
MOST_WEIGHT = 1000.0  # the largest weight of a key; the smallest is 1 over it
BODY_SECONDS = float(limits.BODY_SECONDS.most)  # time for a request's body to arrive
Parse = Callable[[Scope, bytes, Receive], Awaitable[None]]
"""Validates a request's body, and stores its value in the scope; raises ApiError or DisconnectedError."""


class Keys:
    def __init__(self, keys: Iterable[tuple[str, str]] = (), weights: Mapping[str, float] | None = None) -> None:
        """Keep the digests of `keys`, pairs of name and key, and the names' `weights` in the sharing of slots (1)."""
        self._digests = [(name, _digest(key)) for name, key in keys]
        self.names = list(dict.fromkeys(name for name, _ in self._digests))
        self.weights = {name: (weights or {}).get(name, 1.0) for name in self.names}

    def __bool__(self) -> bool:
        return bool(self._digests)

    def name_of(self, key: str) -> str | None:
        """The name of a key, None if unknown; in the same time for every key."""
        given = _digest(key)
        names = [name for name, digest in self._digests if hmac.compare_digest(digest, given)]
        return names[-1] if names else None

    @classmethod
    def read(cls, given: str | None, path: Path | None) -> Self:
        """Read keys separated by commas, and a file with "key", "name key" or "name key weight" per line.

        Raises InputError.

        White space around a key is dropped: no header can send it, and secrets often end with a new line. A name may
        have several keys, such as an old and a new one.
        """
        keys = [(_name(key), key) for key in map(str.strip, (given or "").split(",")) if key.strip("\"'")]
        if given is not None and not keys:
            raise InputError("--api-key or LPR_API_KEY is given, but holds no key")
        weights: dict[str, float] = {}
        if path is not None:
            num_given = len(keys)
            for number, line in enumerate(read_text(path, "--api-key-file").splitlines(), 1):
                words, where = line.split(), f"--api-key-file {path}, line {number}"
                if not words or words[0].startswith("#"):
                    continue
                if len(words) > 3 or not words[min(len(words), 2) - 1].strip("\"'"):
                    raise InputError(f'{where}: not "key", "name key" or "name key weight"')
                keys.append((words[0], words[1]) if len(words) > 1 else (_name(words[0]), words[0]))
                if len(words) == 3:
                    weight = _weight(words[2], where)
                    if weights.setdefault(words[0], weight) != weight:
                        raise InputError(f"{where}: the name {words[0]!r} has another weight already")
            if len(keys) == num_given:
                raise InputError(f"--api-key-file {path} holds no key")
        return cls(keys, weights)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _weight(word: str, where: str) -> float:
    with suppress(ValueError):
        if 1 / MOST_WEIGHT <= (weight := float(word)) <= MOST_WEIGHT:
            return weight
    raise InputError(f"{where}: the weight {word!r} is no number from {1 / MOST_WEIGHT:g} to {MOST_WEIGHT:g}")


def _name(key: str) -> str:
    """A generated name for an unnamed key, which does not reveal the key."""
    return "key-" + _digest(key).hex()[:8]


class Guard:
    """ASGI middleware: gives a request its id, checks host and key, reads its body, and logs the answer."""

    def __init__(
        self, app: ASGIApp, args: ServeArgs, keys: Keys, replica: str, metrics: Metrics | None, parse: Parse
    ) -> None:
        """Guard `app`; `replica` is the service's name for routers, `parse` validates bodies."""
        self._parse = parse
        self._app = app
        self._args = args
        self._keys = keys
        self._replica = replica
        self._metrics = metrics
        self._open = OPEN_PATHS - ({"/metrics"} if args.protect_metrics else set())
        # Host names are checked against DNS rebinding by pages of other sites. Addresses are safe.
        self._hosts = {name.lower() for name in args.allowed_hosts} if args.allowed_hosts or not keys else {"*"}
        self._arriving: dict[asyncio.Timeout, int] = {}  # bytes of incomplete bodies, the oldest first
        self._num_arriving = 0
        self._most_arriving = max(limits.BODIES.most, 4 * args.max_body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        is_gone = scope.get("extensions", {}).get(GONE, bool)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        state = scope.setdefault("state", {})
        given = headers.get("x-request-id", "")
        state["request_id"] = given if _HARMLESS.fullmatch(given) else uuid.uuid4().hex
        status = 0
        is_read = headers.get("content-length", "0").strip() == "0" and "transfer-encoding" not in headers

        async def numbered(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *self._own_headers(state)]
                if not is_read:
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        try:
            self.check(scope, headers)
            if scope["method"] == "POST" and scope["path"] not in OPEN_PATHS:
                receive = await self.with_body(scope, headers, receive)
                is_read = True
                if is_gone():
                    return
            else:
                receive = _without_body(receive)
            await self._app(scope, receive, numbered)
        except ApiError as failure:
            await failure.response(scope["path"])(scope, receive, numbered)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            if self._metrics is not None:
                self._metrics.answered(route, status)
            if self._args.access_log and scope["path"] not in _UNLOGGED:
                self._write(scope, state, status, time.monotonic() - began)

    def check(self, scope: Scope, headers: Mapping[str, str]) -> None:
        """Check everything except the body, and record the name of the key; raises ApiError."""
        self._check_host(headers.get("host"))
        scope["state"]["key_name"] = self._check_key(scope, headers)
        _check_type(scope, headers)
        if "transfer-encoding" in headers and "content-length" in headers:  # request smuggling
            raise ApiError(ErrorCode.BAD_REQUEST, "a body has a Content-Length or a Transfer-Encoding, not both")

    def _own_headers(self, state: Mapping[str, Any]) -> Iterator[tuple[bytes, bytes]]:
        """Headers of every answer: request id, replica, and the prefix keys for routers."""
        yield b"x-request-id", state["request_id"].encode()
        if self._replica:
            yield b"x-lpr-replica", self._replica.encode("ascii", "replace")
        if state.get("prefix_keys"):
            yield b"x-lpr-prefix", ",".join(state["prefix_keys"]).encode()

    def _check_host(self, host: str | None) -> None:
        """Raise ApiError for an unknown host name. (Clients without the header are not browsers.)"""
        if host is None or "*" in self._hosts:
            return
        name = host.lower().rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host.lower()
        name = name.strip("[]").rstrip(".")
        if name in self._hosts or name in (self._args.host.lower(), "localhost") or name.endswith(".localhost"):
            return
        try:
            ipaddress.ip_address(name)
        except ValueError:
            message = f"this service does not answer to the name {name[:100]!r}; --allowed-hosts allows names"
            raise ApiError(ErrorCode.HOST, message) from None

    def _check_key(self, scope: Scope, headers: Mapping[str, str]) -> str:
        """The name of the request's key. (CORS preflights, which have none, are answered earlier.)"""
        if not self._keys or (scope["path"] in self._open and not self._args.protect_all):
            return ""
        scheme, _, value = headers.get("authorization", "").partition(" ")
        key = value.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        name = self._keys.name_of(key)
        if name is None:
            code = ErrorCode.INVALID_KEY if key else ErrorCode.MISSING_KEY
            raise ApiError(code, "give a valid key as Authorization: Bearer KEY")
        return name

    async def with_body(self, scope: Scope, headers: Mapping[str, str], receive: Receive) -> Receive:
        """Read the whole body; returns a `receive` that replays it and then later messages. Raises ApiError."""
        limit, length = self._args.max_body, headers.get("content-length", "0")
        too_large = ApiError(ErrorCode.BODY_TOO_LARGE, f"the body is larger than --max-body {limit} bytes")
        if length.isdecimal() and int(length) > limit:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS) as patience:
                self._arriving[patience] = 0
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return receive
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > limit:
                        raise too_large
                    self._arrives(patience, len(message.get("body", b"")))
        except TimeoutError as failure:
            late = f"the body did not arrive within {BODY_SECONDS:g} s"
            if patience not in self._arriving:
                late = "the body arrived too slowly: there was no room for all bodies that were arriving"
            raise ApiError(ErrorCode.BODY_TIMEOUT, late) from failure
        finally:
            self._num_arriving -= self._arriving.pop(patience, 0)
        content = bytes(body)
        del body  # a waiting request holds the bytes only once
        try:
            await self._parse(scope, content, receive)
        except DisconnectedError:
            return receive
        if "json" in scope["state"]:
            content = b"{}"  # later code only checks that there is a body
        pending = [{"type": "http.request", "body": content, "more_body": False}]

        async def replayed() -> Message:
            return pending.pop() if pending else await receive()

        return replayed

    def _arrives(self, body: asyncio.Timeout, size: int) -> None:
        """Count `size` bytes of an incomplete body. If all incomplete bodies exceed the limit, the oldest times out."""
        if body in self._arriving:
            self._arriving[body] += size
            self._num_arriving += size
        if self._num_arriving > self._most_arriving:
            oldest = next(iter(self._arriving))
            self._num_arriving -= self._arriving.pop(oldest)
            oldest.reschedule(asyncio.get_running_loop().time())

    def _write(self, scope: Scope, state: dict[str, Any], status: int, seconds: float) -> None:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()) + "Z",
            "id": state["request_id"],
            "method": scope["method"],
            "path": scope["path"][: limits.LOGGED_PATH.most],
            "status": status or 499,
            "ms": round(1e3 * seconds, 1),
            "key": state.get("key_name", ""),
            "client": (scope.get("client") or [""])[0],
            **({"user": state["user"]} if state.get("user") else {}),
            **state.get("log", {}),
        }
        print(json.dumps(line), file=sys.stderr, flush=True)


def _without_body(receive: Receive) -> Receive:
    """A `receive` for requests without a body: an empty body, and later the real disconnect message.

    A streamed answer waits for the disconnect, and would end at once if it came early.
    """
    pending: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]

    async def nothing() -> Message:
        if pending:
            return pending.pop()
        while (message := await receive())["type"] == "http.request":
            pass
        return message

    return nothing


def _check_type(scope: Scope, headers: Mapping[str, str]) -> None:
    """Raise ApiError for a body that is not declared as JSON.

    Browsers send other types cross-site without a preflight, so any page could use a local service.
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if scope["method"] == "POST" and kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(ErrorCode.MEDIA_TYPE, "send the body as Content-Type: application/json")
