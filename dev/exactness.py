"""How many completions differ from plain decoding, with exact mode and without, and what it costs.

python -m dev.exactness MODEL_FOLDER --dtype bfloat16 --prompts 8 --tokens 128
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch

from lpr import DecodeConfig, Engine, SamplingParams, bundled_model
from tests.prompts import PROMPTS

SHAPES = {
    "window": DecodeConfig(window_size=5, trie_nodes=0, max_batch_size=1),
    "trie": DecodeConfig(window_size=0, trie_nodes=32, max_batch_size=1),
    "both, batch of 4": DecodeConfig(window_size=5, trie_nodes=24, max_batch_size=4),
}


def main() -> None:
    """Prints one JSON line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default=bundled_model())
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {**vars(args), "model": args.model.rsplit("/", 1)[-1]}
    for exact in (True, False):
        plain = DecodeConfig.autoregressive(max_batch_size=1)
        engine = Engine.from_pretrained(args.model, plain, dtype=args.dtype, exact=exact)
        prompts = [engine.encode(each) for each in PROMPTS[: args.prompts]]
        params = [
            SamplingParams(max_new_tokens=args.tokens, temperature=args.temperature, seed=seed)
            for seed in range(len(prompts))
        ]
        record: dict[str, Any] = {}
        expected: list[list[int]] = []
        for name, decode in {"plain": DecodeConfig.autoregressive(max_batch_size=1), **SHAPES}.items():
            engine.configure(decode)
            began = time.perf_counter()
            done = engine.generate(prompts, params)
            took = time.perf_counter() - began
            ids = [each.token_ids for each in done]
            expected = expected or ids
            tokens = sum(map(len, ids))
            record[name] = {
                "differ": sum(mine != theirs for mine, theirs in zip(ids, expected, strict=True)),
                "tokens_per_second": round(tokens / took, 1),
                "tokens_per_step": round(tokens / sum(each.stats.num_steps for each in done), 2),
            }
            print(exact, name, record[name], flush=True)
        found["exact" if exact else "as usual"] = record
    print(json.dumps(found))


if __name__ == "__main__":
    main()
