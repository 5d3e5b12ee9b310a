"""The Hadamard transform of rows and of groups of heads (docs/semantics/hadamard.md §4.1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from htree_ops.ops.arguments import check_int, check_number, validate_arguments

#: Longest row that the ops transform.
MAX_LENGTH = 32768


@validate_arguments
def hadamard_transform(x: Tensor, scale: float | None = None) -> Tensor:
    """The Walsh-Hadamard transform of the last dim: ``y = scale * x @ H_n``.

    H_n is the Sylvester matrix, H_1 = [1], H_2m = [[H_m, H_m], [H_m, -H_m]], and is symmetric. With the default
    scale n^(-1/2) the transform is orthonormal and its own inverse; ``fast_hadamard_transform.hadamard_transform``
    multiplies by 1 by default. It takes n log2 n additions in fp32 (fp64
    for fp64); the sums are scaled and rounded once to the dtype of x. A sum beyond the range of that arithmetic is
    infinite whatever the scale. The gradient is the same transform with the same scale.
    Source: docs/semantics/hadamard.md §4.1, design document [003].

    Args:
        x: [..., n] with n a power of two, 1 to 32768, any strides; float32, float16, bfloat16 or float64.
        scale: factor of the result; n^(-1/2) by default.

    Returns:
        A new contiguous tensor of the shape and dtype of x.

    Raises:
        ShapeMismatchError: x is a scalar, or n is not a power of two or too large. Nothing is padded: a padded and
            cut transform is not invertible.
        UnsupportedDtypeError: another dtype.
        ValueError: scale is not finite in float32 (float64 for a float64 x).
        TypeError: x is not a dense tensor, or scale is not a number.

    Example:
        >>> hadamard_transform(torch.tensor([1.0, 0.0, 0.0, 0.0]))
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    return torch.ops.htree.hadamard_transform(x, scale)


@validate_arguments
def hadamard_transform_(x: Tensor, scale: float | None = None) -> Tensor:
    """:func:`hadamard_transform` in place, for an x of any strides; returns x.

    Raises:
        NotImplementedError: x requires grad while gradients are recorded.
        RuntimeError: elements of x share memory.
    """
    torch.ops.htree.hadamard_transform_(x, scale)
    return x


@validate_arguments
def grouped_hadamard(x: Tensor, group: int, scale: float | None = None) -> Tensor:
    """The transform of the joined rows of ``group`` adjacent heads, position by position.

    For G = group, element g·D + d of a row is ``x[b, i·G + g, s, d]``; the row of G·D elements is transformed as by
    :func:`hadamard_transform` (scale (G·D)^(-1/2) by default, its own inverse) and goes back to the same places.
    As H_GD = H_G (x) H_D this is the transform of each head and a G-point butterfly across the heads; it runs in
    one pass over x. G = 1 transforms each head on its own. Attention scores per head are kept by G = 1 alone
    (docs/semantics/hadamard.md §4.2). Source: docs/semantics/hadamard.md §4.1, design document [003].

    Args:
        x: [B, H, S, D] with H a multiple of group and group·D a power of two, 1 to 32768, any strides;
            float32, float16, bfloat16 or float64.
        group: heads that are joined, at least 1.
        scale: factor of the result; (group·D)^(-1/2) by default.

    Returns:
        A new contiguous tensor [B, H, S, D] of the dtype of x; its gradient is the same op.

    Raises:
        ShapeMismatchError: rank other than 4, group does not divide H, or group·D is not a power of two or too large.
        UnsupportedDtypeError: another dtype.
        ValueError: group below 1, or scale is not finite in float32 (float64 for a float64 x).
        TypeError: x is not a dense tensor, group is not an int, or scale is not a number.

    Example:
        >>> grouped_hadamard(torch.randn(1, 10, 8, 64), group=2).shape
        torch.Size([1, 10, 8, 64])
    """
    return torch.ops.htree.grouped_hadamard(x, group, scale)


class HadamardTransform(nn.Module):
    """:func:`hadamard_transform` as a module without parameters, or :func:`grouped_hadamard` where ``group`` is given.

    Args:
        group: heads that are joined, for inputs [B, H, S, D]; None transforms the last dim of any input.
        scale: factor of the result; by default the transform is orthonormal.

    Raises:
        ValueError: group below 1, or scale is not finite in float32.
        TypeError: group is not an int, or scale is not a number.

    Example:
        >>> x = torch.randn(3, 64)
        >>> torch.allclose(HadamardTransform()(HadamardTransform()(x)), x, atol=1e-5)  # its own inverse
        True
    """

    def __init__(self, group: int | None = None, scale: float | None = None) -> None:
        super().__init__()
        if group is not None:
            check_int("HadamardTransform", "group", group, 1)
        if scale is not None:
            check_number("HadamardTransform", "scale", scale)
        self.group = group
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """x [..., n], or [B, H, S, D] with ``group``; returns the same shape and dtype."""
        if self.group is None:
            return hadamard_transform(x, self.scale)
        return grouped_hadamard(x, self.group, self.scale)

    def extra_repr(self) -> str:
        """The two options, for ``repr``."""
        return f"group={self.group}, scale={self.scale}"
