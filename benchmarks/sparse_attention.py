"""sparse_attention beside dense attention and beside the layer of tokens of the tree on the same lists.

Run: ``python -m benchmarks.sparse_attention --csv PATH`` on a GPU; ``--quick`` for a look at shorter sequences,
``--case PATTERN`` for some cases. Lists of 2048 tokens, of neighbours that have nothing in common ("random") and 80 %
of their blocks ("alike"), and the lists that tree attention with own positions selects ("tree"). In each direction the
op and ``scaled_dot_product_attention`` of all tokens; ``multiple`` is the time by that of dense attention. For lists of
the tree also the kernels of its own tokens' layer, by the profiler: what they take inside a call of tree attention,
dense rows included, without the copies of keys and values and the rows of queries that its layers share. All kernels of
the op are measured in the same way too, its copies and rows included.

``--lists FILE`` times the lists that a trained index chose ("trained"), beside random ones of the same shape and beside
tree attention on the same lists, all of it but the choice. FILE is what ``benchmarks/quality/study/lists.py`` writes.
There are as many sequences as make up the usual number of queries; layers and heads of the file take turns as theirs.

Figures are reported, never asserted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import htree_ops  # noqa: F401 - registers the ops
from benchmarks.harness import bounds, timing
from benchmarks.harness.calls import backward_of, dense, kernels_of, medians_ms
from benchmarks.harness.plain_rows import Row, make_parser, measure_each, parse_for_gpu, where
from benchmarks.quality.study import lists
from htree_ops import TreeOptions
from htree_ops.ops.tree_cache.functions import cache_layers
from htree_ops.tuning.clock import Call
from tests.support.sparse_attention_cases import BENCHMARK_CASES, SparseCase


def least_ms(case: SparseCase, backward: bool) -> float:
    """The bound of ``benchmarks/harness/bounds.py`` for full lists, counted as in ``benchmarks/tree_index.py``."""
    rows = case.H_kv * case.listed() / case.selection_stride
    gathered, flops = rows * (case.K + case.V) * case.dtype.itemsize, case.flops()
    if backward:
        queries = case.H // case.H_kv * case.selection_stride
        return bounds.least_ms(2.5 * flops, gathered * (1 + queries / case.block_size))
    return bounds.least_ms(flops, gathered)


def attend(case: SparseCase, blocks: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.ops.htree.sparse_attention(q, k, v, blocks, **case.options())[0]


def tree_options(case: SparseCase) -> dict[str, Any]:
    """Tree attention that opens as many nodes as the lists hold."""
    return {
        "max_top_nodes": min(8192, 16 * case.n),
        "top_k_per_layer": case.n,
        "rope_base": None,
        "selection_stride": case.selection_stride,
    }


def lists_of_tree(case: SparseCase, inputs: Sequence[Tensor]) -> Tensor:
    return torch.ops.htree.attention_forward(*inputs, **tree_options(case))[3][0]


def tree_over(case: SparseCase, blocks: Tensor, q: Tensor, k: Tensor) -> Callable[..., Tensor]:
    """Tree attention of two layers that opens the blocks, of q, k and v."""
    options = TreeOptions(
        top_k=case.n,
        max_top_nodes=-(-case.T // case.block_size),
        compression_rate=case.block_size,
        selection_stride=case.selection_stride,
        rope_base=None,
    ).packed()
    index = q.new_zeros(*k.shape[:3], 16)  # for the lists of the top, which nobody chooses
    lists = torch.ops.htree._index_lists(q, k, index, index, [0], *options)
    lists[:, : blocks.shape[1], :, : case.n] = blocks
    return lambda *qkv: torch.ops.htree._listed_attention(*qkv, lists, *options)[0]


def cases_of_file(path: Path, device: str) -> list[SparseCase]:
    """Those of ``--lists``."""
    usual, length, n = BENCHMARK_CASES[device][0], *lists.read(path).shape[1:]
    shape = replace(usual, B=max(1, usual.T // length), T=length, n=n)
    return [
        replace(shape, name=kind, lists=kind, selection_stride=stride)
        for stride in (1, 4, 16)
        for kind in ("trained", "random")
    ]


def trained_blocks(case: SparseCase, path: Path, device: str) -> Tensor:
    """The lists of the file as those of a case."""
    found = lists.read(path)
    turns = torch.arange(case.B * case.H_kv) % len(found)
    blocks = found[:, :: case.selection_stride][turns].unflatten(0, (case.B, case.H_kv))
    return blocks.transpose(1, 2).contiguous().to(device)


def forward_of_tokens(kernels: Sequence[tuple[str, float]], layers: int) -> float:
    """What the kernels of the tokens' layer take of a forward: of each chunk the last that attends."""
    total, above = 0.0, layers - 1
    for name, time in kernels:
        if "dense_rows_kernel" in name:  # dense rows, and rows in masked tiles
            total, above = total + time, layers - 1
        elif "attend_kernel" in name:
            total, above = (total + time, layers - 1) if above == 0 else (total, above - 1)
    return total


