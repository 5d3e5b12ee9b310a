"""Writes the measured results of ``benchmarks/results/*.json`` into the README and ``docs/results.md``.

The README gets tree attention beside dense attention, ``docs/results.md`` the first case of every op on a GPU, then
every machine and the cases of each op with the lowest factors. Run ``python -m benchmarks.harness.readme_table`` after
committing results; ``--check`` changes nothing and fails where a document differs.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from htree_ops.cli import run_program

__all__ = ["markers", "read_rows", "render", "render_headlines", "render_summary", "replace_section"]

#: So many cases of an op and dtype ``docs/results.md`` shows, those of the lowest factor, and all that lose; the files
#: have every case.
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


def _fastest_equals(rows: Iterable[Entry]) -> list[Entry]:
    """Per op, case and dtype, in the order of the file, the fastest baseline that computes the same."""
    best: dict[tuple[str, str, str], Entry] = {}
    for row in rows:
        if row.get("baseline_computes_the_same", True):
            key = (row["op"], row["case"], row["dtype"])
            if key not in best or row["speedup"] < best[key]["speedup"]:
                best[key] = row
    return list(best.values())


def _shown_cases(rows: list[Entry]) -> list[Entry]:
    groups: dict[tuple[str, str], list[Entry]] = {}
    for row in rows:
        groups.setdefault((row["op"], row["dtype"]), []).append(row)
    shown: list[Entry] = []
    for group in groups.values():
        lowest = sorted(group, key=lambda row: row["speedup"])[:CASES_PER_OP]
        shown += [row for row in group if row in lowest or row["speedup"] < 1]
    return shown


def _first_cases(rows: list[Entry]) -> list[Entry]:
    first: dict[str, Entry] = {}
    for row in rows:
        first.setdefault(row["op"], row)
    return list(first.values())


def _sustained_or_median(row: Entry, prefix: str = "") -> float:
    sustained = row.get(f"{prefix}sustained_us")
    return float(row[f"{prefix}median_us"] if sustained is None else sustained)


def _beside_others(rows: Sequence[Entry]) -> tuple[float, list[float]]:
    """Our time and each other function's for the rows of one case, all taken in one way.

    Sustained times where any row has one (a median where a row is below the limit for them); else graph replay where
    all rows have it, else medians.
    """
    if any(row.get(f"{prefix}sustained_us") is not None for row in rows for prefix in ("", "baseline_")):
        return _sustained_or_median(rows[0]), [_sustained_or_median(row, "baseline_") for row in rows]
    has_graphs = all(row.get(f"{prefix}graph_us") is not None for row in rows for prefix in ("", "baseline_"))
    name = "graph_us" if has_graphs else "median_us"
    return float(rows[0][name]), [float(row[f"baseline_{name}"]) for row in rows]


#: How many cases of an op without a baseline of the same function the headlines show.
HEADLINE_YARDSTICKS = 6
DENSE = "dense SDPA, cuDNN"
#: Parts of tree attention: they stand in ``docs/results.md``, but not among the headlines.
STAGES = frozenset({"compute_scores", "select_topk", "compute_next_parents", "accumulate_non_topk"})


def _crossovers(rows: Iterable[Entry]) -> str:
    """From which length on tree attention is faster than dense attention, one clause per stride; "" if never seen.

    Found between the last length at which dense is faster and the next, by straight lines of log time over log length.
    """
    ratios: dict[int, dict[int, float]] = {}
    for row in rows:
        found = re.fullmatch(r"T(\d+)_s(\d+)", row["case"])
        if found and row["op"] == "tree_attention" and row["baseline"] == DENSE:
            length, stride = map(int, found.groups())
            ours, theirs = _sustained_or_median(row), _sustained_or_median(row, "baseline_")
            ratios.setdefault(stride, {})[length] = math.log(ours / theirs)
    clauses = []
    for stride, by_length in sorted(ratios.items()):
        steps = sorted(by_length.items())
        crossings = [(a, b) for a, b in pairwise(steps) if a[1] > 0 >= b[1]]
        if crossings:
            (shorter, above), (longer, below) = crossings[-1]
            length = shorter * (longer / shorter) ** (above / (above - below))
            clauses.append(
                f"from about {round(length / 1000)} thousand tokens on with `selection_stride={stride}`"
            )
        elif steps[-1][1] <= 0:
            clauses.append(f"at every length measured with `selection_stride={stride}`")
    if not clauses:
        return ""
    return f"Tree attention is faster than dense attention by cuDNN {' and '.join(clauses)}."


#: Lengths of the README's table.
SUMMARY_LENGTHS = (8192, 32768, 131072, 1048576)
ONE_HEAD = re.compile(re.escape(DENSE) + r", 1 of (\d+) heads")


def render_summary(files: dict[str, list[Entry]]) -> str:
    """The README's section: tree attention beside dense attention by length and direction, and where they cross.

    The fastest time of a line is bold. The time of dense attention on one of n heads counts n times, and its cell
    says so.
    """
    rows = [row for rows in files.values() for row in rows if row["gpu"] != "none"]
    times: dict[tuple[bool, int], dict[str, tuple[float, str]]] = {}
    for row in rows:
        found = re.fullmatch(r"T(\d+)_s(\d+)", row["case"])
        one_head = ONE_HEAD.fullmatch(row["baseline"])
        if not found or not (one_head or row["baseline"] == DENSE) or int(found[1]) not in SUMMARY_LENGTHS:
            continue
        if row["op"] not in ("tree_attention", "tree_attention_backward"):
            continue
        cells = times.setdefault((row["op"].endswith("backward"), int(found[1])), {})
        cells[f"stride {found[2]}"] = (_sustained_or_median(row), "")
        heads = int(one_head[1]) if one_head else 1
        note = f" ({heads} × one head)" if one_head else ""
        cells.setdefault(DENSE, (_sustained_or_median(row, "baseline_") * heads, note))
    if not times:
        return NOTHING
    names = sorted(
        {name for cells in times.values() for name in cells} - {DENSE}, key=lambda name: int(name[7:])
    )
    names.append(DENSE)
    lines = [f"| tokens | call | {' | '.join(names)} |", "|---:|---|" + "---:|" * len(names)]
    for (is_backward, length), cells in sorted(times.items()):
        fastest = min(cells.values())
        texts = {name: f"{_time(cell[0])}{cell[1]}" for name, cell in cells.items()}
        texts = {name: f"**{text}**" if cells[name] == fastest else text for name, text in texts.items()}
        columns = (f"{length:,}".replace(",", " "), "backward" if is_backward else "forward")
        lines.append(f"| {' | '.join((*columns, *(texts.get(name, '') for name in names)))} |")
    machines = " and ".join(
        dict.fromkeys(_machine(row) for row in rows if row["op"].startswith("tree_attention"))
    )
    return "\n\n".join(filter(None, ("\n".join(lines), _crossovers(rows), f"Measured on {machines}.")))


def _yardsticks(rows: Iterable[Entry], most: int | None = None) -> str:
    """Cases that have no baseline of the same function: one line each, a column per other function; "" if none.

    Only the first ``most`` of each op where that is given.
    """
    equals = {(row["op"], row["case"], row["dtype"]) for row in _fastest_equals(rows)}
    cases: dict[tuple[str, str, str], dict[str, Entry]] = {}
    names: dict[str, None] = {}
    for row in rows:
        key = (row["op"], row["case"], row["dtype"])
        if key not in equals:
            cases.setdefault(key, {})[row["baseline"]] = row
            names.setdefault(row["baseline"])
    if not cases:
        return ""
    lines = [
        f"| op | case | dtype | htree_ops | {' | '.join(names)} |",
        "|---|---|---|---:|" + "---:|" * len(names),
    ]
    shown: Counter[str] = Counter()
    for (op, case, dtype), by_name in cases.items():
        shown[op] += 1
        if most is not None and shown[op] > most:
            continue
        ours, theirs = _beside_others(list(by_name.values()))
        times = dict(zip(by_name, map(_time, theirs), strict=True))
        cells = " | ".join(times.get(name, "") for name in names)
        lines.append(f"| `{op}` | {case} | {dtype} | {_time(ours)} | {cells} |")
    return "\n".join(lines)


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


def _machine(row: Entry) -> str:
    machine = (
        row["cpu"] if row["gpu"] == "none" else f"{row['gpu']}, CUDA {row['cuda']}, driver {row['driver']}"
    )
    return f"{machine}, torch {row['torch']}"


def _commit(row: Entry) -> str:
    commit, dirty, _ = str(row["commit"]).partition("-dirty")
    return f"commit {commit[:12]}{dirty}"


def _place(row: Entry) -> str:
    return f"{_machine(row)}, {_commit(row)}"


def _by_place(rows: Iterable[Entry]) -> dict[str, list[Entry]]:
    places: dict[str, list[Entry]] = {}
    for row in rows:
        places.setdefault(_place(row), []).append(row)
    return places


def render(files: dict[str, list[Entry]], folder: str) -> str:
    """The section of ``docs/results.md``. ``folder``: the results' place as the document names it."""
    parts = []
    for name, rows in files.items():
        for place, here in _by_place(rows).items():
            tables = []
            if shown := _shown_cases(_fastest_equals(here)):
                tables.append(f"{HEADER}\n" + "\n".join(map(_line, shown)))
            if others := _yardsticks(here):
                tables.append(others)
            parts.append(f"{place} (`{folder}/{name}`):\n\n" + "\n\n".join(tables))
    return "\n\n".join(parts) or NOTHING


