"""The fp8 functions: gradients, refusals, the overflow handler, compilation (docs/semantics/fp8.md §3.3)."""

import math

import pytest
import torch

import htree_ops
from htree_ops.compat import validate_fp8_quantize_inputs
from htree_ops.errors import DeviceError, NumericalOverflowError, ShapeMismatchError, UnsupportedDtypeError
from htree_ops.ops.fp8 import (
    fp8_compute_scale,
    fp8_dequantize,
    fp8_fake_quant,
    fp8_quantize,
    handle_fp8_overflow,
)
from htree_ops.reference import fp8 as reference
from tests.support.cases import case_id, normal
from tests.support.fp8_cases import CASES, LAYOUT_CASES, codes_of
from tests.support.graphs import kernels_of
from tests.support.opcheck import opcheck

ops = torch.ops.htree

# ---- gradients


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
def test_gradient_goes_straight_through(granularity, given, device):
    x = normal((6, 200), torch.bfloat16, device, seed=1).requires_grad_()
    scale = reference.compute_scale(x.detach(), granularity)
    if given:
        scale = scale * 3  # two thirds of the range saturate
    dy = normal((6, 200), torch.bfloat16, device, seed=2)
    y = ops.fp8_fake_quant(x, scale if given else None, granularity)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(y.detach(), reference.fake_quant(x.detach(), scale, granularity))
    wanted = reference.fake_quant_backward(dy, x.detach(), scale, granularity)
    assert torch.equal(dx, wanted)
    if given:
        assert bool((dx == 0).any())


def test_gradient_with_views(device):
    x = normal((8, 12, 40), torch.float32, device, seed=3).requires_grad_()
    y = fp8_fake_quant(x.transpose(0, 2)[1:], granularity="channel", dim=0)
    y.transpose(0, 1).sin().sum().backward()
    other = x.detach().transpose(0, 2)[1:]
    scale = reference.compute_scale(other, "channel", 0)
    dy = reference.fake_quant(other, scale, "channel", 0).cos()
    dx = torch.zeros_like(x)
    dx.transpose(0, 2)[1:] = reference.fake_quant_backward(dy, other, scale, "channel", 0)
    assert torch.allclose(x.grad, dx, atol=1e-6)