def backward_of_tokens(kernels: Sequence[tuple[str, float]], layers: int) -> float:
    """The same of a backward: a chunk begins with its rows, and each layer with its masks."""
    total, above, counts = 0.0, layers, False
    for name, time in kernels:
        if "gradient_rows_kernel" in name:
            above, counts = layers, False
        elif "list_masks_kernel" in name:
            above -= 1
            counts = above == 0
        elif "row_tiles_kernel" in name or "tile_marks_kernel" in name:
            counts = True
        total += time if counts else 0.0
    return total


def tokens_of_tree(case: SparseCase, inputs: Sequence[Tensor], rounds: int) -> dict[str, float]:
    """Milliseconds of the tokens' layer inside tree attention in each direction, the median of some calls."""
    options = tree_options(case)
    layers = cache_layers(case.T, 16, options["max_top_nodes"])

    def attend(*qkv: Tensor) -> Tensor:
        return torch.ops.htree.attention(*qkv, **options)[0]

    forward, backward = partial(attend, *inputs), backward_of(attend, inputs)
    return {
        "forward": median(forward_of_tokens(kernels_of(forward), layers) for _ in range(rounds)),
        "backward": median(backward_of_tokens(kernels_of(backward), layers) for _ in range(rounds)),
    }


def all_kernels(call: Call, rounds: int) -> float:
    """Milliseconds of all kernels of a call, the median of some calls."""
    return median(sum(time for _, time in kernels_of(call)) for _ in range(rounds))


def measure(case: SparseCase, device: str, effort: timing.Effort, path: Path | None = None) -> list[Row]:
    """A row for each method and direction; ``path`` as :func:`trained_blocks` takes it.

    ``unions``: how many blocks 2, 4, ... 64 lists behind one another hold together, in lists.
    """
    inputs = case.make_qkv(device)
    of_tree = case.lists == "tree"
    if path is not None and case.lists == "trained":
        blocks = trained_blocks(case, path, device)
    else:
        blocks = lists_of_tree(case, inputs) if of_tree else case.make_blocks(device)
    methods: dict[str, Callable[..., Tensor]] = {
        "dense": dense,
        "sparse_attention": partial(attend, case, blocks),
    }
    if path is not None:
        methods["tree_attention, without its choice"] = tree_over(case, blocks, *inputs[:2])
    unions = lists.union_sizes(blocks.transpose(0, 1).flatten(1, 2), lists.COUNTS)
    calls: dict[str, dict[str, list[Call]]] = {
        "forward": {name: [partial(method, *inputs)] for name, method in methods.items()},
        "backward": {name: [backward_of(method, inputs)] for name, method in methods.items()},
    }
    profiled: dict[str, dict[str, float]] = {}
    if of_tree and device == "cuda":
        rounds = min(3, effort.rounds)
        profiled = {
            "sparse_attention, kernels": {
                direction: all_kernels(of_method["sparse_attention"][0], rounds)
                for direction, of_method in calls.items()
            },
            "tree_attention, tokens": tokens_of_tree(case, inputs, rounds),
        }
    rows = []
    for direction, of_method in calls.items():
        times = medians_ms(of_method, device, effort)
        times |= {name: of_direction[direction] for name, of_direction in profiled.items()}
        rows += [
            {
                **where(device),
                "case": case.shapes,
                "direction": direction,
                "method": name,
                "median_ms": time,
                "dense_ms": times["dense"],
                "multiple": time / times["dense"],
                "unions": " ".join(f"{union:.3f}" for union in unions),
            }
            for name, time in times.items()
        ]
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and writes it where ``--csv`` says."""
    parser = make_parser(
        "time of attention over lists",
        rounds=5,
        quick="an eighth of the tokens, few repetitions",
        cpu=True,
        case=True,
    )
    parser.add_argument("--lists", type=Path, metavar="FILE", help="the lists of a trained index")
    arguments = parse_for_gpu(parser, argv)
    path, device = arguments.lists, arguments.device
    cases = BENCHMARK_CASES[device] if path is None else cases_of_file(path, device)
    effort = timing.Effort(rounds=arguments.rounds, candidate_ms=600.0)
    if arguments.quick:
        effort = timing.QUICK
        cases = [replace(x, T=x.T // 8) if path is None else replace(x, B=-(-x.B // 8)) for x in cases]
    return measure_each(
        cases,
        lambda case: case.shapes,
        lambda case: measure(case, device, effort, path),
        arguments.csv,
        arguments.case,
    )


if __name__ == "__main__":
    sys.exit(main())
