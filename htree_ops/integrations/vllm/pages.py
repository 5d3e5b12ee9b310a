"""Where keys, values, nodes and span means lie in the memory that vLLM allocates for the cache of a layer.

vLLM's block is our page: its block table is the table of pages. A page gets larger by its nodes and span means, which
vLLM counts as padding, so its budget of memory and its number of blocks are right. A layer's memory is one buffer of
num_pages pages; keys of all pages come first, values behind them, which is how the ops want their pools.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from htree_ops.ops.tree_attention.options import TreeOptions
from htree_ops.ops.tree_cache.pools import Sizes

__all__ = ["PageSizes", "page_sizes", "pools_of", "table_width"]

#: vLLM rounds the width of its block tables up to so many tokens.
TABLE_TOKENS = 128


class PageSizes(NamedTuple):
    """The page of a layer.

    Attributes:
        layers: of the tree. key_rows, value_rows: rows of a page and head.
    """

    layers: int
    key_rows: int
    value_rows: int

    def elements(self, heads: int, key_dim: int, value_dim: int) -> int:
        """Numbers in a page."""
        return heads * (self.key_rows * key_dim + self.value_rows * value_dim)


def page_sizes(options: TreeOptions, page_size: int, max_pages: int) -> PageSizes:
    """The page of sequences that have up to ``max_pages`` of them."""
    layers, (key_rows, value_rows) = Sizes(options, page_size, packed=False).of(max_pages)
    return PageSizes(layers, key_rows, value_rows)


def table_width(max_tokens: int, page_size: int) -> int:
    """Columns of vLLM's block table for sequences of up to ``max_tokens``."""
    pages = -(-max_tokens // page_size)
    step = max(1, TABLE_TOKENS // page_size)
    return -(-pages // step) * step


def pools_of(cache: Tensor, sizes: PageSizes, key_dim: int, value_dim: int) -> tuple[Tensor, Tensor]:
    """(keys [num_pages, H_kv, key rows, K], values [num_pages, H_kv, value rows, V]): views of a layer's memory.

    Args:
        cache: as vLLM binds it, [num_pages, H_kv, page_size, K + V] with the stride of whole pages.

    Raises:
        ValueError: memory of another form.
    """
    num_pages, heads = cache.shape[:2]
    wanted, stride = sizes.elements(heads, key_dim, value_dim), cache.stride(0)
    room = cache.untyped_storage().nbytes() // cache.element_size()
    if cache.storage_offset() != 0 or stride < wanted or num_pages * stride > room:
        raise ValueError(
            f"htree: the cache of a layer must be {num_pages} pages of at least {wanted} numbers in memory of its own, "
            f"got pages of {stride} from number {cache.storage_offset()} on, in memory of {room} numbers"
        )
    of_keys = num_pages * heads * sizes.key_rows * key_dim
    of_values = num_pages * heads * sizes.value_rows * value_dim
    memory = cache.as_strided((of_keys + of_values,), (1,))
    keys, values = memory.split((of_keys, of_values))
    return (
        keys.view(num_pages, heads, sizes.key_rows, key_dim),
        values.view(num_pages, heads, sizes.value_rows, value_dim),
    )
