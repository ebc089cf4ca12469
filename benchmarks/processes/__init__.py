"""Processes that a benchmark starts, and what they leave behind."""
