"""Quality of the bundled model: bits per byte, lines filled in, and the share of greedy outputs that loop."""

import json
import math
import pathlib
import random
import statistics
import time

import numpy as np
import torch
import torch.nn.functional as nn_f
from bundled_net import load_model, token_losses
from bundled_text import FIM
from transformers import AutoModelForCausalLM, AutoTokenizer


def find_loop(ids, longest, minimum):
    """Return (start, period) of a block of period 1..longest that repeats back to back over more than minimum tokens.

    (0, 0) if there is none.
    """
    for period in range(1, longest + 1):
        run = period
        for i in range(period, len(ids)):
            run = run + 1 if ids[i] == ids[i - period] else period
            if run > minimum and run >= 2 * period:
                return i + 1 - run, period
    return 0, 0


def four_gram_loop(ids):
    """Return True if a 4-gram of tokens repeats more than eight times in a row."""
    return any(all(ids[i + j] == ids[i + j % 4] for j in range(36)) for i in range(len(ids) - 35))


def generate(model, tokenizer, prompts, batch_size, count=256):
    """Return the greedy continuation of each prompt (lists of ids), `count` tokens or up to and with the end token."""
    order, outputs = sorted(range(len(prompts)), key=lambda i: len(prompts[i])), [None] * len(prompts)
    for start in range(0, len(order), batch_size):
        chunk = order[start : start + batch_size]
        batch = tokenizer.pad({"input_ids": [prompts[i] for i in chunk]}, padding_side="left", return_tensors="pt").to(
            model.device
        )
        with torch.no_grad():
            out = model.generate(**batch, max_new_tokens=count, do_sample=False)
        for i, ids in zip(chunk, out[:, batch["input_ids"].shape[1] :].tolist(), strict=True):
            end = tokenizer.eos_token_id
            outputs[i] = ids[: ids.index(end) + 1] if end in ids else ids
    return outputs


def fill_lines(model, tokenizer, holes, batch_size):
    """Return how often the one missing line of a text is written exactly: greedy, with and without what follows it.

    `fim_line`: the first line of the middle is the missing one (white space at its end aside); `fim_exact`: and the
    model ends the text right there; `left_to_right_line`: the first line after the prefix alone, for comparison.
    """

    def first_line(ids):
        return tokenizer.decode(ids, skip_special_tokens=True).lstrip("\n").split("\n")[0].rstrip()

    encoded = [[tokenizer(part).input_ids for part in hole] for hole in holes]
    lines = [hole[1].rstrip() for hole in holes]
    alone = generate(model, tokenizer, [before for before, _, _ in encoded], batch_size, 40)
    shares = {"left_to_right_line": sum(map(str.__eq__, map(first_line, alone), lines)) / len(lines)}
    marks = tokenizer.convert_tokens_to_ids(list(FIM))
    if None in marks or tokenizer.unk_token_id in marks:
        return shares
    prompts = [[marks[0], *before, marks[1], *after, marks[2]] for before, _, after in encoded]
    middles = generate(model, tokenizer, prompts, batch_size, 40)
    whole = [tokenizer.decode(ids, skip_special_tokens=True).rstrip() for ids in middles]
    ended = [ids[-1] == tokenizer.eos_token_id for ids in middles]
    return {
        **shares,
        "fim_line": sum(map(str.__eq__, map(first_line, middles), lines)) / len(lines),
        "fim_exact": sum(e and w == line for e, w, line in zip(ended, whole, lines, strict=True)) / len(lines),
        "fim_ended": sum(ended) / len(lines),
    }


