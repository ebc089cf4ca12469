"""Run as a program: what transformers really shards, in a world whose collectives do nothing.

Rank 0 of a fake world of `tp` ranks splits tiny models by their own plans with transformers' own code, runs one forward
of two tokens, and prints a JSON line: parameters held, K/V values per token, and the collectives that came by.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from lpr.model.transformers_versions import passed

SIZES = {
    "vocab_size": 257, "hidden_size": 64, "intermediate_size": 112, "moe_intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip


def config_values(model_type: str) -> dict[str, object]:
    """Sizes for a tiny model of `model_type`: only those that its config knows."""
    known = AutoConfig.for_model(model_type)
    return {"model_type": model_type, **{name: value for name, value in SIZES.items() if hasattr(known, name)}}


def kept_shapes(model: PreTrainedModel, input_ids: torch.Tensor) -> list[tuple[int, int, int]]:
    """Heads, key size and value size of each layer that keeps K/V, as one forward over `input_ids` shows them."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    model(input_ids=input_ids, use_cache=True, **passed(cache, model))
    layers: list[Any] = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    return [(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]) for layer in layers]


def main(tp: int, model_types: list[str]) -> None:
    """Shard each model over `tp` ranks and print what rank 0 has."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp)
    mesh = init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
    for model_type in model_types:
        values = config_values(model_type)
        config = AutoConfig.for_model(values.pop("model_type"), **values)  # type: ignore[arg-type]
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        apply_tensor_parallelism(model, mesh, model._expand_parallel_plan(model.tp_plan))
        held = sum(getattr(each, "_local_tensor", each).numel() for each in model.parameters())
        with torch.no_grad(), CommDebugMode() as seen:
            kept = kept_shapes(model, torch.zeros(1, 2, dtype=torch.long))
        counts: dict[str, int] = {"all_reduce": 0, "all_gather": 0}
        for operator, count in seen.get_comm_counts().items():
            name = str(operator).replace("allreduce", "all_reduce").replace("allgather", "all_gather")
            counts["all_gather" if "all_gather" in name else "all_reduce" if "all_reduce" in name else name] += count
        kv = sum(heads * (key + value) for heads, key, value in kept)
        print(json.dumps({"tp": tp, "model_type": model_type, "numel": held, "kv_values": kv, **counts}))
    dist.destroy_process_group()


if __name__ == "__main__":
    for size in sys.argv[1].split(","):
        main(int(size), sys.argv[2:])
