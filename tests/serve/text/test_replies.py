"""Replies of all families, well-formed and damaged, in many cuts: nothing is lost, and calls are typed."""

import gc
import json
import re
import time

import pytest

from lpr.serve.text.calls import NAMES, find_format
from lpr.serve.text.reader import Reader
from lpr.serve.text.replies import Family, Replies
from lpr.serve.text.typed import from_text, from_value, kinds
from tests.fakes import written_calls as written

ANY = {"type": "object", "properties": {"a": {}}}
THINK = ("<think>", "</think>")


def read(name, text, tools, thoughts=None, begun=False):
    """The thought, the text, and the calls with their arguments; the same character by character and as a whole."""
    format = find_format("", name)
    how = Replies(family=Family(format, format.thoughts or thoughts), tools=tools, begun=begun)
    whole = written.read(how, text, [])
    assert written.read(how, text, [1] * len(text)) == whole
    thought, said, calls = whole
    return thought, said, [(each, json.loads(args)) for each, args in calls]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow(first=5)
def test_nothing_is_lost_and_calls_are_typed(name):
    assert sum(written.check(name, seed, all_cuts=seed < 1) for seed in range(4)) > 2


PLAIN = {
    "hermes": (r"<tool_call>\s*(.*?)\s*</tool_call>", lambda found: json.loads(found[1])),
    "mistral-args": (r"\[TOOL_CALLS\](\w+)\[ARGS\](.*?)(?=\[TOOL_CALLS\]|$)", None),
    "kimi-k2": (
        r"<\|tool_call_begin\|>functions\.(\w+):\d+<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>",
        None,
    ),
    "glm": (
        r"<tool_call>(\w+)\n(.*?)</tool_call>",
        re.compile(r"<arg_key>(.*?)</arg_key>\n<arg_value>(.*?)</arg_value>", re.S),
    ),
}
"""A plain reader of whole replies: what is a call, and its object, or its arguments in pairs."""


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_reader_finds_the_same(name):
    pattern, inner = PLAIN[name]
    for seed in range(40):
        made = written.Writer(name, written.random.Random(seed)).reply()
        try:
            plain = []
            for found in re.finditer(pattern, made.written, re.S):
                if callable(inner):
                    value = inner(found)
                    args = value.get("arguments", value.get("parameters"))
                    args = json.loads(args) if isinstance(args, str) else args
                    plain.append((value["name"].removeprefix("functions."), args))
                elif inner is None:
                    plain.append((found[1], json.loads(found[2])))
                else:
                    schema = written.TOOLS[found[1]]
                    pairs = {
                        key: from_text(value, schema["properties"][key], schema)
                        for key, value in inner.findall(found[2])
                    }
                    plain.append((found[1], {key: json.loads(value) for key, value in pairs.items()}))
        except (ValueError, AttributeError):  # a literal of Python, which the plain reader cannot read
            continue
        assert read(name, made.written, written.TOOLS, THINK)[2] == plain


TOOL = {
    "f": {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}, "b": {"type": "boolean"}}}
}
CALL = '{"name": "f", "arguments": {"a": "x"}}'
FORMS = [
    # What models write beside the documented form.
    ("hermes", f"<tool_call>{CALL}{CALL}</tool_call> then", " then", 2),
    ("hermes", f"<tool_call>[{CALL}, {CALL}]</tool_call>", "", 2),
    ("hermes", f"<tool_call>\n{CALL}", "", 1),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x"}</tool_call>', "", 1),
    ("hermes", "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>", "", 1),
    ("hermes", "<tool_call>{'name': 'f', 'arguments': {'a': 'x'}}</tool_call>", "", 1),
    ("hermes", f'<tool_call>{{"type": "function", "function": {CALL}}}</tool_call>', "", 1),
    ("qwen3-coder", "S.\n\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>", "S.", 1),
    ("qwen3-coder", "<tool_call>\n<function=f>\n<parameter=a>\nx\n<parameter=n>\n2\n</parameter>\n</function>", "", 1),
    ("qwen3-coder", f"<tool_call>\n{CALL}\n</tool_call>", "", 1),
    ("llama3", f"Sure: {CALL}\n{CALL}, {CALL}; {CALL}", "Sure: ", 4),
    ("llama3", f"<|python_tag|>{CALL}", "", 1),
    ("llama3", f"[{CALL}, {CALL}]", "", 2),
    ("llama4", "[f(a='x', n=3, b=True), f()]", "", 2),
    ("llama4", "<|python_start|>[f(a=\"x\")]<|python_end|>", "", 1),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": "x"}', "", 1),
    ("mistral-args", f"[TOOL_CALLS][{CALL}]", "", 1),
    ("kimi-k2", '<|tool_call_begin|>f:0<|tool_call_argument_begin|>{"a": "x"}<|tool_call_end|>', "", 1),
    ("minimax-m2", '<minimax:tool_call><invoke name="f"><parameter name="a">x</parameter></invoke>', "", 1),
    ("cohere", f"<|START_RESPONSE|>R<|END_RESPONSE|><|START_ACTION|>[{CALL}]<|END_ACTION|>", "R", 1),
    ("granite", f"<|tool_call|>{CALL}<|/tool_call|>", "", 1),
    ("harmony", ' to=functions.f<|channel|>commentary json<|message|>{"a": "x"}', "", 1),
    ("harmony", '<|channel|>analysis to=f<|message|>{"a": "x"}<|call|><|channel|>final<|message|>T', "T", 1),
    ("harmony", '<|start|>assistant<|message|>T<|end|><|start|>assistant to=functions.f<|message|>{"a": "x"}', "T", 1),
    ("harmony", "<|channel|>commentary to=functions.f <|constrain|>json<|message|><|call|>", "", 1),
    # Text that is no call, unchanged.
    ("hermes", "Use `<tool_call>` tags.", None, 0),
    ("hermes", "<tool_call>not json</tool_call>", None, 0),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"n": [1}}</tool_call>', None, 0),
    ("hermes", '```\n<tool_call>{"name": "example", "arguments": {}}</tool_call>\n```', None, 0),
    ("qwen3-coder", "<function=unknown>\n<parameter=a>\nx\n</parameter>\n</function>", None, 0),
    ("llama3", '{"a": 1} is a dict, and {"name": "f"} too, [f] as well', None, 0),
    ("harmony", "plain < | text", None, 0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "said", "num_calls"), FORMS)
