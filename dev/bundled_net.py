"""The bundled model's network: its losses, repeating text to train against, and its export."""

import json
import math
import os
import pathlib
import shutil

import numpy as np
import torch
import torch.nn.functional as nn_f
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM


def make_model(args, vocab):
    """Return a fresh Llama model in fp32, with the projections into the residual stream starting at zero."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab,
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


def load_model(folder, vocab, device):
    """Return a trained model in fp32, with rows for added tokens: the mean of all rows, and a little noise."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = model.config.vocab_size
    if before < vocab:
        model.resize_token_embeddings(vocab, mean_resizing=False)
        with torch.no_grad():
            weight = model.get_input_embeddings().weight
            rows = weight[:before]
            weight[before:] = rows.mean(0) + 0.1 * rows.std(0) * torch.randn(vocab - before, rows.shape[1])
    return model.to(device)


def token_losses(model, ids):
    """Return the negative log-likelihood of ids[:, 1:]."""
    logits = token_logits(model, ids)
    return nn_f.cross_entropy(logits.flatten(0, 1), ids[:, 1:].reshape(-1), reduction="none").view(logits.shape[:2])


def has_bf16(device):
    """Return True if the device multiplies in bf16; others emulate it slowly."""
    return device.type == "cuda" or torch.cpu.get_capabilities().get("avx512_bf16", False)


def newton_schulz(gradient, coefficients, steps, eps):
    """Return the nearest orthogonal matrix to a gradient, as torch's Muon computes it in bf16 (Jordan et al. 2024).

    In the gradient's own type: where a CPU emulates bf16, a 704 x 256 matrix took 0.30 s and takes 0.011.
    """
    first, second, third = coefficients
    wide = gradient.T if len(gradient) > gradient.shape[1] else gradient
    near = wide / wide.norm().clamp(min=eps)
    for _ in range(steps):
        gram = near @ near.T
        near = torch.addmm(near, torch.addmm(gram, gram, gram, beta=second, alpha=third), near, beta=first)
    return near.T if len(gradient) > gradient.shape[1] else near


def token_logits(model, ids):
    """Return the logits (batch, length, vocabulary) of ids[:, 1:], computed in bf16 where the device has it.

    It is the forward pass of LlamaForCausalLM written out, with the projections of one input fused, so that
    it compiles into few kernels; `evaluate` compares the two. The master weights are fp32.
    """
    cfg, dtype = model.config, torch.bfloat16 if has_bf16(ids.device) else torch.float32
    batch, length = ids.shape[0], ids.shape[1] - 1
    heads, kv, dim = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
    position = torch.arange(length, device=ids.device, dtype=torch.float32)
    frequency = 10000.0 ** (-torch.arange(0, dim, 2, device=ids.device, dtype=torch.float32) / dim)
    angle = position[:, None] * frequency[None]
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)

    def norm(x, module):
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + cfg.rms_norm_eps)
        return (wide * scale * module.weight).to(dtype)

    def rotate(x):
        left, right = x[..., : dim // 2], x[..., dim // 2 :]
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)

    embedding = model.model.embed_tokens.weight.to(dtype)
    h = nn_f.embedding(ids[:, :-1], embedding)
    for layer in model.model.layers:
        att, mlp = layer.self_attn, layer.mlp
        x = norm(h, layer.input_layernorm)
        weight = torch.cat([att.q_proj.weight, att.k_proj.weight, att.v_proj.weight])
        qkv = nn_f.linear(x, weight.to(dtype))
        q, k, v = qkv.view(batch, length, heads + 2 * kv, dim).transpose(1, 2).split([heads, kv, kv], 1)
        k, v = rotate(k).repeat_interleave(heads // kv, 1), v.repeat_interleave(heads // kv, 1)
        out = nn_f.scaled_dot_product_attention(rotate(q), k, v, is_causal=True)
        out = out.transpose(1, 2).reshape(batch, length, heads * dim)
        h = h + nn_f.linear(out, att.o_proj.weight.to(dtype))
        x = norm(h, layer.post_attention_layernorm)
        gate, up = nn_f.linear(x, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).to(dtype)).chunk(2, -1)
        h = h + nn_f.linear(nn_f.silu(gate) * up, mlp.down_proj.weight.to(dtype))
    return nn_f.linear(norm(h, model.model.norm), embedding).float()


