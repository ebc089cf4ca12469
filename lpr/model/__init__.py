"""The model layer: unmodified transformers causal LMs that evaluate token trees."""
