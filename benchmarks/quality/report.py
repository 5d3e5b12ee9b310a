"""Tables and pictures of what ``benchmarks/quality/run.py`` measured.

Run: ``python -m benchmarks.quality.report DIR...`` prints the tables of the rows in the folders. With ``--publish`` the
rows go to benchmarks/results/quality, in place of earlier ones of the same runs, the pictures to docs/images and the
tables into docs/quality.md. ``--publish`` without a folder writes pictures and tables again.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.readme_table import replace_section
from benchmarks.quality.study import pictures, record, tables
from htree_ops.cli import OneLineParser

ROOT = Path(__file__).resolve().parents[2]
LISTS = "lists.npz"  # of an index
SHOWN = {
    "conversion": "quality_conversion",
    "scratch": "quality_scratch",
    "long-128k": "quality_position",
    "needle": "quality_needle",
}


def merge(earlier: Sequence[record.Row], later: Sequence[record.Row]) -> list[record.Row]:
    """All rows of finished or failed runs; a finished run takes the place of an earlier one of its name.

    Rows of a run that was not finished are left out. Where a run was interrupted and measured something again when it
    went on, the last row counts.
    """
    rows: list[record.Row] = []
    for some in (earlier, later):
        done = {key_of(row) for row in some if row.status == record.DONE}
        failed = {key_of(row) for row in some if row.status == "error"} - done
        rows = [row for row in rows if key_of(row) not in done]
        known = {key_of(row) for row in rows}
        rows += [row for row in some if key_of(row) in done and row.status not in ("error", "partial")]
        rows += [row for row in some if key_of(row) in failed - known and row.status == "error"]
    last = {(*key_of(row), row.step, row.pairs, row.context, row.status): row for row in rows}
    return list(last.values())


def key_of(row: record.Row) -> tuple[str, str, str, str, int]:
    """What makes two rows rows of the same run."""
    return row.piece, row.run, row.scale, row.text, row.seen


def section(name: str, table: str) -> str:
    """What stands in the page: the picture, if the section has one, and the table; or that there is none."""
    picture = SHOWN.get(name)
    if not table:
        return "This has not been run."
    if picture is None:
        return table
    return (
        f'<picture>\n  <source media="(prefers-color-scheme: dark)" srcset="images/{picture}_dark.png">\n'
        f'  <img src="images/{picture}_light.png" alt="{name}: the table below as a picture">\n</picture>\n\n{table}'
    )


def page_with(page: str, rows: Sequence[record.Row]) -> str:
    """docs/quality.md with the tables of the rows of full scale."""
    for name, table in tables.render([row for row in rows if row.scale == "full"]).items():
        page = replace_section(page, section(name, table), name)
    return page


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = OneLineParser(prog="report.py", description="tables and pictures of benchmarks/quality/run.py")
    parser.add_argument("folders", nargs="*", type=Path, metavar="DIR", help="folders that run.py wrote to")
    parser.add_argument("--publish", action="store_true", help="write results, pictures and the page")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="draw the pictures of the rows there")
    parser.add_argument("--root", type=Path, default=ROOT, metavar="DIR", help="checkout to publish in")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 where there are no rows or nothing to publish in."""
    arguments = make_parser().parse_args(argv)
    results = arguments.root / "benchmarks" / "results" / "quality"
    page = arguments.root / "docs" / "quality.md"
    if arguments.publish and not page.is_file():
        print(f"report.py: --root must be a checkout, with {page}", file=sys.stderr)
        return 2
    try:
        measured = [row for folder in arguments.folders for row in record.read_rows(folder)]
        rows = merge(record.read_rows(results) if arguments.publish else [], measured)
    except ValueError as error:
        print(f"report.py: {error}", file=sys.stderr)
        return 2
    if not rows:
        print("report.py: no rows of finished runs", file=sys.stderr)
        return 2
    for scale in dict.fromkeys(row.scale for row in rows):
        of_scale = "" if scale == "full" else f", {scale}"
        for name, table in tables.render([row for row in rows if row.scale == scale]).items():
            if table:
                print(f"## {name}{of_scale}\n\n{table}\n")
    for row in rows:
        if row.status == "error":
            print(f"failed: {row.piece}: {row.run}: {row.note}")
    if arguments.pictures:
        pictures.draw(rows, arguments.pictures)
    if arguments.publish:
        results.mkdir(parents=True, exist_ok=True)
        record.write_rows(results, rows)
        for folder in arguments.folders:
            if (folder / LISTS).is_file():
                shutil.copy(folder / LISTS, results / LISTS)
        full = [row for row in rows if row.scale == "full"]
        pictures.draw(full, arguments.root / "docs" / "images")
        page.write_text(page_with(page.read_text(), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
