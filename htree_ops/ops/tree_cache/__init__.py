"""The cache of a model that is served with tree attention (docs/semantics/tree_cache.md §7)."""

from htree_ops.ops.tree_cache.cache import TreeCacheBytes, TreeKVCache
from htree_ops.ops.tree_cache.functions import (
    cache_layers,
    page_rows,
    tree_cache_append_,
    tree_cache_append_packed_,
    tree_cache_attention,
)

__all__ = [
    "TreeCacheBytes",
    "TreeKVCache",
    "cache_layers",
    "page_rows",
    "tree_cache_append_",
    "tree_cache_append_packed_",
    "tree_cache_attention",
]
