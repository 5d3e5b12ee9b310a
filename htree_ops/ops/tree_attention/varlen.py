"""Tree attention over packed documents (docs/semantics/tree_attention.md §1.16)."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from htree_ops.ops.arguments import validate_arguments
from htree_ops.ops.tree_attention.attention import Index, expand_heads, options_of_call
from htree_ops.ops.tree_attention.options import TreeKeywords, TreeOptions


@overload
def tree_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    index: Index | None = ...,
    return_lse: Literal[False] = ...,
    options: TreeOptions | None = ...,
    **keywords: Unpack[TreeKeywords],
) -> Tensor: ...
@overload
def tree_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    index: Index | None = ...,
    return_lse: Literal[True],
    options: TreeOptions | None = ...,
    **keywords: Unpack[TreeKeywords],
) -> tuple[Tensor, Tensor]: ...
@overload
def tree_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    index: Index | None = ...,
    return_lse: bool,
    options: TreeOptions | None = ...,
    **keywords: Unpack[TreeKeywords],
) -> Tensor | tuple[Tensor, Tensor]: ...
@validate_arguments
def tree_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    index: Index | None = None,
    return_lse: bool = False,
    options: TreeOptions | None = None,
    **keywords: Unpack[TreeKeywords],
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`htree_ops.tree_attention` of documents that lie packed one behind the other, each with a tree of its own.

    Document i has the keys cu_seq_k[i] ... cu_seq_k[i + 1] - 1, and its queries cu_seq_q[i] ... cu_seq_q[i + 1] - 1 are
    its last tokens::

        out[its queries] = tree_attention(query[None, its queries], key[None, its keys], value[None, its keys])[0]

    and so are its gradients. Nothing of one document reaches another. The argument names are those of
    ``torch.nn.attention.varlen.varlen_attn``.
    Source: docs/semantics/tree_attention.md §1.16.

    On CUDA documents run in batches, padded at their ends, which changes no row. Where padding by bounds on the lengths
    costs little (at most 1.5 times the rows, as in a batch of sequences of about ``max_k`` tokens) and in a CUDA graph,
    nothing is read on the host. Otherwise a call reads ``cu_seq_q`` and ``cu_seq_k`` and **waits for the device**, once
    in the forward and once in the backward, to put documents of similar lengths together. ``importance="lse"`` always
    reads them, so that it cannot be in a graph.

    Args:
        query: [N, H, K], not rotated, K even.
        key: [N_k, H_kv, K], H a multiple of H_kv; value: [N_k, H_kv, V]. Dtypes as in :func:`htree_ops.tree_attention`.
        cu_seq_q, cu_seq_k: int32 [documents + 1] on the device of query, ascending from 0. Equal entries are an empty
            document. The same tensor where every document's queries are all of its tokens.
        max_q, max_k: no document has more queries or keys. Only the rows that are there cost time, but a bound that is
            far too large keeps CUDA from running without a look at the lengths.
        index: (index_query [N, H_i, d], index_key [N_k, H_i, d]), as in :func:`htree_ops.tree_attention`.
        return_lse: also return the log-sum-exp of each row's scores.
        options, keywords: as in :func:`htree_ops.tree_attention`. The number of keys less that of queries must be a
            multiple of selection_stride in every document that has queries. Lists are never kept for the backward,
            whatever store_parents says.

    Returns:
        out [N, H, V] in the dtype of query, differentiable in query, key and value. With ``return_lse`` also lse
        [N, H], natural logarithm, float32 (float64 for float64), differentiable in query and key. Rows at or behind
        cu_seq_q[-1] are 0, with lse -inf, and have the gradient 0, whatever comes back for them.

    A document that breaks these rules (more queries than keys, longer than max_q or max_k, a difference that is no
    multiple of the stride, offsets that descend or leave the tensors) is a ValueError on the CPU. On CUDA its rows and
    gradients are NaN, and other documents keep theirs.

    Raises:
        As :func:`htree_ops.tree_attention`, for packed shapes; UnsupportedDtypeError for offsets that are not int32; on
            the CPU ValueError for a document that breaks the rules.
        RuntimeError: importance="lse" while a CUDA graph is recorded.

    Example:
        >>> q, k, v = (torch.randn(1000, heads, 64) for heads in (8, 2, 2))  # documents of 300 and 700 tokens
        >>> ends = torch.tensor([0, 300, 1000], dtype=torch.int32)
        >>> tree_attention_varlen(q, k, v, ends, ends, 700, 700, top_k=8, max_top_nodes=128).shape
        torch.Size([1000, 8, 64])
    """
    chosen = options_of_call("tree_attention_varlen", index, options, keywords)
    if index is None:
        key, value = expand_heads(chosen, query, key, value)
    by = (None, None) if index is None else index
    documents = (cu_seq_q, cu_seq_k, max_q, max_k)
    out, lse = torch.ops.htree._attention_varlen(query, key, value, *by, *documents, "auto", *chosen.packed())
    return (out, lse) if return_lse else out
