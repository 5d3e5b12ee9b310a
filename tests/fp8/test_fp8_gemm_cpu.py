"""Every branch of the CPU kernel of fp8_gemm: rows, columns and depths around its tiles, and layouts."""

import itertools

import pytest
import torch

from htree_ops.reference import fp8 as reference
from tests.support.devices import poisoned_memory
from tests.support.fp8_gemm_cases import EXACT_SUM, OUTPUTS, FP8GemmCase, assert_product
from tests.support.instruction_sets import ISAS, run_with

op = torch.ops.htree.fp8_gemm

FP8 = torch.float8_e4m3fn
#: Tiles of 1 to 4 rows, 64 rows at a time.
ROWS = (1, 2, 3, 4, 5, 6, 64, 67)
#: Groups of 4 or 6 columns, 48 at a time.
COLUMNS = (1, 5, 6, 7, 48, 49)
#: Vectors of 4, 8 or 16 elements, chains of 15 vectors.
DEPTHS = (1, 15, 16, 17, 63, 120, 240, 241, 257)


def check(m: int, n: int, k: int, dtype: torch.dtype, scales: str, layout: str) -> None:
    inputs = FP8GemmCase(name="cpu", dtype=dtype, m=m, n=n, k=k, scales=scales, layout=layout).make_inputs(
        "cpu", seed=m + n + k
    )
    with poisoned_memory():
        assert_product(op(*inputs), inputs, EXACT_SUM)


@pytest.mark.parametrize("dtype", OUTPUTS, ids=str)
@pytest.mark.parametrize("m", ROWS)
def test_sizes_around_the_tiles(m, dtype):
    scales, layouts = (
        itertools.cycle(("tensor", "channel", "mixed")),
        itertools.cycle(("column", "row", "sliced")),
    )
    for i, (n, k) in enumerate(itertools.product(COLUMNS, DEPTHS)):
        if i % 3 == 0:
            next(layouts)  # so that every pair of scales and layout occurs
        check(m, n, k, dtype, next(scales), next(layouts))


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set(isa):
    script = (
        "from test_fp8_gemm_cpu import OUTPUTS, check, check_codes\n"
        "check_codes()\n"
        "for dtype in OUTPUTS:\n"
        "    for m in (1, 2, 3, 5, 66):\n"
        "        for n, k in ((1, 1), (5, 40), (7, 250), (50, 513)):\n"
        "            check(m, n, k, dtype, 'channel', 'row')\n"
    )
    ran = run_with(isa, script)
    assert ran.returncode == 0, ran.stderr


def check_codes() -> None:
    """Checks each code times 1, with few rows and with many, as an element of a and of b."""
    codes = torch.arange(256, dtype=torch.uint8).view(FP8)
    values = codes.float()
    one = torch.tensor(1.0)
    for rows in (1, 5):
        ones = torch.ones(rows, 1).to(FP8)
        c = op(ones, codes[None, :], one, one, torch.float32)
        torch.testing.assert_close(c, values.expand(rows, 256), rtol=0, atol=0, equal_nan=True)
    c = op(codes[:, None], torch.ones(1, 1).to(FP8), one, one, torch.float32)
    torch.testing.assert_close(c, values[:, None], rtol=0, atol=0, equal_nan=True)


def test_every_code():
    check_codes()


@pytest.mark.parametrize("m", [2, 70])
def test_layouts_give_the_same(m):
    a, b, *rest = FP8GemmCase(name="l", dtype=torch.float32, m=m, n=150, k=200, scales="channel").make_inputs(
        "cpu"
    )

    def spread(x):
        """x as every second element of a matrix whose other elements are NaN."""
        wide = torch.full((x.shape[0], 2 * x.shape[1]), 0x7F, dtype=torch.uint8)
        wide[:, ::2] = x.view(torch.uint8)
        return wide.view(FP8)[:, ::2]

    expected = op(a, b, *rest)
    for other_a in (a, a.t().contiguous().t(), spread(a)):
        for other_b in (b, b.contiguous(), spread(b), spread(b.t()).t()):
            assert torch.equal(op(other_a, other_b, *rest), expected)
    repeated = b[:, :1].expand(200, 150)
    assert torch.equal(op(a, repeated, *rest), op(a, repeated.contiguous(), *rest))
    every_second = [torch.stack((scale, scale), -1)[..., 0] for scale in rest[:2]]
    assert torch.equal(op(a, b, *every_second, rest[2]), expected)


@pytest.mark.parametrize("kind", ["one sign", "large and small", "cancelling"])
@pytest.mark.parametrize("m", [1, 9])
def test_long_sums_keep_the_bound(m, kind):
    """At any depth a sum has 15 roundings to fp32, so it keeps a tighter bound than P4's."""
    k = 70001
    generator = torch.Generator().manual_seed(3)
    a = torch.rand(m, k, generator=generator) * 400 + 40
    b = torch.rand(k, 5, generator=generator) * 400 + 40
    if kind == "large and small":
        a[:, ::16] /= 4096
    elif kind == "cancelling":
        b[::2] *= -1
    one = torch.tensor(1.0)
    inputs = (a.to(FP8), b.to(FP8), one, one, torch.float32)
    c = op(*inputs).double()
    exact = reference.gemm(*inputs[:4])
    magnitudes = reference.gemm(inputs[0].float().abs(), inputs[1].float().abs(), one, one)
    bound = 15 * 2.0**-24 * magnitudes + 2.0**-24 * exact.abs()
    assert ((c - exact).abs() <= bound * (1 + 2**-20)).all()


def test_more_than_one_copy_of_values_holds():
    """The fp32 copies of a and of b hold 64 MiB or 64 rows; here both take more than one."""
    check(70, 66, 262144 + 40, torch.bfloat16, "channel", "column")
