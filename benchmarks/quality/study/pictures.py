"""Pictures of the study: copies over steps, copies by stride, losses by position, needles by depth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import plots

from .record import Row
from .tables import by_model, by_run, converted, digest, label, last_rows, needle_rows, run_of, with_dense

__all__ = ["PICTURES", "draw"]

Curve = tuple[str, Sequence[float], Sequence[float]]


def lines(
    path: Path,
    theme: str,
    rows: Sequence[Row],
    curves: Sequence[Curve],
    names: tuple[str, str],
    title: str,
    log: bool,
) -> None:
    """Curves (name, x, y) over a common axis; ``names`` are those of both axes."""
    plt = plots.load_matplotlib(theme)
    figure, axes = plt.subplots(figsize=(9.2, 5.0))
    colours = plots.THEMES[theme].curves
    for index, (name, xs, ys) in enumerate(curves):
        axes.plot(
            xs,
            ys,
            label=name,
            color=colours[index % len(colours)],
            marker=plots.MARKERS[index % len(plots.MARKERS)],
            linestyle="-" if index < len(colours) else "--",
            markersize=5,
        )
    if log:
        axes.set_xscale("log", base=2)
        ticks = sorted({x for _, xs, _ in curves for x in xs})
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axes.set_xlabel(names[0])
    axes.set_ylabel(names[1])
    if "%" in names[1]:
        axes.set_ylim(-2, 102)
    axes.legend(fontsize=9, loc="center left", bbox_to_anchor=(1.01, 0.5))
    plots.finish(plt, figure, axes, rows, title, path)


def copies_over_steps(rows: Sequence[Row], path: Path, theme: str) -> bool:
    """(b) The models of the text and kind that most were trained for."""
    rows = with_dense(rows)
    finished = {run_of(row) for row in last_rows(rows, "scratch")}
    used = [
        row
        for row in rows
        if row.piece == "scratch" and run_of(row) in finished and row.copies_found is not None
    ]
    used = max(by_model(used), key=lambda mine: len({run_of(row) for row in mine}), default=[])
    curves = []
    for mine in by_run(used):
        name = label(mine[0])
        if len({row.seed for row in used}) > 1:
            name += f", seed {mine[0].seed}"
        curves.append((name, [row.step for row in mine], [100 * (row.copies_found or 0.0) for row in mine]))
    if curves:
        names = ("steps of training", "repeated letters found, %")
        lines(path, theme, used, curves, names, "Copies learned from scratch, by the score of a node", False)
    return bool(curves)


def copies_by_stride(rows: Sequence[Row], path: Path, theme: str) -> bool:
    """(a)"""
    used = next(iter(converted(rows, "conversion")), [])
    budget = next((row.window for row in used if row.kind == "window"), 0)
    trees = [row for row in used if row.kind == "tree" and row.top_k * row.compression_rate == budget]
    curves: list[Curve] = []
    for positions in ("own", "compact"):
        for span in dict.fromkeys(row.span for row in trees):
            mine = [row for row in trees if (row.span, row.positions) == (span, positions)]
            if len(mine) > 1:
                name = ("mean" if span is None else f"span {span}") + (
                    "" if positions == "own" else ", compact"
                )
                curves.append(
                    (name, [row.stride for row in mine], [100 * (row.copies_found or 0) for row in mine])
                )
    if curves:
        strides = sorted({row.stride for row in trees})
        for row in used:
            if row.kind != "tree":
                curves.append((label(row), strides, [100 * (row.copies_found or 0)] * len(strides)))
        names = ("selection_stride", "repeated letters found, %")
        lines(path, theme, used, curves, names, "A dense model evaluated with the tree", True)
    return bool(curves)


def loss_by_position(rows: Sequence[Row], path: Path, theme: str) -> bool:
    """(d)"""
    used = [row for row in last_rows(rows, "long-128k") if row.series]
    curves: list[Curve] = []
    for row in used:
        series = row.series or []
        width = row.context / len(series) / 1024
        points = [((i + 0.5) * width, value) for i, value in enumerate(series) if value is not None]
        name = label(row) + (f", text {digest(row)}" if len(by_model(used)) > 1 else "")
        curves.append((name, [x for x, _ in points], [y for _, y in points]))
    if curves:
        names = ("position in the text, 1024 bytes", "bits per byte")
        lines(path, theme, used, curves, names, "Loss by position after equal time on the clock", False)
    return bool(curves)


def needles(rows: Sequence[Row], path: Path, theme: str) -> bool:
    """(e) A grid per attention: depth by length."""
    used = needle_rows(rows)
    runs = by_run(used)
    if not used:
        return False
    plt = plots.load_matplotlib(theme)
    figure, every = plt.subplots(1, len(runs), figsize=(3.4 * len(runs) + 2, 4.2), squeeze=False, sharey=True)
    for axes, run in zip(every[0], runs, strict=True):
        mine = sorted(run, key=lambda row: row.context)
        grid = list(zip(*(row.series or [] for row in mine), strict=True))  # depth by length
        picture: Any = axes.imshow(
            [[100 * (x or 0.0) for x in line] for line in grid], vmin=0, vmax=100, aspect="auto"
        )
        axes.set_xticks(range(len(mine)), [f"{row.context // 1024}k" for row in mine], rotation=45)
        axes.set_yticks(range(len(grid)), [f"{100 * i // len(grid)} %" for i in range(len(grid))])
        axes.grid(visible=False)
        axes.set_xlabel(label(mine[0]))
    every[0][0].set_ylabel("depth in the text")
    figure.colorbar(picture, ax=every[0].tolist(), label="letters found, %")
    plots.finish(plt, figure, every[0][0], used, "Needles by depth and length", path)
    return True


#: By the name of the file, without theme and ending.
PICTURES = {
    "quality_conversion": copies_by_stride,
    "quality_scratch": copies_over_steps,
    "quality_position": loss_by_position,
    "quality_needle": needles,
}


def draw(rows: Sequence[Row], folder: Path) -> list[str]:
    """Draws what there are rows for, for light and for dark pages; the names without theme and ending."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, picture in PICTURES.items():
        if all(picture(rows, folder / f"{name}_{theme}.png", theme) for theme in plots.THEMES):
            drawn.append(name)
    return drawn
