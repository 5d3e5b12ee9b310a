"""Collectives that autograd and torch.compile know, slices of a text among ranks, and agreement before a call."""

from __future__ import annotations

import reprlib
import zlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.tensor import DTensor

from htree_ops.errors import ShapeMismatchError
from htree_ops.ops.tree_attention.attention import Balance

__all__ = [
    "added",
    "agree",
    "all_gather",
    "check_local",
    "cut",
    "exchange",
    "group_of",
    "join",
    "parts_of",
    "waited",
]


def group_of(function: str, group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    """The process group that a caller means; None is the default group.

    Raises:
        TypeError: neither a process group nor a mesh that this process is in. ValueError: a mesh of several dimensions.
        RuntimeError: torch.distributed is not initialised.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"{function}: group must be a mesh of one dimension, got {group.ndim}: {group}")
        if group.get_coordinate() is None:
            raise TypeError(f"{function}: group must be a mesh that holds this process, got {group}")
        return group.get_group()
    if group is None:
        group = dist.group.WORLD if dist.is_initialized() else None
        if group is None:
            raise RuntimeError(f"{function}: torch.distributed must be initialised (init_process_group)")
        return group
    if not isinstance(group, dist.ProcessGroup):
        outside = group == dist.GroupMember.NON_GROUP_MEMBER
        came = "a group without it" if outside else type(group).__name__
        raise TypeError(f"{function}: group must be a ProcessGroup that holds this process, got {came}")
    return group


def check_local(function: str, **tensors: object) -> None:
    """Raises TypeError for a DTensor: these functions exchange what a rank holds, as it is."""
    for name, x in tensors.items():
        if isinstance(x, DTensor):
            raise TypeError(
                f"{function}: {name} must be what this rank holds, got a DTensor: take its to_local(), or leave "
                "use_local_output=True in the plan of parallelize_module"
            )


# ---- who has which tokens. Of n ranks each has one part of the text ("contiguous"), or the parts i and 2n - 1 - i of
# 2n, one behind the other ("head_tail"), so that short and long causal rows meet on each rank. "striped" does that in
# each quarter of the text: the work of a row of tree attention does not grow evenly along the text, but evenly enough
# along a quarter.

STRETCHES = {"head_tail": 1, "striped": 4}


def parts_of(rank: int, size: int, balance: Balance) -> tuple[int, ...]:
    """The parts of a rank, in its order; the text has ``size`` times as many."""
    if balance == "contiguous":
        return (rank,)
    ends = (rank, 2 * size - 1 - rank)
    return tuple(2 * size * stretch + end for stretch in range(STRETCHES[balance]) for end in ends)


def join(gathered: Tensor, dim: int, balance: Balance) -> Tensor:
    """[n, *slice of a rank] -> the whole text along ``dim``, in its order; a view where that is one."""
    if balance == "contiguous":
        return gathered.movedim(0, dim).flatten(dim, dim + 1)
    size = gathered.shape[0]
    parts: dict[int, Tensor] = {}
    for rank, text in enumerate(gathered.unbind(0)):
        own = parts_of(rank, size, balance)
        parts |= zip(own, text.chunk(len(own), dim), strict=True)
    return torch.cat([parts[i] for i in range(len(parts))], dim)


def cut(text: Tensor, size: int, dim: int, balance: Balance) -> Tensor:
    """The whole text -> [n, parts, *part]: the parts of every rank."""
    per_rank = len(parts_of(0, size, balance))
    parts = text.chunk(per_rank * size, dim)
    order = [i for rank in range(size) for i in parts_of(rank, size, balance)]
    return torch.stack([parts[i] for i in order]).unflatten(0, (size, per_rank))


# ---- collectives, by the name of the group: a traced graph holds no group


def all_gather(x: Tensor, group_name: GroupName) -> Tensor:
    """[n, *x.shape]: what every rank has, in the order of ranks. :func:`waited` gives the values."""
    return functional.all_gather_tensor(x.contiguous()[None], 0, group_name)


def waited(x: Tensor) -> Tensor:
    """The result of a collective, when it is there."""
    return x.wait() if isinstance(x, functional.AsyncCollectiveTensor) else x


def exchange(x: Tensor, group_name: GroupName) -> Tensor:
    """[n, *x.shape[1:]]: what each rank has for this one, x[rank of this process]. :func:`waited` gives the values."""
    return functional.all_to_all_single(x.contiguous(), None, None, group_name)


def added(received: Tensor, dim: int) -> Tensor:
    """What :func:`exchange` of :func:`cut` gave -> this rank's slice, summed over the ranks in fp32 (fp64 for fp64).

    The two are a reduce-scatter whose result does not depend on the order that a backend takes.
    """
    total = waited(received).sum(0, dtype=torch.promote_types(received.dtype, torch.float32))
    return total.movedim(0, dim).flatten(dim, dim + 1)  # of one text without a copy


# ---- agreement


#: Numbers of one exchange; the same for all calls, so that calls that differ meet as well.
_FACTS = 32


def agree(
    function: str,
    group: dist.ProcessGroup,
    facts: Mapping[str, int],
    options: Mapping[str, object],
    refusal: Exception | None,
) -> None:
    """Compares what the ranks are about to do, so that all of them raise where one cannot go on.

    A collective whose sizes differ hangs or gives garbage. This one has the same size for every call. It waits for the
    device unless the group has a backend for the CPU. Not while torch.compile traces.

    Args:
        facts: numbers that must be the same on every rank, by their names.
        options: what else must be the same; of it the ranks compare checksums.
        refusal: the error that this rank would raise by itself.

    Raises:
        ShapeMismatchError: a fact or an option differs; it is named with what is known of its values.
        RuntimeError: another rank has refused its arguments.
        Exception: ``refusal``.
    """
    code = sum(ord(letter) * 31**place for place, letter in enumerate(function)) % 2**31
    sums = [zlib.crc32(repr(value).encode()) for value in options.values()]
    mine = [code, int(refusal is not None), *facts.values(), *sums]
    mine += [0] * (_FACTS - len(mine))
    kinds = {kind.type for kind in group._device_types}
    where = "cpu" if "cpu" in kinds else min(kinds)  # the current device of that kind
    gathered = torch.empty(group.size() * _FACTS, dtype=torch.int64, device=where)
    dist.all_gather_into_tensor(gathered, torch.tensor(mine, dtype=torch.int64, device=where), group=group)
    rows = gathered.view(-1, _FACTS).tolist()
    if refusal is not None:
        raise refusal
    if any(row[0] != code for row in rows):
        raise RuntimeError(f"{function}: another rank of the group makes another call")
    refused = [rank for rank, row in enumerate(rows) if row[1]]
    if refused:
        raise RuntimeError(
            f"{function}: rank {refused[0]} of the group has refused its arguments; see its error"
        )
    for place, name in enumerate((*facts, *options), start=2):
        values = [row[place] for row in rows]
        ours = values[group.rank()]
        others = [rank for rank, value in enumerate(values) if value != ours]
        if not others:
            continue
        came = f"{values} by rank"
        if name in options:
            ours = reprlib.repr(options[name])
            came = f"{ours} on this one and another on rank {others[0]}"
        raise ShapeMismatchError(
            f"{function}: {name} must be the same on every rank, got {came}",
            expected=None if name in options else values[0],
            actual=ours,
        )
