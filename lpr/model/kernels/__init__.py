"""What PyTorch has no operator for: attention over a packed tree mask, and the choice of next tokens in one launch.

`reference.tree_attention` and `specification.pick` are the specifications, `attention_kernel` and
`sampling_kernel` launch the GPU versions, whose device code is in `attention_code` and `sampling_code`. Nothing here is
imported before a model asks for it.
"""
