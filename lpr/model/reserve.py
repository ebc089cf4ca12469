"""The memory of a GPU that steps need besides weights and K/V: a sum, told before it is spent."""

from __future__ import annotations

from typing import Any

from torch import nn

GRAPH_BYTES = 8 << 20
"""Of a captured graph: its nodes and their arguments. Estimated: no GPU has run lpr."""
WORKSPACES = 512 << 20
"""Of cuBLAS, NCCL, Triton and the CUDA context that grows with loaded kernels. Estimated."""
PARTIAL_SUMS = 8
"""Float32 copies of attention's output that split keys write, at most."""


def reserved_bytes(model: nn.Module, config: Any, num_entries: int, num_graphs: int) -> int:
    """Bytes for steps of up to `num_entries` entries in all, of which the last layer's logits are the most.

    Logits are held in the model's dtype and twice in float32, for the choice of tokens; a layer's input, projections
    and partial sums of attention come one layer at a time. Graphs share one pool, as large as the largest needs.
    """
    weights = [each for each in model.parameters() if each.dim() == 2]
    element, vocab = weights[0].element_size(), int(config.vocab_size)
    widest = max((each.shape[0] for each in weights if each.shape[0] != vocab), default=0)
    hidden = int(config.hidden_size)
    layer = num_entries * (4 * hidden + 3 * widest) * element + num_entries * hidden * PARTIAL_SUMS * 4
    logits = num_entries * vocab * (element + 2 * 4)
    return layer + logits + num_graphs * GRAPH_BYTES + WORKSPACES
