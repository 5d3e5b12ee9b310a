"""Tree attention over packed documents, one document after another (docs/semantics/tree_attention.md §1.16)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from htree_ops.reference.sparse_attention import documents

from .attention import htree_forward_naive


def attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """(out [N,H,V], lse [N,H]) of query [N,H,K], key [N_k,H_kv,K], value [N_k,H_kv,V].

    Document i has the rows cu_seq[i] ... cu_seq[i + 1] - 1. Rows behind the last document are 0, with lse -inf.
    options: keywords of `htree_forward_naive`.
    """
    outs, lses = [], []
    for queries, keys in documents(cu_seq_q, cu_seq_k):
        found = htree_forward_naive(query[None, queries], key[None, keys], value[None, keys], **options)
        outs.append(found.out[0])
        lses.append(found.lse[0])
    rest = query.shape[0] - int(cu_seq_q[-1])
    wide = options.get("compute_dtype") or torch.promote_types(query.dtype, torch.float32)
    outs.append(query.new_zeros(rest, query.shape[1], value.shape[2], dtype=wide))
    lses.append(query.new_full((rest, query.shape[1]), -torch.inf, dtype=wide))
    return torch.cat(outs), torch.cat(lses)
