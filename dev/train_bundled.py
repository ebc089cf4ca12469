r"""Build the small bundled model: collect Python text, train a tokenizer and a Llama model, evaluate it.

The sub-commands run in this order, each one reading what the former wrote under ``--work``:

    python dev/train_bundled.py data  --work ../train [--sources DIR ...]
    python dev/train_bundled.py train --work ../train --minutes 90 --out lpr/assets/bundled [--resume]
    python dev/train_bundled.py eval  --work ../train --model lpr/assets/bundled --classeval FILE

Half of the documents get holes (prefix, suffix, middle: Bavarian et al. 2022), so that the model can fill in. To go on
from trained weights with their tokenizer, and against the loops that they write:

    python dev/train_bundled.py data  --work ../train --tokenizer lpr/assets/bundled
    python dev/train_bundled.py stuck --work ../train --model lpr/assets/bundled
    python dev/train_bundled.py train --work ../train --from lpr/assets/bundled --lr-matrix 0.003 --lr-other 0.001 \
        --cool-down 0.95 --long-from 1 --stuck-share 0.3 --repeat-share 0 --repeat-from 0 --teacher FIRST_WEIGHTS

Everything is seeded, but the number of optimizer steps follows the clock (``--minutes``), so two runs
on different machines see different amounts of text. The model only needs torch, transformers and
tokenizers; it trains on two CPU cores and, with ``--device cuda --tokens 131072``, on a GPU.
"""

import argparse
import json
import math
import os
import pathlib
import statistics
import sysconfig
import time

import numpy as np
import torch
from bundled_measures import collect_stuck, evaluate
from bundled_net import (
    batch_loss,
    export,
    has_bf16,
    load_model,
    make_model,
    make_repetition,
    mix,
    newton_schulz,
    token_losses,
)
from bundled_text import FIM, collect
from transformers import AutoTokenizer


def rate(progress, cool_down):
    """Return the WSD factor of the learning rate: warm-up, stable, linear cool-down to 2 % over the last share."""
    return min(1.0, progress / 0.015 + 0.02, max(0.02, (1 - progress) / cool_down))


class Clock:
    """Progress of the training by training time, not by steps.

    Time in which the process is stopped or compiles must not use up the schedule: a step counts at most three times the
    median of the last hundred. The deadline still holds, because the rest of the schedule shrinks to it.
    """

    def __init__(self, minutes, deadline, counted, count_all):
        """With `count_all` all time counts: for a busy machine, where the process mostly waits."""
        self.budget, self.counted, self.times, self.deadline = minutes * 60, counted, [], math.inf
        self.most = math.inf if count_all else 3
        if deadline:
            hour, minute = map(int, deadline.split(":"))
            self.deadline = time.time() + ((hour * 60 + minute) * 60 - time.time() % 86400) % 86400

    def progress(self):
        """Return the finished share of the schedule; 1.0 at its end."""
        left = min(self.budget - self.counted, self.deadline - time.time())
        return 1.0 if left <= 0 else self.counted / (self.counted + left)

    def add(self, spent):
        """Count one step."""
        self.times = [*self.times, spent][-101:]
        self.counted += min(spent, self.most * statistics.median(self.times)) if len(self.times) > 5 else 0.0


class Batches:
    """Gives token batches out of shuffled blocks of 2048 tokens; every pass over them has its own order."""

    def __init__(self, work, args, tokenizer):
        self.data = np.fromfile(work / "train.bin", dtype=np.uint16)
        self.blocks, self.seed, self.rows = (len(self.data) - 1) // 2048, args.seed, max(1, args.tokens // 2048)
        self.order, self.order_epoch = None, -1
        self.middle_weight, self.end_weight = args.middle_weight, args.end_weight
        self.marks = np.array([*tokenizer.convert_tokens_to_ids(list(FIM)), tokenizer.eos_token_id])
        texts = [tokenizer.decode([i], skip_special_tokens=True) for i in range(len(tokenizer))]
        self.newlines = np.array([set(text) == {"\n"} for text in texts])
        self.stuck = dict(np.load(work / "stuck.npz")) if args.stuck_share else None

    def get(self, state, length, repeat_share, stuck_share):
        """Return rows of length + 1 tokens, and the weights of their predictions (see batch_loss)."""
        rows, rng = [], np.random.default_rng([self.seed, 7, state["step"]])
        for _ in range(self.rows):
            epoch, index = divmod(state["block"], self.blocks)
            if epoch != self.order_epoch:
                self.order = np.random.default_rng([self.seed, epoch]).permutation(self.blocks)
                self.order_epoch = epoch
            first = int(self.order[index]) * 2048
            rows += [self.data[first + s : first + s + length + 1] for s in range(0, 2048, length)]
            state["block"] += 1
        ids = np.stack(rows).astype(np.int64)
        weights = np.ones((len(rows), length), dtype=np.float32)
        weights[ids[:, 1:] == self.marks[3]] = self.end_weight
        weights[self.inside(ids)[:, 1:]] = self.middle_weight
        for row, weight in zip(ids, weights, strict=True):
            kind = rng.random()
            if kind < repeat_share:
                make_repetition(row, weight, rng, self.newlines)
            elif kind < repeat_share + stuck_share:
                first = int(rng.choice(self.stuck["starts"]))
                picked = np.arange(first, first + length + 1) % len(self.stuck["ids"])
                row[:], weight[:] = self.stuck["ids"][picked], self.stuck["weight"][picked[1:]]
        return torch.from_numpy(ids), torch.from_numpy(weights)

    def inside(self, ids):
        """Return a mask of the tokens of a middle, with its end token and without its marker."""
        places = np.where(np.isin(ids, self.marks), np.arange(ids.shape[1]), 0)
        before = np.maximum.accumulate(places, axis=1)[:, :-1]  # the last mark strictly before each token
        found = np.take_along_axis(ids, before, axis=1) == self.marks[2]
        return np.concatenate([np.zeros((len(ids), 1), dtype=bool), found], axis=1)


