"""The index of a checkpoint in vLLM: weights of its attention layers, filled by its loader (docs/learned_index.md).

A checkpoint has them beside the projections, vLLM's attention layer is one module below:
``self_attn.index_key_weight`` goes to ``self_attn.attn.index_key_weight``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from htree_ops.ops.index_loss.layers import WEIGHTS, index_of, is_drawn

#: The name of vLLM's attention layer in the attention of a model.
LAYER = "attn"


def heads_of_rank(weight: Tensor, heads: int, rank: int, ranks: int) -> Tensor:
    """Those of a weight of all heads [H, K, d] that a rank of tensor parallelism has; several may have the same one."""
    begin = rank * len(weight) // ranks
    return weight[begin : begin + heads]


def add_weights(layer: nn.Module, heads: tuple[int, int], head_dim: int, index_dim: int) -> None:
    """Gives an attention layer of vLLM memory for the weights of an index. They are NaN until they are loaded.

    Args:
        heads: query heads and K/V heads of this rank.
    """
    for name, count in zip(WEIGHTS, heads, strict=True):
        weight: Any = torch.full(
            (count, head_dim, index_dim), torch.nan, device=None
        )  # where and as vLLM makes weights
        weight.weight_loader = _load
        layer.register_buffer(name, weight)


def _load(weight: Tensor, loaded: Tensor) -> None:
    """Fills a weight of this rank, as vLLM's loader asks for it."""
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    place = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    weight.copy_(heads_of_rank(loaded, len(weight), *place))


def check_weights(layer: nn.Module) -> None:
    """Raises ValueError where the checkpoint had no weights of an index, and warns where they were never fitted."""
    query_weight, key_weight = (getattr(layer, name) for name in WEIGHTS)
    if query_weight.isnan().any() or key_weight.isnan().any():
        raise ValueError(
            f"htree: the checkpoint must have an index of config.htree['index_dim'] = {key_weight.shape[2]}, got none: "
            "htree_ops.fit_index(model, batches) makes it; to choose by keys, give --hf-overrides "
            '\'{"htree": {"selection_span": 2}}\''
        )
    if is_drawn(query_weight, key_weight):
        warnings.warn(
            "htree: the model selects by an index that was never fitted: call htree_ops.fit_index and save the model",
            UserWarning,
            stacklevel=2,
        )


def rows_of_index(layer: Any, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Index queries and index keys [N, H_kv, d] of query [N, H, K] and key [N, H_kv, K]."""
    return index_of("htree", query, key, *(getattr(layer, name) for name in WEIGHTS))


def load_indexes(
    attention: type[nn.Module], load: Any, self: Any, weights: Iterable[tuple[str, Tensor]], **kwargs: Any
) -> Any:
    """``AutoWeightsLoader.load_weights``, which knows the weights of an index.

    They go to the layers that choose by it. Dense attention, and a config that says ``index_dim = 0``, leave them out.

    Args:
        attention: vLLM's attention layer. load: the method as it was.
    """
    impls = [part.impl for part in self.module.modules() if isinstance(part, attention)]
    return load(self, _renamed(weights, impls), **kwargs)


def _renamed(weights: Iterable[tuple[str, Tensor]], impls: list[Any]) -> Iterator[tuple[str, Tensor]]:
    """The weights of a checkpoint, those of an index under the names of the layers that have them."""
    ours = [impl for impl in impls if hasattr(impl, "index_dim")]
    for name, weight in weights:
        path, _, last = name.rpartition(".")
        if (
            last not in WEIGHTS or path.rpartition(".")[2] == LAYER
        ):  # the loader of a part of the model gets new names
            yield name, weight
        elif any(impl.index_dim for impl in ours):
            yield f"{path}.{LAYER}.{last}", weight
        elif not all(impl.says_a_width for impl in ours):
            raise ValueError(
                f"htree: config.htree must have 'index_dim', {weight.shape[2]} to choose by the index that the "
                "checkpoint has or 0 to leave it out"
            )
