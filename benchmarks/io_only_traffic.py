"""Bytes of each staged kernel and of its IO-only variant, fed the same lists and positions, counted by ncu.

Run on a GPU:

    ncu --profile-from-start off --csv --page raw --print-units base \\
        --metrics $(python -m benchmarks.io_only_traffic --metrics) \\
        --kernel-name regex:'compute_scores|select_topk|next_parents|accumulate_kernel' \\
        python -m benchmarks.io_only_traffic > traffic.csv
    python -m benchmarks.io_only_traffic --parse traffic.csv --json traffic.json

"asked" are the sectors that the loads ask of the first cache: the kernel's code and its inputs determine them. What
reaches L2 and DRAM also depends on when thread blocks run: neighbours on one multiprocessor with the same positions
share the cosines and sines in its first cache, and a kernel without arithmetic keeps them closer together. So scores
are measured twice: with as many queries as the other kernels, and with two, whose blocks have a multiprocessor each.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import htree_ops  # noqa: F401  registers torch.ops.htree
from htree_ops.cli import OneLineParser, at_least, output_file
from htree_ops.info import source_commit

SECTOR = 32  # bytes of a sector
NAME = "device__attribute_display_name"
#: Column of the table -> metric of ncu and bytes per unit of it.
METRICS = {
    "asked": ("l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum", SECTOR),
    "found in L1": ("l1tex__t_sectors_pipe_lsu_mem_global_op_ld_lookup_hit.sum", SECTOR),
    "L2": ("lts__t_bytes.sum", 1),
    "DRAM read": ("dram__bytes_read.sum", 1),
    "DRAM written": ("dram__bytes_write.sum", 1),
}
UNITS = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "sector": 1.0}
#: Full op, then IO-only variant: the order in which :func:`launch` calls them.
PAIRS = (
    "compute_scores",
    "select_topk",
    "compute_next_parents (mapped)",
    "compute_next_parents (copy)",
    "accumulate_non_topk",
    "compute_scores, one block per SM",
)
RATE, TOP_K, NODES, GROUP = 16, 512, 8192, 8
#: Sizes of the run without neighbours: two queries make 128 thread blocks, and wide keys many bytes.
LONE_QUERIES, LONE_WIDTH = 2, 512


@dataclass(frozen=True)
class Pair:
    """Bytes of a kernel and of its IO-only variant by column."""

    kernel: str
    full: dict[str, float]
    io_only: dict[str, float]

    def percent(self, column: str) -> float:
        """By how many percent the bytes of the IO-only variant differ; 0 where the full kernel moves none."""
        full = self.full[column]
        return 100 * (self.io_only[column] - full) / full if full else 0.0


def stages(queries: int, width: int) -> dict[str, tuple[Any, ...]]:
    """Arguments of the stages for the last queries of 131 072 tokens, with lists from a real selection."""
    ops, device = torch.ops.htree, "cuda"
    generator = torch.Generator(device).manual_seed(0)
    tokens = NODES * RATE
    q = torch.randn(1, queries, GROUP, width, device=device, dtype=torch.bfloat16, generator=generator)
    layers = [
        torch.randn(1, size, 1, width, device=device, dtype=torch.bfloat16, generator=generator)
        for size in (tokens, NODES)
    ]
    cos, sin = ops.rope_cache(TOP_K * RATE, width, device=device).unbind()
    t0 = tokens - queries
    top = ops.top_parents(1, queries, 1, TOP_K, 2, RATE, t0, device=device)
    scores, num = ops.compute_scores(q, layers[1], top, cos, sin, 1, RATE, None, t0)
    positions = ops.select_topk(scores, num, TOP_K)
    lists = ops.compute_next_parents(top, positions, RATE)
    bottom = (q, layers[0], lists, cos, sin, 0, RATE, None, t0)
    return {
        "compute_scores": bottom,
        "select_topk": (scores, num, TOP_K),
        "io_select_topk": (scores, num, TOP_K, 1, "stratified", t0),
        "compute_next_parents": (top, positions, RATE),
        "accumulate_non_topk": (layers[0], lists, *ops.compute_scores(*bottom), 0, RATE, t0),
    }


def launch(queries: int, width: int) -> None:
    """Calls every pair once: the full op, then its IO-only variant, on the same inputs."""
    ops = torch.ops.htree
    many, lone = stages(queries, width), stages(LONE_QUERIES, LONE_WIDTH)
    nodes = many["compute_next_parents"]
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (ops.compute_scores, many["compute_scores"]),
        (ops.io_compute_scores, many["compute_scores"]),
        (ops.select_topk, many["select_topk"]),
        (ops.io_select_topk, many["io_select_topk"]),
        (ops.compute_next_parents, nodes),
        (ops.io_compute_next_parents, (*nodes, True)),
        (ops.compute_next_parents, nodes),
        (ops.io_compute_next_parents, (*nodes, False)),
        (ops.accumulate_non_topk, many["accumulate_non_topk"]),
        (ops.io_accumulate_non_topk, many["accumulate_non_topk"]),
        (ops.compute_scores, lone["compute_scores"]),
        (ops.io_compute_scores, lone["compute_scores"]),
    ]
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for op, arguments in calls:
        op(*arguments)
        torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def parse(path: Path) -> tuple[str, list[Pair]]:
    """The GPU and the pairs of a profile.

    Raises:
        ValueError: the file is not a raw page of ncu with the metrics, or not of these launches.
    """
    lines = [line for line in path.read_text().splitlines() if line.startswith('"')]
    rows = list(csv.reader(lines))
    wanted = [NAME, *(metric for metric, _ in METRICS.values())]
    if len(rows) < 3 or any(column not in rows[0] for column in wanted):
        raise ValueError(f"{path}: expected the CSV of ncu --page raw with the metrics of --metrics")
    header, units, launches = rows[0], rows[1], rows[2:]
    if len(launches) != 2 * len(PAIRS):
        raise ValueError(f"{path}: expected {2 * len(PAIRS)} launches, found {len(launches)}")
    bytes_of = []
    for row in launches:
        found = {}
        for column, (metric, unit) in METRICS.items():
            where = header.index(metric)
            if units[where] not in UNITS:
                raise ValueError(f"{path}: {metric} has the unknown unit {units[where]}")
            found[column] = float(row[where].replace(",", "")) * UNITS[units[where]] * unit
        bytes_of.append(found)
    pairs = [Pair(name, bytes_of[2 * i], bytes_of[2 * i + 1]) for i, name in enumerate(PAIRS)]
    return launches[0][header.index(NAME)], pairs


def format_table(pairs: Sequence[Pair]) -> str:
    """The megabytes of both, and by how much those of the IO-only variant differ."""
    lines = [f"{'kernel':34}" + "".join(f"{column:>31}" for column in METRICS)]
    for pair in pairs:
        cells = [
            f"{pair.full[c] / 1e6:9.2f} {pair.io_only[c] / 1e6:9.2f} {pair.percent(c):+7.2f} %"
            for c in METRICS
        ]
        lines.append(f"{pair.kernel:34}" + "".join(f"{cell:>31}" for cell in cells))
    return "\n".join([*lines, "MB (10^6 bytes) of the full kernel, MB of the IO-only variant, difference"])


def main(argv: Sequence[str] | None = None) -> int:
    """Launches the kernels, or prints the table of a profile; status 2 for bad use."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--metrics", action="store_true", help="print the metrics for ncu")
    parser.add_argument("--parse", type=Path, help="CSV that ncu wrote")
    parser.add_argument("--json", type=output_file, help="with --parse: write the bytes to this file")
    parser.add_argument("--queries", type=at_least(1), default=4096)
    parser.add_argument("--width", type=at_least(2), default=128, help="K and V, even")
    arguments = parser.parse_args(argv)
    try:
        if arguments.metrics:
            print(",".join(metric for metric, _ in METRICS.values()))
        elif arguments.parse:
            gpu, pairs = parse(arguments.parse)
            print(format_table(pairs))
            if arguments.json:
                place = {"gpu": gpu, "torch": torch.__version__, "commit": source_commit()}
                rows = [place | {"baseline": "full kernel"} | asdict(pair) for pair in pairs]
                arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
        elif not torch.cuda.is_available():
            raise ValueError("torch sees no GPU")
        else:
            launch(arguments.queries, arguments.width)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
