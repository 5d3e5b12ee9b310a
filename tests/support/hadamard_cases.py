"""Problems of the hadamard ops (docs/semantics/hadamard.md §4.1), with the bytes they must move and their tolerance."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tests.support.cases import Case, normal
from tests.support.layouts import LAYOUTS

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
LENGTHS = tuple(1 << k for k in range(16))


def tolerance(x: torch.Tensor, scale: float | None = None) -> tuple[float, torch.Tensor]:
    """(rtol, atol [..., 1]) of a transform of x [..., n] against float64.

    It allows one rounding to the dtype, and log2(n) + 1 roundings of the arithmetic, each at most u times the sum of
    the
    magnitudes: 2u for every stage, since tensor cores cut their sums off. fp16 results below its normal range
    err by half a subnormal.
    """
    n = x.shape[-1]
    scale = n**-0.5 if scale is None else scale
    unit = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
    magnitudes = x.double().abs().sum(dim=-1, keepdim=True) * abs(scale)
    info = torch.finfo(x.dtype)
    return info.eps / 2 * (1 + 2**-8), unit * (
        math.log2(n) + 2
    ) * magnitudes + info.smallest_normal * info.eps


def grouped_tolerance(x: torch.Tensor, group: int, scale: float | None = None) -> tuple[float, torch.Tensor]:
    """The same for x [B, H, S, D] and groups of heads; atol [B, H, S, 1]."""
    batch, heads, length, width = x.shape
    rows = x.reshape(batch, heads // group, group, length, width).transpose(2, 3).flatten(-2)
    rtol, atol = tolerance(rows, scale)
    return rtol, atol.transpose(1, 2).repeat_interleave(group, dim=2).transpose(1, 2)


def butterflies(x: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """What one writes without this package: log2(n) stages of sums and differences in fp32 (fp64 for fp64)."""
    n = x.shape[-1]
    y = x.double() if x.dtype == torch.float64 else x.float()
    for bit in range(n.bit_length() - 1):
        low, high = y.unflatten(-1, (n >> (bit + 1), 2, 1 << bit)).unbind(-2)
        y = torch.stack((low + high, low - high), dim=-2).flatten(-3)
    return (y * (n**-0.5 if scale is None else scale)).to(x.dtype)


def grouped_butterflies(x: torch.Tensor, group: int, scale: float | None = None) -> torch.Tensor:
    """The same on groups of heads, x [B, H, S, D]."""
    rows = x.unflatten(1, (x.shape[1] // group, group)).transpose(2, 3).flatten(-2)
    return butterflies(rows, scale).unflatten(-1, (group, x.shape[-1])).transpose(2, 3).flatten(1, 2)


@dataclass(frozen=True, kw_only=True)
class HadamardCase(Case):
    """x ``shape`` = [..., n] in the named layout; ``magnitude`` multiplies the standard normal values."""

    shape: tuple[int, ...]
    layout: str = "contiguous"
    scale: float | None = None
    magnitude: float = 1.0

    def make_inputs(self, device: str | torch.device, seed: int = 0) -> tuple[torch.Tensor, float | None]:
        """(x, scale) of ``torch.ops.htree.hadamard_transform``."""
        x = normal(self.shape, self.dtype, device, seed, self.magnitude)
        return LAYOUTS[self.layout](x), self.scale

    def bytes(self) -> int:
        """Each element read and written once."""
        return 2 * math.prod(self.shape) * self.dtype.itemsize

    def flops(self) -> int:
        """log2(n) additions and one product per element."""
        return math.prod(self.shape) * self.shape[-1].bit_length()

    @property
    def shapes(self) -> str:
        """x[..., n]."""
        return f"x{list(self.shape)}"


def _whole_qkv(x: torch.Tensor) -> torch.Tensor:
    """x [B, H, S, D] as the query part of a projection [B, S, 3, H, D]."""
    batch, heads, length, width = x.shape
    buffer = torch.full((batch, length, 3, heads, width), math.nan, dtype=x.dtype, device=x.device)
    view = buffer[:, :, 0].transpose(1, 2)
    return view.copy_(x)


#: Layouts of x [B, H, S, D] beside the general ones.
GROUPED_LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **LAYOUTS,
    "fused_projection": _whole_qkv,
}


@dataclass(frozen=True, kw_only=True)
class GroupedHadamardCase(Case):
    """x ``shape`` = [B, H, S, D] in the named layout, ``group`` heads joined."""

    shape: tuple[int, int, int, int]
    group: int
    layout: str = "contiguous"
    scale: float | None = None

    def make_inputs(
        self, device: str | torch.device, seed: int = 0
    ) -> tuple[torch.Tensor, int, float | None]:
        """(x, group, scale) of ``torch.ops.htree.grouped_hadamard``."""
        x = normal(self.shape, self.dtype, device, seed)
        return GROUPED_LAYOUTS[self.layout](x), self.group, self.scale

    def bytes(self) -> int:
        """Each element read and written once."""
        return 2 * math.prod(self.shape) * self.dtype.itemsize

    def flops(self) -> int:
        """log2(G·D) additions and one product per element."""
        return math.prod(self.shape) * (self.group * self.shape[-1]).bit_length()

    @property
    def shapes(self) -> str:
        """x[B,H,S,D] and G."""
        return f"x{list(self.shape)} G={self.group}"


#: Every length in every dtype, with a number of rows that no tile divides; short rows fill several blocks.
CASES = [
    HadamardCase(name=f"{rows}x{n}", dtype=dtype, shape=(rows, n))
    for n in LENGTHS
    for rows in ((1, 3 if n > 4096 else 37, 1001) if n <= 512 else (1, 3 if n > 4096 else 37))
    for dtype in DTYPES
] + [
    HadamardCase(name=name, dtype=dtype, shape=shape, scale=scale, magnitude=magnitude)
    for name, shape, scale, magnitude in (
        ("vector", (64,), None, 1.0),
        ("four_dims", (2, 3, 5, 128), None, 1.0),
        ("unit_scale", (7, 256), 1.0, 1.0),
        ("zero_scale", (7, 256), 0.0, 1.0),
        ("negative_scale", (7, 32), -0.25, 1.0),
        ("large", (5, 16384), None, 2000.0),
        ("tiny", (5, 128), None, 2.0**-14),
        ("no_rows", (0, 128), None, 1.0),
        ("no_rows_inside", (4, 0, 8), None, 1.0),
    )
    for dtype in DTYPES
]

#: Strided and misaligned inputs; three dims of rows, and four, which need a copy first.
LAYOUT_CASES = [
    HadamardCase(name=f"{layout}_{'x'.join(map(str, shape))}", dtype=dtype, shape=shape, layout=layout)
    for layout in LAYOUTS
    for shape in (
        (6, 2),
        (37, 8),
        (5, 3, 16),
        (9, 64),
        (2, 3, 4, 128),
        (2, 2, 2, 3, 256),
        (3, 1024),
        (3, 8192),
    )
    for dtype in DTYPES
]

GROUPED_CASES = [
    GroupedHadamardCase(
        name=f"{name}_{layout}_g{group}", dtype=dtype, shape=shape, group=group, layout=layout
    )
    for name, shape, group in (
        ("mini", (2, 4, 3, 2), 2),
        ("one_channel", (2, 8, 5, 1), 8),
        ("heads", (2, 8, 11, 64), 1),
        ("pair", (2, 8, 11, 64), 2),
        ("four", (1, 8, 33, 128), 4),
        ("all", (2, 8, 5, 16), 8),
        ("wide", (1, 16, 3, 256), 16),
        ("longest", (1, 64, 2, 512), 64),
    )
    for layout in GROUPED_LAYOUTS
    for dtype in DTYPES
] + [GroupedHadamardCase(name="empty", dtype=torch.float32, shape=(2, 4, 0, 8), group=2)]

#: Sizes of the results table by device type.
BENCHMARK_CASES: dict[str, list[HadamardCase]] = {
    "cuda": [
        HadamardCase(name=f"{rows}x{n}", dtype=torch.bfloat16, shape=(rows, n))
        for rows, n in (
            (262144, 128),
            (131072, 256),
            (32768, 1024),
            (8192, 4096),
            (4096, 8192),
            (1024, 32768),
        )
    ]
    + [
        HadamardCase(name=f"{rows}x{n}", dtype=torch.float16, shape=(rows, n))
        for rows, n in ((262144, 128), (1024, 32768))
    ]
    + [HadamardCase(name=f"{rows}x128", dtype=torch.bfloat16, shape=(rows, 128)) for rows in (32, 512, 8192)]
    + [HadamardCase(name="131072x128", dtype=torch.float32, shape=(131072, 128))],
    "cpu": [
        HadamardCase(name=f"{2**21 // n}x{n}", dtype=dtype, shape=(2**21 // n, n))
        for dtype in (torch.float32, torch.bfloat16)
        for n in (16, 64, 128, 512, 4096)
    ],
}

BENCHMARK_GROUPED_CASES: dict[str, list[GroupedHadamardCase]] = {
    "cuda": [GroupedHadamardCase(name="h32_g4", dtype=torch.bfloat16, shape=(1, 32, 32768, 128), group=4)],
    "cpu": [GroupedHadamardCase(name="h8_g4", dtype=torch.float32, shape=(1, 8, 2048, 128), group=4)],
}