def batch_loss(model, ids, weight, scale, teacher=None):
    """Return the summed training loss, and the summed likelihood loss of all positions of positive weight.

    Positive weights multiply the negative log-likelihood, negative ones the unlikelihood -log(1 - p) (Welleck et al.
    2019) or, with a `teacher`, the cross-entropy with what it would write there instead. Zero leaves a position out.
    weight[:, i] belongs to the prediction of ids[:, i + 1].
    """
    likely = nn_f.log_softmax(token_logits(model, ids), -1)
    nll = -likely.gather(-1, ids[:, 1:, None])[..., 0]
    if teacher is None:
        against = -torch.log((1 - torch.exp(-nll)).clamp_min(1e-4))
    else:
        instead = other_choices(teacher, ids)
        against = -(instead * likely[..., : instead.shape[-1]]).sum(-1)
    loss = torch.where(weight >= 0, nll * weight, -weight * against)
    return loss.sum() * scale, (nll.detach() * (weight > 0)).sum()


@torch.no_grad()
def other_choices(teacher, ids):
    """Return the teacher's probabilities (batch, length, its vocabulary) at ids[:, 1:] if these are ruled out.

    Unlikelihood only says what not to write. A model that had learned to leave its loops by beginning another file did
    so more often the more it was to leave them; weights that never learned that know what else may follow.
    """
    known = ids.clamp_max(teacher.config.vocab_size - 1)  # weights of before the tokens for holes
    return token_logits(teacher, known).scatter(-1, known[:, 1:, None], -math.inf).softmax(-1)


def make_repetition(row, weight, rng, newlines):
    """Turn one row of tokens into text that repeats, and mark the repeated part, in place.

    This is the pseudo-repetition of DITTO (Xu et al. 2022) with the unlikelihood loss of Welleck et al. (2019): a
    real prefix, whose last line or lines, or any last few tokens, then repeat up to the end. The first copies stay
    ordinary text, because short repetition is normal in code.
    """
    period = int(min(1 + rng.exponential(14), 64))
    start = int(rng.integers(max(96, period), len(row) // 2))
    ends = np.flatnonzero(newlines[row[:start]])
    if len(ends) > 4 and rng.random() < 0.7:
        start = int(ends[-1]) + 1
        period = start - 1 - int(ends[-1 - int(rng.integers(1, 4))])
    row[start:] = np.resize(row[start - period : start], len(row) - start)
    weight[start + max(2 * period, 10) - 1 :] = -1.0


def export(model, weights, args, card):
    """Write the checkpoint in bf16. Every file is replaced atomically."""
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


def mix(args):
    """Write the weighted mean of several weights; the first has the tokenizer, and the rows that a narrower one lacks.

    Weights of one lineage can be averaged (Wortsman et al. 2022): what only one training has learned is damped.
    """
    folders, shares = zip(*(part.rsplit("=", 1) for part in args.parts), strict=True)
    shares = [float(share) / sum(map(float, shares)) for share in shares]
    models = [LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders]
    mixed = dict(models[0].named_parameters())
    with torch.no_grad():
        for name, value in mixed.items():
            parts = [dict(model.named_parameters())[name] for model in models]
            whole = [torch.cat([part, value[len(part) :]]) for part in parts]
            value.copy_(sum(share * part for share, part in zip(shares, whole, strict=True)))
    skipped = shutil.ignore_patterns("*.safetensors", "training.json")
    shutil.copytree(folders[0], args.out, ignore=skipped, dirs_exist_ok=True)
    models[0].to(torch.bfloat16).save_pretrained(args.out)
