"""Problems of ``rmsnorm_rope``, ``head_rmsnorm_rope`` and their backward (docs/semantics/rmsnorm_rope.md §3.1)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from htree_ops.reference import rmsnorm_rope as reference
from tests.support.cases import Case, normal
from tests.support.compare import assert_close_spec
from tests.support.layouts import LAYOUTS

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
EPS = 1e-6
TABLES = (
    "full",
    "half",
    "four_d",
    "unequal",
    "longer",
    "of_all",
    "batched",
    "batched_half",
    "batched_four_d",
    "batched_longer",
)


def tables(
    num_positions: int, columns: int, dtype: torch.dtype, device: str | torch.device, unequal: bool = False
) -> tuple[Tensor, Tensor]:
    """cos and sin [S, columns] of the usual angles; both halves equal unless ``unequal``."""
    half = (columns + 1) // 2
    frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=device) / max(half, 1))
    angle = torch.arange(num_positions, dtype=torch.float64, device=device)[:, None] * frequency
    angle = torch.cat((angle, angle + (0.7 if unequal else 0.0)), dim=-1)[:, :columns]
    return angle.cos().to(dtype), angle.sin().to(dtype)


@dataclass(frozen=True, kw_only=True)
class RMSNormRoPECase(Case):
    """x ``shape`` = [B, S, Hd] with heads of ``head_dim``, or [B, S, H, hd] for the form per head.

    Attributes:
        table: "full" [S, hd], "half" [S, hd/2], "four_d" [1, S, 1, hd], "unequal" halves or "longer" than S; as models
            of transformers make them "of_all" [1, S, hd], and with other angles for each sequence "batched"
            [B, S, hd], "batched_half" [B, S, hd/2], "batched_four_d" [B, S, 1, hd] or "batched_longer" than S.
        weight_dtype, table_dtype: dtypes of weight and tables, by default that of x.
    """

    shape: tuple[int, ...]
    head_dim: int
    table: str = "full"
    weight_dtype: torch.dtype | None = None
    table_dtype: torch.dtype | None = None
    layout: str = "contiguous"
    scale: float = 1.0

    @property
    def per_head(self) -> bool:
        """Whether the mean runs over each head."""
        return len(self.shape) == 4

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.shape[-1]

    @property
    def num_tables(self) -> int:
        """Tables of cos: one, or one for each sequence."""
        return self.shape[0] if self.table.startswith("batched") else 1

    @property
    def table_columns(self) -> int:
        """Factors of a position in a table."""
        return self.head_dim // 2 if self.table.endswith("half") else self.head_dim

    def make_x(self, device: str | torch.device, seed: int = 0) -> Tensor:
        """x alone."""
        return LAYOUTS[self.layout](normal(self.shape, self.dtype, device, seed, self.scale))

    def make_inputs(self, device: str | torch.device, seed: int = 0) -> tuple[Any, ...]:
        """(x, weight, cos, sin, eps[, num_heads]) of the op."""
        weight = 1 + normal((self.width,), self.weight_dtype or self.dtype, device, seed + 1, 0.3)
        num_positions = self.shape[1] + (5 if self.table.endswith("longer") else 0)
        kind = self.table_dtype or self.dtype
        cos, sin = tables(
            self.num_tables * num_positions, self.table_columns, kind, device, self.table == "unequal"
        )
        if self.table == "of_all" or self.table.startswith("batched"):
            cos, sin = (t.unflatten(0, (self.num_tables, num_positions)) for t in (cos, sin))
        if self.table == "batched_four_d":
            cos, sin = (t[:, :, None] for t in (cos, sin))
        if self.table == "four_d":
            cos, sin = (t[None, :, None] for t in (cos, sin))
        if self.layout == "misaligned":
            weight, cos, sin = (LAYOUTS["misaligned"](t) for t in (weight, cos, sin))
        head_arguments = () if self.per_head else (self.width // self.head_dim if self.head_dim else None,)
        return self.make_x(device, seed), weight, cos, sin, EPS, *head_arguments

    def bytes(self) -> int:
        """x read, y written, weight and tables read once."""
        rows = self.num_tables * self.shape[1]
        table = 2 * rows * self.table_columns * (self.table_dtype or self.dtype).itemsize
        weight = self.width * (self.weight_dtype or self.dtype).itemsize
        return 2 * math.prod(self.shape) * self.dtype.itemsize + weight + table

    def flops(self) -> int:
        """Per element: square and sum, two products of the norm, two products and a sum of the rotation."""
        return 7 * math.prod(self.shape)

    @property
    def shapes(self) -> str:
        """x[...] with the head dim."""
        return f"x{list(self.shape)} head {self.head_dim}"


@dataclass(frozen=True, kw_only=True)
class RMSNormRoPEBackwardCase(Case):
    """The gradient of ``forward``; dy has the layout of x."""

    forward: RMSNormRoPECase

    def make_inputs(self, device: str | torch.device, seed: int = 0) -> tuple[Any, ...]:
        """(dy, x, weight, cos, sin, eps[, num_heads]) of the backward op."""
        return self.forward.make_x(device, seed + 1_000_003), *self.forward.make_inputs(device, seed)

    def bytes(self) -> int:
        """dy and x read, dx written; weight read, dweight written, tables read."""
        case = self.forward
        weight = case.width * (case.weight_dtype or case.dtype).itemsize
        return case.bytes() + math.prod(case.shape) * case.dtype.itemsize + weight

    def flops(self) -> int:
        """Per element: transposed rotation 3, two sums 5, dx 4, dweight 3."""
        return 15 * math.prod(self.forward.shape)

    @property
    def shapes(self) -> str:
        """dy and x."""
        return self.forward.shapes.replace("x[", "dy,x[", 1)


def assert_forward(y: Tensor, inputs: tuple[Any, ...]) -> None:
    """P1 of §3.5: fp16 rtol 1e-3, atol 1e-5; bf16 rtol 8e-3; fp32 rtol 1e-5, atol 1e-5 max|n|.

    bf16 has no atol there and takes that of fp16. fp64 has no figure: the fp32 rule with the unit roundoff of
    fp64 (2^-53 for 2^-24).
    """
    x, weight = inputs[:2]
    op = reference.head_rmsnorm_rope if x.dim() == 4 else reference.rmsnorm_rope
    n = reference.normalised(x, weight, inputs[4]).abs().nan_to_num(0.0, 0.0, 0.0)
    largest = float(n.amax()) if n.numel() else 0.0
    rtol, atol = {
        torch.float16: (1e-3, 1e-5),
        torch.bfloat16: (8e-3, 1e-5),
        torch.float32: (1e-5, 1e-5 * largest),
        torch.float64: (1e-5 * 2.0**-29, 1e-5 * 2.0**-29 * largest),
    }[x.dtype]
    assert_close_spec(y, op(*inputs), rtol, atol, dtype=x.dtype)


def _gradient_terms(inputs: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """The formulas of dx and dweight with every factor and term replaced by its magnitude."""
    dy, x, weight, cos, sin, eps = inputs[:6]
    dy, x, weight = (t.double().abs() for t in (dy, x, weight))
    head_dim = x.shape[-1] if x.dim() == 4 else reference.head_dim_of(x, cos, inputs[6])
    cos, sin = (reference.full_table(t, x.shape[1], head_dim).abs().unsqueeze(-2) for t in (cos, sin))
    heads = dy.unflatten(-1, (-1, head_dim))
    cos, sin = (t.unsqueeze(-2) if heads.dim() == 5 else t for t in (cos, sin))
    dn = (heads * cos + torch.roll(heads * sin, head_dim // 2, dims=-1)).flatten(-2)
    r = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    dot = (dn * weight * x).sum(dim=-1, keepdim=True)
    return r * weight * dn + x * r**3 * dot / x.shape[-1], (dn * x * r).flatten(0, -2).sum(dim=0)


def assert_gradients(gradients: Sequence[Tensor | None], inputs: tuple[Any, ...], extra: float = 0.0) -> None:
    """(dx, dweight) of a call (dy, x, weight, ...) against float64; a gradient that is None is skipped.

    Both cancel, so the arithmetic errs in proportion to the sum of the magnitudes of their terms: by 2^-19 of
    it in fp32 (2^-47 in fp64), ``extra`` more for a baseline that rounds intermediates. On top comes the final
    rounding, and the smallest subnormal of fp16.
    """
    x, weight = inputs[1:3]
    op = reference.head_rmsnorm_rope_backward if x.dim() == 4 else reference.rmsnorm_rope_backward
    expected = op(*inputs)
    terms = _gradient_terms(inputs) if x.numel() else expected
    unit = extra + (2.0**-47 if x.dtype == torch.float64 else 2.0**-19)
    for name, gradient, wanted, size, like in zip(
        ("dx", "dweight"), gradients, expected, terms, (x, weight), strict=True
    ):
        if gradient is not None:
            rtol = 0.0 if like.dtype == torch.float64 else torch.finfo(like.dtype).eps / 2
            atol = unit * size + (2.0**-25 if like.dtype == torch.float16 else 0.0)
            assert_close_spec(gradient, wanted, rtol, atol, dtype=like.dtype, name=name)


def _case(name: str, shape: tuple[int, ...], head_dim: int, **options: Any) -> RMSNormRoPECase:
    return RMSNormRoPECase(name=name, dtype=torch.float32, shape=shape, head_dim=head_dim, **options)


_SHAPES = (
    _case("one_pair", (1, 1, 2), 2),
    _case("odd_half", (2, 3, 18), 6),
    _case("small", (2, 5, 64), 16),
    _case("hidden_256", (3, 7, 256), 64),
    _case("hidden_1152", (2, 3, 1152), 96),
    _case("hidden_2048", (2, 9, 2048), 128),
    _case("hidden_4096", (1, 5, 4096), 128),
    _case("one_head", (2, 3, 1024), 1024),
    _case("head_80", (2, 4, 640), 80),
    _case("hidden_8192", (2, 2, 8192), 128),
    _case("hidden_16384", (1, 2, 16384), 256),
    _case("hidden_40000", (1, 2, 40000), 200),
    _case("half_table", (2, 5, 512), 64, table="half"),
    _case("four_d_table", (2, 5, 512), 64, table="four_d"),
    _case("unequal_halves", (2, 5, 512), 64, table="unequal"),
    _case("longer_table", (2, 5, 512), 64, table="longer"),
    _case("table_of_all", (2, 5, 512), 64, table="of_all"),
    _case("batched_table", (3, 5, 512), 64, table="batched"),
    _case("batched_half_table", (3, 5, 512), 64, table="batched_half", table_dtype=torch.float32),
    _case("batched_four_d_table", (3, 5, 512), 64, table="batched_four_d"),
    _case("batched_longer_table", (3, 5, 512), 64, table="batched_longer"),
    _case("batched_one_token", (7, 1, 512), 64, table="batched"),
    _case("batched_40000", (2, 2, 40000), 200, table="batched"),
    _case("batched_empty", (0, 4, 64), 16, table="batched"),
    _case("fp32_factors", (2, 5, 512), 64, weight_dtype=torch.float32, table_dtype=torch.float32),
    _case("mixed_factors", (2, 5, 512), 64, weight_dtype=torch.bfloat16, table_dtype=torch.float16),
    _case("double_factors", (2, 5, 512), 64, weight_dtype=torch.float64, table_dtype=torch.float64),
    _case("empty_batch", (0, 4, 64), 16),
    _case("empty_sequence", (2, 0, 64), 16),
    _case("empty_hidden", (2, 3, 0), 0),
    *(_case(f"{layout}_96", (3, 4, 96), 32, layout=layout) for layout in LAYOUTS),
    *(_case(f"{layout}_2064", (2, 3, 2064), 48, layout=layout) for layout in LAYOUTS),
    _case("heads_128", (2, 5, 6, 128), 128),
    _case("heads_64", (2, 5, 3, 64), 64),
    _case("heads_256", (1, 3, 5, 256), 256),
    _case("heads_6", (2, 3, 4, 6), 6),
    _case("heads_192", (2, 3, 4, 192), 192),
    _case("heads_half_table", (2, 5, 3, 64), 64, table="half"),
    _case("heads_table_of_all", (2, 5, 3, 64), 64, table="of_all"),
    _case("heads_batched", (3, 5, 9, 128), 128, table="batched", table_dtype=torch.float32),
    _case("heads_batched_half", (3, 5, 4, 6), 6, table="batched_half"),
    _case("heads_batched_four_d", (3, 5, 3, 64), 64, table="batched_four_d"),
    _case("heads_unequal", (3, 5, 9, 128), 128, table="unequal", table_dtype=torch.float32),
    _case("heads_empty", (2, 5, 0, 64), 64),
    *(_case(f"heads_{layout}", (2, 4, 3, 32), 32, layout=layout) for layout in LAYOUTS),
)

#: Every problem in every dtype.
CASES = [replace(case, dtype=dtype) for case in _SHAPES for dtype in DTYPES]

#: The backward of these problems.
BACKWARD_CASES = [RMSNormRoPEBackwardCase(name=case.name, dtype=case.dtype, forward=case) for case in CASES]


def _model(
    name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, head_dim: int = 128
) -> RMSNormRoPECase:
    return RMSNormRoPECase(name=name, dtype=dtype, shape=shape, head_dim=head_dim)


#: Sizes of the results table by device type; the first CUDA one carries the bar, the last three are decoding.
BENCHMARK_CASES: dict[str, list[RMSNormRoPECase]] = {
    "cuda": [
        _model("b8_s2048_4096", (8, 2048, 4096)),
        replace(_model("b8_s2048_4096_fp32_tables", (8, 2048, 4096)), table_dtype=torch.float32),
        _model("b1_s16384_4096", (1, 16384, 4096)),
        _model("b4_s2048_8192", (4, 2048, 8192)),
        _model("b8_s2048_h32_128", (8, 2048, 32, 128)),
        _model("decode_1", (1, 1, 4096)),
        _model("decode_16", (16, 1, 4096)),
        _model("decode_256", (256, 1, 4096)),
    ],
    "cpu": [
        _model("b2_s512_2048", (2, 512, 2048), torch.float32),
        _model("b2_s512_2048", (2, 512, 2048)),
        _model("b2_s512_h16_128", (2, 512, 16, 128), torch.float32),
    ],
}

BENCHMARK_BACKWARD_CASES: dict[str, list[RMSNormRoPEBackwardCase]] = {
    device: [
        RMSNormRoPEBackwardCase(name=case.name, dtype=case.dtype, forward=case)
        for case in cases
        if not case.name.startswith("decode")
    ]
    for device, cases in BENCHMARK_CASES.items()
}
