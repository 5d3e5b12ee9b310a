"""Tree attention, its module and its stages (docs/semantics/tree_attention.md §1)."""

from htree_ops.ops.tree_attention.attention import attention_backward, attention_forward, tree_attention
from htree_ops.ops.tree_attention.module import HTreeAttention
from htree_ops.ops.tree_attention.options import TreeOptions
from htree_ops.ops.tree_attention.stages import (
    accumulate_non_topk,
    bottom_accumulate,
    compute_and_select,
    compute_next_parents,
    compute_scores,
    final_normalize,
    mask_topk_scores_,
    merge_to_global_,
    recompute_selection,
    rope,
    rope_cache,
    select_accumulate,
    select_topk,
    span_means,
    subtract_topk,
    top_parents,
    tree_build,
    tree_build_backward,
)
from htree_ops.ops.tree_attention.varlen import tree_attention_varlen

__all__ = [
    "HTreeAttention",
    "TreeOptions",
    "accumulate_non_topk",
    "attention_backward",
    "attention_forward",
    "bottom_accumulate",
    "compute_and_select",
    "compute_next_parents",
    "compute_scores",
    "final_normalize",
    "mask_topk_scores_",
    "merge_to_global_",
    "recompute_selection",
    "rope",
    "rope_cache",
    "select_accumulate",
    "select_topk",
    "span_means",
    "subtract_topk",
    "top_parents",
    "tree_attention",
    "tree_attention_varlen",
    "tree_build",
    "tree_build_backward",
]
