"""Converts conversations to the forms that a chat template supports, which are determined once per template by probes.

Templates differ in the forms of contents and arguments, in the supported roles and their order, and in call ids. A
probe renders a small conversation with random words. If one of them is missing in the prompt, the probe's changes are
tried in order, and the first one with which all words appear is kept.
"""

import itertools
import json
import re
import secrets
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Self

Render = Callable[..., str]  # renders fitted messages, with `tools`; raises an error if the template refuses them
Plain = dict[str, Any]  # a message as clients send it: content is text or a list of parts, arguments are text
BETWEEN = "\n\n"  # separator of the texts of merged messages
_HEADS = ("system", "developer")
_RESULT_ROLES = ("tool", "function", "ipython", "observation")
_SHORT = re.compile(r"[a-zA-Z0-9]{9}")
_ABSENT = "absent"


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The forms of messages and tools that a template supports."""

    parts: frozenset[str] = frozenset()  # roles whose content it takes as a list of parts, and not as text
    lists: frozenset[str] = frozenset()  # roles whose content it takes in either form: the client's
    has_developer: bool = True
    has_system: bool = True  # False: instructions become the beginning of the first user message
    several: bool = True  # False: it takes one message of instructions, the first. All others are joined to that.
    begins_with_user: bool = False
    needs_user: bool = False
    alternates: frozenset[str] = frozenset()  # roles of which two messages in a row become one
    answers_results: bool = False  # a user message does not follow a result: an empty answer comes between them
    as_object: bool = True  # arguments are an object, and not JSON text
    short_ids: bool = False  # ids of calls have 9 letters and digits
    empty: str | None = None  # the content of a message of calls alone: None, "", or `_ABSENT`
    result_role: str = "tool"
    names_results: bool = False  # a result carries the name of its function
    one_call: bool = False  # a message has one call, whose result follows
    calls_alone: bool = False  # a message of calls has no text: that has a message of its own before them
    calls_in_turns: bool = False  # the same, with an empty turn of the user between the two
    thoughts_beside_text: bool = True  # False: a message of calls has a thought or a text, not both
    bare_tools: bool = False  # tools are functions without the wrapper of type "function"
    whole_tools: bool = False  # tools need a description and parameters

    def varied(self) -> Iterator[Self]:
        """This fit, and alternatives for conversations that it does not render completely."""
        yield self
        both = frozenset(("user", "assistant"))
        yield replace(self, several=False)
        yield replace(self, has_system=False)
        yield replace(self, calls_alone=True)
        yield replace(self, calls_in_turns=True)
        yield replace(self, one_call=True)
        yield replace(self, alternates=both)

    def messages(self, given: Iterable[Plain]) -> list[Plain]:
        found = self._with_ids(self._turns(self._instructed(list(given))))
        if self.one_call:
            found = _one_call_each(found)
        return [self._shaped(each) for message in found for each in self._split(message)]

    def tools(self, given: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        empty = {"name": "", "description": "", "parameters": {"type": "object", "properties": {}}}
        full = [{**each, "function": {**empty, **each["function"]}} for each in given] if self.whole_tools else given
        return [each["function"] if self.bare_tools else each for each in full]

    def _instructed(self, given: list[Plain]) -> list[Plain]:
        """Messages with instructions in the form and place that the template supports."""
        if not self.has_developer:
            given = [{**each, "role": "system"} if each["role"] == "developer" else each for each in given]
        heads = [each for each in given if each["role"] in _HEADS]
        if not heads or (self.several and self.has_system):
            return given
        rest = [each for each in given if each["role"] not in _HEADS]
        head = {**heads[0], "content": _joined(each["content"] for each in heads)}
        if self.has_system:
            return [head, *rest]
        first = next((at for at, each in enumerate(rest) if each["role"] == "user"), None)
        if first is None:
            return [{"role": "user", "content": head["content"]}, *rest]
        rest[first] = {**rest[first], "content": _joined((head["content"], rest[first]["content"]))}
        return rest

    def _turns(self, given: Sequence[Plain]) -> list[Plain]:
        """Messages in an order of roles that the template accepts."""
        found: list[Plain] = []
        for message in given:
            role, before = message["role"], found[-1] if found else {"role": ""}
            if role in self.alternates and role == before["role"] and not before.get("tool_calls"):
                texts = (before["content"], message["content"])
                found[-1] = {**before, **message, "content": _joined(each for each in texts if each is not None)}
                if thoughts := [each["reasoning_content"] for each in (before, message) if "reasoning_content" in each]:
                    found[-1]["reasoning_content"] = "\n".join(thoughts)
                continue
            if role == "user" and before["role"] == "tool" and self.answers_results:
                found.append({"role": "assistant", "content": ""})
            found.append(message)
        num_heads = next((at for at, each in enumerate(found) if each["role"] not in _HEADS), len(found))
        begins = num_heads < len(found) and found[num_heads]["role"] == "user"
        if (self.begins_with_user and not begins and num_heads < len(found)) or (
            self.needs_user and all(each["role"] != "user" for each in found)
        ):
            found.insert(num_heads, {"role": "user", "content": ""})
        return found

    def _with_ids(self, given: Sequence[Plain]) -> list[Plain]:
        """Calls and results with ids that the template accepts; a result without an id gets the next open call's."""
        found: list[Plain] = []
        open_calls: dict[str, str] = {}
        for message in given:
            if calls := message.get("tool_calls"):
                calls = [{**each, "id": self._id(each["id"])} for each in calls]
                open_calls |= {each["id"]: each["function"]["name"] for each in calls}
                message = {**message, "tool_calls": calls}
            elif message["role"] == "tool":
                id = message.get("tool_call_id")
                id = next(iter(open_calls), None) if id is None else self._id(id)
                name = open_calls.pop(id or "", None) or message.get("name")
                message = {**message, **({"tool_call_id": id} if id is not None else {})}
                if self.names_results and name is not None:
                    message["name"] = name
            found.append(message)
        return found

    def _id(self, id: str) -> str:
        if not self.short_ids or _SHORT.fullmatch(id):
            return id
        return blake2b(id.encode("utf-8", "replace")).hexdigest()[:9]

    def _split(self, message: Plain) -> Iterator[Plain]:
        """A message, or its text and calls as separate messages if the template does not combine them."""
        if message.get("tool_calls") and message["content"]:
            thinks = "reasoning_content" in message and not self.thoughts_beside_text
            if self.calls_alone or self.calls_in_turns or thinks:
                yield {"role": message["role"], "content": message["content"]}
                if self.calls_in_turns:
                    yield {"role": "user", "content": ""}
                message = {**message, "content": None}
        yield message

    def _shaped(self, message: Plain) -> Plain:
        """A message with its fields in the template's forms."""
        message = dict(message)
        role, content = message["role"], message["content"]
        if content is None and not message.get("tool_calls"):
            content = ""
        if content is None:
            message["content"] = self.empty
            if self.empty == _ABSENT:
                del message["content"]
        elif role in self.parts:
            message["content"] = [{"type": "text", "text": content}] if isinstance(content, str) else content
        elif role not in self.lists:
            message["content"] = text_of(content)
        if role == "tool":
            message["role"] = self.result_role
        if (thought := message.get("reasoning_content")) is not None:
            message["thinking"] = thought  # gpt-oss's name; transformers gives both as well
        if self.as_object and message.get("tool_calls"):
            message["tool_calls"] = [
                {**each, "function": {**each["function"], "arguments": object_of(each["function"]["arguments"])}}
                for each in message["tool_calls"]
            ]
        return message


