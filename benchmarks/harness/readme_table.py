"""Writes what was measured into the README and the pages of ``docs``, from the rows under ``benchmarks/results``.

``SECTIONS`` names each table, its page and what renders it. Run ``python -m benchmarks.harness.readme_table`` after
committing results; ``--check`` changes nothing and fails where a page differs. What has no row is a dash. One short
function renders a table, and there are as many as the pages have.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import sparse_attention, tree_index, tree_index_decode
from benchmarks.harness import results_page
from benchmarks.harness.bounds import part_of
from benchmarks.harness.published import (
    NOTHING,
    Entry,
    Results,
    both_times,
    count_words,
    grid,
    machine_words,
    read_results,
    sustained_or_median,
    time_words,
)
from htree_ops import TreeKVCache
from htree_ops.cli import run_program

DENSE = "dense SDPA, cuDNN"


#: What part of our time the ceilings of the GPU account for.
BOUND = "bound, of our time"
#: No row has this time.
MISSING = "–"
ONE_HEAD = re.compile(re.escape(DENSE) + r", 1 of (\d+) heads")
#: Nodes of the top layer by default: up to so many tokens attention is dense, whatever the setting.
DENSE_TO = 8192


@dataclass(frozen=True)
class Setting:
    """A selection that the pages name: its stride, its span (None is the node's own mean), and its column."""

    stride: int
    span: int | None
    title: str


#: The recommended settings, those of an index: the stride, the most top nodes, the column.
RECOMMENDED = (
    (1, 8192, "quality: stride 1"),
    (4, 8192, "speed: stride 4"),
    (16, 2048, "stride 16"),
)
#: Settings without an index: spans for quality and for speed, and no spans at both ends of the strides.
SETTINGS = (
    Setting(1, 2, "quality: span 2, stride 1"),
    Setting(4, 2, "speed: span 2, stride 4"),
    Setting(1, None, "no span, stride 1"),
    Setting(16, None, "no span, stride 16"),
)


class Cell(NamedTuple):
    """A time of a table: microseconds, what the cell shows, and the commit that was measured."""

    us: float
    shown: str
    commit: str

    @classmethod
    def of(cls, us: float, commit: str = "") -> Cell:
        """The cell that shows just the time."""
        return cls(us, time_words(us), commit)


def _bold(cells: Mapping[str, Cell], names: Sequence[str]) -> list[str]:
    """What the cells show, in order; the fastest bold, dashes where there is none."""
    found = [cells.get(name) for name in names]
    fastest = min(cell.us for cell in found if cell is not None)
    return [MISSING if c is None else f"**{c.shown}**" if c.us == fastest else c.shown for c in found]


def attention_times(results: Results, op: str) -> dict[int, dict[str, Cell]]:
    """By length the sustained time of every setting and of dense attention.

    The shape is that of the first cases: B=1, H=32, H_kv=4, D=128, k=512, M=8192, independent normal numbers. The time
    of dense attention on one of n heads counts n times, and its cell says so. A setting with a span that has no row
    beside dense attention takes that of ``benchmarks/selection_span.py``.
    """
    names = {(setting.stride, setting.span): setting.title for setting in SETTINGS}
    times: dict[int, dict[str, Cell]] = {}
    for row in (row for rows in results.files.values() for row in rows if row["gpu"] == "NVIDIA H200"):
        found = re.fullmatch(r"T(\d+)(?:_c(\d+))?_s(\d+)", row["case"])
        one_head = ONE_HEAD.fullmatch(row["baseline"])
        if not found or row["op"] != op or not (one_head or row["baseline"] == DENSE):
            continue
        cells = times.setdefault(int(found[1]), {})
        commit = str(row["commit"])
        cells[names[int(found[3]), int(found[2] or 0) or None]] = Cell.of(sustained_or_median(row), commit)
        heads = int(one_head[1]) if one_head else 1
        theirs = sustained_or_median(row, "baseline_") * heads
        words = f"{time_words(theirs)} ({heads} × one head)" if one_head else time_words(theirs)
        cells.setdefault(DENSE, Cell(theirs, words, commit))
    if op == "tree_attention":
        for line in results.tables.get("selection_span_h200", ()):
            name = names.get((int(line["selection_stride"]), int(line["selection_span"] or 0) or None))
            if name is not None and line["selection_span"]:
                cells = times.setdefault(int(line["T"]), {})
                cells.setdefault(name, Cell.of(float(line["sustained_ms"]) * 1000, line["commit"]))
    return times


def recommended_times(results: Results, direction: str) -> dict[int, dict[str, Cell]]:
    """By length the sustained time of the settings of an index and of dense attention in the same run."""
    titles = {(stride, top_nodes): title for stride, top_nodes, title in RECOMMENDED}
    times: dict[int, dict[str, Cell]] = {}
    for line in results.tables.get("tree_index_h200", ()):
        title = titles.get((int(line["selection_stride"]), int(line["max_top_nodes"])))
        shape = (line["direction"], line["H"], line["top_k"], line["open_next"])
        if title is None or shape != (direction, "32", "128", str(line["selection_stride"] == "16")):
            continue
        cells, commit = times.setdefault(int(line["T"]), {}), line["commit"]
        cells[title] = Cell.of(float(line["sustained_ms"]) * 1e3, commit)
        theirs = float(line["dense_ms"]) * 1e3
        words = time_words(theirs) + (" (32 × one head)" if line["dense_heads"] == "1" else "")
        cells.setdefault(DENSE, Cell(theirs, words, commit))
    return times


def render_recommended(results: Results) -> str:
    """The recommended settings beside dense attention, by length and direction."""
    names = [*(title for *_, title in RECOMMENDED), DENSE]
    ways = {direction: recommended_times(results, direction) for direction in ("forward", "backward")}
    lines = [
        (count_words(length), direction, *_bold(cells, names))
        for direction, times in ways.items()
        for length, cells in sorted(times.items())
    ]
    if not lines:
        return NOTHING
    commits = {cell.commit for way in ways.values() for cells in way.values() for cell in cells.values()}
    measured = {
        f"{line['gpu']}, torch {line['torch']}, commit {line['commit'][:7]}"
        for line in results.tables["tree_index_h200"]
        if line["commit"] in commits
    }
    return "\n\n".join(
        (grid(("tokens", "call", *names), lines, 2), f"Measured on {' and '.join(sorted(measured))}.")
    )


#: The lengths of a table of costs, and its columns.
LENGTHS = (8192, 32768, 131072, 1048576)
COSTS = ("tokens", "setting", "forward", "decoding step", "GiB, 32 layers")


def _costs(
    length: int, title: str, forward: Mapping[str, Cell], step_us: float | str | None, gib: float
) -> tuple[str, ...]:
    """A line of such a table; dashes where there is no time."""
    shown = forward[title].shown if title in forward else MISSING
    step = MISSING if step_us is None else time_words(float(step_us))
    return count_words(length), title, shown, step, f"{gib:.1f}"


def render_costs(results: Results) -> str:
    """Time of a forward and of a decoding step, and the memory of 32 caches, with an index at four lengths."""
    forward = recommended_times(results, "forward")
    steps = {
        (int(line["T"]), int(line["max_top_nodes"])): line
        for line in results.tables.get("tree_index_decode_h200", ())
        if (line["B"], line["H"], line["H_kv"], line["top_k"], line["index_dtype"])
        == ("1", "32", "4", "128", "float8_e4m3fn")
    }
    lines = []
    for length in LENGTHS:
        cells, gib = forward.get(length, {}), _cache_gib(length, kv_heads=4, span=None, index_dim=32)
        for _, top_nodes, title in RECOMMENDED:
            step = steps.get((length, top_nodes), {})
            lines.append(_costs(length, title, cells, step.get("attend_us"), gib))
        dense = steps.get((length, 8192), {})
        lines.append(_costs(length, DENSE, cells, dense.get("dense_us"), _dense_gib(length, kv_heads=4)))
    return grid(COSTS, lines, 2)


def render_summary(results: Results) -> str:
    """Tree attention beside dense attention, by length, direction and setting."""
    names = [*(setting.title for setting in SETTINGS), DENSE]
    with_span = {setting.title for setting in SETTINGS if setting.span}
    lines = []
    commits: dict[str, set[str]] = {}
    for op, direction in (("tree_attention", "forward"), ("tree_attention_backward", "backward")):
        for length, cells in sorted(attention_times(results, op).items()):
            for name, cell in cells.items():
                part = f"{direction} with a span" if name in with_span else direction
                commits.setdefault(part, set()).add(cell.commit[:7])
            row = _bold(cells, names)
            if length <= DENSE_TO:
                row = ["= stride 1" if shown == MISSING else shown for shown in row]
            lines.append((count_words(length), direction, *row))
    if not lines:
        return NOTHING
    rows = [row for rows in results.files.values() for row in rows if row["gpu"] != "none"]
    rows = [row for row in rows if row["op"].startswith("tree_attention") and "_ar1_" not in row["case"]]
    machines = " and ".join(dict.fromkeys(map(machine_words, rows)))
    if len(every := set().union(*commits.values())) == 1:
        measured = f"commit {every.pop()}"
    else:
        measured = "commits: " + "; ".join(
            f"{part} {', '.join(sorted(found))}" for part, found in sorted(commits.items())
        )
    caption = f"Measured on {machines}, {measured}."
    return "\n\n".join((grid(("tokens", "call", *names), lines, 2), caption))


def render_settings(results: Results) -> str:
    """Time of a forward and of a decoding step, and the memory of 32 caches, of each setting at four lengths."""
    forward = attention_times(results, "tree_attention")
    steps: dict[tuple[int, int | None], tuple[float, float]] = {}
    for row in results.files.get("tree_cache_h200.csv", ()):
        found = re.fullmatch(r"B=1 T=(\d+)(?: span=(\d+))?", row["case"])
        if found and row["baseline"] == DENSE:
            steps[int(found[1]), int(found[2] or 0) or None] = both_times(row)
    lines = []
    for length in LENGTHS:
        cells = dict(forward.get(length, {}))
        for setting in SETTINGS:
            step = steps.get((length, setting.span))
            if length <= DENSE_TO:
                cells.setdefault(setting.title, Cell(0.0, "= stride 1", ""))
                step = step or steps.get((length, None))
            gib = _cache_gib(length, kv_heads=4, span=setting.span)
            lines.append(_costs(length, setting.title, cells, step and step[0], gib))
        dense = next((step for (tokens, _), step in steps.items() if tokens == length), None)
        lines.append(_costs(length, DENSE, cells, dense and dense[1], _dense_gib(length, kv_heads=4)))
    return grid(COSTS, lines, 2)


def _dense_gib(tokens: int, *, kv_heads: int) -> float:
    """GiB of 32 caches of all keys and values, heads of 128, bf16."""
    return 32 * tokens * kv_heads * 128 * 2 * 2 / 2**30


def _cache_gib(
    tokens: int, *, kv_heads: int, span: int | None, leaf_bits: int | None = None, index_dim: int = 0
) -> float:
    """GiB of 32 tree caches for one sequence, heads of 128, bf16: counted, not measured, on the device meta."""
    cache = TreeKVCache(
        1,
        kv_heads,
        128,
        tokens,
        selection_span=span,
        leaf_bits=leaf_bits,
        index_dim=index_dim,
        index_dtype=torch.float8_e4m3fn if index_dim else None,
        device="meta",
    )
    return 32 * cache.num_bytes().allocated / 2**30


def render_cache(results: Results) -> str:
    """Memory of a cache of 32 layers by length and what it keeps."""
    lines = []
    for tokens in LENGTHS:
        sizes = [_dense_gib(tokens, kv_heads=8)]
        for span, bits in ((None, None), (4, None), (2, None), (2, 8), (2, 4)):
            sizes.append(_cache_gib(tokens, kv_heads=8, span=span, leaf_bits=bits))
        lines.append((count_words(tokens), *(f"{size:.1f}" for size in sizes)))
    titles = ("tokens", "dense K/V", "no span", "span 4", "span 2", "span 2, 8 bits", "span 2, 4 bits")
    return grid(titles, lines)


def render_decode(results: Results) -> str:
    """Decoding steps beside dense attention."""
    lines = []
    for row in results.files.get("tree_cache_h200.csv", ()):
        if row["op"] == "tree_cache_attention" and row["baseline"] == DENSE:
            ours, theirs = both_times(row)
            facts = dict(fact.split("=") for fact in row["case"].replace(" in 1048576", "").split())
            where = " (capacity 1 048 576)" if " in " in row["case"] else ""
            lines.append(
                (
                    facts["B"],
                    count_words(facts["T"]) + where,
                    facts.get("k", "512"),
                    facts.get("span", "none"),
                    facts.get("kv", "4"),
                    *_bold({"ours": Cell.of(ours), "dense": Cell.of(theirs)}, ("ours", "dense")),
                )
            )
    return grid(("sequences", "tokens", "top_k", "span", "K/V heads", "step", DENSE), lines)


#: How a model of models_h200.csv was run, and the column for it.
WAYS = {
    "ours, index, stride 1": "index, stride 1",
    "ours, index, stride 4": "index, stride 4",
    "ours, stride 1, span 2": "quality: span 2, stride 1",
    "ours, stride 4, span 2": "speed: span 2, stride 4",
    "ours, stride 1": "no span, stride 1",
    "ours, stride 16": "no span, stride 16",
    "eager + SDPA": "SDPA",
    "torch.compile + SDPA": "SDPA, torch.compile",
    "Liger + SDPA": "SDPA, Liger",
}


def _model_lines(results: Results) -> dict[tuple[str, int], dict[str, dict[str, str]]]:
    """The lines of models_h200.csv by phase and length, and by way, of models of 32 heads."""
    found: dict[tuple[str, int], dict[str, dict[str, str]]] = {}
    for line in results.tables.get("models_h200", ()):
        if line.get("heads", "32") != "32":
            continue
        found.setdefault((line["phase"], int(line["tokens"])), {})[line["way"]] = line
    return dict(sorted(found.items()))


def render_models(results: Results) -> str:
    """A prefill and a training step of a model of eight layers, every way in which it was run."""
    found = _model_lines(results)
    ways = [way for way in WAYS if any(way in lines for lines in found.values())]
    table = []
    for (phase, tokens), lines in found.items():
        cells = {way: Cell.of(float(line["median_ms"]) * 1000) for way, line in lines.items()}
        table.append((count_words(tokens), phase, *_bold(cells, ways)))
    return grid(("tokens", "phase", *(WAYS[way] for way in ways)), table, 2)


#: What a training step is compared with: the fastest dense model at every length.
FASTEST_DENSE = "Liger + SDPA"


def render_training(results: Results) -> str:
    """A training step at a length: the time of every way, of the fastest dense model's, and the memory."""
    table = []
    for (phase, tokens), lines in _model_lines(results).items():
        if phase != "train":
            continue
        dense = float(lines[FASTEST_DENSE]["median_ms"])
        ways = sorted((way for way in WAYS if way in lines), key=lambda way: float(lines[way]["median_ms"]))
        for way in ways:
            ms = float(lines[way]["median_ms"])
            memory = f"{int(lines[way]['peak_bytes']) / 2**30:.0f}"
            title = WAYS[way] if way.startswith("ours") else f"dense, {WAYS[way]}"
            table.append((count_words(tokens), title, time_words(ms * 1000), f"{ms / dense:.2f}", memory))
    titles = ("tokens", "attention", "step", f"of {WAYS[FASTEST_DENSE]}", "peak, GiB")
    return grid(titles, table, 2)


def render_short(results: Results) -> str:
    """Sequences up to ``max_top_nodes``: the least and the largest multiple of cuDNN's time."""
    ratios: dict[tuple[int, str], list[float]] = {}
    for line in results.tables.get("short_texts_h200", ()):
        ratios.setdefault((int(line["T"]), line["what"]), []).append(float(line["ratio"]))
    lengths = sorted({length for length, _ in ratios})
    lines = []
    for length in lengths:
        spans = (ratios.get((length, what)) for what in ("forward", "backward"))
        lines.append(
            (count_words(length), *(f"{min(x):.2f} to {max(x):.2f}" if x else MISSING for x in spans))
        )
    return grid(("tokens", "forward, of cuDNN's time", "backward, of cuDNN's time"), lines)


def render_strides(results: Results) -> str:
    """All strides on correlated inputs of 131 072 tokens."""
    lines = {}
    for row in results.files.get("tree_attention_h200.csv", ()):
        found = re.fullmatch(r"T131072_ar1_s(\d+)", row["case"])
        if found and row["baseline"] == DENSE:
            ours, theirs = sustained_or_median(row), sustained_or_median(row, "baseline_")
            lines[int(found[1])] = (found[1], time_words(ours), time_words(theirs))
    return grid(("stride", "forward", DENSE), [lines[stride] for stride in sorted(lines)])


def render_spans(results: Results) -> str:
    """What a span adds to the forward of its stride, as a multiple of the time without one in the same run."""
    found: dict[tuple[int, int], dict[str, float]] = {}
    for line in results.tables.get("selection_span_h200", ()):
        key = (int(line["T"]), int(line["selection_stride"]))
        found.setdefault(key, {})[line["selection_span"]] = float(line["sustained_ms"])
    lines = [
        (
            count_words(length),
            str(stride),
            *(f"{times[span] / times['']:.2f}" if span in times else MISSING for span in ("4", "2")),
        )
        for (length, stride), times in sorted(found.items())
    ]
    return grid(("tokens", "stride", "span 4", "span 2"), lines)


def render_lists(results: Results) -> str:
    """Peak memory of a backward with stored lists and without, and what selecting again adds to its time."""
    found: dict[tuple[int, int], dict[str, dict[str, str]]] = {}
    for line in results.tables.get("tree_memory_h200", ()):
        found.setdefault((int(line["T"]), int(line["selection_stride"])), {})[line["lists"]] = line
    lines = []
    for (length, stride), by_way in sorted(found.items()):
        stored, again = by_way["stored"], by_way["selected again"]
        peaks = (f"{float(way['peak_bytes']) / 1e9:.2f} GB" for way in (stored, again))
        size = float(stored["list_bytes"]) / 1e6
        longer = float(again["sustained_ms"]) / float(stored["sustained_ms"])
        lines.append((count_words(length), str(stride), f"{size:.0f} MB", *peaks, f"{longer:.2f}"))
    return grid(
        ("tokens", "stride", "lists", "peak, stored", "peak, selected again", "time, multiple"), lines
    )


def render_sparse(results: Results) -> str:
    """Attention over given lists, forward / backward, beside the tree's own tokens and dense attention."""
    found: dict[str, dict[tuple[str, str], float]] = {}
    for line in results.tables.get("sparse_attention_h200", ()):
        found.setdefault(line["case"], {})[line["method"], line["direction"]] = float(line["median_ms"])
    cases = [case for case in sparse_attention.BENCHMARK_CASES["cuda"] if case.shapes in found]
    cases.sort(key=lambda case: (case.T, case.lists, case.n, case.selection_stride))
    ways = ("forward", "backward")
    lines = []
    for case in cases:
        times = found[case.shapes]
        cells = []
        for method in ("sparse_attention", "tree_attention, tokens", "dense"):
            both = [times.get((method, way)) for way in ways]
            cells.append(" / ".join(time_words(x * 1e3) for x in both if x) if all(both) else MISSING)
        parts = [
            part_of(sparse_attention.least_ms(case, way == "backward"), times["sparse_attention", way])
            for way in ways
        ]
        sizes = [
            count_words(case.T),
            case.lists,
            count_words(case.n * case.block_size),
            str(case.selection_stride),
        ]
        lines.append((*sizes, *cells, " / ".join(parts)))
    titles = ("tokens", "lists", "listed tokens", "stride", "`sparse_attention`", "the tree's", DENSE, BOUND)
    return grid(titles, lines)


def render_index(results: Results) -> str:
    """The tree with an index, forward / backward, beside dense attention of the same run."""
    found: dict[tuple[int, int, int, int, int], dict[str, dict[str, str]]] = {}
    for line in results.tables.get("tree_index_h200", ()):
        names = ("T", "H", "top_k", "selection_stride", "max_top_nodes")
        length, heads, top_k, stride, top_nodes = (int(line[name]) for name in names)
        found.setdefault((length, heads, stride, top_k, top_nodes), {})[line["direction"]] = line
    lines = []
    for (length, heads, stride, top_k, top_nodes), by_way in sorted(found.items()):
        cells = []
        for column in ("sustained_ms", "dense_ms"):
            both = [by_way.get(way, {}).get(column) for way in ("forward", "backward")]
            cells.append(" / ".join(time_words(float(x) * 1e3) if x else MISSING for x in both))
        setting = tree_index.Setting(length, top_k, stride, heads, M=top_nodes)
        parts = [
            part_of(tree_index.least_ms(setting, way == "backward"), float(by_way[way]["sustained_ms"]))
            if way in by_way
            else MISSING
            for way in ("forward", "backward")
        ]
        sizes = (count_words(length), str(heads), str(stride), str(top_k), count_words(top_nodes))
        lines.append((*sizes, *cells, " / ".join(parts)))
    return grid(("tokens", "H", "stride", "k", "M", "with an index", DENSE, BOUND), lines)


def render_index_decode(results: Results) -> str:
    """The attention of a decoding step by an index, by scores and dense, and with the append of its token."""
    lines = []
    for line in results.tables.get("tree_index_decode_h200", ()):
        times = [time_words(float(line[f"{x}_us"])) for x in ("attend", "step", "mean", "dense")]
        names = ("B", "T", "H", "H_kv", "D", "top_k", "max_top_nodes")
        B, T, H, H_kv, D, k, M = (int(line[name]) for name in names)
        setting = tree_index_decode.Setting(B, T, H, H_kv, D, k, M, getattr(torch, line["index_dtype"]))
        part = part_of(tree_index_decode.least_us(setting), float(line["attend_us"]))
        sizes = (count_words(x) for x in (T, H, H_kv, k, M))
        lines.append((line["B"], *sizes, line["index_dtype"], *times, part))
    titles = ("sequences", "tokens", "H", "H_kv", "k", "M", "index keys", "by an index", "with the append")
    return grid((*titles, "by scores", DENSE, BOUND), lines)


def render_vllm(results: Results) -> str:
    """Calls on vLLM's pages as a multiple of the time on those of a cache."""
    lines = [
        (
            line["what"],
            line["choice"],
            line["B"],
            count_words(line["T"]),
            count_words(line["rows"]),
            f"{float(line['ratio']):.2f}",
        )
        for line in results.tables.get("vllm_steps_h200", ())
    ]
    return grid(
        ("call", "chosen by", "sequences", "tokens", "new tokens of each", "time, multiple"), lines, 2
    )


def render_prompts(results: Results) -> str:
    """Prompts that enter a cache in chunks, as a multiple of the time of one call."""
    lines = [
        (
            count_words(line["T"]),
            count_words(line["chunk"]),
            line["selection_stride"],
            line["selection_span"] or "none",
            f"{float(line['multiple']):.2f}",
        )
        for line in results.tables.get("chunked_prompt_h200", ())
    ]
    return grid(("tokens", "chunk", "stride", "span", "time, of one call"), lines)


def render_bits(results: Results) -> str:
    """A decoding step from tokens in fewer bits, as a multiple of its time from 16 bits, on a CPU from 32."""
    lines = [
        (
            "CPU" if name.endswith("cpu") else line["device"],
            count_words(line["tokens"]),
            line["bits"],
            line["ratio"][:4],
        )
        for name in ("tree_cache_leaves_time_h200", "tree_cache_leaves_time_cpu")
        for line in results.tables.get(name, ())
    ]
    return grid(("device", "tokens", "bits", "time, multiple"), lines, 1)


def render_cpu(results: Results) -> str:
    """How many times as fast as dense attention tree attention and a decoding step are on a CPU, run by run."""
    lines = []
    for name in ("tree_attention_cpu.csv", "tree_cache_cpu.csv"):
        for row in results.files.get(name, ()):
            if row["baseline"].startswith("dense SDPA"):
                case = row["case"].replace("_c", ", span ").replace("_s", ", stride ")
                commit = str(row["commit"])[:7]
                lines.append((f"`{row['op']}`", case, row["dtype"], commit, f"{row['speedup']:.1f}"))
    return grid(("op", "case", "dtype", "commit", "times as fast as dense"), lines, 4)


#: The rows of the first table of docs/quality.md: a name, and how the tree chooses; None is dense attention.
COPIES: tuple[tuple[str, str | None], ...] = (
    ("dense attention", None),
    ("recommended: index, stride 1", "index 32, s=1"),
    ("quality without an index: span 2, stride 1", "span 2, s=1"),
    ("finest: span 1, stride 1", "span 1, s=1"),
    ("speed without an index: span 2, stride 4", "span 2, s=4"),
    ("span 2, stride 16", "span 2, s=16"),
    ("no span, stride 1: the public algorithm", "mean, s=1"),
    ("no span, stride 16", "mean, s=16"),
)


def render_copies(results: Results) -> str:
    """Copies found and bits per byte: two dense models converted, and models trained with the attention."""
    done = [
        row
        for row in results.quality
        if row["status"] == "final"
        and row["scale"] == "full"
        and row["context"] == 4096
        and not row["choice"]
    ]

    def cell(rows: Iterable[Entry]) -> str:
        found = [f"{100 * row['copies_found']:.1f} %, {row['bits_per_byte']:.3f}" for row in rows]
        return " · ".join(dict.fromkeys(found)) or MISSING

    def converted(setting: str | None, text: str, seen: int) -> list[Entry]:
        run = "evaluated: dense" if setting is None else f"evaluated: {setting}, k=16, own"
        return [
            row
            for row in done
            if row["piece"] == "conversion"
            and row["run"] == run
            and row["seen"] == seen
            and text in row["text"]
        ]

    def trained(setting: str | None, positions: str) -> list[Entry]:
        name = "dense" if setting is None else f"{setting}, k=16, {positions}"
        names = {f"{name}, seed {seed}" for seed in (0, 1)} | ({"train: dense"} if setting is None else set())
        return [
            row
            for row in done
            if row["piece"] in ("scratch", "conversion")
            and row["run"] in names
            and row["seen"] == 4
            and (setting is not None or positions == "own")
        ]

    lines = [
        (
            name,
            cell(converted(setting, "153a1f0d7a17", 1)),
            cell(converted(setting, "5abfdba7066f", 4)),
            cell(trained(setting, "own")),
            cell(trained(setting, "compact")),
        )
        for name, setting in COPIES
    ]
    titles = ("attention", "converted, model 1", "converted, model 2", "trained, own", "trained, compact")
    return grid(titles, lines, 1)


def markers(name: str) -> tuple[str, str]:
    """What stands before and after a written section."""
    return f"<!-- {name} -->", f"<!-- /{name} -->"


def replace_section(document: str, section: str, name: str = "results") -> str:
    """A document's text with ``section`` between the markers of ``name``.

    Raises:
        ValueError: the markers do not occur once each, in order.
    """
    begin_mark, end_mark = markers(name)
    before, begin, rest = document.partition(begin_mark)
    _, end, after = rest.partition(end_mark)
    if not begin or not end or begin_mark in rest or end_mark in after:
        raise ValueError(f"the document must hold {begin_mark} and {end_mark} once, in this order")
    return f"{before}{begin_mark}\n{section}\n{end_mark}{after}"


#: Every generated table: the page, its name there, and what renders it.
SECTIONS: tuple[tuple[str, str, Callable[[Results], str]], ...] = (
    ("README.md", "results", render_recommended),
    ("docs/performance.md", "forward", render_summary),
    ("docs/performance.md", "index", render_index),
    ("docs/performance.md", "spans", render_spans),
    ("docs/performance.md", "strides", render_strides),
    ("docs/performance.md", "short", render_short),
    ("docs/performance.md", "sparse", render_sparse),
    ("docs/performance.md", "models", render_models),
    ("docs/performance.md", "decode", render_decode),
    ("docs/performance.md", "index_decode", render_index_decode),
    ("docs/performance.md", "prompts", render_prompts),
    ("docs/performance.md", "lists", render_lists),
    ("docs/performance.md", "bits", render_bits),
    ("docs/performance.md", "cpu", render_cpu),
    ("docs/choosing_settings.md", "costs", render_costs),
    ("docs/choosing_settings.md", "settings", render_settings),
    ("docs/choosing_settings.md", "training", render_training),
    ("docs/serving.md", "cache", render_cache),
    ("docs/vllm.md", "steps", render_vllm),
    ("docs/quality.md", "copies", render_copies),
    ("docs/results.md", "headlines", results_page.render_headlines),
    ("docs/results.md", "results", results_page.render),
)


def write_sections(root: Path, results: Results) -> dict[Path, str]:
    """The pages below ``root`` that differ from the results, as they should be.

    Raises:
        ValueError: a page lacks the markers of a table.
    """
    pages: dict[Path, str] = {}
    for page, name, renderer in SECTIONS:
        path = root / page
        pages[path] = replace_section(pages.get(path, path.read_text()), renderer(results), name)
    return {path: text for path, text in pages.items() if text != path.read_text()}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 written or equal, 1 ``--check`` found a difference, 2 unusable files."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.harness.readme_table", description=__doc__)
    parser.add_argument("--root", type=Path, default=Path("."), help="the checkout (default: here)")
    parser.add_argument("--check", action="store_true", help="change nothing; status 1 where a page differs")
    arguments = parser.parse_args(argv)
    try:
        changed = write_sections(arguments.root, read_results(arguments.root / "benchmarks" / "results"))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    for path, text in changed.items():
        if arguments.check:
            print(f"{path} differs from the results: run without --check", file=sys.stderr)
        else:
            path.write_text(text)
    return int(arguments.check and bool(changed))


if __name__ == "__main__":
    run_program(main)
