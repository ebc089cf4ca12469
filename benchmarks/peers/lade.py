"""LADE, the lookahead decoding of Fu et al. (2024): hao-ai-lab/LookaheadDecoding.

It replaces methods of transformers 4.36.2's Llama. Its sizes here are the paper's for a 7B model: W 15, N 5, G 15.
"""

from __future__ import annotations

import os
import random
import sys
from typing import Any

from benchmarks.peers.worker import Calls, Complete, Peer, Request, how_to_choose, main

PEER = Peer(
    name="lade",
    module="benchmarks.peers.lade",
    variants={
        "W15 N5 G15, the prompt in its pool": "POOL_FROM_PROMPT=1, as its minimal.py",
        "W15 N5 G15": "its default: the pool holds what its window found",
    },
    why="Nothing is learned from one prompt for the next.",
    repository="https://github.com/hao-ai-lab/LookaheadDecoding",
    commit="eed010da9c7b1867912675d480feec5629e0c2d0",
    folders={"lade": "lade"},
    requirements=("torch=={torch}", "transformers==4.36.2", "numpy<2", "einops"),
    old_weights=True,
)


def start(folder: str) -> Complete:
    """Load the model and patch transformers as LADE does."""
    os.environ["USE_LADE"] = "1"
    import lade
    import torch
    from transformers import AutoModelForCausalLM

    lade.augment_all()
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, torch_dtype=torch.float32, attn_implementation="eager"
    ).eval()
    calls = Calls(model, "jforward_multilevel")

    def complete(request: Request) -> tuple[list[int], int]:
        pool = int(request["variant"].endswith("pool"))
        lade.config_lade(WINDOW_SIZE=15, LEVEL=5, GUESS_SET_SIZE=15, DEBUG=0, POOL_FROM_PROMPT=pool)
        random.seed(request["seed"])
        torch.manual_seed(request["seed"])
        ids = torch.tensor([request["prompt"]])
        calls.number, mask = 0, torch.ones_like(ids)
        most, how = request["max_new_tokens"], how_to_choose(request)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=most, pad_token_id=0, **how)
        return out[0, ids.shape[1] :].tolist(), calls.number

    return complete


if __name__ == "__main__":
    sys.exit(main(start))
