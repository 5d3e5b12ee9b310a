"""DRAM and L2 bytes of each staged kernel and of its IO-only twin, fed the same lists and positions.

Run on a GPU:

    ncu --profile-from-start off --csv --page raw \\
        --metrics dram__bytes_read.sum,dram__bytes_write.sum,lts__t_bytes.sum \\
        --kernel-name regex:'compute_scores|select_topk|next_parents|accumulate_kernel' \\
        python benchmarks/twin_traffic.py > traffic.csv
    python benchmarks/twin_traffic.py --parse traffic.csv
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import htree_ops  # noqa: F401  registers torch.ops.htree

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum", "lts__t_bytes.sum")
UNITS = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
#: Full op, then twin: the order in which :func:`launch` calls them.
PAIRS = (
    "compute_scores",
    "select_topk",
    "compute_next_parents (mapped)",
    "compute_next_parents (copy)",
    "accumulate_non_topk",
)
RATE, TOP_K, NODES, GROUP = 16, 512, 8192, 8


def launch(queries: int, width: int) -> None:
    """Every pair once, on the bottom of a tree of 131 072 tokens: full op, then twin, on the same inputs."""
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
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    inputs = (q, layers[0], lists, cos, sin, 0, RATE, None, t0)
    bottom_scores, bottom_num = ops.compute_scores(*inputs)
    ops.io_compute_scores(*inputs)
    ops.select_topk(scores, num, TOP_K)
    ops.io_select_topk(scores, num, TOP_K, 1, "stratified", t0)
    ops.compute_next_parents(top, positions, RATE)
    ops.io_compute_next_parents(top, positions, RATE, True)
    ops.compute_next_parents(top, positions, RATE)
    ops.io_compute_next_parents(top, positions, RATE, False)
    arguments = (layers[0], lists, bottom_scores, bottom_num, 0, RATE, t0)
    ops.accumulate_non_topk(*arguments)
    ops.io_accumulate_non_topk(*arguments)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def parse(path: Path) -> list[tuple[str, list[float]]]:
    """(kernel, bytes per metric) of each launch in the order of the launches.

    Raises:
        ValueError: the file is no raw page of ncu with the metrics.
    """
    lines = [line for line in path.read_text().splitlines() if line.startswith('"')]
    rows = list(csv.reader(lines))
    if len(rows) < 3 or any(metric not in rows[0] for metric in METRICS):
        raise ValueError(f"{path}: expected the CSV of ncu --page raw with {', '.join(METRICS)}")
    header, units, launches = rows[0], rows[1], rows[2:]
    where = [header.index(metric) for metric in METRICS]
    scales = [UNITS[units[column]] for column in where]
    name = header.index("Kernel Name")
    return [
        (row[name], [float(row[c].replace(",", "")) * s for c, s in zip(where, scales, strict=True)])
        for row in launches
    ]


def report(launches: Sequence[tuple[str, list[float]]]) -> str:
    """A table of the pairs: megabytes of both and how far the twin is off.

    Raises:
        ValueError: not two launches per pair.
    """
    if len(launches) != 2 * len(PAIRS):
        raise ValueError(f"expected {2 * len(PAIRS)} launches, found {len(launches)}")
    lines = [f"{'kernel':30}" + "".join(f"{name:>38}" for name in ("DRAM read", "DRAM written", "L2"))]
    for index, pair in enumerate(PAIRS):
        full, io = launches[2 * index][1], launches[2 * index + 1][1]
        cells = [
            f"{a / 1e6:12.2f} {b / 1e6:12.2f} MB {100 * (b - a) / a if a else 0.0:+7.2f} %"
            for a, b in zip(full, io, strict=True)
        ]
        lines.append(f"{pair:30}" + "".join(f"{cell:>38}" for cell in cells))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Launches the kernels, or prints the table of a profile; status 2 for bad use."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parse", type=Path, help="CSV that ncu wrote")
    parser.add_argument("--queries", type=int, default=4096)
    parser.add_argument("--width", type=int, default=128, help="K and V")
    arguments = parser.parse_args(argv)
    try:
        if arguments.parse:
            print(report(parse(arguments.parse)))
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
