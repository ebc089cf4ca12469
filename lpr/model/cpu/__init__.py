"""CPU matrix products with prepacked weights, and huge-page memory for large tensors."""
