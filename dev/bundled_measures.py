"""Quality of the bundled model: bits per byte, lines filled in, and what is wrong with the texts that it writes."""

import json
import math
import pathlib
import random
import re
import statistics
import time

import numpy as np
import torch
import torch.nn.functional as nn_f
from bundled_net import load_model, token_losses
from bundled_text import FIM, write_lines
from transformers import AutoModelForCausalLM, AutoTokenizer

FILE_START = re.compile(
    r"(?<=[^\s#>])(?:from [\w.]+ import |import [a-z_][\w.]*(?:$|,| as )|(?:class|def) \w+(?:\(.*\))?:$)"
    r"|(?:^[ \t]*(?:if|elif|else|for|while|with|try)\b[^\"\n]*:|\breturn)\"\"\"$"
    r"|(?<=[(\[{,=])\n(?:from [\w.]+ import |import [a-z_]|class \w+[(:])",
    re.MULTILINE,
)

KEYWORD = "(?:class|import|from|def)"
GLUED = re.compile(rf"\b(?P<word>\w*[a-zA-Z0-9])(?P<inside>{KEYWORD})(?![a-z])|[,;)\]}}=](?P<behind>{KEYWORD})\b")
COMPOUND = re.compile(
    r"(?:sub|super|data|meta|base|multi|mixin|inner|outer|my|parent|child|css|is|in|sys|zip|re|py|style|typed?|un|if|end)$",
    re.IGNORECASE,
)
"""Ends of words before `class`, `import`, `from`, `def` that people write."""

BLOCK_END = re.compile(r"\n[ \t]*(return|pass|raise|\.\.\.)\b[^\n]*[^\n,(\[{\\:]$|\n[ \t]*\.\.\.$")


def begun_file(text):
    """Return the place where another file begins in the middle of a line or of brackets, or -1.

    The tokens of a file's first word have no space before them, so it stands right after other text.
    """
    found = FILE_START.search(text)
    return found.start() if found else -1


def glued_word(text):
    """Return the place where `class`, `import`, `from` or `def` is glued to other text within a line, or -1.

    Of 167,633 tokens of held-out text it finds one place, `0123456789ABCDEFabcdef`.
    """
    for found in GLUED.finditer(text):
        if found["word"] is None or not COMPOUND.search(found["word"]):
            return found.start(found.lastgroup)
    return -1


def first_fault(text):
    """Return the first place where another file begins in a line or a word is glued to other text, or -1."""
    places = [place for place in (begun_file(text), glued_word(text)) if place >= 0]
    return min(places, default=-1)


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


def generate(model, tokenizer, prompts, batch_size, count=256, temperature=0.0):
    """Return the continuation of each prompt (lists of ids), `count` tokens or up to and with the end token."""
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    order, outputs = sorted(range(len(prompts)), key=lambda i: len(prompts[i])), [None] * len(prompts)
    for start in range(0, len(order), batch_size):
        chunk = order[start : start + batch_size]
        batch = tokenizer.pad({"input_ids": [prompts[i] for i in chunk]}, padding_side="left", return_tensors="pt").to(
            model.device
        )
        with torch.no_grad():
            out = model.generate(**batch, max_new_tokens=count, **sampling)
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
    """Decode after prompts of the training text, half of them sampled, and keep what the training is to unlearn.

    These are the real states of a decoder that loops or begins another file in the middle of a line; repeated real text
    only resembles them. An end token closes each sequence, so that the next prompt never follows text that was cut.
    """
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(args.device).eval()
    work, rng = pathlib.Path(args.work), random.Random(args.seed)
    texts = [json.loads(line) for line in (work / "prompts.jsonl").read_text().splitlines()]
    texts = rng.sample(texts, min(len(texts), args.prompts))
    prompts = [ids[: rng.randint(64, 384)] for ids in tokenizer(texts).input_ids]
    middle = len(prompts) // 2
    outputs = generate(model, tokenizer, prompts[:middle], args.batch, 192)
    outputs += generate(model, tokenizer, prompts[middle:], args.batch, 192, temperature=0.6)
    pairs = zip(prompts, outputs, strict=True)
    sequences = [found for pair in pairs if (found := stuck_sequence(tokenizer, *pair, rng))]
    np.savez(
        work / "stuck.npz",
        ids=np.concatenate([ids for ids, _ in sequences]),
        weight=np.concatenate([weight for _, weight in sequences]),
        starts=np.cumsum([0] + [len(ids) for ids, _ in sequences])[:-1],
    )
    print(json.dumps({"prompts": len(prompts), "stuck": len(sequences)}))


