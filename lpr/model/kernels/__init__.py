"""Attention over committed tokens and a packed tree mask: one signature, a readable reference, a GPU version.

`reference.tree_attention` is the specification, `triton_kernel.tree_attention` the kernel. Nothing here is imported
before a model asks for it (`TreeModel(attention=...)`).
"""
