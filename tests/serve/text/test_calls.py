"""Calls of tools as each family writes them: read whole and in any pieces, and held to their schemas by a grammar."""

import json
import random
from functools import cache

import llguidance
import pytest
from tokenizers import AddedToken, Tokenizer

from lpr.serve.text.call_grammar import CallGrammar
from lpr.serve.text.calls import FORMATS, find_format
from lpr.serve.text.replies import Family, Replies
from lpr.serve.text.tokens import Tokens
from tests.fakes.fake_driver import tokenizer_json

FORMATS_BY_NAME = {each.name: each for each in FORMATS}
TOOLS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "a ::= b"},
            "days": {"type": "integer"},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "where": {"type": "object", "properties": {"x": {"type": "number"}}, "additionalProperties": False},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}},
}
ARGUMENTS = {"city": 'S\u00e3o "P"\n<b>{x}', "days": 3, "where": {"x": 1.5}}
BAR = "\uff5c"
DSML = f"{BAR}DSML{BAR}"


def calls(name):
    """What a model of this family writes for two calls, in the words of its documentation, with text before."""
    args = json.dumps(ARGUMENTS, ensure_ascii=False)
    deepseek = {
        word: f"<{BAR}{word.replace(' ', chr(0x2581))}{BAR}>"
        for word in ("tool calls begin", "tool calls end", "tool call begin", "tool call end", "tool sep")
    }
    begin, end, call, stop, sep = deepseek.values()
    return {
        "hermes": f'Ok.\n<tool_call>\n{{"name": "weather", "arguments": {args}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "qwen3-coder": "Ok.\n<tool_call>\n<function=weather>\n<parameter=city>\n" + ARGUMENTS["city"] + "\n</parameter>"
        '\n<parameter=days>\n3\n</parameter>\n<parameter=where>\n{"x": 1.5}\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "glm": "Ok.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>" + ARGUMENTS["city"] + "</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>where</arg_key>\n"
        '<arg_value>{"x": 1.5}</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>',
        "kimi-k2": "Ok.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        f"<|tool_call_argument_begin|>{args}"
        "<|tool_call_end|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "minimax-m2": 'Ok.\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">'
        + ARGUMENTS["city"]
        + '</parameter>\n<parameter name="days">3</parameter>\n<parameter name="where">{"x": 1.5}</parameter>\n'
        "</invoke>\n"
        '<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        "deepseek-v3.2": f'Ok.\n\n<{DSML}function_calls>\n<{DSML}invoke name="weather">\n'
        f'<{DSML}parameter name="city" string="true">{ARGUMENTS["city"]}</{DSML}parameter>\n'
        f'<{DSML}parameter name="days" string="false">3</{DSML}parameter>\n'
        f'<{DSML}parameter name="where" string="false">{{"x": 1.5}}</{DSML}parameter>\n</{DSML}invoke>\n'
        f'<{DSML}invoke name="now">\n</{DSML}invoke>\n</{DSML}function_calls>',
        "cohere": f'Ok.<|START_ACTION|>[{{"tool_call_id": "0", "tool_name": "weather", "parameters": {args}}}, '
        '{"tool_call_id": "0", "tool_name": "now", "parameters": {}}]<|END_ACTION|>',
        "deepseek-v3": f"Ok.{begin}{call}function{sep}weather\n```json\n{args}\n```{stop}\n"
        f"{call}function{sep}now\n```json\n{{}}\n```{stop}{end}",
        "deepseek-v3.1": f"Ok.{begin}{call}weather{sep}{args}{stop}{call}now{sep}{{}}{stop}{end}",
        "mistral": f'Ok.[TOOL_CALLS] [{{"name": "weather", "arguments": {args}}}, '
        '{"name": "now", "arguments": {}}]',
        "mistral-args": f"Ok.[TOOL_CALLS]weather[ARGS]{args}[TOOL_CALLS]now[ARGS]{{}}",
        "granite": f'Ok.<|tool_call|>[{{"arguments": {args}, "name": "weather"}}, '
        '{"name": "now", "arguments": {}}]',
        "llama3": f'{{"name": "weather", "parameters": {args}}}; {{"name": "now", "parameters": {{}}}}',
        "llama4": f'{{"name": "weather", "parameters": {args}}}; {{"name": "now", "parameters": {{}}}}',
        "harmony": "<|channel|>commentary<|message|>Ok.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.weather <|constrain|>json<|message|>{args}<|call|><|start|>assistant to=functions.now"
        "<|channel|>commentary json<|message|>{}<|call|>",
    }[name]


def family(name, thoughts=None):
    format = find_format("", name)
    return Family(format, thoughts or format.thoughts)


