"""Attention over token trees, by several backends."""
