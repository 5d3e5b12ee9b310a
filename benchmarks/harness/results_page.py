"""The tables of docs/results.md: every committed row of an op beside the fastest baseline that computes the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from benchmarks.harness.published import (
    NOTHING,
    Entry,
    Results,
    both_times,
    commit_words,
    machine_words,
    sustained_or_median,
    time_words,
)

#: So many cases of an op and dtype ``docs/results.md`` shows, those of the lowest factor, and all that lose; the files
#: have every case.
CASES_PER_OP = 4
HEADER = (
    "| op | case | dtype | htree_ops | % of ceiling | fastest baseline | its time | factor |\n"
    "|---|---|---|---:|---:|---|---:|---:|"
)
#: How many cases of an op without a baseline of the same function the headlines show.
HEADLINE_YARDSTICKS = 6
#: Parts of tree attention: they stand in ``docs/results.md``, but not among the headlines.
STAGES = frozenset({"compute_scores", "select_topk", "compute_next_parents", "accumulate_non_topk"})


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


def _beside_others(rows: Sequence[Entry]) -> tuple[float, list[float]]:
    """Our time and each other function's for the rows of one case, all taken in one way.

    Sustained times where any row has one (a median where a row is below the limit for them); else graph replay where
    all rows have it, else medians.
    """
    if any(row.get(f"{prefix}sustained_us") is not None for row in rows for prefix in ("", "baseline_")):
        return sustained_or_median(rows[0]), [sustained_or_median(row, "baseline_") for row in rows]
    has_graphs = all(row.get(f"{prefix}graph_us") is not None for row in rows for prefix in ("", "baseline_"))
    name = "graph_us" if has_graphs else "median_us"
    return float(rows[0][name]), [float(row[f"baseline_{name}"]) for row in rows]


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
        times = dict(zip(by_name, map(time_words, theirs), strict=True))
        cells = " | ".join(times.get(name, "") for name in names)
        lines.append(f"| `{op}` | {case} | {dtype} | {time_words(ours)} | {cells} |")
    return "\n".join(lines)


def _line(row: Entry) -> str:
    ours, theirs = both_times(row)
    cells = (
        f"`{row['op']}`",
        row["case"],
        row["dtype"],
        time_words(ours),
        f"{row['percent_of_ceiling']:.0f}",
        row["baseline"],
        time_words(theirs),
        f"{row['speedup']:.2f}",
    )
    return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"


def _place(row: Entry) -> str:
    return f"{machine_words(row)}, {commit_words(row)}"


def _by_place(rows: Iterable[Entry]) -> dict[str, list[Entry]]:
    places: dict[str, list[Entry]] = {}
    for row in rows:
        places.setdefault(_place(row), []).append(row)
    return places


def render(results: Results) -> str:
    """The section of ``docs/results.md``."""
    parts = []
    for name, rows in results.files.items():
        for place, here in _by_place(rows).items():
            tables = []
            if shown := _shown_cases(_fastest_equals(here)):
                tables.append(f"{HEADER}\n" + "\n".join(map(_line, shown)))
            if others := _yardsticks(here):
                tables.append(others)
            parts.append(f"{place} (`{results.folder}/{name}`):\n\n" + "\n\n".join(tables))
    return "\n\n".join(parts) or NOTHING


def render_headlines(results: Results) -> str:
    """The first section of ``docs/results.md``: the first case of every op on a GPU, stages left out.

    Then the first cases of those with yardsticks only.
    """
    on_gpu = {
        name: [row for row in rows if row["gpu"] != "none" and row["op"] not in STAGES]
        for name, rows in results.files.items()
    }
    lines = [_line(row) for rows in on_gpu.values() for row in _first_cases(_fastest_equals(rows))]
    parts = [f"{HEADER}\n" + "\n".join(lines)] if lines else []
    parts += [others for rows in on_gpu.values() if (others := _yardsticks(rows, HEADLINE_YARDSTICKS))]
    machines: dict[str, list[str]] = {}
    for name, rows in on_gpu.items():
        for here in _by_place(rows).values():
            machines.setdefault(machine_words(here[0]), []).append(
                f"`{results.folder}/{name}` ({commit_words(here[0])})"
            )
    parts += [f"Measured on {machine}: {', '.join(names)}." for machine, names in machines.items()]
    return "\n\n".join(parts) or NOTHING
