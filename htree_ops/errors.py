"""Exception classes of the package (docs/semantics/conventions.md §0.4).

Each class is a :class:`HTreeKernelError` and the builtin that C++ raises for the same mistake, so that both
``except ShapeMismatchError`` and ``except ValueError`` catch it. Every constructor takes the message and, as
keywords, the facts behind it; a fact that is not given is ``None`` (``attempts`` and ``configs_tried``: 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = [
    "ArchitectureNotSupportedError",
    "DeviceError",
    "HTreeKernelError",
    "NumericalOverflowError",
    "ShapeMismatchError",
    "TuningFailedError",
    "UnsupportedDtypeError",
]


class HTreeKernelError(Exception):
    """Base of every error that this package raises itself."""


class ShapeMismatchError(HTreeKernelError, ValueError):
    """A tensor has the wrong rank or sizes.

    Attributes:
        expected: the required shape or rank, as a tuple, an int or words.
        actual: what came instead.
        tensor_name: name of the argument.
    """

    def __init__(
        self, message: str = "", *, expected: Any = None, actual: Any = None, tensor_name: str | None = None
    ) -> None:
        super().__init__(message)
        self.expected = expected
        self.actual = actual
        self.tensor_name = tensor_name


class UnsupportedDtypeError(HTreeKernelError, TypeError):
    """A tensor has a dtype that the op does not compute.

    Attributes:
        dtype: the dtype that came.
        supported_dtypes: the dtypes the op computes.
        tensor_name: name of the argument.
    """

    def __init__(
        self,
        message: str = "",
        *,
        dtype: torch.dtype | None = None,
        supported_dtypes: Sequence[torch.dtype] | None = None,
        tensor_name: str | None = None,
    ) -> None:
        super().__init__(message)
        self.dtype = dtype
        self.supported_dtypes = supported_dtypes
        self.tensor_name = tensor_name


class DeviceError(HTreeKernelError, RuntimeError):
    """A tensor lies on the wrong device, or tensors lie on different ones.

    Attributes:
        expected_device: where it had to be.
        actual_device: where it is.
        tensor_name: name of the argument.
    """

    def __init__(
        self,
        message: str = "",
        *,
        expected_device: torch.device | str | None = None,
        actual_device: torch.device | str | None = None,
        tensor_name: str | None = None,
    ) -> None:
        super().__init__(message)
        self.expected_device = expected_device
        self.actual_device = actual_device
        self.tensor_name = tensor_name


class NumericalOverflowError(HTreeKernelError, ArithmeticError):
    """Values stay outside the range of the target format after every permitted rescaling.

    Attributes:
        max_value: largest magnitude seen, in units of the unscaled input.
        scale: last scale tried (it multiplies the input).
        attempts: number of scales tried.
    """

    def __init__(
        self,
        message: str = "",
        *,
        max_value: float | None = None,
        scale: float | None = None,
        attempts: int = 0,
    ) -> None:
        super().__init__(message)
        self.max_value = max_value
        self.scale = scale
        self.attempts = attempts


class TuningFailedError(HTreeKernelError, RuntimeError):
    """No configuration of a search space ran.

    Attributes:
        problem_size: the sizes that were tuned for.
        configs_tried: number of configurations called.
        last_error: exception of the last one.
    """

    def __init__(
        self,
        message: str = "",
        *,
        problem_size: Sequence[int] | None = None,
        configs_tried: int = 0,
        last_error: BaseException | None = None,
    ) -> None:
        super().__init__(message)
        self.problem_size = problem_size
        self.configs_tried = configs_tried
        self.last_error = last_error


class ArchitectureNotSupportedError(HTreeKernelError, NotImplementedError):
    """The device, or the compiled set of kernels, cannot run the op as asked."""
