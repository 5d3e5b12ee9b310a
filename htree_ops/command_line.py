"""What the command lines of this package share: one line per mistake, and types that check their range."""

from __future__ import annotations

import argparse
import math
import re
import sys
from pathlib import Path
from typing import NoReturn

__all__ = ["OneLineParser", "at_least", "bandwidth", "output_file", "regular_expression"]


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line on the error stream, with exit status 2."""

    def error(self, message: str) -> NoReturn:
        """Prints the message without the usage."""
        print(f"{self.prog}: {message}", file=sys.stderr)
        sys.exit(2)


class at_least:
    """An integer of at least ``least``."""

    def __init__(self, least: int) -> None:
        self.least = least
        self.__name__ = "integer"  # argparse names the type in its message

    def __call__(self, text: str) -> int:
        value = int(text)
        if value < self.least:
            raise argparse.ArgumentTypeError(f"must be at least {self.least}, got {value}")
        return value


def bandwidth(text: str) -> float:
    """A positive, finite number of GB/s."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be positive and finite, got {text}")
    return value


def regular_expression(text: str) -> str:
    """A text that compiles as a regular expression."""
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from error
    return text


def output_file(text: str) -> Path:
    """A path that can be written: tried before the work is done whose result goes there; makes its folder."""
    path = Path(text)
    existed = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from error
    if not existed:
        path.unlink()
    return path
