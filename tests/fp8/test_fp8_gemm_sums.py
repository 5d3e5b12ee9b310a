"""How the FP8 tensor cores of sm_90 sum, and the bound that follows for any codes (docs/semantics/fp8.md §3.3)."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.fp8_gemm_cases import ANY_SUM, assert_product

FP8 = torch.float8_e4m3fn
Codes = Callable[[tuple[int, int], int], Tensor]
#: Products that one instruction adds, and products between two moves to fp32 registers.
INSTRUCTION, BLOCK = 32, 128
#: Bits below the largest exponent that a term keeps.
KEPT_BITS = 13
#: The exponent of 0, below that of every product of codes.
NO_EXPONENT = -64


def exponents(x: Tensor) -> Tensor:
    """⌊log2 |x|⌋."""
    return torch.where(x == 0, NO_EXPONENT, torch.frexp(x).exponent - 1)


def cut(x: Tensor, exponent: Tensor) -> Tensor:
    """Cuts off what lies more than KEPT_BITS below 2^exponent."""
    unit = torch.exp2((exponent - KEPT_BITS).double())
    return torch.trunc(x / unit) * unit


def tensor_core_product(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k] times b [k, n] in float64 as the tensor cores sum it, up to the fp32 sums of blocks.

    Terms are aligned to the largest exponent among the products, those of whose factors are added, and the sum so far.
    """
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)
    for begin in range(0, a.shape[1], BLOCK):
        block = torch.zeros_like(total)
        for first in range(begin, min(begin + BLOCK, a.shape[1]), INSTRUCTION):
            x = a[:, first : first + INSTRUCTION].double().t()[:, :, None]
            y = b[first : first + INSTRUCTION].double()[:, None, :]
            products = x * y
            of_products = torch.where(products == 0, NO_EXPONENT, exponents(x) + exponents(y))
            largest = torch.maximum(exponents(block), of_products.amax(0))
            block = cut(block, largest) + cut(products, largest).sum(0)
            block = cut(block, exponents(block))
        total += block
    return total


def uniform_codes(shape: tuple[int, int], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator) * 448).to(FP8)


def normal_codes(shape: tuple[int, int], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 16).to(FP8)


def one_large_term(m: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Products of 7.875, which 2^16 at the head of each block cuts off whole: the worst that the units can do."""
    a, b = torch.full((m, k), 1.75), torch.full((k, n), 4.5)
    a[:, ::BLOCK] = b[::BLOCK] = 256.0
    return a.to(FP8), b.to(FP8)


@pytest.mark.parametrize(
    ("codes", "k", "measured"),
    [
        (normal_codes, 32, -16.943),
        (normal_codes, 128, -16.428),
        (uniform_codes, 32, -14.710),
        (uniform_codes, 128, -10.815),
        (uniform_codes, 1024, -10.818),
    ],
)
def test_the_model_errs_as_was_measured(codes, k, measured):
    """Mean errors as in benchmarks/results/fp8_gemm_error_h200.csv, whose codes have the same distributions."""
    a, b = codes((160, k), 1), codes((k, 160), 2)
    error = (tensor_core_product(a, b) - a.double() @ b.double()).abs()
    magnitudes = a.double().abs() @ b.double().abs()
    assert abs(math.log2((error / magnitudes).mean()) - measured) < 0.08


@pytest.mark.parametrize("k", [128, 384, 1000])
def test_one_large_term_nearly_reaches_the_bound(k):
    a, b = one_large_term(2, 3, k)
    error = (tensor_core_product(a, b) - a.double() @ b.double()).abs()
    magnitudes = a.double().abs() @ b.double().abs()
    assert (error <= ANY_SUM * magnitudes).all()
    assert (error >= 0.9 * ANY_SUM * magnitudes).all()


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n", "k"), [(128, 48, 384), (3, 70, 128), (300, 264, 1024), (17, 5002, 1000)])
def test_no_codes_exceed_the_bound(m, n, k):
    one = torch.ones((), device="cuda")
    wide = torch.randint(0, 0x7F, (m + n, k), generator=torch.Generator().manual_seed(3)).to(torch.uint8)
    for a, b in (
        one_large_term(m, n, k),
        (uniform_codes((m, k), 1), uniform_codes((k, n), 2)),
        (wide[:m].view(FP8), wide[m:].view(FP8).t()),
    ):
        inputs = (a.cuda(), b.cuda(), one, one, torch.float32)
        assert_product(torch.ops.htree.fp8_gemm(*inputs), inputs, ANY_SUM)
