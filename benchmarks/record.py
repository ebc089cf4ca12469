"""Records a model's texts with its candidates, so that drafting is measured without it: `python -m benchmarks.record`.

    python -m benchmarks.record --model FOLDER --chat-template --data classeval.jsonl --prompts 100 --steps steps.npz
    python -m benchmarks.replay --steps steps.npz --last 50

Every prompt is completed plainly at each temperature, many at a time. The file holds the tokens, and after each token,
in the prompt too, the model's most likely next tokens with their scores, and its hidden state under a random projection
to a few bytes (Johnson and Lindenstrauss 1984: it preserves angles). The file is written after each group of prompts,
and a run that finds it continues after them. Prompts of one group share padded forwards, so near ties may be broken
differently than alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from benchmarks.common import DataOptions, Whole, progress, run_main
from benchmarks.data import load_prompts, template_of
from lpr import InputError, SamplingParams, bundled_model
from lpr.model.sampling.choice import candidates as candidates_of
from lpr.model.sampling.choice import pick
from lpr.model.sampling.selection import Selection
from lpr.model.transformers_versions import passed

Row = tuple[np.ndarray, np.ndarray, np.ndarray]
"""After one token: candidates, scores, projected hidden state."""
HIDDEN = 32
"""Bytes of a projected hidden state."""
SEEDS_APART = 1000
"""Difference between the seeds of two texts of one prompt and temperature; the first seed is the prompt's number."""
_PIECE = 128
"""Tokens of a prompt whose logits are computed together."""


@dataclass
class Recorded:
    """A text of a model with its candidates after each token; the arrays have a row per token."""

    prompt: int
    """Number of the prompt in its file, from 0."""
    temperature: float
    seed: int
    num_prompt: int
    """Tokens of the prompt."""
    tokens: np.ndarray
    """int32 [n], of the prompt and the output."""
    candidates: np.ndarray
    """int32 [n, k], most likely first; -1 after the last token."""
    scores: np.ndarray
    """uint8 [n, k] (lpr.core.recycle.SCORE_STEPS)."""
    hidden: np.ndarray
    """int8 [n, 32], directions only."""

    @property
    def output(self) -> list[int]:
        """The tokens after the prompt."""
        return list(self.tokens[self.num_prompt :].tolist())


_PER_TEXT = ("prompt", "temperature", "seed", "num_prompt")
_PER_TOKEN = ("tokens", "candidates", "scores", "hidden")


def save_texts(path: Path, texts: Sequence[Recorded], facts: dict[str, Any]) -> None:
    """Write a file of recorded texts atomically."""
    arrays: dict[str, Any] = {name: np.array([getattr(text, name) for text in texts]) for name in _PER_TEXT}
    arrays |= {name: np.concatenate([getattr(text, name) for text in texts]) for name in _PER_TOKEN}
    arrays["lengths"] = np.array([len(text.tokens) for text in texts])
    fresh = path.with_name(path.name + ".new.npz")
    arrays |= {f"fact_{name}": np.array(value) for name, value in facts.items()}
    np.savez_compressed(fresh, **arrays)
    fresh.replace(path)


