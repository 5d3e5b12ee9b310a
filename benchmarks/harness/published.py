"""The rows that are committed under ``benchmarks/results``, and how pages show their times and machines."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.results import holds_rows, read_rows
from benchmarks.quality.study import record

NOTHING = "No figures are recorded: `make bench` measures them."

Entry = dict[str, Any]


def both_times(row: Entry) -> tuple[float, float]:
    """Our time and the baseline's in microseconds: graph replay where both have it, else medians (as speedup)."""
    ours, theirs = row.get("graph_us"), row.get("baseline_graph_us")
    if ours is None or theirs is None:
        ours, theirs = row["median_us"], row["baseline_median_us"]
    return float(ours), float(theirs)


def sustained_or_median(row: Entry, prefix: str = "") -> float:
    sustained = row.get(f"{prefix}sustained_us")
    return float(row[f"{prefix}median_us"] if sustained is None else sustained)


@dataclass(frozen=True)
class Results:
    """Rows of the harness, of other programs, those of the quality study, and the folder as pages name it."""

    files: dict[str, list[Entry]]
    tables: dict[str, list[dict[str, str]]]
    quality: list[Entry]
    folder: str = "benchmarks/results"


def read_results(folder: Path) -> Results:
    """Everything under ``benchmarks/results``.

    Raises:
        ResultsError: a file holds something else.
    """
    files, tables = {}, {}
    for path in sorted(folder.glob("*.csv")):
        if holds_rows(path):
            files[path.name] = [asdict(row) for row in read_rows(path)]
        else:
            with path.open(newline="") as file:
                tables[path.stem] = list(csv.DictReader(file))
    quality = [asdict(row) for row in record.read_rows(folder / "quality")]
    return Results(files, tables, quality)


def count_words(number: int | str) -> str:
    """``131 072``."""
    return f"{int(number):,}".replace(",", " ")


def grid(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 0) -> str:
    """A table of Markdown whose first ``left`` columns are words, but for one of lengths."""
    marks = ["---" if place < left and x != "tokens" else "---:" for place, x in enumerate(columns)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, *rows)).replace(
        "\n", f"\n|{'|'.join(marks)}|\n", 1
    )


def time_words(microseconds: float) -> str:
    """Three or four figures with the unit: ``94.3 µs``, ``12.1 ms``, ``17.9 s``."""
    value, unit = (microseconds, "µs") if microseconds < 1000 else (microseconds / 1000, "ms")
    if value >= 10_000:
        value, unit = value / 1000, "s"
    return f"{value:.{1 if value < 100 else 0}f} {unit}"


def machine_words(row: Entry) -> str:
    machine = (
        row["cpu"] if row["gpu"] == "none" else f"{row['gpu']}, CUDA {row['cuda']}, driver {row['driver']}"
    )
    return f"{machine}, torch {row['torch']}"


def commit_words(row: Entry) -> str:
    commit, dirty, _ = str(row["commit"]).partition("-dirty")
    return f"commit {commit[:12]}{dirty}"
