"""Tree attention over packed documents whose tokens lie on several ranks (docs/distributed.md)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName
from torch.utils._python_dispatch import _disable_current_modes
from typing_extensions import Unpack

from htree_ops.distributed.collectives import (
    added,
    agreement,
    all_gather,
    check_local,
    cut,
    exchange,
    group_of,
    join,
    kind_of,
    parts_of,
    parts_per_rank,
    waited,
)
from htree_ops.distributed.context_parallel import (
    facts_of,
    kind_of_index,
    of_groups,
    repeated,
    under_autocast,
)
from htree_ops.errors import DeviceError
from htree_ops.ops.arguments import (
    check_dtype,
    check_kind,
    check_tensor,
    check_tensors,
    refuse_shape,
    validate_arguments_as,
)
from htree_ops.ops.tree_attention.attention import Balance, Index, check_balance, options_of_call
from htree_ops.ops.tree_attention.options import TreeKeywords, TreeOptions

# ---- which documents a rank works on. A document inside one part needs nothing of another rank.


class Whole(NamedTuple):
    """Neighbouring documents that lie in one part of a rank."""

    row: int  # of the rank, where the first one begins
    offsets: tuple[int, ...]  # of the documents, from there


class Piece(NamedTuple):
    """What a rank has of a document that lies in several parts: ``length`` rows in one place or in several."""

    rows: tuple[int, ...]  # of the rank, where each place begins
    starts: tuple[int, ...]  # tokens of the document before each place
    length: int
    begin: int  # the document in the packed sequence
    end: int


class Share(NamedTuple):
    """The work of a rank."""

    whole: tuple[Whole, ...]
    pieces: tuple[Piece, ...]
    crosses: bool  # whether any rank has a piece


def _crossing(offsets: Sequence[int], length: int) -> list[int]:
    """The documents that lie in several parts of ``length`` tokens."""
    borders = range(length, offsets[-1], length) if length else ()
    found = dict.fromkeys(bisect_right(offsets, border) - 1 for border in borders)
    return [i for i in found if (offsets[i] // length) != (offsets[i + 1] - 1) // length]


def share_of(offsets: Sequence[int], length: int, parts: Sequence[int], stride: int) -> Share:
    """The work of the rank that has these ``parts`` of ``length`` tokens, one behind the other."""
    whole: list[Whole] = []
    pieces: dict[tuple[int, int, int], Piece] = {}
    for place, part in enumerate(parts):
        low, high = part * length, (part + 1) * length
        inside: list[int] = []
        for i in range(max(0, bisect_right(offsets, low) - 1), len(offsets) - 1):
            begin, end = offsets[i], offsets[i + 1]
            if begin >= high:
                break
            if begin == end or end <= low:
                continue
            if low <= begin and end <= high:
                inside += [end] if inside else [begin, end]
                continue
            first, last = max(begin, low), min(end, high)
            row = first - low + place * length
            # The tree is built once for places of one length, which the two parts inside a long document have.
            key = (begin, end, last - first if (last - first) % stride == 0 else -place)
            before = pieces.get(key, Piece((), (), last - first, begin, end))
            pieces[key] = before._replace(rows=(*before.rows, row), starts=(*before.starts, first - begin))
        if inside:
            row = inside[0] - low + place * length
            whole.append(Whole(row, tuple(offset - inside[0] for offset in inside)))
    return Share(tuple(whole), tuple(pieces.values()), bool(_crossing(offsets, length)))


# ---- the attention


class _Attention(torch.autograd.Function):
    """Attention of this rank's rows, each over its own document. Keys and values are gathered in both directions."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        index_query: Tensor | None,
        index_key: Tensor | None,
        group_name: GroupName,
        size: int,
        balance: Balance,
        groups: int,
        share: Share,
        store_parents: bool,
        *packed: Any,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.group_name, ctx.size, ctx.balance, ctx.groups = group_name, size, balance, groups
        ctx.share, ctx.packed = share, packed
        index_keys = _gather(ctx, *([] if index_key is None else [index_key]))
        under_way = _gather(ctx, k, v)
        state = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros((*q.shape[:2], v.shape[2]))
        gmax = q.new_full(q.shape[:2], float("-inf"), dtype=state)
        gsum = q.new_zeros(q.shape[:2], dtype=state)
        for row, offsets in share.whole:  # while the keys of the others are on their way
            rows = slice(row, row + offsets[-1])
            documents = _documents(rows, offsets, ctx, q, k, v, index_query, index_key)
            results = torch.ops.htree._attention_varlen_forward(*documents, "auto", *packed)
            for x, result in zip((out, gmax, gsum), results, strict=True):
                x[rows] = result
        lists = []
        whole_index_keys = _packed(index_keys, ctx)
        keys, values = _packed(under_way, ctx) or (k, v)
        for piece in share.pieces:
            of_piece = (_rows(q, piece), _keys(keys, piece, ctx), _keys(values, piece, ctx))
            starts = list(piece.starts)
            if index_query is None:
                *results, stored = torch.ops.htree._attention_rows(*of_piece, starts, store_parents, *packed)
            else:
                of_index = (_rows(index_query, piece), whole_index_keys[0][None, piece.begin : piece.end])
                stored = torch.ops.htree._index_lists(*of_piece[:2], *of_index, starts, *packed)
                results = torch.ops.htree._listed_attention_rows(*of_piece, stored, starts, *packed)
            for x, result in zip((out, gmax, gsum), results, strict=True):
                _put(x, piece, result)
            lists.append(stored)
        ctx.save_for_backward(q, k, v, index_query, index_key, out, gmax, gsum, *lists)
        return out, gmax + gsum.log()

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        nothing = [None] * (8 + len(ctx.packed))
        if dout is None and dlse is None:
            return None, None, None, *nothing
        q, k, v, index_query, index_key, out, gmax, gsum, *lists = ctx.saved_tensors
        mask = list(ctx.needs_input_grad[:3])
        under_way = _gather(ctx, k, v)
        dq = torch.zeros_like(q) if mask[0] else None
        inside: list[tuple[slice, list[Any]]] = []  # of documents that lie in one part: whole on this rank
        for row, offsets in ctx.share.whole:
            rows = slice(row, row + offsets[-1])
            documents = _documents(rows, offsets, ctx, q, k, v, index_query, index_key)
            given = (None if x is None else x[rows] for x in (out, gmax, gsum, dout, dlse))
            of_rows, *of_keys = torch.ops.htree._attention_varlen_backward(
                *documents, *given, "auto", mask, *ctx.packed
            )
            if dq is not None:
                dq[rows] = of_rows
            inside.append((rows, [x if x is None else of_groups(x, ctx.groups) for x in of_keys]))
        keys, values = _packed(under_way, ctx) or (k[:0], v[:0])
        sums: list[Tensor | None] = [
            x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32)) if wanted else None
            for x, wanted in zip((keys, values), mask[1:], strict=True)
        ]
        for piece, stored in zip(ctx.share.pieces, lists, strict=True):
            of_rows, *of_keys = torch.ops.htree._attention_rows_backward_sums(
                _rows(q, piece),
                _keys(keys, piece, ctx),
                _keys(values, piece, ctx),
                *(_rows(x, piece) for x in (out, gmax, gsum)),
                stored,
                *(None if x is None else _rows(x, piece) for x in (dout, dlse)),
                list(piece.starts),
                mask,
                *ctx.packed,
            )
            if dq is not None:
                _put(dq, piece, of_rows)
            for total, x in zip(sums, of_keys, strict=True):
                if total is not None and x is not None:
                    total[piece.begin : piece.end] += of_groups(x[0], ctx.groups)
        sent = [_send(x, ctx) for x in sums]
        gradients: list[Tensor | None] = []
        for place, (received, x) in enumerate(zip(sent, (k, v), strict=True)):
            if received is None:
                gradients.append(None)
                continue
            gradient = added(received, 0).to(x.dtype) if ctx.share.crosses else torch.zeros_like(x)
            for rows, found in inside:
                gradient[rows] = found[place]
            gradients.append(gradient)
        return dq, *gradients, *nothing


