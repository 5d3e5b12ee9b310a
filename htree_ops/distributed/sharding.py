"""Rules by which DTensor shards the ops of this package (docs/distributed.md).

The interface, ``torch.distributed.tensor.experimental.register_sharding``, is experimental: torch may change it.
This is the one file that uses it.

A rule lists, for one dimension of a mesh, the placements under which every rank computes its part of the result from
its parts of the arguments. DTensor takes the cheapest one and moves tensors where they lie otherwise. No rule takes a
tensor that is a pending sum (``Partial``): DTensor adds it up first, because few of the formulas are linear. The one
exception is the gradient of a mean over the ranks, of which each gets its share. A gradient of a tensor that every rank
has whole is a pending sum, and so is a product whose inner dimension is sharded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement

#: Placements of results or of tensors, in the order of the op's schema; one for all.
Placed = Placement | Sequence[Placement | None]
#: From the arguments of a call the ways in which it can be shared: placements of its results and of its tensors. They
#: may go on behind the last one that an op has, so that ops which begin alike have one rule.
Rule = Callable[..., list[tuple[Placed, Placed]]]
_WHOLE = Replicate()


def _alike(ways: Callable[..., list[Placement]]) -> Rule:
    """All tensors and results of a call lie the same way."""
    return lambda *args: [(way, way) for way in ways(*args)]


def _size(spec: Any, dim: int) -> int:
    return int(spec.shape[dim])


# ---- tree attention


def _heads_divide(q: Any, k: Any, v: Any, dim: int) -> bool:
    """Whether ranks that shard the heads have whole groups: the same K/V heads as their query heads have.

    A group of query heads shares one selection, so it is never split. Allowed are meshes whose size divides the K/V
    heads, and meshes of several dimensions on which q, k and v already lie the same way, by batch and by heads alone.

    Args:
        dim: of the heads; the dimension of the batch is 0 where it is 2.
    """
    heads = _size(k, dim)
    if heads % k.mesh.size() == 0:
        return True
    same = q.placements == k.placements == v.placements
    allowed = (_WHOLE, Shard(dim), Shard(0)) if dim == 2 else (_WHOLE, Shard(dim))
    if not same or any(p not in allowed for p in k.placements):
        return False
    ranks = 1
    for place, placement in enumerate(k.placements):
        ranks *= k.mesh.size(place) if placement == Shard(dim) else 1
    return ranks > 1 and heads % ranks == 0


def _attention_ways(q: Any, k: Any, v: Any, *_: Any) -> list[Placement]:
    """Placements that q, k and v [B, T, heads, D] may have together."""
    return [_WHOLE, Shard(0), *([Shard(2)] if _heads_divide(q, k, v, 2) else [])]


def _index_lists(q: Any, k: Any, index_query: Any, *_: Any) -> list[tuple[Placed, Placed]]:
    """One index for all K/V heads lies on every rank."""
    found: list[tuple[Placed, Placed]] = []
    for way in _attention_ways(q, k, k):
        of_index = _WHOLE if way == Shard(2) and _size(index_query, 2) == 1 else way
        found.append((way, [way, way, of_index, of_index]))
    return found


# ---- tree attention of packed documents, whose offsets every rank has


def _varlen_ways(query: Any, key: Any, value: Any) -> list[Placement]:
    """Placements that query, key and value [N, heads, D] may have together."""
    return [_WHOLE, *([Shard(1)] if _heads_divide(query, key, value, 1) else [])]


def _attention_varlen(
    query: Any, key: Any, value: Any, index_query: Any, *_: Any
) -> list[tuple[Placed, Placed]]:
    """Of query, key, value, both of an index or None, both offsets, and in a backward results and gradients.

    One index for all K/V heads lies on every rank.
    """
    found: list[tuple[Placed, Placed]] = []
    for way in _varlen_ways(query, key, value):
        is_shared = way == Shard(1) and index_query is not None and _size(index_query, 1) == 1
        of_index = _WHOLE if is_shared else way
        found.append((way, [way, way, way, of_index, of_index, _WHOLE, _WHOLE, *[way] * 5]))
    return found


# ---- attention over lists


def _list_ways(
    dim: int, query: Any, key: Any, value: Any, blocks: Any
) -> list[tuple[Placement, Placement, Placement]]:
    """Placements of (query, key and value; blocks; sinks); the heads are dimension ``dim``, 2 in batches.

    One list for all K/V heads lies on every rank, and sinks lie as the heads do.
    """
    ways: list[tuple[Placement, Placement, Placement]] = [(_WHOLE, _WHOLE, _WHOLE)]
    if dim == 2:
        ways.append((Shard(0), Shard(0), _WHOLE))
    if _heads_divide(query, key, value, dim):
        ways.append((Shard(dim), Shard(dim) if _size(blocks, dim) > 1 else _WHOLE, Shard(0)))
    return ways


def _sparse_attention(dim: int) -> Rule:
    """Of (query, key, value, blocks, both offsets of documents, sinks or None, ...)."""
    offsets = [_WHOLE] * (0 if dim == 2 else 2)
    return lambda *args, **_: [
        (way, [way, way, way, lists, *offsets, of_sinks])
        for way, lists, of_sinks in _list_ways(dim, *args[:4])
    ]


def _sparse_attention_backward(dim: int) -> Rule:
    """Of (query, key, value, blocks, both offsets, out, lse, sinks or None, dout, dlse, ...)."""
    offsets = [_WHOLE] * (0 if dim == 2 else 2)

    def rule(*args: Any) -> list[tuple[Placed, Placed]]:
        found: list[tuple[Placed, Placed]] = []
        for way, lists, of_sinks in _list_ways(dim, *args[:4]):
            of_gradient = Partial() if dim == 2 and way == Shard(0) else of_sinks
            gradients = [way, way, way, None if args[6 + len(offsets)] is None else of_gradient]
            found.append((gradients, [way, way, way, lists, *offsets, way, way, of_sinks, way, way]))
        return found

    return rule


# ---- selection of blocks, for which each index head stands alone


def _select_blocks_varlen(index_query: Any, index_key: Any, *_: Any) -> list[tuple[Placed, Placed]]:
    ways = _varlen_ways(index_query, index_key, index_key)
    return [(way, [way, way, _WHOLE, _WHOLE]) for way in ways]


# ---- the loss of an index, a mean over sequences and index heads


def _loss_ways(query: Any, key: Any, _: Any, index_key: Any, positions: Any) -> list[Placement]:
    """Placements that query, key and both tensors of the index may have together; positions are whole on every rank.

    The mean of the ranks' means is that of all where they have as many terms. One index for all K/V heads is compared
    with the mean of all of them. Positions of each sequence may be left out in one and not in another.
    """
    batched = len(query.shape) == 4
    ways: list[Placement] = [_WHOLE]
    if batched and len(positions.shape) == 1 and _size(query, 0) % query.mesh.size() == 0:
        ways.append(Shard(0))
    heads = 2 if batched else 1
    if _size(index_key, heads) == _size(key, heads) and _heads_divide(query, key, index_key, heads):
        ways.append(Shard(heads))
    return ways


def _of_states(way: Placement) -> Placement:
    """Placement of lse [B, rows, heads], in which documents have a batch of one."""
    return Shard(2) if way == Shard(1) else way


def _index_loss(*args: Any, **_: Any) -> list[tuple[Placed, Placed]]:
    """Of (query, key, index_query, index_key, positions, offsets or None); behind the loss two lse."""
    return [
        (
            [way if way == _WHOLE else Partial("avg"), _of_states(way), _of_states(way)],
            [way, way, way, way, _WHOLE, _WHOLE],
        )
        for way in _loss_ways(*args[:5])
    ]


def _index_loss_backward(*args: Any) -> list[tuple[Placed, Placed]]:
    """Of (query, key, index_query, index_key, positions, both lse, dloss, offsets or None, ...)."""
    found: list[tuple[Placed, Placed]] = []
    for way in _loss_ways(*args[:5]):
        # Of n ranks each has 1/n of the gradient of their mean.
        of_loss = _WHOLE if way == _WHOLE else Partial()
        states = [_of_states(way)] * 2
        found.append((way, [way, way, way, way, _WHOLE, *states, of_loss, _WHOLE]))
    return found


# ---- norms and rotary positions


def _table_of(way: Placement, x: Any, table: Any) -> Placement | None:
    """Placement of cos or sin beside x [B, S, ...], None where a rank could not find the rows of its tokens."""
    has_batch = len(table.shape) > 2
    if way == Shard(0) and has_batch and _size(table, 0) > 1:
        return Shard(0)
    if way != Shard(1):
        return _WHOLE
    dim = 1 if has_batch else 0
    return Shard(dim) if _size(table, dim) == _size(x, 1) else None


def _norm_ways(x: Any, cos: Any, sin: Any) -> list[tuple[Placement, Placement, Placement]]:
    """Placements of (x, cos, sin): rows and, where each head has a norm of its own, heads."""
    ways = [_WHOLE, Shard(0), Shard(1), *([Shard(2)] if len(x.shape) == 4 else [])]
    tables = [(_table_of(way, x, cos), _table_of(way, x, sin)) for way in ways]
    return [(way, c, s) for way, (c, s) in zip(ways, tables, strict=True) if c is not None and s is not None]


def _norm(x: Any, weight: Any, cos: Any, sin: Any, *_: Any) -> list[tuple[Placed, Placed]]:
    return [(way, [way, _WHOLE, c, s]) for way, c, s in _norm_ways(x, cos, sin)]


def _norm_backward(dy: Any, x: Any, weight: Any, cos: Any, sin: Any, *_: Any) -> list[tuple[Placed, Placed]]:
    return [
        ([way, _WHOLE if way == _WHOLE else Partial()], [way, way, _WHOLE, c, s])
        for way, c, s in _norm_ways(x, cos, sin)
    ]


def _rope(x: Any, cos: Any, sin: Any, positions: Any, *_: Any) -> list[tuple[Placed, Placed]]:
    """Every rank has the whole table, and the positions of its rows: those of a token, or of one of a sequence."""
    tokens = len(positions.shape) - 1
    ways: list[tuple[Placement, Placement]] = [
        (_WHOLE, _WHOLE),
        (Shard(0), Shard(0) if tokens else _WHOLE),
        (Shard(1), Shard(tokens)),
        (Shard(2), _WHOLE),
    ]
    return [(way, [way, _WHOLE, _WHOLE, placed]) for way, placed in ways]


# ---- row-wise functions


def _row_ways(x: Any, kept: int = 1) -> list[Placement]:
    """Every dimension of x but the last ``kept``."""
    return [Shard(dim) for dim in range(len(x.shape) - kept)]


def _rows(kept: int) -> Rule:
    """Of ops that work within the last ``kept`` dimensions of their tensors, all of one shape."""
    return _alike(lambda x, *_: [_WHOLE, *_row_ways(x, kept)])


def _hadamard_ways(x: Any, group: int, *_: Any) -> list[Placement]:
    is_whole = _size(x, 1) % (group * x.mesh.size()) == 0  # every rank gets whole groups of heads
    return [_WHOLE, Shard(0), Shard(2), *([Shard(1)] if is_whole else [])]


# ---- gated MLP


def _gated_mlp(x: Any, *_: Any) -> list[tuple[Placed, Placed]]:
    columns = Shard(len(x.shape) - 1)
    by_rows: list[tuple[Placed, Placed]] = [(way, [way, _WHOLE, _WHOLE]) for way in [_WHOLE, *_row_ways(x)]]
    return [*by_rows, (columns, [_WHOLE, Shard(0), Shard(0)])]


def _gated_mlp_backward(saved: int) -> Rule:
    """Of (dy, what was saved, x, gate_weight, up_weight, ...)."""

    def rule(*args: Any) -> list[tuple[Placed, Placed]]:
        x = args[1 + saved]
        columns = Shard(len(x.shape) - 1)
        return [
            (_WHOLE, _WHOLE),
            *(([way, Partial(), Partial()], [way] * (saved + 2) + [_WHOLE, _WHOLE]) for way in _row_ways(x)),
            ([Partial(), Shard(0), Shard(0)], [columns] * (saved + 1) + [_WHOLE, Shard(0), Shard(0)]),
        ]

    return rule


# ---- FP8


def _scale_ways(x: Any, scale: Any, granularity: str, dim: int) -> list[tuple[Placement, Placement]]:
    """Placements of x and of its scale. Blocks may be cut anywhere but at their ends, so they are not sharded."""
    ways: list[tuple[Placement, Placement]] = [(_WHOLE, _WHOLE)]
    if granularity == "channel":
        along = dim % len(x.shape)
        ways += [(Shard(d), Shard(d)) for d in range(len(x.shape)) if d != along]
    elif granularity == "tensor" and scale is not None:  # the maximum of the whole is not that of a part
        ways += [(way, _WHOLE) for way in _row_ways(x, 0)]
    return ways


def _fp8_compute_scale(
    x: Any, granularity: str = "tensor", dim: int = -1, *_: Any
) -> list[tuple[Placed, Placed]]:
    return [(scale, way) for way, scale in _scale_ways(x, None, granularity, dim)]


def _fp8_quantize(
    x: Any, scale: Any = None, granularity: str = "tensor", dim: int = -1, *_: Any
) -> list[tuple[Placed, Placed]]:
    """The results of ``fp8_quantize``, of which ``fp8_fake_quant`` has the first: codes, scale, number of overflows."""
    return [
        ([way, of_scale, _WHOLE if way == _WHOLE else Partial()], [way, of_scale])
        for way, of_scale in _scale_ways(x, scale, granularity, dim)
    ]


def _fp8_dequantize(q: Any, scale: Any, *_: Any) -> list[tuple[Placed, Placed]]:
    """A scale of no dimension belongs to all codes; another one spans the dimension in which it is shorter."""
    ways = _row_ways(q, 0)
    if len(scale.shape):
        same = [way for d, way in enumerate(ways) if _size(scale, d) == _size(q, d)]
        return [(way, way) for way in [_WHOLE, *same]]
    return [(way, [way, _WHOLE]) for way in [_WHOLE, *ways]]


def _fp8_fake_quant_backward(
    dy: Any, x: Any, scale: Any, granularity: str = "tensor", dim: int = -1, *_: Any
) -> list[tuple[Placed, Placed]]:
    return [(way, [way, way, of_scale]) for way, of_scale in _scale_ways(x, scale, granularity, dim)]


def _fp8_gemm(a: Any, b: Any, a_scale: Any, b_scale: Any, *_: Any) -> list[tuple[Placed, Placed]]:
    rows = Shard(0) if len(a_scale.shape) == 2 and _size(a_scale, 0) > 1 else _WHOLE
    columns = Shard(1) if len(b_scale.shape) == 2 and _size(b_scale, 1) > 1 else _WHOLE
    ways: list[tuple[Placed, Placed]] = [
        (_WHOLE, _WHOLE),
        (Shard(0), [Shard(0), _WHOLE, rows, _WHOLE]),
        (Shard(1), [_WHOLE, Shard(1), _WHOLE, columns]),
    ]
    # FP8 tensor cores take multiples of 16; each part of the sum is rounded to the output's dtype.
    if _size(a, 1) % (16 * a.mesh.size()) == 0:
        ways.append((Partial(), [Shard(1), Shard(0), _WHOLE, _WHOLE]))
    return ways


RULES: dict[str, Rule] = {
    "_attention": _alike(_attention_ways),
    "_attention_lse": _alike(_attention_ways),
    "_attention_rows": _alike(_attention_ways),
    "_attention_rows_backward": _alike(_attention_ways),
    "_attention_rows_backward_sums": _alike(_attention_ways),
    "_attention_varlen": _attention_varlen,
    "_attention_varlen_forward": _attention_varlen,
    "_attention_varlen_backward": _attention_varlen,
    "_index_lists": _index_lists,
    "_listed_attention": _alike(_attention_ways),
    "_listed_attention_rows": _alike(_attention_ways),
    "sparse_attention": _sparse_attention(2),
    "_sparse_attention_backward": _sparse_attention_backward(2),
    "sparse_attention_varlen": _sparse_attention(1),
    "_sparse_attention_varlen_backward": _sparse_attention_backward(1),
    "select_blocks": _alike(lambda query, key, *_: _attention_ways(query, key, key)),
    "select_blocks_varlen": _select_blocks_varlen,
    "index_loss": _index_loss,
    "_index_loss_forward": _index_loss,
    "_index_loss_backward": _index_loss_backward,
    "rope": _rope,
    "rmsnorm_rope": _norm,
    "rmsnorm_rope_backward": _norm_backward,
    "head_rmsnorm_rope": _norm,
    "head_rmsnorm_rope_backward": _norm_backward,
    "gated_mlp": _gated_mlp,
    "_gated_mlp_forward": _gated_mlp,
    "gated_mlp_backward": _gated_mlp_backward(0),
    "_gated_mlp_saved_backward": _gated_mlp_backward(2),
    "fp8_compute_scale": _fp8_compute_scale,
    "fp8_quantize": _fp8_quantize,
    "fp8_dequantize": _fp8_dequantize,
    "fp8_fake_quant": _fp8_quantize,
    "_fp8_fake_quant_backward": _fp8_fake_quant_backward,
    "fp8_gemm": _fp8_gemm,
    "fp8_gemm_exact": _fp8_gemm,
    "hadamard_transform": _rows(1),
    "grouped_hadamard": _alike(_hadamard_ways),
    "causal_softmax": _rows(2),
    "causal_softmax_backward": _rows(2),
}


def ways_of(
    name: str, *args: Any, **named: Any
) -> list[tuple[list[Placement | None], list[Placement | None]]]:
    """The ways of a call as DTensor wants them: a placement, or None, for each result and each argument.

    None is what is no tensor, a tensor that is not given, and a gradient that ``output_mask`` does not want.
    """
    schema = getattr(torch.ops.htree, name).default._schema
    wanted: Sequence[bool] = [True] * len(schema.returns)
    for place, argument in enumerate(schema.arguments):
        if argument.name == "output_mask":  # the dispatcher leaves out what has its default value
            wanted = args[place] if place < len(args) else argument.default_value
    tensors = [i for i, argument in enumerate(schema.arguments) if "Tensor" in str(argument.type)]
    found = []
    for results, given in RULES[name](*args, **named):
        results = [results] * len(wanted) if isinstance(results, Placement) else results
        given = [given] * len(tensors) if isinstance(given, Placement) else given
        places = dict(zip(tensors, given, strict=False))
        found.append(
            (
                [place if is_wanted else None for place, is_wanted in zip(results, wanted, strict=False)],
                [None if x is None else places.get(i) for i, x in enumerate(args)],
            )
        )
    return found


def register() -> None:
    """Gives DTensor the rule of every op in :data:`RULES`; done when ``htree_ops.distributed`` is imported."""
    known = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    for name in RULES:
        op = getattr(torch.ops.htree, name).default
        register_sharding(op)(functools.partial(ways_of, name))
        # DTensor remembers a decision by the arguments from the first int on. Ours follow from all behind the tensors:
        # output_mask, for one, says which gradients there are.
        others = (i for i, argument in enumerate(op._schema.arguments) if str(argument.type) != "Tensor")
        known[op].static_argnum = next(others, len(op._schema.arguments))
