"""fp8_gemm and fp8_gemm_exact against the float64 product of the dequantised operands (docs/semantics/fp8.md §3.3)."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from htree_ops.compat import FP8GEMMInput, validate_fp8_gemm_inputs
from htree_ops.errors import (
    ArchitectureNotSupportedError,
    DeviceError,
    ShapeMismatchError,
    UnsupportedDtypeError,
)
from htree_ops.ops.fp8 import fp8_quantize, fp8_scale_inv
from htree_ops.ops.fp8.gemm import COMPILED_CONFIGS, KEYS, fp8_gemm, fp8_gemm_exact
from htree_ops.reference import fp8 as reference
from tests.support.cases import case_id, normal
from tests.support.devices import poisoned_memory
from tests.support.fp8_gemm_cases import (
    CASES,
    EXACT_SUM,
    KERNEL_CASES,
    ONE_SIGN_SUM,
    OUTPUTS,
    FP8GemmCase,
    assert_product,
    sum_error,
)
from tests.support.graphs import capture, kernels_of, on_another_stream
from tests.support.opcheck import opcheck

FP8 = torch.float8_e4m3fn
op = torch.ops.htree.fp8_gemm
op_exact = torch.ops.htree.fp8_gemm_exact


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_product(case, device, nan_memory):
    inputs = case.make_inputs(device)
    c = op(*inputs)
    assert c.shape == (case.m, case.n)
    assert_product(c, inputs, sum_error(device))
    assert torch.equal(op(*inputs), c), "two runs must agree bit for bit"
    assert_product(op_exact(*inputs), inputs, EXACT_SUM)


def test_nothing_to_sum_gives_zeros(device, nan_memory):
    a, b = torch.zeros(3, 0, device=device).to(FP8), torch.zeros(0, 5, device=device).to(FP8)
    scale = torch.tensor(2.0, device=device)
    for f in (op, op_exact):
        c = f(a, b, scale, scale, torch.float32)
        assert c.shape == (3, 5)
        assert not c.any()


def test_small_integers_are_exact(device):
    """Products of small integers whose sums stay below 2^12 are exact, on the tensor cores too."""
    generator = torch.Generator().manual_seed(5)
    for m, n, k in ((3, 70, 100), (200, 144, 96)):
        a = torch.randint(-3, 4, (m, k), generator=generator).float().to(device)
        b = torch.randint(-3, 4, (k, n), generator=generator).float().to(device)
        one = torch.tensor(1.0, device=device)
        c = op(a.to(FP8), b.to(FP8), one, one, torch.float32)
        assert torch.equal(c, a @ b)


def test_long_sums_of_one_sign(device):
    """The worst case for units that cut off instead of rounding."""
    a, b = (
        normal(shape, torch.float32, device, seed=i).abs() * 100
        for i, shape in enumerate([(40, 20000), (20000, 48)])
    )
    one = torch.tensor(1.0, device=device)
    inputs = (a.clamp(max=448).to(FP8), b.clamp(max=448).to(FP8), one, one, torch.float32)
    assert_product(op_exact(*inputs), inputs, EXACT_SUM)
    assert_product(op(*inputs), inputs, EXACT_SUM if device == "cpu" else ONE_SIGN_SUM)


@pytest.mark.parametrize("rows", [4, 90])
def test_special_values_stay_in_their_row(rows, device):
    a, b, *rest = FP8GemmCase(name="nan", dtype=torch.float32, m=rows, n=80, k=144).make_inputs(device)
    clean = op(a, b, *rest)
    spoilt = a.clone()
    spoilt.view(torch.uint8)[2, 7] = 0x7F
    c = op(spoilt, b, *rest)
    assert c[2].isnan().all()
    others = [i for i in range(rows) if i != 2]
    assert torch.equal(c[others], clean[others])


def test_extreme_scales(device):
    a = torch.full((2, 32), 2.0, device=device).to(FP8)
    b = torch.full((32, 16), 2.0, device=device).to(FP8)
    for s_a, s_b in ((2.0**-100, 2.0**100), (2.0**127, 2.0**-120), (2.0**-126, 2.0**126)):
        scales = [torch.tensor(s, device=device) for s in (s_a, s_b)]
        for f in (op, op_exact):
            c = f(a, b, *scales, torch.float32)
            assert torch.equal(c, torch.full_like(c, 128.0 / (s_a * s_b)))


@pytest.mark.parametrize("k", [14336, 1 << 18])
@pytest.mark.parametrize("kind", ["one sign", "outlier", "largest"])
def test_long_sums(kind, k, device):
    """A chain of fp32 additions would exceed the bound, because each one rounds to the size of the sum."""
    generator = torch.Generator().manual_seed(3)
    a, b = torch.rand(3, k, generator=generator), torch.rand(k, 16, generator=generator)
    if kind == "outlier":
        a, b = torch.full_like(a, 0.01), torch.full_like(b, 0.01)
        a[:, 0], b[0] = 448.0, 448.0
    elif kind == "largest":
        a, b = torch.full_like(a, 448.0), torch.full_like(b, 416.0)
    one = torch.tensor(1.0, device=device)
    inputs = (a.to(FP8).to(device), b.to(FP8).to(device), one, one, torch.float32)
    assert_product(op_exact(*inputs), inputs, 0.0)  # the sums are exact
    assert_product(op(*inputs), inputs, sum_error(device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("s_a", "s_b"),
    [
        (2.0**3, 2.0**127),
        (2.0**127, 448.0),
        (2.0**-149, 2.0**127),
        (2.0**127, 2.0**-149),
        (3e38, 3e38),
        (1e-45, 1e-45),
        (1.3 * 2.0**-70, 1.7 * 2.0**70),
        (1.5 * 2.0**63, 1.5 * 2.0**62),
        (1e-40, 1e35),
        (2.0**-60, 2.0**-61),
    ],
)
@pytest.mark.parametrize(("m", "n", "k"), [(3, 16, 64), (70, 40, 600), (200, 136, 144)], ids=str)
def test_scales_whose_product_leaves_fp32(m, n, k, s_a, s_b, dtype, device):
    """The kernels for few rows, a split k and tiles apply the scales so that only the result can leave fp32."""
    a, b = torch.ones(m, k).to(FP8).to(device), torch.ones(k, n).to(FP8).t().contiguous().t().to(device)
    inputs = (a, b, torch.tensor(s_a, device=device), torch.tensor(s_b, device=device), dtype)
    rows = (a, b, inputs[2].expand(m, 1).contiguous(), inputs[3].expand(1, n).contiguous(), dtype)
    for f in (op, op_exact):
        assert_product(f(*inputs), inputs, EXACT_SUM)
        assert torch.equal(f(*rows), f(*inputs))
        assert not f(torch.zeros_like(a), *inputs[1:]).any()


@pytest.mark.gpu
@pytest.mark.parametrize(("s_a", "s_b"), [(2.0**-100, 2.0**101), (2.0**120, 2.0**-126), (2.0**126, 2.0**-30)])
def test_scales_far_apart_in_large_products(s_a, s_b):
    """The two factors that cuBLASLt multiplies by are together the product of the scales."""
    a, b, *_ = FP8GemmCase(name="large", dtype=torch.float32, m=640, n=4096, k=1024).make_inputs("cuda")
    inputs = (a, b, torch.tensor(s_a, device="cuda"), torch.tensor(s_b, device="cuda"), torch.float32)
    assert_product(op(*inputs), inputs, sum_error("cuda"))


def test_overflow_of_the_result(device):
    a = torch.full((3, 64), 448.0, device=device).to(FP8)
    b = torch.full((64, 16), 448.0, device=device).to(FP8)
    one = torch.tensor(1.0, device=device)
    assert (op(a, b, one, one, torch.float16) == math.inf).all()
    assert torch.equal(op(a, b, one, one, torch.float32), torch.full((3, 16), 64 * 448.0**2, device=device))


# ---- properties

sizes = st.tuples(st.integers(1, 150), st.integers(1, 150), st.integers(1, 300))
seeds = st.integers(0, 2**31 - 1)


@given(
    size=sizes,
    seed=seeds,
    dtype=st.sampled_from(OUTPUTS),
    scales=st.sampled_from(["tensor", "channel", "mixed"]),
    layout=st.sampled_from(["column", "row", "sliced"]),
)
def test_property_4_kernel_bound(device, size, seed, dtype, scales, layout):
    """Feature: fused operators, Property 4: the product of the dequantised operands, with γ as documented."""
    m, n, k = size
    inputs = FP8GemmCase(name="p4", dtype=dtype, m=m, n=n, k=k, scales=scales, layout=layout).make_inputs(
        device, seed
    )
    with poisoned_memory():
        assert_product(op(*inputs), inputs, sum_error(device))
        assert_product(op_exact(*inputs), inputs, EXACT_SUM)


@given(size=sizes, seed=seeds)
def test_property_6_quantisation_error(device, size, seed):
    """Feature: fused operators, Property 6 (a): |C8 - C| <= (2d + d²)·|A||B| + floor terms, d = 1/17."""
    m, n, k = size
    a = normal((m, k), torch.float32, device, seed)
    b = normal((k, n), torch.float32, device, seed + 1)
    (qa, sa, _), (qb, sb, _) = fp8_quantize(a), fp8_quantize(b)
    c = op(qa, qb, sa, sb, torch.float32).double()
    d = 1 / 17
    floor_a, floor_b = (2.0**-10 / float(s) for s in (sa, sb))
    wide_a, wide_b = a.double().abs(), b.double().abs()
    bound = (2 * d + d * d + sum_error(device) * 1.2) * (wide_a @ wide_b)
    bound += floor_a * (1 + d) * wide_b.sum(0, keepdim=True) + floor_b * (1 + d) * wide_a.sum(1, keepdim=True)
    bound += k * floor_a * floor_b
    assert ((c - a.double() @ b.double()).abs() <= bound * (1 + 2**-10)).all()


@given(k=st.sampled_from([256, 1024, 2048]), spread=st.floats(2.0**-4, 2.0**4), seed=seeds)
def test_property_6_in_norm(device, k, spread, seed):
    """Feature: fused operators, Property 6 (b): at most 6 % in the Frobenius norm for zero-mean data."""
    a = normal((32, k), torch.float32, device, seed, spread)
    b = normal((k, 24), torch.float32, device, seed + 1)
    c = fp8_gemm(a, b, output_dtype=torch.float32).double()
    expected = a.double() @ b.double()
    assert (c - expected).norm() <= 0.06 * expected.norm()


@given(k=st.sampled_from([1024, 1500, 2048]), seed=seeds)
def test_property_6_for_one_sign(device, k, seed):
    """Feature: fused operators, Property 6 (c): 1 % per element where no product is negative, K >= 1024."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.rand(24, k, generator=generator).to(device)
    b = torch.rand(k, 16, generator=generator).to(device)
    c = fp8_gemm(a, b, output_dtype=torch.float32).double()
    expected = a.double() @ b.double()
    assert ((c - expected).abs() <= 0.01 * expected).all()


