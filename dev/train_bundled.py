"""Build the small bundled model: collect Python text, train a tokenizer and a Llama model, evaluate it.

The sub-commands run in this order, each one reading what the former wrote under ``--work``:

    python dev/train_bundled.py data  --work ../train [--sources DIR ...]
    python dev/train_bundled.py train --work ../train --minutes 90 --out lpr/assets/bundled [--resume]
    python dev/train_bundled.py eval  --work ../train --model lpr/assets/bundled --classeval FILE

Everything is seeded, but the number of optimizer steps follows the clock (``--minutes``), so two runs
on different machines see different amounts of text. The model only needs torch, transformers and
tokenizers; it trains on two CPU cores and, with ``--device cuda --tokens 131072``, on a GPU.
"""

import argparse
import ast
import collections
import hashlib
import json
import math
import multiprocessing
import os
import pathlib
import random
import re
import shutil
import statistics
import sysconfig
import time
import warnings

import numpy as np
import torch
import torch.nn.functional as nn_f
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

EOS, PAD = "<|endoftext|>", "<|pad|>"
# Tests and fixtures repeat themselves, vendored trees are copies, locale and data tables are not code.
SKIP_DIR = re.compile(
    r"^(tests?|testing|fixtures?|testdata|_?vendor(ed)?|_?externals?|extern|locales?|migrations|idlelib|"
    r"lib2to3|pydoc_data|encodings|node_modules|__pycache__|unicode_data|lexers|styles|botocore|boto3|awscli|pip|"
    r"pkg_resources|ensurepip|antlr4|_inductor_generated)$"
)
SKIP_FILE = re.compile(
    r"(_pb2(_grpc)?|_tables?|_?parsetab|lextab|_generated|_version|unicode.*|idnadata|uts46data)\.py$"
)
GENERATED = re.compile(r"auto-?generated|generated (by|from|file|automatically)|do not (edit|modify)", re.I)


