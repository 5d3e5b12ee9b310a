"""Tree attention of sequences that are no longer than max_top_nodes, beside cuDNN: every row is dense causal attention.

Run: ``python -m benchmarks.short_sequences --csv PATH`` on a GPU: about a minute; ``--quick`` for a look at the
forward. H = 32, H_kv = 4, K = V = 128, k = 512, M = 8192, bf16, random normal inputs. cuDNN gets rotated queries and
keys; the time of ``htree_ops`` has its rotation in it. The backward is that of autograd after a forward that is not
timed. Every candidate has copies of all sets of inputs, so that none finds in the L2 what another has just read.
Figures are reported, never asserted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness import timing
from benchmarks.harness.calls import backward_of, dense_heads_first, forward_of, medians_ms
from benchmarks.harness.plain_rows import Row, make_parser, measure_each, parse_for_gpu, where
from htree_ops import tree_attention
from tests.support.cases import normal

HEADS, KV_HEADS, WIDTH = 32, 4, 128
LENGTHS, BATCHES, STRIDES = (256, 512, 1024, 2048, 4096, 8192), (1, 2, 4, 8, 16), (1, 2, 4, 16)
EFFORT = timing.Effort(rounds=6, candidate_ms=250.0, warm_up_ms=15.0)
WHOLE: list[tuple[str, int, int, Sequence[int]]] = [
    *(("forward", T, B, STRIDES) for T in LENGTHS for B in BATCHES),
    *(("backward", T, B, (1, 16)) for T in LENGTHS for B in (1, 4)),
]
QUICK: list[tuple[str, int, int, Sequence[int]]] = [
    ("forward", T, B, (1,)) for T in (1024, 2048, 4096) for B in (1, 16)
]


def inputs(batch: int, length: int, seed: int) -> list[Tensor]:
    """q, k and v [B, T, heads, D]."""
    return [
        normal((batch, length, heads, WIDTH), torch.bfloat16, "cuda", seed + i)
        for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))
    ]


def heads_first(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.transpose(1, 2).contiguous() for x in tensors]


def measure(what: str, length: int, batch: int, strides: Sequence[int]) -> list[Row]:
    """A row for every stride; ``ratio`` is ``htree_us / cudnn_us``."""
    sizes = batch * length * (HEADS + 2 * KV_HEADS) * WIDTH * 2
    sets = [inputs(batch, length, 10 * i) for i in range(timing.num_input_sets(sizes))]

    prepared = partial(backward_of, upstream=torch.ones_like) if what == "backward" else forward_of
    calls = {"cudnn": [prepared(dense_heads_first, heads_first(x)) for x in sets]}
    for stride in strides:
        ours = partial(tree_attention, selection_stride=stride)
        calls[str(stride)] = [prepared(ours, [x.clone() for x in tensors]) for tensors in sets]
    times = {name: 1e3 * ms for name, ms in medians_ms(calls, "cuda", EFFORT).items()}
    return [
        {
            **where(),
            "what": what,
            "T": length,
            "B": batch,
            "selection_stride": int(name),
            "htree_us": times[name],
            "cudnn_us": times["cudnn"],
            "ratio": times[name] / times["cudnn"],
        }
        for name in calls
        if name != "cudnn"
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and writes it where ``--csv`` says."""
    parser = make_parser(
        "tree attention of short sequences beside cuDNN", quick="six settings of the forward, stride 1 alone"
    )
    arguments = parse_for_gpu(parser, argv)
    return measure_each(QUICK if arguments.quick else WHOLE, str, lambda x: measure(*x), arguments.csv)


if __name__ == "__main__":
    sys.exit(main())
