"""FLOP counts of the ops that multiply matrices, for ``torch.utils.flop_counter.FlopCounterMode``.

A product of sizes m, n and p counts 2mnp, as torch counts. Norms, rotations, softmax and transforms count nothing, as
in torch. Which nodes tree attention opens depends on the data. How many candidates a query has does not: it follows
from the query's position alone (docs/semantics/tree_attention.md §1.3), so these counts are exact. An op that sees one
layer or a caller's lists counts full lists, one that reads a cache counts a full cache, and one that takes packed
documents counts the longest ones. A formula gets the :class:`Call` of its op.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from math import prod
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from htree_ops.ops.tree_attention.options import TreeOptions
from htree_ops.ops.tree_cache.functions import cache_layers

Shape = Sequence[int]


class Call(SimpleNamespace):
    """The arguments of an op by their names in its schema, tensors as their shapes, and the shapes of ``results``."""

    @property
    def options(self) -> TreeOptions:
        """The packed ones."""
        return TreeOptions.from_packed(self.option_ints, self.option_floats)

    def changed(self, **arguments: Any) -> Call:
        """The same call with other arguments."""
        return Call(**vars(self) | arguments)


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
    depth = cache_layers(T, r, M)
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


def _products(dim: int, value_dim: int, mask: Sequence[bool]) -> int:
    """Of a pair in a backward: the score and dO·V again, and the wanted of dQ, dK and dV."""
    dq, dk, dv = mask[:3]
    if not (dq or dk or dv):
        return 0
    return 2 * dim * (1 + dq + dk) + 2 * value_dim * ((1 if dq or dk else 0) + dv)


def _gradient_work(
    q: Shape, k: Shape, v: Shape, has_lists: bool, mask: Sequence[bool], options: TreeOptions
) -> int:
    """The products of kept candidates; the selection where no list is."""
    scored, kept, selecting = _tree_work(q, k, options)
    again = 0 if has_lists or not any(mask) else scored - kept + selecting
    return kept * _products(k[3], v[3], mask) + 2 * k[3] * again


def _attention(c: Call) -> int:
    return _work(c.q, c.k, c.v, c.options)


def _attention_backward(c: Call) -> int:
    """Of a whole sequence or of rows; there are lists where they have an entry."""
    has_lists = len(c.parents) > 0 if hasattr(c, "parents") else c.lists[1] > 0
    return _gradient_work(c.q, c.k, c.v, has_lists, c.output_mask, c.options)


def _listed_attention(c: Call) -> int:
    """As many products of queries and keys as of weights and values: nothing is scored to be selected."""
    return 2 * (c.k[3] + c.v[3]) * _tree_work(c.q, c.k, c.options)[1]


def _pieces(of_piece: Callable[[Call], int]) -> Callable[[Call], int]:
    """Calls whose keys end with their queries, one for each start; layers above that open everything are left out."""

    def count(c: Call) -> int:
        length = c.q[1] // len(c.starts)
        q = (c.q[0], length, *c.q[2:])
        ends = [start + length for start in c.starts]
        return sum(of_piece(c.changed(q=q, k=_until(c.k, end), v=_until(c.v, end))) for end in ends)

    return count


def _until(keys: Shape, end: int) -> Shape:
    """The keys that the queries before token ``end`` can see."""
    return (keys[0], end, *keys[2:])


def _longest(of_batch: Callable[[Call], int]) -> Callable[[Call], int]:
    """All rows as documents of max_k tokens, the last max_q of them queries, each a batch of one.

    The lengths of the documents are no shapes, so this is the most that they can cost.
    """

    def count(c: Call) -> int:
        named = vars(c)
        of_queries, of_keys = ("query", "index_query"), ("key", "value", "index_key")
        rows_q, rows_k = (next(named[x][0] for x in names if named.get(x)) for names in (of_queries, of_keys))
        queries = max(1, min(c.max_q, rows_q))
        keys = max(queries, min(c.max_k, rows_k))
        one = {x: (1, queries, *named[x][1:]) for x in of_queries if named.get(x)}
        one |= {x: (1, keys, *named[x][1:]) for x in of_keys if named.get(x)}
        short = {x[0]: one[x] for x in ("query", "key", "value") if x in one}  # as batches call them
        return -(-rows_q // queries) * of_batch(c.changed(**one, **short, starts=[keys - queries]))

    return count


def _varlen(c: Call) -> int:
    return _attention(c) if c.index_query is None else _index_lists(c) + _listed_attention(c)


def _varlen_backward(c: Call) -> int:
    """There are lists where an index chooses them again."""
    has_index = c.index_query is not None
    lists = _index_lists(c) if has_index else 0
    return lists + _gradient_work(c.q, c.k, c.v, has_index, c.output_mask, c.options)


def _sparse_pairs(c: Call) -> int:
    """Queries of every head times the tokens of a full list, or all tokens where the list holds more."""
    return prod(c.query[:-1]) * min(c.blocks[-1] * c.block_size, c.key[-3])


def _sparse_attention(c: Call) -> int:
    """Of batches and of packed documents, whose lists are as long."""
    return 2 * _sparse_pairs(c) * (c.query[-1] + c.value[-1])


def _sparse_attention_backward(c: Call) -> int:
    return _sparse_pairs(c) * _products(c.query[-1], c.value[-1], c.output_mask)


def _select_blocks(c: Call) -> int:
    """Products of the queries that select with the keys of the blocks before their own."""
    B, T_q, H_i, d = c.index_query
    T = c.index_key[1]
    leaders = np.arange(T - T_q, T, c.selection_stride, dtype=np.int64)
    return 2 * B * H_i * d * int((leaders // c.block_size * c.block_size).sum())


def _index_lists(c: Call) -> int:
    """The products of :func:`_select_blocks` for every layer below the top of a query."""
    options, (B, rows, H_i, d) = c.options, c.index_query
    r, M = options.compression_rate, options.top_nodes
    depth = cache_layers(c.k[1], r, M)
    keys = 0
    for start in c.starts:
        end = start + rows // len(c.starts)
        leaders = np.arange(start, end, options.selection_stride, dtype=np.int64)
        tops = _own_tops(leaders, depth, r, M, options.top_k)
        for layer in range(1, depth):
            keys += int((leaders[tops >= layer] // r**layer * r**layer).sum())
    return 2 * B * H_i * d * keys


def _index_loss(c: Call) -> int:
    """Products of the queries at the positions with all tokens: which of them come before depends on the data."""
    rows = c.positions[-1] * (c.query[0] if len(c.query) == 4 else 1)
    return 2 * rows * c.query[-3] * (c.query[-2] * c.query[-1] + c.index_query[-2] * c.index_query[-1])


def _pairs(c: Call) -> int:
    """Queries of every head times the candidates of a full list."""
    return prod(c.q[:3]) * c.parents[3] * c.compression_rate


def _layer(c: Call) -> int:
    """The scores, and as many values."""
    return 2 * (c.q[3] + c.layer_v[3]) * _pairs(c)


def _gated_mlp(c: Call) -> int:
    return 4 * prod(c.x) * c.gate_weight[0]


def _gated_mlp_saved_backward(c: Call) -> int:
    dx, dgate, dup = c.output_mask
    return 2 * prod(c.x) * c.gate_weight[0] * (2 * dx + dgate + dup)


def _gated_mlp_backward(c: Call) -> int:
    both_again = _gated_mlp(c) if any(c.output_mask) else 0
    return both_again + _gated_mlp_saved_backward(c)


def _gemm(c: Call) -> int:
    return 2 * prod(c.a) * c.b[1]


def _kv_decode_attention(c: Call) -> int:
    rows = c.k_bitmap[2] * (1 if c.block_table is None else c.block_table[1]) + c.k_win[2]
    return 2 * prod(c.q[:-1]) * (c.q[-1] + c.v_win[3]) * rows


def _tree_cache_attention(c: Call) -> int:
    """Each query [N, H, K] as the last token of a full sequence, which selects for itself; an index multiplies all."""
    tokens = c.block_table[1] * c.page_size
    options = replace(c.options, selection_stride=1)
    k, v = ((1, tokens, 1, width) for width in (c.q[-1], c.results[0][-1]))
    of_index = 0 if c.index_query is None else 2 * prod(c.index_query) * tokens
    return prod(c.q[:-1]) * _work((1, 1, 1, c.q[-1]), k, v, options) + of_index


def _tree_cache_prompt(c: Call) -> int:
    """The last rows of sequences of ``length`` tokens."""
    k, v = ((c.q[0], c.length, pool[1], pool[3]) for pool in (c.k_pool, c.v_pool))
    return _work(c.q, k, v, c.options)


FORMULAS: dict[str, Callable[[Call], int]] = {
    "_attention": _attention,
    "_attention_lse": _attention,
    "_attention_forward": _attention,
    "_attention_backward": _attention_backward,
    "_attention_rows": _pieces(_attention),
    "_attention_rows_backward": _pieces(_attention_backward),
    "_attention_rows_backward_sums": _pieces(_attention_backward),
    "_attention_varlen": _longest(_varlen),
    "_attention_varlen_forward": _longest(_varlen),
    "_attention_varlen_backward": _longest(_varlen_backward),
    "_index_lists": _index_lists,
    "_listed_attention": _listed_attention,
    "_listed_attention_rows": _pieces(_listed_attention),
    "sparse_attention": _sparse_attention,
    "_sparse_attention_backward": _sparse_attention_backward,
    "sparse_attention_varlen": _sparse_attention,
    "_sparse_attention_varlen_backward": _sparse_attention_backward,
    "select_blocks": _select_blocks,
    "select_blocks_varlen": _longest(_select_blocks),
    "index_loss": _index_loss,
    "_index_loss_forward": _index_loss,
    # The products again. What a block gives to its one token counts as nothing beside them.
    "_index_loss_backward": lambda c: _index_loss(c) if any(c.output_mask) else 0,
    "compute_scores": lambda c: 2 * c.q[3] * _pairs(c),
    "accumulate_non_topk": lambda c: 2 * c.layer_v[3] * prod(c.scores),
    "compute_and_select": _layer,
    "subtract_topk": lambda c: 2 * c.layer_v[3] * prod(c.topk_indices),
    "select_accumulate": _layer,
    "bottom_accumulate": _layer,
    "recompute_selection": lambda c: 2 * c.q[3] * _pairs(c),
    "gated_mlp": _gated_mlp,
    "_gated_mlp_forward": _gated_mlp,
    "gated_mlp_backward": _gated_mlp_backward,
    "_gated_mlp_saved_backward": _gated_mlp_saved_backward,
    "fp8_gemm": _gemm,
    "fp8_gemm_exact": _gemm,
    "kv_decode_attention": _kv_decode_attention,
    "_tree_cache_attention": _tree_cache_attention,
    "_tree_cache_prompt": _tree_cache_prompt,
    "_tree_cache_step_": lambda c: 0 if c.q is None else _tree_cache_attention(c),
}

COUNTER = "torch.utils.flop_counter"


def _counts(packet: Any, formula: Callable[[Call], int]) -> Callable[..., int]:
    """``formula`` as torch calls it: with the arguments of the op, shapes in place of tensors."""
    declared = packet.default._schema.arguments

    def count(*arguments: Any, out_shape: Any = None, **named: Any) -> int:
        given = {x.name: x.default_value for x in declared} | dict(
            zip((x.name for x in declared), arguments, strict=False)
        )
        return formula(Call(**given | named, results=out_shape))

    return count


def register() -> None:
    """Gives torch's counter the formulas."""
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    for name, formula in FORMULAS.items():
        packet = getattr(torch.ops.htree, name)
        if packet not in flop_registry:  # torch refuses a second registration
            register_flop_formula(packet)(_counts(packet, formula))


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
