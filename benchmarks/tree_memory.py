"""Time and peak memory of the backward of tree attention with stored lists and with lists selected again.

Run: ``python -m benchmarks.tree_memory --csv PATH`` on a GPU with 20 GB. The table of docs/performance.md is of an
H200: B = 1, H = 32, H_kv = 4, K = V = 128, k = 512, bf16. Figures are reported, never asserted.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

import torch

import htree_ops  # noqa: F401 - registers the ops
from benchmarks.harness import timing
from benchmarks.harness.calls import medians_ms, peak_of, sustained_ms
from benchmarks.harness.plain_rows import Row, make_parser, measure_each, parse_for_gpu, where
from tests.support.tree_attention_cases import BENCHMARK_CASES, TreeAttentionCase

LENGTHS = (32_768, 131_072)


def measure(case: TreeAttentionCase, effort: timing.Effort) -> list[Row]:
    """A row for stored lists and one for lists selected again; their timings alternate.

    ``peak_bytes`` is the most that the allocator held during the call, beyond its inputs and the three gradients. It
    contains ``sums_bytes``, the fp32 sums of dK and dV, and ``copy_bytes``, the packed K and V, both of all layers.
    """
    q, k, v = case.make_qkv("cuda")
    options = case.op_options()
    out, gmax, gsum, parents = torch.ops.htree.attention_forward(q, k, v, *options)
    dout = torch.randn_like(out)
    calls = {
        name: functools.partial(
            torch.ops.htree.attention_backward, dout, q, k, v, out, gmax, gsum, lists, *options
        )
        for name, lists in (("stored", parents), ("selected again", []))
    }
    peaks = {}
    for name, call in calls.items():
        call()
        gradients, peak = peak_of(call)
        peaks[name] = peak - sum(x.numel() * x.element_size() for x in gradients)
        del gradients
    candidates = {name: [call] for name, call in calls.items()}
    medians = medians_ms(candidates, "cuda", effort)
    sustained = sustained_ms(candidates, medians, "cuda", effort)
    nodes = sum(case.sizes)  # of all layers
    values = case.B * nodes * case.H_kv * (case.K + case.V)
    return [
        {
            **where(),
            "T": case.T,
            "selection_stride": case.selection_stride,
            "lists": name,
            "list_bytes": sum(x.numel() * x.element_size() for x in parents) if name == "stored" else 0,
            "peak_bytes": peaks[name],
            "sums_bytes": 4 * values,
            "copy_bytes": 2 * values,
            "median_ms": medians[name],
            "sustained_ms": sustained[name],
        }
        for name in calls
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and writes it where ``--csv`` says."""
    parser = make_parser("time and memory of the backward of tree attention", rounds=10)
    arguments = parse_for_gpu(parser, argv)
    effort = timing.Effort(rounds=arguments.rounds)
    names = {f"T{length}_s{stride}" for length in LENGTHS for stride in (16, 1)}
    cases = [case for case in BENCHMARK_CASES["cuda"] if case.name in names]
    return measure_each(cases, lambda case: case.name, lambda case: measure(case, effort), arguments.csv)


if __name__ == "__main__":
    sys.exit(main())
