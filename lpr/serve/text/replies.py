"""Parser settings of a conversation's replies, and the grammar that restricts calls to the declared tools."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from lpr.serve.text.call_grammar import CallGrammar
from lpr.serve.text.calls import MARK, find_format, find_thoughts
from lpr.serve.text.forms import Calls, Format, Thoughts
from lpr.serve.text.reader import Reader
from lpr.serve.text.scanner import Parsing
from lpr.serve.text.tokens import Tokens
from lpr.serve.text.typed import Tools


@dataclass(frozen=True)
class Family:
    """The form of a model's replies, by its chat template."""

    format: Format | None  # None: it has no calls, or calls in a form that is not known
    thoughts: Thoughts | None

    @classmethod
    def of(cls, template: str, parser: str = "auto") -> Family:
        """The family of a template; `parser` names a format, "auto" finds it, and "none" switches it off."""
        format = find_format(template, parser)
        thoughts = format.thoughts if format is not None else None
        return cls(format, thoughts or find_thoughts(template))


@dataclass(frozen=True, kw_only=True)
class Replies:
    family: Family
    tools: Tools = field(default_factory=dict)  # empty: calls are not read
    choice: Literal["auto", "required"] = "auto"  # "required": the reply is a call
    is_strict: bool = False  # calls that the model chooses to make are held to the schema as well
    several: bool = True
    begun: bool = False  # True if the prompt has begun a thought

    @property
    def is_plain(self) -> bool:
        return not self.tools and self.family.thoughts is None

    @property
    def _format(self) -> Format | None:
        format = self.family.format
        return format if format is not None and (self.tools or format.thoughts is not None) else None

    def shows_special(self, tokens: Tokens) -> bool:
        """True if special tokens mark the parts of replies, so that the text must have them."""
        format = self._format
        written = [*(self.family.thoughts or ()), *((*format.call, *format.around) if format is not None else ())]
        return not tokens.special.isdisjoint(MARK.findall(" ".join(written)))

    def reader(self) -> Reader:
        return Reader(self._parse, None if self.several else 1)

    def call_id(self, digits: str) -> str:
        """An id for a call, of at least 24 hexadecimal digits, in the form that the model's template takes."""
        format = self.family.format
        return digits[:9] if format is not None and format.short_ids else f"call_{digits[:24]}"

    def grammar(self, tokens: Tokens, answer: Any = None) -> str:
        """A Lark grammar for replies with calls or a begun thought, else ""; `answer` is the JSON schema of a text."""
        format, thoughts = self.family.format, self.family.thoughts
        is_framed = format is not None and bool(format.text)
        is_free = answer is None and not (self.tools and (self.choice == "required" or self.is_strict))
        if is_free or not (self.tools or self.begun or is_framed):  # or the answer's own grammar will do
            return ""
        builder = CallGrammar(tokens.added)
        parts: list[str] = []
        if self.tools and format is not None:
            parts.append(builder.calls(format, self.tools, self.several))
        if self.choice == "auto" and answer is not None:
            written = builder.json(answer)
            parts.append(written if format is None else builder.text(format, written))
        elif self.choice == "auto" and format is not None:
            text = builder.text(format, builder.free(format))
            parts = [f"{text} | {parts[0]}" if is_framed else f"{text} ({parts[0]})?"]
        start = " | ".join(f"({part})" for part in parts)
        if thoughts is not None:
            start = f"{builder.thought(thoughts, self.begun)} ({start})"
        return builder.written(start)

    def _parse(self, reader: Reader) -> Parsing[None]:
        format = self._format
        if format is not None and format.is_harmony:
            yield from format.read(reader, self.tools)
            return
        calls = Calls(reader, format, self.tools)
        if self.family.thoughts is not None:
            begin, end = self.family.thoughts
            before = "" if self.begun else (yield from reader.space())
            if self.begun or (yield from reader.starts(begin)):
                yield from reader.starts("\n")
                yield from calls.read(reader.think, end)
                yield from reader.space()
            else:
                reader.say(before)
        yield from calls.read(reader.say)


PLAIN = Replies(family=Family(None, None))  # texts that are shown as they are