def _gather(ctx: Any, *tensors: Tensor) -> list[Tensor]:
    """What all ranks have [n, N/n, heads, D], under way; nothing where no document crosses a border."""
    return [all_gather(x, ctx.group_name) for x in tensors] if ctx.share.crosses else []


def _packed(under_way: list[Tensor], ctx: Any) -> list[Tensor]:
    """The same in the order of the sequence [N, heads, D], when it is there."""
    return [join(waited(x), 0, ctx.balance) for x in under_way]


def _documents(
    rows: slice,
    offsets: tuple[int, ...],
    ctx: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index_query: Tensor | None,
    index_key: Tensor | None,
) -> tuple[Any, ...]:
    """The first arguments of the ops for packed documents."""
    # A copy that blocks would wait for the work before it.
    ends = torch.tensor(offsets, dtype=torch.int32, device="cpu").to(q.device, non_blocking=True)
    longest = max(end - begin for begin, end in pairwise(offsets))
    of_index = (
        (None, None) if index_query is None or index_key is None else (index_query[rows], index_key[rows])
    )
    keys, values = repeated(k[rows], ctx.groups), repeated(v[rows], ctx.groups)
    return q[rows], keys, values, *of_index, ends, ends, longest, longest


def _rows(x: Tensor, piece: Piece) -> Tensor:
    """The rows of a piece as a batch of one."""
    return torch.cat([x[row : row + piece.length] for row in piece.rows])[None]


