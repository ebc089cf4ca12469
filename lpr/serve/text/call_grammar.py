"""Grammars, in llguidance's Lark form, of replies with calls of declared tools."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from lpr.core.grammar import WHITE_SPACE
from lpr.serve.text.calls import MARK
from lpr.serve.text.forms import BARE, QWEN, Format, Tags, Thoughts
from lpr.serve.text.typed import Tools, branches, kinds

_ANNOTATIONS = ("title", "description", "examples", "default", "$comment")


class CallGrammar:
    def __init__(self, added: Mapping[str, int]) -> None:
        """`added` are the tokenizer's added tokens, which a grammar names by their ids."""
        self._added = added
        self._rules: list[str] = []

    def calls(self, format: Format, tools: Tools, several: bool) -> str:
        """An expression for calls of `tools`, more than one if `several`."""
        one = " | ".join(self._call(format, name, schema) for name, schema in tools.items())
        self._rules.append(f"call: {one}")
        more = f"({self._text(format.between)} call)*" if several and not format.is_single else ""
        before, after = map(self._text, format.around)
        return f"{before} call {more} {after}"

    def thought(self, thoughts: Thoughts, begun: bool) -> str:
        """An expression for a thought; optional unless the prompt has `begun` one."""
        self._rules.append(f"thought: {self._up_to(thoughts[1])} /\\n{{0,2}}/")
        return "thought" if begun else f"({self._text(thoughts[0])} thought)?"

    def json(self, schema: Any) -> str:
        """An expression for JSON of a schema."""
        bare = _bare(schema)
        held = {"x-guidance": {"whitespace_pattern": WHITE_SPACE}, **bare} if isinstance(bare, dict) else bare
        return self._rule("%json " + json.dumps(held, ensure_ascii=False))

    def text(self, format: Format, written: str = "") -> str:
        """An expression for a text, such as `written`, after the format's prefix of texts."""
        return f"{self._text(format.text)} {written}" if format.text else written

    def free(self, format: Format) -> str:
        """An expression for text in which no call begins, in any form that the parser reads as one."""
        tags = {QWEN.head, (format.tags or QWEN).head} - {""}
        plain = [re.escape(mark) for mark in (*format.opens, *tags) if mark not in self._added and mark not in BARE]
        if "{" in format.opens:
            plain += [r"\{\s*[\"']?(?:type|id|index|function|[a-z_]*name|[a-z]+_id)[\"']?\s*:", r"\[\s*[\w.\-]+\s*\("]
        without = "".join(f" & ~/(?s:.*){each}(?s:.*)/" for each in plain)
        any_text = "(?s:[^{\\[].*)?" if "{" in format.opens else "(?s:.*)"
        self._rules.append(f"TEXT: /{any_text}/{without}")
        return "TEXT"

    def written(self, start: str) -> str:
        """The complete grammar with the start expression `start`."""
        return "\n".join([f"start: {start}", *self._rules]) + "\n"

    def _call(self, format: Format, name: str, schema: Mapping[str, Any]) -> str:
        before, after = (self._text(part.format(name=name)) for part in format.call)
        if format.tags is None:
            return f"{before} {self.json(schema or {'type': 'object'})} {after}"
        return f"{before} {' '.join(self._pairs(format.tags, schema))} {after}"

    def _pairs(self, tags: Tags, schema: Mapping[str, Any]) -> Iterator[str]:
        """The arguments in the order of the schema; optional ones may be missing."""
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        names, properties = schema.get("required"), schema.get("properties")
        required = {each for each in names if isinstance(each, str)} if isinstance(names, list) else set()
        for key, each in (properties if isinstance(properties, Mapping) else {}).items():
            written = self._pair(tags, key, each, shared, schema)
            yield written if key in required else f"({written})?"

    def _pair(self, tags: Tags, key: str, schema: Any, shared: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        found = kinds(schema, root)
        is_text = not found or "string" in found
        before, after = (part.format(key=key, text=str(is_text).lower()) for part in tags.pair)
        end = after.rstrip("\n")
        all_values = [each.get("enum") for each in branches(schema, root)]
        if not is_text:
            value = f"{self.json({**schema, **shared})} {self._text(end)}"
        elif all_values and all(isinstance(values, list) and values for values in all_values):
            texts = [str(value) for values in all_values for value in values or ()]
            value = f"({' | '.join(map(self._text, texts))}) {self._text(end)}"
        else:
            value = self._up_to(end)
        return f"{self._text(before)} {value} {self._text(after[len(end) :])}"

    def _up_to(self, end: str) -> str:
        """An expression for any text up to and including the first `end`."""
        first = MARK.match(end)
        if first is not None and first[0] in self._added:  # an added token is not part of text
            return f"{self._rule('/(?s:.*)/')} {self._text(end)}"
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}[suffix={json.dumps(end)}]: /(?s:.*)/")
        return name

    def _text(self, text: str) -> str:
        """An expression for exactly this text, with added tokens by their ids."""
        parts, at = [], 0
        for found in MARK.finditer(text):
            if found[0] in self._added:
                parts += [json.dumps(text[at : found.start()], ensure_ascii=False)] if found.start() > at else []
                parts.append(f"<[{self._added[found[0]]}]>")
                at = found.end()
        parts += [json.dumps(text[at:], ensure_ascii=False)] if at < len(text) else []
        return " ".join(parts) or '""'

    def _rule(self, expression: str) -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}: {expression}")
        return name


def _bare(schema: Any, is_names: bool = False) -> Any:
    """A schema without descriptions and other annotations; `is_names` if the keys are property names."""
    if isinstance(schema, list):
        return [_bare(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    names = ("properties", "patternProperties", "$defs", "definitions")
    return {
        key: value if key in ("enum", "const") else _bare(value, key in names and not is_names)
        for key, value in schema.items()
        if is_names or key not in _ANNOTATIONS
    }
