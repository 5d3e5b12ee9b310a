"""Compressed decode attention against dense decode attention (cuDNN, FlashAttention-2), and packing against a copy.

Run: ``python -m benchmarks run compressed_kv --csv PATH``; ``--device cpu`` on a CPU.
Dense attention reads another cache and computes another function, so its rows say so. "decompress + SDPA" computes
the same from the same compressed rows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness.baselines import copy_of, dense_steps
from benchmarks.harness.suite import Benchmark, Candidate
from htree_ops.reference import compressed_kv as reference
from tests.support.compressed_kv_cases import (
    BENCHMARK_COMPRESS_CASES,
    BENCHMARK_DECODE_CASES,
    CompressCase,
    DecodeCase,
    assert_decode,
)

#: Rows that are compared with the reference before timing.
CHECKED_ROWS = 256

op = torch.ops.htree


def dense_inputs(case: DecodeCase, device: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, H, 1, D] and the uncompressed keys and values [B, H_kv, S + W, D]."""
    return replace(case, four_d=True).dense(device, seed)


def decompressed_attention(case: DecodeCase, q: Tensor, *inputs: Any) -> Tensor:
    """What one does without the op: unpack, append the window, attend."""
    k_rows, v_rows, (k_win, v_win) = inputs[:3], inputs[3:6], inputs[6:8]
    dense_k = op.kv_decompress(*k_rows, case.D, case.k_keep, case.k_bits, q.dtype)
    dense_v = op.kv_decompress(*v_rows, case.D, case.v_keep, case.v_bits, q.dtype)
    k, v = torch.cat([dense_k, k_win], 2), torch.cat([dense_v, v_win], 2)
    return F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]


def check_decode(case: DecodeCase, inputs: tuple[Any, ...], result: Any) -> None:
    """Checks the first sequence and its first K/V head against float64; all would need hundreds of gigabytes."""
    out, lse = result if isinstance(result, tuple) else (result, None)
    heads = case.H // case.H_kv
    part = replace(case, B=1, H=heads, H_kv=1)
    head_of = [x[:1, :1] if isinstance(x, Tensor) else x for x in inputs[1:9]]
    small = (inputs[0][:1, :heads], *head_of, *inputs[9:])
    if lse is None:
        lse = reference.kv_decode_attention(*small, **part.options(), pairs=case.dtype)[1]
        lse = lse.float()
    else:
        lse = lse[:1, :heads]
    assert_decode(part, (out[:1, :heads], lse), small)


def check_rows(inputs: tuple[Any, ...], result: tuple[Tensor, Tensor, Tensor]) -> None:
    x, keep, bits, _ = inputs
    expected = reference.kv_compress(x[:1, :1, :CHECKED_ROWS], keep, bits)
    for actual, part in zip(result, expected, strict=True):
        assert torch.equal(actual[:1, :1, :CHECKED_ROWS], part)


def decode_benchmark(case: DecodeCase, device: str) -> Benchmark:
    case = replace(case, packer=op.kv_compress)
    dense = dense_steps(device, dense_inputs)
    if device == "cpu":
        dense.append(Candidate("decompress + SDPA", partial(decompressed_attention, case)))
    ours = Candidate("htree_ops", partial(op.kv_decode_attention, **case.options()))
    return Benchmark("kv_decode_attention", case, ours, dense, partial(check_decode, case))


def compress_benchmark(case: CompressCase) -> Benchmark:
    ours = Candidate("htree_ops", op.kv_compress)
    return Benchmark("kv_compress", case, ours, [Candidate("copy", copy_of, same_function=False)], check_rows)


def make_benchmarks(device: str) -> list[Benchmark]:
    """All benchmarks of the family on ``device`` ("cpu" or "cuda")."""
    return [decode_benchmark(case, device) for case in BENCHMARK_DECODE_CASES[device]] + [
        compress_benchmark(case) for case in BENCHMARK_COMPRESS_CASES[device]
    ]
