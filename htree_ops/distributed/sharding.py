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

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement

#: Placements of the outputs and of the arguments; None for what is no tensor.
Rule = tuple[list[Placement | None], list[Placement | None]]
_WHOLE = Replicate()


def _rule(outputs: Sequence[Placement | None], tensors: Sequence[Placement | None], arguments: int) -> Rule:
    """``tensors`` come first among the ``arguments`` of a call."""
    return list(outputs), [*tensors, *[None] * (arguments - len(tensors))]


def _wanted(outputs: Sequence[Placement], mask: Sequence[bool]) -> list[Placement | None]:
    """The placements of gradients, None for one that is not computed."""
    return [placement if wanted else None for placement, wanted in zip(outputs, mask, strict=True)]


def _given(tensors: Sequence[Placement | None], args: tuple[Any, ...]) -> list[Placement | None]:
    """The placements of those of the first ``args`` that are there; a gradient may be None."""
    return [place if x is not None else None for place, x in zip(tensors, args, strict=False)]


def _mask(args: tuple[Any, ...], place: int, size: int) -> Sequence[bool]:
    """The ``output_mask`` of a call; the dispatcher leaves out what has its default value."""
    return args[place] if len(args) > place else (True,) * size


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


def _attention_ways(q: Any, k: Any, v: Any) -> list[Placement]:
    """Placements that q, k and v [B, T, heads, D] may have together."""
    return [_WHOLE, Shard(0), *([Shard(2)] if _heads_divide(q, k, v, 2) else [])]


def _attention(outputs: int, tensors: int = 3) -> Callable[..., list[Rule]]:
    """Of ops on q, k, v and, where ``tensors`` is 4, lists. All outputs have the batch first and the heads third."""

    def rules(*args: Any) -> list[Rule]:
        ways = _attention_ways(*args[:3])
        return [_rule([way] * outputs, [way] * tensors, len(args)) for way in ways]

    return rules


def _index_lists(q: Any, k: Any, index_query: Any, index_key: Any, *options: Any) -> list[Rule]:
    """One index for all K/V heads lies on every rank."""
    rules = []
    for way in _attention_ways(q, k, k):
        of_index = _WHOLE if way == Shard(2) and _size(index_query, 2) == 1 else way
        rules.append(_rule([way], [way, way, of_index, of_index], 4 + len(options)))
    return rules


def _attention_rows_backward(*args: Any) -> list[Rule]:
    """Of (q, k, v, out, gmax, gsum, lists, dout or None, dlse or None, starts, output_mask, ...)."""
    return [
        _rule(_wanted([way] * 3, args[10]), _given([way] * 9, args), len(args))
        for way in _attention_ways(*args[:3])
    ]


# ---- tree attention of packed documents, whose offsets every rank has


def _varlen_ways(query: Any, key: Any, value: Any) -> list[Placement]:
    """Placements that query, key and value [N, heads, D] may have together."""
    return [_WHOLE, *([Shard(1)] if _heads_divide(query, key, value, 1) else [])]


def _packed_ways(args: tuple[Any, ...]) -> list[tuple[Placement, list[Placement]]]:
    """Placements of query, and of (query, key, value, both of an index or None, both offsets).

    One index for all K/V heads lies on every rank.
    """
    ways = []
    for way in _varlen_ways(*args[:3]):
        of_index = _WHOLE if way == Shard(1) and args[3] is not None and _size(args[3], 1) == 1 else way
        ways.append((way, [*[way] * 3, of_index, of_index, _WHOLE, _WHOLE]))
    return ways


def _attention_varlen(outputs: int) -> Callable[..., list[Rule]]:
    def rules(*args: Any) -> list[Rule]:
        return [_rule([way] * outputs, _given(places, args), len(args)) for way, places in _packed_ways(args)]

    return rules


