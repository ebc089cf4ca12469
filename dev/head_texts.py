"""Texts that a head learns from: written by its model, with its hidden states.

On a CPU a token of a batch costs as much when it is written as when it is read: no text of others is read, and the
writing engine's own hidden states are kept. On a GPU (dev/gpu_texts.py) reading is the least, and comes afterwards.
"""

from __future__ import annotations

import ast
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from lpr import DecodeConfig, Engine, SamplingParams
from lpr.engine.options import EngineOptions
from lpr.model.step_inputs import Row

MOST_TOKENS = 1024
"""Of a prompt."""
KINDS = (0.0, 0.8, 0.8, 1.0)
"""Temperatures of the texts, by turns; a prompt has the next one when all have had theirs."""
TOGETHER = 32
"""Texts written at a time: more rows make a product cheaper for each."""
GROUP = 400
"""Texts between two looks at the clock; the last ones of a group are written by a batch that is no longer full."""
READ_TOKENS = 1 << 15
"""Of texts that are read at a time, padding included."""
INVENTED_TOKENS = 70
"""Of an invented prompt, at most."""
SKELETON = (300, 1600)
"""Characters of the shortest and the longest skeleton of a class."""


@dataclass
class Text:
    """A prompt and what the model has written after it."""

    ids: Tensor
    """[T]."""
    num_prompt: int
    states: Tensor | None = None
    """[T, H]: the model's last hidden states, in half precision; they are the same in every epoch."""
    temperature: float = 0.0
    seed: int = 0


class KeptStates:
    """The hidden states of all that an engine of plain decoding evaluates.

    A sequence is known by its first page, as slots change when others end; so pages must not be shared.
    """

    def __init__(self, engine: Engine) -> None:
        """Watch `engine`; nothing is kept before `begin`."""
        assert not engine.options.prefix_reuse, "a shared first page names no sequence"
        self._model = engine.model
        self._model.adapter.keep_hidden()
        self._size: int = self._model.config.get_text_config().hidden_size
        model: Any = self._model
        model.evaluate, model.fill = self._watched(model.evaluate), self._watched(model.fill)

    def begin(self, num_tokens: int) -> None:
        """Forget all, and keep up to `num_tokens` states.

        They have one tensor: small ones among those of the steps tore the heap to pieces, 8 GB became 23 in an hour.
        """
        self._states = torch.empty(num_tokens, self._size, dtype=torch.half)
        self._count = 0
        self._sequences: list[tuple[list[int], list[int]]] = []
        self._running: dict[int, tuple[list[int], list[int]]] = {}

    def _watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(rows: Sequence[Row], *args: Any) -> Any:
            found = call(rows, *args)
            for row in rows:
                self._keep(row)
            return found

        return watched

    def _keep(self, row: Row) -> None:
        assert self._model.cache is not None and self._model.forward is not None
        page = int(self._model.cache.tables[row.slot, 0])
        if row.num_cached == 0:
            self._running[page] = [], []
            self._sequences.append(self._running[page])
        tokens, places = self._running[page]
        assert len(tokens) == row.num_cached, "all of a sequence is evaluated once, in order"
        tokens += row.tokens.tolist()
        end = self._count + row.num_entries
        places += range(self._count, end)
        self._states[self._count : end] = self._model.forward.hidden[row.slot]
        self._count = end

    def states(self) -> dict[tuple[int, ...], Tensor]:
        """The states [T, H] of each sequence since `begin`, by its T tokens."""
        return {tuple(tokens): self._states[places] for tokens, places in self._sequences}


def writer_of(model: str, dtype: str) -> Engine:
    """An engine that writes texts for `write_texts`: trees would not pay where products are what takes the time."""
    decode = DecodeConfig.autoregressive(max_batch_size=TOGETHER, num_candidates=0)
    return Engine.from_pretrained(model, decode, EngineOptions(prefix_reuse=False), dtype=dtype)


def write_texts(
    engine: Engine, asked: Iterable[tuple[list[int], SamplingParams]], minutes: float = float("inf")
) -> list[Text]:
    """What an engine of `writer_of` writes after each prompt, until `minutes` are over.

    The last token, which nothing follows, is left out.
    """
    found, began, rest, kept = list[Text](), time.monotonic(), iter(asked), KeptStates(engine)
    while group := list(islice(rest, GROUP)):
        kept.begin(sum(len(prompt) + each.max_new_tokens for prompt, each in group))
        done = engine.generate([prompt for prompt, _ in group], [each for _, each in group])
        states = kept.states()
        for (prompt, each), completion in zip(group, done, strict=True):
            ids = (prompt + completion.token_ids)[:-1]
            found.append(Text(torch.tensor(ids), len(prompt), states[tuple(ids)], each.temperature, each.seed or 0))
        passed = (time.monotonic() - began) / 60
        written = sum(len(text.ids) - text.num_prompt for text in found)
        print(f"{passed:.1f} min: {len(found)} texts, {written} tokens written", flush=True)
        if passed > minutes:
            break
    return found


