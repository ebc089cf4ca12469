"""Chat prompts from a model's own Jinja template, rendered as transformers renders it, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

RESERVED = frozenset(("messages", "tools", "documents", "self"))
"""Names that `more` cannot set, as they have a meaning already."""


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

    def __bool__(self) -> bool:
        return bool(self._templates)

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **more: Any) -> str:
        """The prompt of a conversation; `more` are further variables, none of RESERVED. Raises TemplateError."""
        template = self._templates.get("default") or next(iter(self._templates.values()))
        variables = {**self._special_tokens, "add_generation_prompt": add_generation_prompt, **more}
        try:
            return str(template.render(messages=list(messages), tools=None, documents=None, **variables))
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError, ValueError) as failure:
            raise TemplateError(str(failure).splitlines()[0] if str(failure) else type(failure).__name__) from failure
