r"""Train a multi-token-prediction head for a frozen Llama-type model, by self-distillation.

    python -m dev.train_head --model FOLDER --prompts humaneval.jsonl:0-82 classeval.jsonl:0-50 instructions.jsonl \
        --sources /usr/lib/python3 --invented 800 --writing-minutes 60 --minutes 60

The model writes texts after the prompts (`FILE:A-B` takes lines A to B, in the model's chat template if it has one),
after skeletons of the classes below --sources and after prompts that it invents, some greedily, most of them sampled
(dev/head_texts.py; with `--device cuda` dev/gpu_texts.py). They are kept beside --out. The head learns the model's own
distribution of the token after the next one, by the Kullback-Leibler divergence, and later, fed with its own output,
that of the tokens after it (DeepSeek-V3, section 2.2; training on own outputs as in EAGLE-3, Li et al. 2025).
It begins as a copy of the model's last layer. The file is written every few minutes, in the form of DeepSeek V3's keys:
beside a checkpoint's weights lpr finds it there. `--resume` goes on from it. SIGTERM ends the training and writes it.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel
from transformers.utils import logging as transformers_logging

from dev import gpu_texts
from dev.head_texts import (
    INVENTED_TOKENS,
    KINDS,
    Text,
    encoded,
    invented,
    keep_texts,
    kept_texts,
    prompts_of,
    read_texts,
    skeletons,
    user_turn,
    whole_prompts,
    write_texts,
    writer_of,
)
from lpr import SamplingParams
from lpr.model.heads.forms import DEEPSEEK, DRAFT_VOCABULARY
from lpr.model.heads.head import DraftHead
from lpr.model.heads.read import OWN_FILE, make_head
from lpr.model.transformers_versions import passed

STEPS_AHEAD = 4
"""Tokens beyond the next one that the head is trained for, each fed with the output of the one before."""
DECAY = 0.7
"""Weight of each further one."""
AHEAD_FROM = (0.0, 0.25, 0.5, 0.8)
"""Part of the training after which each of them is trained too: the first one matters most and costs least."""
MOST_HELD_OUT = 40
"""Texts that are held out, the last ones, with their prompts."""
PROMPT_PART = 0.25
"""Part of the prompts' tokens that counts as the written ones do."""
MOST_COMPARED = 2048
"""Commonest tokens whose logits are compared, and half as many others at random, which stand for all the rest."""


@torch.no_grad()
def first_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """A head to begin with: the model's last layer once more, with a little of the embedding.

    It gets what the final norm has made of its input's successor, so the norm's weight is taken back. All is scaled
    down, with what the layer adds to it, so that `join` learns fast.
    """
    decoder: Any = model.get_decoder()
    size, norm = model.config.hidden_size, decoder.norm.weight.detach().float()
    ids = torch.randint(0, model.config.vocab_size, (4, 32), generator=torch.Generator().manual_seed(0))
    states = decoder(input_ids=ids.to(model.device), output_hidden_states=True).hidden_states[-2].float()
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


def save(head: DraftHead, path: Path, dtype: torch.dtype, vocabulary: Tensor | None = None) -> None:
    """Write a head's weights, and its draft vocabulary if it has one, as a whole or not at all."""
    prefix = DEEPSEEK.prefix.format(head.layer)
    unfinished = path.with_suffix(".unfinished")
    tensors = {name: each.to(dtype) for name, each in tensors_of(head).items()}
    if vocabulary is not None:
        tensors[DRAFT_VOCABULARY] = vocabulary.int()
    save_file({prefix + name: each for name, each in tensors.items()}, unfinished)
    os.replace(unfinished, path)


@dataclass
class Batch:
    """Pieces of texts."""

    ids: Tensor
    """[B, T]."""
    mask: Tensor
    """[B, T]: true where the divergence counts."""
    hidden: Tensor
    """[B, T, H]: the model's last hidden states."""
    tokens: Tensor
    """[V']: those whose logits are compared; all of a large vocabulary would take most of the time."""
    rest: Tensor
    """[V']: added to their logits, the logarithm of the number of tokens that one stands for."""


