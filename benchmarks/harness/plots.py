"""The pictures of the report, drawn with matplotlib from result rows; each says GPU, torch and commit.

What is drawn as one, a line, a bar or a point, comes from one run of the benchmarks.
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


def by_run(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each run, by what tells it from the other runs: machine, versions or commit, else its number."""
    runs: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        runs.setdefault(tuple(getattr(row, name) for name in RUN), []).append(row)
    facts = [
        (_machine(r), f"torch {r.torch}", f"CUDA {r.cuda}", f"driver {r.driver}", f"commit {short_commit(r)}")
        for r in (some[0] for some in runs.values())
    ]
    shared = set.intersection(*map(set, facts)) if facts else set()
    names = [", ".join(fact for fact in own if fact not in shared) for own in facts]
    if len(set(names)) < len(names):
        names = [", ".join(filter(None, (name, f"run {number}"))) for number, name in enumerate(names, 1)]
    return dict(zip(names, runs.values(), strict=True))


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
    for run in by_run([row for row in rows if row.flops > 0 and row.bytes > 0 and row.tflops > 0]).values():
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


def _one_family(rows: Sequence[Row]) -> list[Row]:
    """The rows of tree attention that differ in length, stride and run alone: the family with the most lengths.

    Other widths, heads, dtypes and inputs (all but ``T<n>`` and ``_s<n>`` of a case's name) are other families. Runs
    of one length are left out: they are points, not curves.
    """
    families: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row.op == "tree_attention" and re.search(r"\bT=\d+", row.shapes):
            sizes = re.sub(r"\b(T|T_q|s)=\d+ ?", "", row.shapes).strip()
            inputs = re.sub(r"T\d+|_s\d+", "", row.case)
            families.setdefault((sizes, inputs, row.dtype), []).append(row)
    curves = {
        key: [run for run in by_run(family).values() if _lengths(run) > 1] for key, family in families.items()
    }
    most = max((_lengths(run) for runs in curves.values() for run in runs), default=0)
    longest = [key for key, runs in curves.items() if any(_lengths(run) == most for run in runs)]
    return (
        [row for run in curves[min(longest, key=lambda key: (len(key[1]), key))] for row in run]
        if most
        else []
    )


def _lengths(rows: Sequence[Row]) -> int:
    return len({_length(row) for row in rows})


def _length(row: Row) -> int:
    found = re.search(r"\bT=(\d+)", row.shapes)
    return int(found.group(1)) if found else 0


def _tokens(count: int) -> str:
    if count % 1024:
        return str(count)
    return f"{count >> 20}M" if count % (1 << 20) == 0 else f"{count >> 10}k"


def _milliseconds(value: float) -> str:
    return f"{value:g} ms" if value < 1000 else f"{value / 1000:g} s"


#: The name of the curve of a baseline whose time on one head was multiplied by the number of heads.
ONE_HEAD = "computed from one head"


def _curves(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """Milliseconds by length of each curve; under load where that was taken, because that is what a user sees.

    Each run has curves of its own. A baseline that a run timed beside several strides counts with its best time. The
    time of a baseline that ran on 1 of n heads counts n times, as a curve of its own that says so: no point of the
    picture stands for a part of the work.
    """
    curves: dict[str, dict[int, float]] = {}
    for run, own in by_run(rows).items():
        suffix = f", {run}" if run else ""
        for row in own:
            stride = re.search(r"\bs=(\d+)", row.shapes)
            length = _length(row)
            name = f"htree_ops, stride {stride.group(1) if stride else '1'}{suffix}"
            curves.setdefault(name, {})[length] = (row.sustained_us or time_us(row)) / 1e3
            theirs = (row.baseline_sustained_us or row.baseline_median_us) / 1e3
            name = f"{row.baseline}{suffix}"
            if one_head := re.fullmatch(r"(.*), 1 of (\d+) heads", row.baseline):
                name, theirs = (
                    f"{one_head.group(1)}{suffix}, {ONE_HEAD}",
                    theirs * int(one_head.group(2)),
                )
            curve = curves.setdefault(name, {})
            curve[length] = min(curve.get(length, float("inf")), theirs)
    return curves


def lengths(
    rows: Sequence[Row], path: Path, *, theme: str = "light", baseline: str | None = None
) -> Path | None:
    """Time of tree attention against T beside the dense baselines of the same run; forward only.

    Args:
        theme: a key of ``THEMES``.
        baseline: draw only baselines whose names begin with this.
    """
    used = [row for row in _one_family(rows) if row.baseline.startswith(baseline or "")]
    if not used:
        return None
    plt = load_matplotlib(theme)
    colours = THEMES[theme]
    figure, axes = plt.subplots(figsize=(8.8, 5.4))
    points = _curves(used)
    names = sorted(points, key=lambda name: (not name.startswith("htree_ops"), len(name), name))
    families = list(dict.fromkeys(name.removesuffix(f", {ONE_HEAD}") for name in names))
    for name in names:
        family = name.removesuffix(f", {ONE_HEAD}")
        index = families.index(family)
        colour = colours.curves[index % len(colours.curves)]
        own, computed = name.startswith("htree_ops"), name != family
        steps = sorted(points[name].items())
        if computed and family in points:  # a thin line from the last length that was measured on all heads
            last = max(points[family].items())
            xs, ys = zip(last, steps[0], strict=True)
            axes.plot(xs, ys, color=colour, linestyle=":", linewidth=1.6, label="_between")
        axes.plot(
            [length for length, _ in steps],
            [value for _, value in steps],
            marker=MARKERS[index % len(MARKERS)],
            markersize=7,
            markerfacecolor=colours.page if computed else colour,
            color=colour,
            linestyle="-" if own else ":" if computed else "--",
            linewidth=2.2 if own else 1.6,
            label=name,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({length for steps in points.values() for length in steps})
    axes.set_xticks(ticks, [_tokens(t) for t in ticks])
    axes.yaxis.set_major_locator(plt.LogLocator(subs=(1,)))
    axes.yaxis.set_minor_locator(plt.LogLocator(subs=(2, 5)))
    axes.yaxis.set_major_formatter(plt.FuncFormatter(lambda value, _: _milliseconds(value)))
    axes.yaxis.set_minor_formatter(plt.NullFormatter())
    axes.set_xlabel("sequence length in tokens (1k = 1024)")
    axes.set_ylabel("time of one forward call (lower is better)")
    axes.legend(loc="upper left", fontsize=10)
    title = f"Forward time of tree attention and of dense causal attention\n{_sizes(used[0])}"
    return finish(plt, figure, axes, used, title, path)


def _sizes(row: Row) -> str:
    """Heads, widths and options of a case in words: ``32 query heads, 4 K/V heads of 128, ...``."""
    found = dict(re.findall(r"(\w+)=(\S+)", row.shapes))
    heads, _, kv_heads = found.get("H", "").partition("/")
    return (
        f"{heads} query heads, {kv_heads or heads} K/V heads, width {found.get('K')}, r = {found.get('r')}, "
        f"k = {found.get('k')}, M = {found.get('M')}, {row.dtype}"
    )


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
