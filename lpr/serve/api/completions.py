"""`POST /v1/completions`, and what DeepSeek and Mistral call it."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from fastapi import APIRouter, Request, Response

from lpr.config import SamplingParams
from lpr.protocol import Chunk, Submit, TokenLogprobs
from lpr.serve import limits
from lpr.serve.api.answers import OpenAIForm, answer
from lpr.serve.api.chat import answer_as_chat
from lpr.serve.api.context import STREAM, aside, begin
from lpr.serve.api.parsing import JsonRoute
from lpr.serve.bodies.completions import CompletionBody
from lpr.serve.bodies.infill import FimBody
from lpr.serve.errors import bad
from lpr.serve.generation import Choice, Event
from lpr.serve.text.served import Served, fresh_seed, spread
from lpr.serve.text.tokens import Tokens

router = APIRouter(route_class=JsonRoute)

Prompts = Sequence[str | list[int]]  # as the client gives them
MOST_IN_HOLE = 512  # default of `max_tokens` for fill-in-the-middle, if they fit


@router.post("/v1/completions", summary="Continue a prompt, or fill in the middle", responses=STREAM)
@router.post("/completions", include_in_schema=False)
@router.post("/beta/completions", summary="The same, under DeepSeek's path", responses=STREAM)
async def complete(body: CompletionBody, request: Request) -> Response:
    """Continue `prompt`; with `suffix`, write what belongs between the two."""
    context, served = await begin(request, body.user)
    served.check_model(body.model)
    given = _checked(body)
    least = sum(served.check_length(text) for text in given if isinstance(text, str))
    # Refused here if the queue is full, before texts are encoded and parameters built.
    context.service.check_room(_best_of(body) * len(given), _best_of(body) * least)
    prompts, echoes = await aside(request, _encoded, served, body, given)
    if body.echo and body.logprobs is not None:
        count = sum(map(len, prompts)) * (1 + body.logprobs)
        if count > limits.LOGPROBS.most:
            most = f"more than the {limits.LOGPROBS.most} that an answer holds"
            raise bad("logprobs", f"logprobs: the prompts' {count} log-probabilities are {most}")
    wanted: list[Submit] = []
    if body.max_tokens != 0:
        rooms = [served.room(body, len(ids), body.max_tokens) for ids in prompts]
        grammar = await context.grammar(request, body.response_format)
        wanted = await aside(request, _wanted, served, body, given, prompts, rooms, grammar)
    name = context.name(request, "cmpl", body.request_id)
    form = _CompletionForm(served, body, name, prompts, echoes)
    # Prompts are scored first: their log-probabilities are sent first, and their K/V is then cached.
    scored = [_scored(ids, body.logprobs or 0) for ids in prompts if form.shows_scores and len(ids) > 1]
    generation = context.generation(request, body, wanted, scored=scored)
    form.scored = generation.scored
    return await answer(context, request, name, generation, form, body.stream)


@router.post("/v1/fim/completions", summary="Fill in the middle, as Mistral's API", responses=STREAM)
async def fill(body: FimBody, request: Request) -> Response:
    """Write what belongs between `prompt` and `suffix`; the answer is shaped like a chat's."""
    _, served = await begin(request, body.user)
    filler = served.need_filler("suffix")
    served.check_length(body.prompt)
    served.check_length(body.suffix or "", "suffix")
    ids = await aside(request, filler.prompt, body.prompt, body.suffix or "")
    fields = {**body.sampled(), "temperature": body.temperature or 0.0, "prompt": body.prompt, "stop": body.stop}
    plain = CompletionBody.model_construct(**fields)
    most = body.max_tokens if body.max_tokens is not None else min(MOST_IN_HOLE, served.most(len(ids)))
    params = served.params(plain, served.room(plain, len(ids), most), stop_token_ids=filler.end_ids)
    wanted = [Submit.of(ids, params, served.delivered(plain, params))]
    return await answer_as_chat(request, plain, wanted, kind="fim")


def _best_of(body: CompletionBody) -> int:
    """Number of texts generated per prompt."""
    return body.best_of if body.best_of is not None else body.n or 1


