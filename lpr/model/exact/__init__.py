"""Exact mode: a step's logits are the same bits however it was drafted, batched or cut.

A row of a matrix product with the weights has the same bits for any number of rows within a range, which `check`
finds and keeps to. Attention adds in the order of positions: `in_order` on a CPU, `kernels.exact_kernel` on a GPU.
"""

BLOCK = 64  # positions whose values one product of `kernels.exact_kernel` adds up
