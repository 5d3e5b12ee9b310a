"""Tree attention over padded and packed batches: each sequence and each document has a tree of its own.

The functions take query [B, T_q, H, K], key [B, T, H_kv, K] and value [B, T, H_kv, V]; ``real``, bool [B, T], False at
padding, or None where all rows are real; and ``tree``, the attention. They return [B, T_q, H, V], 0 at padding, which
has no gradient and may hold NaN. T_q is T but for :func:`attend_cached`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakIdRef, WeakTensorKeyDictionary

from htree_ops.ops.tree_attention.index import TreeOf

T = TypeVar("T")


class Documents(NamedTuple):
    """Documents that lie packed one behind the other.

    Attributes:
        cu_q, cu_k: int32 [number + 1] on the device, where each one's queries and keys begin.
        max_q, max_k: no document has more of them.
    """

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int


def attend_padded(query: Tensor, key: Tensor, value: Tensor, real: Tensor, tree: TreeOf) -> Tensor:
    """Tree attention of sequences of which some rows are padding, anywhere; nothing is read on the host.

    The real rows of each sequence move to its front, in order, and become a sequence of their own. What stands behind
    them influences no earlier row, because the attention is causal, with every importance but "lse".
    """
    order = front_first(real)
    return _through_front(
        (query, key, value), real, order, lambda q, k, v: tree.sequences(q, k, v, real.sum(1))
    )


def front_first(real: Tensor) -> Tensor:
    """int64 [B, T]: the rows of each sequence, the real ones first and in order."""
    return torch.argsort(~real, dim=1, stable=True)


def _through_front(
    inputs: tuple[Tensor, Tensor, Tensor], real: Tensor, order: Tensor, attend: Callable[..., Tensor]
) -> Tensor:
    """What ``attend`` gives for the rows in ``order``, brought back; padding goes in as 0 and comes out as 0."""
    padding = ~real[:, :, None, None]
    front = (take_rows(x.masked_fill(padding, 0), order) for x in inputs)
    return take_rows(attend(*front), torch.argsort(order, dim=1)).masked_fill(padding, 0)


def attend_restarting(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    real: Tensor | None,
    tree: TreeOf,
) -> Tensor:
    """Tree attention of the documents that restarting positions show; no Python code reads how many there are.

    There are offsets for as many documents as rows, most of them empty, and the bound of their length is T. The op
    reads them on the host, or pads every rank where a CUDA graph is recorded (§1.16, ``grouping="auto"``).

    Args:
        positions: [B or 1, T], as :func:`restarts` reads them.
    """
    B, T = query.shape[:2]
    starts = restarts(positions, real).expand(B, T)
    if real is not None:  # the padding of a sequence is a document behind the others
        order = front_first(real)
        kept = real.gather(1, order)
        starts = starts.gather(1, order) | (kept != F.pad(kept, (1, 0), value=True)[:, :T])
    starts = F.pad(starts[:, 1:], (1, 0), value=True).flatten()
    row = torch.arange(B * T, device=starts.device)
    first = torch.where(starts, row, B * T).sort().values
    cu = torch.cat((first, first.new_full((1,), B * T))).int()  # F.pad would make a constant of the length
    attend = functools.partial(_attend_packed, documents=Documents(cu, cu, T, T), tree=tree)
    if real is None:
        return attend(query, key, value)
    return _through_front((query, key, value), real, order, attend)


def _attend_packed(query: Tensor, key: Tensor, value: Tensor, documents: Documents, tree: TreeOf) -> Tensor:
    """Tree attention [B, T, H, V] of documents that are packed in all rows of all sequences."""
    q, k, v = (x.flatten(0, 1) for x in (query, key, value))
    return tree.documents(q, k, v, *documents).unflatten(0, query.shape[:2])


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x [B, T, ...] in the order ``rows`` [B, T]."""
    return x.gather(1, rows[:, :, None, None].expand(x.shape))


def attend_cached(
    query: Tensor, key: Tensor, value: Tensor, real_q: Tensor, real_k: Tensor, tree: TreeOf
) -> Tensor:
    """Tree attention of padded sequences whose real queries are the last of their real keys; it can be traced.

    The real rows of the whole batch move to the front of one row, a document for each sequence. No Python code reads
    how many there are: rows behind the last document count for nothing, whatever they hold (§1.16).

    Args:
        real_q: bool [B, T_q]; real_k: bool [B, T].
    """
    (rows_q, cu_q), (rows_k, cu_k) = (_real_rows(real) for real in (real_q, real_k))
    documents = Documents(cu_q, cu_k, real_q.shape[1], real_k.shape[1])
    return _attend_rows(query, key, value, documents, rows_q, rows_k, tree)


