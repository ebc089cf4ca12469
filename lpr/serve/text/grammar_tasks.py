"""Compiles clients' grammars: a task of the sandbox process (lpr.serve.sandboxed).

It performs the ranks' operations with a quarter of their stack: a grammar that succeeds here succeeds there.
"""

import contextlib
import json
import random

import llguidance

from lpr.config import first_line
from lpr.core.grammar import matcher
from lpr.protocol import ErrorCode
from lpr.serve.errors import ApiError

WALKS, STEPS = 3, 24  # number of random walks through a new grammar, and their tokens

_tokenizer: llguidance.LLTokenizer | None = None


def prepare(tokenizer: str, vocab_size: int, eos_token_ids: list[int]) -> None:
    """Note the model's tokenizer: a fast tokenizer's JSON."""
    global _tokenizer
    with contextlib.suppress(ValueError):  # the ranks then refuse each grammar with the reason
        _tokenizer = llguidance.LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=eos_token_ids or None)


def compile_grammar(kind: str, text: str) -> str:
    """A grammar in llguidance's JSON form; raises ApiError for one that cannot be used."""
    read = llguidance.LLMatcher
    try:
        if kind == "json_schema":
            grammar = read.grammar_from_json_schema(text)
        elif kind == "regex":
            grammar = read.grammar_from_regex(text)
        else:
            is_gbnf = kind == "grammar" and "::=" in text  # llama.cpp's
            lark = str(llguidance.gbnf_to_lark.gbnf_to_lark(text)) if is_gbnf else text
            grammar = json.dumps({"grammars": [{"lark_grammar": lark}]})
    except ValueError as failure:
        raise _unusable(str(failure)) from failure
    if problem := read.validate_grammar(grammar) or _problem(grammar):
        raise _unusable(problem)
    return str(grammar)


TASKS = {"compile_grammar": compile_grammar}


def _unusable(problem: str) -> ApiError:
    line = first_line(problem) if problem.strip() else "it cannot be read"
    if line == "NoExtensionBias" or line.endswith("schema is false"):  # llguidance's names of this end
        line = "no text satisfies it"
    return ApiError(ErrorCode.BAD_REQUEST, line[:300])


def _problem(grammar: str) -> str:
    """The error of a matcher used as the ranks use it; "" without one."""
    if _tokenizer is None:
        return ""
    fresh = matcher(_tokenizer, grammar)
    dice = random.Random(0)
    for _ in range(WALKS):
        walker, length = fresh.deep_copy(), 0
        while length < STEPS and not walker.is_stopped():
            mask = walker.compute_bitmask()
            if not any(mask) or not walker.consume_token(_pick(mask, dice)):
                break
            length += 1
        if walker.is_error():
            return str(walker.get_error())
        walker.rollback(length)
    return str(fresh.get_error())


def _pick(mask: bytes, dice: random.Random) -> int:
    start = dice.randrange(len(mask))
    at = next(at % len(mask) for at in range(start, start + len(mask)) if mask[at % len(mask)])
    bits = [bit for bit in range(8) if mask[at] >> bit & 1]
    return 8 * at + dice.choice(bits)
