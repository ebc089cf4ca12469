"""Steps of incremental parsers of a reply, and the parts of the reply that are certain so far.

A parser is a generator that yields when it needs more text, so it is written like one for a whole text, and its result
does not depend on where a stream was cut. Time is linear: a scanner continues where it stopped, and after a failed
attempt at most REREAD characters are read again.
"""

import json
import re
from collections.abc import Callable, Generator
from functools import lru_cache
from itertools import groupby
from typing import Any, Literal, NamedTuple, TypeVar

T = TypeVar("T")
Parsing = Generator[None, None, T]
Sink = Callable[[str], None]

REREAD = 512
"""Most characters of a failed attempt that are read again, because a call may begin within them; more are text."""
_SPACE = re.compile(r"[ \t\r\n]*")
_RUN = {'"': re.compile(r'[^"\\\x00-\x1f]+'), "'": re.compile(r"[^'\"\\\x00-\x1f]+")}
_ESCAPE = re.compile(
    r"""\\(?:["\\/bfnrt]|u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}|u(?![dD][89a-fA-F])[\da-fA-F]{4})"""
)
_LONGEST_ESCAPE = 12
_QUOTED = {'"': re.compile(r'[^"\\]+'), "'": re.compile(r"[^'\\]+")}
_PLAIN = re.compile(r"[\w\s.+\-:,]+")
_SCALAR = re.compile(r"[\w.+\-]+")


class MalformedError(ValueError):
    """The text is not a call."""


class Piece(NamedTuple):
    """A part of a reply: of a thought, of the text, a call's start, or a part of its arguments."""

    kind: Literal["thought", "text", "call", "arguments"]
    text: str  # the function's name for a call, JSON for arguments
    call: int = -1  # the number of the call, from 0


class Marks:
    """Marks that are searched for simultaneously."""

    def __init__(self, *marks: str, breaks: int = 0) -> None:
        """Up to `breaks` line breaks before a mark belong to it."""
        self.marks = sorted(marks, key=len, reverse=True)
        self.pattern = re.compile(f"\n{{0,{breaks}}}(?:{'|'.join(map(re.escape, self.marks))})")
        ways = ["\n" * count + mark for mark in marks for count in range(breaks + 1)]
        self.starts = frozenset(way[:size] for way in ways for size in range(1, len(way)))
        self._first = re.compile("[" + re.escape("".join({way[0] for way in ways})) + "]")
        self._longest = max(map(len, ways))

    def end(self, text: str, at: int) -> int:
        """The first index from `at` on at which the end of `text` may begin a mark; its length if none."""
        for found in self._first.finditer(text, max(at, len(text) - self._longest + 1)):
            if text[found.start() :] in self.starts:
                return found.start()
        return len(text)


marks = lru_cache(1024)(Marks)


class _Try:
    """An attempt: its start, and its findings so far."""

    def __init__(self, begin: int, num_calls: int, can_show: bool) -> None:
        self.begin, self.num_calls, self.can_show = begin, num_calls, can_show
        self.closing = ""
        self.pieces: list[Piece] = []