def _real_rows(real: Tensor) -> tuple[Tensor, Tensor]:
    """The rows [B * T] of a mask [B, T], the real ones first, and where those of each sequence begin, int32 [B + 1]."""
    rows = torch.argsort(~real.flatten(), stable=True)
    ends = real.sum(1).cumsum(0)
    return rows, torch.cat((torch.zeros_like(ends[:1]), ends)).int()


def attend_read_documents(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, real: Tensor | None, tree: TreeOf
) -> Tensor:
    """:func:`attend_restarting`, which can be traced, with lengths that are read on the host."""
    documents, rows = _remembered(
        positions, real, ("documents", len(query)), lambda: _read_documents(positions, real, len(query))
    )
    if rows is None:
        return _attend_packed(query, key, value, documents, tree)
    return _attend_rows(query, key, value, documents, rows, rows, tree)


def _read_documents(positions: Tensor, real: Tensor | None, batch: int) -> tuple[Documents, Tensor | None]:
    """The documents without padding, sequence after sequence, and the rows [B * T] that are real; None is all."""
    starts = F.pad(restarts(positions, real)[:, 1:], (1, 0), value=True).expand(batch, -1).flatten()
    document, rows = starts.cumsum(0), None
    if real is not None:
        rows = real.flatten().nonzero().flatten()
        document = document[rows]
    first = document.diff(prepend=document.new_zeros(1)).nonzero().flatten().tolist()
    ends = [*first, len(document)]
    longest = max((end - begin for begin, end in pairwise(ends)), default=0)
    cu = torch.tensor(ends, dtype=torch.int32, device=starts.device)
    return Documents(cu, cu, longest, longest), rows


def _attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    rows_q: Tensor,
    rows_k: Tensor,
    tree: TreeOf,
) -> Tensor:
    """Tree attention of documents in these rows of [B * T_q] queries and [B * T] keys; 0 in the others."""
    q, k, v = (x.flatten(0, 1)[rows] for x, rows in ((query, rows_q), (key, rows_k), (value, rows_k)))
    out = tree.documents(q, k, v, *documents)
    result = out.new_zeros(query.shape[0] * query.shape[1], *out.shape[1:])
    return result.index_copy(0, rows_q, out).unflatten(0, query.shape[:2])


# ---- lengths, read once per tensor: every layer of a model gets the same one

_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _remembered(positions: Tensor, real: Tensor | None, what: object, read: Callable[[], T]) -> T:
    """``read()``, which waits for the device, or what it gave for ``what`` before one of the tensors was changed."""
    known = [x for x in (positions, real) if x is not None]
    if any(x.is_inference() for x in known):
        return read()  # such a tensor does not count its changes
    state = [(WeakIdRef(x), x._version) for x in known]
    of_positions = _known.setdefault(positions, {})
    if what not in of_positions or of_positions[what][0] != state:
        of_positions[what] = (state, read())
    return of_positions[what][1]


def restarts(positions: Tensor, real: Tensor | None = None, before: int = 0) -> Tensor:
    """Where a document begins behind other tokens of its sequence: a position is 0, or less than the one before.

    A position that comes twice and one that is left out, as where tokens were taken out of a sequence, begin nothing.

    Args:
        positions: [B or 1, n], of the last tokens.
        real: bool [B, before + n], False at padding, whose positions mean nothing. None where all are real.
        before: tokens that a cache holds; their positions are not known.

    Returns:
        bool [B or 1, n].
    """
    positions = F.pad(positions, (before, 0))
    if real is None:
        real = torch.ones_like(positions, dtype=torch.bool)
    column = torch.arange(real.shape[1], device=real.device)
    latest = torch.where(real, column, -1).cummax(1).values
    previous = F.pad(latest, (1, 0), value=-1)[:, :-1]
    positions = positions.expand(real.shape)
    goes_back = (positions == 0) | (positions < positions.gather(1, previous.clamp(min=0)))
    return (real & (previous >= 0) & goes_back)[:, before:]


def has_restarts(positions: Tensor, real: Tensor | None, before: int = 0) -> bool:
    """Whether there are :func:`restarts`; waits for the device."""
    what = ("restarts", before)
    return _remembered(positions, real, what, lambda: bool(restarts(positions, real, before).any()))
