"""The choice of blocks by the products of a small query with small keys (docs/semantics/selection.md §9)."""

from __future__ import annotations

import torch
from torch import Tensor

from htree_ops.ops.arguments import validate_arguments


@validate_arguments
def select_blocks(
    index_query: Tensor,
    index_key: Tensor,
    count: int,
    *,
    block_size: int = 16,
    selection_stride: int = 1,
    local: int = 1,
    first: int = 0,
    open_next: bool = False,
) -> tuple[Tensor, Tensor]:
    """For each query the blocks of earlier tokens that it should read: those with the largest product of an index.

    Query i stands at token ``t = T - T_q + i``; its *diagonal block* is ``t // block_size``. A block wholly before it
    scores ``max over its tokens j of <index_query[i], index_key[j]>``. A list holds the diagonal block, the
    ``local - 1`` blocks before it and the ``first`` first ones, each counted once, then the best scores, of equal ones
    the lower block, until ``count`` are held. Tokens behind a query change no bit of its list, and neither do other
    sequences, lengths or queries.
    Source: docs/semantics/selection.md §9.

    Args:
        index_query: [B, T_q, H_i, d] with d a multiple of 16 up to 128; float32, float16, bfloat16, on the CPU also
            float64. H_i is the number of K/V heads, or 1 where all of them share a list.
        index_key: [B, T, H_i, d] with T >= T_q, same dtype and device.
        count: entries of a list.
        block_size: tokens of a block.
        selection_stride: queries in a row that share a list, that of the first of them. A power of two that divides
            block_size; T - T_q is a multiple of it.
        local: blocks up to the diagonal one that are always listed, at least 1.
        first: first blocks of the sequence that are always listed; local + first <= count.
        open_next: half of a list (⌈count/2⌉ blocks, all that are always listed among them) goes by score, then come the
            blocks behind each of these in ascending order, then the next best.

    Returns:
        blocks int32 [B, ⌈T_q / selection_stride⌉, H_i, count], ascending, with -1 at the end of a list that has fewer,
        and scores in float32 (float64 for float64) of the same shape: of each entry, +inf where it is always listed,
        -inf where there is none. Neither has a gradient.

    A product that is NaN counts as -inf. Blocks of -inf can be chosen, the lower first.

    Raises:
        ShapeMismatchError: a rank or size that does not fit, d that is no multiple of 16 up to 128, T_q > T.
        UnsupportedDtypeError: a dtype that is not supported, or different ones; float64 on CUDA.
        DeviceError: tensors on different devices.
        ValueError: an option outside its range, T - T_q that is no multiple of selection_stride.
        RuntimeError: a backward through the scores.

    Example:
        >>> query = torch.ones(1, 1, 1, 16)  # of token 95, in block 5
        >>> key = torch.zeros(1, 96, 1, 16)
        >>> key[:, 40] = 1.0  # in block 2
        >>> blocks, scores = select_blocks(query, key, 3)
        >>> blocks.flatten().tolist(), scores.flatten().tolist()
        ([0, 2, 5], [0.0, 16.0, inf])
    """
    options = (count, block_size, selection_stride, local, first, open_next)
    return torch.ops.htree.select_blocks(index_query, index_key, *options)


@validate_arguments
def select_blocks_varlen(
    index_query: Tensor,
    index_key: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    count: int,
    *,
    block_size: int = 16,
    selection_stride: int = 1,
    local: int = 1,
    first: int = 0,
    open_next: bool = False,
) -> tuple[Tensor, Tensor]:
    """:func:`htree_ops.select_blocks` of documents that lie packed one behind the other.

    Document i has the keys cu_seq_k[i] ... cu_seq_k[i + 1] - 1, and its queries cu_seq_q[i] ... cu_seq_q[i + 1] - 1 are
    its last tokens. Blocks count from its first token. Its lists are those of a call of its own, bit for bit.
    Source: docs/semantics/selection.md §9.2.

    Args:
        index_query: [N_q, H_i, d]; index_key: [N_k, H_i, d]. Dtypes and d as in :func:`htree_ops.select_blocks`.
        cu_seq_q, cu_seq_k: int32 [documents + 1] on the device of index_query, ascending from 0. Equal entries are an
            empty document. The same tensor where every document's queries are all of its tokens.
        max_q, max_k: no document has more queries or keys.
        count, block_size, selection_stride, local, first, open_next: as in :func:`htree_ops.select_blocks`. The number
            of keys less that of queries must be a multiple of selection_stride in every document that has queries.

    Returns:
        blocks int32 and scores [N_q, H_i, count]. With a selection_stride the rows of a document's leaders, each
        selection_stride-th from its first on, have its lists. Other rows, and those at or behind cu_seq_q[-1], are -1
        with scores -inf.

    A document that breaks these rules (more queries than keys, longer than max_q or max_k, a difference that is no
    multiple of the stride, offsets that descend or leave the tensors) is a ValueError on the CPU. On CUDA the scores of
    its leaders are NaN with blocks -1, and other documents keep theirs. Nothing is read on the host.

    Raises:
        As :func:`htree_ops.select_blocks`, for packed shapes; UnsupportedDtypeError for offsets that are not int32; on
            the CPU ValueError for a document that breaks the rules.

    Example:
        >>> query, key = torch.randn(1000, 1, 32), torch.randn(1000, 1, 32)  # documents of 300 and 700 tokens
        >>> ends = torch.tensor([0, 300, 1000], dtype=torch.int32)
        >>> blocks, scores = select_blocks_varlen(query, key, ends, ends, 700, 700, 4)
        >>> blocks[[0, 300]].tolist()  # the first token of each
        [[[0, -1, -1, -1]], [[0, -1, -1, -1]]]
    """
    documents = (cu_seq_q, cu_seq_k, max_q, max_k)
    options = (count, block_size, selection_stride, local, first, open_next)
    return torch.ops.htree.select_blocks_varlen(index_query, index_key, *documents, *options)
