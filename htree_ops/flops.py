"""FLOP counts of the ops that multiply matrices, for ``torch.utils.flop_counter.FlopCounterMode``.

A product of sizes m, n and p counts 2mnp, as torch counts. Norms, rotations, softmax and transforms count nothing, as
in torch. Which nodes tree attention opens depends on the data. How many candidates a query has does not: it follows
from the query's position alone (docs/semantics/tree_attention.md §1.3), so these counts are exact. An op that sees one
layer or a caller's lists counts full lists, one that reads a cache counts a full cache, and one that takes packed
documents counts the longest ones. A formula gets the arguments of its op, with shapes in place of tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from math import prod
from types import ModuleType
from typing import Any

import numpy as np
import torch

from htree_ops.ops.tree_attention.options import TreeOptions

__all__ = ["tree_candidates"]

Shape = Sequence[int]


def _own_tops(leaders: np.ndarray, depth: int, r: int, M: int, k: int) -> np.ndarray:
    """The layer that each query starts at, by its leader: with M > k * r the top of its prefix, else of all tokens."""
    if k * r >= M:
        return np.full_like(leaders, depth - 1)
    tops = np.zeros_like(leaders)
    for layer in range(depth - 1):
        tops += leaders >= M * r**layer
    return tops


def tree_candidates(
    T: int, T_q: int, r: int, M: int, k: int, stride: int = 1
) -> list[tuple[int, int, np.ndarray]]:
    """How many candidates the last ``T_q`` of ``T`` queries score and open, layer by layer from the top.

    Returns:
        Per layer (scored, opened, n): sums over the queries, and the candidates of each query, int64 [T_q].
    """
    depth, nodes = 1, T
    while nodes > M:
        depth, nodes = depth + 1, -(-nodes // r)
    t = np.arange(T - T_q, T, dtype=np.int64)
    tops = _own_tops(t - t % stride, depth, r, M, k)
    parents = np.ones_like(t)
    layers = []
    for layer in reversed(range(depth)):
        own = t // r**layer
        below = np.where(tops > layer, (parents - 1) * r + own % r + 1, 0)
        n = np.where(tops == layer, own + 1, below)
        parents = np.minimum(n, k)
        layers.append((int(n.sum()), int(parents.sum()) if layer else 0, n))
    return layers


def _tree_work(q: Shape, k: Shape, options: TreeOptions) -> tuple[int, int, int]:
    """(pairs of a query and a candidate that are scored, those that are kept, scores for the selection alone)."""
    B, T_q, H, _ = q
    r, stride, span = options.compression_rate, options.selection_stride, options.selection_span
    layers = tree_candidates(k[1], T_q, r, options.top_nodes, options.top_k, stride) if T_q else []
    scored = sum(scores for scores, _, _ in layers)
    kept = sum(scores - opened for scores, opened, _ in layers)
    selecting = 0
    if span is not None:  # the leaders score every mean of `span` tokens of their candidates but the last
        for depth, (_, _, n) in enumerate(layers[:-1]):
            before = np.maximum(n[::stride] - 1, 0)
            selecting += int(before.sum()) * r ** (len(layers) - 1 - depth) // span
    return B * H * scored, B * H * kept, B * H * selecting


def _work(q: Shape, k: Shape, v: Shape, options: TreeOptions) -> int:
    """Scores of every candidate, and the values of those that are kept."""
    scored, kept, selecting = _tree_work(q, k, options)
    return 2 * k[3] * (scored + selecting) + 2 * v[3] * kept


def _gradient_work(
    q: Shape, k: Shape, v: Shape, has_lists: bool, output_mask: Sequence[bool], options: TreeOptions
) -> int:
    """Per kept candidate the score and dO·V again, and the wanted of dQ, dK and dV; the selection where no list is."""
    scored, kept, selecting = _tree_work(q, k, options)
    dq, dk, dv = output_mask
    if not (dq or dk or dv):
        return 0
    again = 0 if has_lists else scored - kept + selecting
    keys = kept * (1 + dq + dk) + again
    values = kept * ((1 if dq or dk else 0) + dv)
    return 2 * k[3] * keys + 2 * v[3] * values


def _attention(q: Shape, k: Shape, v: Shape, store_parents: bool, *packed: Any, **_: Any) -> int:
    return _work(q, k, v, TreeOptions.from_packed(*packed))


def _attention_backward(
    dout: Shape,
    q: Shape,
    k: Shape,
    v: Shape,
    out: Shape,
    gmax: Shape,
    gsum: Shape,
    parents: Sequence[Shape],
    output_mask: Sequence[bool],
    *packed: Any,
    **_: Any,
) -> int:
    return _gradient_work(q, k, v, len(parents) > 0, output_mask, TreeOptions.from_packed(*packed))


def _until(keys: Shape, end: int) -> Shape:
    """The keys that the queries before token ``end`` can see."""
    return (keys[0], end, *keys[2:])


def _piece(q: Shape, starts: Sequence[int]) -> Shape:
    """The queries of one of the pieces that start there."""
    return (q[0], q[1] // len(starts), *q[2:])


def _attention_rows(
    q: Shape, k: Shape, v: Shape, starts: Sequence[int], store_parents: bool, *packed: Any, **_: Any
) -> int:
    """Those of calls whose keys end with their queries; layers above that open everything are left out."""
    options, piece = TreeOptions.from_packed(*packed), _piece(q, starts)
    ends = [start + piece[1] for start in starts]
    return sum(_work(piece, _until(k, end), _until(v, end), options) for end in ends)


def _attention_rows_backward(
    q: Shape,
    k: Shape,
    v: Shape,
    out: Shape,
    gmax: Shape,
    gsum: Shape,
    lists: Shape,
    dout: Shape | None,
    dlse: Shape | None,
    starts: Sequence[int],
    output_mask: Sequence[bool],
    *packed: Any,
    **_: Any,
) -> int:
    """The same for the gradient; there are lists where their tensor has rows."""
    options, piece = TreeOptions.from_packed(*packed), _piece(q, starts)
    ends = [start + piece[1] for start in starts]
    return sum(
        _gradient_work(piece, _until(k, end), _until(v, end), lists[1] > 0, output_mask, options)
        for end in ends
    )


def _longest_documents(
    query: Shape, key: Shape, value: Shape, max_q: int, max_k: int
) -> tuple[int, Shape, Shape, Shape]:
    """All rows as documents of max_k tokens, the last max_q of them queries: (their number, q, k and v of one).

    The lengths of the documents are no shapes, so this is the most that they can cost.
    """
    queries = max(1, min(max_q, query[0]))
    keys = max(queries, min(max_k, key[0]))
    return -(-query[0] // queries), (1, queries, *query[1:]), (1, keys, *key[1:]), (1, keys, *value[1:])


def _attention_varlen(*arguments: Any, **_: Any) -> int:
    """:func:`_work` of the longest documents; with an index its lists and :func:`_listed_attention`."""
    ints, floats = arguments[-2:]
    count, q, k, v, lists = _documents_and_lists(arguments)
    attention = _work(q, k, v, TreeOptions.from_packed(ints, floats))
    return count * (attention if lists is None else lists + _listed_attention(q, k, v, (), ints, floats))


def _attention_varlen_backward(*arguments: Any, **_: Any) -> int:
    """:func:`_gradient_work` of the longest documents; there are lists where an index chooses them again."""
    output_mask, ints, floats = arguments[-3:]
    count, q, k, v, lists = _documents_and_lists(arguments)
    options = TreeOptions.from_packed(ints, floats)
    return count * ((lists or 0) + _gradient_work(q, k, v, lists is not None, output_mask, options))


def _documents_and_lists(arguments: tuple[Any, ...]) -> tuple[int, Shape, Shape, Shape, int | None]:
    """The longest documents, as :func:`_longest_documents`, and the work of their lists; None without an index.

    ``arguments`` are query, key, value, index_query, index_key, both offsets, max_q, max_k, ..., ints and floats.
    """
    query, key, value, index_query, index_key, _cu_q, _cu_k, max_q, max_k = arguments[:9]
    count, q, k, v = _longest_documents(query, key, value, max_q, max_k)
    if index_query is None:
        return count, q, k, v, None
    of_q, of_k = (1, q[1], *index_query[1:]), (1, k[1], *index_key[1:])
    return count, q, k, v, _index_lists(q, k, of_q, of_k, [k[1] - q[1]], *arguments[-2:])


def _sparse_pairs(query: Shape, key: Shape, blocks: Shape, block_size: int) -> int:
    """Queries of every head times the tokens of a full list, or all tokens where the list holds more."""
    return prod(query[:-1]) * min(blocks[-1] * block_size, key[-3])


def _sparse_attention(
    query: Shape, key: Shape, value: Shape, blocks: Shape, *_: Any, block_size: int = 16, **__: Any
) -> int:
    """Of batches and of packed documents, whose lists are as long."""
    return 2 * _sparse_pairs(query, key, blocks, block_size) * (query[-1] + value[-1])


def _sparse_attention_backward(
    query: Shape,
    key: Shape,
    value: Shape,
    blocks: Shape,
    out: Shape,
    lse: Shape,
    sinks: Shape | None,
    dout: Shape | None,
    dlse: Shape | None,
    block_size: int = 16,
    selection_stride: int = 1,
    scale: float | None = None,
    output_mask: Sequence[bool] = (True, True, True, True),
    **_: Any,
) -> int:
    """Per pair the score and dO·V again, and the wanted of dQ, dK and dV."""
    pairs = _sparse_pairs(query, key, blocks, block_size)
    dq, dk, dv, _dsinks = output_mask
    if not (dq or dk or dv):
        return 0
    return 2 * pairs * (query[-1] * (1 + dq + dk) + value[-1] * ((1 if dq or dk else 0) + dv))


def _sparse_attention_varlen_backward(
    query: Shape,
    key: Shape,
    value: Shape,
    blocks: Shape,
    cu_seq_q: Shape,
    cu_seq_k: Shape,
    out: Shape,
    lse: Shape,
    sinks: Shape | None,
    dout: Shape | None,
    dlse: Shape | None,
    max_q: int,
    max_k: int,
    *options: Any,
    **named: Any,
) -> int:
    return _sparse_attention_backward(
        query, key, value, blocks, out, lse, sinks, dout, dlse, *options, **named
    )


def _select_blocks(
    index_query: Shape,
    index_key: Shape,
    count: int,
    block_size: int = 16,
    selection_stride: int = 1,
    *_: Any,
    **__: Any,
) -> int:
    """Products of the queries that select with the keys of the blocks before their own."""
    B, T_q, H_i, d = index_query
    T = index_key[1]
    leaders = np.arange(T - T_q, T, selection_stride, dtype=np.int64)
    return 2 * B * H_i * d * int((leaders // block_size * block_size).sum())


def _select_blocks_varlen(
    index_query: Shape,
    index_key: Shape,
    cu_seq_q: Shape,
    cu_seq_k: Shape,
    max_q: int,
    max_k: int,
    *arguments: Any,
    **_: Any,
) -> int:
    """:func:`_select_blocks` of the longest documents."""
    count, query, key, _value = _longest_documents(index_query, index_key, index_key, max_q, max_k)
    return count * _select_blocks(query, key, *arguments)


def _index_lists(
    q: Shape, k: Shape, index_query: Shape, index_key: Shape, starts: Sequence[int], *packed: Any, **_: Any
) -> int:
    """The products of :func:`_select_blocks` for every layer below the top of a query."""
    options, (B, T_q, H_i, d) = TreeOptions.from_packed(*packed), _piece(index_query, starts)
    r, M = options.compression_rate, options.top_nodes
    depth = len(tree_candidates(k[1], 1, r, M, options.top_k)) if k[1] else 1
    keys = 0
    for start in starts:
        leaders = np.arange(start, start + T_q, options.selection_stride, dtype=np.int64)
        tops = _own_tops(leaders, depth, r, M, options.top_k)
        for layer in range(1, depth):
            keys += int((leaders[tops >= layer] // r**layer * r**layer).sum())
    return 2 * B * H_i * d * keys


def _listed_attention(q: Shape, k: Shape, v: Shape, lists: Shape, *packed: Any, **_: Any) -> int:
    """As many products of queries and keys as of weights and values: nothing is scored to be selected."""
    options = TreeOptions.from_packed(*packed)
    return 2 * (k[3] + v[3]) * _tree_work(q, k, options)[1]


def _listed_attention_rows(
    q: Shape, k: Shape, v: Shape, lists: Shape, starts: Sequence[int], *packed: Any, **_: Any
) -> int:
    piece = _piece(q, starts)
    ends = [start + piece[1] for start in starts]
    return sum(_listed_attention(piece, _until(k, end), _until(v, end), lists, *packed) for end in ends)


def _index_loss(
    query: Shape, key: Shape, index_query: Shape, index_key: Shape, positions: Shape, *_: Any, **__: Any
) -> int:
    """Products of the queries at the positions with all tokens: which of them come before depends on the data."""
    rows = positions[-1] * (query[0] if len(query) == 4 else 1)
    return 2 * rows * query[-3] * (query[-2] * query[-1] + index_query[-2] * index_query[-1])


def _index_loss_backward(
    query: Shape,
    key: Shape,
    index_query: Shape,
    index_key: Shape,
    positions: Shape,
    lse: Shape,
    index_lse: Shape,
    dloss: Shape,
    cu_seqlens: Shape | None = None,
    scale: float | None = None,
    block_size: int = 16,
    output_mask: Sequence[bool] = (True, True),
    **_: Any,
) -> int:
    """The products again. What a block gives to its one token counts as nothing beside them."""
    return _index_loss(query, key, index_query, index_key, positions) if any(output_mask) else 0


def _pairs(q: Shape, parents: Shape, r: int) -> int:
    """Queries of every head times the candidates of a full list."""
    return prod(q[:3]) * parents[3] * r


def _compute_scores(
    q: Shape,
    layer_k: Shape,
    parents: Shape,
    cos: Shape,
    sin: Shape,
    layer: int,
    compression_rate: int = 16,
    *_: Any,
    **__: Any,
) -> int:
    return 2 * q[3] * _pairs(q, parents, compression_rate)


def _accumulate_non_topk(layer_v: Shape, parents: Shape, scores: Shape, *_: Any, **__: Any) -> int:
    return 2 * layer_v[3] * prod(scores)


def _fused_layer(
    q: Shape,
    layer_k: Shape,
    layer_v: Shape,
    parents: Shape,
    cos: Shape,
    sin: Shape,
    layer: int,
    compression_rate: int = 16,
    *_: Any,
    **__: Any,
) -> int:
    return 2 * (q[3] + layer_v[3]) * _pairs(q, parents, compression_rate)


def _bottom_layer(
    q: Shape,
    layer_k: Shape,
    layer_v: Shape,
    parents: Shape,
    cos: Shape,
    sin: Shape,
    compression_rate: int = 16,
    *_: Any,
    **__: Any,
) -> int:
    return 2 * (q[3] + layer_v[3]) * _pairs(q, parents, compression_rate)


def _subtract_topk(layer_v: Shape, topk_indices: Shape, *_: Any, **__: Any) -> int:
    return 2 * layer_v[3] * prod(topk_indices)


def _gated_mlp(x: Shape, gate_weight: Shape, *_: Any, **__: Any) -> int:
    return 4 * prod(x) * gate_weight[0]


def _of_the_gradients(x: Shape, gate_weight: Shape, output_mask: Sequence[bool]) -> int:
    dx, dgate, dup = output_mask
    return 2 * prod(x) * gate_weight[0] * (2 * dx + dgate + dup)


def _gated_mlp_backward(
    dy: Shape,
    x: Shape,
    gate_weight: Shape,
    up_weight: Shape,
    activation: str = "silu",
    act_on: str = "up",
    output_mask: Sequence[bool] = (True, True, True),
    **_: Any,
) -> int:
    both_again = _gated_mlp(x, gate_weight) if any(output_mask) else 0
    return both_again + _of_the_gradients(x, gate_weight, output_mask)


def _gated_mlp_saved_backward(
    dy: Shape,
    gate: Shape,
    up: Shape,
    x: Shape,
    gate_weight: Shape,
    up_weight: Shape,
    activation: str = "silu",
    act_on: str = "up",
    output_mask: Sequence[bool] = (True, True, True),
    **_: Any,
) -> int:
    return _of_the_gradients(x, gate_weight, output_mask)


def _gemm(a: Shape, b: Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(a) * b[1]


def _kv_decode_attention(
    q: Shape,
    k_bitmap: Shape,
    k_values: Shape,
    k_scales: Shape,
    v_bitmap: Shape,
    v_values: Shape,
    v_scales: Shape,
    k_win: Shape,
    v_win: Shape,
    comp_len: Shape | None = None,
    win_len: Shape | None = None,
    scale: float | None = None,
    block_table: Shape | None = None,
    **_: Any,
) -> int:
    rows = k_bitmap[2] * (1 if block_table is None else block_table[1]) + k_win[2]
    return 2 * prod(q[:-1]) * (q[-1] + v_win[3]) * rows


def _tree_cache_attention(
    q: Shape,
    k_pool: Shape,
    v_pool: Shape,
    block_table: Shape,
    *arguments: Any,
    out_shape: Sequence[Shape],
    **_: Any,
) -> int:
    """Each query as the last token of a full sequence, which selects for itself."""
    page_size = arguments[-3]
    return _rows_of_pages(q, block_table[1] * page_size, out_shape[0][2], arguments[-2:], arguments[-5])


def _rows_of_pages(
    q: Shape, tokens: int, value_dim: int, packed: Sequence[Any], index_query: Shape | None
) -> int:
    """Queries [N, H, K] that each see ``tokens`` tokens; an index multiplies all of them."""
    options = replace(TreeOptions.from_packed(*packed), selection_stride=1)
    k, v = ((1, tokens, 1, width) for width in (q[2], value_dim))
    of_index = 0 if index_query is None else 2 * prod(index_query) * tokens
    return prod(q[:2]) * _work((1, 1, 1, q[2]), k, v, options) + of_index


def _tree_cache_step(
    k_pool: Shape,
    v_pool: Shape,
    leaves: Any,
    index_pool: Any,
    state: Any,
    block_table: Shape,
    q: Shape | None,
    k: Shape | None,
    v: Shape | None,
    index_query: Shape | None,
    *arguments: Any,
    out_shape: Sequence[Shape],
    **_: Any,
) -> int:
    """Queries as in ``_tree_cache_attention``; new tokens cost nothing that is counted."""
    if q is None:
        return 0
    page_size, *packed = arguments[-3:]
    tokens = block_table[1] * page_size
    return _rows_of_pages((q[0] * q[1], *q[2:]), tokens, out_shape[0][3], packed, index_query)


def _tree_cache_prompt(
    q: Shape, k_pool: Shape, v_pool: Shape, block_table: Shape, length: int, *arguments: Any, **_: Any
) -> int:
    """The last rows of sequences of ``length`` tokens."""
    k, v = ((q[0], length, pool[1], pool[3]) for pool in (k_pool, v_pool))
    return _work(q, k, v, TreeOptions.from_packed(*arguments[-2:]))


FORMULAS: dict[str, Callable[..., int]] = {
    "_attention": _attention,
    "_attention_lse": _attention,
    "_attention_forward": _attention,
    "_attention_backward": _attention_backward,
    "_attention_rows": _attention_rows,
    "_attention_rows_backward": _attention_rows_backward,
    "_attention_rows_backward_sums": _attention_rows_backward,
    "_attention_varlen": _attention_varlen,
    "_attention_varlen_forward": _attention_varlen,
    "_attention_varlen_backward": _attention_varlen_backward,
    "_index_lists": _index_lists,
    "_listed_attention": _listed_attention,
    "_listed_attention_rows": _listed_attention_rows,
    "sparse_attention": _sparse_attention,
    "_sparse_attention_backward": _sparse_attention_backward,
    "sparse_attention_varlen": _sparse_attention,
    "_sparse_attention_varlen_backward": _sparse_attention_varlen_backward,
    "select_blocks": _select_blocks,
    "select_blocks_varlen": _select_blocks_varlen,
    "index_loss": _index_loss,
    "_index_loss_forward": _index_loss,
    "_index_loss_backward": _index_loss_backward,
    "compute_scores": _compute_scores,
    "accumulate_non_topk": _accumulate_non_topk,
    "compute_and_select": _fused_layer,
    "subtract_topk": _subtract_topk,
    "select_accumulate": _fused_layer,
    "bottom_accumulate": _bottom_layer,
    "recompute_selection": _compute_scores,
    "gated_mlp": _gated_mlp,
    "_gated_mlp_forward": _gated_mlp,
    "gated_mlp_backward": _gated_mlp_backward,
    "_gated_mlp_saved_backward": _gated_mlp_saved_backward,
    "fp8_gemm": _gemm,
    "fp8_gemm_exact": _gemm,
    "kv_decode_attention": _kv_decode_attention,
    "_tree_cache_attention": _tree_cache_attention,
    "_tree_cache_prompt": _tree_cache_prompt,
    "_tree_cache_step_": _tree_cache_step,
}

COUNTER = "torch.utils.flop_counter"


def register() -> None:
    """Gives torch's counter the formulas."""
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    for name, formula in FORMULAS.items():
        packet = getattr(torch.ops.htree, name)
        if packet not in flop_registry:  # torch refuses a second registration
            register_flop_formula(packet)(formula)


class _BesideTheCounter(MetaPathFinder):
    """Calls :func:`register` as soon as somebody imports the counter.

    To import it here would load triton in every process: 50 MB and a tenth of a second, mostly for nobody.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == COUNTER else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            register()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if COUNTER in sys.modules:
    register()
else:
    sys.meta_path.insert(0, _BesideTheCounter())
