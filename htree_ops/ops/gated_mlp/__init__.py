"""The gated MLP and its module (docs/semantics/gated_mlp.md §3.2)."""

from htree_ops.ops.gated_mlp.function import ACTIVATIONS, COMPILED_CONFIGS, SIDES, gated_mlp
from htree_ops.ops.gated_mlp.module import FusedGatedMLP

__all__ = [
    "ACTIVATIONS",
    "COMPILED_CONFIGS",
    "SIDES",
    "FusedGatedMLP",
    "gated_mlp",
]
