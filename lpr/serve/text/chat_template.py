"""Chat prompts from a model's own Jinja template, rendered as transformers renders it, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lpr.config import first_line
from lpr.protocol import ErrorCode
from lpr.serve.errors import bad

RESERVED = frozenset((
    "messages", "tools", "documents", "self", "conversation", "chat_template", "tokenize", "continue_final_message",
    "return_tensors", "return_dict", "return_assistant_tokens_mask", "raise_exception", "strftime_now", "range", "dict",
    "namespace", "cycler", "joiner", "lipsum", "loop", "caller", "varargs", "kwargs", "bos_token", "eos_token",
    "unk_token", "sep_token", "pad_token", "cls_token", "mask_token", "additional_special_tokens", "image_token",
    "audio_token", "video_token",
))  # fmt: skip
"""Names that `more` cannot set, as they have a meaning already, besides the tokenizer's own special tokens."""
MOST_RENDERED = 1 << 24
"""Characters of a rendered prompt where the tokenizer gives no limit."""


class TemplateError(ValueError):
    """A conversation that the model's template refuses."""


class _Generation(Extension):
    """The `{% generation %}` block, which marks the assistant's part for training and shows its body."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        """Parse the block as its own body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, **more: Any) -> str:
    # Jinja's own tojson escapes HTML, which a prompt does not want.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, **more)


def _raise(message: str) -> None:
    raise TemplateError(message)


class ChatTemplates:
    """The templates of one model."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Compile the templates; raises TemplateError for one that is not Jinja."""
        self.sources = dict(sources)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        except jinja2.TemplateError as failure:
            raise TemplateError(f"the model's chat template cannot be read: {failure}") from failure
        self._special_tokens = dict(special_tokens)
        self.reserved = RESERVED | set(special_tokens)

    def __bool__(self) -> bool:
        return bool(self._templates)

    @property
    def tool_source(self) -> str:
        """The template for conversations with tools; "" without templates."""
        return self.sources[self._name(True)] if self.sources else ""

    def _name(self, has_tools: bool) -> str:
        """The name of the template to use, by the names that transformers gives a meaning."""
        names = ("tool_use", "default") if has_tools else ("default",)
        return next((name for name in names if name in self.sources), next(iter(self.sources)))

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **more: Any) -> str:
        """The prompt of a conversation; `more` are `tools` and variables, none of RESERVED. Raises TemplateError."""
        template = self._templates[self._name(bool(more.get("tools")))]
        variables = {**self._special_tokens, "add_generation_prompt": add_generation_prompt, **more}
        try:
            return str(template.render({"tools": None, "documents": None, **variables}, messages=list(messages)))
        except Exception as failure:  # a template is code, and a client's words may lead it anywhere
            raise TemplateError(first_line(failure)) from failure


def render_prompt(
    templates: ChatTemplates, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], most: int
) -> str:
    """The prompt of a conversation in at most `most` characters; raises ApiError."""
    try:
        text = templates.render(messages, **variables)
    except TemplateError as failure:
        raise bad("messages", f"messages: the model's chat template refuses this: {failure}") from failure
    if len(text) > most:
        message = f"messages: the prompt's {len(text)} characters are more than the model's context can hold"
        raise bad("messages", message, ErrorCode.TOO_LONG)
    return text
