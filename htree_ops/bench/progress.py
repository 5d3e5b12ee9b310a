"""Shows on the error stream how far work is: one line drawn over itself on a terminal, elsewhere a line now and then.

It imports nothing of the package, so that it can watch a build before the package works:
``python htree_ops/bench/progress.py LOG COMMAND...`` shows which file the compiler has finished last. All that the
command prints goes to LOG; where the command fails, its errors and its last lines are shown.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO, TypeVar

__all__ = ["Progress", "progress", "progress_bar", "watch"]

Item = TypeVar("Item")
WIDTH = 24
#: Seconds between two lines where the stream is not a terminal.
EVERY = 20.0
#: What is shown of a failed command: the first lines that name an error, and the last lines.
ERROR = re.compile(r"\berror: ")
ERROR_LINES, LAST_LINES = 20, 20
#: A line of ninja: how many units are done, of how many; and the source in a compiler's command line.
DONE = re.compile(r"\[(\d+)/(\d+)\] ")
SOURCE = re.compile(r"\s-c (\S+\.(?:cpp|cu|cc))\b")


def _bar(done: int, total: int, empty: str) -> str:
    return ("#" * (WIDTH * done // max(1, total))).ljust(WIDTH, empty)


class Progress:
    """One line that says how much is done, what is being worked on, and how much time is left.

    ``total`` may be 0 where it is not known. ``clock`` returns seconds.
    """

    def __init__(
        self, total: int, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.total = total
        self.done = 0
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._begin = self._shown = clock()

    def show(self, label: str) -> None:
        """Draws the line. Where the stream is not a terminal, only if none was written for a while."""
        now = self._clock()
        if self._stream.isatty():
            self._stream.write(f"\r\033[K[{_bar(self.done, self.total, ' ')}] {self._text(label, now)}")
        elif now - self._shown >= EVERY:
            self._stream.write(f"{self._text(label, now)}\n")
        else:
            return
        self._shown = now
        self._stream.flush()

    def advance(self, label: str, count: int = 1) -> None:
        """Counts ``count`` more as done."""
        self.done += count
        self.show(label)

    def clear(self) -> None:
        """Removes the line from a terminal, so that something else can be printed."""
        if self._stream.isatty():
            self._stream.write("\r\033[K")
            self._stream.flush()

    def _text(self, label: str, now: float) -> str:
        spent = now - self._begin
        if not self.total:
            return f"{label}, {spent:.0f} s"
        left = f", {spent / self.done * (self.total - self.done):.0f} s left" if self.done else ""
        return f"{self.done}/{self.total} {label}{left}"


def progress(
    items: Sequence[Item], label: Callable[[Item], str], stream: TextIO | None = None
) -> Iterator[Item]:
    """Yields the items and shows the current one, how many are done, and the time that is left."""
    bar = Progress(len(items), stream)
    for item in items:
        bar.show(label(item))
        yield item
        bar.done += 1
    bar.clear()


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


def watch(log: Path, command: Sequence[str], stream: TextIO | None = None) -> int:
    """Runs a command that compiles and shows how far it is; everything that it prints goes to ``log``.

    Returns:
        The command's status; where that is not 0, errors and the last lines of the log are printed.
    """
    target = sys.stderr if stream is None else stream
    log.parent.mkdir(parents=True, exist_ok=True)
    errors: list[str] = []
    last: deque[str] = deque(maxlen=LAST_LINES)
    bar = Progress(0, target)
    label, said = "starting", set()
    with log.open("w") as file:
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        assert child.stdout is not None
        try:
            for line in child.stdout:
                file.write(line)
                last.append(line)
                if ERROR.search(line):
                    errors.append(line)
                note = line.strip()
                if note.startswith("htree_ops: ") and note not in said:  # what setup.py decided
                    said.add(note)
                    bar.clear()
                    target.write(f"{note}\n")
                if source := SOURCE.search(line):
                    label = source[1].removeprefix(f"{Path.cwd()}/")
                if done := DONE.search(line):
                    bar.done, bar.total = int(done[1]), int(done[2])
                bar.show(label)
        except KeyboardInterrupt:
            child.terminate()
        status = child.wait()
    bar.clear()
    if status:
        target.writelines([*errors[:ERROR_LINES], "...\n", *last])
        target.write(f"failed with status {status}, all of it is in {log}: {' '.join(command)}\n")
    return status


if __name__ == "__main__":
    sys.exit(watch(Path(sys.argv[1]), sys.argv[2:]))