def guessing_mask(length: int, ahead: int, device: torch.device) -> Tensor:
    """Who sees whom when entries are made of the head's own output for the `ahead`-th time, [1, 1, entries, keys].

    As when it guesses: an entry sees those of the text before its own chain, the chain's, and itself. Keys are those of
    the first pass, of the second one and so on; pass number p has entries p - 1 to `length` - 2.
    """
    entries = torch.arange(ahead - 1, length - 1, device=device)[:, None]
    keys = [torch.arange(number - 1, length - 1, device=device) for number in range(1, ahead + 1)]
    seen = [keys[0] <= entries - ahead + 1]
    seen += [keys[number - 1] == entries - ahead + number for number in range(2, ahead + 1)]
    return torch.cat(seen, 1)[None, None]


def outputs(head: DraftHead, embeddings: Tensor, hidden: Tensor, num_ahead: int) -> Iterator[Tensor]:
    """What a head makes of tokens' `embeddings` and `hidden` states [B, T, H], then of its own output, and so on.

    The number a is [B, T - a, H]: entry i, from a - 1 on, of token i + 1 and, in the first one, hidden state i, later
    what the head has made of entry i - 1.
    """
    length, state, cache = hidden.shape[1], hidden, DynamicCache()
    positions = torch.arange(length, device=hidden.device)[None]
    for ahead in range(1, num_ahead + 1):
        how = {"position_ids": positions[:, ahead - 1 : length - 1], "use_cache": True, **passed(cache, head.block)}
        mask = None if ahead == 1 else guessing_mask(length, ahead, hidden.device)
        state = head(embeddings[:, ahead:], state[:, :-1], attention_mask=mask, **how)
        yield state


def losses(
    model: PreTrainedModel, head: DraftHead, batch: Batch, num_ahead: int = STEPS_AHEAD
) -> tuple[list[Tensor], list[Tensor]]:
    """Per token ahead the mean divergence of a batch where its mask is true, and the share of equal argmax."""
    weight: Tensor = model.get_output_embeddings().weight[batch.tokens]  # type: ignore[index]
    with torch.no_grad(), torch.autocast(batch.ids.device.type, enabled=False):
        wanted = (batch.hidden[batch.mask] @ weight.T + batch.rest).log_softmax(-1)
        embeddings = model.get_input_embeddings()(batch.ids)
    found, equal, rows = list[Tensor](), list[Tensor](), (batch.mask.flatten().cumsum(0) - 1).view_as(batch.ids)
    for ahead, state in enumerate(outputs(head, embeddings, batch.hidden, num_ahead), 1):
        counted = batch.mask[:, ahead:]
        logits, target = state[counted] @ weight.T + batch.rest, wanted[rows[:, ahead:][counted]]
        found.append(F.kl_div(logits.log_softmax(-1), target, reduction="batchmean", log_target=True))
        equal.append((logits.argmax(-1) == target.argmax(-1)).float().mean())
    return found, equal


def train(
    model: PreTrainedModel,
    head: DraftHead,
    batches: Iterator[Batch],
    progress: Any,
    learning_rate: float = 1e-3,
    report: Any = lambda step, found, equal: None,
    half: bool = False,
) -> None:
    """Train until `progress()` is 1; `report` hears of each step. With `half`, products are in bfloat16."""
    model.requires_grad_(False)
    head.train().requires_grad_(True)
    optimizer = torch.optim.AdamW(head.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    weights, step = [DECAY**ahead for ahead in range(STEPS_AHEAD)], 0
    while (done := progress()) < 1:
        rate = min(1.0, (step + 1) / 50) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * rate
        batch = next(batches)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=half):
            found, equal = losses(model, head, batch, sum(done >= begin for begin in AHEAD_FROM))
        optimizer.zero_grad()
        torch.stack([each * weight for each, weight in zip(found, weights, strict=False)]).sum().backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        step += 1
        report(step, found, equal)
    head.eval().requires_grad_(False)


def commonest(texts: Sequence[Text], vocab_size: int, count: int) -> Tensor:
    """The ids of the `count` tokens that a model has written most often, ascending.

    Of tokens that are equally rare those of lower ids are taken: a tokenizer merges the commonest pairs first.
    """
    counts = torch.bincount(torch.cat([text.ids[text.num_prompt :] for text in texts]), minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:count].sort().values


