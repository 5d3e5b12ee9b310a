"""Replacing a file that other processes read and write. Modes follow the umask, so that a folder can be shared."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def locked(target: Path) -> Iterator[None]:
    """Holds the lock of ``target``, a file beside it; makes the folder."""
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = target.with_name(f"{target.name}.lock")
    try:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except PermissionError:
        if not lock.exists():
            raise
        handle = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)  # another user's: locking needs no right to write
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)  # releases the lock


def read_regular(path: Path) -> bytes:
    """What a regular file holds: a pipe would be waited for, and a device may have no end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(f"{path} is no regular file")
    return path.read_bytes()


@contextlib.contextmanager
def new_file(target: Path) -> Iterator[tuple[int, Path]]:
    """Handle and path of a new file beside ``target``, gone afterwards unless it was renamed; makes the folder."""
    target.parent.mkdir(parents=True, exist_ok=True)
    path = target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}")
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        yield handle, path
    finally:
        os.close(handle)
        path.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Writes the file whole or not at all; a link is written through."""
    target = Path(os.path.realpath(path))
    with new_file(target) as (handle, temporary):
        with open(handle, "w", closefd=False) as file:
            file.write(text)
        os.fsync(handle)
        temporary.replace(target)
