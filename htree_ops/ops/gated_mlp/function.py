"""The gated MLP: two projections of x, one through an activation, multiplied (docs/semantics/gated_mlp.md §3.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from htree_ops.errors import ShapeMismatchError
from htree_ops.ops.arguments import check_devices, check_dtype, check_int, floating_for, tuning_config
from htree_ops.tuning.select import configured

__all__ = ["FusedGatedMLP", "GatedMLPInput", "gated_mlp", "validate_gated_mlp_inputs"]

ACTIVATIONS = ("silu", "gelu")
SIDES = ("up", "gate")
#: (BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages) of the kernels a caller may ask for.
COMPILED_CONFIGS = ((128, 128, 64, 8, 4), (128, 64, 64, 8, 4), (64, 64, 64, 8, 4), (32, 64, 64, 8, 4))


@dataclass
class GatedMLPInput:
    """The arguments of :func:`gated_mlp` as one value.

    Attributes:
        x: [B, S, Hd].
        gate_weight: [I, Hd].
        up_weight: [I, Hd].
        activation: "silu" or "gelu".
    """

    x: Tensor
    gate_weight: Tensor
    up_weight: Tensor
    activation: str = "silu"

    def validate(self, *, require_cuda: bool = False) -> None:
        """See :func:`validate_gated_mlp_inputs`."""
        validate_gated_mlp_inputs(
            self.x, self.gate_weight, self.up_weight, self.activation, require_cuda=require_cuda
        )


def _check_shapes(op: str, x: Tensor, gate_weight: Tensor, up_weight: Tensor) -> None:
    if x.dim() == 0:
        raise ShapeMismatchError(
            f"{op}: x must be [..., Hd], got a scalar", expected="[..., Hd]", actual=(), tensor_name="x"
        )
    hidden = x.shape[-1]
    inner: int | None = None
    for name, weight in (("gate_weight", gate_weight), ("up_weight", up_weight)):
        if weight.dim() != 2:
            raise ShapeMismatchError(
                f"{op}: {name} must be 2-D [I, Hd], got {weight.dim()}-D {tuple(weight.shape)}",
                expected=2,
                actual=weight.dim(),
                tensor_name=name,
            )
        expected = ("I" if inner is None else inner, hidden)
        if weight.shape[1] != hidden or (inner is not None and weight.shape[0] != inner):
            raise ShapeMismatchError(
                f"Weight shape mismatch: {name} must be [{expected[0]}, {expected[1]}], got {tuple(weight.shape)}",
                expected=expected,
                actual=tuple(weight.shape),
                tensor_name=name,
            )
        inner = weight.shape[0]


def _check_options(op: str, activation: str, act_on: str) -> None:
    for name, value, allowed in (("activation", activation, ACTIVATIONS), ("act_on", act_on, SIDES)):
        if value not in allowed:
            raise ValueError(f"{op}: {name} must be {' or '.join(allowed)}, got {value!r}")


def _validate(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    activation: str,
    act_on: str,
    *,
    strict: bool,
    require_cuda: bool,
) -> None:
    op = "gated_mlp"
    tensors = {"x": x, "gate_weight": gate_weight, "up_weight": up_weight}
    check_devices(op, tensors, require_cuda)
    check_dtype(op, floating_for(x), **tensors)
    if strict and x.dim() != 3:
        raise ShapeMismatchError(
            f"Expected 3D input, got {x.dim()}D", expected=3, actual=x.dim(), tensor_name="x"
        )
    _check_shapes(op, x, gate_weight, up_weight)
    _check_options(op, activation, act_on)


def validate_gated_mlp_inputs(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    activation: str = "silu",
    act_on: str = "up",
    *,
    require_cuda: bool = False,
) -> None:
    """Checks arguments of :func:`gated_mlp` with x [B, S, Hd]: devices, dtypes, ranks, shapes, then values.

    Layout is not checked: tensors that the kernels cannot read in place are copied.
    Source: docs/semantics/python.md §3.4, design document [002].

    Args:
        x, gate_weight, up_weight, activation, act_on: see :func:`gated_mlp`; x must have three dims here.
        require_cuda: refuse tensors that are not on a CUDA device.

    Raises:
        DeviceError: tensors on different devices, or not on CUDA where that is required.
        UnsupportedDtypeError: a dtype other than float32, float16, bfloat16 (float64 on the CPU), or tensors
            of different dtypes.
        ShapeMismatchError: a wrong rank or size.
        ValueError: an unknown activation or side.
    """
    _validate(x, gate_weight, up_weight, activation, act_on, strict=True, require_cuda=require_cuda)


def gated_mlp(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    activation: str = "silu",
    act_on: str = "up",
    *,
    BLOCK_M: int | None = None,
    BLOCK_N: int | None = None,
    BLOCK_K: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
) -> Tensor:
    """Two projections of x, one of them through an activation, multiplied: ``out = g · act(u)``.

    ``g = x·Wg^T`` and ``u = x·Wu^T``, accumulated in fp32 (fp64 for fp64), neither rounded before the result is.
    With ``act_on="gate"`` it is ``act(g) · u``, the usual SwiGLU or GeGLU. ``silu(z) = z·σ(z)``,
    ``gelu(z) = z·Φ(z)`` (the form with erf). On sm_90 in fp16 and bf16 the forward is one kernel, which reads x once
    for both products; elsewhere on CUDA it is two products of the library in fp32, which follow
    ``torch.backends.cuda.matmul.allow_tf32``, and one elementwise kernel. On the CPU row-major weights of fp16, bf16
    and (up to 128 rows of x) fp32 are read as they are, with the same bits for any number of threads; other products,
    and those of the backward, are the BLAS's, which follow ``torch.set_float32_matmul_precision`` and whose bits hold
    for one number of threads (docs/semantics §3.2). Results beyond the range of fp16 are infinite; a NaN in
    a row of x makes that row NaN.
    Source: docs/semantics/gated_mlp.md §3.2, design document [002].

    Under autograd g and u are kept in the dtype of x for the backward, whose gradients therefore err by that
    rounding; in fp16 a product beyond 65504 is kept as an infinity, and its gradients are infinite or NaN even
    where the result is finite. ``torch.ops.htree.gated_mlp_backward`` computes g and u again instead.

    Args:
        x: [..., Hd], any strides; float32, float16, bfloat16, on the CPU also float64.
        gate_weight: [I, Hd], Wg, of x's dtype.
        up_weight: [I, Hd], Wu, of x's dtype.
        activation: "silu" or "gelu".
        act_on: "up" or "gate", the projection that goes through the activation.
        BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages: a configuration of the CUDA kernel for the tuner, all
            or none: rows and columns of the result per block, elements of Hd per stage, warps that multiply,
            stages. Validated everywhere, ignored on the CPU and while gradients are recorded.

    Returns:
        A new contiguous tensor [..., I] of x's dtype, differentiable with respect to the three tensors.

    Raises:
        DeviceError, UnsupportedDtypeError, ShapeMismatchError, ValueError: see
            :func:`validate_gated_mlp_inputs`.
        ArchitectureNotSupportedError: a configuration that is not compiled.
        NotImplementedError: a configuration where the kernels it chooses among do not run (fp32, not sm_90).

    Without a configuration ``HTREE_TUNE`` decides: see :mod:`htree_ops.tuning.select`.
    """
    _validate(x, gate_weight, up_weight, activation, act_on, strict=False, require_cuda=False)
    config = tuning_config(
        "gated_mlp",
        COMPILED_CONFIGS,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    if config is None:
        config = configured(
            "gated_mlp",
            (math.prod(x.shape[:-1]), x.shape[-1], gate_weight.shape[0]),
            x,
            lambda tried: torch.ops.htree.gated_mlp(x, gate_weight, up_weight, activation, act_on, tried),
        )
    return torch.ops.htree.gated_mlp(x, gate_weight, up_weight, activation, act_on, config)


class FusedGatedMLP(nn.Module):
    """:func:`gated_mlp` with its weights, drawn from a normal distribution with a deviation of 0.02.

    Args:
        hidden_dim: Hd.
        intermediate_dim: I.
        activation: "silu" or "gelu".
        act_on: "up" or "gate".
        device, dtype: of the weights [I, Hd].

    Raises:
        TypeError: a size is not an int. ValueError: a size below 1, an unknown activation or side.
    """

    def __init__(
        self,
        hidden_dim: int,
        intermediate_dim: int,
        activation: str = "silu",
        act_on: str = "up",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("hidden_dim", hidden_dim), ("intermediate_dim", intermediate_dim)):
            check_int("FusedGatedMLP", name, value, 1)
        _check_options("FusedGatedMLP", activation, act_on)
        self.hidden_dim = hidden_dim
        self.intermediate_dim = intermediate_dim
        self.activation = activation
        self.act_on = act_on
        size = (intermediate_dim, hidden_dim)
        self.gate_weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.up_weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws both weights anew."""
        nn.init.normal_(self.gate_weight, std=0.02)
        nn.init.normal_(self.up_weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., Hd] -> [..., I]."""
        return gated_mlp(x, self.gate_weight, self.up_weight, self.activation, self.act_on)

    def extra_repr(self) -> str:
        return (
            f"{self.hidden_dim}, {self.intermediate_dim}, activation={self.activation}, act_on={self.act_on}"
        )