def _checked(body: CompletionBody) -> Prompts:
    """The prompts as given; raises ApiError for fields that cannot be combined."""
    best_of = _best_of(body)
    if best_of < (body.n or 1):
        raise bad("best_of", f"best_of {best_of} is below n {body.n}")
    if best_of > (body.n or 1) and body.stream:
        raise bad("best_of", "best_of above n cannot be streamed: the best is known at the end only")
    if body.echo and body.suffix:
        raise bad("echo", "echo does not go with suffix")
    if body.max_tokens == 0 and not body.echo:
        raise bad("max_tokens", "max_tokens must be at least 1, unless echo asks for the prompt alone")
    prompt: Any = body.prompt
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


def _encoded(served: Served, body: CompletionBody, given: Prompts) -> tuple[list[list[int]], list[str]]:
    """The prompts' ids, and the text that `echo` puts before each prompt's output; raises ApiError."""
    prompts = [_ids(served, body, prompt) for prompt in given]
    if not body.echo:
        return prompts, [""] * len(prompts)
    decode = served.tokens.decode
    return prompts, [text if isinstance(text, str) else decode(text, skip_special_tokens=True) for text in given]


def _wanted(
    served: Served, body: CompletionBody, given: Prompts, prompts: list[list[int]], rooms: list[int], grammar: str
) -> list[Submit]:
    """The requests to generate; raises ApiError. The parameters are validated once, because few values differ."""
    more: dict[str, Any] = {"stop_token_ids": served.need_filler("suffix").end_ids} if body.suffix else {}
    best_of = _best_of(body)
    if body.logprobs is not None or best_of > (body.n or 1):
        more["logprobs"] = body.logprobs or 0
    params = served.params(body, rooms[0], grammar=grammar, **more)
    named = served.prediction(body, "")  # once for all prompts, as it may be long
    wanted: list[Submit] = []
    for text, ids, room in zip(given, prompts, rooms, strict=True):
        prediction = named
        if body.prediction is None and isinstance(text, str) and not body.suffix:
            prediction = served.prediction(body, text)
        seed = body.seed if body.seed is not None else fresh_seed()
        varied = params.vary(max_new_tokens=room, seed=seed)
        wanted += spread(Submit.of(ids, varied, served.delivered(body, varied), prediction=prediction), best_of)
    if body.delivered_token_ids and len(wanted) != 1:
        raise bad("delivered_token_ids", "delivered_token_ids goes with one prompt")
    return wanted


def _ids(served: Served, body: CompletionBody, prompt: str | list[int]) -> list[int]:
    if body.suffix:
        if not isinstance(prompt, str):
            raise bad("suffix", "suffix goes with a prompt of text, not of token ids")
        served.check_length(body.suffix, "suffix")
        ids = served.need_filler("suffix").prompt(prompt, body.suffix)
    elif isinstance(prompt, str):
        ids = served.tokens.encode(prompt, body.add_special_tokens is not False)
    else:
        ids = prompt
    if not ids:
        raise bad("prompt", "prompt: it is empty, and a model needs at least one token to continue")
    served.check_ids(ids, "prompt")
    return ids


def _scored(ids: list[int], logprobs: int) -> Submit:
    """A request whose output is forced to be a prompt from its second token on, for their log-probabilities."""
    params = SamplingParams(max_new_tokens=len(ids) - 1, forced_ids=tuple(ids[1:]), logprobs=logprobs, ignore_eos=True)
    return Submit.of(ids[:1], params)


