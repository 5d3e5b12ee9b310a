"""The Hadamard transform of rows and of groups of heads (docs/semantics/hadamard.md §4.1)."""

from htree_ops.ops.hadamard.transform import (
    MAX_LENGTH,
    HadamardTransform,
    grouped_hadamard,
    hadamard_transform,
    hadamard_transform_,
)

__all__ = [
    "MAX_LENGTH",
    "HadamardTransform",
    "grouped_hadamard",
    "hadamard_transform",
    "hadamard_transform_",
]
