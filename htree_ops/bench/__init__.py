"""Timing with a correctness gate, a baseline beside it and a ceiling above it; results as JSON and CSV."""

from htree_ops.bench.io_floor import floor, verdict
from htree_ops.testing.compare import verify

__all__ = ["floor", "verdict", "verify"]
