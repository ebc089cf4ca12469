"""`response_format` as a grammar that constrains the ranks. It is checked here, so that a bad one is a 400."""

from __future__ import annotations

import json

from lpr.protocol import ErrorCode
from lpr.serve.bodies import ResponseFormat
from lpr.serve.errors import bad

_FIELDS = {"json_schema": "json_schema.schema", "regex": "regex", "grammar": "grammar"}


def grammar_of(wanted: ResponseFormat | None) -> str:
    """The grammar in llguidance's JSON form, or "" for plain text.

    Raises ApiError for one that cannot be read, and if llguidance is not installed.
    """
    if wanted is None or wanted.type == "text":
        return ""
    try:
        import llguidance
    except ImportError as failure:
        message = "response_format needs the package llguidance: pip install 'lpr[grammar]'"
        raise bad("response_format", message, ErrorCode.NOT_INSTALLED) from failure
    matcher = llguidance.LLMatcher
    param = "response_format." + _FIELDS.get(wanted.type, "type")
    try:
        if wanted.type == "json_object":
            grammar = matcher.grammar_from_json_schema({"type": "object"})
        elif wanted.type == "json_schema":
            schema = wanted.json_schema.schema_ if wanted.json_schema is not None else None
            grammar = matcher.grammar_from_json_schema(schema if schema is not None else {"type": "object"})
        elif wanted.type == "regex":
            grammar = matcher.grammar_from_regex(wanted.regex or "")
        else:
            grammar = json.dumps({"grammars": [{"lark_grammar": lark_of(wanted.grammar or "")}]})
    except ValueError as failure:
        raise bad(param, f"{param}: {_line(failure)}") from failure
    if problem := matcher.validate_grammar(grammar):
        raise bad(param, f"{param}: {_line(problem)}")
    return str(grammar)


def lark_of(text: str) -> str:
    """A grammar as Lark: llguidance's own form, or llama.cpp's GBNF, which writes `::=`."""
    if "::=" not in text:
        return text
    import llguidance

    return str(llguidance.gbnf_to_lark.gbnf_to_lark(text))


def _line(problem: object) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return (lines[0] if lines else "it cannot be read")[:300]