def collect_stuck(args):
    """Decode greedily after prompts of the training text and keep the loops, for the unlikelihood loss.

    Each sequence is a prompt (weight 1), the model's text before the loop and the loop's first copies (0), and some of
    the copies after them (-1). These are the real states of a looping decoder; repeated real text only resembles them.
    """
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(args.device).eval()
    work, rng = pathlib.Path(args.work), random.Random(args.seed)
    texts = [json.loads(line) for line in (work / "prompts.jsonl").read_text().splitlines()]
    texts = rng.sample(texts, min(len(texts), args.prompts))
    prompts = [ids[: rng.randint(64, 384)] for ids in tokenizer(texts).input_ids]
    outputs = generate(model, tokenizer, prompts, args.batch, 192)
    sequences = []
    for prompt, output in zip(prompts, outputs, strict=True):
        start, period = find_loop(output, 64, 40)
        if period:
            begin = start + max(2 * period, 10)
            output = output[: begin + max(period, 48)]
            weight = np.ones(len(prompt) + len(output), dtype=np.int8)
            weight[len(prompt) : len(prompt) + begin] = 0
            weight[len(prompt) + begin :] = -1
            sequences.append((np.array(prompt + output, dtype=np.uint16), weight))
    np.savez(
        work / "stuck.npz",
        ids=np.concatenate([ids for ids, _ in sequences]),
        weight=np.concatenate([weight for _, weight in sequences]),
        starts=np.cumsum([0] + [len(ids) for ids, _ in sequences])[:-1],
    )
    print(json.dumps({"prompts": len(prompts), "stuck": len(sequences)}))


def evaluate(args):
    """Print held-out bits per byte, lines filled in, looping shares on ClassEval prompts, and two checks, as JSON."""
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(args.device).eval()
    held = np.fromfile(pathlib.Path(args.work) / "held_out.bin", dtype=np.uint16).astype(np.int64)
    held = held[: min(args.rows, (len(held) - 1) // 2048) * 2048 + 1]
    rows = np.stack([held[i : i + 2049] for i in range(0, len(held) - 1, 2048)])
    rows = torch.from_numpy(rows).to(args.device)
    size = len(tokenizer.decode(held[1:], skip_special_tokens=True).encode())
    with torch.no_grad():
        logits = model(rows[:1, :-1]).logits[0].float()
        exact = nn_f.cross_entropy(logits, rows[0, 1:]).item()
        own = load_model(args.model, 0, args.device)
        ours = token_losses(own, rows[:1]).mean().item()
        nats = sum(token_losses(own, rows[i : i + 2]).sum().item() for i in range(0, len(rows), 2))
    sample = "a\r\n\t b  \n\n    déjà vu 😀  x . ' , \x00 _ " + pathlib.Path(__file__).read_text()
    holes = [json.loads(line) for line in (pathlib.Path(args.work) / "holes.jsonl").read_text().splitlines()]
    filled = fill_lines(model, tokenizer, holes[: args.holes], 2 * args.batch)
    with open(args.classeval) as lines:
        prompts = [json.loads(line)["skeleton"] for line in lines][: args.prompts]
    began = time.time()
    encoded = tokenizer(prompts).input_ids
    outputs = generate(model, tokenizer, encoded, args.batch)
    periods = [find_loop(ids, 32, 64)[1] for ids in outputs]
    if args.samples:
        pathlib.Path(args.samples).write_text(
            "".join(
                json.dumps({"prompt_end": prompt[-200:], "period": period, "output": tokenizer.decode(ids)}) + "\n"
                for prompt, period, ids in zip(prompts, periods, outputs, strict=True)
            )
        )
    print(
        json.dumps(
            {
                "model": str(args.model),
                "parameters": sum(p.numel() for p in model.parameters()),
                "held_out_tokens": rows.shape[0] * 2048,
                "held_out_bytes": size,
                "nats_per_token": round(nats / rows.shape[0] / 2048, 4),
                "bits_per_byte": round(nats / math.log(2) / size, 4),
                "own_forward_minus_library": round(ours - exact, 5),
                "round_trip": tokenizer.decode(tokenizer(sample).input_ids) == sample,
                "holes": len(holes[: args.holes]),
                **filled,
                "prompts": len(prompts),
                "prompt_tokens_mean": round(statistics.mean(map(len, encoded))),
                "prompt_tokens_max": max(map(len, encoded)),
                "loop_share_4gram": sum(map(four_gram_loop, outputs)) / len(outputs),
                "loop_share_any_period": sum(p > 0 for p in periods) / len(outputs),
                "eos_share": sum(ids[-1] == tokenizer.eos_token_id for ids in outputs) / len(outputs),
                "mean_generated": statistics.mean(map(len, outputs)),
                "generation_s": round(time.time() - began, 1),
            }
        )
    )
