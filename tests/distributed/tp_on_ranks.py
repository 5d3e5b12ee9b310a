"""What the tests of tensor parallelism run on every rank."""

import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from rules_on_ranks import TREE, mesh_of, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import parallelize_module

import htree_ops
from htree_ops.distributed import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    shard_sequence,
    unshard_sequence,
)
from tests.support.cases import normal


def heads_of_ranks(local: bool = True) -> dict[str, Any]:
    """Projections whose heads the ranks share."""
    return {name: ColwiseParallel(use_local_output=local) for name in ("q_proj", "k_proj", "v_proj")}


def context_and_tensor() -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("context", "tensor"))


def train(
    one: nn.Module,
    many: nn.Module,
    inputs: tuple[Tensor, ...],
    given: tuple[Any, ...],
    call_one: Callable[..., Tensor] | None = None,
    call_many: Callable[..., Tensor] | None = None,
    *,
    index_learns: bool = False,
) -> dict[str, Any]:
    """Three steps of gradient descent of a model and of its parallel copy, each called as it is or as is said."""
    losses: list[list[float]] = [[], []]
    runs = ((one, call_one or one, inputs, losses[0]), (many, call_many or many, given, losses[1]))
    for model, call, args, record in runs:
        # Positions are those of the first rank: the generators of odd ranks differ. They are the same in each step.
        seed = 7 if model is one else 7 + dist.get_rank() % 2
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimiser.zero_grad()
            torch.manual_seed(seed)
            with htree_ops.index_losses(rows=60) if index_learns else nullcontext() as of_index:
                loss = whole(call(*args).square().mean())
            if index_learns:
                loss = loss + of_index.mean()
            loss.backward()
            optimiser.step()
            record.append(float(loss))
    pairs = zip(one.parameters(), many.parameters(), strict=True)
    moved = max(float((whole(ours) - theirs).abs().max()) for theirs, ours in pairs)
    return {"losses": losses, "parameters": moved, "loss": abs(losses[0][-1] - losses[1][-1])}


def attention(
    size: int,
    local: bool,
    device: str = "cpu",
    heads: tuple[int, int] = (8, 4),
    local_result: bool = True,
    keywords: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """HTreeAttention with its projections sharded by heads; ``keywords`` are those of its forward."""
    mesh = mesh_of(size, device)
    torch.manual_seed(3)
    num_heads, num_kv_heads = heads
    one = htree_ops.HTreeAttention(24, num_heads, num_kv_heads, 4, **TREE, **options).to(device)
    plan = heads_of_ranks(local)
    if num_kv_heads % size and not local:  # too few to share: every rank has them all
        plan |= {
            name: ColwiseParallel(output_layouts=Replicate(), use_local_output=False)
            for name in ("k_proj", "v_proj", *(["q_proj"] if num_heads % size else []))
        }
    plan["o_proj"] = RowwiseParallel(use_local_output=local_result)
    many = parallelize_module(copy.deepcopy(one), mesh, plan)
    keywords = keywords or {}
    x = normal((1 if "cu_seqlens" in keywords else 2, 80, 24), torch.float32, device, 0)
    calls = [functools.partial(model, **keywords) for model in (one, many)]
    return train(one, many, (x,), (x,), *calls)


def layers_with_index(
    size: int, local: bool, device: str = "cpu", num_kv_heads: int = 4
) -> tuple[htree_ops.HTreeAttention, htree_ops.HTreeAttention]:
    """A layer whose index is not as it was drawn, and its copy with heads, and those of the index, on the ranks."""
    torch.manual_seed(3)
    options = {**TREE, "compression_rate": 8, "max_top_nodes": 20, "selection_span": None}
    one = htree_ops.HTreeAttention(24, 8, num_kv_heads, 16, index_dim=16, **options).to(device)
    with torch.no_grad():
        one.index_query_weight.add_(normal((8, 16, 16), torch.float32, device, 6, 0.1))
    plan = heads_of_ranks(local)
    if num_kv_heads % size:
        whole = ColwiseParallel(output_layouts=Replicate(), use_local_output=False)
        plan |= {"k_proj": whole, "v_proj": whole}
    else:
        plan[""] = ColwiseParallel()
    plan["o_proj"] = RowwiseParallel()
    return one, parallelize_module(copy.deepcopy(one), mesh_of(size, device), plan)


def attention_with_index(
    size: int,
    local: bool,
    learns: bool,
    keywords: dict[str, Any] | None = None,
    device: str = "cpu",
    num_kv_heads: int = 4,
) -> dict[str, Any]:
    """HTreeAttention with an index, which learns or not; ``keywords`` are those of its forward."""
    one, many = layers_with_index(size, local, device, num_kv_heads)
    before = one.index_key_weight.clone()
    given = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in (keywords or {}).items()}
    x = normal((1 if "cu_seqlens" in given else 2, 80, 24), torch.float32, device, 0)
    calls = [functools.partial(model, **given) for model in (one, many)]
    found = train(one, many, (x,), (x,), *calls, index_learns=learns)
    placed = many.index_query_weight
    found["weights here"] = len(placed.to_local() if isinstance(placed, DTensor) else placed)
    return found | {"moved": float((one.index_key_weight - before).abs().max())}


