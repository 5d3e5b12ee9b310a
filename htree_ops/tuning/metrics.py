"""What a measurement of a kernel says (docs/semantics/python.md §3.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from htree_ops.tuning.space import Config

#: Memory bandwidth from data sheets in GB/s (10^9), by a part of torch's device name. The first match counts.
PEAKS_GB_PER_S: dict[str, float] = {
    "H200": 4800.0,
    "H100 PCIe": 2039.0,
    "H100 NVL": 3938.0,
    "H100": 3352.0,
    "H20": 4000.0,
    "GH200": 4000.0,
    "B200": 8000.0,
    "A100-SXM4-80GB": 2039.0,
    "A100 80GB": 1935.0,
    "A100": 1555.0,
    "L40S": 864.0,
    "L40": 864.0,
    "L4": 300.0,
    "A10": 600.0,
    "RTX 4090": 1008.0,
    "RTX 3090": 936.0,
}


@dataclass(frozen=True)
class KernelMetrics:
    """Speed of one kernel on one problem.

    Attributes:
        latency_ms: time of a call in milliseconds.
        throughput_tflops: 10^12 operations per second.
        bandwidth_gbps: 10^9 bytes per second, each operand and result counted once.
        bandwidth_utilization: percent of the device's peak bandwidth; 0 where that is not known.
    """

    latency_ms: float
    throughput_tflops: float
    bandwidth_gbps: float
    bandwidth_utilization: float


@dataclass(frozen=True)
class TuningResult:
    """What a search found.

    Attributes:
        best_config: the fastest configuration; of equal ones the first.
        metrics: its speed.
        all_results: each configuration that ran, with its speed, in the order of the search.
        problem_size: the sizes that were tuned for.
        device: where it ran.
        failures: each configuration that raised, with its error.
    """

    best_config: Config
    metrics: KernelMetrics
    all_results: list[tuple[Config, KernelMetrics]] = field(default_factory=list)
    problem_size: Sequence[int] | None = None
    device: str | None = None
    failures: list[tuple[Config, Exception]] = field(default_factory=list)

    @property
    def latency(self) -> float:
        """Milliseconds of the best configuration."""
        return self.metrics.latency_ms

    @property
    def throughput(self) -> float:
        """TFLOP/s of the best configuration."""
        return self.metrics.throughput_tflops

    @property
    def bandwidth(self) -> float:
        """GB/s of the best configuration."""
        return self.metrics.bandwidth_gbps


def gemm_flops(m: int, n: int, k: int) -> int:
    """Operations of a product [M, K] x [K, N]."""
    return 2 * m * n * k


def gated_mlp_flops(batch: int, seq_len: int, hidden: int, intermediate: int) -> int:
    """Operations of the two products of a gated MLP."""
    return 4 * batch * seq_len * hidden * intermediate


def compute_metrics(
    latency_ms: float, flops: float = 0.0, num_bytes: float = 0.0, peak_gbps: float = 0.0
) -> KernelMetrics:
    """Rates of a call of ``latency_ms``: flops/(ms·1e9) TFLOP/s and bytes/(ms·1e6) GB/s."""
    gbps = num_bytes / (latency_ms * 1e6) if latency_ms else 0.0
    return KernelMetrics(
        latency_ms=latency_ms,
        throughput_tflops=flops / (latency_ms * 1e9) if latency_ms else 0.0,
        bandwidth_gbps=gbps,
        bandwidth_utilization=100.0 * gbps / peak_gbps if peak_gbps else 0.0,
    )


def peak_of(device_name: str) -> float | None:
    """Data-sheet bandwidth in GB/s of a GPU by its name, None for an unknown one."""
    return next((peak for name, peak in PEAKS_GB_PER_S.items() if name in device_name), None)
