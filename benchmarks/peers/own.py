"""lpr itself, in a process like its peers'."""

from __future__ import annotations

import sys

from benchmarks.peers.worker import Complete, Peer, Request, main

PLAIN, AUTO, TRIE = "plain", "automatic", "trie, 64 nodes"
PEER = Peer(
    name="lpr",
    module="benchmarks.peers.own",
    variants={
        PLAIN: "plain decoding",
        AUTO: "sizes by measured step times, the default",
        TRIE: "a tree of 64 nodes from text",
    },
    learns=(AUTO, TRIE),
    why="Its shared index keeps the outputs of earlier prompts.",
)


def start(folder: str) -> Complete:
    """Load the model once, for an engine per variant."""
    from benchmarks.engines import OneModel, engines_over, plain
    from lpr import DecodeConfig, EngineOptions, SamplingParams
    from lpr.model.loader import load

    decodes = {
        PLAIN: plain(),
        AUTO: DecodeConfig(max_batch_size=1),
        TRIE: DecodeConfig(window_size=0, trie_nodes=64, max_batch_size=1),
    }
    options = EngineOptions(dtype="float32", device="cpu")
    engines = engines_over(OneModel(load(folder, options.dtype, options.device), options), decodes)

    def complete(request: Request) -> tuple[list[int], int]:
        engine = engines[request["variant"]]
        if request["fresh"]:
            engine.configure(decodes[request["variant"]])
        params = SamplingParams(
            max_new_tokens=request["max_new_tokens"], temperature=request["temperature"], seed=request["seed"]
        )
        done = engine.generate([request["prompt"]], params)[0]
        return done.token_ids, done.stats.num_steps

    return complete


if __name__ == "__main__":
    sys.exit(main(start))
