"""How families of models write calls of tools, found by their chat templates.

A model belongs to the first row of `FORMATS` whose signs are all in its template. A row says how calls are read, and
how required ones are written, for a grammar (lpr.serve.text.call_grammar). No kept library was found for this: the
parsers of vLLM, SGLang and transformers belong to those packages, transformers' own (`utils.chat_parsing`) knows three
families and streams no arguments, and openai-harmony reads one family.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from lpr.serve.text.reader import MalformedError, Parsing, Reader

Tools = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each function's arguments, by its name."""
Thoughts = tuple[str, str]
"""What begins and ends a thought."""
MARK = re.compile(r"<[^\s<>]*>|\[[A-Z_/]+\]")
"""Names that tokens of their own have."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """How one family writes calls."""

    name: str
    signs: tuple[str, ...]
    """Pieces of the chat template, all of which it has."""
    source: str
    read: Callable[[Reader, Tools], Parsing[None]]
    call: tuple[str, str]
    """What is written before and after a call's arguments; {name} stands for the function's name."""
    around: tuple[str, str] = ("", "")
    """What is written before the first call and after the last."""
    text: str = ""
    """What is written before text."""
    between: str | None = ""
    """None: a reply has one call."""
    arguments: Literal["json", "parameters", "pairs"] = "json"
    """How arguments are written: as JSON, in Qwen3-Coder's tags or in GLM's."""
    starts: tuple[str, ...] = ()
    """What begins calls in a reply that may be text as well."""
    thoughts: Thoughts | None = None
    """What begins and ends a thought, where that is part of the format."""
    short_ids: bool = False
    """Ids of calls have 9 letters and digits, as the template demands."""


def _tagged(reader: Reader, tools: Tools) -> Parsing[None]:
    """Hermes: JSON objects between tags."""
    while mark := (yield from reader.until(reader.say, "\n<tool_call>", "<tool_call>")):
        begin = mark + (yield from reader.space())
        if (yield from reader.call(reader.call_object, begin)):
            yield from reader.until(_drop, "</tool_call>")
            yield from reader.space()


def _lists(marks: Sequence[str], reader: Reader, tools: Tools) -> Parsing[None]:
    """Granite, and Mistral before its tokenizer's version 11: a list of JSON objects behind a mark.

    Later Mistrals write the name and [ARGS] behind each mark.
    """
    while mark := (yield from reader.until(reader.say, *marks)):
        begin = mark + (yield from reader.space())
        while separator := (yield from reader.starts("[", ",")):
            begin += separator + (yield from reader.space())
            if not (yield from reader.call(reader.call_object, begin)):
                break
            begin = yield from reader.space()
        else:
            if begin.startswith("[TOOL_CALLS]"):
                yield from reader.call(partial(_with_args, reader), begin)
            else:
                reader.say("" if (yield from reader.starts("]")) else begin)
            yield from reader.space()


def _with_args(reader: Reader) -> Parsing[None]:
    parts: list[str] = []
    found = yield from reader.until(parts.append, "[ARGS]", "[CALL_ID]", "\n")
    if found == "[CALL_ID]":
        found = yield from reader.until(_drop, "[ARGS]")
    if found != "[ARGS]" or not (name := "".join(parts).strip()):
        raise MalformedError
    reader.open(name)
    yield from reader.arguments()


def _bare(reader: Reader, tools: Tools) -> Parsing[None]:
    """Llama 3: the whole reply is one JSON object, or several with ; between them."""
    begin = (yield from reader.space()) + (yield from reader.starts("<|python_tag|>"))
    while (yield from reader.call(partial(reader.call_object, frozenset(tools)), begin)):
        begin = yield from reader.space()
        if not (yield from reader.starts(";")):
            break
        begin += ";" + (yield from reader.space())
    else:
        begin = ""
    reader.say(begin)
    yield from reader.until(reader.say)


def _deepseek(reader: Reader, tools: Tools) -> Parsing[None]:
    """DeepSeek: V3 and R1 write the type, the name and a block of JSON, V3.1 the name and JSON."""
    yield from reader.until(reader.say, "<\uff5ctool\u2581calls\u2581begin\uff5c>")
    while (yield from reader.until(_drop, "<\uff5ctool\u2581call\u2581begin\uff5c>")):
        yield from reader.call(partial(_deepseek_call, reader))
        yield from reader.until(_drop, "<\uff5ctool\u2581call\u2581end\uff5c>")


def _deepseek_call(reader: Reader) -> Parsing[None]:
    name: list[str] = []
    yield from reader.until(name.append, "<\uff5ctool\u2581sep\uff5c>")
    if "".join(name).strip() == "function":
        name.clear()
        yield from reader.until(name.append, "```json")
    reader.open("".join(name).strip())
    yield from reader.arguments()


def _harmony(reader: Reader, tools: Tools) -> Parsing[None]:
    """gpt-oss: messages with a channel, and a recipient if they are calls."""
    if not (yield from reader.starts("<|channel|>", "<|start|>")):
        yield from reader.until(reader.say)
    while True:
        head: list[str] = []
        if not (yield from reader.until(head.append, "<|message|>")):
            reader.say("" if "<|" in "".join(head) else "".join(head))
            return
        said = "".join(head)
        sink = reader.think if "analysis" in said else reader.say
        if recipient := re.search(r"to=functions\.([\w.-]+)", said):
            reader.open(recipient[1])
            sink = reader.argue
        yield from reader.until(sink, "<|end|>", "<|call|>", "<|return|>", "<|start|>")


def _parameters(reader: Reader, tools: Tools) -> Parsing[None]:
    """Qwen3-Coder: <function=NAME> and a <parameter=KEY> for each argument."""
    while mark := (yield from reader.until(reader.say, "\n<tool_call>", "<tool_call>")):
        skipped = yield from reader.space()
        if not (yield from reader.starts("<function=")):
            reader.say(mark + skipped)
            continue
        name: list[str] = []
        yield from reader.until(name.append, ">")
        reader.open("".join(name).strip())
        pairs = _Pairs(reader, tools.get("".join(name).strip(), {}))
        while (yield from reader.until(_drop, "<parameter=", "</function>")) == "<parameter=":
            key: list[str] = []
            yield from reader.until(key.append, ">")
            yield from pairs.read("".join(key), "</parameter>")
        pairs.end()
        yield from reader.until(_drop, "</tool_call>")
        yield from reader.space()


def _glm(reader: Reader, tools: Tools) -> Parsing[None]:
    """GLM: the name, and pairs of <arg_key> and <arg_value>."""
    while (yield from reader.until(reader.say, "\n<tool_call>", "<tool_call>")):
        yield from reader.space()
        name: list[str] = []
        mark = yield from reader.until(name.append, "\n", "<arg_key>", "</tool_call>")
        reader.open("".join(name).strip())
        pairs = _Pairs(reader, tools.get("".join(name).strip(), {}))
        if mark == "\n":
            mark = yield from reader.until(_drop, "<arg_key>", "</tool_call>")
        while mark == "<arg_key>":
            key: list[str] = []
            yield from reader.until(key.append, "</arg_key>")
            yield from reader.until(_drop, "<arg_value>")
            yield from pairs.read("".join(key), "</arg_value>")
            mark = yield from reader.until(_drop, "<arg_key>", "</tool_call>")
        pairs.end()
        yield from reader.space()


class _Pairs:
    """Arguments that come one by one, as JSON. Strings are passed on while they come."""

    def __init__(self, reader: Reader, schema: Mapping[str, Any]) -> None:
        self._reader, self._begin = reader, "{"
        self._properties = properties_of(schema)

    def read(self, key: str, end: str) -> Parsing[None]:
        """An argument up to `end`. It is a string unless the schema has other types, and the value is JSON of one."""
        argue, sep = self._reader.argue, self._begin
        self._begin = ", "
        yield from self._reader.starts("\n")
        ends = ("\n" + end, end)
        if is_string(self._properties.get(key)):
            argue(f'{sep}{json.dumps(key)}: "')
            yield from self._reader.until(lambda text: argue(json.dumps(text, ensure_ascii=False)[1:-1]), *ends)
            argue('"')
            return
        value: list[str] = []
        yield from self._reader.until(value.append, *ends)
        try:
            argue(f"{sep}{json.dumps(key)}: {json.dumps(json.loads(''.join(value)), ensure_ascii=False)}")
        except (ValueError, RecursionError):
            argue(f"{sep}{json.dumps(key)}: {json.dumps(''.join(value), ensure_ascii=False)}")

    def end(self) -> None:
        """After the last argument."""
        self._reader.argue("{}" if self._begin == "{" else "}")


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments that a schema has, by their names; empty if it is no schema."""
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def is_string(schema: Any) -> bool:
    """True if an argument of this schema is written as its text, and not as JSON."""
    if not isinstance(schema, Mapping) or not (schema.keys() & {"type", "anyOf", "oneOf", "enum", "const", "$ref"}):
        return True
    kind = schema.get("type")
    if kind is None and "anyOf" not in schema and "oneOf" not in schema:
        values = schema.get("enum") or [schema.get("const")]
        return isinstance(values, list) and all(isinstance(value, str) for value in values)
    return kind == "string"


