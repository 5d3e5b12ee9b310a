"""RMSNorm followed by RoPE in one kernel, over the hidden dim or per head (docs/semantics/rmsnorm_rope.md §3.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from htree_ops.ops.arguments import named, tuning_config
from htree_ops.tuning.select import configured

__all__ = ["head_rmsnorm_rope", "rmsnorm_rope"]

#: (BLOCK_SIZE, num_warps, num_stages) of the kernels a caller may ask for.
COMPILED_CONFIGS = tuple((32 * warps, warps, stages) for warps in (2, 4, 8) for stages in (1, 2, 3))


def _divides(num_heads: int | None, width: int) -> bool:
    return num_heads is None or (1 <= num_heads <= width and width % num_heads == 0)


@named
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
            none: threads per row, warps per block, rows loaded at a time. Checked on every device, ignored on the CPU.

    Returns:
        A new contiguous tensor [B, S, Hd] of x's dtype, differentiable with respect to x and weight.

    Raises:
        DeviceError: tensors on different devices.
        UnsupportedDtypeError: a dtype other than float32, float16, bfloat16, float64.
        ShapeMismatchError: a wrong rank or size.
        ValueError: eps is negative or not finite, num_heads is below 1, or a part of a configuration is missing.
        TypeError: an argument is not a dense tensor, eps is not a number, or num_heads is not an int.
        ArchitectureNotSupportedError: a configuration that is not compiled.
        NotImplementedError: cos or sin requires grad, or a configuration that cannot hold such rows.

    Without a configuration ``HTREE_TUNE`` decides: see :mod:`htree_ops.tuning.select`.
    """
    config = tuning_config(
        "rmsnorm_rope", COMPILED_CONFIGS, BLOCK_SIZE=BLOCK_SIZE, num_warps=num_warps, num_stages=num_stages
    )
    if (
        config is None and x.dim() == 3 and cos.dim() and _divides(num_heads, x.shape[2])
    ):  # the op refuses the rest
        head_dim = x.shape[2] // num_heads if num_heads else cos.shape[-1]
        config = configured(
            "rmsnorm_rope",
            (*x.shape, head_dim),
            x,
            lambda tried: torch.ops.htree.rmsnorm_rope(x, weight, cos, sin, eps, num_heads, tried),
        )
    return torch.ops.htree.rmsnorm_rope(x, weight, cos, sin, eps, num_heads, config)


@named
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
    return torch.ops.htree.head_rmsnorm_rope(x, weight, cos, sin, eps)
