"""Problems of ``fp8_gemm`` and ``fp8_gemm_exact``, with their tolerances (docs/semantics/fp8.md §3.3, §3.5)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from htree_ops.reference import fp8 as reference
from tests.support.cases import Case, normal
from tests.support.compare import assert_close_spec

FP8 = torch.float8_e4m3fn
OUTPUTS = (torch.float16, torch.bfloat16, torch.float32)
#: γ of property 4: the error that a sum may have, relative to the sum of magnitudes, where it is kept in fp32.
EXACT_SUM = 2.0**-20
#: The same for the FP8 tensor cores of sm_90 on random data: 2^-11.3 was measured for 32 products of normal
#: values, the worst length, and 2^-11.8 for 128.
TENSOR_CORE_SUM = 2.0**-10
#: On values of one sign, whose sums are cut off again and again: 2^-8.98 was measured for 384 terms.
ONE_SIGN_SUM = 2.0**-8.9
#: The bound for any codes, beside the K·2^-31 of the fp32 sums: one large term cuts off whole what is far below it.
ANY_SUM = 131 * 2.0**-13


def sum_error(device: str) -> float:
    """γ of ``fp8_gemm`` on a device."""
    return TENSOR_CORE_SUM if torch.device(device).type == "cuda" else EXACT_SUM


def assert_product(result: Tensor, inputs: tuple[Any, ...], gamma: float) -> None:
    """Property 4: |error| <= u_out·|ref| + γ·Σ|a·b| + half the smallest subnormal, in dequantised units."""
    a, b, a_scale, b_scale, output_dtype = inputs[:5]
    expected = reference.gemm(a, b, a_scale, b_scale)
    magnitudes = reference.gemm(a.float().abs(), b.float().abs(), a_scale, b_scale)
    info = torch.finfo(output_dtype)
    fits = ~(expected.abs() >= info.max)  # beyond, the result is infinite
    bound = gamma * magnitudes + info.smallest_normal * info.eps / 2
    assert_close_spec(
        torch.where(fits, result.double(), 0.0),
        torch.where(fits, expected, 0.0),
        info.eps / 2 * (1 + 2**-10),
        torch.where(fits, bound, 0.0),
    )
    assert result.dtype == output_dtype
    assert result.is_contiguous()


@dataclass(frozen=True, kw_only=True)
class FP8GemmCase(Case):
    """a [m, k] times b [k, n]; ``dtype`` is that of the result.

    Attributes:
        scales: "tensor", "channel", or "mixed": one for a, one per column for b.
        layout: of b: "column" or "row" major, or "sliced" out of larger matrices, which is misaligned.
        deviation: standard deviation of the codes' values.
    """

    m: int
    n: int
    k: int
    scales: str = "tensor"
    layout: str = "column"
    deviation: float = 16.0

    def make_inputs(self, device: str | torch.device, seed: int = 0) -> tuple[Any, ...]:
        """(a, b, a_scale, b_scale, output_dtype) of ``torch.ops.htree.fp8_gemm``."""
        extra = 3 if self.layout == "sliced" else 0
        a = normal((self.m + extra, self.k + extra), torch.float32, device, seed, self.deviation)
        b = normal((self.n + extra, self.k + extra), torch.float32, device, seed + 1000, self.deviation)
        a, b = (x.clamp(-448, 448).to(FP8)[extra:, extra:] for x in (a, b))
        b = b.t().contiguous() if self.layout == "row" else b.t()
        single = torch.tensor(3.0, device=device)
        rows = torch.linspace(0.5, 40.0, self.m, device=device)[:, None]
        columns = torch.linspace(50.0, 2.0, self.n, device=device)[None, :]
        a_scale = rows if self.scales == "channel" else single
        b_scale = single * 5 if self.scales == "tensor" else columns
        return a, b, a_scale, b_scale, self.dtype

    def bytes(self) -> int:
        """Both operands and the result once each."""
        return self.m * self.k + self.k * self.n + self.m * self.n * self.dtype.itemsize

    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def shapes(self) -> str:
        return f"[{self.m}, {self.k}] x [{self.k}, {self.n}] {self.scales}"


#: Sizes around the tiles: 16 to 256 rows, 64 to 128 columns, k-blocks of 128 shared out to one, two and four blocks,
#: packs of 16.
SIZES = (
    (1, 1, 1),
    (1, 64, 128),
    (5, 70, 33),
    (16, 64, 16),
    (17, 96, 256),
    (33, 200, 100),
    (64, 128, 512),
    (7, 90, 1100),
    (40, 130, 700),
    (65, 130, 144),
    (100, 72, 90),
    (128, 256, 128),
    (300, 144, 272),
    (257, 129, 1000),
    (1100, 136, 160),
    (60, 130, 7200),
    (60, 6000, 520),
    (120, 6200, 300),
    (1100, 1500, 160),
)
CASES = [
    FP8GemmCase(
        name=f"{m}x{n}x{k}_{scales}_{layout}", dtype=dtype, m=m, n=n, k=k, scales=scales, layout=layout
    )
    for i, (m, n, k) in enumerate(SIZES)
    for j, (scales, layout) in enumerate(
        (("tensor", "column"), ("channel", "row"), ("mixed", "sliced"), ("channel", "column"))
    )
    for dtype in (OUTPUTS[(i + j) % 3], OUTPUTS[(i + j + 1) % 3])
] + [
    FP8GemmCase(name=name, dtype=dtype, m=m, n=n, k=k, deviation=deviation)
    for name, m, n, k, deviation in (
        ("no_rows", 0, 8, 16, 16.0),
        ("no_columns", 8, 0, 16, 16.0),
        ("nothing_to_sum", 8, 24, 0, 16.0),
        ("zeros", 70, 32, 64, 0.0),
        ("largest", 70, 32, 64, 400.0),
        ("subnormal", 70, 32, 64, 0.004),
    )
    for dtype in OUTPUTS
]

#: A case for every kernel of Hopper (tests/test_matrix_configs.py), ragged in all directions. Rings are filled more
#: than once. Kernels with swap AB get rows of c that tensor copies store, and others that they do not. Pairs of blocks
#: split tiles along K after whole waves, without any before, and a single tile.
KERNEL_CASES = [
    FP8GemmCase(
        name=f"{m}x{n}x{k}", dtype=OUTPUTS[i % 3], m=m, n=n, k=k, scales="channel" if i % 2 else "tensor"
    )
    for i, (m, n, k) in enumerate(
        (
            # streams of 16, 32, 64, 80, 96 rows, k in one, two and four parts; of 128 and 144; two to a multiprocessor
            (3, 5992, 2100),
            (1, 72, 520),
            (5, 70, 1100),
            (17, 5002, 4100),
            (33, 1496, 520),
            (17, 1000, 2100),
            (33, 6002, 7200),
            (513, 194, 1100),
            (500, 70, 2100),
            (65, 8200, 2100),
            (385, 578, 1600),
            (65, 1500, 1100),
            (81, 8200, 4100),
            (81, 3000, 2100),
            (1100, 88, 2100),
            (200, 600, 4100),
            (129, 4174, 2100),
            (3, 12650, 1100),
            (17, 14090, 1100),
            (65, 14984, 1100),
            (81, 16072, 1100),
            # plain tiles
            (17, 4232, 2100),
            (500, 578, 1600),
            (130, 70, 144),
            (513, 904, 1600),
            (770, 3560, 272),
            (770, 1154, 1100),
            (770, 3464, 400),
            (500, 6664, 400),
            (1100, 3332, 272),
            (1100, 1672, 1100),
            (193, 8472, 700),
            (500, 4994, 700),
            (150, 8456, 700),
            (770, 3074, 520),
            # tiles with swap AB
            (770, 3586, 144),
            (450, 12568, 144),
            (1030, 5636, 144),
            (770, 8328, 144),
            (150, 12678, 700),
            (300, 6736, 520),
            (1100, 6664, 144),
            (1030, 7496, 144),
            (600, 4232, 520),
            (1500, 2056, 520),
            # tiles with swap AB in clusters
            (129, 5336, 1100),
            (450, 12674, 144),
            (570, 13442, 1100),
            (600, 11176, 144),
            (2000, 4456, 144),
            # tiles split along K
            (500, 578, 2100),
            (33825, 10, 1100),
            (81, 5950, 3100),
            (500, 10120, 2100),
            (524, 16904, 2100),
            (50690, 90, 520),
            # a stream of 160 rows; tiles with swap AB of 160 and 200
            (150, 3586, 3100),
            (630, 4168, 520),
            (1190, 2502, 2100),
        )
    )
]

BENCHMARK_CASES: dict[str, list[FP8GemmCase]] = {
    "cuda": [
        FP8GemmCase(name=f"{m}x{n}x{k}", dtype=torch.bfloat16, m=m, n=n, k=k)
        for m, n, k in (
            (4096, 4096, 4096),
            (8192, 8192, 8192),
            (1, 4096, 4096),
            (16, 4096, 4096),
            (64, 4096, 4096),
            (96, 4096, 4096),
            (192, 4096, 4096),
            (256, 4096, 4096),
            (384, 4096, 4096),
            (768, 4096, 4096),
            (4096, 2112, 7168),
            (4096, 7168, 1536),
            (4096, 24576, 1536),
        )
    ]
    + [
        FP8GemmCase(
            name="4096x4096x4096_rows", dtype=torch.bfloat16, m=4096, n=4096, k=4096, scales="channel"
        )
    ],
    "cpu": [FP8GemmCase(name="256x512x1024", dtype=torch.float32, m=256, n=512, k=1024)],
}
