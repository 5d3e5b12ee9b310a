"""The layers of a model that :func:`htree_ops.fit_index` gives an index; those of transformers derive from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from htree_ops.ops.tree_attention.index import resolve_index_dim
from htree_ops.ops.tree_attention.module import HTreeAttention
from htree_ops.ops.tree_attention.options import TreeOptions


@dataclass(frozen=True)
class FittedLayer:
    """An :class:`HTreeAttention`, or with other methods another layer."""

    layer: Any

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Query heads, K/V heads and their width."""
        return self.layer.num_heads, self.layer.num_kv_heads, self.layer.head_dim

    @property
    def options(self) -> TreeOptions:
        """Those beside the index, which takes the place of a span."""
        return replace(self.layer.options, selection_span=None)

    def check(self, index_dim: int) -> None:
        """Raises ValueError unless the layer can have an index of this width beside its options."""
        resolve_index_dim("fit_index", index_dim, self.layer.head_dim, self.options)

    def over_ranks(self, x: Tensor, summed: bool) -> Tensor:
        """The sum of x over the ranks that share the layer's tokens, or what the first of them has."""
        if getattr(self.layer, "cp_group", None) is None:
            return x
        from htree_ops.distributed.collectives import all_gather, group_of, waited

        of_ranks = waited(all_gather(x, group_of("fit_index", self.layer.cp_group).group_name))
        return of_ranks.sum(0) if summed else of_ranks[0]

    def take(self, query_weight: Tensor, key_weight: Tensor) -> None:
        """Gives the layer its index."""
        self.layer._take_index(query_weight, key_weight)


def fitted_layers(model: nn.Module) -> Iterator[FittedLayer]:
    """Every :class:`HTreeAttention` of a model."""
    return (FittedLayer(part) for part in model.modules() if isinstance(part, HTreeAttention))
