"""Tensors with chosen values and a chosen place in memory.

Every helper keeps the values of ``x`` and changes only how they lie in storage; storage outside of
the result is NaN (the largest value for integers), so that a kernel that reads beside its input shows it.
"""

import math
from collections.abc import Callable, Sequence

import torch


def storage_span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Number of storage elements that a view of ``shape`` and non-negative ``strides`` reaches over."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _poisoned(num_elements: int, like: torch.Tensor) -> torch.Tensor:
    if like.dtype == torch.bool:
        return torch.ones(num_elements, dtype=torch.bool, device=like.device)
    poison = float("nan") if like.is_floating_point() else torch.iinfo(like.dtype).max
    return torch.full((num_elements,), poison, dtype=like.dtype, device=like.device)


def with_strides(x: torch.Tensor, strides: Sequence[int], offset: int = 0) -> torch.Tensor:
    """Copy of ``x`` with exactly ``strides`` (elements) starting ``offset`` elements into its storage.

    A stride of 0 repeats one slice: ``x`` must then be constant along that dim. Other overlaps are refused.

    Raises:
        ValueError: wrong number of strides, a negative one, or two elements that would share a place.
    """
    if len(strides) != x.dim() or any(stride < 0 for stride in strides):
        raise ValueError(f"need {x.dim()} strides >= 0, got {tuple(strides)}")
    moving = [(stride, size) for stride, size in zip(strides, x.shape, strict=True) if stride and size > 1]
    reach = 1
    for stride, size in sorted(moving) if x.numel() else ():
        if stride < reach:
            raise ValueError(f"strides {tuple(strides)} overlap for shape {tuple(x.shape)}")
        reach = stride * (size - 1) + reach
    storage = _poisoned(offset + max(1, storage_span(x.shape, strides)), x)
    view = storage.as_strided(x.shape, strides, offset)
    # A stride of 0 cannot be written through torch's copy_: write one slice of each such dim.
    once = [slice(0, 1) if stride == 0 else slice(None) for stride in strides]
    view[tuple(once)].copy_(x[tuple(once)])
    return view


def in_larger(x: torch.Tensor, margin: int = 3) -> torch.Tensor:
    """``x`` as the inner part of a tensor that is ``margin`` elements larger on both sides of every dim."""
    larger_shape = [size + 2 * margin for size in x.shape]
    inner = _poisoned(math.prod(larger_shape), x).view(larger_shape)
    for dim, size in enumerate(x.shape):
        inner = inner.narrow(dim, margin, size)
    return inner.copy_(x)


def misaligned(x: torch.Tensor, offset: int = 1) -> torch.Tensor:
    """Contiguous ``x`` whose data pointer lies ``offset`` elements past the aligned start of its storage."""
    return _poisoned(x.numel() + offset, x)[offset:].view(x.shape).copy_(x)


def transposed(x: torch.Tensor) -> torch.Tensor:
    """``x`` stored with its last two dims exchanged: the last dim has the larger stride. Needs two dims."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def non_unit_last_stride(x: torch.Tensor, step: int = 2) -> torch.Tensor:
    """``x`` as every ``step``-th element of the last dim of a wider tensor."""
    wide = _poisoned(x.numel() * step, x).view(*x.shape[:-1], x.shape[-1] * step)
    return wide[..., ::step].copy_(x)


#: Layouts that any op must accept (docs/semantics/conventions.md §0.2), by name; for tensors of two dims or more.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": transposed,
    "in_larger": in_larger,
    "misaligned": misaligned,
    "non_unit_last_stride": non_unit_last_stride,
}