def batches_of(
    texts: Sequence[Text], vocab_size: int, size: int, length: int, seed: int, most_compared: int = MOST_COMPARED
) -> Iterator[Batch]:
    """Pieces of texts that end in what the model has written, where the texts' states are."""
    generator, device = torch.Generator().manual_seed(seed), some(texts[0].states).device
    common = commonest(texts, vocab_size, most_compared)
    all_ids, states = torch.cat([text.ids for text in texts]), torch.cat([some(text.states) for text in texts])
    lengths, prompts = torch.tensor([(len(text.ids), text.num_prompt) for text in texts]).T
    begins, steps = lengths.cumsum(0) - lengths, torch.arange(length)
    while True:
        chosen = torch.randint(len(texts), (size,), generator=generator)
        total, prompt = lengths[chosen], prompts[chosen]
        middle = (prompt + total) // 2
        end = middle + (torch.rand(size, generator=generator) * (total + 1 - middle)).long()
        begin = (end - length).clamp(min=0)
        valid = steps < (end - begin)[:, None]
        places = (begins[chosen] + begin)[:, None] + steps.where(valid, 0)
        ids = all_ids[places].where(valid, 0)
        mask = (torch.rand(size, length, generator=generator) < PROMPT_PART) & valid
        mask |= (steps >= (prompt - 1 - begin)[:, None]) & valid
        tokens = torch.cat([common, ids.flatten()]).unique()
        is_other = torch.ones(vocab_size, dtype=torch.bool).index_fill_(0, tokens, False)
        others = is_other.nonzero()[:, 0]
        picked = others[torch.randperm(len(others), generator=generator)[: most_compared // 2]]
        rest = torch.zeros(len(tokens) + len(picked))
        rest[len(tokens) :] = math.log(max(1, len(others)) / max(1, len(picked)))
        hidden = states[places.to(device)].float() * valid.to(device)[..., None]
        yield Batch(*(each.to(device) for each in (ids, mask, hidden, torch.cat([tokens, picked]), rest)))


def some(states: Tensor | None) -> Tensor:
    """States that are there."""
    assert states is not None
    return states


def asked_of(prompts: Sequence[list[int]], new_tokens: int) -> Iterator[tuple[list[int], SamplingParams]]:
    """Each prompt once with every temperature of KINDS, in an order by chance, all prompts before any comes again."""
    order = random.Random(0).sample(range(len(prompts)), len(prompts))
    for turn in range(len(KINDS)):
        for seed, place in enumerate(order, turn * len(order)):
            kind = KINDS[(place + turn) % len(KINDS)]
            yield prompts[place], SamplingParams(max_new_tokens=new_tokens, temperature=kind, seed=seed)


def written_texts(given: argparse.Namespace) -> list[Text]:
    """Texts of the model after all the prompts that the command line names."""
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    prompts = [prompt for name in given.prompts for prompt in prompts_of(name, tokenizer)]
    made = [text for folder in given.sources for text in skeletons(folder)]
    if given.device == "cuda":
        model = gpu_texts.writing_model(given.model, torch.bfloat16 if given.bfloat16 else torch.float32, given.device)
        end, before = tokenizer.eos_token_id, [user_turn(tokenizer)] * given.invented
        begun = gpu_texts.write(model, before, 0.9, 0, INVENTED_TOKENS, end) if before else []
        made += whole_prompts([ids for ids in begun if ids[-1] == end], tokenizer)
        prompts += [encoded(text, tokenizer) for text in made]
        return gpu_texts.write_texts(model, prompts, given.new_tokens, end, given.writing_minutes)
    engine = writer_of(given.model, "bfloat16" if given.bfloat16 else "float32")
    made += invented(engine, tokenizer, given.invented) if given.invented else []
    prompts += [encoded(text, tokenizer) for text in made]
    texts = write_texts(engine, asked_of(prompts, given.new_tokens), given.writing_minutes)
    engine.close()
    return texts


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", nargs="+", default=[], help="JSONL files with a prompt a line, FILE or FILE:A-B")
    parser.add_argument("--sources", nargs="+", type=Path, default=[], help="folders of Python sources")
    parser.add_argument("--invented", type=int, default=0, help="prompts that the model invents, if it has a template")
    parser.add_argument("--texts", type=Path, help="where the written texts are kept and found again")
    parser.add_argument("--out", type=Path, help=f"default: {OWN_FILE} in the model's folder")
    parser.add_argument("--minutes", type=float, default=150, help="of training")
    parser.add_argument("--writing-minutes", type=float, default=30, help="of writing texts")
    parser.add_argument("--new-tokens", type=int, default=224)
    parser.add_argument("--draft-vocabulary", type=int, default=16384, help="tokens that may be guessed; 0: all")
    parser.add_argument("--batch", type=int, default=6)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--save-minutes", type=float, default=5)
    parser.add_argument("--compared", type=int, default=MOST_COMPARED, help="commonest tokens compared by themselves")
    parser.add_argument("--bfloat16", action="store_true", help="multiply in bfloat16: faster with AVX-512 BF16 or AMX")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--resume", action="store_true", help="begin with the file that --out names")
    given = parser.parse_args()
    transformers_logging.disable_progress_bar()
    out = given.out or Path(given.model) / OWN_FILE
    kept = given.texts or out.with_suffix(".texts.safetensors")
    if not kept.exists():
        keep_texts(written_texts(given), kept)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval().to(given.device)
    texts = kept_texts(kept)
    if any(text.states is None for text in texts):
        with torch.autocast(given.device, torch.bfloat16, enabled=given.bfloat16):
            read_texts(model, texts)
    stored_as = AutoModelForCausalLM.from_pretrained(given.model, dtype="auto").dtype
    prefix = DEEPSEEK.prefix.format(model.config.num_hidden_layers)
    tensors = first_tensors(model)
    if given.resume:
        tensors = {name.removeprefix(prefix): each.float() for name, each in load_file(out).items()}
        tensors.pop(DRAFT_VOCABULARY, None)
    head = make_head(model, DEEPSEEK, tensors).to(given.device)
    limit, vocab_size = given.draft_vocabulary, model.config.vocab_size
    vocabulary = commonest(texts, vocab_size, limit) if 0 < limit < vocab_size else None
    num_held_out = min(MOST_HELD_OUT, max(1, len(texts) // 20))
    held_out = next(batches_of(texts[-num_held_out:], vocab_size, given.batch, given.length, 1))
    held_out.tokens = torch.arange(vocab_size, device=given.device)  # all of them
    held_out.rest = torch.zeros((), device=given.device)
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    began = saved = shown = time.monotonic()
    print(f"{len(texts)} texts; {sum(each.numel() for each in tensors.values()) / 1e6:.2f} M weights", flush=True)

    def progress() -> float:
        return 1.0 if stopped else (time.monotonic() - began) / (60 * given.minutes)

    def report(step: int, found: list[Tensor], equal: list[Tensor]) -> None:
        nonlocal saved, shown
        now = time.monotonic()
        if now - shown > 30:
            shown = now
            line = [" ".join(f"{each.item():.3f}" for each in kind) for kind in (found, equal)]
            print(f"{(now - began) / 60:6.1f} min  step {step}  divergence {line[0]}  equal {line[1]}", flush=True)
        if now - saved > 60 * given.save_minutes:
            saved = now
            with torch.no_grad():
                found_there, equal_there = losses(model, head, held_out)
            there = [[round(each.item(), 3) for each in kind] for kind in (found_there, equal_there)]
            print(f"held out: divergence {there[0]}, equal {there[1]}", flush=True)
            save(head, out, stored_as, vocabulary)

    known = {tuple(text.ids[: text.num_prompt].tolist()) for text in texts[-num_held_out:]}
    others = [text for text in texts if tuple(text.ids[: text.num_prompt].tolist()) not in known]
    batches = batches_of(others, vocab_size, given.batch, given.length, 0, given.compared)
    train(model, head, batches, progress, given.learning_rate, report, given.bfloat16)
    save(head, out, stored_as, vocabulary)


if __name__ == "__main__":
    main()
