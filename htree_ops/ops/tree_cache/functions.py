"""Append to pages and attend from pages, on pools that the caller owns (docs/semantics/tree_cache.md §7.1-§7.3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from htree_ops.ops.arguments import validate_arguments
from htree_ops.ops.tree_attention.options import TreeKeywords, TreeOptions, tree_options
from htree_ops.ops.tree_cache.ring import empty_ring


def cache_layers(capacity: int, compression_rate: int = 16, max_top_nodes: int = 8192) -> int:
    """Layers of the tree over ``capacity`` tokens: 1, and one more while the top has more than max_top_nodes nodes."""
    layers, nodes = 1, capacity
    while nodes > max_top_nodes:
        nodes = -(-nodes // compression_rate)
        layers += 1
    return layers


def cache_options(function: str, options: TreeOptions | None, keywords: Mapping[str, Any]) -> TreeOptions:
    """The options that a function or a cache was given; scope="q_head" is refused."""
    chosen = tree_options(function, options, keywords)
    if chosen.scope != "kv_head":
        raise ValueError(
            f"{function}: scope must be kv_head, got {chosen.scope!r}: where each query head selects for itself, the "
            "pages hold a copy of keys and values for each of them"
        )
    return chosen


def rope_positions(options: TreeOptions, capacity: int) -> int:
    """The positions of a row's candidates where sequences have up to ``capacity`` tokens, a multiple of r."""
    rate = options.compression_rate
    top = -(-options.top_nodes // rate) * rate
    return max(options.top_k * rate, min(top, capacity))


def page_rows(
    page_size: int,
    num_layers: int,
    compression_rate: int = 16,
    selection_span: int | None = None,
    *,
    packed_tokens: bool = False,
) -> tuple[int, int]:
    """Rows that a page holds of one K/V head: (of the key pool, of the value pool).

    The tokens, then ceil(page_size / r^l) nodes of each layer l below ``num_layers``; keys have page_size / c span
    means behind them. ``num_layers`` is that of the tokens a block table has space for::

        page_rows(page_size, cache_layers(max_pages * page_size, r, M), r, c)

    With ``packed_tokens`` the tokens have pools of their own (:func:`tree_cache_append_packed_`) and no row here.
    """
    rows = sum(-(-page_size // compression_rate**layer) for layer in range(packed_tokens, num_layers))
    return rows + (page_size // selection_span if selection_span else 0), rows


@validate_arguments
def tree_cache_append_(
    k_pool: Tensor,
    v_pool: Tensor,
    k: Tensor,
    v: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    cu_new: Tensor,
    new_lengths: Tensor | None = None,
    max_new: int | None = None,
    *,
    page_size: int,
    options: TreeOptions | None = None,
    **keywords: Unpack[TreeKeywords],
) -> None:
    """Writes new tokens into their pages, and every node that they finish.

    Sequence b gets rows cu_new[b] ... cu_new[b + 1] - 1 of k and v, at most ``new_lengths[b]`` of them, as its tokens
    ``lengths[b]`` and following. A node is the mean of its children's stored rows, summed in fp32 and rounded once:
    the bytes are those of ``tree_build`` over the whole sequence, however the tokens came.
    Source: docs/semantics/tree_cache.md §7.1, §7.2.

    Args:
        k_pool: [num_pages, H_kv, key rows, K], v_pool: [num_pages, H_kv, value rows, V], contiguous; rows of a page as
            :func:`page_rows` counts them. float32, float16 or bfloat16, float64 on the CPU.
        k: [N_new, H_kv, K], not rotated; v: [N_new, H_kv, V], in the dtype of the pools.
        block_table: int32 [B, max_pages]: page i of sequence b holds its tokens i * page_size and following. A page
            that is written has one writer; others may have it in the same place, before their new tokens, if the call
            fills it.
        lengths: int32 [B], tokens before the call; the op does not change them.
        cu_new: int32 [B + 1], ascending from 0.
        new_lengths: int32 [B]: how many rows of a sequence count; the others are ignored. None is all.
        max_new: most new tokens of a sequence, if the caller knows; with at most page_size of them one launch is enough
            on CUDA. With more the op writes layer by layer, which sequences need there that share pages it fills.
        page_size: P, a multiple of compression_rate.
        options, keywords: those of the attention, as in :func:`htree_ops.tree_attention`; compression_rate,
            max_top_nodes and selection_span decide the rows of a page.

    Raises:
        ShapeMismatchError, UnsupportedDtypeError, DeviceError: a tensor that does not fit.
        ValueError: an option out of range; on the CPU also tokens beyond max_pages * page_size, and a page that would
            be written and holds tokens of another sequence.
        IndexError: on the CPU, for a page that the pool does not have. On CUDA such a sequence does not change.
        NotImplementedError: grad mode is on and a tensor requires grad.
    """
    packed = cache_options("tree_cache_append_", options, keywords).packed()
    torch.ops.htree._tree_cache_append_(
        k_pool, v_pool, [], k, v, block_table, lengths, cu_new, new_lengths, max_new, page_size, *packed
    )


@validate_arguments
def tree_cache_append_packed_(
    k_pool: Tensor,
    v_pool: Tensor,
    k_codes: Tensor,
    k_scales: Tensor,
    v_codes: Tensor,
    v_scales: Tensor,
    k_tail: Tensor,
    v_tail: Tensor,
    k: Tensor,
    v: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    cu_new: Tensor,
    new_lengths: Tensor | None = None,
    max_new: int | None = None,
    *,
    page_size: int,
    options: TreeOptions | None = None,
    **keywords: Unpack[TreeKeywords],
) -> None:
    """:func:`tree_cache_append_` for pages whose tokens have 8 or 4 bits a channel.

    A token's row is that of :func:`htree_ops.kv_compress` with all channels kept, without its bitmap. Nodes and span
    means are those of the tokens as they came: the pools have the bytes of ``tree_cache_append_`` without their token
    rows. To make nodes whose first tokens came in earlier calls, the tails keep the last tokens of each sequence.
    Source: docs/semantics/tree_cache.md §7.5.

    Args:
        k_pool, v_pool: as in :func:`tree_cache_append_`, with the rows that :func:`page_rows` counts for
            ``packed_tokens``; K and V are multiples of 64 up to 512. float32, float16 or bfloat16.
        k_codes: uint8 [num_pages, H_kv, page_size, K] for 8 bits, [..., K/2] for 4; v_codes likewise, of as many bits.
        k_scales, v_scales: float16 [num_pages, H_kv, page_size].
        k_tail: [B, H_kv, S, K]; v_tail: [B, H_kv, S, V], in the dtype of the pools, S a multiple of compression_rate:
            token t is row t mod S. Of a node that is not finished, the tokens before ``lengths[b]`` must be there.
        The others: as in :func:`tree_cache_append_`.

    Raises:
        As :func:`tree_cache_append_`.
    """
    packed = cache_options("tree_cache_append_packed_", options, keywords).packed()
    leaves = [k_codes, k_scales, v_codes, v_scales, k_tail, v_tail]
    torch.ops.htree._tree_cache_append_(
        k_pool, v_pool, leaves, k, v, block_table, lengths, cu_new, new_lengths, max_new, page_size, *packed
    )


@validate_arguments
def tree_cache_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    cu_q: Tensor,
    lists: Tensor | None = None,
    list_pos: Tensor | None = None,
    q_lengths: Tensor | None = None,
    rope_table: Tensor | None = None,
    *,
    page_size: int,
    k_codes: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_codes: Tensor | None = None,
    v_scales: Tensor | None = None,
    index_query: Tensor | None = None,
    index_pool: Tensor | None = None,
    index_scales: Tensor | None = None,
    options: TreeOptions | None = None,
    **keywords: Unpack[TreeKeywords],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of :func:`htree_ops.tree_attention` from pages: the last tokens of each sequence attend to all before them.

    The rows cu_q[b] ... cu_q[b + 1] - 1 of q, at most ``q_lengths[b]`` of them, are the last tokens of the
    ``lengths[b]`` of sequence b: one row decodes, more are a chunk of a prompt or speculative tokens to verify. Row t
    takes the lists of its leader t - t % s: from this call if the leader is in it, else from ``lists`` where
    ``list_pos`` names it. A row whose leader is in neither is NaN. The result of a row depends on nothing but the
    tokens up to its own. Source: docs/semantics/tree_cache.md §7.3.

    Args:
        q: [N_q, H, K], not rotated, H a multiple of H_kv.
        k_pool, v_pool, block_table: as in :func:`tree_cache_append_`.
        lengths: int32 [B], tokens of each sequence, those of q included.
        cu_q: int32 [B + 1], ascending from 0.
        lists: int32 [B, ring, layers, H_kv, top_k], the lists of earlier leaders; list_pos: int32 [B, ring], their
            tokens, -1 for none. Both or neither.
        q_lengths: int32 [B]: how many rows of a sequence count; None is all.
        rope_table: ``rope_cache(size, K, rope_base)``, where inv_freq is given ``rope_cache(size, K,
            inv_freq=inv_freq)``, with size >= top_k * compression_rate and, as far as max_pages * page_size needs
            it, >= max_top_nodes rounded up to a multiple of compression_rate. Without it CUDA computes one in every
            call, and the CPU keeps one between calls.
        page_size: P, a multiple of compression_rate.
        k_codes, k_scales, v_codes, v_scales: the tokens where they are packed, as in
            :func:`tree_cache_append_packed_`; all or none. A channel is its code times the scale, rounded to the dtype.
        index_query, index_pool: [N_q, H_i, d] and [num_pages, H_i, page_size, d] contiguous, in one dtype, an index by
            which nodes are chosen as with ``index`` of :func:`htree_ops.tree_attention`; both or neither. H_i is H_kv
            or 1, d a multiple of 16 up to 128. Row t % page_size of page t // page_size of a sequence is the index key
            of its token t, which the caller writes (docs/semantics/tree_cache.md §7.7).
        index_scales: uint8 [num_pages, H_i, page_size] contiguous where index_pool is uint8, else None: a channel is
            its E4M3 code times 2**(scale - 127). index_query is then bfloat16.
        options, keywords: as in :func:`htree_ops.tree_attention`. With an index max_top_nodes=None is 8192; the pools
            must have been filled with the same number.

    Returns:
        out [N_q, H, V] in the dtype of q; lse [N_q, H], natural logarithm, float32 (float64 for float64). A row that
        does not count, or that a sequence is too short for, has out 0 and lse -inf. lists and list_pos as given, with
        the last leaders of the call: if none were given, 4 entries for selection_stride > 1 and 0 for stride 1.

    Raises:
        ShapeMismatchError, UnsupportedDtypeError, DeviceError: a tensor that does not fit.
        ValueError: an option out of range, importance="lse", scope="q_head"; on the CPU also lengths beyond max_pages *
            page_size.
        IndexError: on the CPU, for a page that the pool does not have. On CUDA its rows are left out.
    """
    chosen = cache_options("tree_cache_attention", options, keywords)
    if index_query is not None:
        chosen = chosen.beside_index()
    if (
        chosen.selection_stride > 1
        and lists is None is list_pos
        and block_table.dim() == 2
        and k_pool.dim() == 4
    ):
        layers = cache_layers(block_table.shape[1] * page_size, chosen.compression_rate, chosen.top_nodes)
        lists, list_pos = empty_ring(len(block_table), layers, k_pool.shape[1], chosen, k_pool.device)
    return torch.ops.htree._tree_cache_attention(
        q,
        k_pool,
        v_pool,
        block_table,
        lengths,
        cu_q,
        lists,
        list_pos,
        q_lengths,
        rope_table,
        k_codes,
        k_scales,
        v_codes,
        v_scales,
        index_query,
        index_pool,
        index_scales,
        page_size,
        *chosen.packed(),
    )
