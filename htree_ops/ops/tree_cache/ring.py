"""The lists of the last leaders, which later rows of their strides use (docs/semantics/tree_cache.md §7.3, §7.4)."""

from __future__ import annotations

import torch
from torch import Tensor

from htree_ops.ops.tree_attention.options import TreeOptions

#: How many leaders' lists are kept, so that up to 3 strides of speculative tokens can be taken back.
RING = 4


def has_open_top(options: TreeOptions) -> bool:
    """Whether a row's top may have more nodes than a list has children, so that no list tells of it (§7.3)."""
    return options.top_nodes > options.top_k * options.compression_rate


def empty_ring(
    batch: int, layers: int, heads: int, options: TreeOptions, device: torch.device
) -> tuple[Tensor, Tensor]:
    """lists [B, ring, layers, H_kv, k] and list_pos [B, ring] without a leader; of no entries for stride 1."""
    size = RING if options.selection_stride > 1 else 0
    lists = torch.full((batch, size, layers, heads, options.top_k), -1, dtype=torch.int32, device=device)
    return lists, torch.full((batch, size), -1, dtype=torch.int32, device=device)


class Ring:
    """Entry ⌊leader / s⌋ mod RING has the lists of that leader of a sequence.

    Attributes:
        lists: int32 [B, ring, layers, H_kv, k]. list_pos: int32 [B, ring], the leaders, -1 for none.
    """

    def __init__(
        self, batch: int, layers: int, heads: int, options: TreeOptions, device: torch.device
    ) -> None:
        self.options = options
        self.lists, self.list_pos = empty_ring(batch, layers, heads, options, device)
        # What a list of a row's top, or of a layer above, may hold: all of its parents, or nothing.
        nodes = torch.arange(options.top_k, dtype=torch.int32, device=device)
        self._nodes = torch.full_like(nodes, -1) if has_open_top(options) else nodes
        entries = torch.arange(self.list_pos.shape[1], dtype=torch.int32, device=device)
        # [b, i]: tokens from the first of the last leaders, which has entry b, to the leader of entry i
        self._offsets = (entries - entries[:, None]) % RING * options.selection_stride

    def keep(self, sequences: list[int], length: int, lists: Tensor) -> None:
        """Puts the last leaders of lists [layers, n, leaders, H_kv, k] in: all layers of n sequences of a length."""
        stride = self.options.selection_stride
        batch, size, layers = self.lists.shape[:3]
        behind = -(-length // stride)  # leaders up to this one, of which leader i has entry i % size
        begin = behind % size  # the entry of the first of the last leaders
        if len(sequences) == batch:
            parts = [(slice(None), slice(None))]
        else:
            parts = [(slice(b, b + 1), slice(i, i + 1)) for i, b in enumerate(sequences)]
        own, count = lists[:, :, -size:].permute(1, 2, 0, 3, 4), len(lists)
        for to, of in parts:
            self.lists[to, begin:, :count] = own[of, : size - begin]
            if begin:
                self.lists[to, :begin, :count] = own[of, size - begin :]
            kept = self.list_pos[to]
            torch.add(self._offsets[begin].expand(kept.shape), (behind - size) * stride, out=kept)
            for layer in range(count, layers):
                self.lists[to, :, layer] = self.opened(layer, to)

    def opened(self, layer: int, sequences: slice = slice(None)) -> Tensor:
        """The lists [n, ring, 1, k] of the leaders of ``sequences`` in a layer where everything is opened (§7.3)."""
        own = self.list_pos[sequences].long() // self.options.compression_rate ** (layer + 1)  # -1 stays
        return self._nodes.where(self._nodes <= own[..., None, None], -1)

    def check_leaders(self, name: str, leaders: list[list[int]], lengths: list[int]) -> None:
        """Raises ValueError for a state with lists of what is no leader of its sequence (§7.3), in another's place."""
        stride = self.options.selection_stride
        for own, length in zip(leaders, lengths, strict=True):
            for place, leader in enumerate(own):
                fits = 0 <= leader < length and leader % stride == 0 and leader // stride % len(own) == place
                if leader != -1 and not fits:
                    raise ValueError(
                        f"{name}: list_pos must have -1 or a multiple t of selection_stride = {stride} below the "
                        f"length {length} in entry t / {stride} mod {len(own)}, got {own}"
                    )
