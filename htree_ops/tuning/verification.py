"""Whether a result is what it should be: the rule of docs/semantics/python.md §3.4, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

SEGMENT = 1024
_CHUNK = SEGMENT << 14  # elements that are held as float64 at a time: 128 MiB


@dataclass(frozen=True)
class Report:
    """How far ``actual`` is from ``expected``.

    Attributes:
        numel: number of elements compared.
        num_bad: elements outside the tolerance, or whose NaN or infinity does not match.
        max_abs: largest ``|a - e|`` where both are finite.
        norm: ``||a - e|| / ||e||`` over the elements where both are finite.
        worst_segment: largest such quotient over runs of 1024 consecutive elements (row-major).
        max_expected: largest finite ``|e|``.
        num_nonfinite_mismatch: elements whose NaN or infinity is not matched.
        first_bad: index of the first bad element, with the two values; None if there is none.
    """

    numel: int
    num_bad: int
    max_abs: float
    norm: float
    worst_segment: float
    max_expected: float
    num_nonfinite_mismatch: int
    first_bad: tuple[tuple[int, ...], float, float] | None

    def __str__(self) -> str:
        text = (
            f"{self.num_bad} of {self.numel} elements out of tolerance, max |error| {self.max_abs:.3e} "
            f"(max |expected| {self.max_expected:.3e}), relative norm {self.norm:.3e}, "
            f"worst run of {SEGMENT}: {self.worst_segment:.3e}"
        )
        if self.num_nonfinite_mismatch:
            text += f", {self.num_nonfinite_mismatch} with a NaN or infinity on one side only"
        if self.first_bad:
            index, actual, expected = self.first_bad
            text += f"; first at {list(index)}: got {actual!r}, expected {expected!r}"
        return text


def _dtype_class(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "bool"
    if dtype.is_complex:
        return "complex"
    return "floating" if dtype.is_floating_point else "integer"


def mismatch(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None) -> str | None:
    """Why the two cannot be compared element by element, or None."""
    if actual.shape != expected.shape:
        return f"shape {list(actual.shape)}, expected {list(expected.shape)}"
    if _dtype_class(actual.dtype) != _dtype_class(expected.dtype):
        return f"dtype {actual.dtype}, expected a {_dtype_class(expected.dtype)} one like {expected.dtype}"
    if actual.dtype.is_complex:
        return f"dtype {actual.dtype}: complex tensors are not compared here, view them as real"
    if dtype is not None and actual.dtype != dtype:
        return f"dtype {actual.dtype}, expected {dtype}"
    return None


def _chunks(*tensors: torch.Tensor) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """(offset, slices) of the flattened tensors, on the device of the second."""
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    for offset in range(0, flat[0].numel(), _CHUNK):
        yield offset, [part[offset : offset + _CHUNK].to(flat[1].device) for part in flat]


def _segment_sums(squares: torch.Tensor) -> torch.Tensor:
    padding = -squares.numel() % SEGMENT
    return torch.nn.functional.pad(squares, (0, padding)).view(-1, SEGMENT).sum(dim=1)


def _quotient(error: float, reference: float) -> float:
    if error == 0.0:
        return 0.0
    return error / reference if reference > 0.0 else math.inf


def compare(
    actual: torch.Tensor, expected: torch.Tensor, rtol: float = 0.0, atol: float | torch.Tensor = 0.0
) -> Report:
    """Measures ``actual`` against ``expected`` of the same shape, in float64 and in bounded memory.

    An element is in tolerance iff ``|a - e| <= atol + rtol * |e|``, or both are NaN, or both are the same
    infinity (docs/semantics/python.md §3.4). ``atol`` may be a tensor that broadcasts to the shape. Integers without
    a tolerance are compared as integers. The devices may differ; it runs on that of ``expected``.
    """
    bound = torch.as_tensor(atol, dtype=torch.float64, device=expected.device).expand(expected.shape)
    bad = mismatched = 0
    max_abs = max_expected = error_sum = expected_sum = worst = 0.0
    first_bad: tuple[tuple[int, ...], float, float] | None = None
    exact = not actual.is_floating_point() and rtol == 0.0 and not bool(bound.count_nonzero())
    for offset, (a_raw, e_raw, limit) in _chunks(actual, expected, bound):
        a, e = a_raw.double(), e_raw.double()
        finite = a.isfinite() & e.isfinite()
        same = a_raw == e_raw if exact else (a == e) | (a.isnan() & e.isnan())
        error = torch.where(finite, (a - e).abs(), 0.0)
        reference = torch.where(finite, e.abs(), 0.0)
        within = same if exact else same | (finite & (error <= limit + rtol * reference))
        mismatched += int((~finite & ~same).sum())
        num_bad = int((~within).sum())
        if num_bad and first_bad is None:
            at = int((~within).nonzero()[0, 0])
            index = tuple(
                int(i) for i in torch.unravel_index(torch.tensor(offset + at, device="cpu"), expected.shape)
            )
            first_bad = (index, a_raw[at].item(), e_raw[at].item())
        bad += num_bad
        max_abs = max(max_abs, float(error.max()))
        max_expected = max(max_expected, float(reference.max()))
        error_squares, squares = _segment_sums(error.square()), _segment_sums(reference.square())
        error_sum += float(error_squares.sum())
        expected_sum += float(squares.sum())
        quotients = torch.where(error_squares == 0, 0.0, (error_squares / squares).sqrt())
        worst = max(worst, float(quotients.max()))
    return Report(
        numel=expected.numel(),
        num_bad=bad,
        max_abs=max_abs,
        norm=_quotient(math.sqrt(error_sum), math.sqrt(expected_sum)),
        worst_segment=worst,
        max_expected=max_expected,
        num_nonfinite_mismatch=mismatched,
        first_bad=first_bad,
    )


def verify(actual: torch.Tensor, expected: torch.Tensor, rtol: float, atol: float) -> bool:
    """True iff shapes and dtype classes agree and every element is in tolerance (docs/semantics/python.md §3.4).

    Raises:
        TypeError: an argument is not a tensor. ValueError: a tolerance is negative or NaN.
    """
    for name, tensor in (("actual", actual), ("expected", expected)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"verify: {name} must be a Tensor, got {type(tensor).__name__}")
    for name, tolerance in (("rtol", rtol), ("atol", atol)):
        if not tolerance >= 0:
            raise ValueError(f"verify: {name} must be at least 0, got {tolerance}")
    return mismatch(actual, expected, None) is None and compare(actual, expected, rtol, atol).num_bad == 0