def stuck_sequence(tokenizer, prompt, output, rng):
    """Return (ids, weights) of a prompt, its output and an end token, or None if the output is sound.

    Weights: 1 for the prompt, 0 for the output, -1 for the first two tokens of a fault and for copies in a loop.
    Half of the loops are cut where the copies begin, half after some of them. Where a block ends there the text ends,
    as a document does: one newline and the end token, both of weight 1; else the end token weighs 0.
    """
    lengths = [len(tokenizer.decode([token])) for token in output]
    place = first_fault(tokenizer.decode(output))
    at = int(np.searchsorted(np.cumsum(lengths), place, side="right")) if place >= 0 else len(output)
    start, period = find_loop(output, 64, 40)
    first, tail, weights = at, [tokenizer.eos_token_id], [0]
    stop = at + 2
    if period and start + 2 * period < at:
        first = start + max(period if period > 15 else 2 * period, 10)  # a short line may well stand twice
        stop = min(at, first + (period if rng.random() < 0.5 else rng.randint(8, max(period, 48))))
        ends = [i for i in range(first - 1, stop) if set(tokenizer.decode([output[i]])) == {"\n"}]
        blocks = [i for i in ends if BLOCK_END.search(tokenizer.decode(output[:i]))]
        if blocks:
            stop = blocks[0 if stop - first == period else -1]
            tail, weights = [*tokenizer("\n").input_ids, *tail], [1, 1]
    elif place < 0:
        return None
    weight = np.zeros(len(prompt) + stop, dtype=np.int8)
    weight[: len(prompt)], weight[len(prompt) + first :] = 1, -1
    return np.array([*prompt, *output[:stop], *tail], dtype=np.uint16), np.append(weight, weights).astype(np.int8)


def complete(model, tokenizer, prompts, batch_size, temperature):
    """Return (ids, text) of the continuation of each prompt."""
    torch.manual_seed(1)
    outputs = generate(model, tokenizer, prompts, batch_size, temperature=temperature)
    return [(ids, tokenizer.decode(ids)) for ids in outputs]


def faults(outputs, end):
    """Return the shares of (ids, text) pairs with each fault, and of those that end by themselves."""
    every = {
        "begun_file": [begun_file(text) >= 0 for _, text in outputs],
        "begun_or_glued": [first_fault(text) >= 0 for _, text in outputs],
        "loop_4gram": [four_gram_loop(ids) for ids, _ in outputs],
        "loop_any_period": [find_loop(ids, 32, 64)[1] > 0 for ids, _ in outputs],
        "ended": [ids[-1] == end for ids, _ in outputs],
    }
    shares = {name: sum(values) / len(outputs) for name, values in every.items()}
    return {**shares, "mean_tokens": statistics.mean(len(ids) for ids, _ in outputs)}


def evaluate(args):
    """Print held-out bits per byte, lines filled in, faults of texts after ClassEval prompts, two checks, as JSON."""
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
    texts = {name: complete(model, tokenizer, encoded, args.batch, t) for name, t in (("greedy", 0.0), ("0.6", 0.6))}
    if args.samples:
        lines = [{"prompt_end": p[-200:]} | {n: t[i][1] for n, t in texts.items()} for i, p in enumerate(prompts)]
        write_lines(pathlib.Path(args.samples), lines)
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
                **{name: faults(outputs, tokenizer.eos_token_id) for name, outputs in texts.items()},
                "generation_s": round(time.time() - began, 1),
            }
        )
    )