def _attention_varlen_backward(*args: Any) -> list[Rule]:
    """Of (..., max_q, max_k, out, gmax, gsum, dout, dlse, grouping, output_mask, ...)."""
    rules = []
    for way, places in _packed_ways(args):
        tensors = _given([*places, None, None, *[way] * 5], args)
        rules.append(_rule(_wanted([way] * 3, args[15]), tensors, len(args)))
    return rules


# ---- attention over lists


def _list_ways(args: tuple[Any, ...], dim: int) -> list[tuple[Placement, Placement, Placement]]:
    """Placements of (query, key and value; blocks; sinks); the heads are dimension ``dim``, 2 in batches.

    One list for all K/V heads lies on every rank, and sinks lie as the heads do.
    """
    query, key, value, blocks = args[:4]
    ways: list[tuple[Placement, Placement, Placement]] = [(_WHOLE, _WHOLE, _WHOLE)]
    if dim == 2:
        ways.append((Shard(0), Shard(0), _WHOLE))
    if _heads_divide(query, key, value, dim):
        ways.append((Shard(dim), Shard(dim) if _size(blocks, dim) > 1 else _WHOLE, Shard(0)))
    return ways


def _sparse_attention(dim: int) -> Callable[..., list[Rule]]:
    """Of (query, key, value, blocks, both offsets of documents, sinks or None, ...)."""
    offsets = [_WHOLE] * (0 if dim == 2 else 2)

    def rules(*args: Any, **_: Any) -> list[Rule]:
        return [
            _rule([way] * 2, _given([*[way] * 3, lists, *offsets, of_sinks], args), len(args))
            for way, lists, of_sinks in _list_ways(args, dim)
        ]

    return rules


def _sparse_attention_backward(dim: int) -> Callable[..., list[Rule]]:
    """Of (query, key, value, blocks, both offsets, out, lse, sinks, dout, dlse, both bounds, ..., output_mask)."""
    offsets = [_WHOLE] * (0 if dim == 2 else 2)
    of_mask = 12 + 2 * len(offsets)

    def rules(*args: Any, **_: Any) -> list[Rule]:
        found = []
        dq, dk, dv, dsinks = _mask(args, of_mask, 4)
        for way, lists, of_sinks in _list_ways(args, dim):
            tensors = [*[way] * 3, lists, *offsets, way, way, of_sinks, way, way]
            of_gradient = Partial() if dim == 2 and way == Shard(0) else of_sinks
            wanted = (dq, dk, dv, dsinks and args[6 + len(offsets)] is not None)
            found.append(_rule(_wanted([*[way] * 3, of_gradient], wanted), _given(tensors, args), len(args)))
        return found

    return rules


# ---- selection of blocks, for which each index head stands alone


def _select_blocks(index_query: Any, index_key: Any, *options: Any) -> list[Rule]:
    ways = _attention_ways(index_query, index_key, index_key)
    return [_rule([way] * 2, [way] * 2, 2 + len(options)) for way in ways]


def _select_blocks_varlen(index_query: Any, index_key: Any, *args: Any) -> list[Rule]:
    ways = _varlen_ways(index_query, index_key, index_key)
    return [_rule([way] * 2, [way] * 2 + [_WHOLE] * 2, 2 + len(args)) for way in ways]


# ---- the loss of an index, a mean over sequences and index heads


def _loss_ways(args: tuple[Any, ...]) -> list[Placement]:
    """Placements that query, key and both tensors of the index may have together; positions are whole on every rank.

    The mean of the ranks' means is that of all where they have as many terms. One index for all K/V heads is compared
    with the mean of all of them. Positions of each sequence may be left out in one and not in another.
    """
    query, key, _, index_key, positions = args[:5]
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


def _index_loss(states: int) -> Callable[..., list[Rule]]:
    """Of (query, key, index_query, index_key, positions, offsets or None); the results end with so many lse."""

    def rules(*args: Any, **_: Any) -> list[Rule]:
        return [
            _rule(
                [_mean(way), *[_of_states(way)] * states],
                _given([*[way] * 4, _WHOLE, _WHOLE], args),
                len(args),
            )
            for way in _loss_ways(args)
        ]

    return rules


