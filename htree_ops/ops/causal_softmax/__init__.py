"""Causal softmax over score matrices (docs/semantics/causal_softmax.md §5)."""

from htree_ops.ops.causal_softmax.function import causal_softmax

__all__ = ["causal_softmax"]
