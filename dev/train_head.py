r"""Train a multi-token-prediction head for a frozen Llama-type model, by self-distillation.

    python -m dev.train_head --model FOLDER --prompts humaneval.jsonl classeval.jsonl:50 --minutes 150 [--resume]

The model writes texts after the prompts (`FILE:N` takes the first N lines; questions and turns get the chat template),
some greedily, some sampled, with lpr; they are kept beside --out. The head learns the model's own distribution of the
token after the next one, by the Kullback-Leibler divergence, and, fed with its own output, that of the tokens after it
(DeepSeek-V3, section 2.2; training on own outputs as in EAGLE-3, Li et al. 2025). It begins as a copy of the model's
last layer. The file is written every few minutes, in the form of DeepSeek V3's keys: beside a checkpoint's weights lpr
finds it there. `--resume` goes on from it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from lpr.model.heads.forms import DEEPSEEK
from lpr.model.heads.head import DraftHead
from lpr.model.heads.read import OWN_FILE, make_head

STEPS_AHEAD = 3
"""Tokens beyond the next one that the head is trained for, each fed with the output of the one before."""
DECAY = 0.7
"""Weight of each further one."""
MOST_TOKENS = 1024
"""Of a prompt."""
MOST_COMPARED = 4096
"""Commonest tokens whose logits are compared, and a quarter as many others at random."""
Text = tuple[list[int], int]
"""The ids of a prompt and what the model has written after it, and the number of the prompt's."""


@torch.no_grad()
def first_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """A head to begin with: the model's last layer once more, with a little of the embedding.

    It gets what the final norm has made of its input's successor, so the norm's weight is taken back. All is scaled
    down, with what the layer adds to it, so that `join` learns fast.
    """
    decoder: Any = model.get_decoder()
    size, norm = model.config.hidden_size, decoder.norm.weight.detach().float()
    ids = torch.randint(0, model.config.vocab_size, (4, 32), generator=torch.Generator().manual_seed(0))
    states = decoder(input_ids=ids, output_hidden_states=True).hidden_states[-2].float()
    scale = states.pow(2).mean(-1).sqrt().median()  # some models have a first token of extreme states
    made = {name: each.detach().float().clone() for name, each in decoder.layers[-1].state_dict().items()}
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        made[name] /= scale
    made[f"{DEEPSEEK.embedding_norm}.weight"] = torch.ones(size)
    made[f"{DEEPSEEK.hidden_norm}.weight"] = norm.mean() * norm / (norm**2 + 0.01 * (norm**2).mean())
    made[f"{DEEPSEEK.join}.weight"] = torch.cat([0.1 * torch.eye(size), torch.eye(size)], 1)
    made[f"{DEEPSEEK.final_norm}.weight"] = norm.clone()
    return made


def tensors_of(head: DraftHead) -> dict[str, Tensor]:
    """The weights of a head by the names of the form DEEPSEEK, without its prefix."""
    parts = {DEEPSEEK.embedding_norm: head.embedding_norm, DEEPSEEK.hidden_norm: head.hidden_norm}
    parts |= {DEEPSEEK.join: head.join, DEEPSEEK.final_norm: head.block.norm}
    found = {f"{name}.weight": part.weight for name, part in parts.items()}
    found |= head.block.layers[0].state_dict()
    return {name: each.detach().cpu().contiguous().clone() for name, each in found.items()}


def save(head: DraftHead, path: Path, dtype: torch.dtype) -> None:
    """Write a head's weights, as a whole or not at all."""
    prefix = DEEPSEEK.prefix.format(head.layer)
    unfinished = path.with_suffix(".unfinished")
    save_file({prefix + name: each.to(dtype) for name, each in tensors_of(head).items()}, unfinished)
    os.replace(unfinished, path)


@dataclass
class Batch:
    """Pieces of texts."""

    ids: Tensor
    """[B, T]."""
    mask: Tensor
    """[B, T]: true where the model has written, or chosen the next token."""
    hidden: Tensor
    """[B, T, H]: the model's last hidden states."""
    tokens: Tensor
    """[V']: those whose logits are compared; all of a large vocabulary would take most of the time."""