def test_what_has_no_gradient_says_so(device):
    x = torch.randn(4, 32, device=device, requires_grad=True)
    scale = torch.ones((), device=device, requires_grad=True)
    with pytest.raises(NotImplementedError, match="scale has no gradient"):
        ops.fp8_fake_quant(x, scale)
    (dx,) = torch.autograd.grad(ops.fp8_fake_quant(x).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        dx.sum().backward()
    for outputs in (ops.fp8_quantize(x)[1], ops.fp8_compute_scale(x)):
        with pytest.raises(RuntimeError, match=r"not implemented|not support|derivative"):
            outputs.sum().backward()
    with pytest.raises(RuntimeError, match=r"not implemented|not support|derivative"):
        ops.fp8_dequantize(ops.fp8_quantize(x.detach())[0], scale, torch.float32).sum().backward()


def test_frozen_input_records_nothing(device):
    assert not ops.fp8_fake_quant(torch.randn(4, device=device)).requires_grad
    with torch.no_grad():
        assert not ops.fp8_fake_quant(torch.randn(4, device=device, requires_grad=True)).requires_grad


# ---- refusals: (call of the function or the op, class in Python, message); the op raises the builtin

X = torch.zeros(4, 6)
Q = X.to(torch.float8_e4m3fn)
BAD = {
    "uint8": (lambda f: f.fp8_quantize(X.to(torch.uint8)), UnsupportedDtypeError, "x must have .*dtype"),
    "integer": (lambda f: f.fp8_compute_scale(X.int()), UnsupportedDtypeError, "x must have .*dtype"),
    "double": (lambda f: f.fp8_fake_quant(X.double()), UnsupportedDtypeError, "x must have .*dtype"),
    "fp8 twice": (lambda f: f.fp8_quantize(Q), UnsupportedDtypeError, "x must have .*dtype"),
    "uint8 codes": (
        lambda f: f.fp8_dequantize(X.to(torch.uint8), torch.ones(())),
        UnsupportedDtypeError,
        "q must have .*dtype",
    ),
    "half scale": (
        lambda f: f.fp8_quantize(X, torch.ones((), dtype=torch.half)),
        UnsupportedDtypeError,
        "scale must have .*dtype",
    ),
    "scale shape": (
        lambda f: f.fp8_quantize(X, torch.ones(4, 1)),
        ShapeMismatchError,
        r"scale must have shape.*\[?4, 1",
    ),
    "scale along the channel": (
        lambda f: f.fp8_quantize(X, torch.ones(4, 6), "channel"),
        ShapeMismatchError,
        "scale must have shape",
    ),
    "scale of blocks": (
        lambda f: f.fp8_quantize(X, torch.ones(4, 2), "block", -1, 2),
        ShapeMismatchError,
        "scale must have shape",
    ),
    "dequantise": (lambda f: f.fp8_dequantize(Q, torch.ones(4, 3)), ShapeMismatchError, "scale must"),
    "one scale of another rank": (
        lambda f: f.fp8_dequantize(Q, torch.ones(1)),
        ShapeMismatchError,
        "scale must",
    ),
    "one scale of two dims": (
        lambda f: f.fp8_dequantize(Q, torch.ones(1, 1)),
        ShapeMismatchError,
        "scale must",
    ),
    "dequantise rank": (lambda f: f.fp8_dequantize(Q, torch.ones(6)), ShapeMismatchError, "scale must"),
    "granularity": (lambda f: f.fp8_quantize(X, None, "row"), ValueError, "granularity must be.*row"),
    "block": (
        lambda f: f.fp8_quantize(X, None, "block", -1, 0),
        ValueError,
        "block must be at least 1, got 0",
    ),
    "dim": (lambda f: f.fp8_compute_scale(X, "channel", 2), IndexError, "2"),
    "zero scale": (lambda f: f.fp8_quantize(X, torch.zeros(())), ValueError, "positive and finite, got 0"),
    "negative scale": (
        lambda f: f.fp8_dequantize(Q, torch.full((4, 1), -1.0)),
        ValueError,
        "positive and finite, got -1",
    ),
    "nan scale": (
        lambda f: f.fp8_fake_quant(X, torch.tensor(math.nan)),
        ValueError,
        "positive and finite, got nan",
    ),
    "infinite scale": (
        lambda f: f.fp8_quantize(X, torch.tensor(math.inf)),
        ValueError,
        "positive and finite, got inf",
    ),
    "output dtype": (lambda f: f.fp8_dequantize(Q, torch.ones(()), torch.float64), TypeError, "dtype"),
}


@pytest.mark.parametrize("layer", ["python", "op"])
@pytest.mark.parametrize("name", BAD)
def test_refusals_name_the_tensor(name, layer):
    call, kind, message = BAD[name]
    if layer == "op":
        kind = next(b for b in (ValueError, TypeError, IndexError) if issubclass(kind, b))
    with pytest.raises(kind, match=message):
        call(htree_ops if layer == "python" else ops)


#: Arguments that the op's schema refuses, or takes for something else.
PYTHON_BAD = {
    "granularity": (lambda: fp8_compute_scale(X, None), TypeError, "granularity must be a str, got NoneType"),
    "dim": (lambda: fp8_compute_scale(X, "channel", 1.0), TypeError, "dim must be an int, got float"),
    "no dim": (lambda: fp8_quantize(X, None, "channel", None), TypeError, "dim must be an int, got NoneType"),
    "block": (lambda: fp8_compute_scale(X, "block", -1, 1.5), TypeError, "block must be an int, got float"),
    "large block": (
        lambda: fp8_quantize(X, None, "block", -1, 2**63),
        ValueError,
        "block must be an int of 64 bits",
    ),
    "dtype": (lambda: fp8_dequantize(Q, torch.ones(()), "half"), TypeError, "dtype must be a torch.dtype"),
    "large scale": (lambda: fp8_quantize(X, 1e39), ValueError, r"scale must be positive and finite.*1e\+39"),
    "scale that rounds to 0": (lambda: fp8_quantize(X, 1e-46), ValueError, "scale must be positive"),
    "inverse": (lambda: htree_ops.ops.fp8.fp8_scale_inv(4.0), TypeError, "scale must be a Tensor, got float"),
}


@pytest.mark.parametrize("name", PYTHON_BAD)
def test_refusals_before_the_op(name):
    call, kind, message = PYTHON_BAD[name]
    with pytest.raises(kind, match=message):
        call()


def test_scale_messages_name_the_op():
    for name in ("fp8_quantize", "fp8_fake_quant"):
        with pytest.raises(ValueError, match=f"^{name}: scale must be positive"):
            getattr(ops, name)(X, torch.zeros(()))


def test_attributes_of_refusals():
    with pytest.raises(UnsupportedDtypeError) as dtype:
        fp8_quantize(X.int())
    assert (dtype.value.dtype, dtype.value.tensor_name) == (torch.int32, "x")
    with pytest.raises(ShapeMismatchError) as shape:
        fp8_quantize(X, torch.ones(3, 1), "channel")
    assert (shape.value.expected, shape.value.actual, shape.value.tensor_name) == ((4, 1), (3, 1), "scale")
    with pytest.raises(DeviceError) as place:
        fp8_quantize(X, torch.ones((), device="meta"))
    assert str(place.value.actual_device) == "meta"
    with pytest.raises(DeviceError, match="x must be on a CUDA device"):
        validate_fp8_quantize_inputs(X, require_cuda=True)
    for wrong in ("1", True, [1.0]):
        with pytest.raises(TypeError, match="scale must be a Tensor or a number"):
            fp8_quantize(X, wrong)
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="scale must be positive and finite"):
            fp8_quantize(X, wrong)
    with pytest.raises(TypeError, match="x must be a Tensor, got list"):
        fp8_quantize([1.0])


