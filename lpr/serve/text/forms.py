"""Parsers of replies: text, thoughts and calls, in the forms of all supported model families.

Each family (see lpr.serve.text.calls) has its own marks and tags. Between them all forms of calls are accepted: an
object with a name and arguments, a list of these, a name and JSON, a name and tagged arguments, Python calls. Text that
begins like a call but cannot be parsed as one remains text, unchanged.
"""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from lpr.serve.text.harmony import declared, harmony, plain_name
from lpr.serve.text.reader import Reader, object_text
from lpr.serve.text.scanner import MalformedError, Parsing, Sink, marks
from lpr.serve.text.typed import Tools, dumps, from_text, kinds, member

Thoughts = tuple[str, str]  # what begins and ends a thought

_LONGEST_NAME = 256
_NAME = re.compile(r"[^\s<>\[\]{}()\"'`|,;=]+")
_HEAD = re.compile(r"[^<>\n]+")
_ATTRIBUTES = re.compile(r"""\s*(?:(["'])[^"']*\1(?:\s+string="(?:true|false)")?|[^"']*)\s*""")
_LEAD = re.compile(r"[\s,;]+")
_FENCE = re.compile(r"`{3,}")
_NAMES, _ARGUMENTS = ("name", "tool_name", "function"), ("arguments", "parameters", "args", "input")
_NO_STRING = {"type": ["null", "boolean", "number", "array", "object", "string"]}
BARE = ("{", "[")  # possible starts of a call without a mark
_ASIDE = ("type", "id", "tool_call_id", "call_id", "index")
"""Keys that may precede the name in an object without a mark."""


class Tags(NamedTuple):
    head: str  # what is before a function's name; "" if it stands behind the mark of the call
    key: str
    key_end: str
    value: str
    end: str
    close: str
    pair: tuple[str, str]  # what a grammar writes around a value, with {key}, and {text}: whether it is written as text


QWEN = Tags("<function=", "<parameter=", ">", "", "</parameter>", "</function>",
            ("<parameter={key}>\n", "\n</parameter>\n"))  # fmt: skip
GLM = Tags("", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>",
           ("<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n"))  # fmt: skip
INVOKE = Tags("<invoke name=", "<parameter name=", ">", "", "</parameter>", "</invoke>",
              ('<parameter name="{key}">', "</parameter>\n"))  # fmt: skip
DSML = Tags("<\uff5cDSML\uff5cinvoke name=", "<\uff5cDSML\uff5cparameter name=", ">", "",
            "</\uff5cDSML\uff5cparameter>",            "</\uff5cDSML\uff5cinvoke>",
            ('<\uff5cDSML\uff5cparameter name="{key}" string="{text}">', "</\uff5cDSML\uff5cparameter>\n"))  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Format:
    name: str
    signs: tuple[str, ...]  # pieces of the chat template, all of which it has
    source: str
    call: tuple[str, str]  # what is written before and after a call's arguments; {name} stands for the function's name
    around: tuple[str, str] = ("", "")  # what is written before the first call and after the last
    text: str = ""  # what is written before text
    between: str = ""  # what is written between calls
    is_single: bool = False  # a reply has one call
    tags: Tags | None = None  # how arguments are written; None: as JSON
    opens: tuple[str, ...] = ()  # what begins calls in a reply that may be text as well
    closes: tuple[str, ...] = ()  # what ends them, and says nothing else
    separators: tuple[str, ...] = ()
    """What is between a function's name and its arguments, and what may begin the id of a call before it."""
    silent: tuple[str, ...] = ()  # marks around text, which are no part of it
    thoughts: Thoughts | None = None  # what begins and ends a thought, where that is part of the format
    short_ids: bool = False  # ids of calls have 9 letters and digits, as the template demands
    is_harmony: bool = False

    def read(self, reader: Reader, tools: Tools) -> Parsing[None]:
        """Read a reply without a thought before it."""
        if self.is_harmony:
            yield from harmony(reader, tools)
        else:
            yield from Calls(reader, self, tools).read(reader.say)