def write_line(args, record):
    """Append one JSON line to the training log."""
    with open(pathlib.Path(args.work) / "train.jsonl", "a") as log:
        log.write(json.dumps({**record, "time": time.strftime("%H:%M:%S")}) + "\n")


def train(args):
    """Train by the clock; stop when the budget or the deadline is reached, the cool-down complete."""
    work, device = pathlib.Path(args.work), args.device
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    (work / "train.pid").write_text(str(os.getpid()))
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    vocab = len(tokenizer)
    model = load_model(args.start, vocab, device) if args.start else make_model(args, vocab)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    if not has_bf16(torch.device(device)):
        torch.optim._muon._zeropower_via_newtonschulz = newton_schulz
    optimizers = [
        torch.optim.Muon(matrices, lr=args.lr_matrix, weight_decay=0.02, momentum=0.95),
        torch.optim.AdamW(others, lr=args.lr_other, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]
    average = {name: p.clone() for name, p in parameters.items()}  # for the exports before the cool-down
    state = {"step": 0, "tokens": 0, "counted": 0.0, "block": 0}
    if args.resume:
        saved = torch.load(work / "checkpoint.pt", map_location=device, weights_only=False)
        model.load_state_dict(saved["model"])
        for optimizer, values in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        average, state = saved["average"], saved["state"]
    loss_function = torch.compile(batch_loss, dynamic=False) if args.compile else batch_loss
    clock = Clock(args.minutes, args.deadline, state["counted"], args.count_all)
    batches = Batches(work, args, tokenizer)
    teacher = load_model(args.teacher, 0, device).requires_grad_(False) if args.teacher else None
    last_export = last_log = time.time()
    while (progress := clock.progress()) < 1.0 and not (args.max_steps and state["step"] >= args.max_steps):
        began = time.time()
        for optimizer, base in zip(optimizers, (args.lr_matrix, args.lr_other), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = base * rate(progress, args.cool_down)
        length = 2048 if progress > args.long_from else 1024
        late = progress > args.repeat_from
        shares = (args.repeat_share, args.stuck_share) if late else (0.0, 0.0)
        ids, weight = (x.to(device) for x in batches.get(state, length, *shares))
        total, micro = torch.zeros((), device=device), max(1, args.micro // length)
        scale = 1.0 / weight.abs().sum()
        for i in range(0, len(ids), micro):
            part = slice(i, i + micro)
            loss, nll = loss_function(model, ids[part], weight[part], scale, teacher)
            loss.backward()
            total += nll
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        keep = min(0.995, (1 + state["step"]) / (20 + state["step"]))
        torch._foreach_lerp_(list(average.values()), list(parameters.values()), 1 - keep)
        loss = (total / (weight > 0).sum()).item()
        clock.add(time.time() - began)
        state.update(step=state["step"] + 1, tokens=state["tokens"] + weight.numel(), counted=clock.counted)
        if state["step"] % 10 == 0:
            speed = round(10 * weight.numel() / (time.time() - last_log))
            last_log = time.time()
            write_line(
                args,
                {
                    "step": state["step"],
                    "tokens": state["tokens"],
                    "loss": round(loss, 4),
                    "tokens_per_s": speed,
                    "lr": round(args.lr_matrix * rate(progress, args.cool_down), 6),
                    "progress": round(progress, 4),
                    "grad_norm": round(float(norm), 3),
                    "length": length,
                },
            )
        if time.time() - last_export > 60 * args.export_minutes:
            last_export = time.time()
            save(model, average, optimizers, state, work)
            report(average if progress < 0.8 else parameters, state, progress, args)
    save(model, average, optimizers, state, work)
    report(parameters, state, progress, args)


def report(weights, state, progress, args):
    """Measure a slice of the held-out text with the given weights, log the loss, and export them."""
    num = args.slice_rows
    held = np.fromfile(pathlib.Path(args.work) / "held_out.bin", dtype=np.uint16)[: num * 2049]
    rows = torch.from_numpy(held.astype(np.int64)).view(num, 2049).to(args.device)
    probe = make_model(args, len(weights["model.embed_tokens.weight"]))
    probe.load_state_dict(weights, strict=False)  # lm_head is the tied embedding
    with torch.no_grad():
        loss = statistics.mean(token_losses(probe, rows[i : i + 2]).mean().item() for i in range(0, num, 2))
    card = {**state, "progress": round(progress, 4), "held_out_nats_per_token": round(loss, 4)}
    write_line(args, {"export": str(args.out), **card})
    export(probe, {name: w.cpu() for name, w in weights.items()}, args, card)


def save(model, average, optimizers, state, work):
    """Write everything that --resume needs, atomically."""
    torch.save(
        {
            "model": model.state_dict(),
            "average": average,
            "state": state,
            "optimizers": [o.state_dict() for o in optimizers],
        },
        work / "checkpoint.tmp",
    )
    os.replace(work / "checkpoint.tmp", work / "checkpoint.pt")


def main():
    """Parse the command line and run one of the sub-commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--work", default="train", help="folder of the intermediate files")
    shared.add_argument("--seed", type=int, default=1)
    shared.add_argument("--threads", type=int, default=2)
    shared.add_argument("--device", default="cpu")
    p = commands.add_parser("data", parents=[shared])
    p.add_argument("--sources", nargs="+", default=[sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")])
    p.add_argument("--package-cap", type=int, default=4_000_000, help="bytes one package may contribute")
    p.add_argument("--vocab", type=int, default=4096, help="tokens of a new tokenizer, without those for holes")
    p.add_argument("--tokenizer", help="use the tokenizer of this folder instead of training one")
    p.add_argument("--fim", type=float, default=0.35, help="share of the documents that get holes")
    p.set_defaults(run=collect)
    p = commands.add_parser("stuck", parents=[shared])
    p.add_argument("--model", default="lpr/assets/bundled")
    p.add_argument("--prompts", type=int, default=640)
    p.add_argument("--batch", type=int, default=32)
    p.set_defaults(run=collect_stuck)
    p = commands.add_parser("train", parents=[shared])
    for name, kind, value in (
        ("minutes", float, 90),
        ("tokens", int, 8192),
        ("micro", int, 4096),
        ("layers", int, 6),
        ("hidden", int, 256),
        ("intermediate", int, 704),
        ("lr-matrix", float, 0.02),
        ("lr-other", float, 0.003),
        ("long-from", float, 0.6),
        ("cool-down", float, 0.27),
        ("repeat-from", float, 0.73),
        ("repeat-share", float, 0.2),
        ("stuck-share", float, 0.0),
        ("middle-weight", float, 1.0),
        ("end-weight", float, 1.0),
        ("export-minutes", float, 10),
        ("max-steps", int, 0),
        ("slice-rows", int, 24),
    ):
        p.add_argument("--" + name, type=kind, default=value)
    p.add_argument("--from", dest="start", help="start from the weights in this folder")
    p.add_argument("--teacher", help="weights that say what to write instead of a fault")
    p.add_argument("--deadline", help="HH:MM in UTC at which the training ends")
    p.add_argument("--out", default="lpr/assets/bundled")
    p.add_argument("--resume", action="store_true")
    p.add_argument("--compile", action="store_true")
    p.add_argument("--count-all", action="store_true", help="also count time in which the process was stopped")
    p.set_defaults(run=train)
    p = commands.add_parser("mix")
    p.add_argument("parts", nargs="+", metavar="DIR=SHARE", help="weights to average; the first is the widest")
    p.add_argument("--out", required=True)
    p.set_defaults(run=mix)
    p = commands.add_parser("eval", parents=[shared])
    p.add_argument("--model", default="lpr/assets/bundled")
    p.add_argument("--classeval", required=True, help="ClassEval as JSON lines")
    p.add_argument("--batch", type=int, default=25)
    p.add_argument("--prompts", type=int, default=100, help="ClassEval skeletons")
    p.add_argument("--rows", type=int, default=100_000, help="held-out rows of 2048 tokens, at most")
    p.add_argument("--holes", type=int, default=300)
    p.add_argument("--samples", help="write the generated texts to this file")
    p.set_defaults(run=evaluate)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
