"""Tree attention with positions of its own (``rope_base=None``) where lists cover much of the sequence, beside cuDNN.

Run: ``python -m benchmarks.masked_tiles --csv PATH`` on a GPU: about a minute; ``--quick`` for 32768 tokens alone, and
``--backward`` for the gradients alone, under stored lists.
H = 32, H_kv = 4, K = V = 128, k = 512, M = 8192, bf16, B = 1. Each row has three figures of one run, interleaved:
the package's own choice, which multiplies tiles of tokens under the bits of the lists up to 4 k r tokens; the same
call with ``HTREE_TREE_GATHER=gathered``, which gathers everywhere; and dense causal attention by cuDNN. ``error`` is
the norm of the difference of the first two, relative to that of the outputs (of gradients: the largest of dQ, dK and
dV). Inputs are independent (``iid``) or alike from token to token (AR(1) of 0.95), which leaves tiles out. Figures are
reported, never asserted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness import timing
from benchmarks.harness.plain_rows import parse_for_gpu, print_rows
from benchmarks.harness.progress import progress
from htree_ops import tree_attention
from htree_ops.info import source_commit
from htree_ops.tuning.clock import clock_for
from tests.support.tree_attention_cases import TreeAttentionCase

HEADS, KV_HEADS, WIDTH = 32, 4, 128
EFFORT = timing.Effort(rounds=6, candidate_ms=600.0, warm_up_ms=50.0)
WHOLE = [(T, s, rho) for T in (16_384, 32_768, 65_536) for s in (1, 2) for rho in (0.0, 0.95)]
QUICK = [(32_768, 1, 0.0)]


@dataclass(frozen=True, kw_only=True)
class MaskedRow:
    """One length, stride and kind of inputs; times of a forward, or of a backward."""

    gpu: str
    torch: str
    commit: str
    T: int
    selection_stride: int
    inputs: str
    htree_ms: float
    gathered_ms: float
    cudnn_ms: float
    against_gathered: float
    against_cudnn: float
    error: float


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Dense causal attention by cuDNN, of tensors in its own layout [B, H, T, D]."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def tree(gather: str, stride: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Tree attention of the given kernels."""
    os.environ["HTREE_TREE_GATHER"] = gather
    return tree_attention(q, k, v, rope_base=None, selection_stride=stride)


class Gradients:
    """The backward of an attention of the given inputs, whose forward has run; it can be called again and again."""

    def __init__(self, attention: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
        self.inputs = [x.detach().requires_grad_() for x in inputs]
        self.out = attention(*self.inputs)
        self.upstream = torch.randn_like(self.out)

    def __call__(self, gather: str) -> tuple[Tensor, ...]:
        os.environ["HTREE_TREE_GATHER"] = gather
        return torch.autograd.grad(self.out, self.inputs, self.upstream, retain_graph=True)


def difference(found: Tensor, wanted: Tensor) -> float:
    """The norm of the difference, relative to that of ``wanted``."""
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def measure(length: int, stride: int, correlation: float, backward: bool) -> MaskedRow:
    """A row of three calls on the same inputs."""
    case = TreeAttentionCase(
        name="masked_tiles",
        dtype=torch.bfloat16,
        T=length,
        H=HEADS,
        H_kv=KV_HEADS,
        K=WIDTH,
        V=WIDTH,
        correlation=correlation,
    )
    sizes = length * (HEADS + 2 * KV_HEADS) * WIDTH * 2
    sets = [case.make_qkv("cuda", seed) for seed in range(timing.num_input_sets(sizes))]
    dense_sets = [[y.transpose(1, 2).contiguous() for y in x] for x in sets]
    calls: dict[str, list[Callable[[], object]]] = {}
    if backward:
        trees = [Gradients(partial(tree, "auto", stride), x) for x in sets]
        for kind in ("auto", "gathered"):
            calls[kind] = [partial(x, kind) for x in trees]
        calls["cudnn"] = [partial(Gradients(dense, x), "auto") for x in dense_sets]
        error = max(map(difference, trees[0]("auto"), trees[0]("gathered")))
    else:
        for kind in ("auto", "gathered"):
            calls[kind] = [partial(tree, kind, stride, *x) for x in sets]
        calls["cudnn"] = [partial(dense, *x) for x in dense_sets]
        error = difference(*(tree(kind, stride, *sets[0]) for kind in ("auto", "gathered")))
    found = timing.measure_undisturbed(calls, clock_for("cuda"), EFFORT)
    times = {name: found[name].median_us / 1000 for name in calls}
    return MaskedRow(
        gpu=torch.cuda.get_device_name(),
        torch=torch.__version__,
        commit=source_commit(),
        T=length,
        selection_stride=stride,
        inputs=f"ar1_{correlation:g}" if correlation else "iid",
        htree_ms=times["auto"],
        gathered_ms=times["gathered"],
        cudnn_ms=times["cudnn"],
        against_gathered=times["auto"] / times["gathered"],
        against_cudnn=times["auto"] / times["cudnn"],
        error=error,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and writes it where ``--csv`` says."""
    parser = argparse.ArgumentParser(description="tree attention on masked tiles beside its gather and cuDNN")
    parser.add_argument("--csv", type=Path, help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="32768 independent tokens alone, stride 1")
    parser.add_argument("--backward", action="store_true", help="the gradients in place of the outputs")
    arguments = parse_for_gpu(parser, argv)
    settings = progress(QUICK if arguments.quick else WHOLE, str)
    rows = (measure(*setting, arguments.backward) for setting in settings)
    print_rows(rows, arguments.csv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
