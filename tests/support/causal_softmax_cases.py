"""Problems of ``causal_softmax`` and its backward (docs/semantics/causal_softmax.md §5), with the bytes they must move.

Rows are ``h`` (queries), columns ``w`` (keys); column j of row i is visible iff ``j <= i + (w - h)``.
"""

import math
from dataclasses import dataclass

import torch

from tests.support.cases import Case, normal
from tests.support.layouts import LAYOUTS, with_strides

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def visible_mask(h: int, w: int, device: str | torch.device = "cpu") -> torch.Tensor:
    """Bool [h, w], true where column j is visible from row i: ``j <= i + (w - h)``."""
    return torch.ones(h, w, dtype=torch.bool, device=device).tril(w - h)


def num_visible(shape: tuple[int, ...]) -> int:
    """Visible entries of x [..., h, w]: sum over rows of ``w - h + 1 + i``."""
    *batch, h, w = shape
    return math.prod(batch) * (h * (w - h) + h * (h + 1) // 2)


def masked_softmax(x: torch.Tensor) -> torch.Tensor:
    """What one writes without this package: mask with -inf, then ``torch.softmax``, in the dtype of x."""
    mask = visible_mask(x.shape[-2], x.shape[-1], x.device)
    return torch.softmax(x.masked_fill(~mask, float("-inf")), dim=-1)


def tolerance(dtype: torch.dtype, w: int) -> tuple[float, float]:
    """(rtol, atol) against float64 (docs/semantics/causal_softmax.md §5); ``w`` is the row length.

    float64 has no figure there: the fp32 rule with the unit roundoff of fp64 (2^-53 for 2^-24).
    """
    if dtype == torch.float16:
        return 1e-3, 1e-7
    if dtype == torch.bfloat16:
        return 8e-3, 1e-8
    per_unit = 1 + math.log2(max(w, 1))
    if dtype == torch.float32:
        return 2e-6 * per_unit, 1e-8
    return 2e-6 * 2.0**-29 * per_unit, 1e-8 * 2.0**-29


def backward_tolerance(dy: torch.Tensor, y: torch.Tensor, y_error: float = 0.0) -> tuple[float, torch.Tensor]:
    """(rtol, atol per element) of dx against float64.

    ``dy - sum(dy y)`` cancels, so the arithmetic errs in proportion to its terms: by 2^-20 of them for fp32
    sums (2^-49 for fp64). ``y_error`` is the relative error of a y that was computed anew, not given.
    """
    visible = visible_mask(y.shape[-2], y.shape[-1], y.device)
    dy64, y64 = torch.where(visible, dy.double(), 0.0), y.double()
    terms = dy64.abs() + (dy64 * y64).abs().sum(dim=-1, keepdim=True)
    unit = 2.0**-49 if y.dtype == torch.float64 else 2.0**-20
    rtol, atol = tolerance(y.dtype, y.shape[-1])
    return rtol, atol + y64 * terms * (unit + y_error)


@dataclass(frozen=True, kw_only=True)
class CausalSoftmaxCase(Case):
    """x ``shape`` = [..., h, w], laid out by ``strides`` (elements), else by the named layout.

    ``scale`` multiplies the standard normal values: 1e4 makes every row one-hot and must not overflow.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    layout: str = "contiguous"
    block_size: int = 0
    scale: float = 1.0

    def make_x(self, device: str | torch.device, seed: int = 0) -> torch.Tensor:
        """x alone."""
        x = normal(self.shape, self.dtype, device, seed, self.scale)
        return LAYOUTS[self.layout](x) if self.strides is None else with_strides(x, self.strides)

    def make_inputs(self, device: str | torch.device, seed: int = 0) -> tuple[torch.Tensor, int]:
        """(x, block_size) of ``torch.ops.htree.causal_softmax``."""
        return self.make_x(device, seed), self.block_size

    def bytes(self) -> int:
        """Visible entries read, all entries written."""
        return (num_visible(self.shape) + math.prod(self.shape)) * self.dtype.itemsize

    def flops(self) -> int:
        """Per visible entry: maximum, subtraction, exponential, sum, division."""
        return 5 * num_visible(self.shape)

    @property
    def shapes(self) -> str:
        """x[b,h,w] with the strides where they are not contiguous."""
        text = f"x{list(self.shape)}"
        return text if self.strides is None else f"{text} strides {list(self.strides)}"


@dataclass(frozen=True, kw_only=True)
class CausalSoftmaxBackwardCase(Case):
    """The gradient of ``forward``: dy has the layout of x, y is its contiguous result."""

    forward: CausalSoftmaxCase

    def make_x(self, device: str | torch.device, seed: int = 0) -> torch.Tensor:
        """The x whose softmax is y, for a baseline that differentiates through its own forward."""
        return self.forward.make_x(device, seed)

    def make_inputs(self, device: str | torch.device, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """(dy, y) of ``torch.ops.htree.causal_softmax_backward``."""
        dy = self.forward.make_x(device, seed + 1_000_003)
        return dy, masked_softmax(self.make_x(device, seed))

    def bytes(self) -> int:
        """Visible entries of dy and y read, all entries of dx written."""
        shape = self.forward.shape
        return (2 * num_visible(shape) + math.prod(shape)) * self.dtype.itemsize

    def flops(self) -> int:
        """Per visible entry: product and sum of the row's dot product, then subtraction and product."""
        return 4 * num_visible(self.forward.shape)

    @property
    def shapes(self) -> str:
        """dy and y [b,h,w]."""
        return self.forward.shapes.replace("x[", "dy,y[", 1)


# (name, shape, strides): the sizes of §5, rows around a warp's and a block's width, decode rows, empty.
_SHAPES: tuple[tuple[str, tuple[int, ...], tuple[int, ...] | None], ...] = (
    ("one", (1, 1), None),
    ("square3", (3, 3), None),
    ("wide", (32, 512), None),
    ("wide_strided", (32, 512), (1024, 1)),
    ("small_batch", (32, 5, 5), None),
    ("batch", (32, 20, 512), None),
    ("batch_strided", (32, 20, 512), (20480, 512, 1)),
    ("odd15", (28, 15, 15), None),
    ("square1024", (28, 1024, 1024), None),
    ("square1025", (28, 1025, 1025), None),
    ("square1031", (28, 1031, 1031), None),
    ("decode1", (1, 4097), None),
    ("decode_batch", (5, 1, 8191), None),
    ("decode_rows", (3, 7, 2050), None),
    ("long_row", (2, 70_001), None),
    ("empty_rows", (0, 8), None),
    ("empty_columns", (0, 0), None),
    ("empty_batch", (0, 4, 8), None),
    ("heads", (2, 3, 5, 7), None),
    ("heads_square", (2, 4, 65, 65), None),
    ("heads_one_stride", (2, 3, 9, 40), (3 * 512, 512, 48, 1)),
    ("heads_of_more", (2, 3, 9, 40), (8 * 360, 360, 40, 1)),
    ("heads_last", (2, 3, 9, 40), (9 * 40 * 3, 1, 40 * 3, 3)),
    ("heads_swapped", (2, 3, 9, 40), (360, 2 * 360, 40, 1)),
    ("groups", (2, 3, 2, 4, 33), None),
    ("groups_of_more", (2, 3, 2, 4, 33), (2000, 2 * 132, 132, 33, 1)),
    ("many_dims", (2, 1, 3, 1, 1, 2, 3, 6), None),
    ("empty_heads", (2, 0, 4, 8), None),
    ("empty_matrices", (2, 3, 0, 8), None),
)

#: Every size in every dtype.
CASES = [
    CausalSoftmaxCase(name=name, dtype=dtype, shape=shape, strides=strides)
    for name, shape, strides in _SHAPES
    for dtype in DTYPES
]

#: Layouts of §5 (arbitrary strides in every dim), at sizes with a remainder for every vector width.
LAYOUT_CASES = [
    CausalSoftmaxCase(name=f"{layout}_{h}x{w}", dtype=dtype, shape=(3, h, w), layout=layout)
    for layout in LAYOUTS
    for h, w in ((9, 37), (5, 1033))
    for dtype in DTYPES
] + [
    CausalSoftmaxCase(name=f"{name}_33x65", dtype=dtype, shape=(4, 33, 65), strides=strides)
    for name, strides in (
        ("column_major", (33 * 65, 1, 33)),
        ("batch_last", (1, 4 * 65, 4)),
        ("gaps", (9000, 201, 3)),
    )
    for dtype in DTYPES
]

#: Backward problems: the sizes above that finish quickly on a CPU, and the layouts.
BACKWARD_CASES = [
    CausalSoftmaxBackwardCase(name=case.name, dtype=case.dtype, forward=case)
    for case in [*CASES, *LAYOUT_CASES]
    if math.prod(case.shape) < 1_000_000
]

#: Sizes of the results table by device type; the first CUDA one carries the bar.
BENCHMARK_CASES: dict[str, list[CausalSoftmaxCase]] = {
    "cuda": [
        CausalSoftmaxCase(name="b32_2048", dtype=torch.bfloat16, shape=(32, 2048, 2048)),
        CausalSoftmaxCase(name="b32_2048", dtype=torch.float32, shape=(32, 2048, 2048)),
        CausalSoftmaxCase(name="b8_4096x8192", dtype=torch.bfloat16, shape=(8, 4096, 8192)),
        CausalSoftmaxCase(name="b512_512", dtype=torch.bfloat16, shape=(512, 512, 512)),
        CausalSoftmaxCase(name="decode_b1024_32768", dtype=torch.bfloat16, shape=(1024, 1, 32768)),
    ],
    "cpu": [
        # Results of 16 MiB: from 32 MiB on, glibc maps fresh pages for each, and the faults dominate.
        CausalSoftmaxCase(name="b4_1024", dtype=torch.float32, shape=(4, 1024, 1024)),
        CausalSoftmaxCase(name="b8_1024", dtype=torch.bfloat16, shape=(8, 1024, 1024)),
    ],
}

BENCHMARK_BACKWARD_CASES: dict[str, list[CausalSoftmaxBackwardCase]] = {
    device: [CausalSoftmaxBackwardCase(name=case.name, dtype=case.dtype, forward=case) for case in cases]
    for device, cases in BENCHMARK_CASES.items()
}