def _put(x: Tensor, piece: Piece, rows: Tensor) -> None:
    """Writes what :func:`_rows` reads."""
    for row, part in zip(piece.rows, rows[0].chunk(len(piece.rows)), strict=True):
        x[row : row + piece.length] = part


def _keys(packed: Tensor, piece: Piece, ctx: Any) -> Tensor:
    """The keys or values of a piece's document as a batch of one."""
    return repeated(packed[piece.begin : piece.end], ctx.groups)[None]


def _send(sums: Tensor | None, ctx: Any) -> Tensor | None:
    """Sends every rank what this rank's pieces give for the rank's keys or values, as it was summed."""
    if sums is None or not ctx.share.crosses:
        return sums
    return exchange(cut(sums, ctx.size, 0, ctx.balance), ctx.group_name)


# ---- the function


def positions_of(
    tokens: int, group: dist.ProcessGroup | DeviceMesh | None, balance: Balance, device: torch.device
) -> Tensor:
    """Where the ``tokens`` of this rank stand in the packed sequence, [tokens]; a call will complain, not this."""
    members = group_of("tree_attention_varlen_cp", group)
    parts = parts_of(members.rank(), members.size(), balance, tokens * members.size())
    length = -(-tokens // len(parts))
    places = [torch.arange(part * length, part * length + length, device=device) for part in parts]
    return torch.cat(places)[:tokens]


def _offsets(function: str, cu_seqlens: object) -> tuple[int, ...]:
    """``cu_seqlens`` as ints that ascend from 0."""
    if isinstance(cu_seqlens, Tensor):
        check_tensor(function, "cu_seqlens", cu_seqlens)
        if cu_seqlens.is_meta:
            raise DeviceError(
                f"{function}: cu_seqlens must have numbers to read, got a tensor on {cu_seqlens.device}"
            )
        check_dtype(function, (torch.int32,), cu_seqlens=cu_seqlens)
        if cu_seqlens.dim() != 1:
            refuse_shape(function, "cu_seqlens", cu_seqlens, "[documents + 1]", ("documents + 1",))
        offsets = tuple(cu_seqlens.tolist())
    elif isinstance(cu_seqlens, Sequence) and not isinstance(cu_seqlens, (str, bytes)):
        for place, x in enumerate(cu_seqlens):
            check_kind(function, f"cu_seqlens[{place}]", x, "int")
        offsets = tuple(cu_seqlens)
    else:
        came = type(cu_seqlens).__name__
        raise TypeError(f"{function}: cu_seqlens must be ints or an int32 tensor [documents + 1], got {came}")
    if not offsets:
        raise ValueError(f"{function}: cu_seqlens must have at least one element, got none")
    if offsets[0] != 0 or any(a > b for a, b in pairwise(offsets)):
        raise ValueError(f"{function}: cu_seqlens must ascend from 0, got {list(offsets[:8])} at its begin")
    return offsets


@validate_arguments_as("tree_attention_varlen_cp")
def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: Index | None,
    offsets: tuple[int, ...],
    size: int,
    balance: Balance,
    options: TreeOptions,
) -> None:
    """Raises what this rank alone can see, before it waits for another."""
    name = "tree_attention_varlen_cp"
    check_balance(name, balance)
    of_index = {} if index is None else dict(zip(("index_query", "index_key"), index, strict=True))
    check_local(name, query=query, key=key, value=value, **of_index)
    check_tensors(
        name,
        query=(query, "N/n H K"),
        key=(key, "N/n H_kv K"),
        value=(value, "N/n H_kv V"),
        **{word: (x, "N/n H_i d") for word, x in of_index.items()},
    )
    parts = parts_per_rank(balance)
    tokens, step = query.shape[0] * size, parts * size
    if tokens % step:
        raise ValueError(
            f"{name}: the tokens of all ranks must be a multiple of {parts} * n = {step}, got {size} * "
            f"{query.shape[0]} = {tokens}; the next length that works is {(tokens // step + 1) * step}"
        )
    if offsets[-1] > tokens:
        raise ValueError(
            f"{name}: cu_seqlens must end at or before the {tokens} tokens of all ranks, got {offsets[-1]}"
        )
    with _disable_current_modes():  # a trace, a profile of calls or a count holds what computes
        meta = [x.new_empty(x.shape, device="meta") for x in (query, key, value, *of_index.values())]
        ends = torch.empty(len(offsets), dtype=torch.int32, device="meta")
        chosen_by: list[Tensor | None] = [*meta[3:]] or [None, None]
        packed = (tokens, tokens, "auto", *options.packed())
        torch.ops.htree._attention_varlen(*meta[:3], *chosen_by, ends, ends, *packed)
    stride = options.selection_stride
    length = query.shape[0] // parts
    for i in _crossing(offsets, length):
        begin, border = offsets[i], offsets[i] // length * length + length
        is_long = offsets[i + 1] > border + length
        if (border - begin) % stride or (is_long and length % stride):
            raise ValueError(
                f"{name}: a document that lies in several parts of the packed sequence must begin a multiple of "
                f"selection_stride = {stride} before each border, got document {i} at {begin} and parts of "
                f"{length} tokens"
            )