def decode(size: int, way: str) -> dict[str, Any]:
    """A prompt and single tokens from caches that hold the heads of each rank; ``way`` is a scope, or "index"."""
    if way == "index":
        one, many = layers_with_index(size, True)
    else:
        torch.manual_seed(3)
        one = htree_ops.HTreeAttention(24, 8, 4, 4, scope=way, **TREE)
        plan = heads_of_ranks()
        many = parallelize_module(copy.deepcopy(one), mesh_of(size), {**plan, "o_proj": RowwiseParallel()})
    x = normal((2, 40, 24), torch.float32, "cpu", 0)
    caches = [model.make_cache(2, 48) for model in (one, many)]
    errors = []
    with torch.no_grad():
        for begin, end in ((0, 37), (37, 38), (38, 40)):
            expected, out = (
                model(x[:, begin:end], cache=cache) for model, cache in zip((one, many), caches, strict=True)
            )
            errors.append(float((out - expected).abs().max()))
    return {"errors": errors, "bytes": [cache.k_pool.numel() for cache in caches]}


def decode_on_dtensors(size: int, by_index: bool) -> None:
    """A cache of a layer whose projections give DTensors."""
    if by_index:
        _, many = layers_with_index(size, False)
    else:
        many = htree_ops.HTreeAttention(24, 8, 4, 4, **TREE)
        plan = {name: ColwiseParallel(use_local_output=False) for name in ("q_proj", "k_proj", "v_proj")}
        parallelize_module(many, mesh_of(size), plan)
    cache = many.make_cache(2, 48)
    try:
        with torch.no_grad():
            many(normal((2, 37, 24), torch.float32, "cpu", 0), cache=cache)
    finally:
        assert cache.host_lengths() == [0, 0]


def index_of_all_heads(size: int) -> None:
    """Heads of the projections are sharded, and those of the index are not."""
    many = htree_ops.HTreeAttention(64, 4, 4, index_dim=16, **TREE, selection_span=None)
    plan = heads_of_ranks()
    parallelize_module(many, mesh_of(size), plan)
    many(normal((2, 40, 64), torch.float32, "cpu", 0))


def projections_of_all_heads(size: int) -> None:
    """Heads of the index are sharded, and those of the projections are not."""
    many = htree_ops.HTreeAttention(64, 4, 4, index_dim=16, **TREE, selection_span=None)
    parallelize_module(many, mesh_of(size), {"": ColwiseParallel()})
    many(normal((1, 20, 64), torch.float32, "cpu", 1))


def index_of_two_heads() -> None:
    """An index whose heads four ranks do not divide."""
    many = htree_ops.HTreeAttention(64, 4, 2, index_dim=16, **TREE, selection_span=None)
    parallelize_module(many, mesh_of(4), ColwiseParallel())


