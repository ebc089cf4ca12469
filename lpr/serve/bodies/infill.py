"""Bodies of what editors ask for: llama.cpp's `/infill`, and Mistral's completions."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lpr.serve import limits
from lpr.serve.bodies.fields import (
    Body,
    Choices,
    Few,
    Harmless,
    Ignored,
    Int,
    Label,
    MaybeCount,
    MinP,
    Most,
    Names,
    Natural,
    Penalty,
    Repetition,
    Sampled,
    Samplers,
    Seed,
    Stop,
    Stops,
    Temperature,
    TopK,
    TopP,
)


class ExtraFile(Body):
    text: str
    filename: Label = ""
    time: Ignored = None  # without effect: the order of the pieces counts


class InfillBody(Harmless):
    """llama.cpp's `POST /infill`, with the fields that llama.vim and llama.vscode send."""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[Few[ExtraFile], Field(max_length=limits.PIECES.most)] = []
    prompt: str = ""  # the text between prefix and hole: the line up to the cursor
    n_predict: MaybeCount = -1  # -1: 512, or a quarter of the model's limit. 0: only fill the cache
    n_indent: Natural = 0  # end before a line that is indented by less than this many characters
    n_cmpl: Choices = 1
    t_max_predict_ms: float = 0
    """End after this time, once a line is complete; counted from the first token. 0: no limit."""
    id_slot: Int = -1  # only shown in the answer
    samplers: Samplers | None = None  # of top_k, top_p, min_p, temperature and penalties, those in this list are used
    response_fields: Names | None = None  # answer with these fields only; "a/b" is field b of a
    temperature: Temperature = 0.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    min_p: MinP = 0.0
    repeat_penalty: Repetition = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    seed: Seed = None
    stop: Annotated[Few[Stop], Field(max_length=limits.STOPS.most)] = []
    stream: bool = False
    return_tokens: bool = False
    model: Label | None = None


class FimBody(Sampled):
    """Mistral's `POST /v1/fim/completions`."""

    prompt: str
    suffix: str | None = None
    max_tokens: Most = None
    stop: Stops = None
