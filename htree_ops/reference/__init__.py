"""Plain PyTorch references: slow, obvious, float64-capable, independent of every kernel.

The functions of :mod:`htree_ops.reference.tree_attention`, such as ``htree_forward_naive``, are names of this package
too; those of the other families are in the family's module (``reference.rmsnorm_rope.rmsnorm_rope``). All are imported
at first use.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

#: The families, each a module.
_FAMILIES = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def __getattr__(name: str) -> Any:
    if name in _FAMILIES:
        return importlib.import_module(f"{__name__}.{name}")
    if not name.startswith("_"):
        tree_attention = importlib.import_module(f"{__name__}.tree_attention")
        if name in tree_attention.__all__:
            return getattr(tree_attention, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    tree_attention = importlib.import_module(f"{__name__}.tree_attention")
    return sorted({*globals(), *_FAMILIES, *tree_attention.__all__})
