"""Chat prompts from a model's own Jinja template, rendered as transformers renders it, in a sandbox."""

import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from hashlib import blake2b
from typing import Any

import jinja2
import msgspec
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lpr.config import first_line
from lpr.protocol import ErrorCode
from lpr.serve.errors import bad
from lpr.serve.text.calls import find_thoughts
from lpr.serve.text.fitting import Fit, Plain, learn, marked, shape_of, text_of

RESERVED = frozenset((
    "messages", "tools", "documents", "self", "conversation", "chat_template", "tokenize", "continue_final_message",
    "return_tensors", "return_dict", "return_assistant_tokens_mask", "raise_exception", "strftime_now", "range", "dict",
    "namespace", "cycler", "joiner", "lipsum", "loop", "caller", "varargs", "kwargs", "bos_token", "eos_token",
    "unk_token", "sep_token", "pad_token", "cls_token", "mask_token", "additional_special_tokens", "image_token",
    "audio_token", "video_token",
))  # fmt: skip
"""Reserved names that `more` cannot set, besides the tokenizer's special tokens."""
MOST_RENDERED = 1 << 24  # characters of a rendered prompt where the tokenizer gives no limit
MOST_SHAPES = 1024  # shapes of conversations whose fits are remembered
_UNKNOWN = "unknown"  # place of a lost text if the template refuses the probe texts
CONTINUE = "continue_final_message"
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")  # values of `reasoning_effort`, in their order
_TOOL: Plain = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
"""Placeholder for the tools of a conversation whose shape is tested."""


class TemplateError(ValueError):
    """A conversation that the model's template refuses."""


