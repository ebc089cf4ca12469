"""Prompts and completions as JSON Lines: invalid lines are reported, finished lines are never lost."""

import codecs
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import takewhile
from pathlib import Path
from typing import Any, Self

from lpr.config import InputError, SamplingParams
from lpr.files import append_whole, start_lines

SPARE = 65536  # free disk space in bytes required when the output is opened
_SAMPLING_FIELDS = [each.name for each in fields(SamplingParams)]
_RENAMED = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
"""OpenAI's and vLLM's names of fields of SamplingParams."""
_NEUTRAL = {
    "messages": [], "n": 1, "best_of": 1, "echo": False, "suffix": "", "stream": False, "tools": [],
    "response_format": {"type": "text"},
}  # fmt: skip
"""Unsupported fields of OpenAI's API that change the output, with their neutral value."""
_BATCH_URL = "/v1/completions"


@dataclass
class PromptLine:
    """One line of a prompts file: a prompt, or an error."""

    number: int  # from 1
    prompt: str = ""
    extra: dict[str, Any] = field(default_factory=dict)  # the line's other fields, which its output line keeps
    sampling: dict[str, Any] = field(default_factory=dict)
    """The SamplingParams fields among `extra`; they override the command's for this line."""
    model: str | None = None  # the model that the line names, which may be an adapter
    prediction: str | list[int] | None = None  # text or token ids that the output is likely to repeat in large part
    error: str | None = None


def read_prompts(path: Path) -> list[PromptLine]:
    """The lines of a JSONL file with a string `prompt` each; blank lines are skipped.

    A bad line is returned with its error, so that the others can be completed. Raises InputError if the file cannot be
    read or is empty.
    """
    try:
        data = path.read_bytes()
    except OSError as failure:
        raise InputError(f"cannot read prompts from {path}: {failure.strerror or failure}") from failure
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # Windows' shells write such files
        data = data.decode("utf-16", "replace").encode()
    lines = [_parse(number, raw) for number, raw in enumerate(data.split(b"\n"), 1) if raw.strip()]
    if not lines:
        raise InputError(f'{path} holds no prompts: it needs one JSON object with a "prompt" per line')
    return lines


