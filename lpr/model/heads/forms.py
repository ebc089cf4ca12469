"""How checkpoints name the parts of their multi-token-prediction (MTP) layer.

All forms compute the same (DeepSeek-V3, arXiv 2412.19437, section 2.2; Gloeckle et al. 2024 for the idea):

    x[i] = join([norm(embedding of token i+1), norm(h[i])]);  g[i] = final_norm(layer(x)[i]);  logits = lm_head(g[i])

h[i] is the model's last hidden state after its final norm; logits are those of token i+2. For one more token g[i] takes
the place of h[i+1]. Names and the order of `join` follow vLLM (vllm/model_executor/models/deepseek_mtp.py,
glm4_moe_mtp.py, qwen3_next_mtp.py, mimo_mtp.py).

A head may restrict its guesses to a draft vocabulary of frequent tokens (FR-Spec, Zhao et al. 2025; EAGLE-3, Li et al.
2025): in a small model with a large vocabulary most of a guess's time is the output head.
"""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Form:
    """Names of one family's MTP layer; `prefix` has the number of the model's layers for {}."""

    prefix: str
    embedding_norm: str
    hidden_norm: str
    join: str
    final_norm: str
    layer: str = ""  # the decoder layer's prefix behind `prefix`
    copies: tuple[str, ...] = ()
    """Key prefixes of embeddings and output heads that the checkpoint repeats; the model's own are used."""
    hidden_first: bool = False  # True if `join` takes the hidden state before the embedding


DEEPSEEK = Form(
    prefix="model.layers.{}.",
    embedding_norm="enorm",
    hidden_norm="hnorm",
    join="eh_proj",
    final_norm="shared_head.norm",
    copies=("embed_tokens.", "shared_head.head."),
)
"""DeepSeek V3, GLM-4.5 and later, and what dev/train_head.py writes."""
QWEN = Form(
    prefix="mtp.",
    embedding_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    join="fc",
    final_norm="norm",
    layer="layers.0.",
    copies=("embed_tokens.", "lm_head.", "layers.1.", "layers.2.", "layers.3."),
)
"""Qwen3-Next and Qwen 3.5. Of several layers only the first one is used."""
MIMO = Form(
    prefix="model.mtp_layers.0.",
    embedding_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    join="input_proj",
    final_norm="final_layernorm",
    hidden_first=True,
)
FORMS = (DEEPSEEK, QWEN, MIMO)
DRAFT_VOCABULARY = "draft_vocabulary"
"""Key behind the prefix, int32 [V']: ids of tokens, ascending. Only dev/train_head.py writes it."""
KNOWN = frozenset(
    {"deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
    | {"llama", "qwen2", "qwen3", "mistral"}
)
"""Model types whose decoder-layer class can load the MTP layer's weights."""


def form_of(keys: Collection[str], num_layers: int) -> tuple[Form, str] | None:
    """The form of an MTP layer among a checkpoint's keys, and its prefix; None without one."""
    for form in FORMS:
        prefix = form.prefix.format(num_layers)
        if f"{prefix}{form.join}.weight" in keys:
            return form, prefix
    return None
