"""Tree attention over padded and packed batches: each sequence and each document has a tree of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from htree_ops.ops.tree_attention import tree_attention

__all__ = [
    "attend_cached",
    "attend_documents",
    "attend_padded",
    "document_lengths",
    "lengths_between",
    "starts_of_documents",
    "take_rows",
]


def attend_documents(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths_q: Sequence[int],
    lengths_k: Sequence[int],
    options: dict[str, Any],
) -> Tensor:
    """Tree attention of packed documents, one call per document.

    The calls are made on the host, so the lengths must be known there: on a GPU whoever reads them from a tensor waits
    for the device once per batch (:func:`document_lengths`). Many short documents keep a GPU less busy than one text.

    Args:
        query: [N, H, K], the documents one behind the other; the rows of each are its last ``lengths_q[i]`` tokens.
        key: [N_k, H_kv, K]; value: [N_k, H_kv, V].
        lengths_q, lengths_k: rows of each document; 0 is legal in lengths_q.
        options: keywords of :func:`htree_ops.tree_attention`.

    Returns:
        [N, H, V].
    """
    parts = zip(
        query.split(list(lengths_q)), key.split(list(lengths_k)), value.split(list(lengths_k)), strict=True
    )
    out = [tree_attention(q[None], k[None], v[None], **options)[0] for q, k, v in parts if len(q)]
    return torch.cat(out) if out else query.new_empty(0, query.shape[1], value.shape[2])


def attend_padded(query: Tensor, key: Tensor, value: Tensor, real: Tensor, options: dict[str, Any]) -> Tensor:
    """Tree attention of sequences of which some rows are padding, anywhere; nothing is read on the host.

    The real rows of each sequence move to its front, in order, and become a text of their own. What stands behind them
    influences no earlier row, because the attention is causal.

    Args:
        query: [B, T, H, K]; key: [B, T, H_kv, K]; value: [B, T, H_kv, V].
        real: bool [B, T], False at padding.
        options: keywords of :func:`htree_ops.tree_attention`.

    Returns:
        [B, T, H, V]; 0 at padding, which has no gradient and may hold NaN.
    """
    order = torch.argsort(~real, dim=1, stable=True)
    back = torch.argsort(order, dim=1)
    padding = ~real[:, :, None, None]
    front = (take_rows(x.masked_fill(padding, 0), order) for x in (query, key, value))
    return take_rows(tree_attention(*front, **options), back).masked_fill(padding, 0)


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x [B, T, ...] in the order ``rows`` [B, T]."""
    return x.gather(1, rows[:, :, None, None].expand(x.shape))


def attend_cached(query: Tensor, key: Tensor, value: Tensor, real: Tensor, options: dict[str, Any]) -> Tensor:
    """:func:`attend_padded` for queries [B, T_q, H, K] that are the last rows of ``real`` [B, T]; reads its lengths."""
    B, T_q = query.shape[:2]
    last = real[:, real.shape[1] - T_q :]
    lengths_k, lengths_q = _remembered(real, T_q, lambda mask: [mask.sum(1).tolist(), last.sum(1).tolist()])
    rows_q, rows_k = (
        torch.argsort(~mask.flatten(), stable=True)[: sum(lengths)]
        for mask, lengths in ((last, lengths_q), (real, lengths_k))
    )
    q, k, v = (x.flatten(0, 1)[rows] for x, rows in ((query, rows_q), (key, rows_k), (value, rows_k)))
    out = attend_documents(q, k, v, lengths_q, lengths_k, options)
    result = out.new_zeros(B * T_q, *out.shape[1:])
    return result.index_copy(0, rows_q, out).unflatten(0, (B, T_q))


# ---- lengths, read once per tensor: every layer of a model gets the same one

_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _remembered(x: Tensor, what: object, read: Callable[[Tensor], list[Any]]) -> list[Any]:
    """``read(x)``, which waits for the device, or what it gave for ``what`` before this tensor was changed."""
    if x.is_inference():
        return read(x)  # such a tensor does not count its changes
    found = _known.get(x)
    if found is None or found[0] != (what, x._version):
        found = _known[x] = ((what, x._version), read(x))
    return found[1]


def starts_of_documents(positions: Tensor) -> Tensor:
    """Where position_ids [B, T] do not go on by one, and where a sequence begins: bool [B, T]."""
    starts = torch.ones_like(positions, dtype=torch.bool)
    starts[:, 1:] = positions.diff() != 1
    return starts


def document_lengths(positions: Tensor) -> list[int]:
    """Lengths of the documents in position_ids [B, T], sequence after sequence."""

    def read(positions: Tensor) -> list[int]:
        first = starts_of_documents(positions).flatten().nonzero().flatten().tolist()
        return [end - begin for begin, end in zip(first, [*first[1:], positions.numel()], strict=True)]

    return _remembered(positions, "documents", read)


def lengths_between(boundaries: Tensor) -> list[int]:
    """Lengths of the documents that [0, n_1, n_1 + n_2, ...] bounds."""
    return _remembered(boundaries, "boundaries", lambda x: x.diff().tolist())
