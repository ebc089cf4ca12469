"""Exact mode: a step's logits are the same bits however it was drafted, batched or cut.

`check` asks a model and a machine what exactness takes. Attention is `in_order` with the extension and `products`
without it on a CPU, and `kernels.exact_kernel` on a GPU.
"""
