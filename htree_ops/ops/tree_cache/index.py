"""Index keys in the pages of a tree cache, by which nodes are chosen (docs/semantics/tree_cache.md §7.7)."""

from __future__ import annotations

import torch
from torch import Tensor

from htree_ops.ops.arguments import (
    FLOATING,
    FLOATING_AND_DOUBLE,
    check_dtype,
    check_kind,
    check_option_dtype,
)
from htree_ops.ops.tree_attention.options import TreeOptions, check_index_dim

#: The entries of a state; the second is that of scales.
INDEX_KEYS, INDEX_SCALES = "index_keys", "index_scales"
#: Index keys of one byte a channel.
CODES = torch.float8_e4m3fn


def index_sizes(
    function: str,
    options: TreeOptions,
    num_kv_heads: int,
    index_dim: int,
    index_heads: int | None,
    index_dtype: torch.dtype | None,
    dtype: torch.dtype,
) -> tuple[int, torch.dtype]:
    """The heads and the dtype of a cache's index keys, where ``index_dim`` is not 0; checks all three."""
    check_index_dim(function, index_dim, options)
    if index_dim == 0:
        for name, value in (("index_heads", index_heads), ("index_dtype", index_dtype)):
            if value is not None:
                raise ValueError(f"{function}: {name} must be None where index_dim is 0, got {value}")
    heads = num_kv_heads if index_heads is None else index_heads
    check_kind(function, "index_heads", heads, "int")
    if heads not in (1, num_kv_heads):
        raise ValueError(f"{function}: index_heads must be 1 or num_kv_heads = {num_kv_heads}, got {heads}")
    if index_dtype is None:
        index_dtype = dtype if dtype.itemsize == 2 else torch.bfloat16
    check_option_dtype(function, index_dtype, (*FLOATING, CODES), name="index_dtype")
    return heads, index_dtype


class IndexPages:
    """The index keys of all tokens.

    Args:
        num_pages, heads, page_size, dim: pages of the pool, H_i, tokens of a page, d.
        dtype: float32, float16, bfloat16, or float8_e4m3fn for codes with a power of two as the scale of each row.

    Attributes:
        keys: [num_pages, H_i, page_size, d], codes as uint8. scales: uint8 [num_pages, H_i, page_size], exponents of
            two plus 127, of codes; else None.
        row_dtype: of index queries, and of index keys before they are codes.
    """

    def __init__(
        self, num_pages: int, heads: int, page_size: int, dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        coded = dtype == CODES
        held = torch.uint8 if coded else dtype
        self.keys = torch.empty(num_pages, heads, page_size, dim, dtype=held, device=device)
        self.scales = (
            torch.empty(num_pages, heads, page_size, dtype=torch.uint8, device=device) if coded else None
        )
        self.row_dtype = torch.bfloat16 if coded else dtype

    def paged(self) -> dict[str, Tensor]:
        """All of them, by their entry in a state."""
        return {INDEX_KEYS: self.keys} | ({} if self.scales is None else {INDEX_SCALES: self.scales})

    def rows(self, function: str, argument: str, rows: Tensor) -> Tensor:
        """Index queries or index keys in ``row_dtype``, without a gradient, as the op takes them."""
        if type(rows) is not Tensor:
            check_kind(function, argument, rows, "Tensor")
        check_dtype(function, FLOATING_AND_DOUBLE, **{argument: rows})
        return rows.detach().to(self.row_dtype)

    def tokens(self, table: Tensor, length: int) -> Tensor:
        """Copies [n, length, H_i, d] of the first ``length`` tokens of the sequences of block tables [n, max_pages]."""
        count = -(-length // self.keys.shape[2])
        pages = table[:, :count].long()
        found = self.keys[pages]  # [n, pages, H_i, page_size, d]
        if self.scales is not None:
            exponents = self.scales[pages].view(torch.float8_e8m0fnu).float()
            found = (found.view(CODES).float() * exponents[..., None]).bfloat16()
        return found.transpose(2, 3).flatten(1, 2)[:, :length]
