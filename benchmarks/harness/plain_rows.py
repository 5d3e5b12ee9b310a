"""Tables of measurements of any kind, for the programs of benchmarks/, and the flags that these share."""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.harness.progress import progress
from htree_ops.cli import regular_expression
from htree_ops.info import source_commit

Item = TypeVar("Item")


#: What stands in each column of a row.
Row = dict[str, Any]


def where(device: str = "cuda") -> Row:
    """The first columns of a row: where it was measured."""
    gpu = "none" if device == "cpu" else torch.cuda.get_device_name()
    return {"gpu": gpu, "torch": torch.__version__, "commit": source_commit()}


def make_parser(
    description: str, *, rounds: int = 0, quick: str = "", cpu: bool = False, case: bool = False
) -> argparse.ArgumentParser:
    """The flags that programs share: ``--csv``, and where they are given, ``--rounds`` with its default, ``--quick``
    with what it leaves out, ``--device`` of programs that run on a CPU too, and ``--case`` of :func:`measure_each`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--csv", type=Path, help="write the rows to this file")
    if rounds:
        parser.add_argument("--rounds", type=int, default=rounds, help=f"turns of a row (default {rounds})")
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    if cpu:
        parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    if case:
        said = "only cases whose description this regular expression finds"
        parser.add_argument("--case", type=regular_expression, default="", metavar="REGEX", help=said)
    return parser


def parse_for_gpu(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of a program that measures a GPU, unless its ``--device`` says otherwise.

    Raises:
        SystemExit: with status 2 and a line on stderr, where torch sees no GPU or the arguments are wrong.
    """
    arguments = parser.parse_args(argv)
    if vars(arguments).get("device", "cuda") != "cpu" and not torch.cuda.is_available():
        more = ": --device cpu measures this machine" if "device" in arguments else ""
        parser.error(f"torch sees no GPU{more}")
    return arguments


def measure_each(
    items: Sequence[Item],
    label: Callable[[Item], str],
    measure: Callable[[Item], Iterable[Row]],
    path: Path | None,
    case: str = "",
) -> int:
    """Shows how far the items are, prints the rows of each and writes them to ``path``; status 0.

    Only of the items in whose label the regular expression ``case`` is found.
    """
    items = [item for item in items if re.search(case, label(item))]
    print_rows((row for item in progress(items, label) for row in measure(item)), path)
    return 0


def print_rows(rows: Iterable[Row], path: Path | None = None) -> list[Row]:
    """Prints the rows as CSV with three digits and writes them whole to ``path``, if given.

    Each is written as soon as ``rows`` gives it, so that a run that is cut short leaves those that it has measured.
    Rows that do not name their commit get it as their last column.

    Returns:
        The rows.

    Raises:
        ValueError: there are no rows.
        OSError: ``path`` cannot be written.
        UsageError: the commit is unknown.
    """
    commit = source_commit()
    done: list[Row] = []
    columns: list[str] = []
    with ExitStack() as stack:
        streams = [sys.stdout]
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            streams.append(stack.enter_context(path.open("w", newline="")))
        for row in rows:
            record = row if "commit" in row else row | {"commit": commit}
            columns = columns or list(record)
            if sys.stderr.isatty():  # the line of benchmarks.harness.progress
                print("\r\033[K", end="", file=sys.stderr, flush=True)
            for stream in streams:
                writer = csv.DictWriter(stream, columns, lineterminator="\n")
                if not done:
                    writer.writeheader()
                writer.writerow(record if stream is not sys.stdout else _short(record))
                stream.flush()
            done.append(row)
    if not done:
        raise ValueError("rows: at least one is required, got none")
    return done


def _short(record: dict[str, object]) -> dict[str, object]:
    return {key: f"{value:.3g}" if isinstance(value, float) else value for key, value in record.items()}