# ---- the overflow handler


@pytest.mark.parametrize("excess", [1.0, 1.9, 3.7, 7.9])
def test_halving_reaches_scales_eight_times_too_large(excess, device):
    x = normal((37, 65), torch.bfloat16, device, seed=4)
    best = reference.compute_scale(x)
    q, used = handle_fp8_overflow(x, best * excess)
    halvings = math.ceil(math.log2(excess * 448 / 464)) if excess > 464 / 448 else 0
    assert torch.equal(used, best * excess / 2**halvings)
    assert torch.equal(codes_of(q), reference.encode(x.float() * used))


def test_overflow_beyond_reach(device):
    x = torch.tensor([1.0, -2.0, math.nan], device=device)
    with pytest.raises(NumericalOverflowError) as error:
        handle_fp8_overflow(x, 448.0 * 64)
    assert isinstance(error.value, ArithmeticError)
    assert (error.value.max_value, error.value.scale, error.value.attempts) == (2.0, 448.0 * 8, 4)
    q, used = handle_fp8_overflow(x, 448.0 * 64, on_fail="saturate")
    assert float(used) == 448.0 * 8
    assert q.float().tolist()[:2] == [448.0, -448.0]
    _, used = handle_fp8_overflow(x, 448.0 * 64, max_attempts=7)
    assert float(used) == 448.0 / 2


def test_many_attempts(device):
    x = torch.tensor([1e-3, 3e38], device=device)
    q, used = handle_fp8_overflow(x, 2.0**100, max_attempts=10**9)
    assert float(used) == 2.0**-119
    assert float(q[1].float()) == 448.0


def test_infinite_input(device):
    x = torch.tensor([1.0, math.inf, -3.0], device=device)
    with pytest.raises(NumericalOverflowError, match="infinite") as error:
        handle_fp8_overflow(x, 1.0)
    assert (error.value.max_value, error.value.scale, error.value.attempts) == (math.inf, 1.0, 1)
    q, used = handle_fp8_overflow(x, 448.0, on_fail="saturate")
    assert float(used) == 112.0
    assert q.float().tolist() == [112.0, 448.0, -320.0]


def test_overflow_by_rows(device):
    x = normal((5, 64), torch.float32, device, seed=5)
    scale = fp8_compute_scale(x, "channel") * torch.tensor([1, 2, 1, 1, 1.0], device=device)[:, None]
    _, used = handle_fp8_overflow(x, scale, granularity="channel")
    assert torch.equal(used, scale / 2)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"max_attempts": 0}, ValueError, "max_attempts must be at least 1, got 0"),
        ({"max_attempts": 1.5}, TypeError, "max_attempts must be an int"),
        ({"on_fail": "ignore"}, ValueError, "on_fail must be"),
        ({"scale": 0.0}, ValueError, "scale must be positive"),
        ({"scale": None}, TypeError, "scale must be a Tensor or a number"),
        ({"tensor": X.int()}, UnsupportedDtypeError, "tensor must have dtype"),
    ],
)
def test_overflow_handler_refusals(arguments, kind, message):
    with pytest.raises(kind, match=message):
        handle_fp8_overflow(**{"tensor": X, "scale": 1.0, **arguments})


