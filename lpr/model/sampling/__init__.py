"""Sampling of next tokens: greedy and sampled, with top-k, top-p, min-p, logits processors and grammars.

`sampler` turns logits into results. `selection` holds the parameters, `choice` samples. `specification` defines the
choice; `in_cpp` implements it on a CPU, `kernels.sampling_kernel` on a GPU, `parts` vocab-parallel.
"""