def _index_loss_backward(*args: Any) -> list[Rule]:
    """Of (query, key, index_query, index_key, positions, both lse, dloss, offsets or None, ..., output_mask)."""
    rules = []
    mask = _mask(args, 11, 2)
    for way in _loss_ways(args):
        of_loss = (
            _WHOLE if way == _WHOLE else Partial()
        )  # of n ranks each has 1/n of the gradient of their mean
        tensors = [*[way] * 4, _WHOLE, *[_of_states(way)] * 2, of_loss, _WHOLE]
        rules.append(_rule(_wanted([way] * 2, mask), _given(tensors, args), len(args)))
    return rules


def _mean(way: Placement) -> Placement:
    """Placement of a mean over terms that lie so."""
    return way if way == _WHOLE else Partial("avg")


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


def _norm(x: Any, weight: Any, cos: Any, sin: Any, *options: Any) -> list[Rule]:
    return [_rule([way], [way, _WHOLE, c, s], 4 + len(options)) for way, c, s in _norm_ways(x, cos, sin)]


def _norm_backward(mask_place: int) -> Callable[..., list[Rule]]:
    def rules(dy: Any, x: Any, weight: Any, cos: Any, sin: Any, *options: Any) -> list[Rule]:
        args = (dy, x, weight, cos, sin, *options)
        mask = _mask(args, mask_place, 2)
        return [
            _rule(
                _wanted([way, _WHOLE if way == _WHOLE else Partial()], mask),
                [way, way, _WHOLE, c, s],
                len(args),
            )
            for way, c, s in _norm_ways(x, cos, sin)
        ]

    return rules


def _rope(x: Any, cos: Any, sin: Any, positions: Any, *options: Any) -> list[Rule]:
    """Every rank has the whole table, and the positions of its rows: those of a token, or of one of a sequence."""
    tokens = len(positions.shape) - 1
    ways: list[tuple[Placement, Placement]] = [
        (_WHOLE, _WHOLE),
        (Shard(0), Shard(0) if tokens else _WHOLE),
        (Shard(1), Shard(tokens)),
        (Shard(2), _WHOLE),
    ]
    return [_rule([way], [way, _WHOLE, _WHOLE, placed], 4 + len(options)) for way, placed in ways]


# ---- gated MLP


def _row_ways(x: Any) -> list[Placement]:
    """Every dimension of x [..., n] but the last."""
    return [Shard(dim) for dim in range(len(x.shape) - 1)]


def _gated_mlp(outputs: int) -> Callable[..., list[Rule]]:
    def rules(x: Any, gate_weight: Any, up_weight: Any, *options: Any) -> list[Rule]:
        arguments = 3 + len(options)
        columns = Shard(len(x.shape) - 1)
        return [
            *(_rule([way] * outputs, [way, _WHOLE, _WHOLE], arguments) for way in [_WHOLE, *_row_ways(x)]),
            _rule([columns] * outputs, [_WHOLE, Shard(0), Shard(0)], arguments),
        ]

    return rules


def _gated_mlp_backward(saved: int) -> Callable[..., list[Rule]]:
    """Of (dy, what was saved, x, gate_weight, up_weight, ...)."""

    def rules(*args: Any) -> list[Rule]:
        x = args[1 + saved]
        mask = _mask(args, saved + 6, 3)
        columns = Shard(len(x.shape) - 1)
        ways: list[tuple[list[Placement], list[Placement]]] = [([_WHOLE] * 3, [_WHOLE] * (saved + 4))]
        ways += [
            ([way, Partial(), Partial()], [way] * (saved + 2) + [_WHOLE, _WHOLE]) for way in _row_ways(x)
        ]
        ways += [([Partial(), Shard(0), Shard(0)], [columns] * (saved + 1) + [_WHOLE, Shard(0), Shard(0)])]
        return [_rule(_wanted(gradients, mask), tensors, len(args)) for gradients, tensors in ways]

    return rules