# ---- the choice of kernels


@pytest.mark.parametrize("element_size", [2, 4])
def test_kernel_configuration(element_size):
    config = pytest.importorskip("htree_ops._host").fp8_quantize_config
    wide = 16 // element_size
    for cols in (8, 64, 100, 128, 1000, 8192, 32768, 33001, 65536):
        threads, packs, pack, splits = config(64, cols, 1, cols, element_size)
        assert pack == (wide if cols % wide == 0 else 1)
        assert (threads == 0) == (splits > 0), "read once, or searched first"
        if threads:
            assert threads * packs * pack >= cols
            assert threads * packs * pack < 4 * max(cols, 256), "few idle threads"
    assert config(1, 2**27, 0, 2**27, element_size)[3] == 4 * 132
    assert config(1, 5000, 0, 5000, element_size)[3] <= 3
    assert config(4096, 4096, 2, 4096, element_size)[3] * 4096 // (32 * wide) >= 4 * 132
    assert config(4096, 4096, 2, 64, element_size)[3] == 1
    assert config(16, 8192, 1, 100, element_size)[2] == (1 if 100 % wide else wide)


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [128, 1000, 8192, 32768])
def test_number_of_kernels(cols):
    """Each call launches one kernel, quantising one more: with one scale for the whole tensor to find it, else to set
    the counter of overflows to 0."""

    def count(call):
        call()
        return sum(not name.startswith("Mem") for name in kernels_of(call))

    x = torch.randn(64, cols, device="cuda", dtype=torch.bfloat16)
    rows = fp8_quantize(x, granularity="channel")
    whole = fp8_quantize(x)
    columns = fp8_quantize(x, granularity="channel", dim=0)
    dy = torch.ones_like(x)
    assert count(lambda: ops.fp8_quantize(x, None, "channel")) == 2
    assert count(lambda: ops.fp8_quantize(x, None, "block")) == 2
    assert count(lambda: ops.fp8_fake_quant(x, None, "channel")) == 1
    assert count(lambda: ops.fp8_compute_scale(x, "channel")) == 1
    assert count(lambda: ops.fp8_quantize(x, None, "tensor")) == 2
    assert count(lambda: ops.fp8_quantize(x, whole[1], "tensor")) <= 3  # the third copies the scale
    for q, scale, _ in (rows, whole, columns):
        assert count(lambda q=q, scale=scale: ops.fp8_dequantize(q, scale, torch.bfloat16)) == 1
    assert count(lambda: ops._fp8_fake_quant_backward(dy, x, rows[1], "channel")) == 1


# ---- numbers as scales, meta tensors, compilation


def test_a_number_is_the_scale_of_every_group(device):
    x = normal((6, 300), torch.float16, device, seed=6)
    for granularity, shape in (("tensor", ()), ("channel", (6, 1)), ("block", (6, 3))):
        q, used, _ = fp8_quantize(x, 20.0, granularity)
        assert torch.equal(used, torch.full(shape, 20.0, device=device))
        assert torch.equal(codes_of(q), reference.encode(x.float() * 20.0))
        assert torch.equal(fp8_fake_quant(x, 20.0, granularity), fp8_dequantize(q, used, x.dtype))


