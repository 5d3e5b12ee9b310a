"""Assertions about a result and what it should be.

Two rules. :func:`assert_close_spec` takes the tolerance that docs/semantics gives for the op.
:func:`assert_no_worse_than_eager` needs no figure: it measures the error that plain PyTorch makes in the same
dtype against float64 and allows a small multiple of it. One loose ``atol`` over a large tensor hides a wrong
tail, so the second rule holds for the largest error, for the norm, and for the norm of each 1024 elements. It
cannot see one wrong element far smaller than its neighbours' errors; where docs/semantics gives a relative
tolerance, use that.
"""

import math

import torch

from htree_ops.tuning.verification import SEGMENT, Report, compare, mismatch


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
    if reason := mismatch(actual, expected, dtype):
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
        if reason := mismatch(tensor, reference64, actual.dtype):
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
        (f"relative norm of a run of {SEGMENT}", ours.worst_segment, eager.worst_segment, unit),
    ):
        if not got <= factor * yardstick + extra:
            failures.append(f"{label} {got:.3e} > {factor} * {yardstick:.3e} (eager) + {extra:.3e}")
    if failures:
        raise AssertionError(f"{name}: {'; '.join(failures)}. {ours}")
    return ours