class _Generation(Extension):
    """The `{% generation %}` block, which marks the assistant's part for training and shows its body."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, **more: Any) -> str:
    # Jinja's own tojson escapes HTML, which a prompt does not want.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, **more)


def _raise(message: str) -> None:
    raise TemplateError(message)


class ChatTemplates:
    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Compile the templates. An invalid one gets a `failure` and is refused at use."""
        self.sources = dict(sources)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._templates: dict[str, jinja2.Template] = {}
        self.failure: str | None = None
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
            except Exception as failure:  # jinja2's, and Python's own for code that is nested too deeply
                self.failure = f"the model's chat template cannot be read: {first_line(failure)}"
        self._special_tokens = dict(special_tokens)
        self.reserved = RESERVED | set(special_tokens)
        self._fits: dict[str, Fit] = {}
        self._efforts: dict[tuple[str, str], str] = {}
        self._chosen: dict[bytes, tuple[Fit, str | None]] = {}
        """By shape of a conversation: its fit, and the place of a text that no fit includes."""

    def __bool__(self) -> bool:
        return bool(self.sources)

    @property
    def tool_source(self) -> str:
        """The template for conversations with tools; "" without templates."""
        return self.sources[self._name(True)] if self.sources else ""

    def _name(self, has_tools: bool) -> str:
        """The name of the template to use, by transformers' convention."""
        names = ("tool_use", "default") if has_tools else ("default",)
        return next((name for name in names if name in self.sources), next(iter(self.sources)))

    @property
    def is_known(self) -> bool:
        return len(self._fits) == len(self.sources)

    def know(self, fits: Mapping[str, Any]) -> None:
        """Take over the result of `learnt` from another process; a template missing there gets the default fit."""
        self._fits = {name: msgspec.convert(fits.get(name, {}), Fit) for name in self.sources}

    def learnt(self) -> dict[str, Any]:
        """The fit of each template, as JSON values."""
        return {name: msgspec.to_builtins(self._fit(name)) for name in self.sources}

    def _fit(self, name: str) -> Fit:
        if name not in self._fits:
            has_calls = "tool_calls" in self.sources[name]
            self._fits[name] = learn(lambda messages, **more: self.render(name, messages, more), has_calls)
        return self._fits[name]

    def fitted(self, messages: Sequence[Plain], **more: Any) -> tuple[str, str | None]:
        """The prompt of messages fitted to the template, and the place of a text it lacks; raises TemplateError."""
        name = self._name(bool(more.get("tools")))
        if "reasoning_effort" in more:
            more["reasoning_effort"] = self._effort(name, more["reasoning_effort"])
        others = {key: value for key, value in more.items() if key != "tools"}
        shape = blake2b(repr((name, shape_of(messages), others)).encode("utf-8", "replace"), digest_size=16).digest()
        if shape not in self._chosen:
            if len(self._chosen) >= MOST_SHAPES:
                self._chosen.clear()
            self._chosen[shape] = self._choose(name, messages, more)
        fit, lost = self._chosen[shape]
        prompt = self._fitted(name, fit, messages, more)
        if lost == _UNKNOWN:
            _, words = marked(messages)
            lost = next((place for place, text in words.values() if text.strip() not in prompt), None)
        return prompt, lost

    def _choose(self, name: str, messages: Sequence[Plain], more: Mapping[str, Any]) -> tuple[Fit, str | None]:
        """The fit with which all texts of such a conversation are in the prompt, or the place of a missing text."""
        marks, words = marked(messages)
        found: tuple[Fit, str | None] | None = None
        for fit in self._fit(name).varied():
            with suppress(TemplateError):
                text = self._fitted(name, fit, marks, {**more, **({"tools": [_TOOL]} if more.get("tools") else {})})
                lost = next((place for word, (place, _) in words.items() if word not in text), None)
                found = found if found is not None and lost is not None else (fit, lost)
                if lost is None:
                    break
        return found if found is not None else (self._fit(name), _UNKNOWN)  # it may take these very texts

    def _fitted(self, name: str, fit: Fit, messages: Sequence[Plain], variables: Mapping[str, Any]) -> str:
        tools = {"tools": fit.tools(variables["tools"])} if variables.get("tools") else {}
        return self.render(name, fit.messages(messages), {**variables, **tools})

    def _effort(self, name: str, wanted: Any) -> Any:
        """The nearest reasoning effort that the template accepts."""
        if wanted not in EFFORTS:
            return wanted
        if (name, wanted) not in self._efforts:
            at = EFFORTS.index(wanted)
            for effort in sorted(EFFORTS, key=lambda each: abs(EFFORTS.index(each) - at)):
                with suppress(TemplateError):
                    messages = self._fit(name).messages([{"role": "user", "content": "a"}])
                    self.render(name, messages, {"reasoning_effort": effort})
                    break
            else:
                effort = wanted
            self._efforts[name, wanted] = effort
        return self._efforts[name, wanted]

    def render(self, name: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        if name not in self._templates:
            raise TemplateError(self.failure)
        values = {"tools": None, "documents": None, **self._special_tokens, **variables}
        try:
            return str(self._templates[name].render(values, messages=list(messages)))
        except Exception as failure:  # a template is code and may raise any type
            raise TemplateError(first_line(failure)) from failure


def render_prompt(templates: ChatTemplates, messages: Sequence[Plain], variables: Mapping[str, Any], most: int) -> str:
    """The prompt of a conversation in at most `most` characters; raises ApiError.

    With the variable `continue_final_message` it ends where the text of the last message does.
    """
    more = {name: value for name, value in variables.items() if name != CONTINUE}
    end = f"q{secrets.token_hex(16)}x" if variables.get(CONTINUE) else ""  # no client's text has it
    given = [*messages[:-1], _ended(messages[-1], end)] if end else messages
    try:
        text, lost = templates.fitted(given, **more)
    except TemplateError as failure:
        raise bad("messages", f"messages: the model's chat template refuses this: {failure}") from failure
    if lost is not None:
        raise bad(lost, f"{lost}: the model's chat template does not show this text")
    if end:
        text = _cut(templates, text, end, text_of(messages[-1]["content"]))
    if len(text) > most:
        message = f"messages: the prompt's {len(text)} characters are more than the model's context can hold"
        raise bad("messages", message, ErrorCode.TOO_LONG)
    return text


def _cut(templates: ChatTemplates, prompt: str, end: str, begun: str) -> str:
    """The prompt up to the mark `end` after the `begun` answer, with that answer as the client wrote it."""
    text, mark, _ = prompt.rpartition(end)
    kept = begun.lstrip()
    if mark and text.endswith(kept):
        return text[: len(text) - len(kept)] + begun
    thoughts = find_thoughts(templates.tool_source)
    answer = begun.rpartition(thoughts[1])[2] if thoughts is not None else begun
    if mark and answer != begun and text.endswith(answer.lstrip()):  # the template writes a thought in its own way
        return text
    raise bad(CONTINUE, f"{CONTINUE}: the model's chat template does not show the last message's text as it is")


def _ended(message: Plain, end: str) -> Plain:
    """A message with a mark appended to its text, without white space before it, which templates may trim."""
    if message.get("tool_calls"):
        raise bad(CONTINUE, f"{CONTINUE}: the last message has calls, and no text goes on behind them")
    return {**message, "content": text_of(message["content"]).lstrip() + end}
