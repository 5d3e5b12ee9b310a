"""RMSNorm followed by RoPE in one kernel, over the hidden dim or per head (docs/semantics/rmsnorm_rope.md §3.1)."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from htree_ops.ops.arguments import tuning_config, validate_arguments
from htree_ops.tuning.select import configured

#: (BLOCK_SIZE, num_warps, num_stages) of the kernels a caller may ask for.
COMPILED_CONFIGS = tuple((32 * warps, warps, stages) for warps in (2, 4, 8) for stages in (1, 2, 3))


_warned_of_transposed = False


def _warn_of_transposed(x: Tensor, cos: Tensor) -> None:
    """Once per process: [B, H, S, hd] has legal sizes where the tables are long enough for H positions."""
    global _warned_of_transposed
    if _warned_of_transposed or x.dim() != 4 or not 2 <= cos.dim() <= 4:  # the op refuses other ranks
        return
    if x.shape[1] < x.shape[2] == cos.shape[0 if cos.dim() == 2 else 1]:
        _warned_of_transposed = True
        warnings.warn(
            f"head_rmsnorm_rope: x is {tuple(x.shape)}, read as {x.shape[1]} tokens of {x.shape[2]} heads, with tables "
            f"of {x.shape[2]} positions. If it is [B, H, S, hd] in place of [B, S, H, hd]: transpose(1, 2) it. (Said "
            f"once per process.)",
            UserWarning,
            stacklevel=4,
        )


def _divides(num_heads: int | None, width: int) -> bool:
    return num_heads is None or (1 <= num_heads <= width and width % num_heads == 0)


@validate_arguments
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
    ``n · cos + rotate_half(n) · sin``. Channel i is paired with i + hd/2, as in transformers; weights of Meta's own
    Llama files, which pair neighbours, need their rows permuted first. The norm multiplies by ``weight``: for Gemma,
    which multiplies by 1 + weight, pass that. Arithmetic in fp32 (fp64 for fp64) with one final rounding; squares are
    summed in that precision, so ``|x|`` beyond 1e19 in fp32 gives 0. A NaN makes its row NaN, an infinity makes
    its row 0 except for itself and its rotation partner, which are NaN.
    Source: docs/semantics/rmsnorm_rope.md §3.1, design document [002].

    Args:
        x: [B, S, Hd], any strides; float32, float16, bfloat16 or float64.
        weight: [Hd], any of these dtypes.
        cos, sin: one table [S', hd], [1, S', hd] or [1, S', 1, hd], or one for each sequence, [B, S', hd] or
            [B, S', 1, hd], as models of transformers hand them to their layers; S' >= S, any of these dtypes. Token
            s uses row s of its table, whatever its position ids: pick rows for others. With ``num_heads`` also
            hd/2 columns, which serve both halves; without it hd/2 columns are read as those of twice as many
            heads of half the width, for nothing else says what hd is. They are not differentiated.
        eps: added to the mean; 0 is allowed.
        num_heads: Hd / hd, by default Hd divided by the columns of cos. Give it, and tables of another width
            are refused.
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

    Example:
        >>> angles = torch.randn(10, 32)  # [tokens, head_dim / 2]
        >>> x, weight = torch.randn(1, 10, 4 * 64), torch.ones(4 * 64)
        >>> rmsnorm_rope(x, weight, angles.cos(), angles.sin(), num_heads=4).shape
        torch.Size([1, 10, 256])
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


@validate_arguments
def head_rmsnorm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float = 1e-6) -> Tensor:
    """RMSNorm of each head, then its rotary embedding: the q_norm and k_norm of current models.

    The formulas of :func:`rmsnorm_rope` with the mean over the head dim. Source: docs/semantics/rmsnorm_rope.md §3.1.

    Args:
        x: [B, S, H, hd], tokens before heads, any strides, such as a part of a fused projection or a transposed
            [B, H, S, hd]; float32, float16, bfloat16 or float64.
        weight: [hd], any of these dtypes.
        cos, sin: [S', d], [1 or B, S', d] or [1 or B, S', 1, d] with d = hd or hd/2 and S' >= S, any of these
            dtypes; see :func:`rmsnorm_rope`.
        eps: added to the mean; 0 is allowed.

    Returns:
        A new contiguous tensor [B, S, H, hd] of x's dtype, differentiable with respect to x and weight.

    Raises:
        DeviceError, UnsupportedDtypeError, ShapeMismatchError, ValueError: as for :func:`rmsnorm_rope`.
        NotImplementedError: cos or sin requires grad.

    Example:
        >>> angles = torch.randn(10, 32)
        >>> head_rmsnorm_rope(torch.randn(1, 10, 4, 64), torch.ones(64), angles.cos(), angles.sin()).shape
        torch.Size([1, 10, 4, 64])
    """
    if not torch.compiler.is_compiling():
        _warn_of_transposed(x, cos)
    return torch.ops.htree.head_rmsnorm_rope(x, weight, cos, sin, eps)
