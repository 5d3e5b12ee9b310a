"""Which blocks of a sequence a query reads (docs/semantics/selection.md §9)."""

from htree_ops.ops.selection.blocks import select_blocks, select_blocks_varlen

__all__ = ["select_blocks", "select_blocks_varlen"]