def read(replies, text, dice=None):
    """The thought, the text and the calls of a reply, fed whole or in random pieces."""
    reader, pieces, at = replies.reader(), [], 0
    while dice is not None and at < len(text):
        size = dice.randrange(1, 9)
        pieces += reader.feed(text[at : at + size])
        at += size
    pieces += reader.feed(text if dice is None else "", True)
    thought, said, found = "", "", []
    for piece in pieces:
        if piece.kind == "call":
            found.append([piece.text, ""])
            assert piece.call == len(found) - 1
        elif piece.kind == "arguments":
            found[piece.call][1] += piece.text
        elif piece.kind == "thought":
            thought += piece.text
        else:
            said += piece.text
    return thought, said, found


@pytest.mark.parametrize("name", [each.name for each in FORMATS])
def test_calls_are_read_however_the_text_is_cut(name):
    text = calls(name)
    replies = Replies(family=family(name), tools=TOOLS)
    thought, said, found = whole = read(replies, text)
    assert (thought, said) == ("", "" if name.startswith("llama") else "Ok.")
    assert [each[0] for each in found] == ["weather", "now"]
    assert [json.loads(each[1]) for each in found] == [ARGUMENTS, {}]
    dice = random.Random(0)
    for _ in range(40):
        assert read(replies, text, dice) == whole
    one = read(Replies(family=family(name), tools=TOOLS, several=False), text)
    assert one == (thought, said, found[:1])


@pytest.mark.parametrize("name", [each.name for each in FORMATS])
def test_arguments_stream(name):
    """Half of a call's text gives a part of its arguments."""
    text = calls(name)
    reader = Replies(family=family(name), tools=TOOLS).reader()
    pieces = reader.feed(text[: text.index("<b>") + 2])
    assert [piece.text for piece in pieces if piece.kind == "call"] in (["weather"], [])
    streamed = "".join(piece.text for piece in pieces if piece.kind == "arguments")
    assert streamed.endswith("<b") == (name != "granite"), "Granite may write the name last"


@pytest.mark.parametrize("name", [each.name for each in FORMATS])
def test_what_is_no_call_is_text(name):
    replies = Replies(family=family(name), tools=TOOLS)
    dice = random.Random(1)
    for text in (
        "",
        "plain",
        'a < b, {"x": [1]}',
        '{"name": "nobody", "parameters": {}}',
        '{"name": "weather"}',
        "{oh",
    ):
        if name != "harmony":
            assert read(replies, text) == ("", text, []) == read(replies, text, dice)
    if name in ("hermes", "granite", "mistral"):
        for text in ("<tool_call>\n{1}", "[TOOL_CALLS][", "<|tool_call|>[{]"):
            assert read(replies, text) == ("", text, []) == read(replies, text, dice)
    for cut in range(len(text := calls(name))):  # at no place an error
        read(replies, text[:cut])
        read(replies, text[cut:])


def test_thoughts_come_apart():
    think = ("<think>", "</think>")
    for begun, text in ((False, "<think>\nhm </thin\n</think>\n\nYes."), (True, "hm </thin\n</think>\n\nYes.")):
        replies = Replies(family=Family(None, think), begun=begun)
        for dice in (None, random.Random(2), random.Random(3)):
            assert read(replies, text, dice) == ("hm </thin", "Yes.", [])
    assert read(Replies(family=Family(None, think)), " <b> <think>") == ("", " <b> <think>", [])
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    harmony = family("harmony")
    for dice in (None, random.Random(4)):
        assert read(Replies(family=harmony), text, dice) == ("hm", "Yes.", [])


@cache
def vocabulary(*marks):
    """The bundled tokenizer with these marks as tokens."""
    tokenizer = Tokenizer.from_str(tokenizer_json())
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    return Tokens(tokenizer.to_str()), tokenizer


@cache
def of_grammars(tokenizer):
    """As the compiler of grammars has it."""
    return llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=tokenizer.get_vocab_size(), eos_token=[0])


MARKS = {
    "hermes": ("<tool_call>", "</tool_call>", "<think>", "</think>"),
    "qwen3-coder": ("<tool_call>", "</tool_call>"),
    "glm": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "mistral": ("[TOOL_CALLS]",),
    "mistral-args": ("[TOOL_CALLS]", "[ARGS]"),
    "granite": ("<|tool_call|>",),
    "harmony": ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>", "<|constrain|>"),
}


def accepts(grammar, tokenizer, text):
    matcher = llguidance.LLMatcher(
        of_grammars(tokenizer), json.dumps({"grammars": [{"lark_grammar": grammar}]}), log_level=0
    )
    assert not matcher.is_error(), matcher.get_error() + grammar
    ids = tokenizer.encode(text).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("name", [each.name for each in FORMATS])
