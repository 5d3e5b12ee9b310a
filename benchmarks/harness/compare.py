"""Two results files of one machine: ``python -m benchmarks compare OLD NEW``; status 1 for a regression.

A case is slower when its new median exceeds the old one by more than the tolerance and by more than the noise: the
spread from the median to the 80th percentile in the old run and to the 20th in the new one, added in quadrature.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.results import ResultsError, Row, machine, read_rows
from htree_ops.cli import Command, UsageError, columns, counted

Key = tuple[str, str, str, str]
DEFAULT_TOLERANCE = 3.0


@dataclass(frozen=True)
class Change:
    """One case in both files; ``ratio`` is new / old time, ``noise`` relative like ``ratio - 1``."""

    key: Key
    old_us: float
    new_us: float
    noise: float
    tolerance: float

    @property
    def ratio(self) -> float:
        """Above 1 is slower."""
        return self.new_us / self.old_us

    @property
    def verdict(self) -> str:
        """ "slower", "faster" or "same": beyond the tolerance and beyond the noise."""
        bound = max(self.tolerance, self.noise)
        if self.ratio > 1 + bound:
            return "slower"
        return "faster" if self.ratio < 1 / (1 + bound) else "same"


def _key(row: Row) -> Key:
    return row.op, row.case, row.shapes, row.dtype


def _by_case(rows: Sequence[Row]) -> dict[Key, Row]:
    """One row per case: each of a case's rows has our times."""
    found: dict[Key, Row] = {}
    for row in rows:
        found.setdefault(_key(row), row)
    return found


def compare(
    old: Sequence[Row], new: Sequence[Row], tolerance_percent: float = DEFAULT_TOLERANCE
) -> list[Change]:
    """The cases that both files have, in the order of the new one.

    Graph-replay times are compared where both have them, else medians; their noise is that of the medians.

    Raises:
        ResultsError: no case in common, or runs of different machines.
    """
    before, after = _by_case(old), _by_case(new)
    machines = {machine(row) for row in (*before.values(), *after.values())}
    if len(machines) > 1:
        raise ResultsError(f"runs of different machines cannot be compared: {'; '.join(sorted(machines))}")
    changes = []
    for key, now in after.items():
        was = before.get(key)
        if was is None:
            continue
        slow = (was.p80_us - was.median_us) / was.median_us
        quick = (now.median_us - now.p20_us) / now.median_us
        graphs = was.graph_us is not None and now.graph_us is not None
        times = (was.graph_us, now.graph_us) if graphs else (was.median_us, now.median_us)
        old_us, new_us = (float(t) for t in times if t is not None)
        changes.append(Change(key, old_us, new_us, math.hypot(slow, quick), tolerance_percent / 100))
    if not changes:
        raise ResultsError("the two files have no case in common")
    return changes


def format_changes(changes: Sequence[Change]) -> str:
    """A table: both times, the change and the noise in percent, the verdict."""
    table = [("op", "case", "dtype", "old us", "new us", "change %", "noise %", "")]
    for change in changes:
        op, case, _, dtype = change.key
        table.append(
            (
                op,
                case,
                dtype,
                f"{change.old_us:.1f}",
                f"{change.new_us:.1f}",
                f"{100 * (change.ratio - 1):+.1f}",
                f"{100 * change.noise:.1f}",
                "" if change.verdict == "same" else change.verdict,
            )
        )
    return columns(table)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Files and flags of the command."""
    parser.add_argument("old", type=Path, help="CSV file of the earlier run")
    parser.add_argument("new", type=Path, help="CSV file of the later run")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=DEFAULT_TOLERANCE,
        metavar="PERCENT",
        help="difference that counts as none",
    )


def run(arguments: argparse.Namespace) -> int:
    """Exit status: 0, or 1 where something became slower.

    Raises:
        UsageError: files that cannot be compared, or a tolerance below 0.
    """
    if not 0 <= arguments.tolerance < math.inf:
        raise UsageError(f"--tolerance must be at least 0, got {arguments.tolerance}")
    try:
        changes = compare(read_rows(arguments.old), read_rows(arguments.new), arguments.tolerance)
    except ResultsError as error:
        raise UsageError(str(error)) from error
    print(format_changes(changes))
    slower = [change for change in changes if change.verdict == "slower"]
    print(f"{counted(len(changes), 'case')} compared, {len(slower)} slower")
    return 1 if slower else 0


COMMAND = Command(
    "compare",
    """Compares two CSV files that run wrote on one machine. Status 1 where something became slower.

A case counts as slower where its new median exceeds the old one by more than the tolerance and by more than the
noise of both runs.""",
    add_arguments,
    run,
    "python -m benchmarks",
)
