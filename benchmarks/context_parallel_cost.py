"""What tree attention costs on many GPUs, computed from times of one and from the speed of a link.

Run: ``python -m benchmarks.context_parallel_cost``; it prints the table of docs/distributed.md, needs no GPU and
measures nothing. The work of a token in the forward is that of the top layer, of each layer that selects, and of the
tokens; the three costs are fitted to the forwards of ``benchmarks/results/tree_attention_h200.csv`` from 131 072 tokens
on. The backward is a multiple of the forward, the one measured at 131 072. A rank has its share of that, and all of
what does not shrink with the ranks: pooling and packing the keys and values, the sums of their gradients, and putting
exchanged tensors in order, at the measured copy bandwidth.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from htree_ops.distributed.context_parallel import choose_steps
from htree_ops.reference.tree_attention import layer_sizes

RESULTS = Path(__file__).parent / "results" / "tree_attention_h200.csv"
RANKS = (4, 8, 64)
LENGTHS = (1 << 19, 1 << 20, 1 << 21, 1 << 22, 1 << 23, 1 << 24)
#: Bytes that a rank receives per second while two H200s all-gather 1 GiB a rank over NVLink, measured.
LINK = 278e9
#: The problem of the table: B = 1, H = 32, H_kv = 4, K = V = 128, bf16, r = 16, M = 8192, k = 512, s = 16.
RATE, MOST_TOP, KV_HEADS, WIDTH = 16, 8192, 4, 128


@dataclass(frozen=True)
class Costs:
    """Microseconds per token, and bytes per microsecond."""

    per_top_node: float  # of the top, for each node that a query sees
    per_selecting_layer: float  # of a layer between the top and the tokens
    bottom: float  # of the tokens, once their lists are full
    backward: float  # the backward as a multiple of the forward
    copy: float  # bytes read and written

    def forward(self, tokens: int) -> float:
        """Microseconds of one GPU."""
        return tokens * float(
            np.dot(work_of(tokens), (self.per_top_node, self.per_selecting_layer, self.bottom))
        )


def work_of(tokens: int) -> tuple[float, float, float]:
    """Of a token on average: nodes seen at the top, layers that select below it, and 1 for the tokens."""
    sizes = layer_sizes(tokens, RATE, MOST_TOP)
    return sizes[-1] / 2, max(0, len(sizes) - 2), 1.0


def measured(path: Path = RESULTS) -> Costs:
    """The costs of one H200."""
    times: dict[tuple[str, int], float] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if found := re.fullmatch(r"T(\d+)_s16", row["case"]):
                times[row["op"], int(found[1])] = float(row["median_us"])
                copy = float(row["ceiling_gb_per_s"]) * 1e3
    forwards = {T: time for (op, T), time in times.items() if op == "tree_attention" and T >= 131072}
    matrix = np.array([work_of(T) for T in forwards])
    found_costs, *_ = np.linalg.lstsq(
        matrix, np.array([time / T for T, time in forwards.items()]), rcond=None
    )
    backward = times["tree_attention_backward", 131072] / forwards[131072]
    top, selecting, bottom = map(float, found_costs)
    return Costs(top, selecting, bottom, backward, copy)


@dataclass(frozen=True)
class Row:
    """A call on ``ranks`` GPUs, milliseconds; ``efficiency`` is one / (ranks * total), both directions together."""

    ranks: int
    T: int
    one: float
    forward: float
    backward: float
    link: float  # of all exchanges, hidden or not
    waiting: float  # of the link, the part that no work hides
    efficiency: float
    gathered: int  # bytes of the keys and values of the whole sequence


def overlapped(steps: int, work: float, before: float, after: float) -> float:
    """The time of ``work`` in steps, of which each needs its part of ``before`` and gives its part of ``after``.

    The link carries all of ``before`` first. Either the work waits for its first part alone, or the link never waits.
    """
    return max(before / steps + work + after / steps, before + work / steps + after)


def cost(costs: Costs, ranks: int, tokens: int, link: float = LINK) -> Row:
    """The row of one problem."""
    gathered = tokens * KV_HEADS * 2 * WIDTH * 2
    steps = choose_steps(KV_HEADS, gathered, ranks)
    pooled = gathered * (1 + 1 / (RATE - 1))
    # Each of them is read and written: the sequence put in order, the pooled rows, and the packed copy.
    tree = (2 * gathered + pooled + 2 * pooled) / costs.copy
    # fp32 sums are cleared, pushed down and rounded by one GPU; several copy those of the tokens out, put them in order
    # and add them.
    wide = 2 * gathered
    alone = (2 * pooled * 2 + wide + gathered) / costs.copy
    sums = (2 * pooled * 2 + 2 * wide + 2 * wide + wide) / costs.copy
    one_forward, one_backward = (costs.forward(tokens) * share for share in (1, costs.backward))
    exchange, returned = (size * (ranks - 1) / ranks / link * 1e6 for size in (gathered, wide))
    work = (one_forward - tree) / ranks + tree, (one_backward - tree - alone) / ranks + tree + sums
    forward = overlapped(steps, work[0], exchange, 0)
    backward = overlapped(steps, work[1], exchange, returned)
    total = forward + backward
    return Row(
        ranks=ranks,
        T=tokens,
        one=(one_forward + one_backward) / 1e3,
        forward=forward / 1e3,
        backward=backward / 1e3,
        link=(2 * exchange + returned) / 1e3,
        waiting=(total - sum(work)) / 1e3,
        efficiency=(one_forward + one_backward) / (ranks * total),
        gathered=gathered,
    )


def table(costs: Costs, ranks: Sequence[int], lengths: Sequence[int], link: float) -> str:
    """The rows as Markdown."""
    lines = [
        "| GPUs | T | one GPU, s | forward, ms | backward, ms | link, ms | not hidden | efficiency | K and V, GiB |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for size in ranks:
        for tokens in lengths:
            row = cost(costs, size, tokens, link)
            lines.append(
                f"| {row.ranks} | {row.T:_} | {row.one / 1e3:.2f} | {row.forward:.1f} | {row.backward:.1f} | "
                f"{row.link:.1f} | {row.waiting:.1f} | {100 * row.efficiency:.1f} % | {row.gathered / 2**30:.0f} |"
            )
    return "\n".join(lines).replace("_", " ")


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the costs and the table."""
    parser = argparse.ArgumentParser(description="computed costs of tree attention on many GPUs")
    parser.add_argument(
        "--link", type=float, default=LINK / 1e9, help="GB/s that a rank receives (default 278)"
    )
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=RANKS, help="numbers of GPUs (default 4 8 64)"
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=LENGTHS, help="tokens (default 2^19 ... 2^24)"
    )
    arguments = parser.parse_args(argv)
    print(table(measured(), arguments.ranks, arguments.lengths, arguments.link * 1e9))
    return 0


if __name__ == "__main__":
    sys.exit(main())
