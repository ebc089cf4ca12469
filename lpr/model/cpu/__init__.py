"""Matrix products on a CPU, whose weights are laid out once, and the memory that large tensors take there."""
