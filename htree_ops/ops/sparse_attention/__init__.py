"""Attention over the blocks of a caller's lists (docs/semantics/sparse_attention.md §8)."""

from htree_ops.ops.sparse_attention.function import sparse_attention, sparse_attention_varlen

__all__ = ["sparse_attention", "sparse_attention_varlen"]
