"""Incremental reading of a reply: thoughts, text, and tool calls, whose arguments are streamed.

The parsers in lpr.serve.text.forms are composed of steps of a reader and of lpr.serve.text.scanner.
"""

import re
from typing import Any

from lpr.serve.text.scanner import MalformedError, Parsing, Scanner
from lpr.serve.text.typed import Schema, dumps, fitted, from_value, kinds, loads, member

_KEY = re.compile(r"\w+")


class Reader(Scanner):
    """A scanner that reads the arguments of calls by their schema."""

    def arguments(self, schema: Schema) -> Parsing[None]:
        """Read a call's arguments: an object, or a string that contains one; raises MalformedError.

        Values are passed on unchanged if they are JSON that matches the schema. Strings are streamed.
        """
        yield from self.space()
        mark = yield from self.starts("{", '"', "'", "null", "None")
        if mark == "{":
            yield from self.members(schema)
        elif mark in ("null", "None"):
            self.argue("{}")
        else:
            self.back(mark)
            self.argue(object_text((yield from self.word()), schema))

    def members(self, schema: Schema, end: str = "}", colon: str = ":") -> Parsing[None]:
        """Take the members of an object up to its `end`; raises MalformedError."""
        self.begin_object()
        separator = ""
        while True:
            separator += yield from self.space()
            if (yield from self.starts(end)):
                break
            key = yield from self.key()
            gap = yield from self.space()
            gap += (yield from self.expect(colon)) + (yield from self.space())
            begin = separator + dumps(key) + gap.replace("=", ": ")
            yield from self._member(begin, member(schema, key, schema), schema)
            blank = yield from self.space()
            if (yield from self.expect(",", end)) == end:
                separator = blank
                break
            separator = blank + ","
        self.end_object(separator.replace(",", ""))

    def begin_object(self) -> None:
        self.argue("{")
        self._closing = "}"

    def end_object(self, blank: str = "") -> None:
        self.argue(blank + "}")
        self._closing = ""

    def begin_string(self, begin: str) -> None:
        """A string begins as a member of the arguments, after `begin`, and is shown from here on."""
        self.argue(begin + '"')
        self._closing = '"}'
        self.show()

    def end_string(self) -> None:
        self.argue('"')
        self._closing = "}"

    def key(self) -> Parsing[str]:
        """Take a name in an object, with quotes or without; raises MalformedError."""
        quote = yield from self.starts('"', "'")
        if quote:
            self.back(quote)
            return (yield from self.word())
        key = yield from self.run(_KEY)
        if not key:
            raise MalformedError
        return key

    def any_value(self) -> Parsing[str]:
        """Take a value, and return JSON of it if it is a string, and its text if it is none."""
        quote = yield from self.starts('"', "'")
        self.back(quote)
        if quote:
            return dumps((yield from self.word()))
        return (yield from self.value())

    def _member(self, begin: str, schema: Any, root: Schema) -> Parsing[None]:
        quote = yield from self.starts('"', "'")
        if quote and (not (found := kinds(schema, root)) or "string" in found):
            self.begin_string(begin)
            yield from self.string(quote, self.argue)
            self.end_string()
            return
        self.back(quote)
        text = yield from self.any_value()
        try:
            self.argue(begin + from_value(text, schema, root))
        except ValueError:
            raise MalformedError from None


def object_text(text: str, schema: Schema) -> str:
    """JSON of an object as its schema has it; raises MalformedError."""
    try:
        value = loads(text) if text.strip() else {}
        if isinstance(value, dict):
            return dumps(fitted(value, schema, schema))
    except (ValueError, RecursionError):
        pass
    raise MalformedError
