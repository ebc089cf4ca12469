"""How the next tokens are chosen from logits: greedy and sampled, with limits, logits processors and grammars.

`selection` says by which parameters, `choice` chooses. `specification` defines the choice; `in_cpp` and `in_numpy` make
it on a CPU, `kernels.sampling_kernel` on a GPU, and `parts` where ranks hold a vocabulary in parts.
"""
