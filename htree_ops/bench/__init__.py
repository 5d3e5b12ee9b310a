"""Tree attention beside its IO-only variant, and what the design documents ask of benchmarks: ``verdict``, ``verify``.

The benchmarks themselves are no part of the package: they stand in the folder ``benchmarks`` of the repository.
"""

from htree_ops.bench.io_model import overhead_percent, verdict
from htree_ops.tuning.verification import verify

__all__ = ["overhead_percent", "verdict", "verify"]
