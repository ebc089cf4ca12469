"""Clients' grammars, each compiled once in a sandbox process, so that none can crash or block the front."""

import asyncio
import json
import re
from collections import OrderedDict
from collections.abc import Mapping
from importlib.util import find_spec
from itertools import islice
from typing import Any, NamedTuple

from lpr.protocol import ErrorCode
from lpr.serve import limits
from lpr.serve.bodies.completions import ResponseFormat
from lpr.serve.errors import ApiError, bad
from lpr.serve.sandbox import ExhaustedError, Sandbox

MOST_KEPT = 256  # most grammars with cached verdicts
MOST_BLAMED = 32  # most tools that are tested separately if the joint grammar is refused
_RULE = re.compile(r"^[ \t]*\??[\w.-]+[ \t]*(?:::=|:)", re.MULTILINE)
_PARAMS = {"json_schema": "json_schema.schema", "regex": "regex", "grammar": "grammar"}


class _Verdict(NamedTuple):
    grammar: str
    problem: str  # why the grammar is refused; "" if it is not


class Grammars:
    """Compiles grammars, and remembers the results by content."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self._within = (limits.GRAMMAR_TIME.most / 1000, limits.GRAMMAR_MEMORY.most << 20)
        self._known: OrderedDict[tuple[str, str], _Verdict] = OrderedDict()
        self._running: dict[tuple[str, str], asyncio.Task[_Verdict]] = {}
        self._num_waiting: dict[tuple[str, str], int] = {}

    @property
    def is_installed(self) -> bool:
        """True if llguidance is, without which every grammar is refused."""
        return find_spec("llguidance") is not None

    async def compiled(self, wanted: ResponseFormat, key: str = "") -> str:
        """The grammar of a text in llguidance's JSON form; raises ApiError if it, or llguidance, cannot be used."""
        kind, text = wanted.type, wanted.regex or wanted.grammar or ""
        if wanted.text_schema is not None:
            kind, text = "json_schema", json.dumps(wanted.text_schema, separators=(",", ":"))
        return await self._checked("response_format." + _PARAMS.get(wanted.type, "type"), kind, text, key)

    async def held(self, lark: str, schemas: Mapping[str, Any], key: str = "") -> str:
        """As `compiled`, for lpr's grammar of calls of tools with these `schemas`; the ApiError names a faulty one."""
        try:
            return await self._checked("tools", "lark", lark, key)
        except ApiError as failure:
            if failure.code == ErrorCode.BAD_REQUEST:
                for name, schema in islice(schemas.items(), MOST_BLAMED):
                    verdict = await self._verdict("json_schema", json.dumps(schema or {"type": "object"}), key)
                    if verdict.problem:
                        raise bad("tools", f"tools: {name}: {verdict.problem}") from failure
            raise

    async def _checked(self, param: str, kind: str, text: str, client: str) -> str:
        if not self.is_installed:
            name = param.partition(".")[0]
            message = f"{name} needs the package llguidance: pip install 'lpr[grammar]'"
            raise bad(name, message, ErrorCode.NOT_INSTALLED)
        verdict = await self._verdict(kind, text, client)
        if verdict.problem:
            raise bad(param, f"{param}: {verdict.problem}")
        return verdict.grammar

    async def _verdict(self, kind: str, text: str, client: str) -> _Verdict:
        """The verdict on a grammar; concurrent requests for the same grammar share one task."""
        if problem := _too_large(kind, text):
            return _Verdict("", problem)
        key = (kind, text)
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        if key not in self._running:
            self._running[key] = asyncio.create_task(self._compile(kind, text, client))
        task = self._running[key]
        self._num_waiting[key] = self._num_waiting.get(key, 0) + 1
        try:
            return await asyncio.shield(task)
        finally:
            self._num_waiting[key] -= 1
            if not self._num_waiting[key]:  # all clients have gone, or have their answer
                task.cancel()
                del self._num_waiting[key]
                self._running.pop(key, None)

    async def _compile(self, kind: str, text: str, client: str) -> _Verdict:
        try:
            compiling = self.sandbox.run("compile_grammar", kind, text, key=client, size=len(text), within=self._within)
            verdict = _Verdict(await compiling, "")
        except ExhaustedError as failure:
            verdict = _Verdict("", f"it needs {failure}")
        except ApiError as failure:
            if failure.code != ErrorCode.BAD_REQUEST:
                raise
            verdict = _Verdict("", failure.message)
        self._known[kind, text] = verdict
        if len(self._known) > MOST_KEPT:
            self._known.popitem(last=False)
        return verdict


def _too_large(kind: str, text: str) -> str:
    """Why a text is refused by its size; "" if it is not."""
    if kind != "regex" and len(text) > limits.GRAMMAR.most:
        return f"it is longer than {limits.GRAMMAR.most} characters"
    if kind in ("json_schema", "lark") and text.count('"$ref"') > limits.REFERENCES.most:
        return f"it has more than {limits.REFERENCES.most} references"
    if kind in ("grammar", "lark") and len(_RULE.findall(text)) > limits.RULES.most:
        return f"it has more than {limits.RULES.most} rules"
    return ""
