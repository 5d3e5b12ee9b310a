"""Progress bars on the error stream, drawn where that is a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO, TypeVar

__all__ = ["progress", "progress_bar"]

Item = TypeVar("Item")
WIDTH = 24


def _bar(done: int, total: int, empty: str) -> str:
    return ("#" * (WIDTH * done // max(1, total))).ljust(WIDTH, empty)


def progress(
    items: Sequence[Item], label: Callable[[Item], str], stream: TextIO | None = None
) -> Iterator[Item]:
    """Yields the items and shows which one is at work, how many are done and the time that is left."""
    target = sys.stderr if stream is None else stream
    if not target.isatty():
        yield from items
        return
    begin = time.monotonic()
    for done, item in enumerate(items):
        spent = time.monotonic() - begin
        left = f", {spent / done * (len(items) - done):.0f} s left" if done else ""
        target.write(f"\r\033[K[{_bar(done, len(items), ' ')}] {done}/{len(items)} {label(item)}{left}")
        target.flush()
        yield item
    target.write("\r\033[K")
    target.flush()


def progress_bar(label: str, stream: TextIO) -> Callable[[int, int], None]:
    """Draws ``label [####....] done/all`` over itself on a terminal, and the last state alone elsewhere."""

    def show(done: int, total: int) -> None:
        if not stream.isatty() and done < total:
            return
        start = "\r" if stream.isatty() else ""
        stream.write(f"{start}{label} [{_bar(done, total, '.')}] {done}/{total}")
        stream.write("\n" if done == total else "")
        stream.flush()

    return show
