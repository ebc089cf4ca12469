"""Reads a reply while it is written: thoughts, text, and calls of tools, by a parser that waits where text ends.

A parser is a generator that yields where it needs more text, so it reads like one for a whole text, and what it finds
does not depend on where a stream was cut. lpr.serve.text.calls has the parsers of each family of models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Literal, TypeVar

T = TypeVar("T")
Parsing = Generator[None, None, T]
Sink = Callable[[str], None]

_SPACE = re.compile(r"\s*")
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"', re.DOTALL)
_INSIDE = re.compile(r'[^"\\]+')
_PLAIN = re.compile(r'[^"{}\[\],\s]+')


class MalformedError(ValueError):
    """Text that is no call."""


@dataclass(frozen=True)
class Piece:
    """A part of a reply: some of a thought or of the text, a call's beginning, or some of its arguments."""

    kind: Literal["thought", "text", "call", "arguments"]
    text: str
    """Of a call, the function's name. Arguments are JSON."""
    call: int = -1
    """The number of the call, from 0."""


class Reader:
    """What has come of one reply and is not parsed yet, and the steps of which parsers are made."""

    def __init__(self, parse: Callable[[Reader], Parsing[None]], most_calls: int | None = None) -> None:
        """Read by `parse`. Calls beyond `most_calls` are left out."""
        self.num_calls = 0
        self._most_calls = most_calls
        self._text, self._at, self._ended = "", 0, False
        self._mark: int | None = None
        """Where a possible call begins, while it may still turn out to be text."""
        self._pieces: list[Piece] = []
        self._parsing = parse(self)

    def feed(self, text: str, last: bool = False) -> list[Piece]:
        """The pieces that are certain with `text`; `last` is true with the end of the reply."""
        keep = self._at if self._mark is None else self._mark
        self._text, self._at = self._text[keep:] + text, self._at - keep
        self._mark = None if self._mark is None else 0
        self._ended = last
        next(self._parsing, None)
        found, self._pieces = self._pieces, []
        return found

    # What parsers say.

    def think(self, text: str) -> None:
        """Some of a thought."""
        self._say(Piece("thought", text))

    def say(self, text: str) -> None:
        """Some of the text."""
        self._say(Piece("text", text))

    def open(self, name: str) -> None:
        """A call begins."""
        self._mark = None
        self.num_calls += 1
        self._say(Piece("call", name, self.num_calls - 1))

    def argue(self, text: str) -> None:
        """Some of the JSON of the last call's arguments."""
        self._say(Piece("arguments", text, self.num_calls - 1))

    def _say(self, piece: Piece) -> None:
        if (not piece.text and piece.kind != "call") or (
            self._most_calls is not None and piece.call >= self._most_calls
        ):
            return
        last = self._pieces[-1] if self._pieces else None
        if last is not None and (last.kind, last.call) == (piece.kind, piece.call):
            self._pieces[-1] = Piece(piece.kind, last.text + piece.text, piece.call)
        else:
            self._pieces.append(piece)

    # Steps.

    def until(self, sink: Sink, *marks: str) -> Parsing[str]:
        """Pass on to `sink` what comes before the first of `marks`; returns that, or "" at the end of the reply."""
        while True:
            places = [(at, -len(mark), mark) for mark in marks if (at := self._text.find(mark, self._at)) >= 0]
            if places:
                at, _, mark = min(places)
                sink(self._text[self._at : at])
                self._at = at + len(mark)
                return mark
            end = len(self._text) - (0 if self._ended else self._held(marks))
            sink(self._text[self._at : end])
            self._at = end
            if self._ended:
                return ""
            yield

    def starts(self, *marks: str) -> Parsing[str]:
        """Take the one of `marks` with which the rest begins; "" if there is none."""
        while True:
            for mark in sorted(marks, key=len, reverse=True):
                if self._text.startswith(mark, self._at):
                    self._at += len(mark)
                    return mark
            left = self._text[self._at :]
            if self._ended or not any(mark.startswith(left) for mark in marks):
                return ""
            yield

    def expect(self, *marks: str) -> Parsing[str]:
        """Take one of `marks`; raises MalformedError if there is none."""
        mark = yield from self.starts(*marks)
        if not mark:
            raise MalformedError
        return mark

    def space(self) -> Parsing[str]:
        """Skip white space; returns it."""
        skipped = ""
        while True:
            found = _SPACE.match(self._text, self._at)
            assert found is not None
            skipped, self._at = skipped + found[0], found.end()
            if self._at < len(self._text) or self._ended:
                return skipped
            yield

    def string(self) -> Parsing[str]:
        """Take a string of JSON; raises MalformedError."""
        yield from self.space()
        while True:
            found = _STRING.match(self._text, self._at)
            if found is not None:
                self._at = found.end()
                try:
                    return str(json.loads(found[0]))
                except ValueError:
                    raise MalformedError from None
            if self._ended or not self._text.startswith('"', self._at):
                raise MalformedError
            yield

    def value(self, sink: Sink) -> Parsing[None]:
        """Pass on a value of JSON as it is written; raises MalformedError if it does not begin."""
        yield from self.space()
        depth, quoted, began = 0, False, False
        while True:
            start, done = self._at, False
            while self._at < len(self._text) and not done:
                character = self._text[self._at]
                run = (_INSIDE if quoted else _PLAIN).match(self._text, self._at)
                if run is not None:
                    self._at = run.end()
                elif character == "\\":
                    if self._at + 1 == len(self._text):
                        break
                    self._at += 2
                elif character == '"':
                    quoted = not quoted
                    self._at += 1
                    done = not quoted and not depth
                elif not quoted and character in "{[":
                    depth += 1
                    self._at += 1
                elif depth:
                    depth -= character in "}]"
                    self._at += 1
                    done = not depth
                elif not began:
                    raise MalformedError
                else:
                    done = True  # behind a value without brackets
                began = True
            sink(self._text[start : self._at])
            if done or self._ended:
                return
            yield

    def call(self, parse: Callable[[], Parsing[None]], begin: str = "") -> Parsing[bool]:
        """Read a call by `parse`; what is none, with the `begin` before it, is text. Returns whether one began."""
        self._mark, before = self._at, self.num_calls
        try:
            yield from parse()
        except MalformedError:
            if self.num_calls == before:
                self.say(begin + self._text[self._mark or 0 : self._at])
        self._mark = None
        return self.num_calls > before

    def call_object(self, names: frozenset[str] | None = None) -> Parsing[None]:
        """Take {"name": ..., "arguments": {...}}, or "parameters"; raises MalformedError.

        With `names`, the object is a call only if it has one of them, and arguments.
        """
        name, early, is_open = "", list[str](), False
        yield from self.expect("{")
        while True:
            key = yield from self.string()
            yield from self.space()
            yield from self.expect(":")
            yield from self.space()
            if key == "name" and not is_open:
                name = yield from self.string()
                if names is not None and name not in names:
                    raise MalformedError
            elif key not in ("arguments", "parameters"):
                yield from self.value(lambda text: None)
            elif name:
                is_open = True
                self.open(name)
                yield from self.arguments()
            else:
                yield from self.value(early.append)
            yield from self.space()
            if (yield from self.expect(",", "}")) == "}":
                break
        if not name or (names is not None and not (is_open or early)):
            raise MalformedError
        if not is_open:
            self.open(name)
            self.argue("".join(early) or "{}")

    def arguments(self) -> Parsing[None]:
        """Take a call's arguments: an object, or a string that holds one."""
        yield from self.space()
        if self._text.startswith('"', self._at):
            self.argue((yield from self.string()))
        else:
            yield from self.value(self.argue)

    def _held(self, marks: tuple[str, ...]) -> int:
        """Length of the longest end of the text that may become one of `marks`."""
        left = self._text[self._at :]
        longest = min(len(left), max(map(len, marks), default=1) - 1)
        starts = (size for size in range(longest, 0, -1) for mark in marks if mark.startswith(left[len(left) - size :]))
        return next(starts, 0)
