"""Search for the fastest kernel configuration, and a cache of what was found (docs/semantics/python.md §3.4).

Calls of the ops look results up; what searches, and times, is loaded where it is asked for.
"""

from typing import TYPE_CHECKING, Any

from htree_ops.tuning.cache import TuningCache, cache_dir
from htree_ops.tuning.key import CacheKey
from htree_ops.tuning.metrics import KernelMetrics, TuningResult, gated_mlp_flops, gemm_flops
from htree_ops.tuning.select import configured, forget, tuning_mode
from htree_ops.tuning.space import FP8_GEMM, GATED_MLP, RMSNORM_ROPE, SPACES, config_search

if TYPE_CHECKING:
    from htree_ops.tuning.tuner import AutoTuner, TritonAutoTuner, benchmark

__all__ = [
    "FP8_GEMM",
    "GATED_MLP",
    "RMSNORM_ROPE",
    "SPACES",
    "AutoTuner",
    "CacheKey",
    "KernelMetrics",
    "TritonAutoTuner",
    "TuningCache",
    "TuningResult",
    "benchmark",
    "cache_dir",
    "config_search",
    "configured",
    "forget",
    "gated_mlp_flops",
    "gemm_flops",
    "tuning_mode",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from htree_ops.tuning import tuner

    return getattr(tuner, name)
