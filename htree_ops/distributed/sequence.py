"""The tokens of a sequence among the ranks of a group, and back (docs/distributed.md)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName

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
    wanted_gradients,
)
from htree_ops.ops.arguments import check_kind, check_tensor
from htree_ops.ops.tree_attention.attention import Balance, check_balance


def _checked_dim(function: str, x: Tensor, dim: int) -> int:
    check_local(function, x=x)
    check_tensor(function, "x", x)
    check_kind(function, "dim", dim, "int")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{function}: dim must be a dimension of x, got {dim} for x {tuple(x.shape)}")
    return dim % x.dim()


def shard_sequence(
    x: Tensor,
    group: dist.ProcessGroup | DeviceMesh | None,
    dim: int = 1,
    *,
    balance: Balance = "zigzag",
) -> Tensor:
    """The tokens of this rank, from a sequence that every rank has.

    With n ranks "zigzag" cuts the sequence into 2n parts and gives rank i the parts i and 2n - 1 - i, one behind the
    other: early rows of causal attention are cheap, late ones are not, and each rank has both. "striped" does that in
    each quarter of the sequence, which shares the work of tree attention more evenly (docs/distributed.md). "work" cuts
    it into 16n parts: in turn each rank takes 16 of those that are left, some at their head and some at their tail,
    which together are its share of the work of tree attention with the default options. "contiguous" gives rank i part
    i of n. Nothing is communicated.

    Args:
        x: [..., T, ...], the same on every rank; any dtype.
        group: the ranks that share the sequence; None is the default group, a mesh must have one dimension.
        dim: the dimension of the tokens.
        balance: "zigzag", "striped", "contiguous" or "work".

    Returns:
        [..., T / n, ...], a new tensor. Its gradient with respect to x is 0 for the tokens of other ranks.

    Raises:
        ValueError: T is not divided by 2n (zigzag), 8n (striped), n (contiguous) or 16n (work); the message names
            the next length that is.
        TypeError: no tensor, or no process group.
    """
    name = "shard_sequence"
    check_balance(name, balance)
    dim = _checked_dim(name, x, dim)
    members = group_of(name, group)
    rank, size = members.rank(), members.size()
    if size == 1:
        return x.clone()
    count = parts_per_rank(balance) * size
    tokens = x.shape[dim]
    if tokens % count:
        raise ValueError(
            f"{name}: size {dim} of x must be a multiple of {count} for {size} ranks and balance={balance!r}, got "
            f"{tokens}; the next length that works is {(tokens // count + 1) * count}"
        )
    parts = x.chunk(count, dim)
    return torch.cat([parts[i] for i in parts_of(rank, size, balance, tokens)], dim)


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group_name: GroupName, size: int, dim: int, balance: Balance) -> Tensor:
        ctx.group_name, ctx.size, ctx.dim, ctx.balance = group_name, size, dim, balance
        return join(waited(all_gather(x, group_name)), dim, balance)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        received = exchange(cut(gradient, ctx.size, ctx.dim, ctx.balance), ctx.group_name)
        return added(received, ctx.dim).to(gradient.dtype), None, None, None, None


def _checked_slice(x: Tensor, dim: int, balance: Balance) -> int:
    """Raises what this rank alone can see of a call of :func:`unshard_sequence`."""
    name = "unshard_sequence"
    check_balance(name, balance)
    dim = _checked_dim(name, x, dim)
    count = parts_per_rank(balance)
    if x.shape[dim] % count:
        raise ValueError(
            f"{name}: size {dim} of x must be a multiple of {count} for {balance}, got {tuple(x.shape)}"
        )
    return dim


def unshard_sequence(
    x: Tensor,
    group: dist.ProcessGroup | DeviceMesh | None,
    dim: int = 1,
    *,
    balance: Balance = "zigzag",
) -> Tensor:
    """The whole sequence on every rank, from the tokens of each; undoes :func:`shard_sequence`.

    Args:
        x: [..., T / n, ...], of the same shape and dtype on every rank; any dtype.
        group, dim, balance: as in :func:`shard_sequence`.

    Returns:
        [..., T, ...]. The gradient of x is the sum over all ranks of their gradients of these tokens, added in fp32
        (fp64 for fp64) in a fixed order: a loss that every rank computes from the whole sequence counts n times.

    Raises:
        ShapeMismatchError: the ranks have different shapes, dtypes or devices, on every rank; not in compiled code.
        ValueError: a number of tokens that 2 (zigzag), 8 (striped) or 16 (work) does not divide.
        TypeError: no tensor, or no process group.
    """
    name = "unshard_sequence"
    members = group_of(name, group)
    size = members.size()
    if size == 1:
        check_balance(name, balance)
        _checked_dim(name, x, dim)
        return x.clone()
    if torch.compiler.is_compiling():
        dim = _checked_slice(x, dim, balance)
    else:
        with agreement(name, members) as (facts, same):
            dim = _checked_slice(x, dim, balance)
            facts |= {"the number of dimensions of x": x.dim(), "dim": dim, **wanted_gradients(x=x)}
            facts |= {f"size {i} of x": length for i, length in enumerate(x.shape[:16])}
            same |= {**kind_of(x), "balance": balance}
    if x.is_floating_point() and x.element_size() == 1:  # no backend sends FP8: its bytes go as what they are
        codes: Tensor = _Unshard.apply(x.view(torch.uint8), members.group_name, size, dim, balance)
        return codes.view(x.dtype)
    return _Unshard.apply(x, members.group_name, size, dim, balance)