def one_sided(size: int) -> None:
    """Query heads sharded, key heads not: the heads of a rank do not belong together."""
    many = htree_ops.HTreeAttention(24, 8, 4, 4, **TREE)
    parallelize_module(many, mesh_of(size), {"q_proj": ColwiseParallel()})
    many(normal((2, 40, 24), torch.float32, "cpu", 0))


def split_heads(size: int, local: bool) -> None:
    """Fewer key heads than ranks: a rank would have a part of a head."""
    many = htree_ops.HTreeAttention(24, 8, 2, 4, **TREE)
    plan = heads_of_ranks(local)
    parallelize_module(many, mesh_of(size), plan)
    many(normal((2, 40, 24), torch.float32, "cpu", 0))


class Mlp(nn.Module):
    """The gated MLP of a Transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.gated = htree_ops.FusedGatedMLP(16, 32, act_on="gate")
        self.down = nn.Linear(32, 16)
        for weight in (self.gated.gate_weight, self.gated.up_weight):
            nn.init.normal_(weight, std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gated(x))


def gated_mlp(size: int, local: bool, device: str = "cpu") -> dict[str, Any]:
    torch.manual_seed(4)
    one = Mlp().to(device)
    plan = {"gated": ColwiseParallel(use_local_output=local), "down": RowwiseParallel()}
    many = parallelize_module(copy.deepcopy(one), mesh_of(size, device), plan)
    x = normal((2, 8, 16), torch.float32, device, 0)
    return train(one, many, (x,), (x,))


def norm(size: int) -> dict[str, Any]:
    mesh = mesh_of(size)
    one = htree_ops.FusedRMSNormRoPE(16, 4)
    many = parallelize_module(copy.deepcopy(one), mesh, SequenceParallel())
    x, cos, sin = (
        normal(shape, torch.float32, "cpu", i) for i, shape in enumerate(((2, 8, 16), (8, 4), (8, 4)))
    )
    part = x.chunk(size, 1)[mesh.get_local_rank()]
    return train(one, many, (x, cos, sin), (part, cos, sin))


def fp8(size: int, row: bool, static: bool, dtype: torch.dtype) -> dict[str, Any]:
    """FP8Linear, sharded by the columns of its output or of its input."""
    mesh = mesh_of(size)
    torch.manual_seed(5)
    linear = nn.Linear(128, 32, dtype=dtype)
    one = htree_ops.FP8Linear.from_linear(linear, 100.0 if static else None)
    style = RowwiseParallel if row else ColwiseParallel
    many = parallelize_module(copy.deepcopy(one), mesh, style(use_local_output=False))
    x = normal((3, 4, 128), dtype, "cpu", 0)
    given = x.chunk(size, -1)[mesh.get_local_rank()] if row else x
    with torch.no_grad():
        expected, out = one(x), many(given)
    difference = (out.full_tensor() - expected).abs().max() / expected.abs().max()
    return {"error": float(difference), "bytes": many.weight.to_local().numel()}


def refused_style(which: str) -> None:
    """A gated MLP cannot be sharded by rows, nor FP8 codes where they would have to be moved."""
    module: nn.Module = htree_ops.FusedGatedMLP(16, 32)
    style = ColwiseParallel() if which == "fp8 columns" else RowwiseParallel()
    if which == "fp8 columns":
        module = htree_ops.FP8Linear.from_linear(nn.Linear(32, 3))
    elif which == "fp8 rows":
        module = htree_ops.FP8Linear.from_linear(nn.Linear(80, 32))
    parallelize_module(module, mesh_of(4), style)


def placed_beside_shared_tokens() -> None:
    """A DTensor of heads is not what a rank holds of a sequence."""
    mesh = context_and_tensor()
    many = htree_ops.HTreeAttention(24, 8, 4, 4, cp_group=mesh["context"], **TREE)
    plan = heads_of_ranks(False)
    parallelize_module(many, mesh["tensor"], plan)
    many(normal((1, 16, 24), torch.float32, "cpu", 0))


def layers_of_tokens_and_heads(
    **more: Any,
) -> tuple[htree_ops.HTreeAttention, htree_ops.HTreeAttention, DeviceMesh]:
    """A layer, and its copy with the tokens on two ranks and the heads on two."""
    mesh = context_and_tensor()
    torch.manual_seed(3)
    one = htree_ops.HTreeAttention(24, 8, 4, 16, **TREE, **more)
    many = htree_ops.HTreeAttention(24, 8, 4, 16, cp_group=mesh["context"], **TREE, **more)
    many.load_state_dict(one.state_dict())
    plan = {"": ColwiseParallel(), **heads_of_ranks(), "o_proj": RowwiseParallel()}
    return one, parallelize_module(many, mesh["tensor"], plan), mesh["context"]


def tokens_and_heads(by_index: bool) -> float:
    """The largest difference of a layer with its tokens on two ranks and its heads on two from one process."""
    more: dict[str, Any] = {"index_dim": 16, "selection_span": None} if by_index else {}
    one, many, ranks = layers_of_tokens_and_heads(**more)
    x = normal((2, 64, 24), torch.float32, "cpu", 0)
    out = unshard_sequence(many(shard_sequence(x, ranks)), ranks)
    return float((out - one(x)).abs().max())


def compiled(size: int, local: bool, by_index: bool) -> dict[str, float]:
    """HTreeAttention with its heads on the ranks under torch.compile, by the first group of this size alone."""
    if dist.get_rank() >= size:
        return {"out": 0.0, "gradients": 0.0}
    torch.manual_seed(3)
    one = htree_ops.HTreeAttention(24, 8, 4, 4, **TREE)
    plan = heads_of_ranks(local)
    if by_index:
        one, many = layers_with_index(size, local)
    else:
        many = parallelize_module(copy.deepcopy(one), mesh_of(size), {**plan, "o_proj": RowwiseParallel()})
    x = normal((2, 40, 24), torch.float32, "cpu", 0)
    torch._dynamo.reset()
    out, expected = torch.compile(many, backend="aot_eager")(x), one(x)
    for y in (out, expected):
        y.square().sum().backward()
    pairs = [p for p in zip(many.parameters(), one.parameters(), strict=True) if p[1].grad is not None]
    errors = [float((whole(a.grad) - b.grad).abs().max() / b.grad.abs().max()) for a, b in pairs]
    return {"out": float((out - expected).abs().max()), "gradients": max(errors)}


def compiled_losses(size: int, local: bool) -> float:
    """The largest difference of a compiled layer's index loss and its gradients, by the first group of this size."""
    if dist.get_rank() >= size:
        return 0.0
    _, many = layers_with_index(size, local)
    x = normal((2, 80, 24), torch.float32, "cpu", 0)
    with htree_ops.index_losses(rows=6):  # before it is compiled
        many(x)
    torch._dynamo.reset()
    found = []
    for call in (many, torch.compile(many, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(5 + dist.get_rank())
        with htree_ops.index_losses(rows=6) as losses:
            call(x)
        loss = losses.mean()
        weights = (many.index_query_weight, many.index_key_weight)
        found.append([loss.detach(), *map(whole, torch.autograd.grad(loss, weights))])
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))


def losses_of_tokens_and_heads(packed: bool) -> dict[str, float]:
    """The largest differences of an index whose tokens lie on two ranks and whose heads on two from one process."""
    one, many, ranks = layers_of_tokens_and_heads()
    x = normal((1 if packed else 2, 64, 24), torch.float32, "cpu", 0)
    call = {"cu_seqlens": torch.tensor([0, 21, 21, 57], dtype=torch.int32)} if packed else {}
    found = []
    for model, mine in ((one, x), (many, shard_sequence(x, ranks))):
        torch.manual_seed(5)
        with htree_ops.index_losses(rows=9) as losses:
            model(mine, **call)
        losses.mean().backward()
        found.append(losses.mean().item())
    errors = []
    for name in ("index_query_weight", "index_key_weight"):
        theirs, ours = (whole(getattr(model, name).grad) for model in (one, many))
        dist.all_reduce(ours, group=ranks.get_group())
        errors.append(float((ours - theirs).abs().max() / theirs.abs().max()))
    return {"loss": abs(found[0] - found[1]), "gradients": max(errors)}
