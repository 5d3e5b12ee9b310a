"""The losses of the indexes of a model's layers, gathered while the model runs (docs/semantics/index_loss.md §9.5)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from htree_ops.ops.arguments import check_int
from htree_ops.ops.index_loss.function import draw_among, draw_positions, index_loss
from htree_ops.ops.index_loss.layers import WEIGHTS, index_of, know, take_pending
from htree_ops.ops.ranks import drawn_once, here, of_all_heads

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from htree_ops.ops.tree_attention.attention import Balance


#: Of queries and of keys.
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Attended:
    """What a layer attends with: q and k as its attention takes them, [B, T, heads, K] or of documents [N, heads, K].

    Attributes:
        function: of the layer, for messages.
        q, k: after the rotations.
        scale: of the scores, None for 1/sqrt(K).
        block_size: tokens of a block.
        lengths: of the sequences, whose padding stands behind; None where there is none.
        cu_seqlens: int32 [documents + 1] of packed documents.
        group: ranks that share the tokens, of which q and k are this rank's; the documents are of all ranks.
        balance: how they share them.
    """

    function: str
    q: Tensor
    k: Tensor
    scale: float | None
    block_size: int
    lengths: Tensor | None = None
    cu_seqlens: Tensor | None = None
    group: ProcessGroup | DeviceMesh | None = None
    balance: Balance = "zigzag"


@dataclass(frozen=True)
class Forward:
    """How a layer was last called beside a collector, for a checkpoint that runs it again."""

    rows: int
    with_grad: bool


class IndexLosses:
    """Losses that :func:`index_losses` has gathered; ``len()`` is the number of layers.

    A layer that is called several times has the mean over its calls.
    """

    def __init__(self, rows: int, fitted: Mapping[int, Pair] | None = None) -> None:
        self.rows = rows
        self._fitted = fitted  # by the id of its layer, the weights that fit_index moves
        self._of_layers: dict[int, list[Tensor]] = {}

    def __len__(self) -> int:
        self._gather()
        return len(self._of_layers)

    def __iter__(self) -> Iterator[Tensor]:
        """The loss of each layer, in the order of their first calls."""
        self._gather()
        return (torch.stack(losses).mean() for losses in self._of_layers.values())

    def of(self, layer: nn.Module) -> Tensor | None:
        """The loss of a layer; None where it was not called."""
        losses = self._of_layers.get(id(layer))
        return None if losses is None else torch.stack(losses).mean()

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

    def _gather(self) -> None:
        """Takes what compiled code has computed since."""
        if _ACTIVE and _ACTIVE[-1] is self:
            for layer, loss in take_pending():
                self._add(layer, loss)

    def _add(self, layer: object, loss: Tensor) -> None:
        self._of_layers.setdefault(id(layer), []).append(loss)


#: The attribute in which a layer keeps its latest :class:`Forward`.
LATEST = "_index_forward"
#: Innermost last. Checkpoints run layers again in threads of autograd, so that this is no context variable.
_ACTIVE: list[IndexLosses] = []


@contextmanager
def index_losses(rows: int = 128) -> Iterator[IndexLosses]:
    """Gathers :func:`htree_ops.index_loss` of every :class:`htree_ops.HTreeAttention` with an index that is called.

    Each call of a layer draws ``rows`` positions of each sequence from torch's default generator, never at padding.
    From then on the layer's index weights require grad. The losses stay usable behind the ``with``. Gradients go to
    these weights alone, for queries and keys are detached. A call whose sequences
    have no token behind their first block adds 0. The context is that of the process: layers that other threads run
    meanwhile put their losses into it too.

    Under non-reentrant checkpointing (``use_reentrant=False``) a layer that is run again draws the same positions and
    adds nothing.

    In a layer with ``cp_group`` the positions are those that the group's first rank draws, the loss is that of all of
    them on every rank, and the gradients are a rank's share: their sum over the ranks is that of one process. Where
    they are averaged, as by DistributedDataParallel and FSDP2, multiply the loss by the number of these ranks.

    Args:
        rows: positions of a sequence.

    Raises:
        TypeError, ValueError: rows is not an int of at least 1.
        RuntimeError: in the backward of a layer under reentrant checkpointing, which cannot reach the loss; in a layer
            whose index does not require grad yet where torch.compile (with ``fullgraph=True``),
            DistributedDataParallel or fully_shard has the model: they must know it before.

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
    with _active(IndexLosses(rows)) as losses:
        yield losses


