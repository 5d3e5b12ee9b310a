"""A progress bar on the error stream, drawn where that is a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO, TypeVar

__all__ = ["progress"]

Item = TypeVar("Item")
WIDTH = 24


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
        bar = "#" * (WIDTH * done // len(items))
        target.write(f"\r\033[K[{bar.ljust(WIDTH)}] {done}/{len(items)} {label(item)}{left}")
        target.flush()
        yield item
    target.write("\r\033[K")
    target.flush()
