"""`POST /infill`, llama.cpp's endpoint for editors: the text between a prefix and a suffix, at every keystroke."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fastapi import APIRouter, Request, Response

from lpr.config import SamplingParams
from lpr.protocol import Submit
from lpr.serve.api.answers import Form, answer
from lpr.serve.api.context import STREAM, aside, begin
from lpr.serve.api.parsing import JsonRoute
from lpr.serve.bodies.infill import InfillBody
from lpr.serve.errors import bad
from lpr.serve.generation import Choice, Event
from lpr.serve.text.fim import Extra
from lpr.serve.text.served import Served, fresh_seed, samplers_of, sampling, spread

router = APIRouter(route_class=JsonRoute)

MOST = 512  # tokens of a middle where `n_predict` is -1


class LineLimit:
    """Ends a text at a line with too little indentation, or after the first line beyond the time limit."""

    def __init__(self, n_indent: int, t_max_ms: float) -> None:
        """Lines after the first need an indent of `n_indent`; `t_max_ms` counts from the first token."""
        self._n_indent = n_indent
        self._t_max = t_max_ms / 1000
        self._began: float | None = None
        self._line: str | None = None
        """White space at the start of the current line, held back; None: the line has text, or it is the first."""
        self._has_line = False

    def take(self, text: str, last: bool) -> tuple[str, bool]:
        """The part of new text to show, and True if the text ends there."""
        now = time.monotonic()
        self._began = self._began if self._began is not None else now
        shown, ended = self._indented(text)
        if ended:
            return shown, True
        if last and self._line:
            shown, self._line = shown + self._line, None
        self._has_line = self._has_line or "\n" in shown
        # As in llama.cpp, only after a complete line, so that slow machines show one too.
        return shown, bool(self._t_max) and self._has_line and now - self._began > self._t_max

    def _indented(self, text: str) -> tuple[str, bool]:
        if not self._n_indent:
            return text, False
        shown = ""
        for character in text:
            if character == "\n":
                shown += (self._line or "") + character
                self._line = ""
            elif self._line is not None and character in " \t":
                self._line += character
            elif self._line is not None and len(self._line) < self._n_indent:
                return shown, True
            else:
                shown += (self._line or "") + character
                self._line = None
        return shown, False


@router.post("/infill", summary="Fill in the middle, as llama.cpp's server", responses=STREAM)
async def infill(body: InfillBody, request: Request) -> Response:
    """Write what belongs between `input_prefix` + `prompt` and `input_suffix`."""
    context, served = await begin(request)
    model = served.check_model(body.model)
    count = body.n_predict if body.n_predict >= 0 else min(MOST, served.facts.max_length // 4)
    ids, truncated = await aside(request, _prompt, served, body, max(1, count))
    params = _params(served, body, min(max(1, count), served.most(len(ids))))
    wanted = spread(Submit.of(ids, params), 1 if body.n_predict == 0 else body.n_cmpl)
    generation = context.generation(
        request, None, wanted, model=body.model, limits=lambda: LineLimit(body.n_indent, body.t_max_predict_ms).take
    )
    known, fields = {"model": model, "truncated": truncated, "id_slot": body.id_slot}, body.response_fields
    # No answer has more than one level of objects.
    form = _InfillForm(body, known, None if fields is None else {name: name.split("/", 2) for name in fields})
    return await answer(context, request, context.name(request, "infill"), generation, form, body.stream)


def _prompt(served: Served, body: InfillBody, count: int) -> tuple[list[int], bool]:
    prefix = body.input_prefix + body.prompt
    room = served.facts.max_length - count
    if room < 2:
        raise bad("n_predict", f"n_predict {count} leaves no room; the model's limit is {served.facts.max_length}")
    if served.filler is None and not body.input_suffix.strip():
        # Nothing follows the hole, so every model can continue.
        text = served.tokens.tail("".join(extra.text for extra in body.input_extra) + prefix, room)
        ids = served.tokens.encode(text)
        kept = ids[max(0, len(ids) - room) :]
        if not kept:
            raise bad("input_prefix", "input_prefix: there is nothing to continue")
        return kept, len(kept) < len(ids)
    filler = served.need_filler("input_suffix")
    extra = [Extra(each.text, each.filename) for each in body.input_extra]
    return filler.fitted(room, prefix, body.input_suffix, extra)


def _params(served: Served, body: InfillBody, count: int) -> SamplingParams:
    used = samplers_of(body.samplers)
    values: dict[str, Any] = {
        "max_new_tokens": count,
        "seed": body.seed if body.seed is not None else fresh_seed(),
        "stop": tuple(body.stop),
        "stop_token_ids": served.filler.end_ids if served.filler is not None else (),
    }
    for name in {"temperature", "top_p", "min_p"} & used:
        values[name] = getattr(body, name)
    if "top_k" in used:
        values["top_k"] = max(0, body.top_k)
    if "penalties" in used:
        values["repetition_penalty"] = body.repeat_penalty
        values |= {"presence_penalty": body.presence_penalty, "frequency_penalty": body.frequency_penalty}
    return sampling(values)


@dataclass(frozen=True)
class _InfillForm(Form):
    """llama.cpp's answers; a stream has `content` per step, and all the rest with the last one."""

    body: InfillBody
    facts: dict[str, Any]
    fields: Mapping[str, Sequence[str]] | None  # the requested fields, with each name split at "/"
    ends_with_done: ClassVar[bool] = False

    def whole(self, choices: Sequence[Choice]) -> Any:
        answers = [_selected(self._finished(choice), self.fields) for choice in choices]
        return answers[0] if len(answers) == 1 else answers

    def steps(self, each: Event, choices: Sequence[Choice]) -> Iterator[dict[str, Any]]:
        choice, content = each.choice, "" if self.body.n_predict == 0 else each.text
        if choice.finish_reason is None:
            yield {"index": choice.index, "content": content, "stop": False}
        else:
            yield _selected({**self._finished(choice), "content": content}, self.fields)

    def _finished(self, choice: Choice) -> dict[str, Any]:
        job, usage = choice.job, choice.usage
        num_prompt, num_output = job.submit.num_prompt, len(choice.token_ids)
        begun = job.begun or job.arrived
        prompt_ms = 1e3 * ((job.first or begun) - begun)
        predict_ms = 1e3 * ((job.latest or 0.0) - (job.first or 0.0))
        num_cached = usage.num_cached if usage is not None else 0
        silent = self.body.n_predict == 0
        return {
            **self.facts,
            "index": choice.index,
            "content": "" if silent else choice.text,
            "tokens": choice.token_ids if self.body.return_tokens and not silent else [],
            "stop": True,
            "stop_type": "limit" if choice.finish_reason == "length" else "eos",
            "tokens_predicted": 0 if silent else num_output,
            "tokens_evaluated": num_prompt,
            "tokens_cached": num_prompt + num_output,
            "timings": {
                "cache_n": num_cached,
                "prompt_n": num_prompt - num_cached,
                "prompt_ms": round(prompt_ms, 3),
                "prompt_per_token_ms": round(prompt_ms / max(1, num_prompt - num_cached), 4),
                "prompt_per_second": _rate(num_prompt - num_cached, prompt_ms),
                "predicted_n": 0 if silent else num_output,
                "predicted_ms": round(predict_ms, 3),
                "predicted_per_token_ms": round(predict_ms / max(1, num_output), 4),
                "predicted_per_second": _rate(num_output, predict_ms),
            },
            "steps": choice.num_steps,
        }


def _rate(count: int, milliseconds: float) -> float:
    return round(1e3 * count / milliseconds, 2) if milliseconds > 0 else 0.0


def _selected(answer: dict[str, Any], fields: Mapping[str, Sequence[str]] | None) -> dict[str, Any]:
    """The named fields only; "a/b" is field b of a, under that whole name."""
    if fields is None:
        return answer
    found = {}
    for name, parts in fields.items():
        value: Any = answer
        for part in parts:
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            found[name] = value
    return found
