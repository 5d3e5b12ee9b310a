"""The pictures of the report, drawn with matplotlib from result rows; each says GPU, torch and commit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from htree_ops.bench.results import Row

__all__ = ["MissingMatplotlibError", "bars", "lengths", "load_matplotlib", "place", "roofline", "time_us"]

#: Colours that differ in brightness as well, for readers who see fewer hues.
COLOURS = ("#0b5fa5", "#e07b00", "#2a9d5c", "#b5179e", "#6c757d", "#c1121f", "#3a0ca3", "#8d6e00")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
INK, MUTED, GRID = "#1c2733", "#5b6770", "#d9dee3"
#: Longest list of bars in one picture; cases in which the baseline is faster come on top.
MAX_BARS = 36


class MissingMatplotlibError(RuntimeError):
    """matplotlib is not installed; it is needed for pictures alone."""


def load_matplotlib() -> Any:
    """matplotlib.pyplot without a display.

    Raises:
        MissingMatplotlibError: it is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise MissingMatplotlibError(
            "the report draws with matplotlib, which is not installed: pip install 'htree_ops[report]' or matplotlib"
        ) from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "font.size": 11,
            "axes.edgecolor": MUTED,
            "axes.labelcolor": INK,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": GRID,
            "grid.linewidth": 0.7,
            "text.color": INK,
            "xtick.color": INK,
            "ytick.color": INK,
            "legend.frameon": False,
            "figure.facecolor": "white",
            "savefig.dpi": 100,
        }
    )
    return plt


def time_us(row: Row) -> float:
    """The time that a row's rates come from: graph replay where there is one, else the median."""
    return row.median_us if row.graph_us is None else row.graph_us


def place(rows: Sequence[Row]) -> str:
    """Machine, torch and commits of rows of one machine."""
    row = rows[0]
    machine = re.sub(r"\((R|TM)\)", "", row.cpu) if row.gpu == "none" else row.gpu
    commits = sorted({re.sub(r"^(\w{7})\w*", r"\1", r.commit) for r in rows})
    shown = ", ".join(commits[:4]) + (", …" if len(commits) > 4 else "")
    return f"{machine} · torch {row.torch} · commit{'s' if len(commits) > 1 else ''} {shown}"


def _finish(plt: Any, figure: Any, axes: Any, rows: Sequence[Row], title: str, path: Path) -> Path:
    axes.set_title(title, loc="left", fontsize=12.5, fontweight="bold", pad=24)
    where = {"xy": (0, 1), "xycoords": "axes fraction", "xytext": (0, 7), "textcoords": "offset points"}
    axes.annotate(place(rows), **where, fontsize=9, color=MUTED, va="bottom")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, bbox_inches="tight", facecolor="white")
    plt.close(figure)
    _reduce_colours(path)
    return path


