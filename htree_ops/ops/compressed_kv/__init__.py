"""Compressed rows of a K/V cache, attention on them, and the cache of a model (docs/semantics/compressed_kv.md)."""

from htree_ops.ops.compressed_kv.attention import MustafarAttention, key_weight_from_queries
from htree_ops.ops.compressed_kv.cache import CacheBytes, CompressedKVCache
from htree_ops.ops.compressed_kv.format import CompressedKV, num_kept, row_bytes
from htree_ops.ops.compressed_kv.functions import kv_compress, kv_decode_attention, kv_decompress, kv_prune

__all__ = [
    "CacheBytes",
    "CompressedKV",
    "CompressedKVCache",
    "MustafarAttention",
    "key_weight_from_queries",
    "kv_compress",
    "kv_decode_attention",
    "kv_decompress",
    "kv_prune",
    "num_kept",
    "row_bytes",
]
