"""How an index learns which blocks its queries read (docs/semantics/index_loss.md §9.3)."""

from htree_ops.ops.index_loss.collector import IndexLosses, index_losses
from htree_ops.ops.index_loss.fit import fit_index
from htree_ops.ops.index_loss.function import index_loss

__all__ = ["IndexLosses", "fit_index", "index_loss", "index_losses"]
