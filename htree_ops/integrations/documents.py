"""Tree attention over padded and packed batches: each sequence and each document has a tree of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from htree_ops.ops.tree_attention import tree_attention, tree_attention_varlen

T = TypeVar("T")

__all__ = [
    "Documents",
    "attend_cached",
    "attend_documents",
    "attend_padded",
    "documents_of",
    "starts_of_documents",
    "take_rows",
]


@dataclass(frozen=True)
class Documents:
    """Documents that lie packed one behind the other.

    Attributes:
        cu_q, cu_k: int32 [number + 1] on the device, where each one's queries and keys begin.
        max_q, max_k: no document has more of them.
    """

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int

    @classmethod
    def of(cls, lengths_q: Sequence[int], lengths_k: Sequence[int], device: torch.device) -> Documents:
        """From lengths that are known on the host."""
        cu_q, cu_k = (
            torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
            for lengths in (lengths_q, lengths_k)
        )
        return cls(cu_q, cu_k, max(lengths_q, default=0), max(lengths_k, default=0))


def attend_documents(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, options: dict[str, Any]
) -> Tensor:
    """Tree attention of packed documents: :func:`htree_ops.tree_attention_varlen`.

    Args:
        query: [N, H, K], the documents one behind the other; the rows of each are its last tokens.
        key: [N_k, H_kv, K]; value: [N_k, H_kv, V].
        documents: where they begin.
        options: keywords of :func:`htree_ops.tree_attention`.

    Returns:
        [N, H, V].
    """
    options = {name: value for name, value in options.items() if name != "store_parents"}
    if options.pop("scope", "kv_head") == "q_head":
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    out = tree_attention_varlen(
        query, key, value, documents.cu_q, documents.cu_k, documents.max_q, documents.max_k, **options
    )
    assert isinstance(out, Tensor)  # a pair only with return_lse
    return out


def attend_padded(query: Tensor, key: Tensor, value: Tensor, real: Tensor, options: dict[str, Any]) -> Tensor:
    """Tree attention of sequences of which some rows are padding, anywhere; nothing is read on the host.

    The real rows of each sequence move to its front, in order, and become a text of their own. What stands behind them
    influences no earlier row, because the attention is causal, with every importance but "lse".

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
    documents, rows_q, rows_k = _remembered(real, T_q, lambda real: _real_rows(real, last))
    q, k, v = (x.flatten(0, 1)[rows] for x, rows in ((query, rows_q), (key, rows_k), (value, rows_k)))
    out = attend_documents(q, k, v, documents, options)
    result = out.new_zeros(B * T_q, *out.shape[1:])
    return result.index_copy(0, rows_q, out).unflatten(0, (B, T_q))


def _real_rows(real: Tensor, last: Tensor) -> tuple[Documents, Tensor, Tensor]:
    """The sequences without their padding, and the rows of queries [B * T_q] and keys [B * T] that are real."""
    documents = Documents.of(last.sum(1).tolist(), real.sum(1).tolist(), real.device)
    rows_q, rows_k = (mask.flatten().nonzero().flatten() for mask in (last, real))
    return documents, rows_q, rows_k


# ---- lengths, read once per tensor: every layer of a model gets the same one

_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _remembered(x: Tensor, what: object, read: Callable[[Tensor], T]) -> T:
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


def documents_of(positions: Tensor, batch: int) -> Documents | None:
    """The documents in position_ids [B or 1, T], sequence after sequence. None where every sequence is one."""

    def read(positions: Tensor) -> Documents | None:
        first = starts_of_documents(positions).flatten().nonzero().flatten().tolist()
        if len(first) == len(positions):
            return None
        lengths = [end - begin for begin, end in zip(first, [*first[1:], positions.numel()], strict=True)]
        lengths *= batch // len(positions)
        return Documents.of(lengths, lengths, positions.device)

    return _remembered(positions, ("documents", batch), read)