@contextmanager
def _active(losses: IndexLosses) -> Iterator[IndexLosses]:
    """Lets layers add to ``losses``."""
    if _ACTIVE:
        _ACTIVE[-1]._gather()
    _ACTIVE.append(losses)
    try:
        yield losses
        losses._gather()
    finally:
        take_pending()  # of a forward that failed, or behind an inner context
        _ACTIVE.remove(losses)


@contextmanager
def fitting(rows: int, weights: Mapping[int, Pair]) -> Iterator[IndexLosses]:
    """As :func:`index_losses`, of layers whose index has ``weights`` in place of their own, by the ids of the layers.

    These layers attend densely, and only what follows from ``weights`` is recorded for a backward.
    """
    with _active(IndexLosses(rows, weights)) as losses:
        yield losses


def is_fitting() -> bool:
    """Whether layers attend densely, because :func:`htree_ops.fit_index` learns from what they see."""
    return len(_ACTIVE) > 0 and _ACTIVE[-1]._fitted is not None


def collect(layer: nn.Module, attended: Attended) -> Pair | None:
    """Adds the loss of a layer's call to the innermost :func:`index_losses`, where there is one.

    Returns:
        The index queries and keys of the layer, where they were made for the loss.
    """
    if torch.compiler.is_compiling():
        if len(_ACTIVE) == 0:  # which Dynamo can trace
            return None
        _check_known(layer, "torch.compile")
        loss, index = _loss(attended, _weights(layer), _ACTIVE[-1].rows)
        pending: list[Tensor] = getattr(layer, "_index_pending")  # noqa: B009
        pending.append(loss)
        return index
    if torch._C._current_graph_task_id() != -1:  # a checkpoint runs the layer again, inside a backward
        forward: Forward | None = getattr(layer, LATEST, None)
        if forward is None:
            return None
        if not forward.with_grad:
            raise RuntimeError(
                "index_losses: a layer must not run under reentrant checkpointing, whose first forward records "
                "nothing: use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        _, index = _loss(attended, _weights(layer), forward.rows)  # the first forward has saved it too
        return index
    if not _ACTIVE:
        if getattr(layer, LATEST, None) is not None:
            setattr(layer, LATEST, None)
        return None
    losses = _ACTIVE[-1]
    if losses._fitted is not None:
        if id(layer) in losses._fitted:
            with torch.enable_grad():
                losses._add(layer, _loss(attended, losses._fitted[id(layer)], losses.rows)[0])
        return None
    if wrapper := _wrapper(layer):
        _check_known(layer, wrapper)
    layer._index_chose = True  # type: ignore[assignment]  # it learns: no reason to warn
    know(layer)
    setattr(layer, LATEST, Forward(losses.rows, torch.is_grad_enabled()))
    for weight in _weights(layer):
        weight.requires_grad_(True)
    loss, index = _loss(attended, _weights(layer), losses.rows)
    losses._add(layer, loss)
    return index


def _wrapper(layer: nn.Module) -> str | None:
    """What has the layer and reduces its gradients; looked for while the layer does not require grad yet."""
    if all(weight.requires_grad for weight in _weights(layer)):
        return None
    ddp: Any = sys.modules.get("torch.nn.parallel.distributed")
    if ddp is not None and ddp.DistributedDataParallel._active_ddp_module is not None:
        return "DistributedDataParallel"
    states: Any = sys.modules.get("torch.distributed._composable_state")
    if states is not None:  # of fully_shard, by the modules that were given to it
        for sharded in list(states._module_state_mapping):
            if any(part is layer for part in sharded.modules()):
                return "fully_shard"
    return None


def _check_known(layer: nn.Module, wrapper: str) -> None:
    """Raises unless a wrapper, which looks once at what requires grad, knows of the index."""
    if not all(weight.requires_grad for weight in _weights(layer)):
        raise RuntimeError(
            f"index_losses: the index must require grad before {wrapper} has the model: call the model once inside "
            "index_losses, or htree_ops.fit_index, first"
        )


def _weights(layer: nn.Module) -> Pair:
    """The weights of index queries and of index keys."""
    return getattr(layer, WEIGHTS[0]), getattr(layer, WEIGHTS[1])


def _loss(attended: Attended, weights: Pair, rows: int) -> tuple[Tensor, Pair | None]:
    """The loss of one call, of the heads of all ranks; and the index of its tokens, where this rank has these."""
    if attended.group is not None:
        from htree_ops.distributed.index_loss import shared_index_loss  # only where it is asked for

        return shared_index_loss(
            attended, weights, lambda key, ends: _draw(key, ends, rows, attended.block_size)
        ), None
    q, k = (of_all_heads(x.detach(), weights[0]) for x in (attended.q, attended.k))
    index = index_of(attended.function, q, k, *weights)
    loss: Any = _loss_of_heads(attended, q, k, index, rows)
    found = index[0].detach(), index[1].detach()
    if not hasattr(attended.q, "device_mesh"):
        found = here(found[0]), here(found[1])
    return (loss.full_tensor() if hasattr(loss, "device_mesh") else loss), found


def _loss_of_heads(attended: Attended, q: Tensor, k: Tensor, index: Pair, rows: int) -> Tensor:
    """The loss of q and k, those of ``attended`` without a gradient; 0 where no token has an earlier block."""
    r, ends = attended.block_size, attended.cu_seqlens
    tensors: tuple[Tensor, ...] = (q, k, *index)
    options: dict[str, Any] = {"scale": attended.scale, "block_size": r}
    if attended.lengths is not None:
        B, T = q.shape[:2]
        if _none(attended.lengths, r):
            return _zero(*index)
        # Real rows and padding are documents in turn; only the former have positions.
        starts = torch.arange(B, device=q.device) * T
        ends = torch.stack((starts, starts + attended.lengths), 1).flatten()
        ends = torch.cat((ends, ends.new_tensor([B * T]))).to(torch.int32)
        positions = drawn_once(draw_among(starts, attended.lengths, B * rows, r), q)
        packed = (x.flatten(0, 1) for x in tensors)
        return index_loss(*packed, positions=positions, cu_seqlens=ends, **options)
    drawn = _draw(k, None if ends is None else here(ends), rows, r)
    if drawn is None:
        return _zero(*index)
    return index_loss(*tensors, positions=drawn_once(drawn, q), cu_seqlens=ends, **options)


def _draw(key: Tensor, ends: Tensor | None, rows: int, block_size: int) -> Tensor | None:
    """Positions of sequences, or of documents that have offsets; None where no token has an earlier block."""
    if ends is None:
        few = key.shape[1] <= block_size or key.shape[0] == 0
        return None if few else draw_positions(key, key, rows, block_size)
    lengths = ends.diff()
    return None if _none(lengths, block_size) else draw_among(ends[:-1], lengths, rows, block_size)


def _none(lengths: Tensor, block_size: int) -> bool:
    """Whether no sequence is longer than a block, as far as the host can see: on CUDA the op leaves positions out."""
    on_host = lengths.device.type == "cpu" and not torch.compiler.is_compiling()
    return lengths.numel() == 0 or (on_host and int(lengths.max()) <= block_size)


def _zero(index_query: Tensor, index_key: Tensor) -> Tensor:
    """A loss of 0 whose gradients are 0."""
    wide = torch.promote_types(index_query.dtype, torch.float32)
    return (index_query[..., :0].sum() + index_key[..., :0].sum()).to(wide)