# ---- FP8


def _option(args: tuple[Any, ...], place: int, default: Any) -> Any:
    return args[place] if len(args) > place else default


def _scale_ways(x: Any, scale: Any, granularity: str, dim: int) -> list[tuple[Placement, Placement]]:
    """Placements of x and of its scale. Blocks may be cut anywhere but at their ends, so they are not sharded."""
    ways: list[tuple[Placement, Placement]] = [(_WHOLE, _WHOLE)]
    if granularity == "channel":
        along = dim % len(x.shape)
        ways += [(Shard(d), Shard(d)) for d in range(len(x.shape)) if d != along]
    elif granularity == "tensor" and scale is not None:  # the maximum of the whole is not that of a part
        ways += [(Shard(d), _WHOLE) for d in range(len(x.shape))]
    return ways


def _fp8_compute_scale(x: Any, *options: Any) -> list[Rule]:
    ways = _scale_ways(x, None, _option(options, 0, "tensor"), _option(options, 1, -1))
    return [_rule([scale], [way], 1 + len(options)) for way, scale in ways]


def _quantized(outputs: Callable[[Placement, Placement], list[Placement]]) -> Callable[..., list[Rule]]:
    """Of (x, scale or None, granularity, dim, block)."""

    def rules(x: Any, *args: Any) -> list[Rule]:
        given = _option(args, 0, None)
        ways = _scale_ways(x, given, _option(args, 1, "tensor"), _option(args, 2, -1))
        return [
            _rule(outputs(way, scale), [way, *([scale] if given is not None else [])], 1 + len(args))
            for way, scale in ways
        ]

    return rules


def _fp8_dequantize(q: Any, scale: Any, *options: Any) -> list[Rule]:
    """A scale of no dimension belongs to all codes; another one spans the dimension in which it is shorter."""
    ways: list[tuple[Placement, Placement]] = [(_WHOLE, _WHOLE)]
    if len(scale.shape):
        ways += [(Shard(d), Shard(d)) for d in range(len(q.shape)) if _size(scale, d) == _size(q, d)]
    else:
        ways += [(Shard(d), _WHOLE) for d in range(len(q.shape))]
    return [_rule([way], [way, placed], 2 + len(options)) for way, placed in ways]


def _fp8_fake_quant_backward(dy: Any, x: Any, scale: Any, *options: Any) -> list[Rule]:
    ways = _scale_ways(x, scale, _option(options, 0, "tensor"), _option(options, 1, -1))
    return [_rule([way], [way, way, scale_way], 3 + len(options)) for way, scale_way in ways]


def _fp8_gemm(a: Any, b: Any, a_scale: Any, b_scale: Any, *options: Any) -> list[Rule]:
    arguments = 4 + len(options)
    rows = Shard(0) if len(a_scale.shape) == 2 and _size(a_scale, 0) > 1 else _WHOLE
    columns = Shard(1) if len(b_scale.shape) == 2 and _size(b_scale, 1) > 1 else _WHOLE
    ways = [
        _rule([_WHOLE], [_WHOLE] * 4, arguments),
        _rule([Shard(0)], [Shard(0), _WHOLE, rows, _WHOLE], arguments),
        _rule([Shard(1)], [_WHOLE, Shard(1), _WHOLE, columns], arguments),
    ]
    # FP8 tensor cores take multiples of 16; each part of the sum is rounded to the output's dtype.
    if _size(a, 1) % (16 * a.mesh.size()) == 0:
        ways.append(_rule([Partial()], [Shard(1), Shard(0), _WHOLE, _WHOLE], arguments))
    return ways


# ---- row-wise functions


