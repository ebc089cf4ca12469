"""Replies of gpt-oss, whose messages have a channel and, if they are calls, a recipient."""

import re
from functools import partial

from lpr.serve.text.reader import Reader
from lpr.serve.text.scanner import MalformedError, Parsing, marks
from lpr.serve.text.typed import Tools

_HARMONY = marks("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_BEHIND_HEADERS = marks("<|message|>", "<|end|>", "<|call|>", "<|return|>")
_FORMAL = ("assistant", "analysis", "commentary", "final", "json", "code", "text", "to=functions.")
"""The words of a header, besides marks."""


def harmony(reader: Reader, tools: Tools) -> Parsing[None]:
    """gpt-oss: messages with a channel, and a recipient if they are calls, before the channel or behind it."""
    mark = yield from reader.starts(" to=", "to=", *_HARMONY.marks)
    sink = reader.say
    while True:
        if mark in (" to=", "to=", "<|start|>", "<|channel|>"):
            heads: list[str] = []
            sink = reader.say
            if (yield from reader.attempt(partial(_header, reader, mark, heads), sink, mark)):
                head = mark + "".join(heads)
                channels = re.findall(r"<\|channel\|>\s*(\w+)", head)
                sink = reader.think if channels[-1:] == ["analysis"] else reader.say
                found = re.search(r"to=([^\s<]+)", head)
                name = found[1] if found else ""
                if name and (name.startswith("functions.") or declared(name, tools)):
                    yield from reader.attempt(partial(_body, reader, tools, name), reader.say, head)
                    sink = reader.say
                elif name and name != "assistant":  # nobody's: it is text as a whole
                    sink(head)
        elif mark in ("<|end|>", "<|call|>", "<|return|>"):
            sink = reader.say
        mark = yield from reader.until(sink, _HARMONY)
        if not mark:
            return


def _header(reader: Reader, begin: str, heads: list[str]) -> Parsing[None]:
    """The rest of a message's header, which is short."""
    before, mark = yield from reader.within(_BEHIND_HEADERS)
    heads += before, mark
    words = re.split(r"<\|[a-z]*\|?>?|\s+", begin + before)
    is_whole = mark == "<|message|>" and all(not word or word in _FORMAL or "=" in word for word in words)
    is_cut = not mark and all(any(formal.startswith(word) for formal in _FORMAL) for word in words)
    if not is_whole and not is_cut:  # an incomplete header at a reply's token limit is dropped
        raise MalformedError


def _body(reader: Reader, tools: Tools, name: str) -> Parsing[None]:
    name = declared(name, tools) or plain_name(name)
    reader.open(name)
    yield from reader.space()
    mark = yield from reader.starts(*_HARMONY.marks)
    reader.back(mark)
    if mark or reader.is_over:
        reader.argue("{}")
    else:
        yield from reader.arguments(tools.get(name, {}))
    yield from reader.space()


def plain_name(name: str) -> str:
    """A function's name without what the families write around it."""
    return re.sub(r":\d+$", "", name).removeprefix("functions.")


def declared(name: str, tools: Tools) -> str:
    """The declared name that is meant; "" if there is none."""
    return next((way for way in (name, plain_name(name), f"functions.{name}") if way in tools), "")
