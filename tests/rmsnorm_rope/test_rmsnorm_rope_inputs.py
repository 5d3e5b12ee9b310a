"""The Python layer of the rmsnorm_rope family: validation, module, dataclass, configurations (docs/semantics §3.4)."""

import warnings
from typing import Any

import pytest
import torch

import htree_ops
import htree_ops.compat
from htree_ops.errors import (
    ArchitectureNotSupportedError,
    DeviceError,
    HTreeKernelError,
    ShapeMismatchError,
    UnsupportedDtypeError,
)
from htree_ops.ops.rmsnorm_rope import function
from tests.support.rmsnorm_rope_cases import assert_forward, tables

op = torch.ops.htree.rmsnorm_rope
op_backward = torch.ops.htree.rmsnorm_rope_backward
head_op = torch.ops.htree.head_rmsnorm_rope


def arguments(**changes: Any) -> dict[str, Any]:
    """x [2, 3, 8] with heads of 4, and what `changes` replaces."""
    cos, sin = tables(3, 4, torch.float32, "cpu")
    return {
        "x": torch.randn(2, 3, 8),
        "weight": torch.ones(8),
        "cos": cos,
        "sin": sin,
        "eps": 1e-6,
        **changes,
    }


def meta(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, device="meta")


def table(*shape: int) -> dict[str, torch.Tensor]:
    return {"cos": torch.zeros(shape), "sin": torch.zeros(shape)}


#: What replaces arguments, and what the message says; it is of the first of them.
SHAPES: dict[str, tuple[dict[str, Any], str]] = {
    "rank": ({"x": torch.zeros(3, 8)}, r"^Expected 3D input, got 2D$|x must be 3-D"),
    "weight": (
        {"weight": torch.ones(7)},
        r"^Weight shape mismatch: expected \(8,\)|size 0 of weight must be 8 \(Hd of x\), got 7",
    ),
    "weight rank": ({"weight": torch.ones(1, 8)}, r"^Weight shape mismatch|weight must be 1-D"),
    "odd head": (
        table(3, 9) | {"x": torch.zeros(2, 3, 9), "weight": torch.ones(9)},
        r"cos and sin must have an even head dim, got 9 in \[3, 9\]",
    ),
    "no multiple": (
        table(3, 6),
        r"cos and sin must have a head dim that divides Hd of x = 8, got 6 in \[3, 6\]",
    ),
    "short table": (table(2, 4), "at least S = 3 positions, got 2"),
    "sin": ({"sin": torch.zeros(3, 2)}, "sin must have shape .*the shape of cos"),
    "sin rank": ({"sin": torch.zeros(1, 3, 4)}, "sin must have shape .*the shape of cos"),
    "table rank": (
        table(4),
        r"cos must be 2-D \[S, hd\], 3-D \[B, S, hd\] or 4-D \[B, S, 1, hd\], got 1-D \[4\]",
    ),
    "cos rank": ({"cos": torch.zeros(4)}, "cos must be 2-D .* got 1-D"),
    "cos of 5 dims": ({"cos": torch.zeros(1, 1, 3, 1, 4)}, "cos must be 2-D .* got 5-D"),
    "batched table": (table(3, 3, 4), r"size 0 of cos must be 1 or 2 \(B of x\), got 3 in \[3, 3, 4\]"),
    "short batched table": (table(2, 2, 4), "at least S = 3 positions, got 2"),
}
DTYPES_OF: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"x": torch.zeros(2, 3, 8).int()}, r"x must have dtype torch\.float32 or .*, got torch\.int32"),
    "cos dtype": (
        {"cos": torch.zeros(3, 4).int()},
        r"cos must have dtype torch\.float32 or .*, got torch\.int32",
    ),
    "sin dtype": ({"sin": torch.zeros(3, 4).int()}, "sin must have dtype"),
}
REFUSED = [
    *((name, *row, ShapeMismatchError, ValueError) for name, row in SHAPES.items()),
    *((name, *row, UnsupportedDtypeError, TypeError) for name, row in DTYPES_OF.items()),
    ("device", {"weight": meta(8)}, "weight must be on the device of x", DeviceError, RuntimeError),
]