def text_of(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content or ())


def _joined(contents: Iterable[Any]) -> Any:
    """Contents as one: parts, if all are; else text."""
    given = [each for each in contents if each]
    if given and all(isinstance(each, list) for each in given):
        return [part for each in given for part in each]
    return BETWEEN.join(map(text_of, given))


def object_of(text: str) -> Any:
    """Arguments as an object, if they are one; else unchanged."""
    try:
        value = json.loads(text) if text else {}
        if "\\ud" in text.lower():  # half of a surrogate pair is no text
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _one_call_each(given: Sequence[Plain]) -> list[Plain]:
    """Each call of several in a message of its own, before its result."""
    found: list[Plain] = []
    messages = list(given)
    while messages:
        message = messages.pop(0)
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            found.append(message)
            continue
        num_results = next((at for at, each in enumerate(messages) if each["role"] != "tool"), len(messages))
        results, messages = messages[:num_results], messages[num_results:]
        for number, call in enumerate(calls):
            said = message if not number else {"role": message["role"], "content": None}
            found.append({**said, "tool_calls": [call]})
            found += [each for each in results if each.get("tool_call_id") == call["id"]]
        ids = {call["id"] for call in calls}
        found += [each for each in results if each.get("tool_call_id") not in ids]
    return found


@dataclass(frozen=True)
class _Lesson:
    """A probe: a conversation, words that must be in its prompt, and changes of a fit to try if they are not."""

    messages: Sequence[Plain]
    words: Sequence[str]
    changes: Sequence[Mapping[str, Any]]
    tools: Sequence[Plain] = ()


