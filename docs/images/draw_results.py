"""Draws the documents' pictures of what was measured on one GPU from the rows under benchmarks/results.

Run: ``python docs/images/draw_results.py [--out FOLDER]`` (needs matplotlib).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import plots
from benchmarks.harness.readme_table import DENSE
from benchmarks.harness.report import read_folder

ROOT = Path(__file__).resolve().parents[2]
GPU = "NVIDIA H200"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent, help="folder (default: beside the script)"
    )
    out = parser.parse_args(argv).out
    out.mkdir(parents=True, exist_ok=True)
    rows = [row for row in read_folder([ROOT / "benchmarks" / "results"]) if row.gpu == GPU]
    for theme in plots.THEMES:
        plots.lengths(rows, out / f"lengths_h200_{theme}.png", theme=theme, baseline=DENSE)
    plots.bars(rows, out / "bars_h200.png")
    plots.roofline(rows, out / "roofline_h200.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
