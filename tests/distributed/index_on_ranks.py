"""What the tests of an index that learns run on every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from htree_ops import HTreeAttention, TreeOptions, fit_index, index_losses

OPTIONS = TreeOptions(compression_rate=4, top_k=4, max_top_nodes=16)


class Model(nn.Module):
    """Two layers with an index."""

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            HTreeAttention(32, num_heads=2, options=OPTIONS, index_dim=16) for _ in range(2)
        )
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x))
        return x


def tokens(rank: int) -> Tensor:
    return torch.randn(1, 40, 32, generator=torch.Generator().manual_seed(rank))


def seen(model: nn.Module) -> nn.Module:
    """The first losses, from which on the indexes require grad."""
    with index_losses(rows=2):
        model(tokens(0))
    return model


def step(model: nn.Module, rank: int) -> float:
    """A step of the model and its indexes, whose gradients stay; the loss of the indexes."""
    torch.manual_seed(10 + rank)
    with index_losses(rows=6) as losses:
        out = model(tokens(rank))
    (out.square().mean() + losses.mean()).backward()
    return losses.mean().item()


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): whole(p.grad).clone() for name, p in model.named_parameters()}


def wanted(checkpoints: bool) -> tuple[dict[str, Tensor], list[float]]:
    """The mean over the ranks of what each has alone."""
    found, losses = [], []
    for rank in range(dist.get_world_size()):
        model = seen(Model(checkpoints))
        losses.append(step(model, rank))
        found.append(gradients(model))
    return {name: torch.stack([x[name] for x in found]).mean(0) for name in found[0]}, losses


def shared(way: str, checkpoints: bool) -> tuple[float, float]:
    """The largest differences of gradients and losses from those without a wrapper, over two steps."""
    expected, losses = wanted(checkpoints)
    model = seen(Model(checkpoints))
    if way == "DDP":
        model = DistributedDataParallel(model)
    else:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    rank, error, of_loss = dist.get_rank(), 0.0, 0.0
    for _ in range(2):
        model.zero_grad()
        of_loss = max(of_loss, abs(step(model, rank) - losses[rank]))
        found = gradients(model)
        assert found.keys() == expected.keys()
        error = max(error, *((found[name] - x).abs().max().item() for name, x in expected.items()))
    return error, of_loss


def quiet(way: str) -> int:
    """Steps without losses of a model whose indexes no loss has seen."""
    model: nn.Module = Model()
    if way == "DDP":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model)
    for number in range(3):
        model.zero_grad()
        model(tokens(number)).square().mean().backward()
    return sum(p.grad is None for p in model.parameters())


def late(way: str) -> str:
    """What losses say of a model that has its wrapper already."""
    model: nn.Module = Model()
    if way == "DDP":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model)
    try:
        step(model, 0)
    except RuntimeError as error:
        return str(error)
    return ""


def fit_sharded() -> str:
    """What fit_index says of it."""
    model = Model()
    fully_shard(model)
    try:
        fit_index(model, [tokens(0)], steps=1, index_dim=16)
    except NotImplementedError as error:
        return str(error)
    return ""
