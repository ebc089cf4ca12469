"""Grammars made to be difficult: none that the sandbox lets through ends or holds up a rank.

LPR_FUZZ_SECONDS sets the time that is spent (default 6).
"""

import asyncio
import json
import os
import random
import time
from itertools import pairwise

import pytest

from lpr.serve import limits
from lpr.serve.errors import ApiError
from lpr.serve.sandbox import ExhaustedError, Sandbox, sandbox
from tests.fakes.fake_driver import facts
from tests.fakes.paths import ROOT

SECONDS = float(os.environ.get("LPR_FUZZ_SECONDS", "3"))
SLOWEST_STEP = 0.25
"""Seconds of CPU time that a mask or a token may take."""


def expression(dice, depth):
    """A regular expression with nested repetition, alternatives and large counts."""
    if depth <= 0:
        return dice.choice(("a", "[ab]", ".", "[a-z]", r"\w", r"\d", "(?:foo|fo|f)", "[^x]", " ", "\\u00e9"))
    kind = dice.randrange(6)
    inner = expression(dice, depth - 1)
    if kind == 0:
        return f"({inner})*"
    if kind == 1:
        low = dice.choice((0, 1, 10, 1000))
        return f"({inner}){{{low},{low + dice.choice((0, 1, 100, 100_000))}}}"
    if kind == 2:
        return f"({inner}|{expression(dice, depth - 1)})"
    if kind == 3:
        return f"({inner})?" * dice.choice((1, 5, 200))
    if kind == 4:
        return f".*{inner}.*"
    return inner + expression(dice, depth - 1)


def rules(dice, gbnf):
    """A context-free grammar with chains, recursion, wide alternatives and ambiguity."""
    count = dice.choice((1, 5, 50, 400, 1500))
    is_, names, lines = " ::= " if gbnf else ": ", ["root" if gbnf else "start"], []
    names += [f"r{'-' if gbnf else '_'}{index}" for index in range(count)]
    for index, name in enumerate(names):
        near = [names[min(len(names) - 1, index + 1)], dice.choice(names)]
        parts = []
        for _ in range(dice.choice((1, 1, 2, 3))):
            words = [dice.choice((*near, '"x"', '"ab"', '"x" ' + near[0], f"({near[0]} | {near[1]})", near[0] + "*"))
                     for _ in range(dice.choice((1, 2, 4)))]  # fmt: skip
            parts.append(" ".join(words))
        parts.append(dice.choice(('"y"', "[a-z]+" if gbnf else "/[a-z]+/", '"("' + f" {near[0]} " + '")"')))
        lines.append(name + is_ + " | ".join(parts))
    return "\n".join(lines)


def schema(dice, depth, names):
    """A JSON schema with nesting, references, wide choices and counts."""
    kind = dice.randrange(9) if depth > 0 else dice.randrange(4)
    if kind == 0:
        return {"type": "string", **({"pattern": expression(dice, 2)} if dice.random() < 0.3 else {})}
    if kind == 1:
        return {"type": "integer", "minimum": dice.choice((0, -(10**9))), "maximum": dice.choice((7, 10**15))}
    if kind == 2:
        return {"enum": [f"value {index}" for index in range(dice.choice((1, 10, 2000)))]}
    if kind == 3 and names:
        return {"$ref": f"#/$defs/{dice.choice(names)}"}
    if kind in (3, 4):
        most = dice.choice((1, 10, 100_000))
        return {"type": "array", "items": schema(dice, depth - 1, names), "minItems": most // 2, "maxItems": most}
    if kind in (5, 6):
        count = dice.choice((1, 4, 40))
        properties = {f"p{index}": schema(dice, depth - dice.choice((1, 2, 5)), names) for index in range(count)}
        return {"type": "object", "properties": properties, "required": list(properties)[: dice.randrange(count + 1)]}
    return {dice.choice(("anyOf", "oneOf", "allOf")): [schema(dice, depth - 1, names) for _ in range(3)]}


def difficult(dice):
    """A kind of grammar, and its text."""
    kind = dice.randrange(4)
    if kind == 0:
        return "regex", expression(dice, dice.choice((2, 4, 6)))[: limits.REGEX.most]
    if kind in (1, 2):
        return "grammar", rules(dice, gbnf=kind == 1)
    names = [f"d{index}" for index in range(dice.choice((0, 3, 300)))]
    chained = {name: {"$ref": f"#/$defs/{after}"} for name, after in pairwise(names)}
    made = {name: schema(dice, 2, names) for name in names[-3:]}
    return "json_schema", json.dumps({"$defs": {**chained, **made}, **schema(dice, 4, names)})


def test_what_passes_neither_ends_nor_holds_up_a_rank(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    seed = int(os.environ.get("LPR_FUZZ_SEED", "0"))
    said, found = facts(), {"passed": 0, "refused": 0, "exhausted": 0}

    async def main():
        compiler = sandbox("lpr.serve.text.grammar_tasks", limits.GRAMMAR_TIME, limits.GRAMMAR_MEMORY)
        rank = Sandbox("tests.fakes.sandbox_tasks", 20.0, 2 << 30)
        compiler.prepare(said.tokenizer, said.vocab_size, said.eos_token_ids)
        rank.prepare(said.tokenizer, said.vocab_size)
        end, number = time.monotonic() + SECONDS, seed
        while time.monotonic() < end:
            number += 1
            kind, text = difficult(random.Random(number))
            try:
                grammar = await compiler.run("compile_grammar", kind, text)
            except ApiError as failure:
                assert failure.status == 400, (number, failure)
                found["refused"] += 1
                continue
            except ExhaustedError:
                found["exhausted"] += 1
                continue
            found["passed"] += 1
            try:
                compiling, slowest = await rank.run("follow", grammar, number, 200)
            except ExhaustedError as failure:
                pytest.fail(f"seed {number}, {kind}: it ends a rank: {failure}")
            assert compiling < 2 * limits.GRAMMAR_TIME.most / 1000, (number, kind, compiling)
            assert slowest < SLOWEST_STEP, (number, kind, slowest)
        await compiler.close()
        await rank.close()

    asyncio.run(main())
    print(found)
    assert found["passed"] and found["refused"] + found["exhausted"]