def _rows(kept: int, tensors: int = 1) -> Callable[..., list[Rule]]:
    """Of ops that work within the last ``kept`` dimensions of their first ``tensors`` arguments, all of one shape."""

    def rules(x: Any, *args: Any) -> list[Rule]:
        ways = [_WHOLE, *(Shard(dim) for dim in range(len(x.shape) - kept))]
        return [_rule([way], [way] * tensors, 1 + len(args)) for way in ways]

    return rules


def _grouped_hadamard(x: Any, group: int, *options: Any) -> list[Rule]:
    ways = [_WHOLE, Shard(0), Shard(2)]
    if _size(x, 1) % (group * x.mesh.size()) == 0:  # whole groups of heads on every rank
        ways.append(Shard(1))
    return [_rule([way], [way], 2 + len(options)) for way in ways]


#: The rule of each op, and the place of its first argument that is no tensor.
RULES: dict[str, tuple[Callable[..., list[Rule]], int]] = {
    "_attention": (_attention(1), 3),
    "_attention_lse": (_attention(2), 3),
    "_attention_rows": (_attention(4), 3),
    "_attention_rows_backward": (_attention_rows_backward, 9),
    "_attention_rows_backward_sums": (_attention_rows_backward, 9),
    "_attention_varlen": (_attention_varlen(2), 7),
    "_attention_varlen_forward": (_attention_varlen(3), 7),
    "_attention_varlen_backward": (_attention_varlen_backward, 7),
    "_index_lists": (_index_lists, 4),
    "_listed_attention": (_attention(2, tensors=4), 4),
    "_listed_attention_rows": (_attention(3, tensors=4), 4),
    "sparse_attention": (_sparse_attention(2), 5),
    "_sparse_attention_backward": (_sparse_attention_backward(2), 9),
    "sparse_attention_varlen": (_sparse_attention(1), 7),
    "_sparse_attention_varlen_backward": (_sparse_attention_backward(1), 11),
    "select_blocks": (_select_blocks, 2),
    "select_blocks_varlen": (_select_blocks_varlen, 4),
    "index_loss": (_index_loss(0), 6),
    "_index_loss_forward": (_index_loss(2), 6),
    "_index_loss_backward": (_index_loss_backward, 9),
    "rope": (_rope, 4),
    "rmsnorm_rope": (_norm, 4),
    "rmsnorm_rope_backward": (_norm_backward(7), 5),
    "head_rmsnorm_rope": (_norm, 4),
    "head_rmsnorm_rope_backward": (_norm_backward(6), 5),
    "gated_mlp": (_gated_mlp(1), 3),
    "_gated_mlp_forward": (_gated_mlp(3), 3),
    "gated_mlp_backward": (_gated_mlp_backward(0), 4),
    "_gated_mlp_saved_backward": (_gated_mlp_backward(2), 6),
    "fp8_compute_scale": (_fp8_compute_scale, 1),
    "fp8_quantize": (_quantized(lambda way, scale: [way, scale, _WHOLE if way == _WHOLE else Partial()]), 1),
    "fp8_dequantize": (_fp8_dequantize, 2),
    "fp8_fake_quant": (_quantized(lambda way, scale: [way]), 1),
    "_fp8_fake_quant_backward": (_fp8_fake_quant_backward, 3),
    "fp8_gemm": (_fp8_gemm, 4),
    "fp8_gemm_exact": (_fp8_gemm, 4),
    "hadamard_transform": (_rows(1), 1),
    "grouped_hadamard": (_grouped_hadamard, 1),
    "causal_softmax": (_rows(2), 1),
    "causal_softmax_backward": (_rows(2, tensors=2), 2),
}


def register() -> None:
    """Gives DTensor the rule of every op in :data:`RULES`; done when ``htree_ops.distributed`` is imported."""
    known = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    for name, (rules, tensors) in RULES.items():
        op = getattr(torch.ops.htree, name).default
        register_sharding(op)(rules)
        # DTensor remembers a decision by the arguments from the first int on. Ours follow from all behind the tensors:
        # output_mask, for one, says which gradients there are.
        known[op].static_argnum = tensors
