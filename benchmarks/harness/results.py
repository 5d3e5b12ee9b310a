"""A measured row and the facts that it must have: machine, versions, commit, problem, baseline and ceiling."""

from __future__ import annotations

import csv
import math
import types
import typing
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from htree_ops.bench import verdict
from htree_ops.cli import columns
from htree_ops.info import Environment


class ResultsError(ValueError):
    """A results file that cannot be used; the message is one line that names the file."""


@dataclass(frozen=True, kw_only=True)
class Row(Environment):
    """One op on one problem against one baseline. Times in microseconds per call.

    ``graph_us`` is the time per call of a replayed CUDA graph, ``sustained_us`` the median under sustained
    load; None where it was not taken. ``gb_per_s``, ``tflops`` and ``percent_of_ceiling`` come from the
    graph-replay time where there is one, else from the median. ``speedup`` compares graph with graph where
    both exist, else the medians. ``floor_us`` is the least time that memory traffic takes (``floor_kind``:
    "copy" for compulsory bytes over copy bandwidth, "io_only" for a measured IO-only variant), ``percent_of_floor``
    is 100 * floor / time and ``verdict`` says what bounds the op; None in rows older than these columns.
    """

    op: str
    case: str
    shapes: str
    dtype: str
    bytes: int
    flops: int
    median_us: float
    p20_us: float
    p80_us: float
    num_samples: int
    graph_us: float | None
    sustained_us: float | None
    gb_per_s: float
    tflops: float
    percent_of_ceiling: float
    baseline: str
    baseline_computes_the_same: bool
    baseline_median_us: float
    baseline_p20_us: float
    baseline_p80_us: float
    baseline_graph_us: float | None
    baseline_sustained_us: float | None
    speedup: float
    floor_us: float | None = None
    floor_kind: str | None = None
    percent_of_floor: float | None = None
    verdict: str | None = None


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """A CSV file: a header and one line per row; None is an empty cell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(_KINDS), lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def holds_rows(path: Path) -> bool:
    """Whether the file's header is that of :func:`write_rows`; other programs write tables of their own."""
    with path.open(newline="") as file:
        return set(next(csv.reader(file), ())) >= _NEEDED


def read_rows(path: Path) -> list[Row]:
    """The rows of :func:`write_rows`.

    Raises:
        ResultsError: the file cannot be read, or holds something else.
    """
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            names, entries = set(reader.fieldnames or ()), list(reader)
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror}") from error
    except (ValueError, csv.Error) as error:
        raise ResultsError(f"{path}: not CSV ({error})") from error
    if lacking := sorted(_NEEDED - names):
        raise ResultsError(f"{path}: not a results file: it lacks the columns {', '.join(lacking)}")
    if foreign := sorted(names - set(_KINDS)):
        raise ResultsError(f"{path}: not a results file: it has the columns {', '.join(foreign)}")
    rows = []
    for number, entry in enumerate(entries):
        if None in entry:  # DictReader's key for cells behind the header's
            raise ResultsError(f"{path}: row {number} has more cells than the header")
        values = {}
        for name, cell in entry.items():
            try:
                values[name] = _value(name, cell)
            except ValueError as error:
                raise ResultsError(
                    f"{path}: row {number}: {name} must be {error}, got {cell!r:.40}"
                ) from None
        rows.append(Row(**values))
    return rows


#: Fields by which others are divided.
_POSITIVE = (
    "median_us",
    "baseline_median_us",
    "graph_us",
    "baseline_graph_us",
    "ceiling_gb_per_s",
    "speedup",
)


def _value(name: str, cell: str | None) -> Any:
    """What a cell holds. Raises ValueError, which says what it should be."""
    kind = _KINDS[name]
    if isinstance(kind, types.UnionType):  # float | None, str | None
        if not cell:
            return None
        kind = typing.get_args(kind)[0]
    if cell is None:
        raise ValueError("there")
    if kind is str:
        return cell
    if kind is bool:
        if cell not in ("True", "False"):
            raise ValueError("True or False")
        return cell == "True"
    try:
        value = kind(cell)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError("a number")
    if name in _POSITIVE and value <= 0:
        raise ValueError("above 0")
    return value


_KINDS = typing.get_type_hints(Row)
_NEEDED = {field.name for field in fields(Row) if field.default is MISSING}


def machine(row: Environment) -> str:
    """The GPU of a row, or the CPU where it was measured there."""
    return row.cpu if row.gpu == "none" else row.gpu


def time_us(row: Row) -> float:
    """The time that a row's rates come from: graph replay where there is one, else the median."""
    return row.median_us if row.graph_us is None else row.graph_us


def with_floor(row: Row) -> tuple[float | None, str]:
    """(percent of floor, verdict) of a row; for rows that lack these columns, from bytes and copy bandwidth."""
    if row.percent_of_floor is not None and row.verdict is not None:
        return row.percent_of_floor, row.verdict
    floor_us = row.bytes / row.ceiling_gb_per_s / 1e3
    time = time_us(row)
    return (100 * floor_us / time, verdict(time, floor_us)) if floor_us > 0 else (None, "-")


#: The columns of a table of rows, and which of them are words.
_OURS = ("op", "case", "dtype", "µs", "graph µs", "GB/s", "TFLOP/s", "% copy", "% floor", "verdict")
HEADER = (*_OURS, "baseline", "µs", "graph µs", "speed-up")
WORDS = {"op", "case", "dtype", "verdict", "baseline"}


def table_cells(row: Row) -> tuple[str, ...]:
    """Our time, its share of the ceiling and the floor, the baseline's time and the speed-up."""
    graph, baseline_graph = (
        "-" if value is None else f"{value:.1f}" for value in (row.graph_us, row.baseline_graph_us)
    )
    name = row.baseline if row.baseline_computes_the_same else f"{row.baseline} (other function)"
    rates = (f"{row.gb_per_s:.0f}", f"{row.tflops:.3g}", f"{row.percent_of_ceiling:.1f}")
    percent, bound = with_floor(row)
    floor = ("-" if percent is None else f"{percent:.1f}", bound)
    theirs = (name, f"{row.baseline_median_us:.1f}", baseline_graph, f"{row.speedup:.2f}×")
    return row.op, row.case, row.dtype, f"{row.median_us:.1f}", graph, *rates, *floor, *theirs


def format_table(rows: Sequence[Row]) -> str:
    """The rows for a terminal."""
    return columns([HEADER, *map(table_cells, rows)])
