"""The pictures of the report, drawn with matplotlib from result rows; each says GPU, torch and commit.

What is drawn as one, a bar or a point, comes from one run of the benchmarks.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.harness.results import Environment, Row, time_us


@dataclass(frozen=True)
class Theme:
    """Colours of a picture. Those of curves differ in brightness as well, for readers who see fewer hues."""

    page: str
    ink: str
    muted: str
    grid: str
    curves: tuple[str, ...]


THEMES = {
    "light": Theme(
        page="#ffffff",
        ink="#1c2733",
        muted="#5b6770",
        grid="#d9dee3",
        curves=("#0b5fa5", "#e07b00", "#2a9d5c", "#b5179e", "#6c757d", "#c1121f", "#3a0ca3", "#8d6e00"),
    ),
    "dark": Theme(
        page="#0d1117",
        ink="#e6edf3",
        muted="#9aa6b2",
        grid="#262d36",
        curves=("#4aa8ff", "#ffa940", "#4fd18b", "#f078d8", "#aab4be", "#ff7b72", "#b39bff", "#d9b300"),
    ),
}
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
INK, COLOURS = THEMES["light"].ink, THEMES["light"].curves
#: The most bars in one picture. Cases in which the baseline is faster stand on top.
MAX_BARS = 36


class MissingMatplotlibError(RuntimeError):
    """matplotlib is not installed; it is needed for pictures alone."""


def load_matplotlib(theme: str = "light") -> Any:
    """matplotlib.pyplot without a display, in the colours of a key of ``THEMES``.

    Raises:
        MissingMatplotlibError: it is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise MissingMatplotlibError(
            "the report draws with matplotlib, which is not installed: pip install matplotlib"
        ) from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = THEMES[theme]
    plt.rcParams.update(
        {
            "font.size": 11,
            "axes.facecolor": colours.page,
            "axes.edgecolor": colours.muted,
            "axes.labelcolor": colours.ink,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": colours.grid,
            "grid.linewidth": 0.7,
            "text.color": colours.ink,
            "xtick.color": colours.ink,
            "ytick.color": colours.ink,
            "legend.frameon": False,
            "figure.facecolor": colours.page,
            "savefig.dpi": 100,
        }
    )
    return plt


def _machine(row: Any) -> str:
    return re.sub(r"\((R|TM)\)", "", row.cpu) if row.gpu == "none" else row.gpu


def short_commit(row: Any) -> str:
    """The first seven letters of the commit, and whether files were changed."""
    return re.sub(r"^(\w{7})\w*", r"\1", row.commit)


def place(rows: Sequence[Any]) -> str:
    """Machines, versions of torch and commits of rows, which have ``gpu``, ``cpu``, ``torch`` and ``commit``."""
    machines = dict.fromkeys(map(_machine, rows))
    versions = dict.fromkeys(r.torch for r in rows)
    commits = sorted(set(map(short_commit, rows)))
    where, made_by = " and ".join(machines), " and ".join(versions)
    return f"{where} · torch {made_by} · commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}"


#: What the rows of one run of the benchmarks have in common, the bandwidth that it measured among them.
RUN = [field.name for field in fields(Environment)]


