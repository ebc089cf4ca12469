"""The checkout's root, for tests that read files or start programs."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