@pytest.mark.gpu
@pytest.mark.parametrize("case", KERNEL_CASES, ids=case_id)
def test_every_kernel_of_hopper(case, nan_memory):
    inputs = case.make_inputs("cuda")
    c = op(*inputs)
    assert_product(c, inputs, sum_error("cuda"))
    assert torch.equal(op(*inputs), c), "two runs must agree bit for bit"


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n", "k"), [(128, 128, 65536), (16, 256, 32768), (600, 1000, 16384)])
def test_few_tiles_of_long_sums(m, n, k):
    """Products of few tiles with many k-blocks, which cuBLASLt splits along k."""
    for scales in ("tensor", "channel"):
        inputs = FP8GemmCase(name="long", dtype=torch.bfloat16, m=m, n=n, k=k, scales=scales).make_inputs(
            "cuda"
        )
        assert_product(op(*inputs), inputs, sum_error("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [8296, 8290])
def test_many_tiles(n):
    """Many waves of tiles; the last row and column of tiles are ragged."""
    inputs = FP8GemmCase(name="tiles", dtype=torch.float16, m=4200, n=n, k=272, scales="channel").make_inputs(
        "cuda"
    )
    c = op(*inputs)
    assert_product(c, inputs, sum_error("cuda"))
    assert torch.equal(op(*inputs), c)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [512, 4096])
def test_no_less_accurate_than_cublaslt(k):
    a, b, a_scale, b_scale, _ = FP8GemmCase(
        name="accuracy", dtype=torch.float32, m=256, n=256, k=k
    ).make_inputs("cuda")
    expected = reference.gemm(a, b, a_scale, b_scale)
    theirs = torch._scaled_mm(
        a, b, 1 / a_scale, 1 / b_scale, out_dtype=torch.float32, use_fast_accum=False
    ).double()
    limit = 1.1 * (theirs - expected).norm()
    assert (op(a, b, a_scale, b_scale, torch.float32).double() - expected).norm() <= limit
    for config in COMPILED_CONFIGS:
        ours = op(a, b, a_scale, b_scale, torch.float32, list(config)).double()
        assert (ours - expected).norm() <= limit


# ---- configurations, refusals


@pytest.mark.parametrize("config", COMPILED_CONFIGS, ids=str)
@pytest.mark.parametrize("size", [(3, 40, 64), (300, 260, 400)], ids=str)
def test_every_configuration_computes_the_same(size, config, device):
    m, n, k = size
    for dtype in OUTPUTS:
        inputs = FP8GemmCase(name="config", dtype=dtype, m=m, n=n, k=k, scales="channel").make_inputs(device)
        c = op(*inputs, list(config))
        assert_product(c, inputs, sum_error(device))
        assert torch.equal(fp8_gemm(*inputs, **dict(zip(KEYS, config, strict=True))), c)


def test_configurations_are_checked_everywhere():
    inputs = FP8GemmCase(name="c", dtype=torch.float16, m=2, n=3, k=4).make_inputs("cpu")
    with pytest.raises(NotImplementedError, match="no kernel is compiled"):
        op(*inputs, [64, 64, 32, 4, 4, 3])
    with pytest.raises(ValueError, match="config must be"):
        op(*inputs, [64])
    with pytest.raises(ArchitectureNotSupportedError, match="compiled: "):
        fp8_gemm(*inputs, BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, GROUP_SIZE_M=4, num_warps=4, num_stages=3)
    with pytest.raises(ValueError, match="give all of"):
        fp8_gemm(*inputs, BLOCK_M=64)
    keys = dict(zip(KEYS, COMPILED_CONFIGS[0], strict=True))
    with pytest.raises(TypeError, match="GROUP_SIZE_M must be an int, got float"):
        fp8_gemm(*inputs, **{**keys, "GROUP_SIZE_M": 4.0})


A, B, S = torch.ones(2, 4).to(FP8), torch.ones(4, 3).to(FP8), torch.tensor(1.0)
ERRORS = {
    "a rank": (lambda f: f(A[0], B, S, S), ShapeMismatchError, r"a must be 2-D \[M, K\]"),
    "b rank": (lambda f: f(A, B[0], S, S), ShapeMismatchError, r"b must be 2-D \[K, N\]"),
    "k": (lambda f: f(A, torch.ones(5, 3).to(FP8), S, S), ShapeMismatchError, r"size 0 of b must be"),
    "a dtype": (lambda f: f(A.view(torch.uint8), B, S, S), UnsupportedDtypeError, r"a must have"),
    "b dtype": (lambda f: f(A, B.view(torch.uint8), S, S), UnsupportedDtypeError, r"b must have"),
    "scale dtype": (lambda f: f(A, B, S.double(), S), UnsupportedDtypeError, r"a_scale must have"),
    "output": (lambda f: f(A, B, S, S, torch.int32), UnsupportedDtypeError, r"output_dtype must be"),
    "varies along K": (
        lambda f: f(A, B, torch.ones(1, 4), S),
        ShapeMismatchError,
        r"a_scale must be \[\] or \[2, 1\], constant along K, got \[1, 4\]",
    ),
    "b varies along K": (
        lambda f: f(A, B, S, torch.ones(4, 1)),
        ShapeMismatchError,
        r"b_scale must be \[\] or \[1, 3\], constant along K",
    ),
    "device": (lambda f: f(A, B, S, S.to("meta")), DeviceError, r"b_scale must be on the device of a"),
}
LAYERS = {
    "python": (fp8_gemm, fp8_gemm_exact),
    "validator": (validate_fp8_gemm_inputs, lambda *given: FP8GEMMInput(*given).validate()),
    "op": (op, op_exact),
}


SCALE_VALUES = {"a_scale": lambda f, bad: f(A, B, bad, S), "b_scale": lambda f, bad: f(A, B, S, bad)}


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", SCALE_VALUES)
def test_scales_are_checked_on_the_cpu(name, value):
    for f in (fp8_gemm, fp8_gemm_exact, validate_fp8_gemm_inputs, op, op_exact):
        for bad in (torch.tensor(value), torch.full((2, 1) if name == "a_scale" else (1, 3), value)):
            with pytest.raises(ValueError, match=f"{name} must be positive and finite, got {value:g}"):
                SCALE_VALUES[name](f, bad)


def test_messages_name_the_function():
    for f, name in ((fp8_gemm, "fp8_gemm"), (fp8_gemm_exact, "fp8_gemm_exact")):
        for call in (f, getattr(torch.ops.htree, name)):
            with pytest.raises(ValueError, match=f"^{name}: size 0 of b"):
                call(A, torch.ones(5, 3).to(FP8), S, S)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_argument_requirement_and_value(name, layer):
    call, kind, message = ERRORS[name]
    if layer == "op":
        kind = next(b for b in (ValueError, TypeError, RuntimeError) if issubclass(kind, b))
    for f in LAYERS[layer]:
        with pytest.raises(kind, match=message):
            call(f)


def test_the_arguments_of_a_product_as_one_value():
    given = FP8GEMMInput(A, B, S, S)
    given.validate()
    assert given.output_dtype == torch.float16


def test_python_layer(device):
    a = normal((20, 48), torch.float32, device, seed=1)
    b = normal((48, 32), torch.bfloat16, device, seed=2)
    (qa, sa, _), (qb, sb, _) = fp8_quantize(a), fp8_quantize(b)
    assert torch.equal(fp8_gemm(a, b), op(qa, qb, sa, sb, torch.float32))
    assert torch.equal(fp8_gemm(qa, b, sa, output_dtype=torch.float16), op(qa, qb, sa, sb))
    assert torch.equal(fp8_gemm_exact(qa, qb, sa, sb), op_exact(qa, qb, sa, sb))
    with pytest.raises(ValueError, match="a_scale must be a Tensor where a is quantised already, got None"):
        fp8_gemm(qa, b)
    with pytest.raises(UnsupportedDtypeError, match="a must have dtype"):
        fp8_gemm(a.int(), b)
    with pytest.raises(TypeError, match="a must be a Tensor, got list"):
        fp8_gemm([1.0], b)
    with pytest.raises(ValueError, match="a_scale"):
        fp8_gemm(qa.cpu(), qb.cpu(), torch.tensor(-1.0), sb.cpu())
    with pytest.raises(DeviceError, match="b_scale"):
        fp8_gemm(qa, qb, sa, torch.tensor(1.0, device="meta"))


def test_the_product_of_floats_has_their_dtype(device):
    """Of two the one that holds both; float16, the default of the op, only where both operands are codes."""
    half, bf16, single = torch.float16, torch.bfloat16, torch.float32
    wanted = {(FP8, FP8): half, (half, bf16): single, (bf16, half): single}
    for x in (half, bf16, single):
        wanted |= {(x, x): x, (x, FP8): x, (FP8, x): x, (x, single): single, (single, x): single}
    a, b = torch.full((16, 64), 2.0, device=device), torch.full((64, 16), 0.5, device=device)
    scale = torch.ones((), device=device)
    for (x, y), dtype in wanted.items():
        operands = (a.to(x), b.to(y), scale, scale)
        torch._dynamo.reset()
        for c in (fp8_gemm(*operands), torch.compile(fp8_gemm, fullgraph=True, backend="eager")(*operands)):
            assert c.dtype == dtype, (x, y)
            assert (c == 64).all()
        assert fp8_gemm(*operands, bf16).dtype == bf16
    codes = (a.to(FP8), b.to(FP8), scale, scale)
    assert fp8_gemm_exact(*codes).dtype == half
    assert fp8_gemm_exact(*codes, single).dtype == single


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_product_of_floats_does_not_overflow(dtype, device):
    a, b = torch.full((16, 64), 60.0, device=device), torch.full((64, 16), 60.0, device=device)
    product = fp8_gemm(a.to(dtype), b.to(dtype))
    torch.testing.assert_close(product.float(), a @ b, rtol=0.1, atol=0)
    assert fp8_gemm(a.half(), b.half()).isinf().all(), "230 400 in the dtype of the operands"


def test_scales_are_the_reciprocals_of_those_of_torch(device):
    a, b = normal((16, 64), torch.float32, device, seed=1), normal((64, 32), torch.float32, device, seed=2)
    (qa, sa, _), (qb, sb, _) = fp8_quantize(a), fp8_quantize(b)
    inverse = [fp8_scale_inv(s) for s in (sa, sb)]
    theirs = torch._scaled_mm(qa, qb.t().contiguous().t(), *inverse, out_dtype=torch.float32)
    torch.testing.assert_close(fp8_gemm(qa, qb, sa, sb, torch.float32), theirs, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close([fp8_scale_inv(s) for s in inverse], [sa, sb])


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("rows", [False, True])
def test_given_scales_of_float_operands(rows, columns, device):
    a = normal((20, 48), torch.float32, device, seed=1)
    b = normal((48, 32), torch.bfloat16, device, seed=2)
    sa = torch.linspace(50, 90, 20, device=device)[:, None] if rows else torch.tensor(70.0, device=device)
    sb = torch.linspace(50, 90, 32, device=device)[None, :] if columns else torch.tensor(70.0, device=device)
    qa, _, _ = fp8_quantize(a, sa, "channel" if rows else "tensor")
    qb, _, _ = fp8_quantize(b, sb, "channel" if columns else "tensor", 0)
    assert torch.equal(fp8_gemm(a, b, sa, sb), op(qa, qb, sa, sb, torch.float32))
    assert torch.equal(fp8_gemm(qa, b, sa, sb), op(qa, qb, sa, sb, torch.bfloat16))
    for wrong in (torch.ones(1, 20), torch.ones(20), torch.ones(20, 48)):
        with pytest.raises(ShapeMismatchError, match=r"^fp8_gemm: a_scale must have shape \[20, 1\]"):
            fp8_gemm(a, b, wrong.to(device), sb)
    with pytest.raises(ShapeMismatchError, match=r"^fp8_gemm: b_scale must have shape \[1, 32\]"):
        fp8_gemm(a, b, sa, sb.reshape(-1)[:1, None])


@pytest.mark.gpu
def test_one_kernel_on_own_paths():
    for m in (1, 64):
        inputs = FP8GemmCase(name="one", dtype=torch.float16, m=m, n=256, k=512).make_inputs("cuda")
        op(*inputs)
        kernels = kernels_of(lambda inputs=inputs: op(*inputs))
        assert len(kernels) == 1, kernels


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 64, 200])
def test_calls_that_begin_before_the_last_one_ends(m):
    """Each product reads what the previous call wrote and may write to memory that an older call still uses."""
    a, b, a_scale, b_scale, _ = FP8GemmCase(
        name="chain", dtype=torch.float16, m=m, n=1024, k=1024
    ).make_inputs("cuda")

    def chain(wait):
        x = a
        for _ in range(6):
            y = op(x, b, a_scale, b_scale * 20, torch.float32)
            if wait:
                torch.cuda.synchronize()
            x = y.clamp(-448, 448).to(FP8)
            for _ in range(3):
                z = op(x, b, a_scale, b_scale, torch.float16)
                if wait:
                    torch.cuda.synchronize()
        return torch.cat((y, z.float()))

    expected = chain(wait=True)
    assert expected.isfinite().any()
    assert torch.equal(chain(wait=False).nan_to_num(), expected.nan_to_num())
    on_another_stream(lambda: chain(wait=False))
    graph, result = capture(lambda: chain(wait=False))
    for _ in range(3):
        graph.replay()
        assert torch.equal(result.nan_to_num(), expected.nan_to_num())


# ---- compile, export


@pytest.mark.parametrize("case", CASES[::17], ids=case_id)
def test_opcheck(case, device):
    inputs = case.make_inputs(device)
    # test_schema multiplies its inputs, which torch cannot do in this dtype
    tests = ("test_autograd_registration", "test_faketensor")
    opcheck(op.default, inputs, test_utils=tests)
    opcheck(op_exact.default, inputs, test_utils=tests)


def test_compile(device):
    a, b, *rest = FP8GemmCase(name="compile", dtype=torch.float32, m=70, n=32, k=48).make_inputs(device)

    def model(x):
        return op(x, b, *rest) * 2

    assert torch.equal(torch.compile(model, fullgraph=True)(a), model(a))
