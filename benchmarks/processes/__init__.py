"""Processes that a benchmark starts, and the traces that they leave."""
