"""Problems of the fp8 quantisation ops (docs/semantics/fp8.md §3.3), with the bytes they must move."""

import math
from dataclasses import dataclass

import torch

from tests.support.cases import Case, normal
from tests.support.layouts import LAYOUTS

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_VALUE = 448.0


def codes_of(q: torch.Tensor) -> torch.Tensor:
    """float8 codes as uint8, for comparison."""
    return q.view(torch.uint8)


def every_pattern(dtype: torch.dtype, device: str | torch.device = "cpu") -> torch.Tensor:
    """All 2^16 values of float16 or bfloat16, in the order of their bits."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32, device=device).to(torch.int16).view(dtype)


def round_trip_bound(x: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Property 5: how far a value may be from its code's, elementwise, in float64.

    u8 = 1/17 relative for normal codes, half the distance of subnormal ones (2^-10 of 448 / largest) below; then the
    roundings of the product and the quotient in fp32 and of the result to the dtype of x.
    """
    magnitude = x.double().abs()
    coarse = torch.maximum(magnitude / 17, largest.double() * 2.0**-10 / MAX_VALUE) * (1 + 2.0**-20)
    unit = torch.finfo(x.dtype).eps / 2
    return (
        coarse + (magnitude + coarse) * unit + torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps
    )


def eager_quantize(
    x: torch.Tensor, scale: torch.Tensor | None, granularity: str, dim: int, block: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What one writes without this package, for finite x and blocks that divide: (q, scale, n_overflow)."""
    if scale is None:
        if granularity == "tensor":
            largest = x.abs().max().float()
        elif granularity == "channel":
            largest = x.abs().amax(dim, keepdim=True).float()
        else:
            blocks = x.abs().movedim(dim, -1).unflatten(-1, (-1, block))
            largest = blocks.amax(-1).movedim(-1, dim).float()
        scale = torch.where(largest == 0, 1.0, torch.full_like(largest, MAX_VALUE) / largest)
        scale = scale.clamp(2.0**-126, 2.0**127)
    full = scale.repeat_interleave(block, dim) if granularity == "block" else scale
    y = x.float() * full
    q = y.clamp(-MAX_VALUE, MAX_VALUE).to(torch.float8_e4m3fn)
    return q, scale, (y.abs() > 464).sum(dtype=torch.int32)


def eager_dequantize(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, block: int) -> torch.Tensor:
    """The inverse, for a scale that broadcasts or has one entry per block along the last dim."""
    full = scale
    if scale.dim() and scale.shape[-1] not in (1, q.shape[-1]):
        full = scale.repeat_interleave(block, -1)
    return (q.float() / full).to(dtype)


def eager_fake_quant(
    x: torch.Tensor, scale: torch.Tensor | None, granularity: str, dim: int, block: int
) -> torch.Tensor:
    """x quantised and dequantised, in the dtype of x."""
    q, used, _ = eager_quantize(x, scale, granularity, dim, block)
    return eager_dequantize(q, used, x.dtype, block)


@dataclass(frozen=True, kw_only=True)
class FP8Case(Case):
    """x ``shape`` in the named layout, normal values times ``magnitude``; ``scale`` for all groups, or computed."""

    shape: tuple[int, ...]
    granularity: str = "tensor"
    dim: int = -1
    block: int = 128
    layout: str = "contiguous"
    magnitude: float = 1.0
    scale: float | None = None

    def scale_shape(self) -> list[int]:
        """Shape of the scales."""
        if self.granularity == "tensor" or not self.shape:
            return []
        sizes = list(self.shape)
        sizes[self.dim] = 1 if self.granularity == "channel" else -(-sizes[self.dim] // self.block)
        return sizes

    def make_inputs(
        self, device: str | torch.device, seed: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor | None, str, int, int]:
        """(x, scale, granularity, dim, block) of ``torch.ops.htree.fp8_quantize``."""
        x = LAYOUTS[self.layout](normal(self.shape, self.dtype, device, seed, self.magnitude))
        scale = None
        if self.scale is not None:
            generator = torch.Generator(device=device).manual_seed(seed + 1)
            spread = torch.rand(self.scale_shape(), device=device, generator=generator) + 0.5
            scale = spread * self.scale
        return x, scale, self.granularity, self.dim, self.block

    def bytes(self) -> int:
        """Each element is read and its code written once; the scale of a tensor or column needs a second read."""
        numel = math.prod(self.shape)
        by_rows = self.granularity != "tensor" and self.dim in (-1, len(self.shape) - 1)
        reads = 1 if by_rows or self.scale is not None else 2
        return numel * (reads * self.dtype.itemsize + 1) + 4 * math.prod(self.scale_shape())

    def flops(self) -> int:
        """A comparison, a product and a rounding per element."""
        return 3 * math.prod(self.shape)

    @property
    def shapes(self) -> str:
        """x[...] and what shares a scale."""
        return f"x{list(self.shape)} per {self.granularity}"


#: (granularity, dim, block) that a tensor of two dims or more can have.
GROUPINGS = (
    ("tensor", -1, 128),
    ("channel", -1, 128),
    ("channel", 0, 128),
    ("block", -1, 128),
    ("block", -1, 3),
    ("block", 0, 2),
)
#: Every kernel: lengths up to and beyond each capacity, on and off the 16-byte grid, columns, three dims.
SHAPES = (
    (1, 1),
    (3, 5),
    (37, 64),
    (9, 128),
    (5, 256),
    (3, 500),
    (7, 512),
    (6, 1024),
    (3, 1000),
    (3, 2048),
    (2, 3001),
    (2, 4096),
    (3, 8192),
    (2, 16384),
    (2, 32768),
    (2, 40000),
    (1, 70001),
    (300, 40),
    (257, 33),
    (2, 3, 128),
    (4, 130, 24),
    (2, 5, 7),
    (3, 4, 1),
)

CASES = [
    FP8Case(
        name=f"{'x'.join(map(str, shape))}_{granularity}{dim}_{block}",
        dtype=dtype,
        shape=shape,
        granularity=granularity,
        dim=dim,
        block=block,
    )
    for shape in SHAPES
    for granularity, dim, block in GROUPINGS
    for dtype in DTYPES
] + [
    FP8Case(name=name, dtype=dtype, shape=shape, granularity=g, dim=dim, magnitude=magnitude, scale=scale)
    for name, shape, g, dim, magnitude, scale in (
        ("scalar", (), "tensor", -1, 1.0, None),
        ("scalar_channel", (), "channel", -1, 1.0, None),
        ("vector", (77,), "channel", 0, 1.0, None),
        ("empty", (0,), "tensor", -1, 1.0, None),
        ("empty_rows", (0, 8), "channel", -1, 1.0, None),
        ("empty_row", (3, 0), "channel", -1, 1.0, None),
        ("empty_blocks", (3, 0), "block", -1, 1.0, None),
        ("zeros", (4, 96), "channel", -1, 0.0, None),
        ("zero_tensor", (4, 96), "tensor", -1, 0.0, None),
        ("tiny", (4, 96), "tensor", -1, 2.0**-12, None),
        ("large", (4, 96), "channel", -1, 2.0**12, None),
        ("given_tensor", (5, 1003), "tensor", -1, 1.0, 100.0),
        ("given_rows", (5, 1024), "channel", -1, 1.0, 300.0),
        ("given_columns", (64, 136), "channel", 0, 1.0, 300.0),
        ("given_blocks", (5, 1000), "block", -1, 1.0, 300.0),
        ("given_column_blocks", (301, 24), "block", 0, 1.0, 30.0),
        ("given_matrices", (3, 140, 16), "block", 1, 1.0, 30.0),
    )
    for dtype in DTYPES
]

LAYOUT_CASES = [
    FP8Case(
        name=f"{layout}_{'x'.join(map(str, shape))}_{granularity}{dim}{'_given' if scale else ''}",
        dtype=dtype,
        shape=shape,
        granularity=granularity,
        dim=dim,
        layout=layout,
        scale=scale,
    )
    for layout in LAYOUTS
    for shape in ((6, 256), (37, 24), (2, 3, 384))
    for granularity, dim in (("tensor", -1), ("channel", -1), ("channel", 0), ("block", -1))
    for scale in (None, 200.0)
    for dtype in (torch.float32, torch.bfloat16)
]

#: Sizes of the results table by device type.
BENCHMARK_CASES: dict[str, list[FP8Case]] = {
    device: [
        FP8Case(
            name=f"{rows}x{cols}_{granularity}{dim if granularity != 'tensor' else ''}",
            dtype=dtype,
            shape=(rows, cols),
            granularity=granularity,
            dim=dim,
        )
        for (rows, cols), dtype in sizes
        for granularity, dim in (("tensor", -1), ("channel", -1), ("block", -1), ("channel", 0))
    ]
    for device, sizes in (
        (
            "cuda",
            [
                ((16384, 8192), torch.bfloat16),
                ((4096, 4096), torch.bfloat16),
                ((64, 4096), torch.bfloat16),
                ((8192, 8192), torch.float32),
            ],
        ),
        ("cpu", [((1024, 2048), torch.float32), ((1024, 2048), torch.bfloat16)]),
    )
}
