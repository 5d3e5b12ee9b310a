"""What compression does to attention: outputs of compressed decode attention against the uncompressed cache.

Run: ``python -m benchmarks.compressed_kv_error --csv PATH``. Queries and values are standard normal. So are the keys,
or one channel in 29 is ten times as large, as keys of language models have it. The reference is float64 attention over
the same keys and values before they are pruned and quantised. Figures are reported, never asserted: they depend on the
data.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from benchmarks.harness.calls import relative_error
from benchmarks.harness.plain_rows import Row, make_parser, measure_each
from htree_ops.ops.compressed_kv import kv_compress, kv_decode_attention
from htree_ops.reference import compressed_kv as reference
from htree_ops.reference.hadamard import grouped_hadamard
from tests.support.cases import normal
from tests.support.compressed_kv_cases import rows_with_outliers


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How keys and values are stored: sparsity in [0, 1), bits per kept channel, transformed keys or not."""

    sparsity: float
    bits: int
    transformed: bool = False


SETTINGS = [
    *(Setting(sparsity=sparsity, bits=bits) for sparsity in (0.0, 0.5, 0.7) for bits in (16, 8, 4)),
    *(Setting(sparsity=0.0, bits=bits, transformed=True) for bits in (8, 4)),
]


def measure(setting: Setting, keys: str, tokens: int, device: str) -> Row:
    """Measures two sequences of ``tokens`` tokens: 8 query heads on 2 K/V heads, 128 channels, float16.

    ``output_error`` and ``key_error`` are relative L2 errors of the outputs and of the stored keys, ``lse_error`` is
    the mean absolute error of the natural log-sum-exp, ``bytes_per_element`` that of stored keys and values.
    """
    shape = (2, 2, tokens, 128)
    make_keys = rows_with_outliers if keys == "outliers" else normal
    q = normal((2, 8, 128), torch.float16, device, seed=1)
    k, v = make_keys(shape, torch.float16, device, seed=2), normal(shape, torch.float16, device, seed=3)
    group = 1 if setting.transformed else 0
    stored = grouped_hadamard(k, 1).half() if group else k
    keep = reference.num_kept(128, setting.sparsity)
    k_rows, v_rows = kv_compress(stored, keep, setting.bits), kv_compress(v, keep, setting.bits)
    nothing = k[:, :, :0]
    out, lse = kv_decode_attention(
        q, *k_rows, *v_rows, nothing, nothing, k_keep=keep, v_keep=keep, k_bits=setting.bits, v_bits=setting.bits,
        hadamard_group=group,
    )  # fmt: skip
    present = torch.ones(2, tokens, dtype=torch.bool, device=device)
    expected, expected_lse = reference.attention(q, k, v, present)
    decoded = reference.kv_decompress(*k_rows, 128, keep, setting.bits, torch.float64, torch.float16)
    row_bytes = 16 + reference.row_bytes(keep, setting.bits) + (0 if setting.bits == 16 else 2)
    return {
        "keys": keys,
        **asdict(setting),
        "bytes_per_element": row_bytes / 128,
        "key_error": relative_error(grouped_hadamard(decoded, 1) if group else decoded, k),
        "output_error": relative_error(out, expected),
        "lse_error": float((lse.double() - expected_lse).abs().mean()),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and writes it where ``--csv`` says."""
    parser = make_parser("errors of compressed decode attention against the dense cache")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args(argv)
    problems = [(setting, keys) for keys in ("normal", "outliers") for setting in SETTINGS]
    return measure_each(
        problems,
        lambda x: f"{x[1]} keys",
        lambda x: [measure(*x, arguments.tokens, arguments.device)],
        arguments.csv,
    )


if __name__ == "__main__":
    sys.exit(main())