def learn(render: Render, has_calls: bool = True) -> Fit:
    """Determine the fit of a template; `has_calls` is False if the template does not support calls."""
    salt = secrets.token_hex(4)
    s, s2, s3, u, u2, a, a2, r, t, t2, f, f2, k, v, v2 = (f"q{salt}{at}x" for at in range(15))
    user, user2 = ({"role": "user", "content": each} for each in (u, u2))
    said, said2 = ({"role": "assistant", "content": each} for each in (a, a2))
    heads = [{"role": "system", "content": each} for each in (s, s2, s3)]
    calls = [
        {"id": f"call_{salt * 3}{name}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in ((f, f'{{"{k}": "{v}"}}'), (f2, f'{{"{k}": "{v2}"}}'))
    ]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": each}
        for call, each in zip(calls, (t, t2), strict=True)
    ]  # fmt: skip
    called: Plain = {"role": "assistant", "content": None, "tool_calls": calls[:1]}
    both: Plain = {**called, "tool_calls": calls}
    one = [user, called, results[0]]
    schema = {"type": "object", "properties": {k: {"type": "string", "description": v}}, "required": [k]}
    tool = {"type": "function", "function": {"name": f, "description": t, "parameters": schema}}
    least = {"type": "function", "function": {"name": f}}
    forms = [
        {"as_object": as_object, "empty": empty, "short_ids": ids, "names_results": names, "result_role": role, **parts}
        for role, parts, names, ids, as_object, empty in itertools.product(
            _RESULT_ROLES, ({}, {"parts": {"tool"}}), (False, True), (False, True), (True, False), (None, "", _ABSENT)
        )
    ]
    lessons = [
        _Lesson([user], [u], [{"parts": {"user"}}]),
        _Lesson([user, said, user2], [a], [{"parts": {"assistant"}}]),
        _Lesson([heads[0], user], [s, u], [{"parts": {"system"}}, {"has_system": False}]),
        _Lesson([*heads[:2], user, said, heads[2], user2], [s, s2, s3, u, u2], [{"several": False}]),
        _Lesson([user, user2], [u, u2], [{"alternates": {"user"}}]),
        _Lesson([user, said, said2, user2], [a, a2, u2], [{"alternates": {"assistant"}}]),
        _Lesson([said, user], [a, u], [{"begins_with_user": True}]),
        _Lesson([heads[0]], [s], [{"needs_user": True}]),
        _Lesson(one, [u, f, k, v, t], forms if has_calls else ()),
        _Lesson([*one, user2], [f, v, t, u2], [{"answers_results": True}]),
        _Lesson([user, {**called, "content": a}, results[0], said2, user2], [a, f, v, t, u2], [{"calls_alone": True}]),
        _Lesson(
            [user, {**called, "content": a, "reasoning_content": r}, results[0]], [a, f, v, t],
            [{"thoughts_beside_text": False}],
        ),
        _Lesson([user, both, *results], [f, v, f2, v2, t, t2], [{"one_call": True}]),
        _Lesson([user], [f, t, k, v], [{"bare_tools": True}], [tool]),
        _Lesson([user], [f], [{"whole_tools": True}], [least]),
    ]  # fmt: skip
    # A template supports the role "developer" only if it treats it differently from an invented role.
    texts = [_rendered(render, [{"role": role, "content": s}, user]) for role in ("developer", f)]
    knows = s in texts[0] and texts[0] != texts[1].replace(f, "developer")
    fit = Fit(has_developer=knows)
    if knows:
        developer = {**heads[1], "role": "developer"}
        lessons.insert(4, _Lesson([heads[0], developer, user], [s, s2, u], [{"several": False}]))
    # An object in Python's form, JSON within JSON, a part that is shown as an object.
    spoilt = (f"'{k}'", f'\\"{k}', "'text': '", '"text": "' + u)
    plain = _rendered(render, [user])
    for lesson in lessons:
        for change in ({}, *lesson.changes):
            merged = {
                name: getattr(fit, name) | value if isinstance(value, set) else value for name, value in change.items()
            }
            tried = replace(fit, **merged)
            more = {"tools": tried.tools(lesson.tools)} if lesson.tools else {}
            text = _rendered(render, tried.messages(lesson.messages), **more)
            if not all(word in text for word in lesson.words):
                continue
            if any(mark in text for mark in spoilt) or (
                lesson.messages is one and text.count("None") > plain.count("None")
            ):
                continue  # an object's Python form, JSON within JSON, a part that is shown as an object
            fit = tried
            break
    for role, messages in {"user": [user], "system": [heads[0], user], "assistant": [user, said, user2]}.items():
        parts = [{"type": "text", "text": each} for each in (s3, t2)]
        tried = replace(fit, lists=fit.lists | {role})
        given = [{**each, "content": parts} if each["role"] == role else each for each in messages[:2]] + messages[2:]
        text = _rendered(render, tried.messages(given))
        if s3 in text and t2 in text and f"'{s3}" not in text and f'"{s3}' not in text:
            fit = tried
    return fit