def read_texts(path: str | Path) -> tuple[list[Recorded], dict[str, Any]]:
    """The texts of a file of recorded steps and its facts; raises InputError."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        ends = np.cumsum(arrays["lengths"])[:-1]
        rows = [np.split(arrays[name], ends) for name in _PER_TOKEN]
        heads = [arrays[name].tolist() for name in _PER_TEXT]
    except (OSError, ValueError, KeyError, EOFError) as failure:
        raise InputError(f"{path} holds no recorded steps: {failure}") from failure
    facts = {name.removeprefix("fact_"): arrays[name].item() for name in arrays if name.startswith("fact_")}
    return [Recorded(*each) for each in zip(*heads, *rows, strict=True)], facts


class Recorder:
    """Completes groups of prompts plainly with a model and records its candidates."""

    def __init__(self, model: Any, num_candidates: int, max_new_tokens: int, stop_ids: Sequence[int]) -> None:
        """Outputs have at most `max_new_tokens`; one of `stop_ids` ends them."""
        self._model, self._k, self._longest, self._stop_ids = model, num_candidates, max_new_tokens, set(stop_ids)
        generator = torch.Generator().manual_seed(0)
        self._projection = torch.randn(model.config.hidden_size, HIDDEN, generator=generator)

    @torch.inference_mode()
    def record(
        self, prompts: Sequence[list[int]], numbers: Sequence[int], temperatures: Sequence[float], num_seeds: int = 1
    ) -> list[Recorded]:
        """One greedy text per prompt, and `num_seeds` at each temperature above 0."""
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        seen = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        cache = DynamicCache(config=self._model.config)
        everywhere = self._forward(ids, seen, cache)
        inside = [self._inside(row[width - len(prompt) :]) for row, prompt in zip(everywhere, prompts, strict=True)]
        states = everywhere[:, -1]
        ways = [
            (temperature, SEEDS_APART * again)
            for temperature in temperatures
            for again in range(num_seeds if temperature else 1)
        ]
        repeats = len(ways)
        cache.batch_repeat_interleave(repeats)
        seen, states = seen.repeat_interleave(repeats, 0), states.repeat_interleave(repeats, 0)
        texts = [
            Recorded(number, temperature, number + seed, len(prompt), *[np.empty(0)] * 4)
            for number, prompt in zip(numbers, prompts, strict=True)
            for temperature, seed in ways
        ]
        tokens = [list(prompt) for prompt in prompts for _ in ways]
        ranked: list[list[Row]] = [[] for _ in texts]
        running = list(range(len(texts)))
        while True:
            logits = self._model.get_output_embeddings()(states).float()
            chosen = self._choose(logits, [texts[at] for at in running], [len(tokens[at]) for at in running])
            for at, token, here in zip(running, chosen, self._rank(logits, states), strict=True):
                tokens[at].append(token)
                ranked[at].append(here)
            keep = [row for row, token in enumerate(chosen) if token not in self._stop_ids]
            if not keep or len(ranked[running[0]]) == self._longest:
                break
            if len(keep) < len(running):
                running, seen = [running[row] for row in keep], seen[keep]
                cache.batch_select_indices(torch.tensor(keep))
            seen = torch.cat([seen, torch.ones(len(running), 1, dtype=seen.dtype)], 1)
            states = self._forward(torch.tensor([[tokens[at][-1]] for at in running]), seen, cache)[:, -1]
        nothing = (np.full(self._k, -1, np.int32), np.full(self._k, 255, np.uint8), np.zeros(HIDDEN, np.int8))
        for number, (text, ids_of, rows) in enumerate(zip(texts, tokens, ranked, strict=True)):
            text.tokens = np.array(ids_of, np.int32)
            all_rows = [*inside[number // repeats], *rows, nothing]
            text.candidates, text.scores, text.hidden = (np.stack([row[i] for row in all_rows]) for i in range(3))
        return texts

    def _forward(self, ids: torch.Tensor, seen: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """Last hidden states [rows, tokens, width] behind what the cache holds."""
        positions = (seen.cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        body = self._model.base_model
        taken = {"attention_mask": seen, "position_ids": positions, **passed(cache, body)}
        return body(input_ids=ids, **taken).last_hidden_state

    def _inside(self, states: torch.Tensor) -> list[Row]:
        """Candidates inside a prompt of these hidden states [n, width], after all tokens but the last.

        Works on pieces, as logits of a whole prompt are large.
        """
        pieces = states[:-1].split(_PIECE)
        return [
            row for piece in pieces for row in self._rank(self._model.get_output_embeddings()(piece).float(), piece)
        ]

    def _choose(self, logits: torch.Tensor, texts: Sequence[Recorded], positions: Sequence[int]) -> list[int]:
        params = [SamplingParams(temperature=text.temperature, seed=text.seed) for text in texts]
        selection = Selection.build([(each, [at]) for each, at in zip(params, positions, strict=True)])
        return list(pick(logits, selection).tolist())

    def _rank(self, logits: torch.Tensor, hidden: torch.Tensor) -> Iterator[Row]:
        """Per row of logits [n, V] and hidden states [n, width]: candidates, scores and projection."""
        candidates, scores = candidates_of(logits, self._k)
        projected = hidden.float() @ self._projection
        projected = projected / projected.norm(dim=-1, keepdim=True).clamp_min(1e-9)
        rows = (candidates.to(torch.int32), scores, (projected * 127).round().to(torch.int8))
        return zip(*[part.numpy() for part in rows], strict=True)


def groups(items: Sequence[int], size: int) -> Iterator[list[int]]:
    """`items`, `size` at a time."""
    for start in range(0, len(items), size):
        yield list(items[start : start + size])


@dataclass(frozen=True, kw_only=True)
class RecordOptions(DataOptions):
    """Record a model's texts with its candidates."""

    steps: str
    """The .npz file to write, or to continue."""
    temperatures: tuple[float, ...] = (0.0, 0.8)
    """Temperatures."""
    seeds: Whole = 1
    """Texts per temperature above 0."""
    candidates: Whole = 8
    """Next tokens kept per token."""
    together: Whole = 8
    """Prompts completed at a time."""


def measure(options: RecordOptions, console: Console) -> dict[str, Any]:
    """Record the prompts that are not in the file yet."""
    if options.exact or torch.device(options.device or "cpu").type != "cpu":
        raise InputError("texts are recorded on the CPU by the model's own forward: leave out --device and --exact")
    path = Path(options.steps)
    name = options.model or bundled_model()
    facts = {
        "model": Path(str(name)).name, "data": Path(options.data).name, "max_new_tokens": options.max_new_tokens,
        "chat_template": bool(options.chat_template), "num_seeds": options.seeds,
    }  # fmt: skip
    texts: list[Recorded] = []
    if path.exists():
        texts, found = read_texts(path)
        if found != facts:
            raise InputError(f"{path} was recorded with {found}, not with {facts}")
    prompts = load_prompts(options.data, options.prompts, template_of(options))
    tokenizer = AutoTokenizer.from_pretrained(name)
    dtype = torch.float32 if options.dtype == "auto" else getattr(torch, options.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval()
    ends = model.generation_config.eos_token_id
    stop_ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
    recorder = Recorder(model, options.candidates, options.max_new_tokens, stop_ids)
    done = {text.prompt for text in texts}
    left = [number for number in range(options.skip, len(prompts)) if number not in done]
    with progress(console, len(left), "recording") as advance:
        for numbers in groups(left, options.together):
            ids = [
                tokenizer.encode(prompts[number], add_special_tokens=not options.chat_template) for number in numbers
            ]
            texts += recorder.record(ids, numbers, options.temperatures, options.seeds)
            save_texts(path, texts, facts)
            advance(len(numbers))
    return {
        **facts,
        "num_texts": len(texts),
        "num_tokens": sum(len(text.output) for text in texts),
    }


def main() -> int:
    """Run the command line; returns the exit code."""
    return run_main("record", RecordOptions, measure)


if __name__ == "__main__":
    sys.exit(main())
