"""``fp8_gemm`` against ``torch._scaled_mm`` over the matrix sizes of transformers: where cuBLASLt is faster.

Run: ``python -m benchmarks.fp8_gemm_grid --csv PATH`` on a GPU with FP8 tensor cores; about a minute. Both get the same
codes and one scale per operand, cuBLASLt its reciprocal, and give bf16 without fast accumulation. They are timed by
graph replays, in turns of a few milliseconds. Figures are reported, never asserted.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import partial

import torch

import htree_ops  # noqa: F401 - registers the ops
from benchmarks.harness import timing
from benchmarks.harness.calls import replayed_us
from benchmarks.harness.plain_rows import Row, make_parser, parse_for_gpu, print_rows, where
from benchmarks.harness.progress import progress
from tests.support.fp8_gemm_cases import FP8GemmCase

#: (n, k) of the weights and the rows that meet them: projections of models with 2048 to 8192 channels, and long sums.
FEW = (1, 16, 32, 64, 96, 128)
SOME = (144, 160, 192, 224, 256, 300, 384, 512, 600, 768)
MANY = (1024, 1200, 2048)
SHAPES: tuple[tuple[int, int, tuple[int, ...]], ...] = (
    (4096, 4096, (*FEW, *SOME, *MANY, 4096)),
    (8192, 8192, (*FEW, *SOME, 1024, 8192)),
    (5120, 5120, (*FEW, *SOME, *MANY)),
    (3584, 3584, (*FEW, *SOME, *MANY)),
    (2048, 2048, (*FEW, *SOME, *MANY)),
    (6144, 4096, (*FEW, *SOME, *MANY)),
    (14336, 4096, (*FEW, *SOME, *MANY)),
    (28672, 4096, (*FEW, *SOME, 1024)),
    (4096, 14336, (*FEW, *SOME, *MANY)),
    (11264, 4096, (*FEW, *SOME, *MANY)),
    (10240, 8192, (*FEW, *SOME, 1024)),
    (18944, 3584, (*FEW, *SOME, 1024)),
    (1024, 4096, (*FEW, *SOME, *MANY)),
    (4096, 512, (*FEW, *SOME, *MANY)),
    (2112, 7168, (*FEW, *SOME, *MANY, 4096)),
    (7168, 1536, (*FEW, *SOME, *MANY, 4096)),
    (24576, 1536, (*FEW, *SOME, 1024, 4096)),
    (128, 65536, (16, 128)),
    (512, 32768, (64, 512)),
)


def measure(m: int, n: int, k: int, milliseconds: float) -> Row:
    """Times one size, [m, k] by [k, n], by graph replays in turns of about ``milliseconds``."""
    case = FP8GemmCase(name="grid", dtype=torch.bfloat16, m=m, n=n, k=k)
    inputs = [case.make_inputs("cuda", seed) for seed in range(timing.num_input_sets(case.bytes()))]
    ours = [partial(torch.ops.htree.fp8_gemm, *x) for x in inputs]
    cublas = [
        partial(torch._scaled_mm, a, b, 1 / a_scale, 1 / b_scale, out_dtype=dtype)
        for a, b, a_scale, b_scale, dtype in inputs
    ]
    effort = timing.Effort(rounds=5, burst=1000, turn_ms=milliseconds, warm_up_ms=2.0)
    times = replayed_us({"ours": ours, "cuBLASLt": cublas}, effort)
    return {
        **where(),
        "m": m,
        "n": n,
        "k": k,
        "fp8_gemm_us": times["ours"],
        "scaled_mm_us": times["cuBLASLt"],
        "speedup": times["cuBLASLt"] / times["ours"],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table, the mean and what cuBLASLt computes faster; writes the rows where ``--csv`` says."""
    parser = make_parser("fp8_gemm against torch._scaled_mm over a grid of sizes")
    parser.add_argument("--milliseconds", type=float, default=2.0, help="length of a turn")
    arguments = parse_for_gpu(parser, argv)
    shapes = [(m, n, k) for n, k, sizes in SHAPES for m in sizes]
    names = progress(shapes, lambda shape: "x".join(map(str, shape)))
    rows = print_rows((measure(*shape, arguments.milliseconds) for shape in names), arguments.csv)
    mean = math.exp(sum(math.log(row["speedup"]) for row in rows) / len(rows))
    slower = sorted((row for row in rows if row["speedup"] < 1), key=lambda row: row["speedup"])
    print(f"{len(rows)} sizes, geometric mean {mean:.3f}; cuBLASLt is faster at {len(slower)}:")
    print(", ".join(f"{row['m']}x{row['n']}x{row['k']} {row['speedup']:.2f}" for row in slower))
    return 0


if __name__ == "__main__":
    sys.exit(main())