@pytest.mark.slow(first=10)
def test_a_grammar_takes_what_the_family_writes_and_nothing_else(name, has_tokens):
    tokens, tokenizer = vocabulary(*(MARKS.get(name, ()) if has_tokens else ()))
    text = calls(name)
    begin = next(at for at in range(len(text)) if not text[at:].startswith(("Ok.", "k.", ".", "\n")))
    text = (
        text[begin:]
        .replace('{"arguments": ', '{"name": "weather", "arguments": ')
        .replace('}, "name": "weather"}', "}}")
    )
    if name == "harmony":  # which has one call in a reply
        text = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + json.dumps(
            ARGUMENTS, ensure_ascii=False
        )
    required = Replies(family=family(name), tools=TOOLS, choice="required").grammar(tokens)
    assert accepts(required, tokenizer, text)
    assert not accepts(required, tokenizer, text.replace("1.5", " " * 20 + "1.5")), "white space without an end"
    for wrong in (
        "", "Ok.", text.replace("weather", "whether"), text.replace("days", "daze"), text.replace("1.5", '"1.5"'),
        text.replace("days", "unit").replace("3", "K"), text.split("where")[0],
    ):  # fmt: skip
        assert not accepts(required, tokenizer, wrong), wrong
    single = Replies(family=family(name), tools=TOOLS, choice="required", several=False).grammar(tokens)
    assert accepts(single, tokenizer, text) == (name == "harmony")
    strict = Replies(family=family(name), tools=TOOLS, is_strict=True).grammar(tokens)
    assert accepts(strict, tokenizer, FORMATS_BY_NAME[name].text + "I know it.") and accepts(strict, tokenizer, text)
    assert not accepts(strict, tokenizer, text.replace("1.5", '"1.5"'))
    named = Replies(family=family(name), tools={"now": {}}, choice="required").grammar(tokens)
    assert not accepts(named, tokenizer, text)


def test_a_grammar_lets_the_model_think_first():
    tokens, tokenizer = vocabulary(*MARKS["hermes"])
    thinking = Replies(family=family("hermes", ("<think>", "</think>")), tools=TOOLS, choice="required")
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert accepts(thinking.grammar(tokens), tokenizer, "<think>hm</think>\n\n" + call)
    assert accepts(thinking.grammar(tokens), tokenizer, call)
    begun = Replies(family=thinking.family, begun=True)
    answer = begun.grammar(tokens, {"type": "integer"})
    assert accepts(answer, tokenizer, "hm</think>\n\n7") and not accepts(answer, tokenizer, "7")
    assert CallGrammar(tokens.added).written("x") == "start: x\n"
    either = Replies(family=family("hermes"), tools=TOOLS).grammar(tokens, {"type": "integer"})
    assert accepts(either, tokenizer, "7") and accepts(either, tokenizer, call)


TEMPLATES = {
    "hermes": "{%- if tools %}<tools>{{ tool | tojson }}</tools> <tool_call></tool_call>{% endif %}",
    "qwen3-coder": "{% if tools %}<tool_call><function=f><parameter=p>{% endif %}",
    "glm": "{% if tools %}<tool_call><arg_key>{% endif %}<arg_value>",
    "llama3": "{% if tools is not none %}<|start_header_id|>{{ '\"parameters\": ' }}<|python_tag|>{% endif %}",
    "mistral": "{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]",
    "mistral-args": "{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]{{ name }}[ARGS]",
    "granite": "{% if tools %}<|tool_call|>{% endif %}",
    "harmony": "{% if tools %}namespace functions{% endif %}<|channel|>analysis<|message|>",
}


def test_a_template_tells_the_family():
    for name, template in TEMPLATES.items():
        assert find_format(template).name == name
    assert find_format("<tool_call>") is None and find_format("{{ tools }}") is None
    assert Family.of("{% if tools %}<tool_call>{% endif %}</think>").thoughts == ("<think>", "</think>")
    assert Family.of(TEMPLATES["hermes"], "none").format is None
    assert all(each.source for each in FORMATS)


@pytest.mark.parametrize("name", ["qwen3-coder", "glm", "hermes"])
def test_a_schema_that_is_none_ends_no_service(name):
    tokens, _ = vocabulary()
    for wrong in ({"properties": 5}, {"required": 5}, {"properties": {"a": 5, "b": {"enum": 5}, "c": {"const": None}}}):
        for tools in ({"now": wrong}, {"now": {"type": "object", **wrong}}):
            replies = Replies(family=family(name), tools=tools, choice="required")
            assert "now" in replies.grammar(tokens)
            assert [each[0] for each in read(replies, calls(name))[2]] == ["weather", "now"]


def test_special_tokens_are_shown_where_they_mark_calls():
    plain, tokenizer = vocabulary(*MARKS["mistral-args"])
    tokenizer = Tokenizer.from_str(tokenizer_json(MARKS["mistral-args"]))
    special = Tokens(tokenizer.to_str())
    replies = Replies(family=family("mistral-args"), tools=TOOLS)
    assert replies.shows_special(special) and not replies.shows_special(plain)
    assert not Replies(family=family("mistral-args")).shows_special(special), "without tools a text is as ever"
    digits = "0123456789abcdef" * 2
    assert len(replies.call_id(digits)) == 9
    assert Replies(family=family("hermes")).call_id(digits) == "call_" + digits[:24]