def losses(model: PreTrainedModel, head: DraftHead, batch: Batch) -> tuple[list[Tensor], list[float]]:
    """Per token ahead the mean divergence of a batch where its mask is true, and the share of equal argmax."""
    weight: Tensor = model.get_output_embeddings().weight[batch.tokens]  # type: ignore[index]
    with torch.no_grad():
        wanted = (batch.hidden @ weight.T).log_softmax(-1)
        embeddings = model.get_input_embeddings()(batch.ids)
    found, equal, state, length = [], [], batch.hidden, batch.ids.shape[1]
    positions = torch.arange(length, device=batch.ids.device)[None]
    for ahead in range(1, STEPS_AHEAD + 1):
        # Entry i holds token i + 1 and, ahead of the first one, what the head has made of entry i - 1.
        places = positions[:, ahead - 1 : length - 1]
        state = head(embeddings[:, ahead:], state[:, :-1], position_ids=places, use_cache=False)
        logits, target = state @ weight.T, wanted[:, ahead:]
        divergence = F.kl_div(logits.log_softmax(-1), target, reduction="none", log_target=True).sum(-1)
        counted = batch.mask[:, ahead:].float()
        found.append((divergence * counted).sum() / counted.sum())
        same = (logits.argmax(-1) == target.argmax(-1)).float()
        equal.append(((same * counted).sum() / counted.sum()).item())
    return found, equal


