"""Writes the measured results of ``benchmarks/results/*.json`` into the README, or checks that they agree.

Run: ``python -m htree_ops.bench.readme_table`` after committing results; ``--check`` changes nothing and fails
where the README differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["BEGIN", "END", "read_rows", "render", "replace_section"]

BEGIN, END = "<!-- results -->", "<!-- /results -->"
#: The slowest cases of an op and dtype that the table shows; the files have all of them.
CASES_PER_OP = 4
NOTHING = "No figures are recorded: `make bench` measures them."
HEADER = (
    "| op | case | dtype | htree_ops | % of ceiling | fastest baseline | its time | factor |\n"
    "|---|---|---|---:|---:|---|---:|---:|"
)
FACTS = (
    "op",
    "case",
    "dtype",
    "median_us",
    "percent_of_ceiling",
    "baseline",
    "baseline_median_us",
    "speedup",
)
PLACE = ("gpu", "cpu", "torch", "cuda", "driver", "commit")

Entry = dict[str, Any]


def read_rows(folder: Path) -> dict[str, list[Entry]]:
    """The rows of every results file by its name: a JSON list, or an object whose ``rows`` are one.

    Raises:
        ValueError: a file holds something else, or a row lacks a fact that the table shows.
    """
    files: dict[str, list[Entry]] = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        rows = content.get("rows") if isinstance(content, dict) else content
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError(f"{path}: expected a list of rows")
        for number, row in enumerate(rows):
            lacking = [name for name in (*FACTS, *PLACE) if row.get(name) is None]
            if lacking:
                raise ValueError(f"{path}: row {number} lacks {', '.join(lacking)}")
        files[path.name] = rows
    return files


def _both_times(row: Entry) -> tuple[float, float]:
    """Our time and the baseline's in microseconds: graph replay where both have it, else medians (as speedup)."""
    ours, theirs = row.get("graph_us"), row.get("baseline_graph_us")
    if ours is None or theirs is None:
        ours, theirs = row["median_us"], row["baseline_median_us"]
    return float(ours), float(theirs)


def _shown(rows: Iterable[Entry]) -> list[Entry]:
    """Per op, case and dtype the fastest baseline that computes the same; per op and dtype the slowest cases."""
    best: dict[tuple[str, str, str], Entry] = {}
    for row in rows:
        if row.get("baseline_computes_the_same", True):
            key = (row["op"], row["case"], row["dtype"])
            if key not in best or row["speedup"] < best[key]["speedup"]:
                best[key] = row
    groups: dict[tuple[str, str], list[Entry]] = {}
    for (op, _, dtype), row in best.items():
        groups.setdefault((op, dtype), []).append(row)
    shown: list[Entry] = []
    for group in groups.values():
        longest = sorted(group, key=lambda row: -_both_times(row)[0])[:CASES_PER_OP]
        shown += [row for row in group if row in longest]
    return shown


def _time(microseconds: float) -> str:
    """Three or four figures with the unit: ``94.3 µs``, ``12.1 ms``."""
    value, unit = (microseconds, "µs") if microseconds < 1000 else (microseconds / 1000, "ms")
    return f"{value:.{1 if value < 100 else 0}f} {unit}"


def _line(row: Entry) -> str:
    ours, theirs = _both_times(row)
    cells = (
        f"`{row['op']}`",
        row["case"],
        row["dtype"],
        _time(ours),
        f"{row['percent_of_ceiling']:.0f}",
        row["baseline"],
        _time(theirs),
        f"{row['speedup']:.2f}",
    )
    return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"


def _place(row: Entry) -> str:
    machine = (
        row["cpu"] if row["gpu"] == "none" else f"{row['gpu']}, CUDA {row['cuda']}, driver {row['driver']}"
    )
    commit, dirty, _ = str(row["commit"]).partition("-dirty")
    return f"{machine}, torch {row['torch']}, commit {commit[:12]}{dirty}"


def render(files: dict[str, list[Entry]], folder: str) -> str:
    """The section between the markers. ``folder``: the results' place as the README names it."""
    parts = []
    for name, rows in files.items():
        places: dict[str, list[Entry]] = {}
        for row in _shown(rows):
            places.setdefault(_place(row), []).append(row)
        for place, shown in places.items():
            parts.append(f"{place} (`{folder}/{name}`):\n\n{HEADER}\n" + "\n".join(map(_line, shown)))
    return "\n\n".join(parts) or NOTHING


def replace_section(readme: str, section: str) -> str:
    """The README's text with ``section`` between the markers.

    Raises:
        ValueError: the markers are missing or not once each in order.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise ValueError(f"the README must hold {BEGIN} and {END} once, in this order")
    return f"{before}{BEGIN}\n{section}\n{END}{after}"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 written or equal, 1 ``--check`` found a difference, 2 unusable files."""
    parser = argparse.ArgumentParser(prog="python -m htree_ops.bench.readme_table", description=__doc__)
    parser.add_argument(
        "--readme", type=Path, default=Path("README.md"), help="file to write (default %(default)s)"
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("benchmarks/results"),
        help="folder of JSON files (default %(default)s)",
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; status 1 where the README differs"
    )
    arguments = parser.parse_args(argv)
    try:
        old = arguments.readme.read_text()
        new = replace_section(old, render(read_rows(arguments.results), arguments.results.as_posix()))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.check:
        if new != old:
            print(
                f"{arguments.readme} differs from {arguments.results}: run without --check", file=sys.stderr
            )
        return int(new != old)
    arguments.readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