@torch.compiler.disable(reason="the work of tree_attention_varlen_cp differs between the ranks")
def tree_attention_varlen_cp(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    group: dist.ProcessGroup | DeviceMesh | None,
    *,
    index: Index | None = None,
    balance: Balance = "zigzag",
    return_lse: bool = False,
    options: TreeOptions | None = None,
    **keywords: Unpack[TreeKeywords],
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`htree_ops.tree_attention_varlen` over packed documents whose tokens are split among the ranks of a group.

    Each rank has the tokens that :func:`shard_sequence` gives it along dim 0, and gets their rows. A document that lies
    in one part of a rank is worked on there alone. Where one lies in several parts, keys and values are gathered, and
    each rank builds the trees of the documents of which it has a piece. Their gradients are added over the ranks as in
    :func:`tree_attention_cp`. All ranks of the group must call.
    Source: docs/semantics/tree_attention.md §1.16; docs/distributed.md has memory, costs and limits.

    Args:
        query: [N/n, H, K], not rotated; key [N/n, H_kv, K]; value [N/n, H_kv, V]: the rank's share of N tokens.
        cu_seqlens: [documents + 1] ascending from 0, of the whole sequence and the same on every rank: document i is
            its tokens cu_seqlens[i] ... cu_seqlens[i + 1] - 1. Ints, or an int32 tensor, whose numbers are read: where
            it lies on a GPU the call waits for that.
        group: the ranks that share the sequence; None is the default group, a mesh must have one dimension. A group of
            one gives what :func:`htree_ops.tree_attention_varlen` does.
        index: (index_query [N/n, H_i, d], index_key [N/n, H_i, d]) of this rank, by which nodes are chosen as in
            :func:`htree_ops.tree_attention_varlen`; the index keys travel with keys and values. It gets no gradient.
        balance: "zigzag", "striped", "contiguous" or "work", as in :func:`shard_sequence`. 2 * n (striped: 8 * n,
            contiguous: n, work: 16 * n) divides N. "work" is that of one sequence as long as all documents.
        return_lse, options, keywords: as in :func:`htree_ops.tree_attention_varlen`. A document that lies in several
            parts begins a multiple of selection_stride before their border, and its lists are stored as store_parents
            says.

    Returns:
        out [N/n, H, V], differentiable in query, key and value; with ``return_lse`` also lse [N/n, H] in fp32 (fp64 for
        fp64), differentiable in query and key. Rows at or behind cu_seqlens[-1] are 0, with lse -inf, and have no
        gradient. On the CPU the rows are those of :func:`htree_ops.tree_attention_varlen`, bit for bit.

    Raises:
        ShapeMismatchError, UnsupportedDtypeError, DeviceError, ValueError, TypeError: as
            :func:`htree_ops.tree_attention_varlen`; offsets that do not ascend from 0 or leave the packed sequence; a
            document that does not fit the stride; sizes, documents, dtypes, devices, options or wanted gradients that
            differ between the ranks, on every rank.
        RuntimeError: another rank has refused its arguments.

    torch.compile runs the call as it is, between two graphs. Ranks work on different documents, so their graphs would
    differ, and with them the collectives that a partitioner keeps or repeats.
    """
    name = "tree_attention_varlen_cp"
    members = group_of(name, group)
    rank, size = members.rank(), members.size()
    query, key, value = under_autocast(query, key, value)
    if size == 1:
        check_balance(name, balance)
        balance = "contiguous"  # one part, in which every document lies
    with agreement(name, members) as (facts, same):
        offsets = _offsets(name, cu_seqlens)
        chosen = options_of_call(name, index, options, keywords)
        _check(query, key, value, index, offsets, size, balance, chosen)
        facts |= facts_of(("N/n",), query=query, key=key, value=value)
        same |= {"cu_seqlens": offsets, **kind_of(query), "balance": balance, **chosen.to_dict()}
        same |= kind_of_index(index)
    parts = parts_of(rank, size, balance, size * query.shape[0])
    share = share_of(offsets, query.shape[0] // len(parts), parts, chosen.selection_stride)
    groups = query.shape[1] // key.shape[1] if chosen.scope == "q_head" else 1
    plan = (members.group_name, size, balance, groups, share, chosen.store_parents)
    of_index = (None, None) if index is None else (index[0].detach(), index[1].detach())
    out, lse = _Attention.apply(query, key, value, *of_index, *plan, *chosen.packed())
    return (out, lse) if return_lse else out