@pytest.mark.parametrize(
    ("changes", "message", "kind", "of_op"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
def test_functions_name_tensor_and_class_and_the_op_the_builtin(changes, message, kind, of_op):
    given = arguments(**changes)
    for call in (htree_ops.compat.validate_rmsnorm_rope_inputs, htree_ops.rmsnorm_rope):
        with pytest.raises(kind, match=message) as caught:
            call(**given)
        assert isinstance(caught.value, HTreeKernelError)
        assert caught.value.tensor_name == next(iter(changes))
    with pytest.raises(kind, match=message):
        htree_ops.compat.RMSNormRoPEInput(**given).validate()
    with pytest.raises(of_op, match=message.removeprefix("^")):
        op(**given)


@pytest.mark.parametrize("eps", [-1e-6, float("nan"), float("inf")])
def test_eps_must_be_finite_and_not_negative(eps):
    with pytest.raises(ValueError, match="eps must be finite and not negative"):
        htree_ops.rmsnorm_rope(**arguments(eps=eps))


def test_order_of_the_checks():
    """Device before dtype before rank before shape before value."""
    wrong = [
        (DeviceError, {"cos": meta(1)}),
        (UnsupportedDtypeError, {"weight": torch.ones(5).int()}),
        (ShapeMismatchError, {"x": torch.zeros(8)}),
        (ShapeMismatchError, {"weight": torch.ones(5)}),
        (ValueError, {"eps": -1.0}),
    ]
    for first, (kind, _) in enumerate(wrong):
        changes = {}
        for _, change in reversed(wrong[first:]):
            changes |= change
        with pytest.raises(kind):
            htree_ops.compat.validate_rmsnorm_rope_inputs(**arguments(**changes))


def test_cuda_is_required_only_on_request():
    given = arguments()
    htree_ops.compat.validate_rmsnorm_rope_inputs(**given)
    with pytest.raises(DeviceError, match="x must be on a CUDA device, got cpu") as caught:
        htree_ops.compat.validate_rmsnorm_rope_inputs(**given, require_cuda=True)
    assert caught.value.expected_device == "cuda"
    with pytest.raises(DeviceError):
        htree_ops.compat.RMSNormRoPEInput(**given).validate(require_cuda=True)


def test_what_is_not_a_tensor_is_a_type_error():
    with pytest.raises(TypeError, match="weight must be a Tensor, got list"):
        htree_ops.rmsnorm_rope(**arguments(weight=[1.0] * 8))
    with pytest.raises(TypeError, match="cos must be a Tensor, got NoneType"):
        htree_ops.head_rmsnorm_rope(torch.zeros(1, 2, 3, 4), torch.ones(4), None, None)


@pytest.mark.parametrize(
    ("x", "weight", "kind", "message"),
    [
        (torch.zeros(2, 3, 4), torch.ones(4), ShapeMismatchError, "^head_rmsnorm_rope: x must be 4-D"),
        (torch.zeros(2, 3, 2, 4), torch.ones(8), ShapeMismatchError, "size 0 of weight must be 4"),
        (
            torch.zeros(2, 3, 2, 6),
            torch.ones(6),
            ShapeMismatchError,
            "last dim of cos and sin must be hd = 6",
        ),
        (torch.zeros(2, 3, 2, 4).long(), torch.ones(4), UnsupportedDtypeError, "x must have dtype"),
    ],
)
def test_validation_per_head(x, weight, kind, message):
    cos, sin = tables(3, 4, torch.float32, "cpu")
    with pytest.raises(kind, match=message):
        htree_ops.head_rmsnorm_rope(x, weight, cos, sin)


def test_dataclass_has_the_fields_and_the_default_of_the_document():
    given = arguments()
    del given["eps"]
    value = htree_ops.compat.RMSNormRoPEInput(**given)
    assert list(vars(value)) == ["x", "weight", "cos", "sin", "eps"]
    assert value.eps == 1e-6
    value.validate()


def test_module():
    module = htree_ops.FusedRMSNormRoPE(64, 16, eps=1e-5)
    assert torch.equal(module.weight, torch.ones(64))
    assert list(module.state_dict()) == ["weight"]
    x = torch.randn(2, 5, 64)
    cos, sin = tables(5, 16, torch.float32, "cpu")
    with torch.no_grad():
        module.weight.uniform_(0.5, 1.5)
    y = module(x, cos, sin)
    assert_forward(y, (x, module.weight.detach(), cos, sin, 1e-5, 4))
    assert torch.equal(module(x, cos[:, :8], sin[:, :8]), y)
    assert torch.equal(module(x, cos[None], sin[None]), y)
    assert torch.equal(module(x, cos[None, :, :8].expand(2, -1, -1), sin[None, :, :8].expand(2, -1, -1)), y)
    y.square().sum().backward()
    assert module.weight.grad is not None
    for head_dim in (0, 7, 24):
        with pytest.raises(ValueError, match="head_dim must be even and divide hidden_dim = 64"):
            htree_ops.FusedRMSNormRoPE(64, head_dim)


def test_heads_and_tokens_in_the_wrong_order_are_pointed_out(monkeypatch):
    monkeypatch.setattr(function, "_warned_of_transposed", False)
    x, weight = torch.randn(2, 4, 9, 8), torch.ones(8)  # [B, H, S, hd]
    cos, sin = (t.view(2, 9, 8) for t in tables(18, 8, torch.float32, "cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        htree_ops.head_rmsnorm_rope(x.transpose(1, 2), weight, cos, sin)
        htree_ops.head_rmsnorm_rope(x, weight, cos[:, :4], sin[:, :4])
        torch._dynamo.reset()
        torch.compile(htree_ops.head_rmsnorm_rope, backend="eager", fullgraph=True)(x, weight, cos, sin)
    with pytest.warns(UserWarning, match=r"read as 4 tokens of 9 heads.*transpose\(1, 2\)") as said:
        htree_ops.head_rmsnorm_rope(x, weight, cos[0], sin[0])
    assert [warning.filename for warning in said] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        htree_ops.head_rmsnorm_rope(x, weight, cos, sin)


def test_configuration_keywords():
    given = arguments()
    automatic = htree_ops.rmsnorm_rope(**given)
    assert torch.equal(htree_ops.rmsnorm_rope(**given, BLOCK_SIZE=128, num_warps=4, num_stages=2), automatic)
    with pytest.raises(ValueError, match="give all of BLOCK_SIZE, num_warps, num_stages or none"):
        htree_ops.rmsnorm_rope(**given, BLOCK_SIZE=128)
    for config in ((128, 8, 2), (512, 8, 1), (64, 2, 4)):
        with pytest.raises(ArchitectureNotSupportedError, match="no kernel is compiled"):
            htree_ops.rmsnorm_rope(
                **given, **dict(zip(("BLOCK_SIZE", "num_warps", "num_stages"), config, strict=True))
            )


@pytest.mark.parametrize(
    ("width", "head_dim", "element_size", "vectorised", "backward", "expected"),
    [
        (64, 64, 2, True, False, (4, 1, 2, True)),
        (128, 128, 2, True, False, (8, 1, 2, True)),
        (128, 128, 4, True, False, (16, 1, 2, True)),
        (128, 128, 8, True, False, (32, 1, 2, True)),
        (4096, 128, 2, True, False, (128, 2, 2, True)),
        (4096, 128, 2, True, True, (256, 1, 2, True)),
        (3072, 96, 2, True, True, (256, 1, 2, True)),
        (8192, 128, 2, True, False, (256, 2, 2, True)),
        (16384, 128, 2, True, True, (512, 2, 2, True)),
        (16384, 128, 4, True, False, (512, 4, 2, True)),
        (16384, 128, 8, True, False, (512, 0, 1, True)),
        (40000, 200, 2, True, False, (512, 0, 1, False)),
        (4096, 128, 2, False, False, (512, 0, 1, False)),
        (4096, 8, 2, True, False, (512, 0, 1, False)),
        (65536, 32768, 2, True, False, (512, 0, 1, True)),
    ],
)
def test_configuration_is_a_function_of_the_problem(
    width, head_dim, element_size, vectorised, backward, expected
):
    host = pytest.importorskip("htree_ops._host", reason="_host is built per Python version")
    assert host.rmsnorm_rope_config(width, head_dim, element_size, vectorised, backward) == expected


@pytest.mark.parametrize(
    ("width", "head_dim", "num_rows", "expected"),
    [
        (2048, 128, 2 * 792, (128, 1)),
        (2048, 128, 2 * 792 + 1, (64, 2)),
        (4096, 128, 1, (256, 1)),
        (4096, 128, 2 * 396, (256, 1)),
        (4096, 128, 2 * 396 + 1, (128, 2)),
        (8192, 128, 1, (256, 2)),
        (3072, 96, 1, (128, 2)),  # 126 threads have work, so that more would sum in another order
        (1024, 128, 1, (64, 1)),
        (40000, 200, 1, (512, 0)),
    ],
)
def test_few_rows_have_more_threads(width, head_dim, num_rows, expected):
    host = pytest.importorskip("htree_ops._host", reason="_host is built per Python version")
    vectorised = width != 40000
    chosen = host.rmsnorm_rope_config(width, head_dim, 2, vectorised, False, num_rows)
    assert chosen[:2] == expected


# ---- what the ops alone are given

ZEROS = {size: torch.zeros(size) for size in (8, (1, 2, 8), (2, 4), (2, 8))}
GOOD = (ZEROS[1, 2, 8], ZEROS[8], ZEROS[2, 4], ZEROS[2, 4])
ERRORS = {
    "head rank": (lambda: head_op(*GOOD), ValueError, "head_rmsnorm_rope: x must be 4-D"),
    "num_heads": (
        lambda: op(*GOOD, 1e-6, 3),
        ValueError,
        r"cos and sin must have a head dim of Hd / num_heads = 8 / 3 or half of it, got 4 in \[2, 4\]",
    ),
    "no head": (lambda: op(*GOOD, 1e-6, 0), ValueError, "num_heads must be at least 1, got 0"),
    "table of no dims": (
        lambda: head_op(torch.zeros(1, 2, 1, 8), ZEROS[8], torch.zeros(()), torch.zeros(())),
        ValueError,
        r"head_rmsnorm_rope: cos must be 2-D .*got 0-D \[\]",
    ),
    "batched table of heads": (
        lambda: head_op(torch.zeros(2, 2, 4, 8), ZEROS[8], torch.zeros(2, 2, 4, 8), torch.zeros(2, 2, 4, 8)),
        ValueError,
        r"size 2 of cos must be 1 \(one table for all heads\), got 4",
    ),
    "eps": (lambda: op(*GOOD, -1.0), ValueError, "eps must be finite and not negative, got -1"),
    "config length": (
        lambda: op(*GOOD, 1e-6, None, [64, 2]),
        ValueError,
        r"config must be \(BLOCK_SIZE, num_warps, num_stages\), got 2 values",
    ),
    "config": (
        lambda: op(*GOOD, 1e-6, None, [64, 4, 1]),
        NotImplementedError,
        "no kernel is compiled for BLOCK_SIZE = 64, num_warps = 4, num_stages = 1",
    ),
    "dy shape": (lambda: op_backward(torch.zeros(1, 2, 4), *GOOD), ValueError, "dy must have shape"),
    "dy dtype": (lambda: op_backward(GOOD[0].half(), *GOOD), TypeError, "dy must have the dtype of x"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_argument_requirement_and_value(name):
    call, kind, message = ERRORS[name]
    with pytest.raises(kind, match=message):
        call()


def test_ranks_come_before_shapes():
    x, weight, cos = torch.zeros(1, 2, 8), torch.zeros(3), torch.zeros(2, 4)
    with pytest.raises(htree_ops.ShapeMismatchError, match=r"cos must be 2-D \[S, hd\], 3-D"):
        htree_ops.compat.validate_rmsnorm_rope_inputs(x, weight, cos[0], cos)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_tiny_eps_stays_positive(dtype, device):
    x, weight, cos = (torch.zeros(*s, dtype=dtype, device=device) for s in ((1, 2, 8), (8,), (2, 4)))
    assert htree_ops.rmsnorm_rope(x, weight, cos, cos, eps=1e-46).eq(0).all()