def train(
    model: PreTrainedModel,
    head: DraftHead,
    batches: Iterator[Batch],
    progress: Any,
    learning_rate: float = 1e-3,
    report: Any = lambda step, found, equal: None,
) -> None:
    """Train until `progress()` is 1; `report` hears of each step."""
    model.requires_grad_(False)
    head.train().requires_grad_(True)
    optimizer = torch.optim.AdamW(head.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    weights, step = [DECAY**ahead for ahead in range(STEPS_AHEAD)], 0
    while (done := progress()) < 1:
        rate = min(1.0, (step + 1) / 50) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * rate
        found, equal = losses(model, head, next(batches))
        optimizer.zero_grad()
        torch.stack([each * weight for each, weight in zip(found, weights, strict=True)]).sum().backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        step += 1
        report(step, [each.item() for each in found], equal)
    head.eval().requires_grad_(False)


@torch.no_grad()
def states_of(model: PreTrainedModel, texts: Sequence[Text]) -> list[Tensor]:
    """The model's last hidden states [T, H] of each text, in half precision: they are the same in every epoch."""
    decoder: Any = model.get_decoder()
    return [decoder(input_ids=torch.tensor([text])).last_hidden_state[0].half() for text, _ in texts]


def batches_of(
    model: PreTrainedModel, texts: Sequence[Text], states: Sequence[Tensor], size: int, length: int, seed: int
) -> Iterator[Batch]:
    """Random pieces of texts."""
    generator = torch.Generator().manual_seed(seed)
    known = [(torch.tensor(text), num_prompt, each) for (text, num_prompt), each in zip(texts, states, strict=True)]
    vocab_size = model.get_input_embeddings().weight.shape[0]  # type: ignore[union-attr,index]
    counts = torch.bincount(torch.cat([text for text, _, _ in known]), minlength=int(vocab_size))
    common = counts.topk(min(MOST_COMPARED, int(vocab_size))).indices
    while True:
        ids, mask = torch.zeros(size, length, dtype=torch.long), torch.zeros(size, length, dtype=torch.bool)
        hidden = torch.zeros(size, length, states[0].shape[1])
        for row, choice in enumerate(torch.randint(len(known), (size,), generator=generator).tolist()):
            text, num_prompt, state = known[choice]
            begin = int(torch.randint(max(1, len(text) - length + 1), (1,), generator=generator))
            count = len(text[begin : begin + length])
            ids[row, :count], hidden[row, :count] = text[begin : begin + count], state[begin : begin + count].float()
            mask[row, max(0, num_prompt - 1 - begin) : count] = True
        others = torch.randint(int(vocab_size), (MOST_COMPARED // 4,), generator=generator)
        yield Batch(ids, mask, hidden, torch.cat([common, ids.flatten(), others]).unique())


def prompts_of(name: str, tokenizer: Any) -> list[str]:
    """The prompts of a JSONL file, FILE or FILE:N: its skeletons, prompts, questions or first turns."""
    path, _, count = name.partition(":")
    found = []
    for line in Path(path).read_text(encoding="utf-8").splitlines()[: int(count) if count else None]:
        fields = json.loads(line)
        asked = fields.get("question") or (fields.get("turns") or [None])[0]
        if asked and tokenizer.chat_template:
            chat = [{"role": "user", "content": asked}]
            prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        else:
            prompt = fields.get("skeleton") or fields.get("prompt") or asked
        if len(tokenizer(prompt)["input_ids"]) <= MOST_TOKENS:
            found.append(prompt)
    return found


def write_texts(folder: str, prompts: Sequence[str], new_tokens: int, minutes: float) -> list[Text]:
    """What the model writes after `prompts`, each greedily and at temperatures 0.8 and 1, until `minutes` are over."""
    import lpr

    engine = lpr.Engine.from_pretrained(folder, decode=lpr.DecodeConfig(draft_heads="off", max_batch_size=4))
    found: list[Text] = []
    end = time.monotonic() + 60 * minutes
    for begin in range(0, 3 * len(prompts), 4):
        if time.monotonic() > end:
            break
        chosen = [(prompts[i % len(prompts)], (i // len(prompts) + i) % 3, i) for i in range(begin, begin + 4)]
        params = [
            lpr.SamplingParams(max_new_tokens=new_tokens, temperature=(0.8, 0.0, 1.0)[kind], seed=seed)
            for _, kind, seed in chosen
        ]
        for done, (prompt, _, _) in zip(engine.generate([each for each, _, _ in chosen], params), chosen, strict=True):
            ids = engine.encode(prompt)
            found.append((ids + done.token_ids, len(ids)))
        print(f"{len(found)} texts, {sum(len(text) - n for text, n in found)} tokens written", flush=True)
    engine.close()
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", nargs="+", default=[], help="JSONL files with a prompt a line, FILE or FILE:N")
    parser.add_argument("--texts", type=Path, help="where the written texts are kept and found again")
    parser.add_argument("--out", type=Path, help=f"default: {OWN_FILE} in the model's folder")
    parser.add_argument("--minutes", type=float, default=150, help="of training")
    parser.add_argument("--writing-minutes", type=float, default=30, help="of writing texts")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=6e-4)
    parser.add_argument("--save-minutes", type=float, default=5)
    parser.add_argument("--resume", action="store_true", help="begin with the file that --out names")
    given = parser.parse_args()
    transformers_logging.disable_progress_bar()
    out = given.out or Path(given.model) / OWN_FILE
    kept = given.texts or out.with_suffix(".texts.json")
    if kept.exists():
        texts = [(text, count) for text, count in json.loads(kept.read_text())]
    else:
        tokenizer = AutoTokenizer.from_pretrained(given.model)
        prompts = [prompt for name in given.prompts for prompt in prompts_of(name, tokenizer)]
        random.Random(0).shuffle(prompts)
        texts = write_texts(given.model, prompts, given.new_tokens, given.writing_minutes)
        kept.write_text(json.dumps(texts))
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    stored_as = AutoModelForCausalLM.from_pretrained(given.model, dtype="auto").dtype
    prefix = DEEPSEEK.prefix.format(model.config.num_hidden_layers)
    tensors = first_tensors(model)
    if given.resume:
        tensors = {name.removeprefix(prefix): each.float() for name, each in load_file(out).items()}
    head = make_head(model, DEEPSEEK, tensors)
    states, num_held_out = states_of(model, texts), max(1, len(texts) // 20)
    rest = texts[-num_held_out:], states[-num_held_out:]
    held_out = next(batches_of(model, *rest, 4 * given.batch, given.length, 1))
    began = saved = shown = time.monotonic()
    print(f"{len(texts)} texts; {sum(each.numel() for each in tensors.values()) / 1e6:.2f} M weights", flush=True)

    def progress() -> float:
        return (time.monotonic() - began) / (60 * given.minutes)

    def report(step: int, found: list[float], equal: list[float]) -> None:
        nonlocal saved, shown
        now = time.monotonic()
        if now - shown > 30:
            shown = now
            line = " ".join(f"{each:.3f}" for each in found), " ".join(f"{each:.3f}" for each in equal)
            print(f"{(now - began) / 60:6.1f} min  step {step}  divergence {line[0]}  equal {line[1]}", flush=True)
        if now - saved > 60 * given.save_minutes:
            saved = now
            with torch.no_grad():
                found_there, equal_there = losses(model, head, held_out)
            there = [[round(each, 3) for each in kind] for kind in ([x.item() for x in found_there], equal_there)]
            print(f"held out: divergence {there[0]}, equal {there[1]}", flush=True)
            save(head, out, stored_as)

    known = texts[:-num_held_out], states[:-num_held_out]
    batches = batches_of(model, *known, given.batch, given.length, 0)
    train(model, head, batches, progress, given.learning_rate, report)
    save(head, out, stored_as)


if __name__ == "__main__":
    main()