def _drop(text: str) -> None:
    pass


FORMATS = (
    Format(
        name="harmony", signs=("<|channel|>", "<|message|>"), read=_harmony,
        call=("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", ""), between=None,
        text="<|channel|>final<|message|>", thoughts=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        source="https://cookbook.openai.com/articles/openai-harmony (Function calling); gpt-oss",
    ),
    Format(
        name="qwen3-coder", signs=("<tool_call>", "<function=", "<parameter="), read=_parameters,
        call=("<tool_call>\n<function={name}>\n", "</function>\n</tool_call>"), between="\n", arguments="parameters",
        starts=("<tool_call>",),
        source="https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct (chat_template.jinja); also Qwen 3.5",
    ),
    Format(
        name="glm", signs=("<tool_call>", "<arg_key>", "<arg_value>"), read=_glm,
        call=("<tool_call>{name}\n", "</tool_call>"), between="\n", arguments="pairs", starts=("<tool_call>",),
        source="https://huggingface.co/zai-org/GLM-4.5 (chat_template.jinja); also GLM-4.6 and 4.7",
    ),
    Format(
        name="deepseek-v3", signs=("<\uff5ctool\u2581calls\u2581begin\uff5c>", "```json"), read=_deepseek,
        around=("<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"), between="\n",
        call=("<\uff5ctool\u2581call\u2581begin\uff5c>function<\uff5ctool\u2581sep\uff5c>{name}\n```json\n",
              "\n```<\uff5ctool\u2581call\u2581end\uff5c>"),
        starts=("<\uff5ctool\u2581calls\u2581begin\uff5c>",),
        source="https://huggingface.co/deepseek-ai/DeepSeek-V3-0324 (tokenizer_config.json); also DeepSeek-R1",
    ),
    Format(
        name="deepseek-v3.1", signs=("<\uff5ctool\u2581calls\u2581begin\uff5c>",), read=_deepseek,
        around=("<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"),
        call=("<\uff5ctool\u2581call\u2581begin\uff5c>{name}<\uff5ctool\u2581sep\uff5c>",
              "<\uff5ctool\u2581call\u2581end\uff5c>"),
        starts=("<\uff5ctool\u2581calls\u2581begin\uff5c>",),
        source="https://huggingface.co/deepseek-ai/DeepSeek-V3.1 (README, ToolCall)",
    ),
    Format(
        name="mistral-args", signs=("[TOOL_CALLS]", "[ARGS]"), read=partial(_lists, ("[TOOL_CALLS]",)),
        call=("[TOOL_CALLS]{name}[ARGS]", ""), starts=("[TOOL_CALLS]",), short_ids=True,
        source="https://github.com/mistralai/mistral-common (tokens/tokenizers, instruct tokenizer V11 and V13)",
    ),
    Format(
        name="mistral", signs=("[TOOL_CALLS]",), read=partial(_lists, ("[TOOL_CALLS]",)),
        call=('{{"name": "{name}", "arguments": ', "}}"), around=("[TOOL_CALLS] [", "]"), between=", ",
        starts=("[TOOL_CALLS]",), short_ids=True,
        source="https://github.com/mistralai/mistral-common (tokens/tokenizers, instruct tokenizers V2 to V7)",
    ),
    Format(
        name="granite", signs=("<|tool_call|>",), read=partial(_lists, ("<|tool_call|>", "<tool_call>")),
        call=('{{"name": "{name}", "arguments": ', "}}"), around=("<|tool_call|>[", "]"), between=", ",
        starts=("<|tool_call|>",),
        source="https://huggingface.co/ibm-granite/granite-3.3-8b-instruct (tokenizer_config.json)",
    ),
    Format(
        name="hermes", signs=("<tool_call>",), read=_tagged,
        call=('<tool_call>\n{{"name": "{name}", "arguments": ', "}}\n</tool_call>"), between="\n",
        starts=("<tool_call>",),
        source="https://github.com/NousResearch/Hermes-Function-Calling (README); also Qwen2.5, Qwen3, Granite 4",
    ),
    Format(
        name="llama3", signs=('"parameters": ', "<|start_header_id|>"), read=_bare,
        call=('{{"name": "{name}", "parameters": ', "}}"), between="; ", starts=("{", "<|python_tag|>"),
        source="https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/ (JSON based tool calling)",
    ),
)  # fmt: skip

THOUGHTS: tuple[Thoughts, ...] = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
"""Marks of thoughts, found in a model's template: Qwen3, DeepSeek and GLM; Magistral; Seed-OSS."""


NAMES = tuple(each.name for each in FORMATS)


def find_format(template: str, name: str = "auto") -> Format | None:
    """The format of a chat template; None if it knows no tools, or writes calls in a way that is not known.

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
