"""Attention over committed tokens and a packed tree mask: one signature, a readable reference, two GPU versions.

`reference.tree_attention` is the specification, `triton_kernel.tree_attention` the kernel, `flex.tree_attention` the
same through FlexAttention. Nothing here is imported before a model asks for it (`TreeModel(attention=...)`).
"""
