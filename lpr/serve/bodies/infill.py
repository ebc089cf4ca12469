"""Bodies of what editors ask for: llama.cpp's `/infill`, and Mistral's completions."""

from typing import Annotated

from pydantic import Field

from lpr.serve import limits
from lpr.serve.bodies import fields


class ExtraFile(fields.Body):
    text: str
    filename: fields.Label = ""
    time: fields.Ignored = None  # without effect: the order of the pieces counts


class InfillBody(fields.Harmless):
    """llama.cpp's `POST /infill`, with the fields that llama.vim and llama.vscode send."""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[fields.Few[ExtraFile], Field(max_length=limits.PIECES.most)] = []
    prompt: str = ""  # the text between prefix and hole: the line up to the cursor
    n_predict: fields.MaybeCount = -1  # -1: 512, or a quarter of the model's limit. 0: only fill the cache
    n_indent: fields.Natural = 0  # end before a line that is indented by less than this many characters
    n_cmpl: fields.Choices = 1
    t_max_predict_ms: float = 0
    """End after this time, once a line is complete; counted from the first token. 0: no limit."""
    id_slot: fields.Int = -1  # only shown in the answer
    samplers: fields.Samplers | None = None  # those of top_k, top_p, min_p, temperature and penalties that are used
    response_fields: fields.Names | None = None  # answer with these fields only; "a/b" is field b of a
    temperature: fields.Temperature = 0.0
    top_k: fields.TopK = 0
    top_p: fields.TopP = 1.0
    min_p: fields.MinP = 0.0
    repeat_penalty: fields.Repetition = 1.0
    presence_penalty: fields.Penalty = 0.0
    frequency_penalty: fields.Penalty = 0.0
    seed: fields.Seed = None
    stop: Annotated[fields.Few[fields.Stop], Field(max_length=limits.STOPS.most)] = []
    stream: bool = False
    return_tokens: bool = False
    model: fields.Label | None = None


class FimBody(fields.Sampled):
    """Mistral's `POST /v1/fim/completions`."""

    prompt: str
    suffix: str | None = None
    max_tokens: fields.Most = None
    stop: fields.Stops = None
