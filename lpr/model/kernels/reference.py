"""Tree attention in plain PyTorch: the specification that the GPU versions are compared with."""

from __future__ import annotations

import torch

from lpr.model.kernels.mask import TreeMask


def tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: TreeMask,
    *,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of `query` [B, Hq, T, D] over `key`, `value` [B, Hk, KV, D(v)]; returns [B, Hq, T, Dv].

    An entry attends to the committed tokens, its ancestors and itself; the other rows of the cache are not read.
    `window` keeps the keys of the last `window` positions (Mistral), `chunk` those of the query's own chunk of
    positions (Llama 4), `softcap` bounds scores by `softcap * tanh(score / softcap)` (Gemma 2), `sinks` [Hq] are logits
    that take probability and give no value (GPT-OSS). `scale` is D**-0.5 if not given. Padding entries return 0.
    """
    num_kv = key.shape[2]
    group = query.shape[1] // key.shape[1]
    scale = query.shape[3] ** -0.5 if scale is None else scale
    visible = mask.visible(num_kv)
    asked, held = mask.positions[:, :, None], mask.kv_positions(num_kv)[:, None]
    if window is not None:
        visible = visible & (held > asked - window)
    if chunk is not None:
        visible = visible & (held // chunk == asked // chunk)
    keys, values = (each.float().repeat_interleave(group, 1) for each in (key, value))
    scores = query.float() @ keys.transpose(-1, -2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    if sinks is not None:
        sink = sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    # A padding entry has no key: its probabilities are NaN (without a sink) and become 0.
    probs = torch.softmax(scores, -1)[..., :num_kv].masked_fill(~visible[:, None], 0.0)
    return (probs @ values).to(query.dtype)
