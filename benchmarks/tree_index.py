"""Tree attention whose nodes an index chooses, forward and backward, beside dense attention of the same run.

Run: ``python -m benchmarks.tree_index --csv PATH`` on a GPU with 80 GB; ``--case REGEX`` takes some settings,
``--quick`` the first with few repetitions, ``--device cpu`` the CPU's. B = 1, bf16 (fp32 on the CPU), nothing is
rotated, random normal inputs and an index of 32 numbers for each K/V head. The forward has the selection in it; a
backward reads the lists that the forward kept. Dense attention is ``scaled_dot_product_attention``, on a GPU by
cuDNN, timed in turns with the first setting of a shape. Where 16 query heads and more share a K/V head, fla's NSA
reads as many tokens in the same turns, if the package ``fla-core`` is there. Random lists overlap less than trained
ones do. Figures are reported, never asserted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness import bounds, timing
from benchmarks.harness.calls import backward_of, dense, forward_of, medians_ms, sustained_ms
from benchmarks.harness.plain_rows import Row, make_parser, measure_each, parse_for_gpu, where
from htree_ops import TreeOptions, tree_attention
from htree_ops.flops import tree_candidates
from tests.support.cases import normal

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


#: Beyond, dense attention is timed on one of its heads and multiplied, and no backward is timed.
MOST_DENSE = 131_072
#: The recommended settings at every length, for quality first.
RECOMMENDED = tuple(
    Setting(T, 128, s, M=2048 if s == 16 else 8192, open_next=s == 16, backward=T <= MOST_DENSE)
    for T in (8192, 16_384, 32_768, 65_536, 131_072, 262_144, 524_288, 1_048_576)
    for s in (1, 4, 16)
)
SETTINGS = {
    "cuda": (
        *RECOMMENDED,
        Setting(131_072, 128, 16, open_next=True),
        Setting(131_072, 128, M=2048),
        Setting(131_072, 64),
        Setting(131_072, 256),
        Setting(32_768, 64, H=64),
        Setting(131_072, 64, H=64),
    ),
    "cpu": (Setting(32_768, 64, H=4, H_kv=1, D=64, M=4096),),
}


def least_ms(setting: Setting, backward: bool) -> float:
    """The bound of ``benchmarks/harness/bounds.py``; the selection is one pass over all index keys.

    Each list gathers the keys and values of its nodes' children; dK and dV need the rows of each node's queries too.
    """
    x, rate = setting, 16
    layers = tree_candidates(x.T, x.T, rate, x.M, x.k, x.s)
    flops = 4 * x.H * x.D * sum(scored - opened for scored, opened, _ in layers)
    gathered = 0
    for above, (*_, children) in enumerate(reversed(layers[1:])):
        first = x.M * rate**above  # rows before are dense
        gathered += x.H_kv * 4 * x.D * int(children[first :: x.s].sum())
    if backward:
        return bounds.least_ms(2.5 * flops, gathered * (1 + x.H // x.H_kv * x.s / rate))
    products = sum(range(x.M, x.T, x.s)) * x.H_kv
    return bounds.least_ms(flops + 2 * INDEX_DIM * products, gathered)


def make_tensors(setting: Setting, device: str) -> list[Tensor]:
    """q, k, v, index_query and index_key."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    heads = (setting.H, setting.H_kv, setting.H_kv, setting.H_kv, setting.H_kv)
    widths = (setting.D, setting.D, setting.D, INDEX_DIM, INDEX_DIM)
    shapes = [(1, setting.T, h, width) for h, width in zip(heads, widths, strict=True)]
    return [normal(shape, dtype, device, seed) for seed, shape in enumerate(shapes)]


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


def nsa_of(setting: Setting, device: str) -> Callable[..., Tensor] | None:
    """fla's NSA with blocks of 64 for as many tokens; None where it takes no such call, and a line where it is missing.

    Of its gates only that of the compressed branch is given, which makes the selection; its window is off.
    """
    if setting.s > 1 or setting.H // setting.H_kv < 16 or device == "cpu":
        return None
    try:
        from fla.ops.nsa import parallel_nsa
    except ImportError as error:
        print(f"NSA: skipped, {error}", file=sys.stderr)
        return None

    def call(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
        return parallel_nsa(
            q, k, v, g_cmp=q.new_ones(q.shape[:3]), block_counts=setting.k // 4, block_size=64
        )

    return call


#: Sustained milliseconds of dense attention by shape and direction.
DenseTimes = dict[tuple[int, int, int, int, bool], float]


def measure(setting: Setting, device: str, effort: timing.Effort, dense_times: DenseTimes) -> Iterator[Row]:
    """A row for each direction; ``of_dense`` is the sustained time by that of dense attention.

    ``dense_ms`` is that of the first setting of a shape, as ``dense_heads`` of the heads take it, for all of them.
    ``nsa_ms`` is that of fla's NSA, its selection and its compressed branch included.
    """
    tensors = make_tensors(setting, device)
    heads = setting.H if setting.T <= MOST_DENSE else 1
    for backward in (False, True) if setting.backward else (False,):
        prepared = partial(backward_of, upstream=torch.ones_like) if backward else forward_of
        ways = {"ours": [prepared(ours(setting), tensors)]}
        shape = (setting.T, setting.H, setting.H_kv, setting.D, backward)
        if shape not in dense_times:
            ways["dense"] = [prepared(dense, tensors if heads > 1 else [x[:, :, :1] for x in tensors])]
        if (nsa := nsa_of(setting, device)) is not None:
            ways["NSA"] = [prepared(nsa, tensors)]
        medians = medians_ms(ways, device, effort)
        sustained = sustained_ms(ways, medians, device, effort)
        dense_ms = dense_times.setdefault(shape, sustained.get("dense", 0.0) * setting.H / heads)
        yield {
            **where(device),
            "direction": "backward" if backward else "forward",
            "T": setting.T,
            "H": setting.H,
            "H_kv": setting.H_kv,
            "D": setting.D,
            "top_k": setting.k,
            "max_top_nodes": setting.M,
            "selection_stride": setting.s,
            "open_next": setting.open_next,
            "median_ms": medians["ours"],
            "sustained_ms": sustained["ours"],
            "dense_ms": dense_ms,
            "dense_heads": heads,
            "of_dense": sustained["ours"] / dense_ms,
            "nsa_ms": sustained.get("NSA"),
        }


def main(argv: Sequence[str] | None = None, settings: Sequence[Setting] | None = None) -> int:
    """Prints the table and writes it where ``--csv`` says."""
    parser = make_parser(
        "time of tree attention with an index, beside dense attention",
        rounds=3,
        quick="the first setting alone, few repetitions",
        cpu=True,
        case=True,
    )
    arguments = parse_for_gpu(parser, argv)
    chosen = settings or SETTINGS[arguments.device]
    effort = (
        timing.QUICK
        if arguments.quick
        else timing.Effort(rounds=arguments.rounds, candidate_ms=1000.0, sustained_ms=1000.0)
    )
    dense_times: DenseTimes = {}
    return measure_each(
        chosen[:1] if arguments.quick else chosen,
        lambda x: f"T={x.T} H={x.H} k={x.k} M={x.M} stride {x.s}",
        lambda x: measure(x, arguments.device, effort, dense_times),
        arguments.csv,
        arguments.case,
    )


if __name__ == "__main__":
    sys.exit(main())