def _parse(number: int, raw: bytes) -> PromptLine:
    try:
        # Files that were joined have marks within, too.
        record = json.loads(raw.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as failure:
        return PromptLine(number, error=f"line {number} is not UTF-8: {failure.reason} at byte {failure.start}")
    except (ValueError, RecursionError) as failure:
        return PromptLine(number, error=f"line {number} is not JSON: {failure}")
    try:
        fields = _request_of(record)
        prompt = fields["prompt"]
        sampling = _sampling_of(fields)
    except InputError as failure:
        kept = record if isinstance(record, dict) else {}
        prompt = kept.pop("prompt", "") if isinstance(kept.get("prompt"), str) else ""
        return PromptLine(number, prompt, _extra(kept), error=f"line {number}{failure}")
    model = fields.get("model") if isinstance(fields.get("model"), str) else None
    return PromptLine(number, prompt, _extra(record), sampling, model, fields.get("prediction"))


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")  # Python reads and writes it all the same


def _extra(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in ("prompt", "error")}


def _request_of(record: Any) -> dict[str, Any]:
    """The fields of a request: a line's own, or those of a line of OpenAI's batch API. Raises InputError."""
    if not isinstance(record, dict):
        raise InputError(' has no string "prompt"')
    fields = record
    if "prompt" not in record and isinstance(record.get("body"), dict) and "url" in record:
        fields = record["body"]
        if record["url"] != _BATCH_URL:
            raise InputError(f": url: {record['url']!r} is not supported; {_BATCH_URL} is, and lpr.serve has others")
        known = {"prompt", "prediction", "model", "user", *_SAMPLING_FIELDS, *_RENAMED, *_NEUTRAL}
        for name in fields.keys() - known:
            raise InputError(f": body.{name}: this field is not supported")
    for name, neutral in _NEUTRAL.items():
        if fields.get(name) not in (None, neutral):
            raise InputError(f": {name}: this field of OpenAI's API is not supported; lpr.serve has more of them")
    if not isinstance(fields.get("prompt"), str):
        raise InputError(' has no string "prompt"')
    return fields


def _sampling_of(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of SamplingParams that a request sets, under their own names or OpenAI's. Raises InputError."""
    given = {own: fields[name] for name, own in _RENAMED.items() if fields.get(name) is not None}
    given |= {name: fields[name] for name in _SAMPLING_FIELDS if fields.get(name) is not None}
    if isinstance(bias := given.get("logit_bias"), dict):
        if not all(token.isdecimal() for token in bias):
            raise InputError(": logit_bias: its names are ids of tokens")
        given["logit_bias"] = [[int(token), value] for token, value in bias.items()]
    try:
        # Validated with a large max_new_tokens, because flags may change the default; the engine checks both together.
        checked = SamplingParams(**{"max_new_tokens": 2**31 - 1, **given})
    except InputError as failure:
        raise InputError(f": {failure}") from failure
    return {name: getattr(checked, name) for name in given}


def _encoded(record: str) -> bytes:
    """A line of JSON as UTF-8; lone surrogates, which UTF-8 cannot encode, are escaped."""
    return record.encode("utf-8", "backslashreplace") + b"\n"


class OrderedWriter:
    """Writes one record per prompt line, in the order of the lines, each as soon as all before it are written.

    Records that wait for an earlier one are written on close, so an interrupted run loses no finished line. Every line
    is written as a whole; after a line that could not be written, none follows. With `resume`, records of an earlier
    run of the same prompts are kept. `done` has the numbers of lines with a record, and `kept` the records of the
    earlier run.
    """

    def __init__(self, path: Path, lines: list[PromptLine], resume: bool = False) -> None:
        """Open `path`; raises InputError at once, before any work, if it cannot be written or the disk is full."""
        self.path = path
        self.lines = lines
        self._order = [line.number for line in lines]
        self._next = 0
        try:
            kept = self._earlier(lines) if resume and path.exists() else {}
            in_order = [kept[number] for number in takewhile(kept.__contains__, self._order)]
            # Replaced atomically: if the run is killed, the earlier run's lines are not lost.
            self._file = start_lines(path, b"".join(map(_encoded, in_order)), SPARE)
        except OSError as failure:
            raise InputError(f"cannot write to {path}: {failure.strerror or failure}") from failure
        self.done, self._waiting = set(kept), kept
        self.kept = [json.loads(kept[number]) for number in self._order if number in kept]
        self._complete = len(list(self._take_ready()))  # these are in the file
        self._failed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._reported(), self._file:
            for number in sorted(self._waiting):
                if not self._failed:
                    self._append(self._waiting[number])

    def write(self, number: int, record: dict[str, Any]) -> None:
        """Add the record of prompt line `number`; raises InputError if the disk is full."""
        self.done.add(number)
        self._waiting[number] = json.dumps(record, ensure_ascii=False)
        for text in self._take_ready():
            self._append(text)

    def _take_ready(self) -> Iterator[str]:
        """The waiting records that directly follow the written ones, in order."""
        while self._next < len(self._order) and self._order[self._next] in self._waiting:
            yield self._waiting.pop(self._order[self._next])
            self._next += 1

    def _append(self, text: str) -> None:
        with self._reported():
            append_whole(self._file, _encoded(text))
            self._complete += 1

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Context: converts an error of the file to InputError with the number of complete lines."""
        try:
            yield
        except OSError as failure:
            self._failed = True
            left = f"{self._complete} of {len(self._order)} lines are complete there"
            raise InputError(f"cannot write to {self.path}: {failure.strerror or failure}; {left}") from failure

    def _earlier(self, lines: list[PromptLine]) -> dict[int, str]:
        """The complete records of an earlier run, by line number, where the prompt is still the same."""
        prompts = {line.number: line.prompt for line in lines}
        kept = {}
        for raw in self.path.read_bytes().split(b"\n"):
            try:
                record = json.loads(raw)
            except (ValueError, RecursionError):
                continue  # the end of a line that was being written when the run was killed
            if not isinstance(record, dict) or not isinstance(record.get("line"), int):
                continue
            if record.get("prompt") == prompts.get(record["line"], ""):
                kept[record["line"]] = raw.decode("utf-8", "surrogatepass")
        return kept
