"""The guard at load: does this model evaluate a token tree as it evaluates plain text?

Some models keep state or build masks outside the hooks that lpr uses, without an error (recurrent layers, local
attention that slices by cache row, positions counted inside attention). Nothing in a config tells them apart
reliably, so every model is asked once: two small trees, with a compaction between them, against cache-free
forwards of every root-to-node path.
"""

from __future__ import annotations

import logging

import torch

from lpr.config import InputError
from lpr.model.cache import TreeCache
from lpr.model.inputs import Row
from lpr.model.kernels.hook import KERNELS
from lpr.model.runner import TreeModel

logger = logging.getLogger(__name__)

_PARENTS = (-1, 0, 0, 1, 1, 2, 1, 4)
_ACCEPTED = (0, 2, 5)
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
_HALF_TOLERANCE = 6e-2
_PROMPT = 24
_KERNEL_PROMPT = 200


def self_check(runner: TreeModel) -> TreeCache:
    """Raise InputError if the model is not one that runs a tree; return the check's cache, for its layer shapes.

    The error is the largest difference of a logit over the range of the logits; in fp32 sound models stay below 1e-6
    and the silent failures known so far begin at 3e-3. Half precision rounds differently at every GEMM height.

    A GPU kernel that lpr chose itself and that fails here is replaced by "sdpa", with a warning in the log.
    """
    if runner.attention_is_open and runner.attention in KERNELS:
        try:
            return _check(runner)
        except Exception as failure:  # whatever a compiler or driver raises; the model is checked again without them
            lines = str(failure).strip().splitlines() or [""]
            logger.warning("attention=%r does not work here, using 'sdpa': %s", runner.attention, lines[0])
            runner.set_attention("sdpa")
    return _check(runner)


def _check(runner: TreeModel) -> TreeCache:
    # Kernels work on blocks of keys: their check takes several.
    prompt_length = _KERNEL_PROMPT if runner.attention in KERNELS else _PROMPT
    name = getattr(runner.config, "model_type", type(runner.model).__name__)
    cache = TreeCache(1, prompt_length + 32)
    try:
        error = _tree_error(runner, cache, prompt_length)
    except InputError:
        raise
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError, NotImplementedError) as failure:
        reason = str(failure).strip().splitlines() or [""]
        raise InputError(
            f"model type {name!r} cannot run a token tree: its forward failed with {type(failure).__name__}: "
            f"{reason[0]}"
        ) from failure
    tolerance = _TOLERANCE.get(runner.model.dtype, _HALF_TOLERANCE)
    if not error <= tolerance:
        raise InputError(
            f"model type {name!r} cannot run a token tree: its logits differ from sequential evaluation by {error:.1e} "
            f"of their range (at most {tolerance:.0e}); recurrent, hybrid and some local-attention models do this"
        )
    return cache


def _tree_error(runner: TreeModel, cache: TreeCache, prompt_length: int) -> float:
    generator = torch.Generator().manual_seed(0)

    def random_tokens(count: int) -> list[int]:
        return torch.randint(0, runner.vocab_size, (count,), generator=generator).tolist()

    def forward(row: Row) -> torch.Tensor:
        return runner.logits(runner.inputs([row], cache.rows_per_slot), cache)[0].float()

    text = random_tokens(prompt_length)
    chain = list(range(-1, prompt_length - 1))
    forward(Row(0, 0, text, chain, list(range(prompt_length)), 0))
    worst = torch.zeros((), device=runner.device)
    span = torch.full((), 1e-9, device=runner.device)
    for _ in range(2):
        nodes, parents = random_tokens(len(_PARENTS)), list(_PARENTS)
        paths = [_path(parents, node) for node in range(len(parents))]
        positions = [len(text) + len(path) - 1 for path in paths]
        logits = forward(Row(0, len(text), nodes, parents, positions, len(nodes)))
        for node, path in enumerate(paths):
            sequence = torch.tensor([text + [nodes[i] for i in path]], device=runner.device)
            with torch.no_grad():
                expected = runner.model(input_ids=sequence, use_cache=False).logits[0, -1].float()
            worst = torch.maximum(worst, (logits[node] - expected).abs().max())
            span = torch.maximum(span, expected.max() - expected.min())
        cache.commit(0, len(text), _ACCEPTED)
        text += [nodes[i] for i in _ACCEPTED]
    return (worst / span).item()


def _path(parents: list[int], node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]
