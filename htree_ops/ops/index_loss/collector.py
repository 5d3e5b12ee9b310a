"""The losses of the indexes of a model's layers, gathered while the model runs (docs/semantics/index_loss.md §9.5)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from htree_ops.ops.arguments import check_int
from htree_ops.ops.index_loss.function import draw_among, draw_positions, index_loss

__all__ = ["Attended", "IndexLosses", "collect", "index_losses", "is_collecting"]


class Learner(Protocol):
    """What a layer must have whose index learns."""

    index_query_weight: nn.Parameter
    index_key_weight: nn.Parameter
    _index_forward: Forward | None

    def index_of(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Index queries and index keys of queries and keys."""


@dataclass(frozen=True)
class Attended:
    """What a layer attends with: q and k [B, T, heads, K] as its attention takes them.

    Attributes:
        q, k: after the rotations.
        scale: of the scores, None for 1/sqrt(K).
        block_size: tokens of a block.
        lengths: of the sequences, whose padding stands behind; None where there is none.
    """

    q: Tensor
    k: Tensor
    scale: float | None
    block_size: int
    lengths: Tensor | None


@dataclass(frozen=True)
class Forward:
    """How a layer was last called beside a collector, for a checkpoint that runs it again."""

    rows: int
    with_grad: bool


class IndexLosses:
    """Losses that :func:`index_losses` has gathered; ``len()`` is the number of layers.

    A layer that is called several times has the mean over its calls.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._of_layers: dict[int, list[Tensor]] = {}

    def __len__(self) -> int:
        return len(self._of_layers)

    def __iter__(self) -> Iterator[Tensor]:
        """The loss of each layer, in the order of their first calls."""
        return (torch.stack(losses).mean() for losses in self._of_layers.values())

    def mean(self) -> Tensor:
        """The mean over the layers, a scalar.

        Raises:
            RuntimeError: no layer with an index was called.
        """
        losses = list(self)
        if not losses:
            raise RuntimeError(
                "index_losses: mean must be taken of at least one layer: no HTreeAttention with index_dim above 0 was "
                "called"
            )
        device = losses[0].device
        return torch.stack([loss.to(device) for loss in losses]).mean()

    def _add(self, layer: object, loss: Tensor) -> None:
        self._of_layers.setdefault(id(layer), []).append(loss)


#: Innermost last. Checkpoints run layers again in threads of autograd, so that this is no context variable.
_ACTIVE: list[IndexLosses] = []


@contextmanager
def index_losses(rows: int = 128) -> Iterator[IndexLosses]:
    """Gathers :func:`htree_ops.index_loss` of every :class:`htree_ops.HTreeAttention` with an index that is called.

    Each call of a layer draws ``rows`` positions of each sequence from torch's default generator, never at padding.
    From then on the layer's index weights require grad. The losses stay usable behind the ``with``. Gradients go to
    these weights alone, for queries and keys are detached. A call whose sequences
    have no token behind their first block adds 0.

    Under non-reentrant checkpointing (``use_reentrant=False``) a layer that is run again draws the same positions and
    adds nothing.

    Args:
        rows: positions of a sequence.

    Raises:
        TypeError, ValueError: rows is not an int of at least 1.
        NotImplementedError: in a layer that has the heads of one rank alone, and under torch.compile.
        RuntimeError: in the backward of a layer under reentrant checkpointing, which cannot reach the loss.

    Example:
        >>> import htree_ops
        >>> options = htree_ops.TreeOptions(top_k=4, max_top_nodes=64)
        >>> layer = htree_ops.HTreeAttention(32, num_heads=2, options=options, index_dim=16)
        >>> with htree_ops.index_losses(rows=8) as losses:
        ...     out = layer(torch.randn(2, 100, 32))
        >>> (out.square().mean() + losses.mean()).backward()
        >>> len(losses), layer.index_key_weight.grad.shape
        (1, torch.Size([2, 16, 16]))
    """
    check_int("index_losses", "rows", rows, 1)
    losses = IndexLosses(rows)
    _ACTIVE.append(losses)
    try:
        yield losses
    finally:
        _ACTIVE.remove(losses)


def is_collecting() -> bool:
    """Whether a call of a layer adds its loss somewhere."""
    return len(_ACTIVE) > 0  # which Dynamo can trace


def collect(layer: Learner, attended: Attended) -> None:
    """Adds the loss of a layer's call to the innermost :func:`index_losses`, where there is one."""
    if torch._C._current_graph_task_id() != -1:  # a checkpoint runs the layer again, inside a backward
        forward = layer._index_forward
        if forward is not None:
            if not forward.with_grad:
                raise RuntimeError(
                    "index_losses: a layer must not run under reentrant checkpointing, whose first forward records "
                    "nothing: use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
                )
            _loss(layer, attended, forward.rows)  # what the first forward has saved, once more
        return
    if not _ACTIVE:
        layer._index_forward = None
        return
    losses = _ACTIVE[-1]
    layer._index_forward = Forward(losses.rows, torch.is_grad_enabled())
    for weight in (layer.index_query_weight, layer.index_key_weight):
        weight.requires_grad_(True)
    losses._add(layer, _loss(layer, attended, losses.rows))


def _loss(layer: Learner, attended: Attended, rows: int) -> Tensor:
    """The loss of one call; 0 where no token has an earlier block."""
    q, k, r = attended.q.detach(), attended.k.detach(), attended.block_size
    index_query, index_key = layer.index_of(q, k)
    tensors: tuple[Tensor, ...] = (q, k, index_query, index_key)
    cu_seqlens: Tensor | None = None
    if attended.lengths is not None:
        B, T = q.shape[:2]
        # Real rows and padding are documents in turn; only the former have positions.
        starts = torch.arange(B, device=q.device) * T
        cu_seqlens = torch.stack((starts, starts + attended.lengths), 1).flatten()
        cu_seqlens = torch.cat((cu_seqlens, cu_seqlens.new_tensor([B * T]))).to(torch.int32)
        if _none(attended.lengths, r):
            return _zero(index_query, index_key)
        positions = draw_among(starts, attended.lengths, B * rows, r)
        tensors = tuple(x.flatten(0, 1) for x in tensors)
    elif q.shape[1] <= r or q.shape[0] == 0:
        return _zero(index_query, index_key)
    else:
        positions = draw_positions(q, k, rows, r)
    return index_loss(
        *tensors, scale=attended.scale, block_size=r, positions=positions, cu_seqlens=cu_seqlens
    )


def _none(lengths: Tensor, block_size: int) -> bool:
    """Whether no sequence is longer than a block, as far as the host can see: on CUDA the op leaves positions out."""
    return lengths.numel() == 0 or (lengths.device.type == "cpu" and int(lengths.max()) <= block_size)


def _zero(index_query: Tensor, index_key: Tensor) -> Tensor:
    """A loss of 0 whose gradients are 0."""
    wide = torch.promote_types(index_query.dtype, torch.float32)
    return (index_query[..., :0].sum() + index_key[..., :0].sum()).to(wide)
