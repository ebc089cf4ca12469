"""Choosing next tokens from logits: greedy and sampled, with limits, logits processors and grammars.

`sampler` makes results of logits. `selection` holds the parameters, `choice` chooses. `specification` defines the
choice; `in_cpp` makes it on a CPU, `kernels.sampling_kernel` on a GPU, `parts` where ranks share a vocabulary.
"""
