"""Exact mode: batch-invariant logits, the same bits for every tree, batch and chunking.

A row of a GEMM with the weights has the same bits for any number of rows M within a range, which `check` determines and
enforces. Attention adds in the order of positions: `in_order` on a CPU, `kernels.exact_kernel` on a GPU.
"""

BLOCK = 64  # positions that one product of `kernels.exact_kernel` adds up