class Scanner:
    """The unparsed text of one reply, and the steps of which parsers are made."""

    def __init__(self, parse: Callable[[Any], Parsing[None]], most_calls: int | None = None) -> None:
        """Read by `parse`. Calls beyond `most_calls` are left out."""
        self.num_calls = 0
        self._most_calls = most_calls
        self._text, self._at, self._ended = "", 0, False
        self._past: list[str] = []  # what was taken before `_text` since the first of `_tries` began
        self._base = 0  # characters of the reply before `_text`
        self._pieces: list[Piece] = []
        self._tries: list[_Try] = []
        self._is_showing = False  # True within a call of which some was shown
        self._closing, self._argued = "", 0
        """Text that closes the partly shown arguments, and the position in the reply after the shown part."""
        self._parsing = self._parse(parse)

    def _parse(self, parse: Callable[[Any], Parsing[None]]) -> Parsing[None]:
        yield from parse(self)
        while not self._ended or self._at < len(self._text):  # nothing is lost
            self.say(self._text[self._at :])
            self._at = len(self._text)
            yield

    def feed(self, text: str, last: bool = False, cut: bool = False) -> list[Piece]:
        """The pieces that are certain with `text`; `last` is true with the end of the reply.

        If the reply ends within a partly shown call, its arguments are closed, so that they are valid JSON. If the
        reply was `cut` by its token limit they stay open, so that clients see that they are incomplete.
        """
        needed = min([self._base + self._at, *(each.begin for each in self._tries)])
        if self._is_showing:
            needed = min(needed, self._argued)
        if needed >= self._base:
            self._past.clear()
        if needed < self._base + self._at:
            self._past.append(self._text[: self._at])
        self._text, self._base, self._at = self._text[self._at :] + text, self._base + self._at, 0
        self._ended = last
        next(self._parsing, None)
        if last and not cut:
            self._close()
        found, self._pieces = self._pieces, []
        return _joined(found)

    # Called by parsers.

    def think(self, text: str) -> None:
        self._say(Piece("thought", text))

    def say(self, text: str) -> None:
        self._say(Piece("text", text))

    def open(self, name: str) -> None:
        self.num_calls += 1
        self._say(Piece("call", name, self.num_calls - 1))

    def argue(self, text: str) -> None:
        self._argued = self._base + self._at
        self._say(Piece("arguments", text, self.num_calls - 1))

    def _say(self, piece: Piece) -> None:
        if (piece.text or piece.kind == "call") and (self._most_calls is None or piece.call < self._most_calls):
            (self._tries[-1].pieces if self._tries else self._pieces).append(piece)

    # Attempts.

    def attempt(self, parse: Callable[[], Parsing[None]], sink: Sink, begin: str = "") -> Parsing[bool]:
        """Read by `parse`, after `begin` was taken; returns whether that succeeded.

        If it fails, `begin` goes to `sink`, and the following text is read again, or goes to `sink` too if it is long.
        A partly shown call remains a call: the rest is text.
        """
        tried = self.trial(can_show=True)
        try:
            yield from parse()
        except MalformedError:
            if tried not in self._tries:  # some of it was shown
                rest, self._is_showing = self._taken(self._argued), False
                if not self.is_over:
                    self._close()
                self.say(rest)
                return True
            taken = self.reject(tried)
            sink(begin)
            if len(taken) > REREAD:
                sink(taken)
            else:
                self._rewind(tried.begin)
            return False
        if tried in self._tries:
            self.confirm(tried)
        else:
            self._is_showing = False
        return True

    def trial(self, can_show: bool = False) -> _Try:
        """Hold back what comes from here on, until `confirm` or `reject`."""
        tried = _Try(self._base + self._at, self.num_calls, can_show)
        tried.closing = self._closing
        self._tries.append(tried)
        return tried

    def confirm(self, tried: _Try) -> None:
        """Keep what was found since `tried` began."""
        self._tries.remove(tried)
        (self._tries[-1].pieces if self._tries else self._pieces).extend(tried.pieces)

    def reject(self, tried: _Try) -> str:
        """Drop what was found since `tried` began; returns the text that was taken."""
        self._tries.remove(tried)
        self.num_calls, self._closing = tried.num_calls, tried.closing
        return self._taken(tried.begin)

    def _taken(self, begin: int) -> str:
        """The text from a place of the reply on that was taken."""
        if begin >= self._base:
            return self._text[begin - self._base : self._at]
        past: list[str] = []
        base = self._base
        for part in reversed(self._past):
            past.append(part)
            base -= len(part)
            if base <= begin:
                break
        return "".join(reversed(past))[begin - base :] + self._text[: self._at]

    def _rewind(self, place: int) -> None:
        parts: list[str] = []
        while self._base > place:
            parts.append(self._past.pop())
            self._base -= len(parts[-1])
        if parts:
            taken, size = "".join(reversed(parts)), place - self._base
            self._past.append(taken[:size])
            self._text, self._base = taken[size:] + self._text, place
        self._at = place - self._base

    def show(self) -> None:
        """Show the findings of the last attempt while it continues; from here on it is a call."""
        if self._tries and self._tries[-1].can_show:
            self.confirm(self._tries[-1])
            self._is_showing = True

    def _close(self) -> None:
        self.argue(self._closing)
        self._closing = ""

    @property
    def is_over(self) -> bool:
        return self._ended and self._at == len(self._text)

    # Steps.

    def more(self) -> Parsing[None]:
        """Wait for more text; raises MalformedError at the end of the reply."""
        if self._ended:
            raise MalformedError
        yield

    def within(self, wanted: Marks) -> Parsing[tuple[str, str]]:
        """Take the text before a mark, and the mark ("" at the end); raises MalformedError beyond REREAD characters."""
        while True:
            found = wanted.pattern.search(self._text, self._at, self._at + REREAD)
            if found is None and len(self._text) - self._at < REREAD and not self._ended:
                yield
                continue
            start, end = found.span() if found else (len(self._text), len(self._text))
            if start - self._at >= REREAD:
                raise MalformedError
            before, self._at = self._text[self._at : start], end
            return before, found[0] if found else ""

    def until(self, sink: Sink, wanted: Marks) -> Parsing[str]:
        """Pass the text before the first of some marks to `sink`; returns the mark, "" at the end of the reply."""
        while True:
            found = wanted.pattern.search(self._text, self._at)
            end = found.start() if found else len(self._text) if self._ended else wanted.end(self._text, self._at)
            before, self._at = self._text[self._at : end], end
            if before:
                sink(before)
            self._at = found.end() if found else end
            if found or self._ended:
                return found[0] if found else ""
            yield

    def starts(self, *wanted: str) -> Parsing[str]:
        """Take the mark with which the remaining text begins; "" if there is none."""
        known = marks(*wanted)
        while True:
            found = known.pattern.match(self._text, self._at)
            left = self._text[self._at : self._at + 80]
            if not self._ended and (not left or left in known.starts):
                yield
                continue
            self._at = found.end() if found else self._at
            return found[0] if found else ""

    def expect(self, *wanted: str) -> Parsing[str]:
        """Take one of some marks; raises MalformedError if there is none."""
        mark = yield from self.starts(*wanted)
        if not mark:
            raise MalformedError
        return mark

    def space(self) -> Parsing[str]:
        """Skip white space of JSON; returns it."""
        return (yield from self.run(_SPACE))

    def run(self, pattern: re.Pattern[str]) -> Parsing[str]:
        """Take as many characters as match a pattern of repeated ones; returns them."""
        parts: list[str] = []
        while True:
            found = pattern.match(self._text, self._at)
            if found is not None:
                parts.append(found[0])
                self._at = found.end()
            if self._at < len(self._text) or self._ended:
                return "".join(parts)
            yield

    def string(self, quote: str, sink: Sink) -> Parsing[None]:
        """Pass the rest of a string, up to its end, to `sink` as JSON string contents; also not quite valid JSON."""
        while True:
            found = _RUN[quote].match(self._text, self._at)
            if found is not None:
                self._at = found.end()
                sink(found[0])
            left = self._text[self._at : self._at + _LONGEST_ESCAPE]
            if not left:
                yield from self.more()
                continue
            size, written = 1, json.dumps(left[0])[1:-1]
            if left[0] == quote:
                self._at += 1
                return
            if left[0] == "\\":
                if escape := _ESCAPE.match(left):
                    size, written = escape.end(), escape[0]
                elif len(left) < _LONGEST_ESCAPE and not self._ended and (len(left) == 1 or left[1] == "u"):
                    yield
                    continue
                elif re.match(r"\\u[\da-fA-F]{4}", left):  # a half of a surrogate pair
                    size, written = 6, "\ufffd"
                elif left[1:2] == "'":
                    size, written = 2, "'"
            self._at += size
            sink(written)

    def word(self) -> Parsing[str]:
        """Take a string, and return its decoded value; raises MalformedError."""
        parts: list[str] = []
        yield from self.string((yield from self.expect('"', "'")), parts.append)
        try:
            return str(json.loads('"' + "".join(parts) + '"'))
        except ValueError:
            raise MalformedError from None

    def value(self) -> Parsing[str]:
        """Take a value of JSON, or of Python, to the end of its brackets; returns its text. Raises MalformedError."""
        parts: list[str] = []
        depth, quote = 0, ""
        while True:
            start = self._at
            while self._at < len(self._text):
                character = self._text[self._at]
                run = (_QUOTED[quote] if quote else _PLAIN if depth else _SCALAR).match(self._text, self._at)
                if run is not None:
                    self._at = run.end()
                    continue
                if quote and character == "\\":
                    if self._at + 1 == len(self._text):
                        break
                    self._at += 2
                    continue
                if character in "\"'" and (quote or depth or not (parts or self._at > start)):
                    quote = "" if quote else character
                elif character in "{[" and (depth or not (parts or self._at > start)):
                    depth += 1
                elif depth and character in "}]":
                    depth -= 1
                else:
                    if depth or not (parts or self._at > start):
                        raise MalformedError
                    return "".join(parts) + self._text[start : self._at]
                self._at += 1
                if not quote and not depth:
                    return "".join(parts) + self._text[start : self._at]
            parts.append(self._text[start : self._at])
            if self._ended and (depth or quote or not any(parts)):
                raise MalformedError
            if self._ended:
                return "".join(parts)
            yield

    def back(self, mark: str) -> None:
        self._at -= len(mark)


def _joined(pieces: list[Piece]) -> list[Piece]:
    """The pieces with adjacent ones of the same kind joined."""
    if len(pieces) < 2:
        return pieces
    groups = groupby(pieces, lambda piece: (piece.kind, piece.call))
    return [Piece(kind, "".join(piece.text for piece in group), call) for (kind, call), group in groups]
