"""Attention over the blocks of a caller's lists (docs/semantics/sparse_attention.md §8)."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from htree_ops.ops.arguments import validate_arguments


@overload
def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor,
    *,
    block_size: int = ...,
    selection_stride: int = ...,
    scale: float | None = ...,
    sinks: Tensor | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor,
    *,
    block_size: int = ...,
    selection_stride: int = ...,
    scale: float | None = ...,
    sinks: Tensor | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor,
    *,
    block_size: int = ...,
    selection_stride: int = ...,
    scale: float | None = ...,
    sinks: Tensor | None = ...,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...
@validate_arguments
def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor,
    *,
    block_size: int = 16,
    selection_stride: int = 1,
    scale: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention of every query over the tokens of the blocks in its list.

    Block b is the tokens ``b * block_size`` to ``(b + 1) * block_size - 1``. Query row i stands at token
    ``t = T - T_q + i`` and sees the tokens up to t of the blocks in list ``i // selection_stride``. Over them::

        out = softmax(scale * <q, k>) v

    A list is a set: neither the order of its entries nor their repetition matters, and entries below 0 or beyond the
    last block are ignored, as are blocks behind the query's own. Nothing is added: what is not in the list, the query's
    own block too, is not seen. A row that sees nothing is 0, has lse -inf, and gives no gradient. Nothing is rotated.
    Source: docs/semantics/sparse_attention.md §8.

    Args:
        query: [B, T_q, H, K], the last T_q <= T tokens.
        key: [B, T, H_kv, K], H a multiple of H_kv.
        value: [B, T, H_kv, V]. All three float32, float16 or bfloat16, or float64 on the CPU; under autocast they are
            cast to its dtype.
        blocks: int32 [B, ceil(T_q / selection_stride), H_kv, n], or with 1 in place of H_kv lists that all K/V heads
            share. Padded with any entry that is ignored, such as -1. n may be 0.
        block_size: tokens per block, at least 1; on CUDA at least 16.
        selection_stride: s, consecutive queries that share a list: a power of two that divides block_size. T - T_q must
            be a multiple of it.
        scale: factor of the scores, finite in fp32; None is K^-1/2.
        sinks: [H] of a floating dtype: exp(sink) is added to the denominator of each row of a head. Differentiable.
        return_lse: also return the log-sum-exp of each row's scores, without the sink.

    Returns:
        out [B, T_q, H, V] in the dtype of query, differentiable in query, key, value and sinks. With ``return_lse``
        also lse [B, T_q, H], natural logarithm, float32 (float64 for float64), differentiable in query and key.

    On CUDA fp16 and bf16 use tensor cores where K = V is 32, 64 or 128, H / H_kv at most 16, block_size a multiple of
    16, n * block_size at most 16384 and s at most 16; other calls take general kernels, which are slower.

    Raises:
        ShapeMismatchError: a rank or size that does not fit, H not a multiple of H_kv, T_q > T.
        UnsupportedDtypeError: a dtype that is not supported, different ones, or blocks that are not int32.
        DeviceError: tensors on different devices.
        ValueError: an option outside its range, or T - T_q no multiple of selection_stride.
        ArchitectureNotSupportedError: a block_size below 16 on CUDA.
        NotImplementedError: the backward is differentiated again.

    Example:
        >>> q, k, v = (torch.randn(1, 64, heads, 32) for heads in (8, 2, 2))
        >>> own = torch.arange(64).view(1, 64, 1, 1) // 16  # each token reads its own block and the first
        >>> blocks = torch.cat([own, torch.zeros_like(own)], -1).int()
        >>> sparse_attention(q, k, v, blocks).shape
        torch.Size([1, 64, 8, 32])
    """
    options = {"block_size": block_size, "selection_stride": selection_stride, "scale": scale}
    out, lse = torch.ops.htree.sparse_attention(query, key, value, blocks, sinks, **options)
    return (out, lse) if return_lse else out


@overload
def sparse_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    block_size: int = ...,
    selection_stride: int = ...,
    scale: float | None = ...,
    sinks: Tensor | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def sparse_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    block_size: int = ...,
    selection_stride: int = ...,
    scale: float | None = ...,
    sinks: Tensor | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def sparse_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    block_size: int = ...,
    selection_stride: int = ...,
    scale: float | None = ...,
    sinks: Tensor | None = ...,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...
@validate_arguments
def sparse_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    block_size: int = 16,
    selection_stride: int = 1,
    scale: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`htree_ops.sparse_attention` of documents that lie packed one behind the other.

    Document i has the keys cu_seq_k[i] ... cu_seq_k[i + 1] - 1, and its queries cu_seq_q[i] ... cu_seq_q[i + 1] - 1 are
    its last tokens. Blocks count from the document's first token, so that nothing of one document reaches another.
    Nothing is read on the host on CUDA, so that a call can be in a CUDA graph; it copies the documents into a sequence
    in which each fills whole blocks, at most ``documents * (block_size - 1)`` rows more than the keys have.
    Source: docs/semantics/sparse_attention.md §8.2.

    Args:
        query: [N_q, H, K]; key: [N_k, H_kv, K]; value: [N_k, H_kv, V].
        blocks: int32 [N_q, H_kv, n] or [N_q, 1, n]. With a selection_stride the lists are those of the rows whose place
            in their document is a multiple of it; other rows of ``blocks`` are not read.
        cu_seq_q, cu_seq_k: int32 [documents + 1] on the device of query, ascending from 0. The same tensor where every
            document's queries are all of its tokens.
        max_q, max_k: no document has more queries or keys.
        block_size, selection_stride, scale, sinks, return_lse: as in :func:`htree_ops.sparse_attention`. The number of
            keys less that of queries must be a multiple of selection_stride in every document that has queries.

    Returns:
        out [N_q, H, V] in the dtype of query, and with ``return_lse`` lse [N_q, H]. Rows at or behind cu_seq_q[-1] are
        0, with lse -inf, and have no gradient.

    A document that breaks these rules is a ValueError on the CPU. On CUDA its rows and gradients are NaN, and other
    documents keep theirs.

    Raises:
        As :func:`htree_ops.sparse_attention`, for packed shapes; on the CPU ValueError for a document that breaks the
            rules.

    Example:
        >>> q, k, v = (torch.randn(100, heads, 32) for heads in (8, 2, 2))  # documents of 30 and 70 tokens
        >>> ends = torch.tensor([0, 30, 100], dtype=torch.int32)
        >>> blocks = torch.zeros(100, 1, 1, dtype=torch.int32)  # each token reads its document's first block
        >>> sparse_attention_varlen(q, k, v, blocks, ends, ends, 70, 70).shape
        torch.Size([100, 8, 32])
    """
    options = {"block_size": block_size, "selection_stride": selection_stride, "scale": scale}
    documents = (cu_seq_q, cu_seq_k, sinks, max_q, max_k)
    out, lse = torch.ops.htree.sparse_attention_varlen(query, key, value, blocks, *documents, **options)
    return (out, lse) if return_lse else out