def file_hash(text):
    """Return 64 bits of a stable hash, because the built-in hash changes from run to run."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def read_source(path):
    """Return the text of one file if it is ordinary hand-written Python, else None."""
    try:
        text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError):
        return None
    lines = text.split("\n")
    if not 400 <= len(text) <= 400_000 or len(lines) < 12 or max(map(len, lines)) > 400:
        return None
    if GENERATED.search(text[:800]):
        return None
    letters = sum(c.isalpha() or c in " \n_" for c in text)
    digits = sum(c.isdigit() for c in text)
    if letters < 0.68 * len(text) or digits > 0.08 * len(text):  # number and string tables
        return None
    return text


def cut_documents(text):
    """Return the documents of one file: the whole file, or each of its classes and functions by itself.

    The short documents carry the imports that they use, as a class skeleton in a prompt does, and show
    the model many more ends of text than whole files would. Which form a file gets is decided by its hash.
    """
    warnings.simplefilter("ignore")  # invalid escapes in other people's strings
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    if file_hash(text) % 100 < 45:
        return [text.strip("\n") + "\n"]
    lines, imports, documents, small = text.split("\n"), [], [], []
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.asname or alias.name.split(".")[0] for alias in node.names]
            imports.append((set(names), "\n".join(lines[node.lineno - 1 : node.end_lineno])))
    for node in tree.body:
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        start = min([node.lineno] + [d.lineno for d in node.decorator_list])
        body = "\n".join(lines[start - 1 : node.end_lineno])
        if len(body) < 120:
            continue
        used = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        head = "\n".join(source for names, source in imports if names & used)
        piece = (head + "\n\n\n" if head else "") + body + "\n"
        (documents if len(body) > 500 or isinstance(node, ast.ClassDef) else small).append(piece)
    if small:  # a page of helper functions is one document, not ten scraps
        documents.append("\n\n".join(small))
    return documents or [text.strip("\n") + "\n"]


def list_files(roots):
    """Return (package, relative path, path) of every candidate file, each package counted once."""
    found = []
    for root in map(pathlib.Path, roots):
        for folder, subfolders, names in os.walk(root):
            rel = pathlib.Path(folder).relative_to(root)
            subfolders[:] = sorted(
                d
                for d in subfolders
                if not SKIP_DIR.match(d)
                and not d.endswith(("-info", ".libs"))
                and not (d == "site-packages" and str(rel) == ".")
            )
            for name in sorted(names):
                if name.endswith(".py") and not SKIP_FILE.search(name) and not name.startswith("test_"):
                    found.append(((rel / name).parts[0], str(rel / name), pathlib.Path(folder) / name))
    return found


def select(args):
    """Return (held out, text) of the files that pass the filters, and the counts of what happened to all."""
    files = list_files(args.sources)
    random.Random(args.seed).shuffle(files)
    counts, package_bytes, package_roots = collections.Counter(), collections.Counter(), {}
    seen_files, seen_lines, kept = set(), set(), []
    for package, rel, path in files:
        root = str(path)[: -len(rel)]
        # The same package under two roots is two versions of one text, so the first root met wins.
        if package_roots.setdefault(package, root) != root or package_bytes[package] > args.package_cap:
            counts["other copy or over the cap"] += 1
            continue
        text = read_source(path)
        if text is None:
            counts["filtered"] += 1
            continue
        key = file_hash(text)
        lines = [file_hash(line) for line in map(str.strip, text.split("\n")) if len(line) > 24]
        if key in seen_files or sum(h in seen_lines for h in lines) > 0.5 * max(1, len(lines)):
            counts["duplicate or near-duplicate"] += 1
            continue
        seen_files.add(key)
        seen_lines.update(lines)
        package_bytes[package] += len(text)
        counts["kept"] += 1
        kept.append((file_hash(rel) % 50 == 0, text))  # 2 % of the files, by path, are held out
    return kept, {"counts": counts, "largest_packages": package_bytes.most_common(25)}


def collect(args):
    """Collect the sources, cut them into documents, train the tokenizer, write token files and a summary."""
    work = pathlib.Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    kept, summary = select(args)
    with multiprocessing.Pool(args.threads) as pool:
        cut = pool.map(cut_documents, [text for _, text in kept], chunksize=64)
    parts = {"train": [], "held_out": []}
    for (held, _), documents in zip(kept, cut, strict=True):
        parts["held_out" if held else "train"].extend(documents)
    for documents in parts.values():
        random.Random(args.seed + 1).shuffle(documents)
    sample = parts["train"][:: max(1, len(parts["train"]) // 12000)]
    tokenizer = train_tokenizer(sample, work / "tokenizer", args.vocab)
    for name, documents in parts.items():
        ids = []
        for start in range(0, len(documents), 2000):
            for encoding in tokenizer.backend_tokenizer.encode_batch(documents[start : start + 2000]):
                ids.append(np.array([*encoding.ids, tokenizer.eos_token_id], dtype=np.uint16))
        flat = np.concatenate(ids)
        flat.tofile(work / f"{name}.bin")
        size = sum(len(d.encode()) for d in documents)
        summary[name] = {
            "documents": len(documents),
            "bytes": size,
            "tokens": len(flat),
            "bytes_per_token": round(size / (len(flat) - len(documents)), 3),
        }
    (work / "data.json").write_text(json.dumps({**summary, "sources": args.sources}, indent=1))
    print(json.dumps(summary))


def train_tokenizer(documents, folder, vocab):
    """Train the byte-level BPE tokenizer and save it as a PreTrainedTokenizerFast.

    The pattern gives newline runs and the indentation after them tokens of their own, so that a prompt cut
    at the end of a line is split just as the same line was in training.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    pattern = r"[\r\n]+|(?<=[\r\n])[ \t]+|[ ._]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?=\S)|\s+"
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        documents,
        trainers.BpeTrainer(
            vocab_size=vocab,
            special_tokens=[EOS, PAD],
            show_progress=False,
            max_token_length=24,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False, model_max_length=4096
    )
    tokenizer.save_pretrained(folder)
    path = pathlib.Path(folder) / "tokenizer_config.json"  # gets the class name that every version knows
    config = {**json.loads(path.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config, indent=1))
    return tokenizer


