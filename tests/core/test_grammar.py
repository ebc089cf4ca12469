"""Bounds in the JSON schemas of grammars."""

import json
import time

import llguidance
import pytest
from tokenizers import Tokenizer

from lpr.core.grammar import matcher
from tests.fakes.fake_driver import tokenizer_json

NEST = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_str(tokenizer_json())


def accepted(tokenizer, grammar, text):
    """How many tokens of a text a grammar takes, of how many; the error of a grammar that is none."""
    known = llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=tokenizer.get_vocab_size(), eos_token=[0])
    found = matcher(known, grammar)
    if found.is_error():
        return found.get_error()
    ids = tokenizer.encode(text).ids
    return found.try_consume_tokens(ids) == len(ids)


def of_schema(schema):
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))


@pytest.mark.parametrize("schema", [{"type": "object"}, True, {}, {"type": "object", "properties": {"a": {}}}])
def test_white_space_is_bounded(tokenizer, schema):
    lark = json.dumps({"grammars": [{"lark_grammar": f"start: r\nr: %json {json.dumps(schema)}"}]})
    for grammar in (of_schema(schema), lark) if schema is not True else (of_schema(schema),):
        assert accepted(tokenizer, grammar, '{\n    "a": 1}') is True
        assert accepted(tokenizer, grammar, '{"a":' + " " * 14 + "1}") is False
        assert accepted(tokenizer, grammar, '{\n\n"a": 1}') is False


def test_a_schema_within_itself_without_an_end_admits_nothing(tokenizer):
    assert "nsatisfiable" in accepted(tokenizer, of_schema({"$defs": {"n": NEST}, "$ref": "#/$defs/n"}), "{")
    optional = {"$defs": {"n": NEST}, "type": "object", "properties": {"a": {"$ref": "#/$defs/n"}, "b": {}}}
    grammar = of_schema({**optional, "additionalProperties": False})
    assert accepted(tokenizer, grammar, '{"b": 1}') is True and accepted(tokenizer, grammar, '{"a": {"n"') is False
    ends = {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}
    grammar = of_schema({"$defs": {"n": {**NEST, "properties": {"n": ends}}}, "$ref": "#/$defs/n"})
    assert accepted(tokenizer, grammar, '{"n": {"n": null}}') is True


def test_long_chains_of_references_take_linear_time(tokenizer):
    chain = {f"d{index}": {"$ref": f"#/$defs/d{index + 1}"} for index in range(300)} | {"d300": {"type": "integer"}}
    begun = time.process_time()
    assert accepted(tokenizer, of_schema({"$defs": chain, "$ref": "#/$defs/d0"}), "7") is True
    assert time.process_time() - begun < 2
