"""Tree attention whose nodes an index chooses, forward and backward, beside dense attention of the same run.

Run: ``python -m benchmarks.tree_index --csv PATH`` on a GPU with 80 GB; ``--quick`` takes the first setting with few
repetitions, ``--device cpu`` the CPU's. B = 1, bf16 (fp32 on the CPU), nothing is rotated, random normal inputs and an
index of 32 numbers for each K/V head. The forward has the selection in it; a backward reads the lists that the forward
kept. Dense attention is ``scaled_dot_product_attention``, on a GPU by cuDNN, in turns with each setting up to 131 072
tokens. Random lists overlap less than trained ones do. Figures are reported, never asserted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness import timing
from benchmarks.harness.calls import backward_of, dense, forward_of, medians_ms, sustained_ms
from benchmarks.harness.plain_rows import Measured, make_parser, measure_each, parse_for_gpu, where
from htree_ops import TreeOptions, tree_attention

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
class IndexRow(Measured):
    """One direction of one setting; ``of_dense`` is its sustained time by that of dense attention."""

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


def measure(setting: Setting, device: str, effort: timing.Effort) -> Iterator[IndexRow]:
    """A row for each direction."""
    tensors = make_tensors(setting, device)
    for backward in (False, True) if setting.backward else (False,):
        prepared = partial(backward_of, upstream=torch.ones_like) if backward else forward_of
        ways = {"ours": [prepared(ours(setting), tensors)]}
        if setting.T <= 131_072:  # beyond, dense attention alone would take minutes
            ways["dense"] = [prepared(dense, tensors)]
        medians = medians_ms(ways, device, effort)
        sustained = sustained_ms(ways, medians, device, effort)
        dense_ms = sustained.get("dense")
        yield IndexRow(
            **where(device),
            direction="backward" if backward else "forward",
            T=setting.T,
            H=setting.H,
            H_kv=setting.H_kv,
            D=setting.D,
            top_k=setting.k,
            max_top_nodes=setting.M,
            selection_stride=setting.s,
            open_next=setting.open_next,
            median_ms=medians["ours"],
            sustained_ms=sustained["ours"],
            dense_ms=dense_ms,
            of_dense=None if dense_ms is None else sustained["ours"] / dense_ms,
        )


def main(argv: Sequence[str] | None = None, settings: Sequence[Setting] | None = None) -> int:
    """Prints the table and writes it where ``--csv`` says."""
    parser = make_parser(
        "time of tree attention with an index, beside dense attention",
        rounds=3,
        quick="the first setting alone, few repetitions",
        cpu=True,
    )
    arguments = parse_for_gpu(parser, argv)
    chosen = settings or SETTINGS[arguments.device]
    effort = timing.QUICK if arguments.quick else timing.Effort(rounds=arguments.rounds)
    return measure_each(
        chosen[:1] if arguments.quick else chosen,
        lambda x: f"T={x.T} k={x.k} stride {x.s}",
        lambda x: measure(x, arguments.device, effort),
        arguments.csv,
    )


if __name__ == "__main__":
    sys.exit(main())