class _CompletionForm(OpenAIForm):
    def __init__(
        self, served: Served, body: CompletionBody, id: str, prompts: list[list[int]], echoes: list[str]
    ) -> None:
        super().__init__(served, body, id, "text_completion", sum(map(len, prompts)))
        self.scored: Sequence[Choice] = ()
        """The scored prompts of more than one token, if `echo` shows their log-probabilities."""
        self.shows_scores = self.is_heavy = bool(body.echo) and body.logprobs is not None
        self._logprobs = body.logprobs
        self._n, self._per_prompt = body.n or 1, _best_of(body)
        self._prompts, self._echoes = prompts, echoes
        self._offsets: dict[int, int] = {}  # per choice, the characters whose log-probabilities were sent

    def choices(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        shown: list[dict[str, Any]] = []
        for first in range(0, len(choices), self._per_prompt):
            best = list(choices[first : first + self._per_prompt])
            if self._per_prompt > self._n:
                best = sorted(best, key=_mean_logprob, reverse=True)[: self._n]
            shown += [self._part(choice, len(shown) + at, choice.text, choice, True) for at, choice in enumerate(best)]
        return shown or self._echoed()

    def end(self, choices: Sequence[Choice]) -> Iterator[dict[str, Any]]:
        for shown in self._echoed() if not choices else ():
            yield {**self.head, "choices": [shown]}
        yield from super().end(choices)

    def delta(self, each: Event) -> dict[str, Any]:
        choice, chunk = each.choice, each.chunk
        begins = not choice.job.num_delivered and len(choice.token_ids) == len(chunk.token_ids)
        return self._part(choice, choice.index, each.text, chunk, begins)

    def _part(self, choice: Choice, index: int, text: str, found: Choice | Chunk, begins: bool) -> dict[str, Any]:
        """A text, or one step of it, after what is echoed if it `begins`."""
        logprobs, more = None, {"token_ids": found.token_ids, "sources": found.sources or []}
        if self._logprobs is not None:
            offset = self._offsets.get(choice.index, self._first_offset(choice))
            logprobs = _logprobs(self.served.tokens, found.token_ids, found.logprobs or [], offset)
            self._offsets[choice.index] = offset + sum(map(len, logprobs["tokens"]))
        if begins:
            prompt = choice.index // self._per_prompt
            text, more["prompt_token_ids"] = self._echoes[prompt] + text, choice.job.submit.prompt_ids
            if logprobs is not None and self._scores:
                logprobs = {name: [*self._scores[prompt][name], *values] for name, values in logprobs.items()}
        return self.shown(index, {"text": text}, logprobs, choice, **more)

    @cached_property
    def _scores(self) -> list[dict[str, list[Any]]] | None:
        """The log-probabilities of each prompt, if requested and scoring has ended."""
        if not self.shows_scores:
            return None
        found = iter(self.scored)
        tokens = self.served.tokens
        return [_prompt_logprobs(tokens, ids, next(found).logprobs if len(ids) > 1 else []) for ids in self._prompts]

    def _echoed(self) -> list[dict[str, Any]]:
        """The choices if no token is generated: the prompts, if echoed."""
        finish = "abort" if any(each.finish_reason == "abort" for each in self.scored) else "length"
        scores: Sequence[dict[str, list[Any]] | None] = self._scores or (None,) * len(self._echoes)
        return [
            {"index": at, "text": text, "logprobs": logprobs, "finish_reason": finish, "stop_reason": None}
            for at, (text, logprobs) in enumerate(zip(self._echoes, scores, strict=True))
        ]

    def _first_offset(self, choice: Choice) -> int:
        """Offset of the text of a choice's first token, after echoed or previously delivered text."""
        delivered = choice.job.token_ids[: choice.job.num_delivered]
        echo = self._echoes[choice.index // self._per_prompt]
        return len(echo) + sum(len(self.served.tokens.text_of(token)) for token in delivered)


def _mean_logprob(choice: Choice) -> float:
    return sum(each.logprob for each in choice.logprobs) / max(1, len(choice.logprobs))


def _logprobs(tokens: Tokens, ids: Sequence[int], found: Sequence[TokenLogprobs], offset: int) -> dict[str, list[Any]]:
    """Log-probabilities in the shape of completions; `offset` is that of the first token's text."""
    texts = [tokens.text_of(token) for token in ids]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [each.logprob for each in found],
        "top_logprobs": [
            {**{tokens.text_of(other): value for other, value in each.top}, tokens.text_of(token): each.logprob}
            for token, each in zip(ids, found, strict=True)
        ],
        "text_offset": offsets,
    }


def _prompt_logprobs(tokens: Tokens, ids: Sequence[int], found: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
    """The same for a prompt, whose first token has none: `found` begins after it, and may end before the prompt."""
    first = tokens.text_of(ids[0])
    shown = 0 if ids[0] in tokens.bos_ids else len(first)  # a BOS token is no part of the text
    rest = _logprobs(tokens, ids[1 : 1 + len(found)], found, shown)
    head = {"tokens": first, "token_logprobs": None, "top_logprobs": None, "text_offset": 0}
    return {name: [head[name], *values] for name, values in rest.items()}
