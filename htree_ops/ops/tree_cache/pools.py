"""The rows of a tree cache: keys, values and finished nodes in pages, and the tokens in fewer bits beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from htree_ops.ops.paging import on_device
from htree_ops.ops.tree_attention.options import TreeOptions
from htree_ops.ops.tree_cache.functions import cache_layers, page_rows
from htree_ops.ops.tree_cache.index import IndexPages
from htree_ops.ops.tree_cache.leaves import PackedLeaves


class Sizes:
    """How many rows a page has (docs/semantics/tree_cache.md §7.1).

    Args:
        options: of the cache. page_size: P. packed: whether tokens have pools of their own.
    """

    def __init__(self, options: TreeOptions, page_size: int, *, packed: bool) -> None:
        self.options, self.page_size, self.packed = options, page_size, packed

    def of(self, max_pages: int) -> tuple[int, tuple[int, int]]:
        """Layers of a cache of ``max_pages`` pages a sequence, and the rows of a page: (of keys, of values)."""
        rate, span = self.options.compression_rate, self.options.selection_span
        layers = cache_layers(max_pages * self.page_size, rate, self.options.top_nodes)
        return layers, page_rows(self.page_size, layers, rate, span, packed_tokens=self.packed)

    def first_row(self, layer: int) -> int:
        """Where a layer begins in the rows of a page; those of packed tokens are elsewhere."""
        return (
            page_rows(self.page_size, layer, self.options.compression_rate, packed_tokens=self.packed)[1]
            if layer
            else 0
        )


class Pools:
    """The pages of all sequences.

    Args:
        sizes: of a page. batch, num_pages, max_pages, heads: B, pages of the pool and of a sequence, H_kv.
        widths: K and V. leaf_bits: of tokens; None keeps them in ``dtype``. index: pages of index keys, or None.

    Attributes:
        keys, values: [num_pages, H_kv, rows, K or V]. leaves: tokens in fewer bits, or None. index: as given.
        written, index_pool: the tensors of ``leaves`` and of ``index`` as ``_tree_cache_step_`` takes them.
        layers: L.
    """

    def __init__(
        self,
        sizes: Sizes,
        batch: int,
        num_pages: int,
        max_pages: int,
        heads: int,
        widths: tuple[int, int],
        leaf_bits: int | None,
        dtype: torch.dtype,
        device: torch.device,
        index: IndexPages | None = None,
    ) -> None:
        self.sizes, self.heads, self.widths, self.index = sizes, heads, widths, index
        self.layers, rows = sizes.of(max_pages)
        self.keys, self.values = (
            torch.empty(num_pages, heads, count, width, dtype=dtype, device=device)
            for count, width in zip(rows, widths, strict=True)
        )
        of_pages = (num_pages, heads, sizes.page_size)
        self.leaves = (
            None if leaf_bits is None else PackedLeaves(leaf_bits, batch, of_pages, widths, dtype, device)
        )
        self.written = [] if self.leaves is None else list(self.leaves.tensors().values())
        self.index_pool = [] if index is None else list(index.paged().values())

    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [self.keys, self.values, *self.written, *self.index_pool]

    def paged(self) -> dict[str, Tensor]:
        """Everything in pages, by its entry in a state."""
        found = {"keys": self.keys, "values": self.values}
        for part in (self.index, self.leaves):
            found |= {} if part is None else part.paged()
        return found

    def page_bytes(self) -> int:
        """Bytes of a page."""
        return sum(x[0].nbytes for x in self.paged().values())

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies pages, (from, to) each."""
        if not pairs:
            return
        pages = on_device(list(zip(*pairs, strict=True)), self.keys.device)
        rows = [x if x.dim() == 4 else x[..., None] for x in self.paged().values()]
        rows += [self.keys[:, :, :0]] * (len(rows) % 2)  # the op takes two
        for x, y in zip(rows[::2], rows[1::2], strict=True):
            torch.ops.htree.tree_cache_copy_(x, y, pages)

    # ---- layers

    def rows_of(self, row: Tensor, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """(pages of the pool, their rows), int64: where a layer's finished nodes lie (§7.1).

        Args:
            row: of the block table, of a sequence of ``length`` tokens.
        """
        size = self.sizes.page_size
        tokens = self.sizes.options.compression_rate**layer
        node = torch.arange(length // tokens, device=row.device)
        page = ((node + 1) * tokens - 1) // size
        return row.long()[page], node - page * size // tokens + self.sizes.first_row(layer)

    def layer(self, row: Tensor, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """Copies of keys [N, H_kv, K] and values [N, H_kv, V] of a layer's finished nodes; layer 0 is the tokens."""
        pages, rows = self.rows_of(row, layer, length)
        if self.leaves is not None and layer == 0:
            return self.leaves.tokens(pages, rows, self.keys.dtype)
        return self.keys[pages, :, rows], self.values[pages, :, rows]

    def build_layer(self, sequence: int, row: Tensor, layer: int, length: int) -> None:
        """Writes a layer's finished nodes, those of the layer below being there."""
        rate = self.sizes.options.compression_rate
        if length < rate**layer:
            return
        if layer == 1 and self.leaves is not None:
            below = self.leaves.tail(sequence, length)
        else:
            below = self.layer(row, layer - 1, length)
        pages, rows = self.rows_of(row, layer, length)
        nodes = torch.ops.htree.tree_build(*(x[None, : len(rows) * rate] for x in below), rate)
        for pool, x in zip((self.keys, self.values), nodes, strict=True):
            pool[pages, :, rows] = x[0]

    # ---- states

    def state_of(
        self, pages: Sequence[int], tokens: Sequence[tuple[int, int]], lengths: Tensor
    ) -> dict[str, Tensor]:
        """What a state has of these pages, as copies, and its tails; rows that hold nothing are 0.

        Args:
            tokens: for each page its first token, and how many a sequence has that uses it. lengths: of the sequences.
        """
        device = self.keys.device
        numbers = torch.tensor(pages, dtype=torch.int64, device=device)
        begin, stop = torch.tensor(tokens, dtype=torch.int64, device=device).view(len(pages), 2, 1).unbind(1)
        of_tokens, of_values, of_keys = self._written(begin, stop)
        state, written = {"pages": numbers.int()}, {"keys": of_keys, "values": of_values}
        for name, x in self.paged().items():
            empty = ~written.get(name, of_tokens)[:, None]  # [n, 1, rows]
            state[name] = x[numbers].masked_fill_(empty if x.dim() == 3 else empty[..., None], 0)
        return state if self.leaves is None else state | self.leaves.tails(lengths)

    def _written(self, begin: Tensor, stop: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Whether each row of pages holds something, [n, rows] each: of tokens, of values and of keys (§7.1).

        Args:
            begin, stop: [n, 1], the first token of each page, and the tokens of a sequence that uses it.
        """
        size, options = self.sizes.page_size, self.sizes.options
        rate, span = options.compression_rate, options.selection_span
        stop = stop.minimum(begin + size)

        def rows(tokens: int) -> Tensor:
            """Of the units of so many tokens."""
            row = torch.arange(-(-size // tokens), device=begin.device)
            return begin // tokens + row < stop // tokens

        layers = [rows(rate**layer) for layer in range(self.layers)]
        values = torch.cat([layers[0][:, :0], *layers[self.sizes.packed :]], dim=1)
        return layers[0], values, torch.cat([values, rows(span)], dim=1) if span else values

    def load(self, state: Mapping[str, Tensor], pages: Tensor) -> None:
        """Takes what a state has in pages, and its tails; of the layers those that both have."""
        device = self.keys.device
        keys, values = state["keys"].to(device), state["values"].to(device)
        theirs, ours = values.shape[2], self.values.shape[2]
        both = min(theirs, ours)
        self.keys[pages, :, :both] = keys[:, :, :both]
        self.values[pages, :, :both] = values[:, :, :both]
        self.keys[pages, :, ours:] = keys[:, :, theirs:]  # span means
        for name, x in self.paged().items():
            if name not in ("keys", "values"):
                x[pages] = state[name].to(device)
        if self.leaves is not None:
            for name, x in self.leaves.of_sequences().items():
                x.copy_(state[name])