@torch.no_grad()
def read_texts(model: PreTrainedModel, texts: Sequence[Text]) -> None:
    """Give `texts` the hidden states of `model`, which reads those of like lengths together, on its own device."""
    decoder, rest = model.get_decoder(), sorted(texts, key=lambda text: len(text.ids))
    while rest:
        number = max(1, READ_TOKENS // len(rest[-1].ids))
        together, rest = rest[-number:], rest[:-number]
        ids = pad_sequence([text.ids for text in together], batch_first=True)  # what follows a text, it does not see
        states = decoder(input_ids=ids.to(model.device), use_cache=False).last_hidden_state.half()
        for text, state in zip(together, states, strict=True):
            text.states = state[: len(text.ids)].clone()


def keep_texts(texts: Sequence[Text], path: Path) -> None:
    """Write texts to a file, with their states if they have any."""
    parts = {"ids": torch.cat([text.ids for text in texts]).int()}
    if states := [text.states for text in texts if text.states is not None]:
        parts["states"] = torch.cat(states)
    parts["facts"] = torch.tensor([(len(each.ids), each.num_prompt, each.temperature, each.seed) for each in texts])
    save_file(parts, path)


def kept_texts(path: Path) -> list[Text]:
    """The texts of a file of `keep_texts`."""
    parts = load_file(path)
    lengths, prompts, temperatures, seeds = parts["facts"].T.tolist()
    sizes = [int(each) for each in lengths]
    states = parts["states"].split(sizes) if "states" in parts else [None] * len(sizes)
    pieces = [parts["ids"].long().split(sizes), states]
    return [
        Text(ids, int(num_prompt), states, round(temperature, 4), int(seed))
        for ids, num_prompt, states, temperature, seed in zip(
            pieces[0], prompts, pieces[1], temperatures, seeds, strict=True
        )
    ]


def encoded(prompt: str, tokenizer: Any) -> list[int]:
    """The ids of a prompt, as a user's turn if the model has a chat template."""
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(prompt)["input_ids"]
    return ids


def prompts_of(name: str, tokenizer: Any) -> list[list[int]]:
    """The ids of the prompts of a JSONL file, FILE or FILE:A-B."""
    path, _, lines = name.partition(":")
    begin, _, end = lines.partition("-")
    found = []
    for line in Path(path).read_text(encoding="utf-8").splitlines()[int(begin or 0) : int(end) if end else None]:
        fields = json.loads(line)
        prompt = next(fields[key] for key in ("skeleton", "prompt", "question", "turns") if key in fields)
        ids = encoded(prompt if isinstance(prompt, str) else prompt[0], tokenizer)
        if len(ids) <= MOST_TOKENS:
            found.append(ids)
    return found


def skeletons(folder: Path) -> Iterator[str]:
    """Classes of Python sources below `folder` with docstrings for bodies, as ClassEval's prompts are."""
    for path in sorted(folder.rglob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError):
            continue
        for node in tree.body:
            if not isinstance(node, ast.ClassDef):
                continue
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef) and ast.get_docstring(each)]
            for method in methods:
                method.body = method.body[:1]
            node.body = [*node.body[: ast.get_docstring(node) is not None], *methods]
            if len(methods) > 1 and SKELETON[0] <= len(text := ast.unparse(node)) <= SKELETON[1]:
                yield text


def user_turn(tokenizer: Any) -> list[int]:
    """The ids of a chat up to a user's turn: a chat model goes on with a prompt (Magpie, Xu et al. 2024)."""
    mark = "PROMPT"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    ids: list[int] = tokenizer(chat[: chat.index(mark)])["input_ids"]
    return ids


def invented(engine: Engine, tokenizer: Any, count: int) -> list[str]:
    """Up to `count` prompts that a chat model writes itself."""
    how = [SamplingParams(max_new_tokens=INVENTED_TOKENS, temperature=0.9, seed=seed) for seed in range(count)]
    done = engine.generate([user_turn(tokenizer)] * count, how)
    return whole_prompts([each.token_ids for each in done if each.finish_reason == "stop"], tokenizer)


def whole_prompts(ended: Iterable[list[int]], tokenizer: Any) -> list[str]:
    """The texts of user's turns that the model has ended, each once."""
    texts = (tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in ended)
    return [text for text in dict.fromkeys(texts) if text]
