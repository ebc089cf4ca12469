"""PIA lookahead (Zhao et al. 2024): alipay/PainlessInferenceAcceleration, its folder `lookahead`.

Its Llama has no grouped-query attention, so the model runs as its Mistral, whose layers are the same. Drafts of
up to 64 tokens in branches of up to 12, as in its examples, with their stop words.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.peers.worker import Complete, Peer, Request, main

CUT = "64/12"
UNCUT = "64/12, its cut at the end token removed"
PEER = Peer(
    name="pia",
    module="benchmarks.peers.pia",
    variants={
        CUT: "as shipped: text after the first end token is not learned, and a chat template contains one early",
        UNCUT: "all of the prompt is learned",
    },
    why="It keeps text of earlier prompts. It ignores the temperature, so it is greedy only.",
    repository="https://github.com/alipay/PainlessInferenceAcceleration",
    commit="78c9b002749f86a2dc601af3d02c5eaf6cc91507",
    folders={"lookahead/lookahead": "lookahead"},
    requirements=("torch=={torch}", "transformers==4.36.2", "numpy<2"),
    old_weights=True,
    model_type="mistral",
    learns=(CUT, UNCUT),
    samples=False,
)


def start(folder: str) -> Complete:
    """Load the model."""
    import torch
    from lookahead.common.lookahead_cache import LookaheadCache
    from lookahead.models.mistral.modeling_mistral import MistralForCausalLM

    model: Any = MistralForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()

    class Uncut(LookaheadCache):
        """A trie without end tokens."""

        eos_ids = property(lambda self: [None], lambda self, ids: None)

    caches: dict[str, Any] = {}

    def complete(request: Request) -> tuple[list[int], int]:
        variant = request["variant"]
        if request["fresh"]:
            caches[variant] = Uncut() if variant == UNCUT else LookaheadCache()
        model.lookahead_cache = caches[variant]
        ids = torch.tensor([request["prompt"]])
        settings = {
            "use_lookahead": True, "debug_lookahead": False, "decoding_mode": "hier", "decoding_length": 64,
            "branch_length": 12, "stop_words": set(request["separators"]),
        }  # fmt: skip
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            position_ids=None,
            pad_token_id=request["stop_ids"][0],
            eos_token_id=request["stop_ids"],
            use_cache=True,
            max_new_tokens=request["max_new_tokens"],
            repetition_penalty=1.0,
            do_sample=False,
            return_dict_in_generate=True,
            decoding_kwargs=settings,
        )
        return out.sequences[0, ids.shape[1] :].tolist(), len(out.kwargs["edls"])

    return complete


if __name__ == "__main__":
    sys.exit(main(start))
