"""llguidance matchers with the same limits in every process, so that all processes accept the same grammars.

Ranks must agree, so the limits count work instead of time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Set
from typing import Any

WHITE_SPACE = r"\n? {0,12}"
"""White space within JSON: compact, as json.dumps writes it, or indented. Without a bound a model can stay in it."""
PASSES = 8  # times that the references of a schema are followed
_JSON = re.compile(r"%json\s+(?=[{\[])")
ROW_ITEMS, STEP_ITEMS = 500, 10_000
"""Most parser items per byte and per mask, for Lark grammars, which may be ambiguous: their time grows with the square.

`r: r r | /[a-z]+/` takes 0.6 s a mask with llguidance's default limits (2,000 and 50,000), and 14 ms with these.
Grammars of JSON schemas are not ambiguous and keep llguidance's limits: they may have wide choices, which cost little.
"""


def matcher(tokenizer: Any, grammar: str) -> Any:
    """A matcher of `grammar`, in llguidance's JSON form, with llguidance's `tokenizer`; `get_error` has its errors.

    White space in JSON is bounded, unless a schema's own "x-guidance" has a pattern for it.
    """
    import llguidance

    grammar = _bounded_grammar(grammar)
    limits = None
    if '"lark_grammar"' in grammar:
        limits = llguidance.LLParserLimits(max_items_in_row=ROW_ITEMS, step_max_items=STEP_ITEMS)
    return llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)


def _bounded_grammar(grammar: str) -> str:
    """The grammar with bounded JSON schemas; unchanged if it cannot be parsed, so that llguidance reports the error."""
    try:
        value = json.loads(grammar)
        for each in value["grammars"]:
            if "json_schema" in each:
                each["json_schema"] = _bounded(each["json_schema"])
            if "lark_grammar" in each:
                each["lark_grammar"] = _with_bounds(each["lark_grammar"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return grammar
    return json.dumps(value)


def _bounded(schema: Any) -> Any:
    """A JSON schema with bounded white space, and without references to schemas that no finite text satisfies.

    llguidance detects most unsatisfiable schemas, but not those that require themselves: a model would open nested
    objects up to its token limit.
    """
    if not isinstance(schema, dict):
        return {"x-guidance": {"whitespace_pattern": WHITE_SPACE}} if schema is True else schema
    names: dict[str, Any] = {"#": schema}
    for table in ("$defs", "definitions"):
        each = schema.get(table)
        names |= {f"#/{table}/{name}": value for name, value in each.items()} if isinstance(each, dict) else {}
    waiting, ends = list(names), set[str]()
    for _ in range(PASSES):  # in both directions, as references go either way
        for name in reversed(waiting):
            if _ends(names[name], names, ends):
                ends.add(name)
        waiting = [name for name in reversed(waiting) if name not in ends]
    if any(_ends(names[name], names, ends) for name in waiting):
        waiting = []  # too many levels of references: left to llguidance
    found = _without(schema, frozenset(waiting)) if waiting else schema
    if not isinstance(found, dict):
        return found
    return {**found, "x-guidance": {"whitespace_pattern": WHITE_SPACE, **_options(found)}}


def _options(schema: dict[str, Any]) -> dict[str, Any]:
    found = schema.get("x-guidance")
    return found if isinstance(found, dict) else {}


def _ends(schema: Any, names: dict[str, Any], ends: set[str]) -> bool:
    """True if a finite text may satisfy a schema, given that one may satisfy each schema named in `ends`."""
    if not isinstance(schema, dict):
        return True
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference in names and reference not in ends:
        return False
    for word, combine in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        if isinstance(each := schema.get(word), list) and each and not combine(_ends(x, names, ends) for x in each):
            return False
    needed: list[Any] = []
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(properties, dict) and isinstance(required, list) and schema.get("type", "object") == "object":
        needed += [properties[name] for name in required if isinstance(name, str) and name in properties]
    if schema.get("type") == "array" and schema.get("minItems"):
        needed += [schema.get("items")]
    return all(_ends(each, names, ends) for each in needed)


def _without(schema: Any, endless: Set[str]) -> Any:
    """The schema with references to the names in `endless` replaced by `false`, which no value satisfies."""
    if isinstance(schema, list):
        return [_without(each, endless) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if isinstance(reference := schema.get("$ref"), str) and reference in endless:
        return False
    return {
        key: value if key in ("enum", "const", "default", "examples") else _without(value, endless)
        for key, value in schema.items()
    }


def _with_bounds(lark: str) -> str:
    """A Lark grammar with bounded JSON schemas."""
    parts, at = [], 0
    while (found := _JSON.search(lark, at)) is not None:
        try:
            schema, end = json.JSONDecoder().raw_decode(lark, found.end())
        except ValueError:
            parts.append(lark[at : found.end()])
            at = found.end()
            continue
        parts += [lark[at : found.end()], json.dumps(_bounded(schema), ensure_ascii=False)]
        at = end
    return "".join([*parts, lark[at:]])
