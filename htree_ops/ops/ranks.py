"""Tensors beside DTensors, whose heads lie on several ranks (docs/distributed.md)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def beside(x: Tensor, like: Tensor) -> Tensor:
    """A tensor that every rank has whole: as a DTensor where ``like`` is one, for an op takes no mixture of the two."""
    mesh = getattr(like, "device_mesh", None)
    if mesh is None or hasattr(x, "device_mesh"):
        return x
    from torch.distributed.tensor import DTensor, Replicate  # whoever has a DTensor has imported it

    return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)


def here(x: Tensor) -> Tensor:
    """What this rank has of a tensor."""
    shared: Any = x
    return shared.to_local() if hasattr(x, "device_mesh") else x


def drawn_once(x: Tensor, like: Tensor) -> Tensor:
    """:func:`beside` for random numbers: those of the first rank."""
    mesh = getattr(like, "device_mesh", None)
    if mesh is None:
        return x
    for dim in range(mesh.ndim):
        sent = torch.ops._c10d_functional.broadcast(x, 0, mesh.get_group(dim).group_name)
        x = torch.ops._c10d_functional.wait_tensor(sent)
    return beside(x, like)


def placed_as(x: Tensor, like: Tensor) -> Tensor:
    """A DTensor that lies on the ranks as another one of as many dimensions; another tensor as it is."""
    shared: Any = x
    placements = getattr(like, "placements", None)
    if placements is None or not hasattr(x, "device_mesh"):
        return x
    moved: Tensor = shared.redistribute(placements=placements)
    return moved


def of_all_heads(x: Tensor, weight: Tensor) -> Tensor:
    """This rank's heads [..., heads, D] as those of all ranks, where ``weight`` [heads, ...] is sharded over these."""
    shared: Any = weight
    if not hasattr(weight, "device_mesh") or hasattr(x, "device_mesh"):
        return x
    from torch.distributed.tensor import DTensor, Shard

    placements = [Shard(x.dim() - 2) if place == Shard(0) else place for place in shared.placements]
    return DTensor.from_local(x, shared.device_mesh, placements, run_check=False)
