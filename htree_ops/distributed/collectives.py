"""Collectives that autograd and torch.compile know, slices of a sequence among ranks, and agreement before a call."""

from __future__ import annotations

import functools
import reprlib
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.tensor import DTensor

from htree_ops.errors import ShapeMismatchError
from htree_ops.ops.tree_attention.attention import Balance
from htree_ops.ops.tree_cache.functions import cache_layers


def group_of(function: str, group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    """The process group that a caller means; None is the default group, which must be there."""
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


# ---- who has which tokens. Of n ranks each has one part of the sequence ("contiguous"), or the parts i and 2n - 1 - i
# of 2n, one behind the other ("zigzag"), so that short and long causal rows meet on each rank. "striped" does that in
# each quarter of the sequence: the work of a row of tree attention does not grow evenly along the sequence, but evenly
# enough along a quarter. "work" gives a rank some parts from the head of what the ranks before it have left, and the
# others from its tail, as many from either as make its share of the work.

STRETCHES = {"zigzag": 1, "striped": 4}
WORK_PARTS = 16

#: The default options of tree attention: rows before so many tokens are dense, and so many children have a parent.
DENSE_TOKENS, CHILDREN = 8192, 16
#: What the gather of a list costs, as a multiple of a dense product with as many nodes (on an H200).
GATHER_COST = 1.2


def work_before(token: int, layers: int) -> float:
    """The work of the rows before a token, in rows that multiply DENSE_TOKENS nodes densely.

    A dense row multiplies all tokens before it. Another one gathers that many tokens, and in each layer above it meets
    the nodes before it, but at most that many.
    """
    dense = min(token, DENSE_TOKENS)
    work = dense * dense / (2 * DENSE_TOKENS)
    if token > dense:
        work += GATHER_COST * (token - dense)
        for layer in range(1, layers):
            # From this token on a row meets as many nodes as it ever does.
            full = DENSE_TOKENS * CHILDREN**layer
            rising = (min(token, full) ** 2 - dense**2) / (2 * full)
            work += rising + max(0, token - full)
    return work


def _heads(size: int, tokens: int) -> tuple[int, ...]:
    """How many parts each rank has from the head, with ``balance="work"``."""
    layers = cache_layers(tokens, CHILDREN, DENSE_TOKENS)
    count = WORK_PARTS * size
    before = [work_before(tokens * part // count, layers) for part in range(count + 1)]
    heads: list[int] = []
    first, end = 0, count
    for rank in range(size - 1):
        share = (before[end] - before[first]) / (size - rank)
        # The more parts are from the head, the less work they are.
        found = [
            abs(before[first + head] - before[first] + before[end] - before[end - WORK_PARTS + head] - share)
            for head in range(WORK_PARTS + 1)
        ]
        head = found.index(min(found))  # torch.compile knows no min with a key
        heads.append(head)
        first, end = first + head, end - WORK_PARTS + head
    return (*heads, WORK_PARTS)


_known_heads = functools.lru_cache(256)(_heads)


def parts_per_rank(balance: Balance) -> int:
    """The parts that a rank has, all of one length."""
    return {"contiguous": 1, "work": WORK_PARTS}.get(balance) or 2 * STRETCHES[balance]


def parts_of(rank: int, size: int, balance: Balance, tokens: int) -> tuple[int, ...]:
    """The parts of a rank, in its order; the sequence of ``tokens`` tokens has ``size`` times as many."""
    if balance == "contiguous":
        return (rank,)
    if balance == "work":
        known = _heads if torch.compiler.is_compiling() else _known_heads  # the compiler sees no cache
        # A compiled graph is for one length: int() of a symbol is one still, a string is not.
        heads = known(size, int(f"{tokens}"))
        first = sum(heads[:rank])
        end = WORK_PARTS * size - (WORK_PARTS * rank - first)
        tail = WORK_PARTS - heads[rank]
        return (*range(first, first + heads[rank]), *range(end - tail, end))
    ends = (rank, 2 * size - 1 - rank)
    return tuple(2 * size * stretch + end for stretch in range(STRETCHES[balance]) for end in ends)


def join(gathered: Tensor, dim: int, balance: Balance) -> Tensor:
    """[n, *slice of a rank] -> the whole sequence along ``dim``, in its order; a view where that is one."""
    if balance == "contiguous":
        return gathered.movedim(0, dim).flatten(dim, dim + 1)
    size = gathered.shape[0]
    parts: dict[int, Tensor] = {}
    for rank, local in enumerate(gathered.unbind(0)):
        own = parts_of(rank, size, balance, size * local.shape[dim])
        parts |= zip(own, local.chunk(len(own), dim), strict=True)
    return torch.cat([parts[i] for i in range(len(parts))], dim)


def cut(whole: Tensor, size: int, dim: int, balance: Balance) -> Tensor:
    """The whole sequence -> [n, parts, *part]: the parts of every rank."""
    per_rank = parts_per_rank(balance)
    parts = whole.chunk(per_rank * size, dim)
    order = [i for rank in range(size) for i in parts_of(rank, size, balance, whole.shape[dim])]
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
    return total.movedim(0, dim).flatten(dim, dim + 1)  # of one sequence without a copy


# ---- agreement


#: Numbers of one exchange; the same for all calls, so that calls that differ meet as well.
_FACTS = 32


@contextmanager
def agreement(function: str, group: dist.ProcessGroup) -> Iterator[tuple[dict[str, int], dict[str, object]]]:
    """Compares what the ranks are about to do, so that all of them raise where one cannot go on.

    A collective whose sizes differ hangs or gives garbage. This one has the same size for every call. It waits for the
    device unless the group has a backend for the CPU. Not while torch.compile traces.

    Inside, this rank checks its own arguments, and fills two dictionaries by names: numbers that must be the same on
    every rank, and options that must be the same, of which the ranks compare checksums.

    Raises:
        ShapeMismatchError: a number or an option differs; it is named with what is known of its values.
        RuntimeError: another rank has refused its arguments.
        TypeError, ValueError, RuntimeError: this rank has refused its arguments; the others know.
    """
    facts: dict[str, int] = {}
    options: dict[str, object] = {}
    try:
        yield facts, options
    except (TypeError, ValueError, RuntimeError) as refusal:
        _compare(function, group, facts, options, refusal)
        raise
    _compare(function, group, facts, options, None)


def _compare(
    function: str,
    group: dist.ProcessGroup,
    facts: Mapping[str, int],
    options: Mapping[str, object],
    refusal: Exception | None,
) -> None:
    """What :func:`agreement` does where this rank has the error ``refusal`` or none."""
    if group.size() == 1:
        return
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
        return
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


def wanted_gradients(**tensors: Tensor) -> dict[str, int]:
    """As numbers for :func:`agreement`."""
    return {
        f"whether {name} needs a gradient": int(torch.is_grad_enabled() and x.requires_grad)
        for name, x in tensors.items()
    }


def kind_of(x: Tensor) -> dict[str, object]:
    """As options for :func:`agreement`."""
    return {"dtype": x.dtype, "the type of device": x.device.type}
