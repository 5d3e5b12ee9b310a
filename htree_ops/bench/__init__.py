"""Timing with a correctness gate, a baseline beside it and a ceiling above it; results as JSON and CSV.

The clocks, which the tuner uses, do not load the suite and its cases.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from htree_ops.bench.io_floor import floor, verdict
    from htree_ops.testing.compare import verify

__all__ = ["floor", "verdict", "verify"]

_HOMES = {
    "floor": "htree_ops.bench.io_floor",
    "verdict": "htree_ops.bench.io_floor",
    "verify": "htree_ops.testing.compare",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
