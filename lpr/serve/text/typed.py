"""Converts call arguments to the types of their JSON schema.

A value that matches the schema is unchanged. Otherwise it is converted if some reading matches: the text "3" for an
integer, `True` for a boolean, a number for a string. If there is none, it is unchanged.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]
Tools = Mapping[str, Schema]  # the JSON schema of each function's arguments, by its name

_MOST_BRANCHES = 64  # alternatives of a schema that are looked at
_KIND = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_HALF = re.compile(r"[\ud800-\udfff]")
_LITERALS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_TOKEN = re.compile(
    r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[A-Za-z_]\w*|-?\d[\d.eE+\-]*|[\[\]{}:,]|\s+""", re.DOTALL
)  # fmt: skip
_QUOTED = re.compile(r"""\\.|"|[\x00-\x1f]""", re.DOTALL)
_ESCAPES = frozenset('"\\/bfnrtu')


def dumps(value: Any) -> str:
    """JSON of a value, with lone surrogates replaced by U+FFFD; raises ValueError if it is nested too deeply."""
    try:
        return _HALF.sub("\ufffd", json.dumps(value, ensure_ascii=False))
    except RecursionError:
        raise ValueError("too deep") from None


def loads(text: str) -> Any:
    """A value of JSON, or of Python's literals; raises ValueError."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        pass
    try:
        return json.loads(_as_json(text), parse_constant=_refuse)
    except RecursionError:
        raise ValueError("too deep") from None


def branches(schema: Any, root: Schema) -> Iterator[Schema]:
    """The alternatives of a schema; references are looked up in `root`."""
    waiting, num_seen = [schema], 0
    while waiting and num_seen < _MOST_BRANCHES:
        each = waiting.pop()
        num_seen += 1
        if not isinstance(each, Mapping):
            continue
        deeper = [_target(each["$ref"], root)] if isinstance(each.get("$ref"), str) else []
        for word in ("anyOf", "oneOf", "allOf"):
            deeper += each[word] if isinstance(each.get(word), list) else []
        waiting += reversed(deeper)
        if each.get("nullable") is True:
            yield {"type": "null"}
        if not deeper or each.keys() & {"type", "properties", "items", "enum", "const"}:
            yield each


def kinds(schema: Any, root: Schema) -> frozenset[str]:
    """The types that a schema admits; empty if it admits all."""
    found: set[str] = set()
    for each in branches(schema, root):
        words = each.get("type")
        values = each.get("enum") if isinstance(each.get("enum"), list) else [each["const"]] if "const" in each else []
        if isinstance(words, str | list):
            found.update([words] if isinstance(words, str) else map(str, words))
        elif values:
            found.update(map(kind_of, values))
        elif "properties" in each or "items" in each:
            found.add("object" if "properties" in each else "array")
        else:
            return frozenset()
    return frozenset(found)


def kind_of(value: Any) -> str:
    """The type of a value, in the words of JSON schemas."""
    return _KIND.get(type(value), "null")


def admits(found: frozenset[str], kind: str) -> bool:
    """True if a value of type `kind` is one of the types that were found."""
    return not found or kind in found or (kind == "integer" and "number" in found)


def member(schema: Any, key: str, root: Schema) -> Any:
    """The schema of a property; {} if it is not known."""
    other: Any = {}
    for each in branches(schema, root):
        properties = each.get("properties")
        if isinstance(properties, Mapping) and key in properties:
            return properties[key]
        other = other or each.get("additionalProperties")
    return other if isinstance(other, Mapping) else {}


def from_text(text: str, schema: Any, root: Schema) -> str:
    """JSON of an argument that is written as its text: a string where the schema admits no other reading."""
    found = kinds(schema, root)
    if found and found != {"string"}:
        try:
            value = loads(text.strip())
        except ValueError:
            pass
        else:
            kind = kind_of(value)
            if kind != "string" and admits(found, kind):
                return _written(text.strip(), value, fitted(value, schema, root))
            if "string" not in found:
                return dumps(fitted(value, schema, root))
    return dumps(text)


def from_value(text: str, schema: Any, root: Schema) -> str:
    """JSON of an argument that is written as a value; raises ValueError if it is none."""
    value = loads(text)
    if kinds(schema, root) == {"string"} and kind_of(value) in ("integer", "number"):
        return dumps(text.strip())
    return _written(text, value, fitted(value, schema, root))


def fitted(value: Any, schema: Any, root: Schema, depth: int = 0) -> Any:
    """A value converted to match its schema, if possible."""
    found, kind = kinds(schema, root), kind_of(value)
    if kind == "string" and not admits(found, kind):
        try:
            read = loads(value.strip())
        except ValueError:
            return value
        return fitted(read, schema, root, depth + 1) if admits(found, kind_of(read)) and depth < 100 else value
    if kind in ("integer", "number", "boolean") and found == {"string"}:
        return json.dumps(value)
    if kind == "number" and not admits(found, kind) and value.is_integer() and "integer" in found:
        return int(value)
    if depth < 100 and kind == "object":
        return {key: fitted(each, member(schema, key, root), root, depth + 1) for key, each in value.items()}
    if depth < 100 and kind == "array":
        items: Any = next((each["items"] for each in branches(schema, root) if "items" in each), {})
        return [fitted(each, items, root, depth + 1) for each in value]
    return value


def _written(text: str, value: Any, fit: Any) -> str:
    """JSON of a value; its original text if that is equivalent JSON, so that numbers keep their digits."""
    try:
        if "\\u" not in text and fit == value and json.loads(text, parse_constant=_refuse) == value:
            return text
    except (ValueError, RecursionError):
        pass
    return dumps(fit)


def _as_json(text: str) -> str:
    """The text of a Python literal as JSON; raises ValueError."""
    parts: list[str] = []
    at, comma = 0, -1
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise ValueError("no value")
        word, at = found[0], found.end()
        if word[0] in "\"'":
            parts.append(_string(word))
        elif word[0].isalpha() or word[0] == "_":
            parts.append(_LITERALS.get(word.lower(), word))
        else:
            if word in "]}" and comma >= 0:  # Python allows one before it
                parts[comma] = ""
            parts.append(word)
        if not word.isspace():
            comma = len(parts) - 1 if word == "," else -1
    return "".join(parts)


def _string(word: str) -> str:

    def escaped(found: re.Match[str]) -> str:
        text = found[0]
        if text == '"':
            return '\\"'
        if len(text) == 1:
            return json.dumps(text)[1:-1]
        return text if text[1] in _ESCAPES else text[1] if text[1] == "'" else "\\" + text

    return f'"{_QUOTED.sub(escaped, word[1:-1])}"'


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _target(reference: str, root: Schema) -> Any:
    """The target of a reference within a schema; None if it is missing."""
    found: Any = root if reference.startswith("#") else None
    for name in reference.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
