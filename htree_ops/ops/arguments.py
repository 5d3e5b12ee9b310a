"""Checks that the Python functions make before they call an op (docs/semantics/conventions.md §0.4).

They raise the package's own classes with the facts as attributes. The op itself checks everything again,
sizes that depend on each other and options included, and raises the builtin that each class derives from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from htree_ops.errors import (
    ArchitectureNotSupportedError,
    DeviceError,
    ShapeMismatchError,
    UnsupportedDtypeError,
)

__all__ = [
    "FLOATING",
    "FLOATING_AND_DOUBLE",
    "check_bool",
    "check_devices",
    "check_dtype",
    "check_int",
    "check_int_type",
    "check_int_types",
    "check_number",
    "check_option_dtype",
    "check_tensor",
    "check_tensors",
    "dtype_name",
    "tuning_config",
]

#: dtypes of every op on every device.
FLOATING = (torch.float32, torch.float16, torch.bfloat16)
#: dtypes on the CPU, and of the ops that have double kernels on CUDA.
FLOATING_AND_DOUBLE = (*FLOATING, torch.float64)


def check_tensor(op: str, name: str, tensor: object) -> None:
    """Raises TypeError unless ``tensor`` is a dense tensor."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {name} must be a Tensor, got {type(tensor).__name__}")
    if tensor.is_nested or tensor.layout != torch.strided:
        came = "a nested one" if tensor.is_nested else f"layout {tensor.layout}"
        raise TypeError(f"{op}: {name} must be a dense tensor, got {came}")


def check_devices(op: str, tensors: Mapping[str, Tensor], require_cuda: bool = False) -> None:
    """Checks that all are dense tensors on one device, that of the first.

    Raises:
        TypeError: an argument is not a dense tensor.
        DeviceError: a tensor lies on another device than the first, or the first not on CUDA where that is required.
    """
    first: tuple[str, Tensor] | None = None
    for name, tensor in tensors.items():
        check_tensor(op, name, tensor)
        if first is None:
            first = (name, tensor)
            if require_cuda and tensor.device.type != "cuda":
                raise DeviceError(
                    f"{op}: {name} must be on a CUDA device, got {tensor.device}",
                    expected_device="cuda",
                    actual_device=tensor.device,
                    tensor_name=name,
                )
        elif tensor.device != first[1].device:
            raise DeviceError(
                f"{op}: {name} must be on the device of {first[0]} ({first[1].device}), got {tensor.device}",
                expected_device=first[1].device,
                actual_device=tensor.device,
                tensor_name=name,
            )


def check_tensors(op: str, **arguments: tuple[Tensor, str]) -> None:
    """Checks type, rank, sizes and device of the tensors of one call.

    Args:
        op: name for the messages.
        arguments: per argument the tensor and its shape in words, such as ``"B T H K"``. A word that occurs
            twice must have one size; the first tensor's device is everyone's.

    Raises:
        TypeError: an argument is not a tensor.
        ShapeMismatchError: wrong rank, or a size that disagrees with an earlier argument.
        DeviceError: a tensor lies on another device than the first.
    """
    sizes: dict[str, tuple[str, int]] = {}
    for name, (tensor, words) in arguments.items():
        check_tensor(op, name, tensor)
        dims = words.split()
        if tensor.dim() != len(dims):
            raise ShapeMismatchError(
                f"{op}: {name} must be {len(dims)}-D [{', '.join(dims)}], "
                f"got {tensor.dim()}-D {tuple(tensor.shape)}",
                expected=len(dims),
                actual=tensor.dim(),
                tensor_name=name,
            )
        for dim, (word, size) in enumerate(zip(dims, tensor.shape, strict=True)):
            owner, wanted = sizes.setdefault(word, (name, size))
            if size != wanted:
                raise ShapeMismatchError(
                    f"{op}: size {dim} of {name} must be {word} of {owner} = {wanted}, "
                    f"got {tuple(tensor.shape)}",
                    expected=wanted,
                    actual=size,
                    tensor_name=name,
                )
    check_devices(op, {name: tensor for name, (tensor, _) in arguments.items()})


