"""Comparison of a result with what it should be.

Two rules. :func:`assert_close_spec` takes the tolerance that docs/semantics gives for the op.
:func:`assert_no_worse_than_eager` needs no figure: it measures the error that plain PyTorch makes in the same
dtype against float64 and allows a small multiple of it. One loose ``atol`` over a large tensor hides a wrong
tail, so the second rule holds for the largest error, for the norm, and for the norm of each 1024 elements. It
cannot see one wrong element far smaller than its neighbours' errors; where docs/semantics gives a relative
tolerance, use that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

__all__ = ["Report", "assert_close_spec", "assert_no_worse_than_eager", "compare", "verify"]

_SEGMENT = 1024
_CHUNK = _SEGMENT << 14  # elements that are held as float64 at a time: 128 MiB


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
            f"worst run of {_SEGMENT}: {self.worst_segment:.3e}"
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


def _mismatch(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None) -> str | None:
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
    padding = -squares.numel() % _SEGMENT
    return torch.nn.functional.pad(squares, (0, padding)).view(-1, _SEGMENT).sum(dim=1)


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
    bound = torch.as_tensor(atol, dtype=torch.float64).expand(expected.shape)
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
            index = tuple(int(i) for i in torch.unravel_index(torch.tensor(offset + at), expected.shape))
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
    return _mismatch(actual, expected, None) is None and compare(actual, expected, rtol, atol).num_bad == 0


def assert_close_spec(
    actual: torch.Tensor,
    expected: torch.Tensor,
    rtol: float,
    atol: float | torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    name: str = "result",
) -> Report:
    """Asserts the rule of :func:`compare` for every element, and returns the measurement.

    Args:
        actual: what the op gave.
        expected: the reference, usually float64; same shape and class of dtype (floating, integer, bool).
        rtol: relative tolerance of docs/semantics for the op.
        atol: absolute tolerance, one number or a tensor that broadcasts to the shape.
        dtype: when given, ``actual`` must have exactly this dtype.
        name: what the message calls ``actual``.
    """
    __tracebackhide__ = True
    if reason := _mismatch(actual, expected, dtype):
        raise AssertionError(f"{name}: {reason}")
    report = compare(actual, expected, rtol, atol)
    if report.num_bad:
        raise AssertionError(
            f"{name}, rtol {rtol}, atol {atol if isinstance(atol, float) else 'given'}: {report}"
        )
    return report


def assert_no_worse_than_eager(
    actual: torch.Tensor,
    reference64: torch.Tensor,
    eager_same_dtype: torch.Tensor,
    factor: float = 2.0,
    atol: float | None = None,
    *,
    name: str = "result",
) -> Report:
    """Asserts that ``actual`` errs at most ``factor`` times as much as plain PyTorch in the same dtype.

    Three errors against ``reference64`` are compared: the largest one, the relative norm, and the worst
    relative norm of 1024 consecutive elements. On top comes one final rounding, which the eager result may
    happen to be spared: ``atol`` on the largest error, by default u * max|reference| with u = eps/2 of the
    dtype, and u on the norms. NaN and infinities must stand where the reference has them.

    Args:
        actual: what the op gave, in a floating dtype.
        reference64: the float64 reference.
        eager_same_dtype: plain PyTorch's result, computed and stored in the dtype of ``actual``.
        factor: how many times eager's error is allowed.
        atol: replaces the default; derive it from the data.
        name: what the message calls ``actual``.
    """
    __tracebackhide__ = True
    if reference64.dtype != torch.float64:
        raise AssertionError(f"{name}: the reference must be float64, got {reference64.dtype}")
    for tensor, label in ((actual, name), (eager_same_dtype, "eager result")):
        if reason := _mismatch(tensor, reference64, actual.dtype):
            raise AssertionError(f"{label}: {reason}")
    ours = compare(actual, reference64, atol=math.inf)
    eager = compare(eager_same_dtype, reference64, atol=math.inf)
    unit = torch.finfo(actual.dtype).eps / 2
    slack = unit * eager.max_expected if atol is None else atol
    failures = []
    if ours.num_nonfinite_mismatch:
        failures.append(f"{ours.num_nonfinite_mismatch} NaN or infinity on one side only")
    for label, got, yardstick, extra in (
        ("max |error|", ours.max_abs, eager.max_abs, slack),
        ("relative norm", ours.norm, eager.norm, unit),
        (f"relative norm of a run of {_SEGMENT}", ours.worst_segment, eager.worst_segment, unit),
    ):
        if not got <= factor * yardstick + extra:
            failures.append(f"{label} {got:.3e} > {factor} * {yardstick:.3e} (eager) + {extra:.3e}")
    if failures:
        raise AssertionError(f"{name}: {'; '.join(failures)}. {ours}")
    return ours
