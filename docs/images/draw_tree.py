"""Draws the README's picture of one query on the tree, for light and for dark pages.

Run: ``python docs/images/draw_tree.py [--out FOLDER]`` (needs matplotlib); it writes tree_light.png and tree_dark.png.
What it shows is computed, not painted: a tree over 64 tokens with r = 4, k = 2 and M = 4, and a query that opens the
nodes named in ``IMPORTANT`` besides its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TOKENS, CHILDREN, TOP_K, QUERY = 64, 4, 2, 57
NUM_LAYERS = 3
#: The node that the query opens besides its own, by layer.
IMPORTANT = {2: 1, 1: 6}

THEMES = {
    "light": {
        "page": "#ffffff",
        "ink": "#1c2733",
        "muted": "#66727d",
        "kept": "#0b6fb8",
        "kept_text": "#ffffff",
        "opened": "#f08a00",
        "wedge": "#f08a0026",
        "unread": "#eef1f4",
        "edge": "#c3cbd3",
        "future": "#f8f9fa",
    },
    "dark": {
        "page": "#0d1117",
        "ink": "#e6edf3",
        "muted": "#9aa6b2",
        "kept": "#4aa8ff",
        "kept_text": "#0d1117",
        "opened": "#ffa940",
        "wedge": "#ffa94030",
        "unread": "#1b222b",
        "edge": "#3d4753",
        "future": "#11161d",
    },
}


def walk() -> dict[int, dict[str, set[int]]]:
    """The nodes that the query scores, opens and keeps in each layer, from the top down."""
    layers: dict[int, dict[str, set[int]]] = {}
    parents = {0}  # one virtual parent above the top
    for layer in range(NUM_LAYERS - 1, -1, -1):
        own = QUERY // CHILDREN**layer
        scored = {parent * CHILDREN + i for parent in parents for i in range(CHILDREN)}
        scored = {node for node in scored if node <= own}
        opened = {own, IMPORTANT[layer]} if layer else set()
        assert len(opened) in (0, TOP_K)
        assert opened <= scored
        layers[layer] = {"scored": scored, "opened": opened, "kept": scored - opened}
        parents = opened
    return layers


def draw(theme: str, path: Path) -> None:
    """Draws one picture; ``theme`` is a key of ``THEMES``."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import FancyBboxPatch, Polygon

    colour = THEMES[theme]
    layers = walk()
    figure = plt.figure(figsize=(9.6, 4.7), dpi=150, facecolor=colour["page"])
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(-1.2, 89.5)
    axes.set_ylim(-3.35, 8.75)
    axes.axis("off")
    base = {2: 6.0, 1: 3.3, 0: 0.6}
    height = 1.0

    def box(
        left: float, right: float, bottom: float, face: str, edge: str, width: float = 1.0, line: str = "-"
    ) -> None:
        gap = 0.12
        style = "round,pad=0,rounding_size=0.22"
        axes.add_patch(
            FancyBboxPatch(
                (left + gap, bottom),
                right - left - 2 * gap,
                height,
                boxstyle=style,
                mutation_aspect=0.5,
                facecolor=face,
                edgecolor=edge,
                linewidth=width,
                linestyle=line,
                zorder=3,
            )
        )

    for layer, nodes in layers.items():
        span = CHILDREN**layer
        for node in range(TOKENS // span):
            left, right = node * span, (node + 1) * span
            if node in nodes["kept"]:
                box(left, right, base[layer], colour["kept"], colour["kept"])
            elif node in nodes["opened"]:
                box(left, right, base[layer], colour["page"], colour["opened"], 2.0)
            elif node > QUERY // span:
                box(left, right, base[layer], colour["future"], colour["edge"], 0.6, ":")
            else:
                box(left, right, base[layer], colour["unread"], colour["edge"], 0.6)
            if node in nodes["opened"]:
                wedge = [
                    (left + 0.2, base[layer]),
                    (right - 0.2, base[layer]),
                    (right - 0.05, base[layer - 1] + height),
                    (left + 0.05, base[layer - 1] + height),
                ]
                axes.add_patch(
                    Polygon(wedge, closed=True, facecolor=colour["wedge"], edgecolor="none", zorder=1)
                )
    _words(axes, layers, base, colour)
    _cut(axes, layers, box, colour)
    figure.savefig(path, facecolor=colour["page"])
    plt.close(figure)
    _reduce_colours(path)


def _words(
    axes: Any, layers: dict[int, dict[str, set[int]]], base: dict[int, float], colour: dict[str, str]
) -> None:
    from matplotlib.patches import Rectangle

    titles = {2: "means of 16 tokens", 1: "means of 4 tokens", 0: "tokens"}
    for layer, nodes in layers.items():
        x, y = TOKENS + 1.6, base[layer] + 0.5
        scored, opened, kept = (len(nodes[name]) for name in ("scored", "opened", "kept"))
        end = f"opens k = {opened}, keeps {kept}" if opened else f"keeps all {kept}"
        axes.text(
            x,
            y + 0.42,
            f"layer {layer} · {titles[layer]}",
            color=colour["ink"],
            fontsize=9.5,
            weight="bold",
            va="center",
        )
        axes.text(x, y - 0.36, f"scores {scored}, {end}", color=colour["muted"], fontsize=9.5, va="center")
    key = (
        (0.2, "opened", "opened into its 4 children"),
        (25.5, "kept", "kept: one weight of the softmax"),
        (54.5, "unread", "not read"),
        (67.2, "future", "later than the query"),
    )
    for x, name, text in key:
        hollow, faint = name == "opened", name in ("unread", "future")
        axes.add_patch(
            Rectangle(
                (x, 7.82),
                1.9,
                0.56,
                facecolor=colour["page" if hollow else name],
                edgecolor=colour["edge" if faint else name],
                linewidth=2.0 if hollow else 0.8,
                linestyle=":" if name == "future" else "-",
            )
        )
        axes.text(x + 2.6, 8.1, text, color=colour["ink"], fontsize=9.5, va="center")
    axes.annotate(
        "the query, token 57",
        xy=(QUERY + 0.5, base[0] - 0.08),
        xytext=(QUERY + 0.5, -0.62),
        color=colour["ink"],
        fontsize=9.5,
        ha="center",
        va="center",
        arrowprops={
            "arrowstyle": "-|>",
            "color": colour["ink"],
            "linewidth": 1.2,
            "shrinkB": 0,
            "shrinkA": 1,
        },
    )


def _cut(axes: Any, layers: dict[int, dict[str, set[int]]], box: Any, colour: dict[str, str]) -> None:
    """Draws the kept pieces of all layers side by side; they cover every token up to the query once."""
    pieces = sorted(
        (node * CHILDREN**layer, min((node + 1) * CHILDREN**layer, QUERY + 1))
        for layer, nodes in layers.items()
        for node in nodes["kept"]
    )
    assert [piece[0] for piece in pieces[1:]] == [piece[1] for piece in pieces[:-1]]
    assert (pieces[0][0], pieces[-1][1]) == (0, QUERY + 1)
    bottom = -2.55
    for left, right in pieces:
        box(left, right, bottom, colour["kept"], colour["kept"])
        if right - left > 1:
            axes.text(
                (left + right) / 2,
                bottom + 0.48,
                str(right - left),
                color=colour["kept_text"],
                fontsize=9,
                ha="center",
                va="center",
                zorder=4,
            )
    x = TOKENS + 1.6
    axes.text(
        x,
        bottom + 0.92,
        "what is kept, side by side",
        color=colour["ink"],
        fontsize=9.5,
        weight="bold",
        va="center",
    )
    axes.text(
        x,
        bottom + 0.14,
        f"one softmax over {len(pieces)} keys\nin place of {QUERY + 1}",
        color=colour["muted"],
        fontsize=9.5,
        va="center",
    )


def _reduce_colours(path: Path) -> None:
    from PIL import Image  # matplotlib depends on it

    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(128, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    small.save(path, optimize=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent, help="folder to write (default: beside the script)"
    )
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for theme in THEMES:
        draw(theme, arguments.out / f"tree_{theme}.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
