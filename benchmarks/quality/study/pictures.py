"""Pictures of the study: copies over steps, copies by stride, losses by position, needles by depth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import plots

from .record import Row
from .tables import by_model, by_run, converted, digest, label, last_rows, needle_rows, run_of, with_dense

Curve = tuple[str, Sequence[float], Sequence[float]]
#: The curves of one model, and the rows from which they come.
Panel = tuple[Sequence[Row], Sequence[Curve]]


def model_of(row: Row) -> str:
    """What a panel stands for, in words."""
    return f"model: {row.layers} layers, seen {row.seen}, {row.trained_context} bytes of text {digest(row)}"


def name_of(row: Row, rows: Sequence[Row]) -> str:
    """A line of a picture of ``rows``: the attention, and the seed and the commit where they differ."""
    name = label(row)
    if len({row.seed for row in rows}) > 1:
        name += f", seed {row.seed}"
    if len({row.commit for row in rows}) > 1:
        name += f", {plots.short_commit(row)}"
    return name


def lines(
    path: Path, theme: str, panels: Sequence[Panel], names: tuple[str, str], title: str, log: bool
) -> None:
    """Curves over a common axis, a panel for each model; a name has one colour in all of them.

    ``names`` are those of the axes. The legend stands beside one panel, else in the free place of a grid.
    """
    plt = plots.load_matplotlib(theme)
    columns = 1 if len(panels) == 1 else 2
    height = -(-(len(panels) + columns - 1) // columns)
    size = (9.2, 5.0) if columns == 1 else (13.0, 4.9 * height)
    figure, grid = plt.subplots(height, columns, figsize=size, squeeze=False, sharey=True)
    figure.subplots_adjust(wspace=0.06, hspace=0.3)
    places = list(grid.flat)
    colours = plots.THEMES[theme].curves
    order = list(dict.fromkeys(name for _, curves in panels for name, _, _ in curves))
    shown: dict[str, Any] = {}
    for axes, (rows, curves) in zip(places, panels, strict=False):
        for name, xs, ys in curves:
            index = order.index(name)
            (shown[name],) = axes.plot(
                xs,
                ys,
                label=name,
                color=colours[index % len(colours)],
                marker=plots.MARKERS[index % len(plots.MARKERS)],
                linestyle=("-", "--", ":")[index // len(colours) % 3],
                markersize=5,
            )
        if log:
            axes.set_xscale("log", base=2)
            ticks = sorted({x for _, xs, _ in curves for x in xs})
            axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        commits = sorted({plots.short_commit(row) for row in rows})
        below = [names[0], model_of(rows[0]), f"commit {commits[0]}" if len(commits) == 1 else ""]
        axes.set_xlabel("\n".join(filter(None, below)))
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    for line in grid:
        line[0].set_ylabel(names[1])
    if "%" in names[1]:
        places[0].set_ylim(-2, 102)
    for axes in places[len(panels) :]:
        axes.set_axis_off()
    handles = [shown[name] for name in order]
    if columns == 1:
        places[0].legend(handles, order, fontsize=9, loc="center left", bbox_to_anchor=(1.01, 0.5))
    else:
        places[-1].legend(handles, order, fontsize=9, loc="center left", bbox_to_anchor=(0.02, 0.5))
    every = [row for rows, _ in panels for row in rows]
    plots.finish(plt, figure, places[0], every, title, path)


def copies_over_steps(rows: Sequence[Row], path: Path, theme: str) -> bool:
    """(b)"""
    rows = with_dense(rows)
    finished = {run_of(row) for row in last_rows(rows, "scratch")}
    used = [
        row
        for row in rows
        if row.piece == "scratch" and run_of(row) in finished and row.copies_found is not None
    ]
    panels: list[Panel] = []
    for mine in sorted(by_model(used), key=lambda mine: -len({run_of(row) for row in mine})):
        curves: list[Curve] = [
            (
                name_of(run[0], used),
                [row.step for row in run],
                [100 * (row.copies_found or 0.0) for row in run],
            )
            for run in by_run(mine)
        ]
        panels.append((mine, curves))
    if panels:
        names = ("steps of training", "repeated letters found, %")
        lines(path, theme, panels, names, "Copies learned from scratch, by the score of a node", False)
    return bool(panels)


def copies_by_stride(rows: Sequence[Row], path: Path, theme: str) -> bool:
    """(a)"""
    panels: list[Panel] = []
    for used in converted(rows, "conversion"):
        budget = next((row.window for row in used if row.kind == "window"), 0)
        trees = [row for row in used if row.kind == "tree" and row.top_k * row.compression_rate == budget]
        by_name: dict[str, list[Row]] = {}
        for row in sorted(trees, key=lambda row: row.positions == "compact"):
            name = name_of(row, trees).replace(f", s={row.stride}", "").removeprefix("tree, ")
            by_name.setdefault(name, []).append(row)
        curves: list[Curve] = [
            (name, [row.stride for row in mine], [100 * (row.copies_found or 0) for row in mine])
            for name, mine in by_name.items()
            if len(mine) > 1
        ]
        strides = sorted({row.stride for row in trees})
        for row in used:
            if row.kind != "tree" and curves:
                curves.append((name_of(row, used), strides, [100 * (row.copies_found or 0)] * len(strides)))
        if curves:
            panels.append((used, curves))
    if panels:
        names = ("selection_stride", "repeated letters found, %")
        lines(path, theme, panels, names, "Dense models evaluated with the tree", True)
    return bool(panels)


def loss_by_position(rows: Sequence[Row], path: Path, theme: str) -> bool:
    """(d)"""
    panels: list[Panel] = []
    used = [row for row in last_rows(rows, "long-128k") if row.series]
    for mine in by_model(used):
        curves: list[Curve] = []
        for row in mine:
            series = row.series or []
            width = row.context / len(series) / 1024
            points = [((i + 0.5) * width, value) for i, value in enumerate(series) if value is not None]
            curves.append((name_of(row, used), [x for x, _ in points], [y for _, y in points]))
        panels.append((mine, curves))
    if panels:
        names = ("position in the text, 1024 bytes", "bits per byte")
        lines(path, theme, panels, names, "Loss by position after equal time on the clock", False)
    return bool(panels)


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
        facts = [label(mine[0]).replace(", s=", ",\ns=")]
        facts += [f"commit {plots.short_commit(mine[0])}"] if len({row.commit for row in used}) > 1 else []
        facts += [f"seen {mine[0].seen}, text {digest(mine[0])}"] if len(by_model(used)) > 1 else []
        axes.set_xlabel("\n".join(facts))
    every[0][0].set_ylabel("depth in the text")
    figure.colorbar(picture, ax=every[0].tolist(), label="letters found, %")
    title = "Needles by depth and length"
    title += f"\n{model_of(used[0])}" if len(by_model(used)) == 1 else ""
    plots.finish(plt, figure, every[0][0], used, title, path)
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
