"""Tool-call formats of model families, recognised by their chat templates.

A model has the first format of lpr/assets/calls.toml whose signs are all in its template. A format has a family's
marks, for the parser (lpr.serve.text.forms) and for the grammar of required calls (lpr.serve.text.call_grammar). No
maintained library does this: transformers' `utils.chat_parsing` imports transformers and needs a response template,
which few models have; openai-harmony supports one family; extractions of SGLang's parsers pin transformers.
"""

import re

import msgspec

from lpr.files import asset
from lpr.serve.text.forms import DSML, GLM, INVOKE, QWEN, Format, Thoughts

MARK = re.compile(r"<[^\s<>]*>|\[[A-Z_/]+\]")  # texts that a tokenizer may have as single tokens

_TAGS = {"qwen": QWEN, "glm": GLM, "invoke": INVOKE, "dsml": DSML}
_TABLE = msgspec.toml.decode(asset("calls.toml").read_bytes())
_ROWS = [{**row, "tags": _TAGS.get(row.get("tags"))} for row in _TABLE["format"]]
FORMATS: tuple[Format, ...] = msgspec.convert(_ROWS, tuple[Format, ...])
THOUGHTS: tuple[Thoughts, ...] = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
"""Marks of thoughts, found in a model's template: Qwen3, DeepSeek and GLM; Magistral; Seed-OSS."""
NAMES = tuple(each.name for each in FORMATS)


def find_format(template: str, name: str = "auto") -> Format | None:
    """The format of a chat template; None if it has no tools or an unknown format of calls.

    A `name` other than "auto" is that of a format, or "none".
    """
    if name != "auto":
        return next((each for each in FORMATS if each.name == name), None)
    if "tools" not in template:
        return None
    return next((each for each in FORMATS if all(sign in template for sign in each.signs)), None)


def find_thoughts(template: str) -> Thoughts | None:
    """The marks of thoughts in a chat template, besides those of harmony; None if it has none."""
    return next((each for each in THOUGHTS if each[1] in template), None)
