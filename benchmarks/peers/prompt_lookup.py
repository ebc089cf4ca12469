"""transformers' own generate: plain, and with its prompt lookup (Saxena 2023), in the environment that lpr runs in."""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.peers.recipe import Peer
from benchmarks.peers.worker import Complete, Request, main

PLAIN, LOOKUP = "generate", "prompt lookup, 10 tokens"
PEER = Peer(
    name="transformers",
    module="benchmarks.peers.prompt_lookup",
    variants={PLAIN: "plain decoding", LOOKUP: "prompt_lookup_num_tokens=10"},
    why="Nothing is learnt from one prompt for the next.",
)


def start(folder: str) -> Complete:
    """Load the model."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    forward, counted = model.forward, [0]

    def counting(*args: Any, **kwargs: Any) -> Any:
        counted[0] += 1
        return forward(*args, **kwargs)

    model.forward = counting

    def complete(request: Request) -> tuple[list[int], int]:
        torch.manual_seed(request["seed"])
        ids = torch.tensor([request["prompt"]])
        counted[0] = 0
        how: dict[str, Any] = {"do_sample": False}
        if request["temperature"]:
            how = {"do_sample": True, "temperature": request["temperature"], "top_k": 0, "top_p": 1.0}
        if request["variant"] == LOOKUP:
            how["prompt_lookup_num_tokens"] = 10
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=request["max_new_tokens"], **how)
        return out[0, ids.shape[1] :].tolist(), counted[0]

    return complete


if __name__ == "__main__":
    sys.exit(main(start))