def test_dequantised_values_are_those_of_the_scale_by_default(device):
    """A quantised tensor comes back without an infinity, whatever its dtype was; the op's own default is float16."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = normal((6, 300), dtype, device, seed=6, scale=1e3 if dtype == torch.float16 else 1e30)
        q, scale, _ = fp8_quantize(x)
        back = fp8_dequantize(q, scale)
        assert back.dtype == torch.float32
        torch.testing.assert_close(back, x.float(), rtol=1 / 16, atol=float(x.abs().max()) * 2.0**-10 / 448)
        assert torch.equal(back, ops.fp8_dequantize(q, scale, torch.float32))
        assert fp8_dequantize(q, scale, torch.float16).isinf().any() == (dtype != torch.float16)
        assert ops.fp8_dequantize(q, scale).dtype == torch.float16
        compiled = torch.compile(fp8_dequantize, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(q, scale), back)


OPCHECK_CASES = [c for c in [*CASES, *LAYOUT_CASES] if math.prod(c.shape) < 3000][::23]


@pytest.mark.parametrize("case", OPCHECK_CASES, ids=case_id)
def test_opcheck(case, device):
    x, scale, *grouping = case.make_inputs(device)
    # torch 2.11 cannot compare float8 tensors, which two of opcheck's tests do with inputs and outputs
    utils = ("test_autograd_registration", "test_faketensor")
    opcheck(ops.fp8_quantize.default, (x, scale, *grouping), test_utils=utils)
    opcheck(ops.fp8_compute_scale.default, (x, *grouping))
    opcheck(ops.fp8_fake_quant.default, (x, scale, *grouping))
    opcheck(ops.fp8_fake_quant.default, (x.clone().requires_grad_(), scale, *grouping))
    q, used, _ = ops.fp8_quantize(x, scale, *grouping)
    opcheck(ops.fp8_dequantize.default, (q, used, torch.bfloat16, case.block), test_utils=utils)
    dy = torch.ones_like(x)
    opcheck(ops._fp8_fake_quant_backward.default, (dy, x, used, *grouping))


@pytest.mark.parametrize("case", OPCHECK_CASES, ids=case_id)
def test_meta_says_what_the_kernels_give(case, device):
    x, scale, *grouping = case.make_inputs(device)
    real = ops.fp8_quantize(x, scale, *grouping)
    fake = ops.fp8_quantize(x.to("meta"), None if scale is None else scale.to("meta"), *grouping)
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


@pytest.mark.parametrize(
    ("granularity", "dynamic", "backend"),
    [("tensor", False, "aot_eager"), ("channel", True, "aot_eager"), ("block", True, "inductor")],
)
def test_compile_with_views_and_backward(granularity, dynamic, backend, device):
    def model(x):
        y = ops.fp8_fake_quant(x.transpose(0, 1)[1:], None, granularity, -1, 32)
        with torch.no_grad():
            q, scale, n = fp8_quantize(y[:, :, 1:], None, granularity, -1, 32)
            back = fp8_dequantize(q, scale, torch.float32, 32)
        return y.sin().sum() + back.sum() + n

    torch.compiler.reset()  # all parameters share one code object, whose recompilations are limited
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    for length in (5, 9):
        x = normal((3, length, 70), torch.float32, device, seed=length).requires_grad_()
        other = x.detach().clone().requires_grad_()
        result, wanted = compiled(x), model(other)
        result.backward()
        wanted.backward()
        # at most 1700 terms below 4, each sum with its own order of fp32 roundings
        assert torch.allclose(result, wanted, rtol=0, atol=1700 * 4 * 2.0**-24)
        assert torch.allclose(x.grad, other.grad, atol=1e-6)


def test_lengths_do_not_recompile(device):
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def model(x):
        q, scale, _ = ops.fp8_quantize(x, None, "block", -1, 16)
        return ops.fp8_dequantize(q, scale, torch.float32, 16), ops.fp8_fake_quant(x, None, "channel", 0)

    for rows, cols in ((5, 70), (6, 90), (17, 133), (8, 320)):
        model(torch.randn(rows, cols, device=device))
    assert counter.frame_count == 1


def test_export_keeps_one_node_per_call(device):
    class Model(torch.nn.Module):
        def forward(self, x):
            q, scale, _ = fp8_quantize(x, None, "channel")
            return fp8_dequantize(q, scale, torch.float32) + fp8_fake_quant(x)

    rows = torch.export.Dim("rows", min=2, max=100)
    program = torch.export.export(
        Model(), (torch.randn(6, 40, device=device),), dynamic_shapes={"x": {0: rows}}
    )
    calls = [n.target for n in program.graph.nodes if n.op == "call_function" and "htree" in str(n.target)]
    assert calls == [ops.fp8_quantize.default, ops.fp8_dequantize.default, ops.fp8_fake_quant.default]
    x = torch.randn(11, 40, device=device)
    assert torch.equal(program.module()(x), Model()(x))
