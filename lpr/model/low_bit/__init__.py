"""Weights in 8 or 4 bits: a low-bit copy of a model, which drafts for it, and its matrix products."""
