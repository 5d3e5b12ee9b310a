"""A step of decoding from a tree cache whose nodes an index chooses, beside dense attention of the same run.

Run: ``python -m benchmarks.tree_index_decode --csv PATH`` on a GPU with 80 GB; ``--case REGEX`` takes some settings,
``--quick`` the first alone. bf16, nothing is rotated (own positions), random normal inputs and an index of 32 numbers
for each K/V head; each call is replayed in a CUDA graph. "attend" is the attention of one token for each sequence,
"step" appends that token too, "mean" is "attend" of the same cache without an index. Dense attention is
``scaled_dot_product_attention`` by cuDNN over all tokens. Figures are reported, never asserted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from benchmarks.harness import bounds, timing
from benchmarks.harness.baselines import dense_step
from benchmarks.harness.calls import replayed_us
from benchmarks.harness.plain_rows import Row, make_parser, measure_each, parse_for_gpu, where
from htree_ops import TreeKVCache
from htree_ops.ops.tree_cache.functions import cache_layers
from tests.support.cases import normal

INDEX_DIM = 32
#: Tokens that are appended to a sequence at once, before anything is timed, and those that timed steps may append.
CHUNK, SPARE = 16_384, 8_192


@dataclass(frozen=True)
class Setting:
    """B sequences of T tokens, H query heads on H_kv of D channels, k opened nodes of 16, a top of at most M nodes."""

    B: int
    T: int
    H: int = 32
    H_kv: int = 4
    D: int = 128
    k: int = 128
    M: int = 8192
    index_dtype: torch.dtype = torch.float8_e4m3fn


SETTINGS = (
    Setting(1, 131_072),
    Setting(1, 131_072, index_dtype=torch.bfloat16),
    Setting(1, 8192),
    Setting(1, 32_768),
    Setting(1, 1_048_576),
    Setting(8, 131_072),
    Setting(64, 32_768),
    Setting(1, 131_072, H=16),
    Setting(1, 131_072, H=64),
    Setting(1, 131_072, H_kv=8),
    Setting(1, 131_072, k=64),
    Setting(1, 131_072, k=256),
    Setting(1, 131_072, M=2048),
)


def least_us(setting: Setting) -> float:
    """The bound of ``benchmarks/harness/bounds.py``: all index keys, the top, and k lists of children below it."""
    x, rate = setting, 16
    below = cache_layers(x.T, rate, x.M) - 1
    rows = -(-x.T // rate**below) + below * rate * x.k
    index = INDEX_DIM * x.index_dtype.itemsize + (x.index_dtype.itemsize == 1)  # and a scale
    return 1e3 * bounds.least_ms(moved=x.B * x.H_kv * (x.T * index + rows * 4 * x.D))


def random(shape: tuple[int, ...], seed: int) -> Tensor:
    return normal(shape, torch.bfloat16, "cuda", seed)


def filled(setting: Setting, index_dim: int) -> TreeKVCache:
    """A cache with the setting's tokens."""
    cache = TreeKVCache(
        setting.B,
        setting.H_kv,
        setting.D,
        setting.T + SPARE,
        top_k=setting.k,
        max_top_nodes=setting.M,
        rope_base=None,
        index_dim=index_dim,
        index_dtype=setting.index_dtype if index_dim else None,
        device="cuda",
    )
    for first in range(0, setting.T, CHUNK):
        rows = (setting.B, min(CHUNK, setting.T - first), setting.H_kv)
        k, v = (random((*rows, setting.D), first + i) for i in range(2))
        cache.append(k, v, index_key=random((*rows, INDEX_DIM), first + 2) if index_dim else None)
    cache.reserve(SPARE)
    return cache


def indexed(
    setting: Setting, rows: tuple[Tensor, Tensor, Tensor], index: tuple[Tensor, Tensor], effort: timing.Effort
) -> tuple[float, float]:
    """Microseconds of the attention of a token by an index, and of that with its append."""
    cache = filled(setting, INDEX_DIM)
    attend = partial(cache.attend, rows[0], index_query=index[0])
    attend_us = replayed_us({"attend": [attend]}, effort)["attend"]
    step_us = replayed_us({"step": [partial(cache.decode, *rows, index=index)]}, effort)["step"]
    cache.advance(int(cache.lengths[0]) - cache.host_lengths()[0])  # replays
    cache.check()
    return attend_us, step_us


def measure(setting: Setting, effort: timing.Effort) -> Iterator[Row]:
    """Its row, in microseconds; ``of_dense`` is attend_us by dense_us."""
    heads = (setting.H, setting.H_kv, setting.H_kv)
    q, k, v = (random((setting.B, 1, h, setting.D), seed) for seed, h in enumerate(heads))
    index_query, index_key = (random((setting.B, 1, setting.H_kv, INDEX_DIM), seed) for seed in (3, 4))
    with torch.no_grad():
        attend_us, step_us = indexed(setting, (q, k, v), (index_query, index_key), effort)
        plain = filled(setting, 0)
        mean_us = replayed_us({"mean": [partial(plain.attend, q)]}, effort)["mean"]
        del plain
        shape = (setting.B, setting.H_kv, setting.T, setting.D)
        dense_k, dense_v = (random(shape, seed) for seed in range(2))
        dense = partial(dense_step, SDPBackend.CUDNN_ATTENTION, q.transpose(1, 2), dense_k, dense_v)
        dense_us = replayed_us({"dense": [dense]}, effort)["dense"]
    yield {
        **where(),
        "B": setting.B,
        "T": setting.T,
        "H": setting.H,
        "H_kv": setting.H_kv,
        "D": setting.D,
        "top_k": setting.k,
        "max_top_nodes": setting.M,
        "index_dtype": str(setting.index_dtype).removeprefix("torch."),
        "attend_us": attend_us,
        "step_us": step_us,
        "mean_us": mean_us,
        "dense_us": dense_us,
        "of_dense": attend_us / dense_us,
    }


def main(argv: Sequence[str] | None = None, settings: Sequence[Setting] = SETTINGS) -> int:
    """Prints the table and writes it where ``--csv`` says."""
    parser = make_parser(
        "time of a step of decoding with an index, beside dense attention",
        rounds=3,
        quick="the first setting alone, few repetitions",
        case=True,
    )
    arguments = parse_for_gpu(parser, argv)
    effort = timing.QUICK if arguments.quick else timing.Effort(rounds=arguments.rounds)
    return measure_each(
        settings[:1] if arguments.quick else settings,
        lambda x: f"B={x.B} T={x.T} H={x.H}/{x.H_kv} k={x.k} M={x.M} {x.index_dtype}",
        lambda x: measure(x, effort),
        arguments.csv,
        arguments.case,
    )


if __name__ == "__main__":
    sys.exit(main())
