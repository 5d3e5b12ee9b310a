"""Where keys, values, nodes and what chooses them lie in the memory that vLLM allocates for the cache of a layer.

vLLM's block is our page: its block table is the table of pages. A page gets larger by what stands beside keys and
values, which vLLM counts as padding, so its budget of memory and its number of blocks are right. A layer's memory is
one buffer of num_pages pages: of all pages the lists of leaders come first, then index keys, keys and values, which is
how the ops want their pools.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from htree_ops.ops.tree_attention.options import TreeOptions
from htree_ops.ops.tree_cache.pools import Sizes
from htree_ops.ops.tree_cache.ring import RING

#: vLLM rounds the width of its block tables up to so many tokens.
TABLE_TOKENS = 128


class PageSizes(NamedTuple):
    """The page of a layer.

    Attributes:
        layers: of the tree. tokens, key_rows, value_rows: rows of a page and head. index_dim: of index keys; 0 is none.
        children: of a list of a leader; 0 where pages keep none.
    """

    layers: int
    tokens: int
    key_rows: int
    value_rows: int
    index_dim: int
    children: int

    def list_numbers(self, heads: int) -> int:
        """Integers of 4 bytes in a page: of each of its last leaders the token, and a list for each layer and head."""
        return RING * (1 + self.layers * heads * self.children) if self.children else 0

    def elements(self, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> int:
        """Numbers of a dtype in a page."""
        rows = self.key_rows * key_dim + self.value_rows * value_dim + self.tokens * self.index_dim
        return heads * rows + 4 * self.list_numbers(heads) // dtype.itemsize


class LayerPools(NamedTuple):
    """Views of a layer's memory.

    Attributes:
        keys: [num_pages, H_kv, key rows, K]. values: [num_pages, H_kv, value rows, V].
        index_keys: [num_pages, H_kv, page_size, d], or None.
        leaders: int32 [num_pages, RING], tokens, and lists: int32 [num_pages, RING, layers, H_kv, k], those of the last
            leaders of a page, leader t in entry t / selection_stride mod RING; or None.
    """

    keys: Tensor
    values: Tensor
    index_keys: Tensor | None = None
    leaders: Tensor | None = None
    lists: Tensor | None = None


def page_sizes(options: TreeOptions, page_size: int, max_pages: int, index_dim: int = 0) -> PageSizes:
    """The page of sequences that have up to ``max_pages`` of them."""
    layers, rows = Sizes(options, page_size, packed=False).of(max_pages)
    children = options.top_k if options.selection_stride > 1 else 0
    return PageSizes(layers, page_size, *rows, index_dim, children)


def table_width(max_tokens: int, page_size: int) -> int:
    """Columns of vLLM's block table for sequences of up to ``max_tokens``."""
    pages = -(-max_tokens // page_size)
    step = max(1, TABLE_TOKENS // page_size)
    return -(-pages // step) * step


def pools_of(cache: Tensor, sizes: PageSizes, key_dim: int, value_dim: int) -> LayerPools:
    """The pools in a layer's memory.

    Args:
        cache: as vLLM binds it, [num_pages, H_kv, page_size, K + V] with the stride of whole pages.
    """
    num_pages, heads = cache.shape[:2]
    wanted, stride = sizes.elements(heads, key_dim, value_dim, cache.dtype), cache.stride(0)
    size = cache.untyped_storage().nbytes() // cache.element_size()
    if cache.storage_offset() != 0 or stride < wanted or num_pages * stride > size:
        raise ValueError(
            f"htree: the cache of a layer must be {num_pages} pages of at least {wanted} numbers in memory of its own, "
            f"got pages of {stride} from number {cache.storage_offset()} on, in memory of {size} numbers"
        )
    of_lists = 4 * num_pages * sizes.list_numbers(heads) // cache.element_size()  # a multiple of 16 bytes
    forms = ((sizes.tokens, sizes.index_dim), (sizes.key_rows, key_dim), (sizes.value_rows, value_dim))
    counts = [of_lists, *(num_pages * heads * rows * width for rows, width in forms)]
    listed, *parts = cache.as_strided((sum(counts),), (1,)).split(counts)
    index, keys, values = (
        part.view(num_pages, heads, *form) for part, form in zip(parts, forms, strict=True)
    )
    pools = LayerPools(keys, values, index if sizes.index_dim else None)
    if not sizes.children:
        return pools
    leaders, lists = listed.view(torch.int32).split(
        (num_pages * RING, of_lists * cache.element_size() // 4 - num_pages * RING)
    )
    return pools._replace(
        leaders=leaders.view(num_pages, RING),
        lists=lists.view(num_pages, RING, sizes.layers, heads, sizes.children),
    )