def test_forms_that_models_write(name, text, said, num_calls):
    _, found, calls = read(name, text, TOOL)
    assert (found.strip(), len(calls)) == ((text if said is None else said).strip(), num_calls)
    assert all(each == "f" and args.get("a", "x") == "x" for each, args in calls)


def test_a_call_in_a_thought_is_one_if_the_thought_has_no_end():
    call = f"<tool_call>{CALL}</tool_call>"
    assert read("hermes", f"hm\n{call}", TOOL, THINK, True) == ("hm", "", [("f", {"a": "x"})])
    assert read("hermes", f"hm {call} no\n</think>\n\nT", TOOL, THINK, True) == (f"hm {call} no", "T", [])
    text = f"hm {call}</think>{call}"
    assert read("hermes", text, TOOL, THINK, True) == (f"hm {call}", "", [("f", {"a": "x"})])


def test_a_call_that_ends_with_the_reply_is_closed_unless_its_limit_has_cut_it():
    text = '<tool_call>{"name": "f", "arguments": {"a": "x'
    for cut, wanted in ((False, '{"a": "x"}'), (True, '{"a": "x')):
        reader = Reader(lambda reader: find_format("", "hermes").read(reader, TOOL))
        pieces = [*reader.feed(text), *reader.feed("", True, cut)]
        assert "".join(piece.text for piece in pieces if piece.kind == "arguments") == wanted


OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
TYPED = [
    ("True", {"type": "boolean"}, True), ("FALSE", {"type": "boolean"}, False), ("12", {"type": "string"}, "12"),
    ("12", OPTIONAL, "12"), ("null", OPTIONAL, None), ("None", {"type": "integer", "nullable": True}, None),
    ("12", {"type": ["integer", "string"]}, 12), ("1e3", {"type": "integer"}, 1000), ("x", {"type": "integer"}, "x"),
    ("['a', True]", {"type": "array"}, ["a", True]), ('{"a": "1"}', {"$ref": "#/$defs/o"}, {"a": 1}),
    ("2", {"enum": [1, 2]}, 2), ("2", {"enum": ["1", "2"]}, "2"), ("NaN", {"type": "number"}, "NaN"),
    ("{'a': 'b\nc',}", {"type": "object"}, {"a": "b\nc"}), ("[" * 5000, {"type": "array"}, "[" * 5000),
    ("3", {}, "3"), ("true", {"oneOf": [{"type": "boolean"}, {"type": "number"}]}, True),
    ('["1"]', {"type": "array", "items": {"type": "integer"}}, [1]),
    ('{"x": "1"}', {"type": "object", "additionalProperties": {"type": "integer"}}, {"x": 1}),
]  # fmt: skip
ROOT = {"$defs": {"o": {"type": "object", "properties": {"a": {"type": "integer"}}}}}


@pytest.mark.parametrize(("text", "schema", "wanted"), TYPED)
def test_a_text_is_typed_by_its_schema(text, schema, wanted):
    assert json.loads(from_text(text, schema, ROOT)) == wanted


def test_values_keep_their_digits_and_are_read_where_the_schema_needs_it():
    assert from_value("1.10", {"type": "number"}, {}) == "1.10" and from_value("12", {"type": "string"}, {}) == '"12"'
    assert from_value('"3"', {"type": "integer"}, {}) == "3" and from_value("null", {"type": "string"}, {}) == "null"
    assert kinds({"$ref": "#/a"}, {"a": {"$ref": "#/a"}}) == frozenset(), "a circle admits all"
    with pytest.raises(ValueError, match="JSON"):
        from_value("NaN", {"type": "number"}, {})


UNITS = {
    "harmony": ["<|channel|>", "<|start|>assistant<|channel|>analysis<|message|>"],
    "llama3": ["{", '{"name": "', "[f("],
    "hermes": ["<tool_call>{", '<tool_call>{"', '{"name": "f", "arguments": "'],
    "qwen3-coder": ["<function=", "<tool_call><function=f><parameter=a>"],
    "glm": ["<tool_call>f<arg_key>"],
}


def reading_seconds(name: str, text: str, size: int) -> float:
    """This thread's time for ``text`` in pieces of ``size``, without the collector: the smallest of three."""
    took = []
    for _ in range(3):
        reader = Reader(lambda reader: find_format("", name).read(reader, {"f": ANY}))
        gc.disable()
        begun = time.thread_time()
        for at in range(0, len(text), size):
            reader.feed(text[at : at + size], at + size >= len(text))
        took.append(time.thread_time() - begun)
        gc.enable()
    return min(took)


@pytest.mark.parametrize("size", [1, 1 << 30])
@pytest.mark.parametrize("name", UNITS)
@pytest.mark.slow(first=2)
def test_time_is_linear(name, size):
    """Eight times the text takes no more than twenty times as long: 64 would be quadratic."""
    for unit in UNITS[name]:
        short, long = (unit * (count if size > 1 else count // 4) for count in (500, 4000))
        took = reading_seconds(name, short, size), reading_seconds(name, long, size)
        assert took[1] < 20 * took[0] + 0.02, (unit, took)
