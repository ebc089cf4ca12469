"""The description of a peer: source, deviations and variants."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Peer:
    """A system that completes prompts in a process of its own."""

    name: str  # Its name on the command line and in the table.
    module: str  # The script that completes prompts with it.
    variants: Mapping[str, str]  # Settings under test: name to description.
    why: str  # A remark for readers of its figures.
    repository: str = ""  # Its git URL; empty for a package of this environment.
    commit: str = ""
    folders: Mapping[str, str] = field(default_factory=dict)
    """Folders of the checkout, and the names under which they are imported."""
    requirements: Sequence[str] = ()  # Packages that pip installs into its environment.
    build: Callable[[Path, Path], None] | None = None
    """Compiles it, given the environment's folder and the one that holds `folders`."""
    old_weights: bool = False  # True if it needs a model folder in the form of transformers 4.
    model_type: str = ""  # The architecture whose code it runs the model with, if it differs from the model's own.
    learns: Sequence[str] = ()  # Variants that keep text from one prompt for the next.
    samples: bool = True  # True if it decodes at temperatures above 0.
    replays: bool = False  # True if it drafts for existing texts, instead of completing prompts.

    @property
    def identity(self) -> str:
        """Changes if another installation is necessary."""
        return json.dumps([self.repository, self.commit, dict(self.folders), list(self.requirements)])
