"""Arctic's suffix decoding (Oliaro et al. 2024): snowflakedb/ArcticInference, its suffix tree in C++ without vLLM.

Its engine is vLLM, so here it drafts for the texts of plain decoding: a step emits the longest drafted path that the
text follows, and one more token, as in its own simulator.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers.worker import Complete, Peer, Request, main

BUILD_SECONDS = 900
SETTINGS: dict[str, dict[str, Any]] = {
    "suffix decoding": {"max_spec_factor": 1.0, "min_token_prob": 0.1, "use_tree_spec": True},
    "suffix decoding, unlimited": {"max_spec_factor": 1e6, "min_token_prob": 0.0, "use_tree_spec": True},
}
DEPTH = 64


def build(environment: Path, site: Path) -> None:
    """Compile the suffix tree with the peer's own CMake file, next to the Python code that imports it."""
    programs, package = environment / "bin", site / "arctic_inference" / "suffix_decoding"
    sources, scratch = site / "csrc", site / "build"
    configure = [
        programs / "cmake", "-S", sources, "-B", scratch, "-G", "Ninja", f"-DPYTHON_EXECUTABLE={programs / 'python'}",
        f"-DPython_EXECUTABLE={programs / 'python'}", f"-DCMAKE_MAKE_PROGRAM={programs / 'ninja'}",
        f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={package}",
    ]  # fmt: skip
    for command in (configure, [programs / "cmake", "--build", scratch]):
        subprocess.run([str(word) for word in command], check=True, capture_output=True, timeout=BUILD_SECONDS)


PEER = Peer(
    name="arctic",
    module="benchmarks.peers.arctic",
    variants={
        "suffix decoding": f"its simulator's defaults: trees, depth {DEPTH}, factor 1, probability at least 0.1",
        "suffix decoding, unlimited": "no limit by the matched length or by probability",
    },
    why="A replay of plain decoding's texts: no wall clock. Its global tree keeps the outputs of earlier prompts.",
    repository="https://github.com/snowflakedb/ArcticInference",
    commit="9d4643881608178f0f58a33d1b61919ca246997f",
    folders={"arctic_inference/suffix_decoding": "arctic_inference/suffix_decoding", "csrc/suffix_decoding": "csrc"},
    requirements=("numpy", "nanobind", "cmake", "ninja"),
    build=build,
    learns=tuple(SETTINGS),
    replays=True,
)


def follow(tokens: list[int], parents: list[int], text: list[int]) -> list[int]:
    """The drafted path that `text` follows: node i holds `tokens[i]` below node `parents[i]` (-1: the root)."""
    children = {(parent, token): node for node, (token, parent) in enumerate(zip(tokens, parents, strict=True))}
    node, accepted = -1, list[int]()
    for token in text:
        if (node, token) not in children:
            break
        node = children[node, token]
        accepted.append(token)
    return accepted


def start(_: str) -> Complete:
    """No model is needed."""
    import numpy as np
    from arctic_inference.suffix_decoding import SuffixDecodingCache

    caches: dict[str, Any] = {}

    def complete(request: Request) -> tuple[list[int], int]:
        variant, text = request["variant"], request["text"]
        if request["fresh"]:
            caches[variant] = SuffixDecodingCache(max_tree_depth=DEPTH)
        cache = caches[variant]
        name = len(cache.cached_requests)
        prompt = np.array(request["prompt"], np.int32)
        cache.start_request(name, prompt)
        done, steps = list[int](), 0
        while len(done) < len(text):
            context = np.concatenate([prompt, np.array(done, np.int32)])
            draft = cache.speculate(name, context, max_spec_tokens=request.get("nodes", DEPTH), **SETTINGS[variant])
            emitted = follow(draft.token_ids, draft.parents, text[len(done) :])
            emitted = text[len(done) : len(done) + len(emitted) + 1]
            cache.add_active_response(name, np.array(emitted, np.int32))
            done += emitted
            steps += 1
        cache.stop_request(name)
        return done, steps

    return complete


if __name__ == "__main__":
    sys.exit(main(start))
