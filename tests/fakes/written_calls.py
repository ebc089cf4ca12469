"""Replies with calls as models of each family write them, well-formed or damaged, and what must hold of them.

Words are unique, so that none can be lost unseen: each that a reply has whole is in its text, its thoughts, or the
names and arguments of its calls.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any, NamedTuple

from jsonschema import Draft202012Validator

from lpr.serve.text.calls import find_format
from lpr.serve.text.replies import Family, Replies

TOOLS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "exact": {"type": "boolean"},
            "where": {"$ref": "#/$defs/place"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}, "at": {"type": "string"}}}},
    },
    "now": {"type": "object", "properties": {}},
}
BAR, SPACE = "\uff5c", "\u2581"
THINK = ("<think>", "</think>")
_WORD = re.compile(r"w\d+w")


class Reply(NamedTuple):
    """A reply, and what a reader finds in it."""

    written: str
    thought: str
    text: str
    calls: list[tuple[str, dict[str, Any]]]


class Writer:
    """Writes replies of one family at random."""

    def __init__(self, name: str, dice: random.Random) -> None:
        self.name, self.dice, self._count = name, dice, 0

    def word(self) -> str:
        """A word that comes once."""
        self._count += 1
        return f"w{self._count}w"

    def prose(self) -> str:
        """A sentence, with what may look like a call."""
        more = self.dice.choice(["", "", " a < b", " {x: 1}", " `code`", ' {"k": [1]}', " [1, 2]", "\n\nx", " <b>"])
        return f"{self.word()}{more} {self.word()}."

    def arguments(self) -> dict[str, Any]:
        """Arguments of the tool `weather`."""
        odd = self.dice.choice(["", " {", ' "q"', "\nline", "\ttab", " \\d", " \u00e9\U0001f600", " <b>", "' x", " 12"])
        made = {
            "city": self.word() + odd, "days": self.dice.randrange(-5, 99), "exact": self.dice.random() < 0.5,
            "note": self.dice.choice([None, "12", self.word()]), "where": {"x": 1.5, "at": self.word()},
            "tags": [self.word() for _ in range(self.dice.randrange(3))],
        }  # fmt: skip
        return {key: made[key] for key in self.dice.sample(list(made), self.dice.randrange(1, len(made) + 1))}

    def reply(self) -> Reply:
        """A well-formed reply."""
        calls = [
            ("now", {}) if self.dice.random() < 0.2 else ("weather", self.arguments())
            for _ in range(self.dice.randrange(4))
        ]
        thought = self.prose().replace("`", "") if self.dice.random() < 0.3 and self.name != "harmony" else ""
        text = self.prose() if self.dice.random() < 0.7 or not calls else ""
        begin = f"<think>\n{thought}\n</think>\n\n" if thought else ""
        return Reply(begin + text + (self.calls(calls) if calls else ""), thought, text, calls)

    def calls(self, calls: list[tuple[str, dict[str, Any]]]) -> str:
        """Calls as the family writes them."""
        name, gap = self.name, self.dice.choice(["\n", "", " "])
        if name == "harmony":
            return "".join(
                f"<|end|><|start|>assistant<|channel|>commentary to=functions.{each} <|constrain|>json"
                f"<|message|>{self.json(args)}<|call|>"
                if self.dice.random() < 0.5
                else f"<|end|><|start|>assistant to=functions.{each}<|channel|>commentary json"
                f"<|message|>{self.json(args)}<|call|>"
                for each, args in calls
            )
        if name == "hermes":
            return gap.join(f"\n<tool_call>{gap}{self.object(*each)}{gap}</tool_call>" for each in calls)
        if name in ("mistral", "granite", "cohere"):
            begin, end = {"mistral": ("[TOOL_CALLS]", ""), "granite": ("<|tool_call|>", ""),
                          "cohere": ("<|START_ACTION|>", "<|END_ACTION|>")}[name]  # fmt: skip
            return begin + gap + "[" + f",{gap}".join(self.object(*each) for each in calls) + "]" + end
        if name.startswith("llama"):
            separator = self.dice.choice(["; ", "\n", ", ", ";"])
            return "\n" + separator.join(self.object(*each) for each in calls)
        if name == "mistral-args":
            return "".join(f"[TOOL_CALLS]{each}[ARGS]{self.json(args)}" for each, args in calls)
        if name == "kimi-k2":
            inner = "".join(
                f"<|tool_call_begin|>functions.{each}:{index}<|tool_call_argument_begin|>{self.json(args)}<|tool_call_end|>"
                for index, (each, args) in enumerate(calls)
            )
            return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"
        if name in ("deepseek-v3", "deepseek-v3.1"):
            call, end, sep = (
                f"<{BAR}tool{SPACE}{word}{BAR}>" for word in (f"call{SPACE}begin", f"call{SPACE}end", "sep")
            )
            inner = "\n".join(
                f"{call}function{sep}{each}\n```json\n{self.json(args)}\n```{end}"
                if name == "deepseek-v3"
                else f"{call}{each}{sep}{self.json(args)}{end}"
                for each, args in calls
            )
            return f"<{BAR}tool{SPACE}calls{SPACE}begin{BAR}>{inner}<{BAR}tool{SPACE}calls{SPACE}end{BAR}>"
        if name == "glm":
            return "\n".join(f"\n<tool_call>{each}\n{self.pairs(args)}</tool_call>" for each, args in calls)
        if name == "qwen3-coder":
            inner = "".join(f"<function={each}>\n{self.pairs(args)}</function>\n" for each, args in calls)
            if self.dice.random() < 0.3:  # several in one wrapper, or without its beginning
                return self.dice.choice(["\n<tool_call>\n", "\n"]) + inner + "</tool_call>"
            return "\n".join(
                f"\n<tool_call>\n<function={each}>\n{self.pairs(args)}</function>\n</tool_call>" for each, args in calls
            )
        mark = "" if name == "minimax-m2" else f"{BAR}DSML{BAR}"
        around = "minimax:tool_call" if name == "minimax-m2" else f"{mark}function_calls"
        inner = "".join(f'<{mark}invoke name="{each}">\n{self.pairs(args)}</{mark}invoke>\n' for each, args in calls)
        return f"\n<{around}>\n{inner}</{around}>"

    def pairs(self, arguments: dict[str, Any]) -> str:
        """Arguments in tags."""
        parts = []
        for key, value in arguments.items():
            if isinstance(value, str):
                text = value
            elif self.dice.random() < 0.5:
                text = json.dumps(value, ensure_ascii=False)
            else:
                text = repr(value)
            parts.append({
                "glm": f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n",
                "qwen3-coder": f"<parameter={key}>\n{text}\n</parameter>\n",
                "minimax-m2": f'<parameter name="{key}">{text}</parameter>\n',
                "deepseek-v3.2": f'<{BAR}DSML{BAR}parameter name="{key}" '
                f'string="{str(isinstance(value, str)).lower()}">'
                f"{text}</{BAR}DSML{BAR}parameter>\n",
            }[self.name])  # fmt: skip
        return "".join(parts)

    def object(self, name: str, arguments: dict[str, Any]) -> str:
        """An object with a name and arguments."""
        names, keys = ("tool_name",) if self.name == "cohere" else ("name",), ("arguments", "parameters")
        written = self.json(arguments)
        if self.dice.random() < 0.1:
            written = json.dumps(written)
        return (
            f'{{"{names[0]}": "{self.dice.choice(["", "functions."])}{name}", "{self.dice.choice(keys)}": {written}}}'
        )

    def json(self, arguments: dict[str, Any]) -> str:
        """Arguments as JSON, as careless JSON or as a literal of Python."""
        kind = self.dice.randrange(4)
        if kind == 0:
            return re.sub(r"(?<!\\)\\([nt])", lambda found: {"n": "\n", "t": "\t"}[found[1]], json.dumps(arguments))
        if kind == 1:
            return repr(arguments)
        return json.dumps(arguments, ensure_ascii=kind == 2, indent=self.dice.choice([None, 2]))

    def damaged(self, text: str) -> str:
        """The text with something missing, doubled, nested or put in."""
        marks = re.findall(r"</?[^\s<>]+[^<>]*>|\[[A-Z_]+\]|[{}\"\[\],:]", text) or [" "]
        for _ in range(self.dice.randrange(1, 3)):
            at, mark = self.dice.randrange(len(text) + 1), self.dice.choice(marks)
            kind = self.dice.randrange(7)
            if kind == 0:
                text = text[:at]
            elif kind == 1:
                text = text.replace(mark, "", 1)
            elif kind == 2:
                text = text.replace(mark, mark + mark, 1)
            elif kind == 3:
                text = text[:at] + mark + text[at:]
            elif kind == 4:
                text = text[:at] + text[at // 2 : at] + text[at:]
            elif kind == 5:
                text = f"{self.word()}\n```\n{text}\n```\n{self.word()}"
            else:
                text = (
                    text[:at]
                    + self.dice.choice(["\n", " ", "'", "\\", "None", " w0w ", "<think>", "</think>"])
                    + text[at:]
                )
        return text


def replies(name: str) -> Replies:
    """How replies of a family are read, with TOOLS."""
    format = find_format("", name)
    assert format is not None
    return Replies(family=Family(format, format.thoughts or THINK), tools=TOOLS)


def read(how: Replies, text: str, sizes: list[int]) -> tuple[str, str, list[tuple[str, str]]]:
    """The thought, the text and the calls of a reply that comes in pieces of these sizes."""
    reader, at, thought, said, calls = how.reader(), 0, "", "", list[tuple[str, str]]()
    cuts = []
    for size in sizes:
        cuts.append(text[at : at + size])
        at += size
    for number, cut in enumerate([*cuts, text[at:]]):
        for piece in reader.feed(cut, number == len(cuts)):
            if piece.kind == "call":
                calls.append((piece.text, ""))
            elif piece.kind == "arguments":
                calls[piece.call] = (calls[piece.call][0], calls[piece.call][1] + piece.text)
            elif piece.kind == "thought":
                thought += piece.text
            else:
                said += piece.text
    return thought, said, calls


def check(name: str, seed: int, all_cuts: bool = False) -> int:
    """Read a reply of a seed, well-formed and damaged, in many cuts; returns the calls that were found."""
    dice = random.Random(f"{name} {seed}")
    writer, how = Writer(name, dice), replies(name)
    made = writer.reply()
    if name == "harmony":
        made = made._replace(written="<|channel|>final<|message|>" + made.written)
    thought, said, calls = read(how, made.written, [])
    assert (thought, said.strip()) == (made.thought, made.text.strip()), (seed, made, said)
    assert [(each, json.loads(args)) for each, args in calls] == made.calls, (seed, made, calls)
    num_found = 0
    for text in (made.written, writer.damaged(made.written), writer.damaged(made.written)):
        whole = read(how, text, [])
        size = len(text)
        cuts = [[1] * size, [3] * size, *([dice.randrange(1, 12) for _ in text] for _ in range(2))]
        for sizes in [*cuts, *([[at] for at in range(size)] if all_cuts else [[dice.randrange(size + 1)]])]:
            assert read(how, text, sizes) == whole, (seed, text, sizes[:1], whole)
        num_found += len(whole[2])
        shown = [whole[0], whole[1]]
        for each, args in whole[2]:
            value = json.loads(args)
            assert isinstance(value, dict), (seed, text, args)
            shown += [each, args, json.dumps(value, ensure_ascii=False)]
            errors = [error for error in Draft202012Validator(TOOLS.get(each, {})).iter_errors(value)]
            assert not errors or text != made.written, (seed, text, errors)
        lost = set(_WORD.findall(text)) - set(_WORD.findall("\n".join(shown)))
        assert not lost, (seed, lost, text, whole)
    return num_found
