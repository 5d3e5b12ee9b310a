"""sparse_attention beside dense attention and beside the layer of tokens of the tree on the same lists.

Run: ``python -m benchmarks.sparse_attention --csv PATH`` on a GPU; ``--quick`` for a look at shorter sequences.
Lists of 2048 tokens, of neighbours that have nothing in common ("random") and 80 % of their blocks ("alike"). In each
direction the op, ``scaled_dot_product_attention`` of all tokens, and in the forward ``bottom_accumulate``, the last
layer of the tree's general kernels with the same lists; ``multiple`` is the time by that of dense attention.

Figures are reported, never asserted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import htree_ops  # noqa: F401 - registers the ops
from benchmarks.harness import timing
from benchmarks.harness.plain_rows import parse_for_gpu, print_rows
from benchmarks.harness.progress import progress
from htree_ops.info import source_commit
from htree_ops.tuning.clock import clock_for
from tests.support.cases import normal
from tests.support.sparse_attention_cases import BENCHMARK_CASES, SparseCase

Call = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class SparseRow:
    """One method in one direction; ``multiple`` is its time by that of dense attention in the same run."""

    device: str
    torch: str
    commit: str
    case: str
    direction: str
    method: str
    median_ms: float
    dense_ms: float
    multiple: float


def attend(case: SparseCase, blocks: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.ops.htree.sparse_attention(q, k, v, blocks, **case.options())[0]


def attend_densely(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def attend_layer(case: SparseCase, blocks: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The tokens' layer of a tree whose selection chose these lists, rotated by nothing."""
    angles = torch.zeros(case.n * case.block_size, case.K // 2, device=q.device)
    lists = blocks.masked_fill(blocks < 0, torch.iinfo(torch.int32).max).sort(-1).values
    lists = lists.masked_fill(lists == torch.iinfo(torch.int32).max, -1)
    stride = case.selection_stride
    return torch.ops.htree.bottom_accumulate(
        q, k, v, lists, angles.cos(), angles.sin(), case.block_size, None, 0, stride
    )[2]


def gradient_of(call: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Call:
    """The backward of ``call(*inputs)``, whose graph is made here."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = call(*leaves)
    dout = normal(tuple(out.shape), out.dtype, out.device, 7)
    return partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)


def measure(case: SparseCase, device: str, effort: timing.Effort) -> list[SparseRow]:
    """A row for each method and direction."""
    inputs, blocks = case.make_qkv(device), case.make_blocks(device)
    methods: dict[str, Callable[..., Tensor]] = {
        "dense": attend_densely,
        "sparse_attention": partial(attend, case, blocks),
    }
    calls: dict[str, dict[str, Call]] = {
        "forward": {
            **{name: partial(method, *inputs) for name, method in methods.items()},
            "bottom_accumulate": partial(attend_layer, case, blocks, *inputs),
        },
        "backward": {name: gradient_of(method, inputs) for name, method in methods.items()},
    }
    rows = []
    for direction, of_method in calls.items():
        found = timing.measure_undisturbed(
            {name: [call] for name, call in of_method.items()}, clock_for(device), effort
        )
        times = {name: found[name].median_us / 1e3 for name in of_method}
        rows += [
            SparseRow(
                device=torch.cuda.get_device_name() if device == "cuda" else "cpu",
                torch=torch.__version__,
                commit=source_commit(),
                case=case.shapes,
                direction=direction,
                method=name,
                median_ms=time,
                dense_ms=times["dense"],
                multiple=time / times["dense"],
            )
            for name, time in times.items()
        ]
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and writes it where ``--csv`` says."""
    parser = argparse.ArgumentParser(description="time of attention over lists")
    parser.add_argument("--csv", type=Path, help="write the rows to this file")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="an eighth of the tokens, few repetitions")
    arguments = parse_for_gpu(parser, argv)
    cases, effort = BENCHMARK_CASES[arguments.device], timing.Effort(rounds=arguments.rounds)
    if arguments.quick:
        cases, effort = [replace(case, T=case.T // 8) for case in cases], timing.QUICK
    rows = (
        row
        for case in progress(cases, lambda case: case.shapes)
        for row in measure(case, arguments.device, effort)
    )
    print_rows(rows, arguments.csv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