def check_dtype(op: str, supported: Sequence[torch.dtype], **tensors: Tensor) -> None:
    """Checks that every tensor has one of the ``supported`` dtypes, and all of them the same one.

    Raises:
        UnsupportedDtypeError: naming the tensor, what it has and what is supported.
    """
    wanted: tuple[torch.dtype, ...] = tuple(supported)
    for name, tensor in tensors.items():
        if tensor.dtype not in wanted:
            raise UnsupportedDtypeError(
                f"{op}: {name} must have dtype {' or '.join(str(d) for d in wanted)}, got {tensor.dtype}",
                dtype=tensor.dtype,
                supported_dtypes=wanted,
                tensor_name=name,
            )
        wanted = (tensor.dtype,)


def floating_for(tensor: Tensor, double_on_cuda: bool = False) -> tuple[torch.dtype, ...]:
    """The floating dtypes that an op takes on the device of ``tensor``."""
    return FLOATING if tensor.is_cuda and not double_on_cuda else FLOATING_AND_DOUBLE


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def state_dtype(tensor: Tensor) -> torch.dtype:
    """dtype of scores, states and rotary tables beside ``tensor``: float64 for float64, else float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def check_int_type(op: str, name: str, value: object) -> None:
    """Raises TypeError unless ``value`` is an integer."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{op}: {name} must be an int, got {type(value).__name__}")


def check_int_types(op: str, **values: object) -> None:
    """Raises TypeError unless every value is an integer, ValueError for one beyond 64 bits, which no op takes."""
    for name, value in values.items():
        check_int_type(op, name, value)
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"{op}: {name} must be an int of 64 bits, got {value}")


def check_bool(op: str, name: str, value: object) -> None:
    """Raises TypeError unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be a bool, got {type(value).__name__}")


def check_option_dtype(op: str, dtype: object, supported: Sequence[torch.dtype]) -> None:
    """Raises UnsupportedDtypeError unless the option ``dtype`` is one of the ``supported``."""
    if dtype not in supported:
        raise UnsupportedDtypeError(
            f"{op}: dtype must be {' or '.join(map(str, supported))}, got {dtype}",
            dtype=dtype if isinstance(dtype, torch.dtype) else None,
            supported_dtypes=supported,
        )


def check_int(op: str, name: str, value: Any, least: int, most: int = 2**31 - 1) -> None:
    """Raises TypeError unless ``value`` is an integer, ValueError unless it lies in [least, most]."""
    check_int_type(op, name, value)
    if not least <= value <= most:
        raise ValueError(f"{op}: {name} must be between {least} and {most}, got {value}")


def check_number(
    op: str, name: str, value: object, *, positive: bool = False, dtype: torch.dtype = torch.float32
) -> None:
    """Raises TypeError unless ``value`` is a real number, ValueError unless it is finite in ``dtype``."""
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{op}: {name} must be a number, got {type(value).__name__}")
    largest = torch.finfo(dtype).max
    if not -largest <= value <= largest or (positive and not value > 0):
        wanted = "positive and finite" if positive else "finite"
        raise ValueError(f"{op}: {name} must be {wanted} in {dtype_name(dtype)}, got {value}")


def tuning_config(op: str, compiled: Sequence[tuple[int, ...]], **keys: int | None) -> list[int] | None:
    """The values of an op's tuning keys in their order; None where none is given.

    Args:
        op: name for the messages.
        compiled: the tuples that have a kernel.
        keys: the keys of the op's space in its order, each with what the caller gave.

    Raises:
        TypeError: a value is not an int. ValueError: some keys are missing.
        ArchitectureNotSupportedError: the tuple has no kernel.
    """
    given = [value for value in keys.values() if value is not None]
    if not given:
        return None
    if len(given) != len(keys):
        raise ValueError(f"{op}: give all of {', '.join(keys)} or none, got {keys}")
    for name, value in keys.items():
        check_int_type(op, name, value)
    if tuple(given) not in compiled:
        raise ArchitectureNotSupportedError(
            f"{op}: no kernel is compiled for {keys}; compiled: {', '.join(map(str, compiled))}"
        )
    return given
