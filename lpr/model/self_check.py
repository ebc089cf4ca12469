"""The guard at load: does this model evaluate a token tree as it evaluates plain text?

Some models keep state or build masks outside the hooks that lpr uses, without an error (recurrent layers, local
attention that slices by cache row, positions counted inside attention). A config tells only some of them apart
(`refusal`), so every model is asked once: two small trees, with a compaction between them, against cache-free
forwards of every root-to-node path.
"""

from __future__ import annotations

import inspect

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from lpr.config import InputError
from lpr.model.cache import TreeCache
from lpr.model.families import refusal
from lpr.model.inputs import Row, build_inputs
from lpr.model.runner import TreeModel

_PARENTS = (-1, 0, 0, 1, 1, 2, 1, 4)
_ACCEPTED = (0, 2, 5)
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
_HALF_TOLERANCE = 6e-2


def self_check(runner: TreeModel, prompt_length: int = 24) -> TreeCache:
    """Raise InputError if the model is not one that runs a tree; return the check's cache, for its layer shapes.

    The error is the largest difference of a logit over the range of the logits; in fp32 sound models stay below 1e-6
    and the silent failures known so far begin at 3e-3. Half precision rounds differently at every GEMM height.
    """
    name = getattr(runner.config, "model_type", type(runner.model).__name__)
    known = refusal(runner.model)
    if known is not None:
        raise InputError(f"model type {name!r} cannot run a token tree: {known}")
    cache = TreeCache(1, prompt_length + 32)
    try:
        error = _tree_error(runner, cache, prompt_length)
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
            f"of their range (at most {tolerance:.0e}); probably {_probable_cause(runner.model)}"
        )
    return cache


def _probable_cause(model: PreTrainedModel) -> str:
    if getattr(model, "hf_quantizer", None) is not None or any(map(is_traceable_wrapper_subclass, model.parameters())):
        return "its activations are quantised on the fly, so that rounding moves whole steps; weight-only works"
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        return "its forward takes no position_ids"
    return "it keeps state or counts cache rows"


def _tree_error(runner: TreeModel, cache: TreeCache, prompt_length: int) -> float:
    generator = torch.Generator().manual_seed(0)

    def random_tokens(count: int) -> list[int]:
        return torch.randint(0, runner.vocab_size, (count,), generator=generator).tolist()

    def forward(row: Row) -> torch.Tensor:
        inputs = build_inputs([row], cache.rows_per_slot, runner.device)
        return runner.logits(inputs, cache)[0].float()

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
