"""A measured row and the facts that it must have: machine, versions, commit, problem, baseline and ceiling."""

from __future__ import annotations

import csv
import json
import math
import types
import typing
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path

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


def write_json(path: Path, rows: Sequence[Row]) -> None:
    """A JSON list with one object per row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def read_json(path: Path) -> list[Row]:
    """The rows of :func:`write_json`.

    Raises:
        ResultsError: the file cannot be read, or holds something else.
    """
    try:
        entries = json.loads(path.read_text())
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ResultsError(f"{path}: not JSON ({error})") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ResultsError(f"{path}: not a results file: expected a list of rows")
    known = {field.name for field in fields(Row)}
    needed = {field.name for field in fields(Row) if field.default is MISSING}
    for number, entry in enumerate(entries):
        if lacking := sorted(needed - set(entry)):
            raise ResultsError(f"{path}: not a results file: row {number} lacks {', '.join(lacking)}")
        if foreign := sorted(set(entry) - known):
            raise ResultsError(f"{path}: not a results file: row {number} has {', '.join(foreign)}")
        for name, value in entry.items():
            if expected := _objection(name, value):
                raise ResultsError(f"{path}: row {number}: {name} must be {expected}, got {value!r:.40}")
    return [Row(**entry) for entry in entries]


#: Fields by which others are divided.
_POSITIVE = (
    "median_us",
    "baseline_median_us",
    "graph_us",
    "baseline_graph_us",
    "ceiling_gb_per_s",
    "speedup",
)


def _objection(name: str, value: object) -> str | None:
    """What a value of a row should be; None where it is so."""
    kind = _KINDS[name]
    optional = isinstance(kind, types.UnionType)  # float | None, str | None
    if optional and value is None:
        return None
    kind = typing.get_args(kind)[0] if optional else kind
    if kind is str or kind is bool:
        return None if isinstance(value, kind) else "a string" if kind is str else "true or false"
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return "a number"
    return "above 0" if name in _POSITIVE and value <= 0 else None


_KINDS = typing.get_type_hints(Row)


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """A header and one line per row; None is an empty cell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def format_table(rows: Sequence[Row]) -> str:
    """The rows for a terminal: our time, its share of the ceiling, the baseline's time and the speed-up."""
    header = ("op", "case", "dtype", "us", "graph us", "GB/s", "TFLOP/s", "% copy", "% floor", "verdict")
    table: list[tuple[str, ...]] = [(*header, "baseline", "us", "graph us", "speed-up")]
    for row in rows:
        graph, baseline_graph = (
            "-" if value is None else f"{value:.1f}" for value in (row.graph_us, row.baseline_graph_us)
        )
        name = row.baseline if row.baseline_computes_the_same else f"{row.baseline} (other function)"
        rates = (f"{row.gb_per_s:.0f}", f"{row.tflops:.3g}", f"{row.percent_of_ceiling:.0f}")
        ours = (f"{row.median_us:.1f}", graph, *rates)
        if row.percent_of_floor is None or row.verdict is None:
            floor = ("-", "-")
        else:
            floor = (f"{row.percent_of_floor:.0f}", row.verdict)
        theirs = (name, f"{row.baseline_median_us:.1f}", baseline_graph, f"{row.speedup:.2f}x")
        table.append((row.op, row.case, row.dtype, *ours, *floor, *theirs))
    return columns(table)
