"""Problems of ``gated_mlp`` and its backward, with their tolerances (docs/semantics/gated_mlp.md §3.2, §3.5)."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from htree_ops.reference import gated_mlp as reference
from tests.support.cases import Case, normal
from tests.support.compare import assert_close_spec
from tests.support.layouts import LAYOUTS

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
ACTIVATIONS = ("silu", "gelu")
SIDES = ("up", "gate")
#: Relative tolerance of property 2: for the half types that of docs/semantics, for the others that of the activation.
RTOL = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 2e-5, torch.float64: 1e-13}


def _gamma(dtype: torch.dtype) -> float:
    """The error that a product may have, relative to the sum of the magnitudes of its terms."""
    return 2.0**-46 if dtype == torch.float64 else 2.0**-20


def assert_forward(result: Tensor, inputs: tuple[Any, ...], name: str = "out") -> None:
    """Property 2: rtol·|ref| + 1e-5 + γ·(E_g·|act(u)| + 1.13·E_u·|g|), E the sums of magnitudes."""
    x, gate_weight, up_weight, activation, act_on = inputs[:5]
    expected = reference.gated_mlp(x, gate_weight, up_weight, activation, act_on)
    linear, acted = (gate_weight, up_weight) if act_on == "up" else (up_weight, gate_weight)
    g, u = reference.products(x, linear, acted)
    sum_g, sum_u = reference.products(x.abs(), linear.abs(), acted.abs())
    gamma = _gamma(x.dtype)
    atol = 1e-5 if x.dtype != torch.float64 else 1e-300
    bound = atol + gamma * (sum_g * reference.activate(u, activation).abs() + 1.13 * sum_u * g.abs())
    limit = torch.finfo(x.dtype).max
    fits = ~(expected.abs() >= limit)  # beyond, the result is an infinity of the right sign
    assert_close_spec(
        torch.where(fits, result.double(), 0.0),
        torch.where(fits, expected, 0.0),
        RTOL[x.dtype],
        torch.where(fits, bound, 0.0),
        name=name,
    )
    assert result.dtype == x.dtype
    beyond = expected.abs() >= 2 * limit
    assert torch.equal(result[beyond].double(), expected[beyond].sign() * math.inf)


def assert_gradients(
    results: tuple[Tensor | None, ...], dy: Tensor, inputs: tuple[Any, ...], saved: bool = True
) -> None:
    """Checks that each gradient errs no more than roundings to the dtype explain.

    With u the unit of the dtype: g, u (where ``saved``), dg and du are rounded once each, so dg errs by
    u·|dy|·(|act(u)| + |u·act'(u)|) and du by u·|dy·g|·(3·|act'(u)| + 1.2), since |z·act''(z)| < 1.2; the
    products carry these errors on in magnitudes, add γ for their sums, and are rounded once.
    """
    x, gate_weight, up_weight, activation, act_on = inputs[:5]
    expected = reference.gated_mlp_backward(dy, x, gate_weight, up_weight, activation, act_on)
    unit = torch.finfo(x.dtype).eps / 2
    gamma = _gamma(x.dtype)
    linear, acted = (gate_weight, up_weight) if act_on == "up" else (up_weight, gate_weight)
    g, u = reference.products(x, linear, acted)
    sum_g, sum_u = reference.products(x.abs(), linear.abs(), acted.abs())
    slope = reference.activation_slope(u, activation).abs()
    act = reference.activate(u, activation).abs()
    wide = dy.double().abs()
    arithmetic = 2e-5 if x.dtype == torch.float32 else 0.0  # error of the activations
    dlinear = wide * ((unit + gamma + arithmetic) * (act + u.abs() * slope) + gamma * sum_u * 1.2)
    dacted = wide * (
        (unit + gamma + arithmetic) * g.abs() * (3 * slope + 1.2) + gamma * (sum_g * slope + sum_u * g.abs())
    )
    dlinear, dacted = dlinear + gamma * wide * act, dacted + gamma * wide * g.abs() * slope
    smallest = torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps
    dlinear, dacted = dlinear + smallest, dacted + smallest
    rows = reference.as_rows(x.double().abs())
    by_linear = reference.as_rows(dlinear).mT @ rows
    by_acted = reference.as_rows(dacted).mT @ rows
    bounds = (
        dlinear @ linear.double().abs() + dacted @ acted.double().abs(),
        by_linear if act_on == "up" else by_acted,
        by_acted if act_on == "up" else by_linear,
    )
    names = ("dx", "dgate_weight", "dup_weight")
    for name, result, wanted, bound in zip(names, results, expected, bounds, strict=True):
        if result is not None:
            assert_close_spec(
                result, wanted, 4 * unit, 2 * bound + smallest, dtype=x.dtype, name=f"{name}, saved={saved}"
            )


@dataclass(frozen=True, kw_only=True)
class GatedMLPCase(Case):
    """x [*rows, hidden] against weights [inner, hidden], all in the named layout.

    ``magnitude`` multiplies x; the weights have a standard deviation of hidden^(-1/2), so g and u have that of x.
    """

    rows: tuple[int, ...]
    inner: int
    hidden: int
    activation: str = "silu"
    act_on: str = "up"
    layout: str = "contiguous"
    magnitude: float = 1.0

    def make_inputs(self, device: str | torch.device, seed: int = 0) -> tuple[Any, ...]:
        """(x, gate_weight, up_weight, activation, act_on) of ``torch.ops.htree.gated_mlp``."""
        place = LAYOUTS[self.layout]
        spread = max(self.hidden, 1) ** -0.5
        x = normal((*self.rows, self.hidden), self.dtype, device, seed, self.magnitude)
        gate = normal((self.inner, self.hidden), self.dtype, device, seed + 1000, spread)
        up = normal((self.inner, self.hidden), self.dtype, device, seed + 2000, spread)
        return place(x), place(gate), place(up), self.activation, self.act_on

    def make_dy(self, device: str | torch.device, seed: int) -> Tensor:
        """A gradient of the result, contiguous."""
        return normal((*self.rows, self.inner), self.dtype, device, seed)

    @property
    def num_rows(self) -> int:
        return math.prod(self.rows)

    def bytes(self) -> int:
        """x, both weights and the result once each."""
        elements = self.num_rows * (self.hidden + self.inner) + 2 * self.inner * self.hidden
        return elements * self.dtype.itemsize

    def flops(self) -> int:
        """Two products."""
        return 4 * self.num_rows * self.inner * self.hidden

    @property
    def shapes(self) -> str:
        return f"x{[*self.rows, self.hidden]} I={self.inner} {self.activation}"


@dataclass(frozen=True, kw_only=True)
class GatedMLPBackwardCase(Case):
    """The backward of ``forward``."""

    forward: GatedMLPCase

    def make_inputs(self, device: str | torch.device, seed: int = 0) -> tuple[Any, ...]:
        """(dy, x, gate_weight, up_weight, activation, act_on) of ``torch.ops.htree.gated_mlp_backward``."""
        return self.forward.make_dy(device, seed + 3000), *self.forward.make_inputs(device, seed)

    def bytes(self) -> int:
        """dy, g and u read; x and the weights read, their gradients written."""
        f = self.forward
        elements = 3 * f.num_rows * f.inner + 2 * (f.num_rows * f.hidden + 2 * f.inner * f.hidden)
        return elements * self.dtype.itemsize

    def flops(self) -> int:
        """Four products, since g and u are given."""
        return 2 * self.forward.flops()

    @property
    def shapes(self) -> str:
        return self.forward.shapes


#: Sizes around the tiles of every kernel: 16, 32, 64 and 128 rows, 64 and 128 columns, 64 of hidden.
SIZES: tuple[tuple[tuple[int, ...], int, int], ...] = (
    ((1,), 1, 1),
    ((), 5, 3),
    ((1, 1), 64, 64),
    ((3,), 65, 72),
    ((2, 8), 64, 63),
    ((17,), 100, 130),
    ((32,), 128, 128),
    ((2, 3, 7), 192, 200),
    ((64,), 130, 256),
    ((65,), 129, 65),
    ((130,), 257, 136),
    ((2, 150), 320, 328),
    # few rows: long sums, and more columns than one block has
    ((1,), 20, 8200),
    ((2,), 2200, 72),
    ((4,), 3300, 136),
)
CASES = [
    GatedMLPCase(
        name=f"{'x'.join(map(str, rows)) or 'vector'}_{inner}_{hidden}_{activation}_{act_on}",
        dtype=dtype,
        rows=rows,
        inner=inner,
        hidden=hidden,
        activation=activation,
        act_on=act_on,
    )
    for i, (rows, inner, hidden) in enumerate(SIZES)
    for activation, act_on in ((ACTIVATIONS[i % 2], "up"), (ACTIVATIONS[(i + 1) % 2], SIDES[1 - i % 2]))
    for dtype in DTYPES
] + [
    GatedMLPCase(name=name, dtype=dtype, rows=rows, inner=inner, hidden=hidden, magnitude=magnitude)
    for name, rows, inner, hidden, magnitude in (
        ("no_rows", (0,), 8, 16, 1.0),
        ("no_rows_inside", (3, 0, 2), 8, 16, 1.0),
        ("no_columns", (3,), 0, 16, 1.0),
        ("nothing_to_sum", (3,), 8, 0, 1.0),
        ("zeros", (5,), 24, 40, 0.0),
        ("large", (70,), 72, 64, 100.0),
        ("largest", (9,), 72, 64, 1.2e4),
        ("tiny", (9,), 72, 64, 1e-3),
    )
    for dtype in DTYPES
]

#: Strided and misaligned operands.
LAYOUT_CASES = [
    GatedMLPCase(name=f"{layout}_{rows[-1]}", dtype=dtype, rows=rows, inner=72, hidden=hidden, layout=layout)
    for layout in LAYOUTS
    for rows, hidden in (((2, 5), 64), ((2, 70), 72))
    for dtype in DTYPES
]


def _half_cases(sizes: tuple[tuple[int, int, int], ...]) -> list[GatedMLPCase]:
    """Cases of (rows, inner, hidden) in both half types, with every activation and side in turn."""
    return [
        GatedMLPCase(
            name=f"{rows}_{inner}_{hidden}",
            dtype=dtype,
            rows=(rows,),
            inner=inner,
            hidden=hidden,
            activation=ACTIVATIONS[i % 2],
            act_on=SIDES[i // 2 % 2],
        )
        for i, (rows, inner, hidden) in enumerate(sizes)
        for dtype in (torch.bfloat16, torch.float16)
    ]


#: For the tiles of a cluster of two on Hopper, which the first two cases get by default: the blocks share the k of the
#: last tiles, an odd number of k-blocks, rows of the result that tensor copies do not store, a single tile of a
#: cluster, fewer rows than a block's tile has. In the last two cases no tile is shared.
WIDE_CASES = _half_cases(
    (
        (1400, 3456, 1096),
        (2300, 2910, 1088),
        (1400, 3400, 264),
        (1700, 2400, 136),
        (190, 11270, 72),
        (1400, 3600, 136),
        (2300, 2830, 64),
    )
)
#: The tuple of the tuning space that names these tiles.
WIDE_CONFIG = (128, 128, 64, 8, 4)

#: For the other tiles of Hopper, which these sizes get by default: of 192 rows and of 128 rows by 128 columns in
#: one block, each in one wave and in two, with rows of the result that tensor copies store and with others; then those
#: of 88 and 112 columns, whose results are stored from registers.
TILE_CASES = _half_cases(
    (
        (150, 4360, 328),
        (380, 3003, 328),
        (300, 7000, 72),
        (130, 6008, 72),
        (300, 3003, 136),
        (300, 8500, 136),
        (65, 8483, 328),
        (250, 11302, 328),
        (130, 8480, 136),
        (65, 12000, 1088),
    )
)
#: For the tiles of Hopper with swap AB, of 144 and 160 rows of x, which these sizes get by default: a
#: cluster whose second block has no columns, whole and partial rows of tiles, a stream-K tail, and rows of
#: the result that begin at any address.
SWAP_AB_CASES = _half_cases(
    (
        (130, 11900, 520),
        (260, 11302, 328),
        (144, 11904, 520),
        (260, 6011, 520),
        (150, 12001, 1096),
        (300, 11302, 776),
    )
)
#: For the products of the backward on Hopper. Tiles of 256 x 256 of dx [rows, hidden] and of both gradients
#: [inner, hidden] of the weights, on 132 multiprocessors: the blocks of all clusters share the k of a tile, of the last
#: ones, or of none; sums of one k-block, of an odd number, of none beyond the first; ragged in every direction.
GRADIENT_CASES = _half_cases(
    (
        (1, 8, 8),
        (5, 72, 136),
        (64, 64, 64),
        (65, 256, 256),
        (130, 264, 392),
        (300, 1032, 2056),
        (513, 1032, 1000),
        (1100, 136, 3608),
        (2600, 72, 2504),
        (140, 1096, 3464),
    )
)

BENCHMARK_CASES: dict[str, list[GatedMLPCase]] = {
    "cuda": [
        GatedMLPCase(
            name=f"m{rows}_{activation}",
            dtype=torch.bfloat16,
            rows=(rows,),
            inner=11264,
            hidden=4096,
            activation=activation,
        )
        for activation, sizes in (
            ("silu", (1, 16, 64, 256, 1024, 4096, 65, 96, 128, 160, 192, 320, 400)),
            ("gelu", (64, 4096)),
        )
        for rows in sizes
    ]
    + [GatedMLPCase(name="m4096_silu", dtype=torch.float16, rows=(4096,), inner=11264, hidden=4096)],
    "cpu": [
        GatedMLPCase(
            name=f"m{rows}_{activation}",
            dtype=dtype,
            rows=(rows,),
            inner=2816,
            hidden=1024,
            activation=activation,
        )
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        for rows, activation in ((1, "silu"), (64, "silu"), (64, "gelu"))
    ],
}
BENCHMARK_BACKWARD_CASES: dict[str, list[GatedMLPBackwardCase]] = {
    device: [
        GatedMLPBackwardCase(name=case.name, dtype=case.dtype, forward=case)
        for case in cases
        if case.rows[0] in (64, 4096)
        and case.activation == "silu"
        and case.dtype != torch.float16
        and not (device == "cuda" and case.rows[0] == 64)
    ]
    for device, cases in BENCHMARK_CASES.items()
}
