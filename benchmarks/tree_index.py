"""Tree attention whose nodes an index chooses, forward and backward, beside dense attention of the same run.

Run: ``python -m benchmarks.tree_index --csv PATH`` on a GPU with 80 GB; ``--quick`` takes the first setting with few
repetitions, ``--device cpu`` the CPU's. B = 1, bf16 (fp32 on the CPU), nothing is rotated, random normal inputs and an
index of 32 numbers for each K/V head. The forward has the selection in it; a backward reads the lists that the forward
kept. Dense attention is ``scaled_dot_product_attention``, on a GPU by cuDNN, in turns with each setting up to 131 072
tokens. Random lists overlap less than trained ones do. Figures are reported, never asserted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness import timing
from benchmarks.harness.plain_rows import parse_for_gpu, print_rows
from benchmarks.harness.progress import progress
from htree_ops import TreeOptions, tree_attention
from htree_ops.info import source_commit
from htree_ops.tuning.clock import clock_for

INDEX_DIM = 32


@dataclass(frozen=True)
class Setting:
    """A call: T tokens, k opened nodes of 16, s queries that share a selection, a top of at most M nodes."""

    T: int
    k: int
    s: int = 1
    H: int = 32
    H_kv: int = 4
    D: int = 128
    M: int = 8192
    open_next: bool = False
    backward: bool = True


SETTINGS = {
    "cuda": (
        Setting(32_768, 128),
        Setting(32_768, 128, 4),
        Setting(131_072, 128),
        Setting(131_072, 128, 4),
        Setting(131_072, 128, 16, open_next=True),
        Setting(131_072, 128, 16, M=2048, open_next=True),
        Setting(131_072, 128, M=2048),
        Setting(131_072, 64),
        Setting(131_072, 256),
        Setting(32_768, 64, H=64),
        Setting(131_072, 64, H=64),
        Setting(1_048_576, 128, backward=False),
        Setting(1_048_576, 128, 4, backward=False),
    ),
    "cpu": (Setting(32_768, 64, H=4, H_kv=1, D=64, M=4096),),
}


@dataclass(frozen=True, kw_only=True)
class IndexRow:
    """One direction of one setting; ``of_dense`` is its sustained time by that of dense attention."""

    gpu: str
    torch: str
    commit: str
    direction: str
    T: int
    H: int
    H_kv: int
    D: int
    top_k: int
    max_top_nodes: int
    selection_stride: int
    open_next: bool
    median_ms: float
    sustained_ms: float
    dense_ms: float | None
    of_dense: float | None


def make_tensors(setting: Setting, device: str) -> list[Tensor]:
    """q, k, v, index_query and index_key."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    heads = (setting.H, setting.H_kv, setting.H_kv, setting.H_kv, setting.H_kv)
    widths = (setting.D, setting.D, setting.D, INDEX_DIM, INDEX_DIM)
    generator = torch.Generator(device).manual_seed(0)
    return [
        torch.randn(1, setting.T, h, width, generator=generator, device=device, dtype=dtype)
        for h, width in zip(heads, widths, strict=True)
    ]


def ours(setting: Setting) -> Callable[..., Tensor]:
    """The call of a setting on what :func:`make_tensors` gives."""
    options = TreeOptions(
        top_k=setting.k,
        max_top_nodes=setting.M,
        selection_stride=setting.s,
        open_next=setting.open_next,
        rope_base=None,
    )

    def call(q: Tensor, k: Tensor, v: Tensor, *index: Tensor) -> Tensor:
        return tree_attention(q, k, v, index=(index[0], index[1]), options=options)

    return call


def dense(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    """Dense attention of the same tensors."""
    only: Any = sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if q.is_cuda else nullcontext()
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with only:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def calls_of(run: Callable[..., Tensor], tensors: Sequence[Tensor], backward: bool) -> Callable[[], object]:
    """A forward without a gradient, or the backward of one that ran before."""
    if not backward:
        return torch.no_grad()(partial(run, *tensors))
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    out = run(*leaves, *tensors[3:])
    return partial(torch.autograd.grad, out, leaves, torch.ones_like(out), retain_graph=True)


def measure(setting: Setting, device: str, effort: timing.Effort) -> Iterator[IndexRow]:
    """A row for each direction."""
    tensors, clock = make_tensors(setting, device), clock_for(device)
    for backward in (False, True) if setting.backward else (False,):
        ways = {"ours": calls_of(ours(setting), tensors, backward)}
        if setting.T <= 131_072:  # beyond, dense attention alone would take minutes
            ways["dense"] = calls_of(dense, tensors, backward)
        times = timing.measure_undisturbed({name: [call] for name, call in ways.items()}, clock, effort)
        sustained = {
            name: timing.sustained([call], clock, times[name].median_us, effort).median_us / 1e3
            for name, call in ways.items()
        }
        dense_ms = sustained.get("dense")
        yield IndexRow(
            gpu=torch.cuda.get_device_name() if device == "cuda" else "none",
            torch=torch.__version__,
            commit=source_commit(),
            direction="backward" if backward else "forward",
            T=setting.T,
            H=setting.H,
            H_kv=setting.H_kv,
            D=setting.D,
            top_k=setting.k,
            max_top_nodes=setting.M,
            selection_stride=setting.s,
            open_next=setting.open_next,
            median_ms=times["ours"].median_us / 1e3,
            sustained_ms=sustained["ours"],
            dense_ms=dense_ms,
            of_dense=None if dense_ms is None else sustained["ours"] / dense_ms,
        )


def main(argv: Sequence[str] | None = None, settings: Sequence[Setting] | None = None) -> int:
    """Prints the table and writes it where ``--csv`` says."""
    parser = argparse.ArgumentParser(
        description="time of tree attention with an index, beside dense attention"
    )
    parser.add_argument("--csv", type=Path, help="write the rows to this file")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=3, help="turns of a row (default 3)")
    parser.add_argument("--quick", action="store_true", help="the first setting alone, few repetitions")
    arguments = parse_for_gpu(parser, argv)
    chosen = settings or SETTINGS[arguments.device]
    effort = timing.QUICK if arguments.quick else timing.Effort(rounds=arguments.rounds)
    rows = (
        row
        for setting in progress(
            chosen[:1] if arguments.quick else chosen, lambda x: f"T={x.T} k={x.k} stride {x.s}"
        )
        for row in measure(setting, arguments.device, effort)
    )
    print_rows(rows, arguments.csv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
