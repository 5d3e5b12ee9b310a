"""Models of transformers that choose blocks themselves: ``attn_implementation="htree_blocks"`` (docs/models.md).

    from htree_ops.integrations.block_lists import register_block_lists
    register_block_lists()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="htree_blocks")

MiniMax-M3 hands the key blocks that its indexer has chosen for each query to its attention function as
``block_indices``. Under "eager" and "sdpa" it masks all other tokens of a dense product instead; here they go to
:func:`htree_ops.sparse_attention`. Layers without an indexer are dense.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from htree_ops.integrations.transformers import mask
from htree_ops.ops.sparse_attention import sparse_attention

#: The value of ``attn_implementation``.
NAME = "htree_blocks"


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    block_indices: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The interface of ``AttentionInterface``, for causal attention over whole sequences.

    Args:
        module: the attention layer; with ``block_indices`` its ``indexer.block_size`` is the size of a block.
        query: [B, H, T_q, K], the last T_q of T tokens; key: [B, H_kv, T, K]; value: [B, H_kv, T, V].
        attention_mask: what :func:`htree_ops.integrations.transformers.mask` makes; None, because padding and packed
            documents are refused.
        scaling: factor of the scores; None is K^-1/2.
        dropout: must be 0.
        block_indices: ints [B, H_kv or 1, T_q, n], -1 where there is none, or None for a dense layer.

    Returns:
        (out [B, T_q, H, V], None)

    Raises:
        NotImplementedError: padding, packed documents, or dropout.
    """
    if attention_mask is not None:
        raise NotImplementedError(
            f"{NAME}: padding and packed documents are not supported, got a mask {list(attention_mask.shape)}: give "
            "sequences of one length, or use attn_implementation='sdpa'"
        )
    if dropout:
        raise NotImplementedError(
            f"{NAME}: dropout of attention is not supported, got {dropout}: call model.eval(), or make the model with "
            "attention_dropout = 0.0 in its config"
        )
    T_q, T = query.shape[2], key.shape[2]
    if block_indices is None:
        seen = None
        if T_q not in (1, T):  # is_causal is aligned at the first token
            seen = torch.ones(T_q, T, dtype=torch.bool, device=query.device).tril(T - T_q)
        out = nn.functional.scaled_dot_product_attention(
            query, key, value, seen, is_causal=T_q == T, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None
    q, k, v, blocks = (x.transpose(1, 2) for x in (query, key, value, block_indices))
    indexer: Any = module.indexer
    out = sparse_attention(q, k, v, blocks.to(torch.int32), block_size=indexer.block_size, scale=scaling)
    return out, None


def register_block_lists() -> None:
    """Makes ``attn_implementation="htree_blocks"`` known to transformers."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
