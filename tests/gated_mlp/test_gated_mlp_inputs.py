"""Refusals, gradients, compilation and export of gated_mlp (docs/semantics §0.4, §0.5, §3.4)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import htree_ops
from htree_ops.compat import GatedMLPInput, validate_gated_mlp_inputs
from htree_ops.errors import (
    ArchitectureNotSupportedError,
    DeviceError,
    ShapeMismatchError,
    UnsupportedDtypeError,
)
from htree_ops.ops.gated_mlp import COMPILED_CONFIGS, FusedGatedMLP, gated_mlp
from htree_ops.tuning.space import GATED_MLP, config_search
from tests.support.cases import case_id, normal
from tests.support.compare import assert_close_spec
from tests.support.compilers import BACKENDS
from tests.support.gated_mlp_cases import CASES, GatedMLPCase
from tests.support.opcheck import opcheck

op = torch.ops.htree.gated_mlp
op_forward = torch.ops.htree._gated_mlp_forward
op_backward = torch.ops.htree.gated_mlp_backward
op_saved_backward = torch.ops.htree._gated_mlp_saved_backward

Call = Callable[..., Any]
O = torch.ones
ERRORS: dict[str, tuple[Callable[[Call], Any], type[Exception], str]] = {
    "scalar": (lambda f: f(O(()), O(3, 4), O(3, 4)), ShapeMismatchError, r"x must be .*, got 0-D"),
    "gate rank": (lambda f: f(O(2, 4), O(4), O(3, 4)), ShapeMismatchError, r"gate_weight must be 2-D"),
    "up rank": (lambda f: f(O(2, 4), O(3, 4), O(3, 4, 1)), ShapeMismatchError, r"up_weight must be 2-D"),
    "gate hidden": (
        lambda f: f(O(2, 4), O(3, 5), O(3, 4)),
        ShapeMismatchError,
        r"size 1 of gate_weight must be",
    ),
    "up hidden": (lambda f: f(O(2, 4), O(3, 4), O(3, 5)), ShapeMismatchError, r"size 1 of up_weight must be"),
    "inner": (lambda f: f(O(2, 4), O(3, 4), O(2, 4)), ShapeMismatchError, r"size 0 of up_weight must be"),
    "integer": (lambda f: f(O(2, 4).int(), O(3, 4), O(3, 4)), UnsupportedDtypeError, r"x must have"),
    "mixed": (lambda f: f(O(2, 4).half(), O(3, 4).half(), O(3, 4)), UnsupportedDtypeError, r"up_weight must"),
    "activation": (
        lambda f: f(O(2, 4), O(3, 4), O(3, 4), "relu"),
        ValueError,
        r"activation must be silu or gelu, got '?relu",
    ),
    "side": (
        lambda f: f(O(2, 4), O(3, 4), O(3, 4), "silu", "x"),
        ValueError,
        r"act_on must be up or gate, got '?x",
    ),
}


@pytest.mark.parametrize("layer", ["python", "op"])
@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_argument_requirement_and_value(name, layer):
    call, kind, message = ERRORS[name]
    wanted = kind if layer == "python" else next(b for b in (ValueError, TypeError) if issubclass(kind, b))
    with pytest.raises(wanted, match=message):
        call(gated_mlp if layer == "python" else op)


def test_validator_messages_and_attributes():
    with pytest.raises(ShapeMismatchError, match=r"^Expected 3D input, got 2D$") as shape:
        validate_gated_mlp_inputs(O(2, 4), O(3, 4), O(3, 4))
    assert (shape.value.expected, shape.value.actual, shape.value.tensor_name) == (3, 2, "x")
    with pytest.raises(ShapeMismatchError, match="Weight shape mismatch: up_weight") as shape:
        GatedMLPInput(O(1, 2, 4), O(3, 4), O(3, 5)).validate()
    assert (shape.value.expected, shape.value.actual) == ((3, 4), (3, 5))
    with pytest.raises(DeviceError, match="x must be on a CUDA device, got cpu") as device:
        GatedMLPInput(O(1, 2, 4), O(3, 4), O(3, 4)).validate(require_cuda=True)
    assert device.value.expected_device == "cuda"
    with pytest.raises(DeviceError, match="up_weight must be on the device of x"):
        validate_gated_mlp_inputs(O(1, 2, 4), O(3, 4), O(3, 4, device="meta"))
    with pytest.raises(UnsupportedDtypeError) as dtype:
        validate_gated_mlp_inputs(O(1, 2, 4), O(3, 4).half(), O(3, 4))
    assert dtype.value.tensor_name == "gate_weight"
    assert dtype.value.supported_dtypes == (torch.float32,)
    # device before dtype before rank before value
    with pytest.raises(DeviceError):
        validate_gated_mlp_inputs(O(4).int(), O(3, device="meta"), O(3, 4), "relu")
    with pytest.raises(UnsupportedDtypeError):
        validate_gated_mlp_inputs(O(4).int(), O(3), O(3, 4), "relu")
    with pytest.raises(ShapeMismatchError):
        validate_gated_mlp_inputs(O(4), O(3), O(3, 4), "relu")
    with pytest.raises(TypeError, match="x must be a Tensor, got list"):
        validate_gated_mlp_inputs([1.0], O(3, 4), O(3, 4))
    GatedMLPInput(O(1, 2, 4), O(3, 4), O(3, 4)).validate()


def test_dataclass_fields():
    value = GatedMLPInput(O(1), O(2), O(3))
    assert list(vars(value)) == ["x", "gate_weight", "up_weight", "activation"]
    assert value.activation == "silu"


def test_module_refuses():
    with pytest.raises(ValueError, match="hidden_dim must be between 1 and"):
        FusedGatedMLP(0, 4)
    with pytest.raises(TypeError, match="FusedGatedMLP: hidden_dim must be an int, got float"):
        FusedGatedMLP(2.0, 5)
    with pytest.raises(TypeError, match="FusedGatedMLP: intermediate_dim must be an int, got str"):
        FusedGatedMLP(5, "a")
    with pytest.raises(ValueError, match="activation must be silu or gelu"):
        FusedGatedMLP(4, 4, "tanh")


class GatedMLP(nn.Module):
    """The MLP of a model: ``down(act(gate(x)) * up(x))``, or the activation on the other side."""

    def __init__(
        self, activation: str, side: str, bias: bool = False, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(24, 40, bias, dtype=dtype) for _ in range(2))
        self.down_proj = nn.Linear(40, 24, bias, dtype=dtype)
        self.side = side
        self.act_fn = {"silu": nn.SiLU(), "gelu": nn.GELU(), "tanh": nn.Tanh(), "gelu_tanh": nn.GELU("tanh")}[
            activation
        ]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(self.act_fn(gate) * up if self.side == "gate" else gate * self.act_fn(up))


@pytest.mark.parametrize("side", ["gate", "up"])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_from_module_finds_the_formula_by_its_outputs(activation, side, dtype, device):
    torch.manual_seed(5)
    theirs = GatedMLP(activation, side, dtype=dtype).to(device)
    ours = FusedGatedMLP.from_module(theirs)
    assert (ours.activation, ours.act_on) == (activation, side)
    assert ours.gate_weight is theirs.gate_proj.weight
    assert ours.up_weight is theirs.up_proj.weight
    assert (ours.hidden_dim, ours.intermediate_dim) == (24, 40)
    x = normal((2, 5, 24), dtype, device, seed=1)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(theirs.down_proj(ours(x)), theirs(x), rtol=tolerance, atol=tolerance)
    for weight in (theirs.gate_proj.weight, theirs.up_proj.weight):
        nn.init.zeros_(weight)  # the outputs of the module itself now say nothing
    assert FusedGatedMLP.from_module(theirs).act_on == side
    assert FusedGatedMLP.from_module(GatedMLP(activation, side).to("meta")).activation == activation


@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        (GatedMLP("tanh", "gate"), ValueError, "act among silu, gelu, got another output from GatedMLP"),
        (GatedMLP("gelu_tanh", "gate"), ValueError, "act among silu, gelu"),
        (GatedMLP("silu", "gate", bias=True), ValueError, "gate_proj must have no bias"),
        (nn.Linear(3, 4), TypeError, r"module\.gate_proj must be an nn\.Linear, got NoneType"),
    ],
    ids=["tanh", "gelu of tanh", "bias", "no MLP"],
)
def test_from_module_refuses_what_the_op_does_not_compute(module, error, message):
    with pytest.raises(error, match=rf"^FusedGatedMLP\.from_module: .*{message}"):
        FusedGatedMLP.from_module(module)


def test_the_first_lines_say_which_side_is_activated():
    for thing in (gated_mlp, FusedGatedMLP):
        first = thing.__doc__.splitlines()[0]
        assert "activation is on **up**" in first or "activation on **up**" in first


def test_configurations_are_checked_everywhere():
    x = O(2, 4)
    with pytest.raises(NotImplementedError, match="no kernel is compiled for"):
        op(x, O(3, 4), O(3, 4), "silu", "up", [32, 32, 32, 4, 2])
    with pytest.raises(ValueError, match="config must be"):
        op(x, O(3, 4), O(3, 4), "silu", "up", [128])
    with pytest.raises(ArchitectureNotSupportedError, match="compiled: "):
        gated_mlp(x, O(3, 4), O(3, 4), BLOCK_M=32, BLOCK_N=32, BLOCK_K=32, num_warps=4, num_stages=2)
    with pytest.raises(ValueError, match="give all of"):
        gated_mlp(x, O(3, 4), O(3, 4), BLOCK_M=128)
    with pytest.raises(TypeError, match="BLOCK_M must be an int, got float"):
        gated_mlp(x, O(3, 4), O(3, 4), BLOCK_M=128.0, BLOCK_N=128, BLOCK_K=64, num_warps=8, num_stages=4)
    leaf = O(2, 4, requires_grad=True)
    with pytest.raises(NotImplementedError, match="no kernel is compiled for"):
        op(leaf, O(3, 4), O(3, 4), "silu", "up", [32, 32, 32, 4, 2])
    for config in COMPILED_CONFIGS:
        assert torch.equal(op(x, O(3, 4), O(3, 4), "silu", "up", list(config)), op(x, O(3, 4), O(3, 4)))


def test_every_tuple_names_its_own_kernel():
    """A kernel has the rows, columns and stages of its tuple; Python and C++ agree on what is compiled."""
    host = pytest.importorskip("htree_ops._host", reason="_host is built per Python version")
    for keys in config_search(GATED_MLP):
        if tuple(keys.values()) in COMPILED_CONFIGS:
            words = "{BLOCK_M} rows x {BLOCK_N} columns, {num_stages} stages".format_map(keys)
            assert words in host.gated_mlp_forced_config(**keys)
        else:
            with pytest.raises(ValueError, match="compiled: BLOCK_K 64"):
                host.gated_mlp_forced_config(**keys)


def test_backward_refuses_other_shapes():
    x, w = O(2, 4), O(3, 4)
    with pytest.raises(ValueError, match="dy must have shape"):
        op_backward(O(2, 4), x, w, w)
    with pytest.raises(TypeError, match="dy must have the dtype of x"):
        op_backward(O(2, 3).half(), x, w, w)
    with pytest.raises(ValueError, match="gate must have shape"):
        op_saved_backward(O(2, 3), O(3, 3), O(2, 3), x, w, w)


@pytest.mark.gpu
def test_double_is_refused_on_cuda():
    x = O(2, 4, dtype=torch.float64, device="cuda")
    with pytest.raises(TypeError, match=r"torch.float32 or .* on CUDA, got torch.float64"):
        op(x, x, x)
    with pytest.raises(UnsupportedDtypeError):
        gated_mlp(x, x, x)


# ---- gradients


@pytest.mark.parametrize("act_on", ["up", "gate"])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gradcheck(activation, act_on):
    inputs = GatedMLPCase(
        name="g", dtype=torch.float64, rows=(2, 3), inner=4, hidden=5, activation=activation, act_on=act_on
    ).make_inputs("cpu")
    leaves = [t.requires_grad_() for t in inputs[:3]]
    assert torch.autograd.gradcheck(lambda *t: op(*t, *inputs[3:]), leaves, nondet_tol=0.0)
    assert torch.autograd.gradcheck(lambda t: op(t.transpose(0, 1), *leaves[1:], *inputs[3:]), leaves[:1])


@pytest.mark.parametrize("mask", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1)])
def test_only_wanted_gradients(mask, device):
    inputs = GatedMLPCase(name="m", dtype=torch.float32, rows=(7,), inner=12, hidden=9).make_inputs(device)
    dy = normal((7, 12), torch.float32, device, seed=5)
    every = op_backward(dy, *inputs)
    some = op_backward(dy, *inputs, [bool(m) for m in mask])
    for wanted, all_of_it, one in zip(mask, every, some, strict=True):
        assert (one is None) != bool(wanted)
        assert one is None or torch.equal(one, all_of_it)
    leaves = [t.clone().requires_grad_(bool(m)) for t, m in zip(inputs[:3], mask, strict=True)]
    op(*leaves, *inputs[3:]).backward(dy)
    assert [leaf.grad is not None for leaf in leaves] == [bool(m) for m in mask]


def test_double_backward_is_refused(device):
    x, w, v = (torch.randn(4, 4, device=device, requires_grad=True) for _ in range(3))
    (dx,) = torch.autograd.grad(op(x, w, v).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        dx.sum().backward()
    with pytest.raises(NotImplementedError, match="double backward"):
        op_backward(torch.ones(4, 4, device=device), x, w, v)[1].sum().backward()


def test_training_form_alone_has_no_gradient(device):
    x = torch.randn(4, 4, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        op_forward(x, x, x)[0].sum().backward()


def test_autocast_casts_all_three_tensors(device):
    """As for a linear layer: master weights in fp32 and activations of another dtype meet, and gradients are fp32."""
    case = GatedMLPCase(name="a", dtype=torch.float32, rows=(9,), inner=16, hidden=24)
    inputs = case.make_inputs(device)[:3]
    half = [x.bfloat16() for x in inputs]
    expected = op(*half)
    leaves = [x.requires_grad_() for x in inputs]
    with torch.autocast(device, dtype=torch.bfloat16):
        for call in (op, gated_mlp, lambda *args: op_forward(*args)[0]):
            for x in (leaves[0], half[0]):
                assert torch.equal(call(x, *leaves[1:]), expected)
        gradients = torch.autograd.grad(gated_mlp(*leaves).sum(), leaves)
    again = [x.requires_grad_() for x in half]
    for ours, theirs in zip(gradients, torch.autograd.grad(op(*again).sum(), again), strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, theirs.float())


def test_autocast_does_not_reach_the_products_of_the_backward(device):
    case = GatedMLPCase(name="a", dtype=torch.float32, rows=(9,), inner=16, hidden=24)
    inputs, dy = case.make_inputs(device), torch.ones(9, 16, device=device)
    expected = op_backward(dy, *inputs)
    with torch.autocast(device, dtype=torch.bfloat16):
        for ours, theirs in zip(op_backward(dy, *inputs), expected, strict=True):
            assert torch.equal(ours, theirs)


# ---- compile, export

SMALL = [c for c in CASES if 0 < c.num_rows <= 17 and c.inner * c.hidden < 20000][::7]


@pytest.mark.parametrize("case", SMALL, ids=case_id)
def test_opcheck(case, device):
    if device == "cuda" and case.dtype == torch.float64:  # a dtype of the CPU alone
        case = replace(case, dtype=torch.float32)
    inputs = case.make_inputs(device)
    leaves = [t.clone().requires_grad_() for t in inputs[:3]]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    opcheck(op.default, (*leaves, *inputs[3:]), test_utils=tests)
    opcheck(op.default, inputs)
    opcheck(op_forward.default, inputs)
    dy = normal((*case.rows, case.inner), case.dtype, device, seed=1)
    opcheck(op_backward.default, (dy, *inputs))
    _, gate, up = op_forward(*inputs)
    opcheck(op_saved_backward.default, (dy, gate, up, *inputs))


@pytest.mark.parametrize(("dynamic", "backend"), BACKENDS)
def test_compile_with_views_and_backward(dynamic, backend, device):
    weights = [normal((6, 8), torch.float32, device, seed) for seed in (1, 2)]

    def model(x):
        return op(x.transpose(0, 1)[1:].sin(), *weights, "gelu").cos()

    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    for length in (5, 9):
        x = normal((3, length, 8), torch.float32, device, length).requires_grad_()
        other = x.detach().clone().requires_grad_()
        compiled(x).sum().backward()
        model(other).sum().backward()
        assert_close_spec(x.grad, other.grad, 1e-4, 1e-4)


def test_export_keeps_one_node(device):
    layer = FusedGatedMLP(8, 12, device=device)
    length = torch.export.Dim("length", min=2, max=100)
    program = torch.export.export(
        layer, (torch.randn(2, 6, 8, device=device),), dynamic_shapes={"x": {1: length}}
    )
    targets = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    assert targets == ["htree.gated_mlp.default"]
    x = torch.randn(2, 17, 8, device=device)
    assert torch.equal(program.module()(x), layer(x))


def test_package_exports():
    assert {"FusedGatedMLP", "gated_mlp"} <= set(htree_ops.__all__)
    assert {"GatedMLPInput", "validate_gated_mlp_inputs"} <= set(htree_ops.compat.__all__)