def _reduce_colours(path: Path) -> None:
    """A palette makes a picture of lines and letters three times smaller; the octree keeps rare colours."""
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
    cases = {
        (r.op, r.case, r.shapes, r.dtype): r for r in rows if r.flops > 0 and r.bytes > 0 and r.tflops > 0
    }
    if not cases:
        return None
    plt = load_matplotlib()
    ops = sorted({row.op for row in cases.values()})
    figure, axes = plt.subplots(figsize=(9.2, max(5.6, 1.2 + 0.22 * len(ops))))  # the legend stands beside it
    for index, op in enumerate(ops):
        own = [row for row in cases.values() if row.op == op]
        axes.scatter(
            [row.flops / row.bytes for row in own],
            [row.tflops for row in own],
            s=46,
            marker=MARKERS[(index + index // len(COLOURS)) % len(MARKERS)],  # no pair twice
            color=COLOURS[index % len(COLOURS)],
            edgecolor="white",
            linewidth=0.6,
            label=op,
            zorder=3,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    intensities = [row.flops / row.bytes for row in cases.values()]
    speeds = [row.tflops for row in cases.values()]
    ceiling = max(row.ceiling_gb_per_s for row in cases.values())
    # the bandwidth line reaches as high as the picture needs, not to the end of a wide axis
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
    return _finish(plt, figure, axes, list(cases.values()), "Roofline of every measured case", path)


def _one_family(rows: Sequence[Row]) -> list[Row]:
    """The rows of tree attention that differ in length and stride alone: the family with the most lengths.

    Other widths, heads, dtypes and inputs (all but ``T<n>`` and ``_s<n>`` of a case's name) are other curves.
    """
    families: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row.op == "tree_attention" and re.search(r"\bT=\d+", row.shapes):
            sizes = re.sub(r"\b(T|T_q|s)=\d+ ?", "", row.shapes).strip()
            inputs = re.sub(r"T\d+|_s\d+", "", row.case)
            families.setdefault((sizes, inputs, row.dtype), []).append(row)
    most = max((len({_length(row) for row in family}) for family in families.values()), default=0)
    if most < 2:
        return []  # points, no curve
    longest = [key for key, family in families.items() if len({_length(row) for row in family}) == most]
    return families[min(longest, key=lambda key: (len(key[1]), key))]


def _length(row: Row) -> int:
    found = re.search(r"\bT=(\d+)", row.shapes)
    return int(found.group(1)) if found else 0


def _tokens(count: int) -> str:
    if count % 1024:
        return str(count)
    return f"{count >> 20}M" if count % (1 << 20) == 0 else f"{count >> 10}k"


def lengths(rows: Sequence[Row], path: Path) -> Path | None:
    """Time of tree attention against T beside the dense baselines of the same run; forward only."""
    used = _one_family(rows)
    if not used:
        return None
    points: dict[str, dict[int, float]] = {}
    for row in used:
        stride = re.search(r"\bs=(\d+)", row.shapes)
        ours = f"htree_ops, stride {stride.group(1) if stride else '1'}"
        points.setdefault(ours, {})[_length(row)] = time_us(row)
        theirs = points.setdefault(row.baseline, {})
        theirs[_length(row)] = min(theirs.get(_length(row), float("inf")), row.baseline_median_us)
    plt = load_matplotlib()
    figure, axes = plt.subplots(figsize=(8.8, 5.2))
    unit, scale = ("ms", 1e3) if max(max(p.values()) for p in points.values()) < 2e6 else ("s", 1e6)
    names = sorted(points, key=lambda name: (not name.startswith("htree_ops"), len(name), name))
    for index, name in enumerate(names):
        own = name.startswith("htree_ops")
        steps = sorted(points[name].items())
        axes.plot(
            [length for length, _ in steps],
            [value / scale for _, value in steps],
            marker=MARKERS[index % len(MARKERS)],
            color=COLOURS[index % len(COLOURS)],
            linestyle="-" if own else "--",
            linewidth=2.2 if own else 1.6,
            label=name,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({length for steps in points.values() for length in steps})
    axes.set_xticks(ticks, [_tokens(t) for t in ticks])
    axes.yaxis.set_major_locator(plt.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(plt.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(plt.NullFormatter())
    axes.set_xlabel("sequence length T, tokens (1k = 1024)")
    axes.set_ylabel(f"time of the forward, {unit} (lower is better)")
    axes.legend(loc="upper left", fontsize=10)
    sizes = re.sub(r"B=1 |(T|T_q)=\d+ | s=\d+", "", used[0].shapes)
    title = f"Tree attention against dense causal attention\n{sizes}, {used[0].dtype}"
    return _finish(plt, figure, axes, used, title, path)


def bars(rows: Sequence[Row], path: Path) -> Path | None:
    """Speed-up of htree_ops over the fastest baseline that computes the same, case by case."""
    best: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        if not row.baseline_computes_the_same:
            continue
        key = (row.op, row.case, row.dtype)
        if key not in best or row.speedup < best[key].speedup:
            best[key] = row
    if not best:
        return None
    chosen = list(best.values())
    note = ""
    if len(chosen) > MAX_BARS:  # the slowest cases of each op, evenly, and none that loses is left out
        ops = sorted({row.op for row in chosen})
        each = max(1, MAX_BARS // len(ops))
        slowest = [sorted((r for r in chosen if r.op == op), key=lambda r: -time_us(r))[:each] for op in ops]
        kept = [row for group in slowest for row in group]
        chosen = kept + [row for row in chosen if row.speedup < 1 and row not in kept]
        note = f"\nshown: the {each} slowest cases of each op, and every case below 1"
    chosen.sort(key=lambda row: (row.op, -row.speedup))
    plt = load_matplotlib()
    figure, axes = plt.subplots(figsize=(9.2, 1.6 + 0.34 * len(chosen)))
    ops = sorted({row.op for row in chosen})
    where = range(len(chosen))
    colours = [COLOURS[ops.index(row.op) % len(COLOURS)] for row in chosen]
    axes.barh(where, [row.speedup - 1 for row in chosen], left=1, color=colours, height=0.68, zorder=2)
    axes.set_yticks(where, [f"{row.op}  {row.case}  {row.dtype}" for row in chosen], fontsize=9)
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
            f"{row.speedup:.2f}×  vs {row.baseline}",
            va="center",
            fontsize=9,
            color=INK,
            zorder=4,
        )
    axes.xaxis.set_major_formatter(plt.FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.xaxis.set_minor_formatter(plt.NullFormatter())
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"time of the fastest baseline / time of htree_ops (above 1: htree_ops is faster){note}")
    return _finish(
        plt, figure, axes, chosen, "Speed-up over the fastest baseline that computes the same", path
    )
