"""What the tests of an index that learns run on every rank."""

from typing import Any

import torch
import torch.distributed as dist
from process_pool import group_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from htree_ops import HTreeAttention, TreeOptions, fit_index, index_losses
from htree_ops.distributed import shard_sequence, unshard_sequence

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


def wrapped(model: Model, way: str) -> nn.Module:
    if way == "DDP":
        return DistributedDataParallel(model)
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def shared(way: str, checkpoints: bool) -> tuple[float, float]:
    """The largest differences of gradients and losses from those without a wrapper, over two steps."""
    expected, losses = wanted(checkpoints)
    model = wrapped(seen(Model(checkpoints)), way)
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
    model = wrapped(Model(), way)
    for number in range(3):
        model.zero_grad()
        model(tokens(number)).square().mean().backward()
    return sum(p.grad is None for p in model.parameters())


def late(way: str) -> str:
    """What losses say of a model that has its wrapper already."""
    model = wrapped(Model(), way)
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


# ---- ranks that share the tokens


class Shared(nn.Module):
    """Two layers whose tokens lie on the ranks of a group, or the same layers in one process."""

    def __init__(
        self, group: dist.ProcessGroup | None, balance: str, checkpoints: bool, **keywords: Any
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        options = {"options": OPTIONS, "cp_group": group, "cp_balance": balance} | keywords
        self.layers = nn.ModuleList(HTreeAttention(32, 4, 2, 16, **options) for _ in range(2))
        self.checkpoints = checkpoints

    def forward(self, x: Tensor, **call: Any) -> Tensor:
        for layer in self.layers:
            x = x + (
                checkpoint(layer, x, use_reentrant=False, **call) if self.checkpoints else layer(x, **call)
            )
        return x


def learned(
    model: Shared, x: Tensor, rows: int, call: dict[str, Any]
) -> tuple[Tensor, list[float], list[Tensor]]:
    """Rows, losses and gradients of a step."""
    torch.manual_seed(7)
    with index_losses(rows=rows) as losses:
        out = model(x, **call)
    (out.square().sum() + losses.mean()).backward()
    return out.detach(), [loss.item() for loss in losses], [p.grad for p in model.parameters()]


def shared_tokens(
    size: int, balance: str, packed: bool, checkpoints: bool = False, rows: int = 7, device: str = "cpu"
) -> dict[str, float]:
    """The largest differences from one process. The ranks draw positions of their own, of which the first's count."""
    group, dim = group_of(size), 0 if packed else 1
    one, many = Shared(None, balance, checkpoints).to(device), Shared(group, balance, checkpoints).to(device)
    shape = (512, 32) if packed else (2, 512, 32)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(device)
    ends = torch.tensor([0, 3, 150, 200, 201, 480], dtype=torch.int32)
    of_one = {"cu_seqlens": ends.to(device)} if packed else {}
    expected, losses, gradients = learned(one, x, rows, of_one)
    mine = shard_sequence(x, group, dim, balance=balance)
    out, found, sums = learned(many, mine, rows, {"cu_seqlens": ends} if packed else {})
    for gradient in sums:
        dist.all_reduce(gradient, group=group)
    pairs = zip(sums, gradients, strict=True)
    return {
        "out": float((unshard_sequence(out, group, dim, balance=balance) - expected).abs().max()),
        "losses": max(abs(a - b) for a, b in zip(found, losses, strict=True)),
        "gradients": max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs),
    }


def other_seeds(size: int) -> list[float]:
    """Losses of ranks with seeds of their own."""
    group = group_of(size)
    model = Shared(group, "zigzag", False)
    torch.manual_seed(dist.get_rank())
    with index_losses(rows=5) as losses, torch.no_grad():
        model(shard_sequence(tokens_of_all(), group))
    return [loss.item() for loss in losses]


def tokens_of_all() -> Tensor:
    return torch.randn(1, 256, 32, generator=torch.Generator().manual_seed(5))


def shared_fit(size: int, had: bool) -> dict[str, Any]:
    """Losses and indexes of fit_index on shared tokens, and in one process; new indexes are those of the first rank."""
    group = group_of(size)
    found = []
    for model, share in (
        (Shared(None, "zigzag", False, index_dim=16 * had), lambda x: x),
        (Shared(group, "zigzag", False, index_dim=16 * had), lambda x: shard_sequence(x, group)),
    ):
        first = dist.get_global_rank(group, 0)
        torch.manual_seed(dist.get_rank() if share(tokens_of_all()).shape[1] < 256 else first)
        nats = fit_index(model, [share(tokens_of_all())] * 4, steps=4, rows=6, index_dim=16)
        found.append((nats, [p.detach() for name, p in model.named_parameters() if "index" in name]))
    (nats, weights), (shared_nats, shared_weights) = found
    return {
        "nats": max(abs(a - b) for a, b in zip(nats, shared_nats, strict=True)),
        "weights": max(float((a - b).abs().max()) for a, b in zip(weights, shared_weights, strict=True)),
        "count": len(shared_weights),
    }


def nothing_to_learn(size: int) -> list[float]:
    """Losses of documents none of which is longer than a block."""
    model = Shared(group_of(size), "zigzag", False)
    ends = torch.arange(0, 65, 4, dtype=torch.int32)
    with index_losses() as losses:
        model(shard_sequence(torch.randn(64, 32), group_of(size), 0), cu_seqlens=ends)
    losses.mean().backward()
    assert all(not p.grad.any() for name, p in model.named_parameters() if "index" in name)
    return [loss.item() for loss in losses]


def compiled_losses(size: int) -> tuple[float, float]:
    """The largest differences that torch.compile makes to losses and gradients."""
    group = group_of(size)
    found = []
    for backend in (None, "aot_eager"):
        torch._dynamo.reset()
        model: Any = Shared(group, "zigzag", False)
        x = shard_sequence(tokens_of_all(), group)
        with index_losses(rows=2):
            model(x)
        run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
        torch.manual_seed(7)
        with index_losses(rows=6) as losses:
            out = run(x)
        (out.square().sum() + losses.mean()).backward()
        found.append((losses.mean().item(), [p.grad for p in model.parameters()]))
    (a, eager), (b, fast) = found
    return abs(a - b), max(float((x - y).abs().max()) for x, y in zip(eager, fast, strict=True))
