"""What a tensor must look like, as one value (docs/semantics/python.md §3.4)."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from htree_ops.errors import DeviceError, ShapeMismatchError, UnsupportedDtypeError

__all__ = ["TensorSpec"]


@dataclass
class TensorSpec:
    """Shape, dtype, device and layout of one tensor.

    Attributes:
        shape: sizes.
        dtype: element type.
        device: device, without an index for any of its kind.
        contiguous: whether the elements must lie in row-major order without gaps.

    Raises:
        TypeError: shape is no sequence of ints, or dtype no torch.dtype. ValueError: a size below 0, or no device.
    """

    shape: Sequence[int]
    dtype: torch.dtype
    device: str | torch.device = "cuda"
    contiguous: bool = True

    def __post_init__(self) -> None:
        try:
            sizes = [operator.index(size) for size in self.shape]
        except TypeError as error:
            raise TypeError(f"TensorSpec: shape must be a sequence of ints, got {self.shape!r}") from error
        if any(size < 0 for size in sizes):
            raise ValueError(f"TensorSpec: shape must have sizes of at least 0, got {self.shape!r}")
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"TensorSpec: dtype must be a torch.dtype, got {self.dtype!r}")
        try:
            torch.device(self.device)
        except RuntimeError as error:
            raise ValueError(f"TensorSpec: device must be one of torch, got {self.device!r}") from error

    def validate(self, tensor: Tensor, name: str = "tensor") -> None:
        """Checks ``tensor``: device, then dtype, rank, sizes and layout.

        Raises:
            DeviceError, UnsupportedDtypeError, ShapeMismatchError: with the facts as attributes.
            ValueError: not contiguous where that is wanted.
        """
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a Tensor, got {type(tensor).__name__}")
        wanted = torch.device(self.device)
        if tensor.device.type != wanted.type or wanted.index not in (None, tensor.device.index):
            raise DeviceError(
                f"{name} must be on {wanted}, got {tensor.device}",
                expected_device=wanted,
                actual_device=tensor.device,
                tensor_name=name,
            )
        if tensor.dtype != self.dtype:
            raise UnsupportedDtypeError(
                f"{name} must have dtype {self.dtype}, got {tensor.dtype}",
                dtype=tensor.dtype,
                supported_dtypes=(self.dtype,),
                tensor_name=name,
            )
        if tuple(tensor.shape) != tuple(self.shape):
            raise ShapeMismatchError(
                f"{name} must have shape {tuple(self.shape)}, got {tuple(tensor.shape)}",
                expected=tuple(self.shape),
                actual=tuple(tensor.shape),
                tensor_name=name,
            )
        if self.contiguous and not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")

    def create_tensor(self) -> Tensor:
        """A tensor of this spec: standard normal values for a floating dtype, zeros for the others.

        Where ``contiguous`` is False the last two dims are stored exchanged.
        """
        shape = tuple(self.shape)
        is_strided = not self.contiguous and len(shape) > 1
        stored = (*shape[:-2], shape[-1], shape[-2]) if is_strided else shape
        if self.dtype.is_floating_point:
            tensor = torch.randn(stored, device=self.device).to(self.dtype)
        else:
            tensor = torch.zeros(stored, dtype=self.dtype, device=self.device)
        return tensor.transpose(-1, -2) if is_strided else tensor
