"""Shows on the error stream how far work is: one line drawn over itself on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")
#: Seconds between two lines where the stream is not a terminal.
EVERY = 20.0


class Progress:
    """One line that says how much is done, what is being worked on, and how much time is left."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self._stream = sys.stderr
        self._begin = self._shown = time.monotonic()

    def show(self, label: str) -> None:
        """Draws the line. Where the stream is not a terminal, only if none was written for a while."""
        now = time.monotonic()
        if self._stream.isatty():
            self._stream.write(f"\r\033[K{self._text(label, now)}")
        elif now - self._shown >= EVERY:
            self._stream.write(f"{self._text(label, now)}\n")
        else:
            return
        self._shown = now
        self._stream.flush()

    def clear(self) -> None:
        """Removes the line from a terminal, so that something else can be printed."""
        if self._stream.isatty():
            self._stream.write("\r\033[K")
            self._stream.flush()

    def _text(self, label: str, now: float) -> str:
        spent = now - self._begin
        left = f", {spent / self.done * (self.total - self.done):.0f} s left" if self.done else ""
        return f"{self.done}/{self.total} {label}{left}"


def progress(items: Sequence[Item], label: Callable[[Item], str]) -> Iterator[Item]:
    """Yields the items and shows the current one, how many are done, and the time that is left."""
    bar = Progress(len(items))
    for item in items:
        bar.show(label(item))
        yield item
        bar.done += 1
    bar.clear()