def render_headlines(files: dict[str, list[Entry]], folder: str) -> str:
    """The first section of ``docs/results.md``: the first case of every op on a GPU, stages left out.

    Then the first cases of those with yardsticks only.
    """
    on_gpu = {
        name: [row for row in rows if row["gpu"] != "none" and row["op"] not in STAGES]
        for name, rows in files.items()
    }
    lines = [_line(row) for rows in on_gpu.values() for row in _first_cases(_fastest_equals(rows))]
    parts = [f"{HEADER}\n" + "\n".join(lines)] if lines else []
    parts += [others for rows in on_gpu.values() if (others := _yardsticks(rows, HEADLINE_YARDSTICKS))]
    machines: dict[str, list[str]] = {}
    for name, rows in on_gpu.items():
        for here in _by_place(rows).values():
            machines.setdefault(_machine(here[0]), []).append(f"`{folder}/{name}` ({_commit(here[0])})")
    parts += [f"Measured on {machine}: {', '.join(names)}." for machine, names in machines.items()]
    return "\n\n".join(parts) or NOTHING


def markers(name: str) -> tuple[str, str]:
    """What stands before and after a written section."""
    return f"<!-- {name} -->", f"<!-- /{name} -->"


def replace_section(document: str, section: str, name: str = "results") -> str:
    """A document's text with ``section`` between the markers of ``name``.

    Raises:
        ValueError: the markers do not occur once each, in order.
    """
    begin_mark, end_mark = markers(name)
    before, begin, rest = document.partition(begin_mark)
    _, end, after = rest.partition(end_mark)
    if not begin or not end or begin_mark in rest or end_mark in after:
        raise ValueError(f"the document must hold {begin_mark} and {end_mark} once, in this order")
    return f"{before}{begin_mark}\n{section}\n{end_mark}{after}"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 written or equal, 1 ``--check`` found a difference, 2 unusable files."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.harness.readme_table", description=__doc__)
    parser.add_argument(
        "--readme",
        type=Path,
        default=Path("README.md"),
        help="file of the short table to write (default %(default)s)",
    )
    parser.add_argument(
        "--document",
        type=Path,
        default=Path("docs/results.md"),
        help="file of all tables to write (default %(default)s)",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("benchmarks/results"),
        help="folder of JSON files (default %(default)s)",
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; status 1 where a document differs"
    )
    arguments = parser.parse_args(argv)
    try:
        files = read_rows(arguments.results)
        folder = arguments.results.as_posix()
        changed: dict[Path, str] = {}
        readme, document = arguments.readme.read_text(), arguments.document.read_text()
        new_document = replace_section(document, render_headlines(files, folder), "headlines")
        for path, old, new in (
            (arguments.readme, readme, replace_section(readme, render_summary(files))),
            (arguments.document, document, replace_section(new_document, render(files, folder))),
        ):
            if new != old:
                changed[path] = new
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    for path, text in changed.items():
        if arguments.check:
            print(f"{path} differs from {arguments.results}: run without --check", file=sys.stderr)
        else:
            path.write_text(text)
    return int(arguments.check and bool(changed))


if __name__ == "__main__":
    run_program(main)
