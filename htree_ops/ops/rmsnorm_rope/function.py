"""RMSNorm followed by RoPE in one kernel, over the hidden dim or per head (docs/semantics/rmsnorm_rope.md §3.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from htree_ops.errors import ShapeMismatchError, UnsupportedDtypeError
from htree_ops.ops.arguments import FLOATING_AND_DOUBLE, check_devices, check_int, tuning_config
from htree_ops.tuning.select import configured

__all__ = [
    "FusedRMSNormRoPE",
    "RMSNormRoPEInput",
    "head_rmsnorm_rope",
    "rmsnorm_rope",
    "validate_rmsnorm_rope_inputs",
]

#: (BLOCK_SIZE, num_warps, num_stages) of the kernels a caller may ask for.
COMPILED_CONFIGS = tuple((32 * warps, warps, stages) for warps in (2, 4, 8) for stages in (1, 2, 3))


@dataclass
class RMSNormRoPEInput:
    """The arguments of :func:`rmsnorm_rope` as one value.

    Attributes:
        x: [B, S, Hd].
        weight: [Hd].
        cos: [S, hd].
        sin: like cos.
        eps: added to the mean of squares.
    """

    x: Tensor
    weight: Tensor
    cos: Tensor
    sin: Tensor
    eps: float = 1e-6

    def validate(self, *, require_cuda: bool = False) -> None:
        """See :func:`validate_rmsnorm_rope_inputs`."""
        validate_rmsnorm_rope_inputs(
            self.x, self.weight, self.cos, self.sin, self.eps, require_cuda=require_cuda
        )


def _check_dtype(op: str, tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATING_AND_DOUBLE:
            raise UnsupportedDtypeError(
                f"{op}: {name} must have dtype {' or '.join(map(str, FLOATING_AND_DOUBLE))}, got {tensor.dtype}",
                dtype=tensor.dtype,
                supported_dtypes=FLOATING_AND_DOUBLE,
                tensor_name=name,
            )


def _shape_error(message: str, name: str, tensor: Tensor, expected: object) -> ShapeMismatchError:
    return ShapeMismatchError(message, expected=expected, actual=tuple(tensor.shape), tensor_name=name)


def _check_ranks(op: str, dims: int, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> None:
    if x.dim() != dims:
        raise ShapeMismatchError(
            f"Expected {dims}D input, got {x.dim()}D", expected=dims, actual=x.dim(), tensor_name="x"
        )
    if weight.dim() != 1:
        raise _shape_error(
            f"Weight shape mismatch: expected 1-D, got {tuple(weight.shape)}", "weight", weight, 1
        )
    for name, table in (("cos", cos), ("sin", sin)):
        if table.dim() not in (2, 4):
            raise _shape_error(
                f"{op}: {name} must be [S, hd] or [1, S, 1, hd], got {tuple(table.shape)}",
                name,
                table,
                "[S, hd]",
            )


def _check_tables(op: str, x: Tensor, cos: Tensor, sin: Tensor, head_dim: int) -> None:
    if cos.dim() == 4 and (cos.shape[0] != 1 or cos.shape[2] != 1):
        raise _shape_error(
            f"{op}: cos must be [S, hd] or [1, S, 1, hd], got {tuple(cos.shape)}", "cos", cos, "[S, hd]"
        )
    if sin.shape != cos.shape:
        raise _shape_error(
            f"{op}: sin must have the shape of cos {tuple(cos.shape)}, got {tuple(sin.shape)}",
            "sin",
            sin,
            tuple(cos.shape),
        )
    num_positions = cos.shape[1 if cos.dim() == 4 else 0]
    if num_positions < x.shape[1]:
        raise _shape_error(
            f"{op}: cos and sin must have at least S = {x.shape[1]} positions, got {num_positions}",
            "cos",
            cos,
            x.shape[1],
        )
    if cos.shape[-1] not in (head_dim, head_dim // 2):
        raise _shape_error(
            f"{op}: the last dim of cos and sin must be hd = {head_dim} or hd / 2, got {cos.shape[-1]}",
            "cos",
            cos,
            head_dim,
        )
    if head_dim % 2:
        raise _shape_error(f"{op}: the head dim must be even, got {head_dim}", "cos", cos, "an even head dim")


def _check_eps(op: str, eps: float) -> None:
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"{op}: eps must be a number, got {type(eps).__name__}")
    if not 0 <= eps < math.inf:
        raise ValueError(f"{op}: eps must be finite and not negative, got {eps}")


def validate_rmsnorm_rope_inputs(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
    num_heads: int | None = None,
    *,
    require_cuda: bool = False,
) -> None:
    """Checks the arguments of :func:`rmsnorm_rope`: devices, then dtypes, ranks, shapes and values.

    Layout is not checked: tensors that the kernels cannot read in place are copied.
    Source: docs/semantics/python.md §3.4, design document [002].

    Args:
        x, weight, cos, sin, eps, num_heads: see :func:`rmsnorm_rope`.
        require_cuda: refuse tensors that are not on a CUDA device.

    Raises:
        DeviceError: tensors on different devices, or not on CUDA where that is required.
        UnsupportedDtypeError: a dtype other than float32, float16, bfloat16, float64.
        ShapeMismatchError: a wrong rank or size.
        ValueError: eps is negative or not finite, or num_heads is below 1.
        TypeError: no dense tensor, or eps no number, or num_heads no int.
    """
    op = "rmsnorm_rope"
    tensors = {"x": x, "weight": weight, "cos": cos, "sin": sin}
    check_devices(op, tensors, require_cuda)
    _check_dtype(op, tensors)
    _check_ranks(op, 3, x, weight, cos, sin)
    width = x.shape[2]
    if tuple(weight.shape) != (width,):
        raise _shape_error(
            f"Weight shape mismatch: expected ({width},), got {tuple(weight.shape)}",
            "weight",
            weight,
            (width,),
        )
    if num_heads is not None:
        check_int(op, "num_heads", num_heads, 1)
    head_dim = cos.shape[-1]
    if num_heads is not None and 2 * head_dim * num_heads == width:
        head_dim *= 2
    whole = width == head_dim * num_heads if num_heads else width == 0 or (head_dim and width % head_dim == 0)
    if not whole:
        heads = "a multiple of" if num_heads is None else f"num_heads = {num_heads} times"
        raise _shape_error(
            f"{op}: Hd = {width} must be {heads} the head dim {head_dim} of cos and sin",
            "cos",
            cos,
            width if num_heads is None else width / num_heads,
        )
    _check_tables(op, x, cos, sin, head_dim)
    _check_eps(op, eps)


def rmsnorm_rope(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
    num_heads: int | None = None,
    *,
    BLOCK_SIZE: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
) -> Tensor:
    """RMSNorm over the whole hidden dim, then a rotary embedding of each head, in one pass over x.

    ``n = x · (mean(x²) + eps)^-1/2 · weight`` with the mean over Hd; per head with the halves a, b of n:
    ``y_lo = a · cos_lo − b · sin_lo`` and ``y_hi = b · cos_hi + a · sin_hi``, that is
    ``n · cos + rotate_half(n) · sin``. Arithmetic in fp32 (fp64 for fp64) with one final rounding; squares are
    summed in that precision, so |x| beyond 1e19 in fp32 gives 0. A NaN makes its row NaN, an infinity makes
    its row 0 except for itself and its rotation partner, which are NaN.
    Source: docs/semantics/rmsnorm_rope.md §3.1, design document [002].

    Args:
        x: [B, S, Hd], any strides; float32, float16, bfloat16 or float64.
        weight: [Hd], any of these dtypes.
        cos, sin: [S', hd] or [1, S', 1, hd] with S' >= S, any of these dtypes; position s uses row s. With
            ``num_heads`` also [S', hd/2], which serves both halves. They are not differentiated.
        eps: added to the mean; 0 is allowed.
        num_heads: Hd / hd, by default from cos.
        BLOCK_SIZE, num_warps, num_stages: a configuration of the CUDA kernel for the tuner, all three or
            none: threads per row, warps per block, rows in flight. Validated everywhere, ignored on the CPU.

    Returns:
        A new contiguous tensor [B, S, Hd] of x's dtype, differentiable with respect to x and weight.

    Raises:
        DeviceError, UnsupportedDtypeError, ShapeMismatchError, ValueError: see
            :func:`validate_rmsnorm_rope_inputs`.
        ArchitectureNotSupportedError: a configuration that is not compiled.
        NotImplementedError: cos or sin requires grad, or a configuration that cannot hold such rows.

    Without a configuration ``HTREE_TUNE`` decides: see :mod:`htree_ops.tuning.select`.
    """
    validate_rmsnorm_rope_inputs(x, weight, cos, sin, eps, num_heads)
    config = tuning_config(
        "rmsnorm_rope", COMPILED_CONFIGS, BLOCK_SIZE=BLOCK_SIZE, num_warps=num_warps, num_stages=num_stages
    )
    if config is None:
        head_dim = x.shape[2] // num_heads if num_heads else cos.shape[-1]
        config = configured(
            "rmsnorm_rope",
            (*x.shape, head_dim),
            x,
            lambda tried: torch.ops.htree.rmsnorm_rope(x, weight, cos, sin, eps, num_heads, tried),
        )
    return torch.ops.htree.rmsnorm_rope(x, weight, cos, sin, eps, num_heads, config)


def _check_head_inputs(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> None:
    op = "head_rmsnorm_rope"
    tensors = {"x": x, "weight": weight, "cos": cos, "sin": sin}
    check_devices(op, tensors)
    _check_dtype(op, tensors)
    _check_ranks(op, 4, x, weight, cos, sin)
    if tuple(weight.shape) != (x.shape[3],):
        raise _shape_error(
            f"Weight shape mismatch: expected ({x.shape[3]},), got {tuple(weight.shape)}",
            "weight",
            weight,
            (x.shape[3],),
        )
    _check_tables(op, x, cos, sin, x.shape[3])
    _check_eps(op, eps)


def head_rmsnorm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float = 1e-6) -> Tensor:
    """RMSNorm of each head, then its rotary embedding: the q_norm and k_norm of current models.

    The formulas of :func:`rmsnorm_rope` with the mean over the head dim. Source: docs/semantics/rmsnorm_rope.md §3.1.

    Args:
        x: [B, S, H, hd], any strides, such as a part of a fused projection; float32, float16, bfloat16 or
            float64.
        weight: [hd], any of these dtypes.
        cos, sin: [S', hd], [S', hd/2] or [1, S', 1, ...] with S' >= S, any of these dtypes; not
            differentiated.
        eps: added to the mean; 0 is allowed.

    Returns:
        A new contiguous tensor [B, S, H, hd] of x's dtype, differentiable with respect to x and weight.

    Raises:
        DeviceError, UnsupportedDtypeError, ShapeMismatchError, ValueError: as for :func:`rmsnorm_rope`.
        NotImplementedError: cos or sin requires grad.
    """
    _check_head_inputs(x, weight, cos, sin, eps)
    return torch.ops.htree.head_rmsnorm_rope(x, weight, cos, sin, eps)


class FusedRMSNormRoPE(nn.Module):
    """:func:`rmsnorm_rope` with its weight.

    Args:
        hidden_dim: Hd.
        head_dim: hd; even, divides Hd.
        eps: added to the mean of squares.
        device, dtype: of the weight [Hd], which starts as ones.

    Raises:
        ValueError: a size is below 1, head_dim is odd or does not divide hidden_dim, or eps is negative or not
            finite.
        TypeError: a size is no int, eps no number, or dtype none that the op computes (UnsupportedDtypeError).
    """

    def __init__(
        self,
        hidden_dim: int,
        head_dim: int,
        eps: float = 1e-6,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        check_int(name, "hidden_dim", hidden_dim, 1)
        check_int(name, "head_dim", head_dim, 0)
        _check_eps(name, eps)
        if dtype not in (None, *FLOATING_AND_DOUBLE):
            raise UnsupportedDtypeError(
                f"{name}: dtype must be {' or '.join(map(str, FLOATING_AND_DOUBLE))}, got {dtype}",
                dtype=dtype,
                supported_dtypes=FLOATING_AND_DOUBLE,
            )
        if head_dim < 2 or head_dim % 2 or hidden_dim % head_dim:
            raise ValueError(
                f"head_dim must be even and divide hidden_dim = {hidden_dim}, got head_dim = {head_dim}"
            )
        self.hidden_dim = hidden_dim
        self.head_dim = head_dim
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_dim, device=device, dtype=dtype))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, S, Hd], cos and sin [S, hd] or [S, hd/2] -> [B, S, Hd]."""
        return rmsnorm_rope(x, self.weight, cos, sin, self.eps, self.hidden_dim // self.head_dim)

    def extra_repr(self) -> str:
        return f"{self.hidden_dim}, head_dim={self.head_dim}, eps={self.eps}"
