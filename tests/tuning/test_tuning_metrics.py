"""The metrics that a search reports, and TensorSpec (docs/semantics/python.md §3.4)."""

from dataclasses import fields

import pytest
import torch

from htree_ops.compat import TensorSpec
from htree_ops.tuning import KernelMetrics, TuningResult, gated_mlp_flops, gemm_flops
from htree_ops.tuning.metrics import compute_metrics


def test_metrics_and_their_fields():
    assert [f.name for f in fields(KernelMetrics)] == [
        "latency_ms",
        "throughput_tflops",
        "bandwidth_gbps",
        "bandwidth_utilization",
    ]
    metrics = compute_metrics(2.0, flops=gemm_flops(1000, 2000, 3000), num_bytes=4e9, peak_gbps=4000.0)
    assert metrics == KernelMetrics(2.0, 6.0, 2000.0, 50.0)
    assert compute_metrics(0.0) == KernelMetrics(0.0, 0.0, 0.0, 0.0)
    assert gated_mlp_flops(2, 3, 5, 7) == 4 * 2 * 3 * 5 * 7
    result = TuningResult({"a": 1}, metrics)
    assert (result.latency, result.throughput, result.bandwidth) == (2.0, 6.0, 2000.0)
    assert result.all_results == result.failures == []
    assert [f.name for f in fields(TuningResult)][:5] == [
        "best_config",
        "metrics",
        "all_results",
        "problem_size",
        "device",
    ]


def test_tensor_spec():
    assert TensorSpec((2,), torch.float32) == TensorSpec((2,), torch.float32, "cuda", True)
    for spec in (
        TensorSpec((3, 4), torch.bfloat16, "cpu"),
        TensorSpec((3, 4), torch.float32, "cpu", contiguous=False),
        TensorSpec((5,), torch.int32, "cpu"),
        TensorSpec((4, 2), torch.float8_e4m3fn, "cpu"),
    ):
        tensor = spec.create_tensor()
        spec.validate(tensor)
        assert tensor.is_contiguous() is spec.contiguous
    spec = TensorSpec((3, 4), torch.float32, "cpu")
    good = spec.create_tensor()
    for wrong, kind in (
        (good.half(), TypeError),
        (good[:2], ValueError),
        (good.t().contiguous().t(), ValueError),
        (good.to("meta"), RuntimeError),
        ([1.0], TypeError),
    ):
        with pytest.raises(kind, match="weight must be|weight must have"):  # noqa: RUF043
            spec.validate(wrong, "weight")


@pytest.mark.parametrize(
    ("arguments", "kind", "complaint"),
    [
        (((-1, 4), torch.float32), ValueError, r"shape must have sizes of at least 0, got \(-1, 4\)"),
        ((3, torch.float32), TypeError, "shape must be a sequence of ints, got 3"),
        (((1.5,), torch.float32), TypeError, r"shape must be a sequence of ints, got \(1\.5,\)"),
        (((2,), "float"), TypeError, "dtype must be a torch.dtype, got 'float'"),
        (((2,), torch.float32, "gpu"), ValueError, "device must be one of torch, got 'gpu'"),
    ],
)
def test_a_spec_that_no_tensor_has_is_refused(arguments, kind, complaint):
    with pytest.raises(kind, match=f"TensorSpec: {complaint}"):
        TensorSpec(*arguments)
