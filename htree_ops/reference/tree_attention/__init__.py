"""Reference of tree attention, written from docs/semantics/tree_attention.md §1 and independent of every kernel.

Functions with the name of an op take its arguments and return new tensors (mutating ops lose their
underscore). They compute in float64 for float64 inputs and in float32 otherwise; `htree_forward_naive`
takes `compute_dtype` and every option, the ones the library does not offer included.
"""

from .attention import Forward, LayerTrace, htree_forward_naive
from .gradient import htree_backward_naive
from .index import index_parents
from .io_only import (
    io_attention_forward,
    io_compute_next_parents,
    io_compute_scores,
    io_select_topk,
    lcg,
)
from .oracle import cut_coverage, dense_causal_attention, softmax_over_cut
from .rotary import rope, rope_cache, rotate
from .selection import (
    compute_next_parents,
    importance_of,
    importance_of_spans,
    mask_topk_scores,
    order_by_key,
    select_important,
    select_topk,
)
from .stages import (
    accumulate_non_topk,
    bottom_accumulate,
    compute_and_select,
    compute_scores,
    recompute_selection,
    score_span_means,
    select_accumulate,
    span_importance,
)
from .state import empty_state, final_normalize, merge_to_global, subtract_topk
from .tree import (
    Candidates,
    OwnTops,
    build_layers,
    candidates,
    child_counts,
    layer_sizes,
    mean_of_children,
    num_parents,
    rows_of_queries,
    span_means,
    top_parents,
    tree_build,
    tree_build_backward,
)
from .varlen import attention_varlen

__all__ = [
    "Candidates",
    "Forward",
    "LayerTrace",
    "OwnTops",
    "accumulate_non_topk",
    "attention_varlen",
    "bottom_accumulate",
    "build_layers",
    "candidates",
    "child_counts",
    "compute_and_select",
    "compute_next_parents",
    "compute_scores",
    "cut_coverage",
    "dense_causal_attention",
    "empty_state",
    "final_normalize",
    "htree_backward_naive",
    "htree_forward_naive",
    "importance_of",
    "importance_of_spans",
    "index_parents",
    "io_attention_forward",
    "io_compute_next_parents",
    "io_compute_scores",
    "io_select_topk",
    "layer_sizes",
    "lcg",
    "mask_topk_scores",
    "mean_of_children",
    "merge_to_global",
    "num_parents",
    "order_by_key",
    "recompute_selection",
    "rope",
    "rope_cache",
    "rotate",
    "rows_of_queries",
    "score_span_means",
    "select_accumulate",
    "select_important",
    "select_topk",
    "softmax_over_cut",
    "span_importance",
    "span_means",
    "subtract_topk",
    "top_parents",
    "tree_build",
    "tree_build_backward",
]