def _rendered(render: Render, messages: Sequence[Plain], **more: Any) -> str:
    """A prompt, "" if the template refuses it."""
    try:
        return render(messages, **more)
    except Exception:  # a template is code
        return ""


def marked(given: Sequence[Plain]) -> tuple[list[Plain], dict[str, tuple[str, str]]]:
    """Messages of the same shape with random words as texts, and the place and text that each word replaces.

    Thoughts are left out: templates drop those of earlier turns.
    """
    salt, found = secrets.token_hex(4), []
    words: dict[str, tuple[str, str]] = {}

    def word(text: str, *place: str | int) -> str:
        if not text.strip():
            return text
        words[made := f"q{salt}{len(words)}x"] = (".".join(map(str, ("messages", *place))), text)
        return made

    for at, message in enumerate(given):
        message, content = dict(message), message["content"]
        if isinstance(content, str):
            message["content"] = word(content, at, "content")
        elif content is not None:
            message["content"] = [
                {**part, "text": word(part["text"], at, "content", number)} for number, part in enumerate(content)
            ]
        if calls := message.get("tool_calls"):
            message["tool_calls"] = []
            for number, call in enumerate(calls):
                text, place = call["function"]["arguments"], (at, "tool_calls", number, "function", "arguments")
                value = object_of(text)
                if isinstance(value, dict):  # one entry shows that they arrive
                    text = json.dumps({name: word(str(each) or name, *place) for name, each in list(value.items())[:1]})
                else:
                    text = word(text, *place)
                message["tool_calls"].append({**call, "function": {**call["function"], "arguments": text}})
        found.append(message)
    return found, words


def shape_of(given: Sequence[Plain]) -> Hashable:
    """The properties of a conversation, apart from its words, on which its fit depends."""
    return tuple(
        (
            message["role"],
            [bool(part["text"].strip()) for part in content].__repr__() if isinstance(content, list)
            else content and bool(content.strip()),
            "reasoning_content" in message,
            "name" in message,
            tuple(call["function"]["arguments"].strip()[:1] for call in message.get("tool_calls") or ()),
        )
        for message in given
        for content in (message["content"],)
    )  # fmt: skip