def by_run(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each run."""
    runs: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        runs.setdefault(tuple(getattr(row, name) for name in RUN), []).append(row)
    return list(runs.values())


def finish(plt: Any, figure: Any, axes: Any, rows: Sequence[Any], title: str, path: Path) -> Path:
    """Gives a picture its title and the place of its rows, and saves it."""
    below = textwrap.wrap(place(rows), width=100)
    axes.set_title(title, loc="left", fontsize=12.5, fontweight="bold", pad=12 + 12 * len(below))
    where = {"xy": (0, 1), "xycoords": "axes fraction", "xytext": (0, 7), "textcoords": "offset points"}
    colour = plt.rcParams["axes.edgecolor"]
    axes.annotate("\n".join(below), **where, fontsize=9, color=colour, va="bottom")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, bbox_inches="tight", facecolor=plt.rcParams["figure.facecolor"])
    plt.close(figure)
    _reduce_colours(path)
    return path


def _reduce_colours(path: Path) -> None:
    """Reduces a picture of lines and letters to a palette, a third of the size; the octree keeps rare colours."""
    from PIL import Image  # matplotlib depends on it

    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    small.save(path, optimize=True)


#: Ops whose baselines show what the matrix units reach in a dtype, on a GPU.
MATRIX_OPS = {"fp8_gemm": "FP8 products of torch", "gated_mlp": "bf16 products of torch"}


def _matrix_speeds(rows: Sequence[Row]) -> dict[str, float]:
    """TFLOP/s of the fastest baseline among the matrix ops, by what they show; empty for a CPU."""
    found = dict.fromkeys(MATRIX_OPS.values(), 0.0)
    for row in rows:
        name = MATRIX_OPS.get(row.op)
        if name and row.gpu != "none" and row.dtype == "bfloat16" and row.baseline_computes_the_same:
            speed = row.flops / row.baseline_median_us / 1e6
            found[name] = max(found[name], speed)
    return {name: speed for name, speed in found.items() if speed}


def roofline(rows: Sequence[Row], path: Path) -> Path | None:
    """Scatter of every case: TFLOP/s against FLOP per compulsory byte, under what copies and matrix products reach."""
    cases: list[Row] = []
    for run in by_run([row for row in rows if row.flops > 0 and row.bytes > 0 and row.tflops > 0]):
        cases += {(row.op, row.case, row.shapes, row.dtype): row for row in run}.values()
    if not cases:
        return None
    plt = load_matplotlib()
    ops = sorted({row.op for row in cases})
    figure, axes = plt.subplots(figsize=(9.2, max(5.6, 1.2 + 0.22 * len(ops))))  # the legend stands beside it
    for index, op in enumerate(ops):
        own = [row for row in cases if row.op == op]
        axes.scatter(
            [row.flops / row.bytes for row in own],
            [row.tflops for row in own],
            s=46,
            marker=MARKERS[(index + index // len(COLOURS)) % len(MARKERS)],  # each pair once
            color=COLOURS[index % len(COLOURS)],
            edgecolor="white",
            linewidth=0.6,
            label=op,
            zorder=3,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    intensities = [row.flops / row.bytes for row in cases]
    speeds = [row.tflops for row in cases]
    ceiling = max(row.ceiling_gb_per_s for row in cases)
    # The bandwidth line ends where the picture needs it, not at the end of a wide axis.
    left, right = min(intensities) / 3, max(max(intensities) * 3, min(intensities) * 30)
    top = max(speeds) * 5
    knee = min(right, top * 1e3 / ceiling)
    unit = f"{ceiling / 1e3:.2f} TB/s" if ceiling >= 1000 else f"{ceiling:.1f} GB/s"
    lines = [("-", f"copy, {unit}", (left, knee), (left * ceiling / 1e3, knee * ceiling / 1e3))]
    for style, (name, speed) in zip(("--", ":"), _matrix_speeds(rows).items(), strict=False):
        lines.append((style, f"{name}, {speed:.0f} TFLOP/s", (speed * 1e3 / ceiling, right), (speed, speed)))
    for style, name, xs, ys in lines:
        axes.plot(xs, ys, color=INK, linewidth=1.5, linestyle=style, label=name, zorder=2)
    axes.set_xlim(left, right)
    axes.set_ylim(min(speeds) / 3, top)
    axes.set_xlabel("arithmetic intensity, FLOP per compulsory byte")
    axes.set_ylabel("speed, TFLOP/s")
    axes.legend(
        loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=9.5, handletextpad=0.3, borderaxespad=0
    )
    return finish(plt, figure, axes, cases, "Roofline of every measured case", path)


def bars(rows: Sequence[Row], path: Path) -> Path | None:
    """Speed-up of htree_ops over the fastest baseline that computes the same, case by case.

    A bar is one row, so that both its times are of one run; of several rows of a case that of the lowest speed-up.
    """
    best: dict[tuple[str, ...], Row] = {}
    for row in rows:
        if not row.baseline_computes_the_same:
            continue
        key = (_machine(row), row.op, row.case, row.shapes, row.dtype)
        if key not in best or row.speedup < best[key].speedup:
            best[key] = row
    if not best:
        return None
    chosen = list(best.values())
    note = ""
    if len(chosen) > MAX_BARS:  # the slowest cases, as many of each op, and every case that loses
        ops = sorted({row.op for row in chosen})
        each = max(1, MAX_BARS // len(ops))
        slowest = [sorted((r for r in chosen if r.op == op), key=lambda r: -time_us(r))[:each] for op in ops]
        kept = [row for group in slowest for row in group]
        chosen = kept + [row for row in chosen if row.speedup < 1 and row not in kept]
        slow = "slowest case" if each == 1 else f"{each} slowest cases"
        note = f"\nshown: the {slow} of each op, and every case below 1"
    chosen.sort(key=lambda row: (row.op, -row.speedup))
    plt = load_matplotlib()
    figure, axes = plt.subplots(figsize=(9.2, 1.6 + 0.34 * len(chosen)))
    ops = sorted({row.op for row in chosen})
    where = range(len(chosen))
    colours = [COLOURS[ops.index(row.op) % len(COLOURS)] for row in chosen]
    axes.barh(where, [row.speedup - 1 for row in chosen], left=1, color=colours, height=0.68, zorder=2)
    names = [f"{row.op}  {row.case}  {row.dtype}" for row in chosen]
    machines, commits = ({fact(row) for row in chosen} for fact in (_machine, short_commit))
    if len(machines) > 1:
        names = [f"{name}  {_machine(row)}" for name, row in zip(names, chosen, strict=True)]
    axes.set_yticks(where, names, fontsize=9)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set_xscale("log")
    widest = max(row.speedup for row in chosen)
    axes.set_xlim(min(0.8, min(row.speedup for row in chosen) / 1.2), widest * 4.5)
    axes.xaxis.set_major_locator(plt.LogLocator(subs=(1, 2, 5)))
    axes.axvline(1, color=INK, linewidth=1.2, zorder=3)
    for at, row in zip(where, chosen, strict=True):
        axes.text(
            max(row.speedup, 1) * 1.05,
            at,
            f"{row.speedup:.2f}×  vs {row.baseline}" + (f", {short_commit(row)}" if len(commits) > 1 else ""),
            va="center",
            fontsize=9,
            color=INK,
            zorder=4,
        )
    axes.xaxis.set_major_formatter(plt.FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.xaxis.set_minor_formatter(plt.NullFormatter())
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"time of the fastest baseline / time of htree_ops (above 1: htree_ops is faster){note}")
    return finish(
        plt, figure, axes, chosen, "Speed-up over the fastest baseline that computes the same", path
    )
