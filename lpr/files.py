"""Atomic replacement of files, and appending of whole lines."""

import contextlib
import errno
import hashlib
import json
import os
import stat
import uuid
from importlib.resources import files
from pathlib import Path
from typing import Any, BinaryIO


def asset(name: str) -> Path:
    """The path of a file that comes with lpr, by its name in lpr/assets."""
    return Path(str(files("lpr") / "assets" / name))


def replace_file(path: Path, data: bytes, *, probe: bool = False, private: bool = False) -> None:
    """Replace `path` by a file with `data`, atomically; a `probe` is written and deleted again.

    Creates missing folders. A `private` file is readable by its owner only (0600, new folders 0700); otherwise the mode
    of the replaced file is kept. Raises OSError; the old file is then unchanged.
    """
    target = _target(path)
    for folder in reversed([each for each in target.parents if not each.exists()]):
        folder.mkdir(0o700 if private else 0o777, exist_ok=True)
    _put(target, data, probe=probe, private=private).close()


def start_lines(path: Path, data: bytes, spare: int) -> BinaryIO:
    """Replace `path` by a file with `data`, open to append lines by `append_whole`.

    Raises OSError if the folder is missing, or the disk has no room for `spare` bytes more; the old file is then
    unchanged. A pipe or a device is opened directly.
    """
    if path.exists() and not path.is_file():
        with contextlib.ExitStack() as failing:
            device = failing.enter_context(open(path, "wb", buffering=0))
            if stat.S_ISCHR(os.fstat(device.fileno()).st_mode) and not device.isatty():
                append_whole(device, b"\n")  # a full one says so now
            failing.pop_all()
        return device
    return _put(_target(path), data, spare=spare)


def append_whole(file: BinaryIO, data: bytes) -> None:
    """Append all of `data` to an unbuffered file, or none of it; raises OSError.

    A full disk may accept the first part of a write: a regular file is then truncated to its former length. Data
    written to a pipe or a device remains, and the error's text says so.
    """
    end = os.fstat(file.fileno()).st_size
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(file.fileno(), rest) :]
    except BaseException as failure:
        if 0 < len(rest) < len(data):
            try:
                os.ftruncate(file.fileno(), end)
            except OSError:
                why = failure.strerror if isinstance(failure, OSError) else type(failure).__name__
                raise OSError(errno.EIO, f"{why}; its last line is cut") from failure
        raise


def checksum_of(header: dict[str, Any], data: bytes) -> str:
    """The checksum of a file's header and content."""
    content = hashlib.blake2b(json.dumps(header, sort_keys=True).encode(), digest_size=16)
    content.update(data)
    return content.hexdigest()


def _target(path: Path) -> Path:
    """The file that `path` names; a link stays a link."""
    try:
        return path.resolve()
    except RuntimeError as failure:  # a link to itself
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from failure


def _put(target: Path, data: bytes, *, probe: bool = False, private: bool = False, spare: int = 0) -> BinaryIO:
    """Replace `target` by a file with `data` that is open to append; a `probe` is taken away again."""
    if target.exists() and not target.is_file():
        raise OSError("it exists and is no file")
    # A random name: concurrent runs do not write to the same file, and no one can place a link there.
    fresh = target.with_name(f".{target.name[:40]}.{uuid.uuid4().hex}")
    mode = 0o600 if private else 0o666
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.ExitStack() as failing:
        file = failing.enter_context(open(os.open(fresh, flags, mode), "wb", buffering=0))
        try:
            if not private and target.exists():
                with contextlib.suppress(PermissionError):  # a file system without modes
                    os.fchmod(file.fileno(), target.stat().st_mode & 0o777)
            append_whole(file, data + bytes(spare))
            os.fsync(file.fileno())
            if spare:
                file.truncate(len(data))
            if not probe:
                os.replace(fresh, target)
        finally:
            fresh.unlink(missing_ok=True)
        failing.pop_all()
    return file
