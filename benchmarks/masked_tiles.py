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

import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.harness import timing
from benchmarks.harness.calls import backward_of, dense_heads_first, forward_of, medians_ms, relative_error
from benchmarks.harness.plain_rows import Row, make_parser, measure_each, parse_for_gpu, where
from htree_ops import tree_attention
from tests.support.tree_attention_cases import TreeAttentionCase

HEADS, KV_HEADS, WIDTH = 32, 4, 128
EFFORT = timing.Effort(rounds=6, candidate_ms=600.0, warm_up_ms=50.0)
WHOLE = [(T, s, rho) for T in (16_384, 32_768, 65_536) for s in (1, 2) for rho in (0.0, 0.95)]
QUICK = [(32_768, 1, 0.0)]


def under(gather: str, call: timing.Call) -> Any:
    """A call with the given kernels."""
    os.environ["HTREE_TREE_GATHER"] = gather
    return call()


def measure(length: int, stride: int, correlation: float, backward: bool) -> Row:
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
    tree = partial(tree_attention, rope_base=None, selection_stride=stride)
    os.environ["HTREE_TREE_GATHER"] = "auto"
    prepared = backward_of if backward else forward_of
    trees = [prepared(tree, x) for x in sets]
    calls: dict[str, list[timing.Call]] = {
        kind: [partial(under, kind, call) for call in trees] for kind in ("auto", "gathered")
    }
    results = (under(kind, trees[0]) for kind in ("auto", "gathered"))
    error = max(map(relative_error, *results)) if backward else relative_error(*results)
    calls["cudnn"] = [prepared(dense_heads_first, x) for x in dense_sets]
    times = medians_ms(calls, "cuda", EFFORT)
    return {
        **where(),
        "T": length,
        "selection_stride": stride,
        "inputs": f"ar1_{correlation:g}" if correlation else "iid",
        "htree_ms": times["auto"],
        "gathered_ms": times["gathered"],
        "cudnn_ms": times["cudnn"],
        "against_gathered": times["auto"] / times["gathered"],
        "against_cudnn": times["auto"] / times["cudnn"],
        "error": error,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and writes it where ``--csv`` says."""
    parser = make_parser(
        "tree attention on masked tiles beside its gather and cuDNN",
        quick="32768 independent tokens alone, stride 1",
    )
    parser.add_argument("--backward", action="store_true", help="the gradients in place of the outputs")
    arguments = parse_for_gpu(parser, argv)
    settings = QUICK if arguments.quick else WHOLE
    return measure_each(settings, str, lambda x: [measure(*x, arguments.backward)], arguments.csv)


if __name__ == "__main__":
    sys.exit(main())
