"""Index keys in the pages of a tree cache, by which nodes are chosen (docs/semantics/tree_cache.md §7.7)."""

from __future__ import annotations

import torch
from torch import Tensor

from htree_ops.ops.arguments import (
    FLOATING,
    FLOATING_AND_DOUBLE,
    check_dtype,
    check_int,
    check_kind,
    check_option_dtype,
)
from htree_ops.ops.tree_attention.options import TreeOptions, check_index_dim

__all__ = ["IndexPages", "index_sizes"]

#: The entry of a state.
INDEX_KEYS = "index_keys"


def index_sizes(
    function: str,
    options: TreeOptions,
    num_kv_heads: int,
    index_dim: int,
    index_heads: int | None,
    index_dtype: torch.dtype | None,
    dtype: torch.dtype,
) -> tuple[int, torch.dtype]:
    """The heads and the dtype of a cache's index keys, where ``index_dim`` is not 0.

    Raises:
        TypeError, ValueError, UnsupportedDtypeError: they are out of range, or beside options that choose in another
            way.
    """
    check_index_dim(function, index_dim, options)
    if index_dim == 0:
        for name, value in (("index_heads", index_heads), ("index_dtype", index_dtype)):
            if value is not None:
                raise ValueError(f"{function}: {name} must be None where index_dim is 0, got {value}")
    heads = num_kv_heads if index_heads is None else index_heads
    check_int(function, "index_heads", heads, 1)
    if heads not in (1, num_kv_heads):
        raise ValueError(f"{function}: index_heads must be 1 or num_kv_heads = {num_kv_heads}, got {heads}")
    if index_dtype is None:
        index_dtype = dtype if dtype.itemsize == 2 else torch.bfloat16
    check_option_dtype(function, index_dtype, FLOATING, name="index_dtype")
    return heads, index_dtype


class IndexPages:
    """The index keys of all tokens.

    Args:
        num_pages, heads, page_size, dim: pages of the pool, H_i, tokens of a page, d.

    Attributes:
        keys: [num_pages, H_i, page_size, d].
    """

    def __init__(
        self, num_pages: int, heads: int, page_size: int, dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.keys = torch.empty(num_pages, heads, page_size, dim, dtype=dtype, device=device)

    def rows(self, function: str, argument: str, rows: Tensor) -> Tensor:
        """Index queries or index keys in the dtype of the pages, without a gradient, as the op takes them."""
        if type(rows) is not Tensor:
            check_kind(function, argument, rows, "Tensor")
        check_dtype(function, FLOATING_AND_DOUBLE, **{argument: rows})
        return rows.detach().to(self.keys.dtype)

    def copy_pages(self, pages: Tensor) -> None:
        """``tree_cache_copy_`` of them."""
        torch.ops.htree.tree_cache_copy_(self.keys, self.keys.new_empty(*self.keys.shape[:2], 0, 1), pages)

    def tokens(self, table: Tensor, length: int) -> Tensor:
        """Copies [n, length, H_i, d] of the first ``length`` tokens of the sequences of block tables [n, max_pages]."""
        count = -(-length // self.keys.shape[2])
        found = self.keys[table[:, :count].long()]  # [n, pages, H_i, page_size, d]
        return found.transpose(2, 3).flatten(1, 2)[:, :length]