class Calls:
    def __init__(self, reader: Reader, format: Format | None, tools: Tools) -> None:
        """Without a `format` there are no calls."""
        self._reader, self._tools = reader, tools
        self._tags = (format.tags if format is not None else None) or QWEN
        self._opens, self._closes, self._separators, self._silent = (
            (format.opens, (*format.closes, self._tags.close), format.separators, format.silent)
            if format is not None
            else ((), (), (), ())
        )
        self._heads = tuple({tags.head for tags in (self._tags, QWEN) if tags.head and format is not None})
        self._announced = tuple(each for each in self._opens if each not in BARE)
        self._is_open, self._lists = False, 0
        self._is_thought = False
        self._num_fences, self._ticks = 0, ""

    def read(self, sink: Sink, end: str = "") -> Parsing[str]:
        """Read up to `end`, or to the end of the reply; text goes to `sink`. Returns `end` if it was found.

        With an `end`, this is a thought: calls before `end` are part of the thought; without an `end` they are calls.
        """
        reader, tried, before = self._reader, None, ""
        self._is_thought, self._is_open, self._lists, self._num_fences, self._ticks = bool(end), False, 0, 0, ""

        def said(text: str) -> None:
            self._note(text)
            sink(text)

        while True:
            closes = (*self._silent, *(self._closes if self._is_open else ()))
            wanted = (*self._opens, *self._heads, *closes, *([end] if end else []))
            if not wanted:
                return ""
            found = yield from reader.until(said, marks(*wanted, breaks=2))
            mark = found.lstrip("\n")
            if not mark or mark == end:
                if tried is not None and not mark:
                    reader.confirm(tried)
                elif tried is not None:
                    sink((before + reader.reject(tried)).removesuffix(found))
                return mark
            if mark in closes:
                self._is_open = self._is_open and mark in self._silent
                yield from reader.space()
                continue
            if end and tried is None:
                tried, before = reader.trial(), found
            if (yield from reader.attempt(partial(self._first, mark), said, found)):
                while (yield from reader.attempt(self._next, said)):
                    pass
                yield from self._after()
                self._ticks = ""
            elif tried is not None and before is found:
                reader.confirm(tried)
                tried = None

    def _note(self, text: str) -> None:
        """Track the starts and ends of code blocks."""
        if not self._ticks and "`" not in text:
            return
        text = self._ticks + text
        rest = text.rstrip("`")
        self._num_fences += len(_FENCE.findall(rest))
        self._ticks = text[len(rest) :]

    def _is_announced(self, mark: str) -> bool:
        """True if a call after a mark may have any name: outside of thoughts and code blocks."""
        size = len(self._ticks)
        is_quoted = 0 < size < 3 or (self._num_fences + (size > 2)) % 2 == 1
        return mark in self._announced and not is_quoted and not self._is_thought

    def _first(self, mark: str) -> Parsing[None]:
        yield from self._one(mark, self._is_announced(mark), 0)
        self._is_open = mark in self._announced

    def _next(self) -> Parsing[None]:
        """Read a further call, after an optional separator."""
        reader, is_open, mark = self._reader, self._is_open, ""
        is_announced = is_open and not self._is_thought
        while True:
            yield from reader.run(_LEAD)
            mark = yield from reader.starts(*self._announced, *self._closes, *self._heads)
            if not mark or mark in self._heads:
                break
            is_open, is_announced = mark in self._announced, self._is_announced(mark)
        yield from self._one(mark, is_announced, self._lists)
        self._is_open = is_open

    def _after(self) -> Parsing[None]:
        while True:
            yield from self._reader.space()
            mark = yield from self._reader.starts(*self._closes, *(["]"] if self._lists else []))
            if not mark:
                return
            self._lists -= mark == "]"
            self._is_open = self._is_open and mark == "]"

    def _one(self, mark: str, is_announced: bool, lists: int) -> Parsing[None]:
        """Read one call in any form. Its name must be declared, unless it `is_announced` by a mark."""
        reader = self._reader
        lists += mark == "["
        if mark not in (*self._heads, "{"):
            yield from reader.space()
            while between := (yield from reader.starts("[", *self._announced)):
                lists += between == "["
                yield from reader.space()
            mark = yield from reader.starts("{", *self._heads)
        if mark == "{":
            yield from self._object(is_announced)
        elif mark:
            yield from self._tagged(mark, is_announced)
        else:
            yield from self._named(is_announced)
        self._lists = lists

    def _open(self, name: str, is_announced: bool) -> Mapping[str, Any]:
        """Begin a call of a function; returns its arguments' schema. Raises MalformedError for an unknown name."""
        found = declared(name, self._tools) or (plain_name(name) if is_announced else "")
        if not found or len(found) > _LONGEST_NAME:
            raise MalformedError
        self._reader.open(found)
        return self._tools.get(found, {})

    def _object(self, is_announced: bool) -> Parsing[None]:
        """The rest of an object with a name and arguments."""
        reader, name, early, is_open, mark = self._reader, "", "", False, ","
        others: list[str] = []
        while mark == ",":
            yield from reader.space()
            key = yield from reader.key()
            yield from reader.space()
            yield from reader.expect(":")
            yield from reader.space()
            if key == "function" and not is_open and (yield from reader.starts("{")):
                yield from self._object(is_announced)
                is_open = True
            elif key in _NAMES and not is_open:
                name = yield from reader.word()
            elif key in _ARGUMENTS and not is_open and name:
                yield from reader.arguments(self._open(name, is_announced))
                is_open = True
            elif key in _ARGUMENTS and not is_open and is_announced:
                early = yield from reader.any_value()
            elif key in _ASIDE:
                yield from reader.any_value()
            elif is_announced or is_open:
                others.append(f"{key}: " + (yield from reader.any_value()))
            else:
                raise MalformedError
            yield from reader.space()
            mark = yield from reader.starts(",", "}")
        if is_open:  # without its last bracket it is none the less a call
            reader.say(", ".join(others))
            return
        if not (mark and name and (early or (is_announced and not others))):
            raise MalformedError
        reader.say(", ".join(others))
        early = json.loads(early) if early.startswith('"') else "" if early in ("null", "None") else early
        reader.argue(object_text(early, self._open(name, is_announced)))

    def _tagged(self, head: str, is_announced: bool) -> Parsing[None]:
        """The rest of <function=NAME> and what follows."""
        reader, tags = self._reader, self._tags if head == self._tags.head else QWEN
        attributes = yield from reader.run(_HEAD)
        yield from reader.expect(">")
        schema = self._open(_attribute(attributes), is_announced)
        if attributes.rstrip().endswith("/"):
            reader.argue("{}")
            return
        yield from reader.space()
        if (yield from reader.starts("{")):  # as some models write it
            yield from reader.members(schema)
            yield from reader.space()
            yield from reader.starts(tags.close)
        else:
            yield from self._pairs(tags, schema)

    def _named(self, is_announced: bool) -> Parsing[None]:
        """A name, and arguments behind it."""
        reader, tags, separator = self._reader, self._tags, ""
        name = yield from reader.run(_NAME)
        yield from reader.space()
        while self._separators and (separator := (yield from reader.starts(*self._separators))):
            yield from reader.space()
            deeper = "" if separator in self._separators[:1] and name != "function" else (yield from reader.run(_NAME))
            if separator == self._separators[0]:
                name = deeper or name  # behind DeepSeek's type of a call
                break
            yield from reader.space()  # behind the id of a call
        yield from reader.space()
        yield from reader.starts("```json")
        yield from reader.space()
        if not separator and (yield from reader.starts("(")):
            yield from reader.members(self._open(name, False), ")", "=")
            return
        mark = yield from reader.starts("{", '"', tags.key, *self._closes)
        reader.back(mark)
        if mark in ("{", '"'):
            yield from reader.arguments(self._open(name, is_announced and bool(separator)))
        elif mark == tags.key and not tags.head:
            yield from self._pairs(tags, self._open(name, is_announced))
        elif mark:
            self._open(name, False)
            reader.argue("{}")
        else:
            raise MalformedError

    def _pairs(self, tags: Tags, schema: Mapping[str, Any]) -> Parsing[None]:
        reader, separator, ended = self._reader, "", ""
        reader.begin_object()
        while True:
            yield from reader.space()
            mark = ended or (yield from reader.starts(tags.key, tags.close, *self._closes))
            if mark != tags.key:
                break
            attributes = yield from reader.run(_HEAD)
            yield from reader.expect(tags.key_end)
            if tags.value:
                yield from reader.space()
                yield from reader.expect(tags.value)
            key = _attribute(attributes)
            if not _ATTRIBUTES.fullmatch(attributes):
                raise MalformedError
            kind = member(schema, key, schema)
            if 'string="' in attributes and not kinds(kind, schema):
                kind = {"type": "string"} if 'string="true"' in attributes else _NO_STRING
            ended = yield from self._pair(tags, f"{separator}{dumps(key)}: ", kind, schema)
            separator = ", "
        if mark != tags.close:
            if not mark and not reader.is_over:
                raise MalformedError
            reader.back(mark)
        reader.end_object()

    def _pair(self, tags: Tags, begin: str, kind: Any, schema: Mapping[str, Any]) -> Parsing[str]:
        """Read an argument's value; strings are streamed. Returns the mark that ends it if not its own end tag."""
        reader, found = self._reader, kinds(kind, schema)
        hold = 0 if not found or found == {"string"} else 5 if found == {"string", "null"} else sys.maxsize
        early: list[str] = []
        is_begun = False

        def sink(text: str) -> None:
            nonlocal is_begun, hold
            if not is_begun:
                early.append(text)
                hold -= len(text)
                if hold > 0:
                    return
                is_begun, text = True, "".join(early)
                reader.begin_string(begin)
            reader.argue(json.dumps(text, ensure_ascii=False)[1:-1])

        has_break = bool((yield from reader.starts("\n")))
        ends = marks(tags.end, tags.key, tags.close, breaks=1)
        while True:
            way = yield from reader.until(sink, ends)
            if not way:
                raise MalformedError
            mark = way.removeprefix("\n")
            if way != mark and mark == tags.end and has_break:
                break
            if (way != mark or mark != tags.key) and (yield from self._ends_here(mark, tags, schema)):
                if way != mark and not has_break:  # a line break that is a part of the value
                    sink("\n")
                break
            sink(way)
        if hold <= 0:
            sink("")
        if is_begun:
            reader.end_string()
        else:
            reader.argue(begin + from_text("".join(early), kind, schema))
        return "" if mark == tags.end else mark

    def _ends_here(self, mark: str, tags: Tags, schema: Mapping[str, Any]) -> Parsing[bool]:
        """True if a mark that may be part of a value ends it, judged by the following text."""
        reader, found = self._reader, False

        def look() -> Parsing[None]:
            nonlocal found
            if mark == tags.key:
                key = _attribute((yield from reader.run(_HEAD)))
                found = bool((yield from reader.starts(tags.key_end)) and member(schema, key, schema))
            else:
                yield from reader.space()
                more = (tags.key, tags.close) if mark == tags.end else (tags.head,) if tags.head else ()
                found = bool((yield from reader.starts(*self._closes, *self._announced, *more))) or reader.is_over
            raise MalformedError  # so that it is read again

        yield from reader.attempt(look, lambda text: None)
        return found


def _attribute(text: str) -> str:
    """A name in a tag, with or without quotes."""
    found = re.match(r"""\s*(["'])(.*?)\1""", text)
    return found[2] if found else text.strip()
