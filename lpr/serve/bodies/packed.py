"""Validated bodies as bytes: from the process that has checked them to the one that uses them, without a second check.

Only the classes of lpr.serve.bodies are made of such bytes, whatever has written them.
"""

from functools import cache
from typing import Any

import msgspec

from lpr.serve.bodies.fields import Body

_BODY = 1  # code of msgpack's extension type


def pack(value: Any) -> bytes:
    """Bodies, and JSON's values around them and in them; raises OverflowError for integers of more than 64 bits."""
    return msgspec.msgpack.encode(value, enc_hook=_packed)


def unpack(data: bytes) -> Any:
    return msgspec.msgpack.decode(data, ext_hook=_unpacked)


def _packed(body: Any) -> msgspec.msgpack.Ext:
    if not isinstance(body, Body):
        raise TypeError(f"a {type(body).__name__} is no body")
    state = [body.__dict__, list(body.model_fields_set), body.__pydantic_private__]
    return msgspec.msgpack.Ext(_BODY, pack([_name(type(body)), *state]))


def _unpacked(code: int, data: memoryview) -> Body:
    name, fields, given, private = msgspec.msgpack.decode(data, ext_hook=_unpacked)
    kind = _classes()[name]
    body = kind.__new__(kind)
    state = {"__dict__": fields, "__pydantic_fields_set__": set(given)}
    body.__setstate__({**state, "__pydantic_extra__": None, "__pydantic_private__": private})
    return body


def _name(kind: type[Body]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


@cache
def _classes() -> dict[str, type[Body]]:
    found: dict[str, type[Body]] = {}
    level: list[type[Body]] = [Body]
    while level:
        kind = level.pop()
        found[_name(kind)] = kind
        level += kind.__subclasses__()
    return found
