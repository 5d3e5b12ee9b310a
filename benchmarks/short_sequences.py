"""Tree attention of sequences that are no longer than max_top_nodes, beside cuDNN: every row is dense causal attention.

Run: ``python -m benchmarks.short_sequences --csv PATH`` on a GPU: about a minute; ``--quick`` for a look at the
forward. H = 32, H_kv = 4, K = V = 128, k = 512, M = 8192, bf16, random normal inputs. cuDNN gets rotated queries and
keys; the time of ``htree_ops`` has its rotation in it. The backward is that of autograd after a forward that is not
timed. Every candidate has copies of all sets of inputs, so that none finds in the L2 what another has just read.
Figures are reported, never asserted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness import timing
from benchmarks.harness.plain_rows import parse_for_gpu, print_rows
from benchmarks.harness.progress import progress
from htree_ops import tree_attention
from htree_ops.info import source_commit
from htree_ops.tuning.clock import clock_for
from tests.support.cases import normal

HEADS, KV_HEADS, WIDTH = 32, 4, 128
LENGTHS, BATCHES, STRIDES = (256, 512, 1024, 2048, 4096, 8192), (1, 2, 4, 8, 16), (1, 2, 4, 16)
EFFORT = timing.Effort(rounds=6, candidate_ms=250.0, warm_up_ms=15.0)
WHOLE: list[tuple[str, int, int, Sequence[int]]] = [
    *(("forward", T, B, STRIDES) for T in LENGTHS for B in BATCHES),
    *(("backward", T, B, (1, 16)) for T in LENGTHS[2:] for B in (1, 4)),
]
QUICK: list[tuple[str, int, int, Sequence[int]]] = [
    ("forward", T, B, (1,)) for T in (1024, 2048, 4096) for B in (1, 16)
]


@dataclass(frozen=True, kw_only=True)
class ShortRow:
    """One length, batch and stride; ``ratio`` is ``htree_us / cudnn_us``."""

    gpu: str
    torch: str
    commit: str
    what: str
    T: int
    B: int
    selection_stride: int
    htree_us: float
    cudnn_us: float
    ratio: float


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same attention by cuDNN, of tensors in its own layout [B, H, T, D]."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def inputs(batch: int, length: int, seed: int) -> list[Tensor]:
    """q, k and v [B, T, heads, D]."""
    return [
        normal((batch, length, heads, WIDTH), torch.bfloat16, "cuda", seed + i)
        for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))
    ]


def heads_first(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.transpose(1, 2).contiguous() for x in tensors]


def backward_of(call: Callable[..., Tensor], tensors: Sequence[Tensor]) -> Callable[[], Any]:
    """The backward of a call, whose forward is done."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = call(*leaves)
    return partial(torch.autograd.grad, out, leaves, torch.ones_like(out), retain_graph=True)


def measure(what: str, length: int, batch: int, strides: Sequence[int]) -> list[ShortRow]:
    """A row for every stride."""
    sizes = batch * length * (HEADS + 2 * KV_HEADS) * WIDTH * 2
    sets = [inputs(batch, length, 10 * i) for i in range(timing.num_input_sets(sizes))]

    def prepared(call: Callable[..., Tensor], tensors: Sequence[Tensor]) -> Callable[[], Any]:
        return backward_of(call, tensors) if what == "backward" else partial(call, *tensors)

    calls = {"cudnn": [prepared(dense, heads_first(x)) for x in sets]}
    for stride in strides:
        ours = partial(tree_attention, selection_stride=stride)
        calls[str(stride)] = [prepared(ours, [x.clone() for x in tensors]) for tensors in sets]
    found = timing.measure_undisturbed(calls, clock_for("cuda"), EFFORT)
    return [
        ShortRow(
            gpu=torch.cuda.get_device_name(),
            torch=torch.__version__,
            commit=source_commit(),
            what=what,
            T=length,
            B=batch,
            selection_stride=int(name),
            htree_us=found[name].median_us,
            cudnn_us=found["cudnn"].median_us,
            ratio=found[name].median_us / found["cudnn"].median_us,
        )
        for name in calls
        if name != "cudnn"
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and writes it where ``--csv`` says."""
    parser = argparse.ArgumentParser(description="tree attention of short sequences beside cuDNN")
    parser.add_argument("--csv", type=Path, help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="six settings of the forward, stride 1 alone")
    arguments = parse_for_gpu(parser, argv)
    settings = QUICK if arguments.quick else WHOLE
    rows = (row for setting in progress(settings, str) for row in measure(*setting))
    print_rows(rows, arguments.csv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
