"""One self-contained HTML page and PNG pictures from results files: ``python -m benchmarks report``."""

from __future__ import annotations

import argparse
import base64
import html
import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import plots, results
from benchmarks.harness.progress import Progress
from benchmarks.harness.results import HEADER, WORDS, ResultsError, Row, holds_rows, read_rows, table_cells
from htree_ops.cli import Command, UsageError

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2733; max-width: 1180px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.6em; } h2 { font-size: 1.25em; margin-top: 2em; } .muted { color: #5b6770; }
img { max-width: 100%; } .scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; width: 100%; }
th, td { padding: .3em .6em; text-align: left; border-bottom: 1px solid #d9dee3; white-space: nowrap; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
"""


def read_folder(paths: Sequence[Path]) -> list[Row]:
    """Rows of the files, and of every CSV file in the folders that holds such rows.

    Raises:
        ResultsError: a path does not exist, or a file holds something else, or nothing is there.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += sorted(file for file in path.glob("*.csv") if holds_rows(file))
        else:
            files.append(path)
    rows = [row for file in files for row in read_rows(file)]
    if not rows:
        raise ResultsError(f"no results in {', '.join(map(str, paths))}")
    return rows


def _machines(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by machine: GPUs by name, then CPUs."""
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.gpu == "none"):
        found.setdefault(results.machine(row), []).append(row)
    return found


def _slug(machine: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", machine.lower()).strip("_")


def _table(rows: Sequence[Row]) -> str:
    lines = [
        "".join(_cell("td", *cell) for cell in zip(HEADER, table_cells(row), strict=True)) for row in rows
    ]
    head = "".join(_cell("th", name, name) for name in HEADER)
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'
    )


def _cell(tag: str, column: str, text: str) -> str:
    number = "" if column in WORDS else ' class="n"'
    return f"<{tag}{number}>{html.escape(text)}</{tag}>"


def _picture(path: Path, caption: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<figure><img alt="{html.escape(caption)}" src="data:image/png;base64,{data}"></figure>'


def write_report(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Writes ``report.html`` and the pictures of each machine into ``folder``; returns all paths, the page first.

    Raises:
        MissingMatplotlibError: pictures cannot be drawn.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts, pictures = [], []
    machines = _machines(rows)
    drawings = (plots.bars, plots.roofline)
    bar = Progress(len(machines) * len(drawings))
    for machine, own in machines.items():
        parts.append(f"<h2>{html.escape(machine)}</h2>\n<p class='muted'>{html.escape(plots.place(own))}</p>")
        for draw in drawings:
            bar.show(f"{draw.__name__} of {machine}")
            path = draw(own, folder / f"{draw.__name__}_{_slug(machine)}.png")
            if path:
                pictures.append(path)
                parts.append(_picture(path, f"{draw.__name__}: {machine}"))
            bar.done += 1
        parts.append(_table(own))
    bar.clear()
    note = (
        "µs are medians, graph µs those of CUDA graph replay. % copy: compulsory bytes over time "
        "against the copy bandwidth measured in the same run. % floor: the IO floor over the time; the verdict says "
        "whether memory traffic explains it (IO-bound above 80 %, balanced from 50 %, else compute-bound; "
        "inconclusive where the time is below the floor)."
    )
    page = folder / "report.html"
    page.write_text(
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>htree_ops: measured results</title>'
        f"<style>{STYLE}</style></head>\n<body><h1>htree_ops: measured results</h1>\n<p>{note}</p>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )
    return [page, *pictures]


#: The measured results of the repository.
RESULTS = Path(__file__).resolve().parents[1] / "results"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Files and flags of the command."""
    parser.add_argument(
        "results",
        nargs="*",
        type=Path,
        default=[RESULTS],
        help="CSV files of run, or folders of them; default: benchmarks/results",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/report"), metavar="FOLDER", help="folder to write"
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes the report and prints the files; status 0.

    Raises:
        UsageError: files that hold something else, no matplotlib, or a folder that cannot be written.
    """
    try:
        written = write_report(read_folder(arguments.results), arguments.out)
    except (ResultsError, plots.MissingMatplotlibError) as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from error
    print("\n".join(map(str, written)))
    return 0


COMMAND = Command(
    "report",
    "Writes one HTML page with all rows and PNG pictures from the CSV files of run. Needs matplotlib.",
    add_arguments,
    run,
    "python -m benchmarks",
)
