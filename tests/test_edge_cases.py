"""Edge cases that the ops share: special values, empty and single elements, extremes, layouts (docs/semantics).

Each op's own tests have them too; here the ops that work row by row all run the same checks. Special values spread
otherwise in products (``gated_mlp``, ``fp8_gemm``) and attention, so those are checked in their own files alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from tests.support.cases import normal
from tests.support.devices import poisoned_memory
from tests.support.layouts import LAYOUTS

ops = torch.ops.htree
HALF = (torch.float16, torch.bfloat16)
DTYPES = (torch.float32, *HALF)


def norm(x: torch.Tensor) -> torch.Tensor:
    """rmsnorm_rope of rows x [rows, width] without a rotation, weight 1."""
    width = x.shape[-1]
    cos = torch.ones(x.shape[0], width, device=x.device)
    return ops.rmsnorm_rope(x[None], torch.ones(width, device=x.device), cos, torch.zeros_like(cos))[0]


#: Functions that work on each row of x [rows, width] alone and return floats of x's dtype.
ROWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rmsnorm_rope": norm,
    "hadamard_transform": lambda x: ops.hadamard_transform(x),
    "fp8_fake_quant": lambda x: ops.fp8_fake_quant(x, None, "channel"),
    "fp8_round_trip": lambda x: ops.fp8_dequantize(*ops.fp8_quantize(x, None, "channel")[:2], x.dtype),
}
#: Those in which a NaN or an infinity spoils its whole row; in the others the rest of the row stays.
SPREADS = {"rmsnorm_rope", "hadamard_transform"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_nan_stays_in_its_row(name: str, dtype: torch.dtype, device: str) -> None:
    x = normal((9, 64), dtype, device, seed=1)
    clean = ROWS[name](x)
    x[4, 7] = math.nan
    y = ROWS[name](x)
    others = [row for row in range(9) if row != 4]
    assert torch.equal(y[others], clean[others])
    assert bool(y[4, 7].isnan())
    assert bool(y[4].isnan().all()) is (name in SPREADS)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", ROWS)
def test_infinity_raises_nothing(name: str, sign: int, device: str) -> None:
    x = normal((3, 64), torch.bfloat16, device, seed=2)
    clean = ROWS[name](x)
    x[1, 5] = sign * math.inf
    y = ROWS[name](x)
    assert torch.equal(y[::2], clean[::2])
    if name not in SPREADS:
        largest = float(x[1].where(x[1].isfinite(), 0).abs().max())
        assert float(y[1, 5]) == pytest.approx(sign * largest, rel=1e-2)
        assert bool(y[1].isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (0, 0)])
@pytest.mark.parametrize("name", [n for n in ROWS if n not in SPREADS])
def test_empty(name: str, shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    y = ROWS[name](torch.empty(shape, dtype=dtype, device=device))
    assert (tuple(y.shape), y.dtype) == (shape, dtype)


@pytest.mark.parametrize("name", sorted(SPREADS))
def test_no_rows(name: str, device: str) -> None:
    assert ROWS[name](torch.empty(0, 64, device=device)).shape == (0, 64)


@pytest.mark.parametrize("value", [1.0, -3.5, 0.0, 2.0**-14])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_single_element(dtype: torch.dtype, value: float, device: str) -> None:
    x = torch.full((1, 1), value, dtype=dtype, device=device)
    assert torch.equal(ops.hadamard_transform(x), x)
    for granularity in ("tensor", "channel", "block"):
        assert float(ops.fp8_fake_quant(x, None, granularity)) == pytest.approx(value, rel=1e-6)
        scale = float(ops.fp8_compute_scale(x, granularity))
        assert scale == pytest.approx(448 / abs(value) if value else 1.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_all_zeros(name: str, dtype: torch.dtype, device: str) -> None:
    x = torch.zeros(5, 128, dtype=dtype, device=device)
    with poisoned_memory():
        assert not ROWS[name](x).any()


@pytest.mark.parametrize("name", ROWS)
def test_largest_half(name: str, device: str) -> None:
    """With 65504 everywhere squares and sums leave fp16's range; results must not."""
    x = torch.full((3, 64), 65504.0, dtype=torch.float16, device=device)
    y = ROWS[name](x)
    if name == "rmsnorm_rope":
        assert torch.equal(y, torch.ones_like(y))
    elif name == "hadamard_transform":
        assert bool((y[:, 0] == math.inf).all())  # 65504 · 8: the result itself leaves the range
        assert not y[:, 1:].any()
    else:
        assert torch.equal(y, x)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_layouts(name: str, dtype: torch.dtype, layout: str, device: str) -> None:
    x = normal((17, 128), dtype, device, seed=3)
    y = ROWS[name](LAYOUTS[layout](x))
    assert y.is_contiguous()
    assert torch.equal(y, ROWS[name](x))


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8_overflow_is_seen_before_the_cast(dtype: torch.dtype, granularity: str, device: str) -> None:
    """464 is the last value that rounds to 448; the count is of values beyond it, not of codes at 448."""
    x = torch.tensor([[448.0, 464.0, 466.0, -466.0, 1000.0, math.inf, math.nan, 0.0]], device=device)
    x = x.to(dtype)
    shape = {"tensor": (), "channel": (1, 1), "block": (1, 1)}[granularity]
    q, _, n = ops.fp8_quantize(x, torch.ones(shape, device=device), granularity)
    assert int(n) == 4, "466 is exact in each dtype"
    assert q.float().nan_to_num(7).abs().tolist() == [[448.0] * 6 + [7.0, 0.0]]