def make_model(args):
    """Return a fresh Llama model in fp32, with the projections into the residual stream starting at zero."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=args.vocab,
            hidden_size=args.hidden,
            intermediate_size=args.intermediate,
            num_hidden_layers=args.layers,
            num_attention_heads=args.hidden // 64,
            num_key_value_heads=max(1, args.hidden // 128),
            head_dim=64,
            max_position_embeddings=4096,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=1,
        )
    ).float()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model.to(args.device)


def token_losses(model, ids):
    """Return the negative log-likelihood of ids[:, 1:], computed in bf16 from the fp32 master weights.

    It is the forward pass of LlamaForCausalLM written out, with the projections of one input fused, so that
    it compiles into few kernels; `evaluate` compares the two.
    """
    cfg, bf16 = model.config, torch.bfloat16
    batch, length = ids.shape[0], ids.shape[1] - 1
    heads, kv, dim = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
    position = torch.arange(length, device=ids.device, dtype=torch.float32)
    frequency = 10000.0 ** (-torch.arange(0, dim, 2, device=ids.device, dtype=torch.float32) / dim)
    angle = position[:, None] * frequency[None]
    cos, sin = angle.cos().to(bf16), angle.sin().to(bf16)

    def norm(x, module):
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + cfg.rms_norm_eps)
        return (wide * scale * module.weight).to(bf16)

    def rotate(x):
        left, right = x[..., : dim // 2], x[..., dim // 2 :]
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)

    embedding = model.model.embed_tokens.weight.to(bf16)
    h = nn_f.embedding(ids[:, :-1], embedding)
    for layer in model.model.layers:
        att, mlp = layer.self_attn, layer.mlp
        x = norm(h, layer.input_layernorm)
        weight = torch.cat([att.q_proj.weight, att.k_proj.weight, att.v_proj.weight])
        qkv = nn_f.linear(x, weight.to(bf16))
        q, k, v = qkv.view(batch, length, heads + 2 * kv, dim).transpose(1, 2).split([heads, kv, kv], 1)
        k, v = rotate(k).repeat_interleave(heads // kv, 1), v.repeat_interleave(heads // kv, 1)
        out = nn_f.scaled_dot_product_attention(rotate(q), k, v, is_causal=True)
        out = out.transpose(1, 2).reshape(batch, length, heads * dim)
        h = h + nn_f.linear(out, att.o_proj.weight.to(bf16))
        x = norm(h, layer.post_attention_layernorm)
        gate, up = nn_f.linear(x, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).to(bf16)).chunk(2, -1)
        h = h + nn_f.linear(nn_f.silu(gate) * up, mlp.down_proj.weight.to(bf16))
    logits = nn_f.linear(norm(h, model.model.norm), embedding).view(-1, cfg.vocab_size).float()
    return nn_f.cross_entropy(logits, ids[:, 1:].reshape(-1), reduction="none").view(batch, length)


def batch_loss(model, ids, repeat_mask, scale):
    """Return the summed training loss: likelihood outside the mask, unlikelihood of repetition inside it."""
    nll = token_losses(model, ids)
    unlikelihood = -torch.log((1 - torch.exp(-nll)).clamp_min(1e-4))
    return torch.where(repeat_mask, unlikelihood, nll).sum() * scale, (nll.detach() * ~repeat_mask).sum()


def make_repetition(row, mask, rng):
    """Turn one row of tokens into text that gets stuck, and mark the stuck part, in place.

    This is the pseudo-repetition of DITTO (Xu et al. 2022) with the unlikelihood loss of Welleck et al.
    (2019): a real prefix, whose last few tokens then repeat up to the end. The first copies stay ordinary
    text, because short repetition is normal in code.
    """
    period = int(min(1 + rng.exponential(14), 64))
    start = int(rng.integers(max(96, period), len(row) // 2))
    row[start:] = np.resize(row[start - period : start], len(row) - start)
    mask[start + max(2 * period, 10) - 1 :] = True  # mask[i] belongs to the prediction of row[i + 1]


def export(model, weights, args, card):
    """Write the checkpoint in bf16; every file is replaced atomically, so a reader never sees half of one."""
    out = pathlib.Path(args.out)
    temp = out.parent / (out.name + ".tmp")
    shutil.rmtree(temp, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    shutil.copytree(pathlib.Path(args.work) / "tokenizer", temp)
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]})
    copy.generation_config = GenerationConfig(eos_token_id=0, pad_token_id=1, do_sample=False)
    copy.to(torch.bfloat16).save_pretrained(temp)
    (temp / "training.json").write_text(json.dumps(card, indent=1))
    for path in temp.iterdir():
        path.chmod(0o644)
        os.replace(path, out / path.name)
    temp.rmdir()


def rate(progress):
    """Return the WSD factor of the learning rate: warm-up, stable, linear cool-down to 2 %."""
    return min(1.0, progress / 0.015 + 0.02, max(0.02, (1 - progress) / 0.27))


class Clock:
    """Tells how far the training has come, by training time rather than by steps.

    A process that is stopped, or compiles, must not use up the schedule: a step counts at most thrice the
    median of the last hundred. The deadline still holds, because the rest of the schedule shrinks to it.
    """

    def __init__(self, minutes, deadline, counted):
        self.budget, self.counted, self.times, self.deadline = minutes * 60, counted, [], math.inf
        if deadline:
            hour, minute = map(int, deadline.split(":"))
            self.deadline = time.time() + ((hour * 60 + minute) * 60 - time.time() % 86400) % 86400

    def progress(self):
        """Return the finished share of the schedule, 1.0 when the time is over."""
        left = min(self.budget - self.counted, self.deadline - time.time())
        return 1.0 if left <= 0 else self.counted / (self.counted + left)

    def add(self, spent):
        """Count one step."""
        self.times = [*self.times, spent][-101:]
        self.counted += min(spent, 3 * statistics.median(self.times)) if len(self.times) > 5 else 0.0


class Batches:
    """Gives token batches out of shuffled blocks of 2048 tokens; every pass over them has its own order."""

    def __init__(self, work, seed, tokens):
        self.data = np.fromfile(work / "train.bin", dtype=np.uint16)
        self.blocks, self.seed, self.rows = (len(self.data) - 1) // 2048, seed, max(1, tokens // 2048)
        self.order, self.order_epoch = None, -1

    def get(self, state, length, repeat_share):
        """Return rows of length + 1 tokens and the mask of predictions that repeat (see make_repetition)."""
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
        mask = np.zeros((len(rows), length), dtype=bool)
        for row, row_mask in zip(ids, mask, strict=True):
            if rng.random() < repeat_share:
                make_repetition(row, row_mask, rng)
        return torch.from_numpy(ids), torch.from_numpy(mask)


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
    model = make_model(args)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
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
    clock = Clock(args.minutes, args.deadline, state["counted"])
    batches = Batches(work, args.seed, args.tokens)
    last_export = last_log = time.time()
    while (progress := clock.progress()) < 1.0 and not (args.max_steps and state["step"] >= args.max_steps):
        began = time.time()
        for optimizer, base in zip(optimizers, (args.lr_matrix, args.lr_other), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = base * rate(progress)
        length = 2048 if progress > args.long_from else 1024
        repeat_share = args.repeat_share if progress > 0.73 else 0.0  # only in the cool-down
        ids, mask = (x.to(device) for x in batches.get(state, length, repeat_share))
        total, micro = torch.zeros((), device=device), max(1, args.micro // length)
        for i in range(0, len(ids), micro):
            loss, nll = loss_function(model, ids[i : i + micro], mask[i : i + micro], 1.0 / mask.numel())
            loss.backward()
            total += nll
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        keep = min(0.995, (1 + state["step"]) / (20 + state["step"]))
        torch._foreach_lerp_(list(average.values()), list(parameters.values()), 1 - keep)
        loss = (total / (~mask).sum()).item()
        clock.add(time.time() - began)
        state.update(step=state["step"] + 1, tokens=state["tokens"] + mask.numel(), counted=clock.counted)
        if state["step"] % 10 == 0:
            speed = round(10 * mask.numel() / (time.time() - last_log))
            last_log = time.time()
            write_line(
                args,
                {
                    "step": state["step"],
                    "tokens": state["tokens"],
                    "loss": round(loss, 4),
                    "tokens_per_s": speed,
                    "lr": round(args.lr_matrix * rate(progress), 6),
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
    held = np.fromfile(pathlib.Path(args.work) / "held_out.bin", dtype=np.uint16)[: 24 * 2049]
    rows = torch.from_numpy(held.astype(np.int64)).view(24, 2049).to(args.device)
    probe = make_model(args)
    probe.load_state_dict(weights, strict=False)  # lm_head is the tied embedding
    with torch.no_grad():
        loss = statistics.mean(token_losses(probe, rows[i : i + 2]).mean().item() for i in range(0, 24, 2))
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


def loops(ids, longest, minimum):
    """Tell whether some block of period 1..longest repeats back to back over more than minimum tokens."""
    for period in range(1, longest + 1):
        run = period
        for i in range(period, len(ids)):
            run = run + 1 if ids[i] == ids[i - period] else period
            if run > minimum and run >= 2 * period:
                return period
    return 0


def four_gram_loop(ids):
    """Tell whether some 4-gram of tokens stands more than eight times in a row."""
    return any(all(ids[i + j] == ids[i + j % 4] for j in range(36)) for i in range(len(ids) - 35))


def generate(model, tokenizer, prompts, batch_size):
    """Return the greedy continuation of each prompt, 256 tokens or up to and with the end token."""
    encoded = [tokenizer(p).input_ids for p in prompts]
    order, outputs = sorted(range(len(prompts)), key=lambda i: len(encoded[i])), [None] * len(prompts)
    for start in range(0, len(order), batch_size):
        chunk = order[start : start + batch_size]
        batch = tokenizer.pad({"input_ids": [encoded[i] for i in chunk]}, padding_side="left", return_tensors="pt").to(
            model.device
        )
        with torch.no_grad():
            out = model.generate(**batch, max_new_tokens=256, do_sample=False)
        for i, ids in zip(chunk, out[:, batch["input_ids"].shape[1] :].tolist(), strict=True):
            end = tokenizer.eos_token_id
            outputs[i] = ids[: ids.index(end) + 1] if end in ids else ids
    return outputs, statistics.mean(map(len, encoded)), max(map(len, encoded))


def evaluate(args):
    """Print held-out bits per byte, the looping shares on ClassEval prompts, and two checks, as JSON."""
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(args.device).eval()
    held = np.fromfile(pathlib.Path(args.work) / "held_out.bin", dtype=np.uint16).astype(np.int64)
    held = held[: (len(held) - 1) // 2048 * 2048 + 1]
    rows = np.stack([held[i : i + 2049] for i in range(0, len(held) - 1, 2048)])
    rows = torch.from_numpy(rows).to(args.device)
    size = len(tokenizer.decode(held[1:], skip_special_tokens=True).encode())
    with torch.no_grad():
        logits = model(rows[:1, :-1]).logits[0].float()
        exact = nn_f.cross_entropy(logits, rows[0, 1:]).item()
        ours = token_losses(model, rows[:1]).mean().item()
        nats = sum(token_losses(model, rows[i : i + 2]).sum().item() for i in range(0, len(rows), 2))
    sample = "a\r\n\t b  \n\n    déjà vu 😀  x . ' , \x00 _ " + pathlib.Path(__file__).read_text()
    with open(args.classeval) as lines:
        prompts = [json.loads(line)["skeleton"] for line in lines]
    began = time.time()
    outputs, mean_prompt, longest_prompt = generate(model, tokenizer, prompts, args.batch)
    periods = [loops(ids, 32, 64) for ids in outputs]
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
                "prompts": len(prompts),
                "prompt_tokens_mean": round(mean_prompt),
                "prompt_tokens_max": longest_prompt,
                "loop_share_4gram": sum(map(four_gram_loop, outputs)) / len(outputs),
                "loop_share_any_period": sum(p > 0 for p in periods) / len(outputs),
                "eos_share": sum(ids[-1] == tokenizer.eos_token_id for ids in outputs) / len(outputs),
                "mean_generated": statistics.mean(map(len, outputs)),
                "generation_s": round(time.time() - began, 1),
            }
        )
    )


def main():
    """Parse the command line and run one of the sub-commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--work", default="train", help="folder of the intermediate files")
    shared.add_argument("--seed", type=int, default=1)
    shared.add_argument("--threads", type=int, default=2)
    shared.add_argument("--vocab", type=int, default=4096)
    shared.add_argument("--device", default="cpu")
    p = commands.add_parser("data", parents=[shared])
    p.add_argument("--sources", nargs="+", default=[sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")])
    p.add_argument("--package-cap", type=int, default=4_000_000, help="bytes one package may contribute")
    p.set_defaults(run=collect)
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
        ("repeat-share", float, 0.2),
        ("export-minutes", float, 10),
        ("max-steps", int, 0),
    ):
        p.add_argument("--" + name, type=kind, default=value)
    p.add_argument("--deadline", help="HH:MM in UTC at which the training has to be over")
    p.add_argument("--out", default="lpr/assets/bundled")
    p.add_argument("--resume", action="store_true")
    p.add_argument("--compile", action="store_true")
    p.set_defaults(run=train)
    p = commands.add_parser("eval", parents=[shared])
    p.add_argument("--model", default="lpr/assets/bundled")
    p.add_argument("--classeval", default="../shared/data/classeval.jsonl")
    p.add_argument("--batch", type=int, default=25)
    p.add_argument("--samples", help="write the generated texts to this file")
    p.set_defaults(run=evaluate)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
