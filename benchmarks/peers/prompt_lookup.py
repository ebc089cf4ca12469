"""transformers' own generate: plain, and with its prompt lookup (Saxena 2023), in the environment that lpr runs in."""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.peers.worker import Calls, Complete, Peer, Request, how_to_choose, main

PLAIN, LOOKUP = "generate", "prompt lookup, 10 tokens"
PEER = Peer(
    name="transformers",
    module="benchmarks.peers.prompt_lookup",
    variants={PLAIN: "plain decoding", LOOKUP: "prompt_lookup_num_tokens=10"},
    why="Nothing is learned from one prompt for the next.",
)


def start(folder: str) -> Complete:
    """Load the model."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    calls = Calls(model, "forward")

    def complete(request: Request) -> tuple[list[int], int]:
        torch.manual_seed(request["seed"])
        ids = torch.tensor([request["prompt"]])
        calls.number, how = 0, how_to_choose(request)
        if request["variant"] == LOOKUP:
            how["prompt_lookup_num_tokens"] = 10
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=request["max_new_tokens"], **how)
        return out[0, ids.shape[1] :].tolist(), calls.number

    return complete


if __name__ == "__main__":
    sys.exit(main(start))
