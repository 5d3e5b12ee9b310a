"""Draws the documents' pictures of what was measured on one GPU from the rows under benchmarks/results.

Run: ``python docs/images/draw_results.py [--out FOLDER]`` (needs matplotlib).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.harness import plots, readme_table
from benchmarks.harness.report import read_folder

ROOT = Path(__file__).resolve().parents[2]
GPU = "NVIDIA H200"


def settings(results: readme_table.Results, path: Path, theme: str) -> Path:
    """The forward times of the README's table as multiples of dense attention's: below the line they are faster."""
    plt, colours = plots.load_matplotlib(theme), plots.THEMES[theme]
    figure, axes = plt.subplots(figsize=(8.8, 5.0))
    times = readme_table.recommended_times(results, "forward")
    short: dict[int, list[float]] = {}
    for line in results.tables["short_texts_h200"]:
        if line["what"] == "forward":
            short.setdefault(int(line["T"]), []).append(float(line["ratio"]))
    lengths = sorted(short)
    bounds = [[pick(short[length]) for length in lengths] for pick in (min, max)]
    words = f"every setting, up to {readme_table.DENSE_TO} tokens (range over batches)"
    axes.fill_between(lengths, *bounds, color=colours.muted, alpha=0.5, linewidth=0, label=words)
    for place, (*_, title) in enumerate(readme_table.RECOMMENDED):
        dense = readme_table.DENSE
        found = {n: t[title][0] / t[dense][0] for n, t in sorted(times.items()) if title in t and dense in t}
        axes.plot(
            list(found),
            list(found.values()),
            color=colours.curves[place],
            marker=plots.MARKERS[place],
            markersize=11 if len(found) == 1 else 7,
            linewidth=2.2,
            linestyle="none" if len(found) == 1 else "-",
            label=title + (f" (measured at {next(iter(found))} tokens alone)" if len(found) == 1 else ""),
        )
    axes.axhline(1, color=colours.ink, linewidth=1.4, linestyle="--", label=readme_table.DENSE)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    ticks = [2**power for power in range(8, 21)]
    axes.set_xticks(ticks, [str(n) if n < 1024 else f"{n // 1024}k" for n in ticks])
    marks = [2.0**power for power in range(-5, 3)]
    axes.set_yticks(marks, [f"{mark:g}" if mark >= 1 else f"1/{1 / mark:g}" for mark in marks])
    axes.set_ylim(1 / 64, 4)
    axes.set_xlabel("sequence length in tokens (1k = 1024)")
    axes.set_ylabel("time of a forward, of dense attention's")
    axes.legend(loc="lower left", fontsize=9.5, markerscale=0.7)
    title = "Forward beside dense causal attention: below the line it is faster"
    rows: Any = [
        SimpleNamespace(**line)
        for line in results.tables["tree_index_h200"]
        if (line["H"], line["top_k"]) == ("32", "128")
    ]
    return plots.finish(plt, figure, axes, rows, title, path)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent, help="folder (default: beside the script)"
    )
    out = parser.parse_args(argv).out
    out.mkdir(parents=True, exist_ok=True)
    rows = [row for row in read_folder([ROOT / "benchmarks" / "results"]) if row.gpu == GPU]
    results = readme_table.read_results(ROOT / "benchmarks" / "results")
    for theme in plots.THEMES:
        settings(results, out / f"settings_h200_{theme}.png", theme)
    plots.bars(rows, out / "bars_h200.png")
    plots.roofline(rows, out / "roofline_h200.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
