"""Causal softmax over score matrices (docs/semantics/causal_softmax.md §5)."""

from __future__ import annotations

import torch
from torch import Tensor

from htree_ops.ops.arguments import validate_arguments

BLOCK_SIZES = (0, 512, 1024)


@validate_arguments
def causal_softmax(x: Tensor, block_size: int = 0, *, out: Tensor | None = None) -> Tensor:
    """Softmax of each row's visible prefix; zero behind it.

    Column j of row i is visible iff ``j <= i + (w - h)`` (aligned at the bottom right): with m the maximum
    of the row's visible entries, ``y_ij = exp(x_ij - m) / sum_j' exp(x_ij' - m)`` over visible j', and +0
    elsewhere. Masked entries are never read. Arithmetic in fp32 (fp64 for fp64) with one final rounding.
    With w > h that is the causal mask of queries that are the last h of w tokens; ``is_causal`` of
    ``torch.nn.functional.scaled_dot_product_attention`` is aligned at the top left and differs there.
    Source: docs/semantics/causal_softmax.md §5, design document [004].

    Args:
        x: scores [..., h, w] with w >= h, such as [B, H, T_q, T], any strides; float32, float16, bfloat16 or
            float64. It is read in place where its leading dims have one stride together, as they have in a
            contiguous tensor, and is copied otherwise.
        block_size: threads per row on CUDA, 512 or 1024; 0 chooses by w. Checked on every device.
        out: tensor of the shape, dtype and device of x to write into. Each of its strides steps over all that the
            smaller ones reach. It may be x itself; the op then works in place. Not differentiable.

    Returns:
        ``out`` where it is given, else a new contiguous tensor of the shape and dtype of x, differentiable.

    Raises:
        ShapeMismatchError: fewer than 2 dims, w < h, or another shape of ``out``.
        UnsupportedDtypeError: x has another dtype, or ``out`` has not that of x.
        DeviceError: ``out`` lies on another device.
        ArchitectureNotSupportedError: another block_size.
        RuntimeError: ``out`` overlaps x in part, or elements of ``out`` share memory.
        TypeError: x or ``out`` is not a dense tensor, or block_size is not an int.
        NotImplementedError: ``out`` is given and x or ``out`` requires grad.

    Example:
        >>> causal_softmax(torch.zeros(2, 2))
        tensor([[1.0000, 0.0000],
                [0.5000, 0.5000]])
    """
    if torch.compiler.is_compiling() and block_size not in BLOCK_SIZES:
        # Dynamo takes the op's NotImplementedError for a missing Meta kernel, and drops its message.
        raise ValueError(f"causal_softmax: block_size must be 0 (automatic), 512 or 1024, got {block_size}")
    if out is None:
        return torch.ops.htree.causal_softmax(x, block_size)
    if out is x:
        torch.ops.htree.causal_softmax_(x, block_size)
    else:
        torch.ops.htree.causal_softmax.out(x, block_size, out=out)
    return out
