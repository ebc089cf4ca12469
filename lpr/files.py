"""Files that are written as a whole or not at all."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def replace_file(path: Path, data: bytes, probe: bool = False) -> None:
    """Put `data` in the place of `path`, as a whole or not at all; a `probe` is written and taken away again.

    Makes missing folders. Raises OSError; the old file is then as it was.
    """
    target = path.resolve()  # a link stays a link
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists() and not target.is_file():
        raise OSError("it exists and is no file")
    # A name of its own: two runs that save at the same moment must not write into one file.
    fresh = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        with open(fresh, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if not probe:
            os.replace(fresh, target)
    finally:
        fresh.unlink(missing_ok=True)
