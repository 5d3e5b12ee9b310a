"""What the tests of context parallelism run on every rank."""

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from process_pool import group_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import htree_ops
from htree_ops.distributed import (
    shard_sequence,
    tree_attention_cp,
    tree_attention_varlen_cp,
    unshard_sequence,
)
from htree_ops.distributed.collectives import parts_of
from tests.support.cases import normal
from tests.support.tree_attention_problem import packed

Sizes = tuple[int, int, int, int, int, int]  # B, T, H, H_kv, K, V
NAMES = ("out", "lse", "dq", "dk", "dv")


def inputs(sizes: Sizes, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """q, k, v and an upstream gradient of the whole sequence."""
    B, T, H, H_kv, K, V = sizes
    shapes = ((B, T, H, K), (B, T, H_kv, K), (B, T, H_kv, V), (B, T, H, V))
    return [normal(shape, dtype, device, seed) for seed, shape in enumerate(shapes)]


def lse_gradient(rows: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """An upstream gradient of the log-sum-exps [B, T, H], or [N, H] of documents."""
    return normal(rows, torch.promote_types(dtype, torch.float32), device, 9)


def index_of(
    tokens: tuple[int, ...], dtype: torch.dtype, options: dict[str, Any], device: str
) -> tuple[Tensor, ...] | None:
    """The index of all tokens where ``options`` have its heads and width; it requires grad, as in a layer."""
    if "index" not in options:
        return None
    shape = (*tokens, *options["index"])
    return tuple(normal(shape, dtype, device, seed).requires_grad_() for seed in (10, 11))


def one_process(
    sizes: Sizes, dtype: torch.dtype, options: dict[str, Any], device: str = "cpu"
) -> list[Tensor]:
    """out, lse and the gradients of q, k and v by one process."""
    *qkv, dout = inputs(sizes, dtype, device)
    q, k, v = (x.requires_grad_() for x in qkv)
    options = options | {"index": index_of(sizes[:2], dtype, options, device)}
    out, lse = htree_ops.tree_attention(q, k, v, return_lse=True, **options)
    gradients = torch.autograd.grad((out, lse), (q, k, v), (dout, lse_gradient(sizes[:3], dtype, device)))
    return [x.detach() for x in (out, lse, *gradients)]


def many_processes(
    size: int, balance: str, sizes: Sizes, dtype: torch.dtype, options: dict[str, Any], device: str = "cpu"
) -> list[Tensor]:
    """The same with the tokens on ``size`` ranks, put together again."""
    group = group_of(size)

    def share(x: Tensor) -> Tensor:
        return shard_sequence(x, group, balance=balance)

    *qkv, dout, dlse = map(share, (*inputs(sizes, dtype, device), lse_gradient(sizes[:3], dtype, device)))
    q, k, v = (x.requires_grad_() for x in qkv)
    index = index_of(sizes[:2], dtype, options, device)
    options = options | {"index": None if index is None else tuple(map(share, index))}
    out, lse = tree_attention_cp(q, k, v, group, balance=balance, return_lse=True, **options)
    found = (out, lse, *torch.autograd.grad((out, lse), (q, k, v), (dout, dlse)))
    return [unshard_sequence(x.detach(), group, balance=balance) for x in found]


def compare(
    size: int, balance: str, sizes: Sizes, dtype: torch.dtype, options: dict[str, Any], device: str = "cpu"
) -> dict[str, Any]:
    """Which results equal those of one process bit for bit, the errors of the gradients, and whether a call repeats.

    The third call gathers every K/V head in a step of its own.
    """
    one = one_process(sizes, dtype, options, device)
    many = many_processes(size, balance, sizes, dtype, options, device)
    with torch.device("meta"):  # a default device that no tensor is to be on
        again = many_processes(size, balance, sizes, dtype, options, device)
    heads = sizes[3]
    stepwise = many_processes(size, balance, sizes, dtype, options | {"gather_steps": heads}, device)
    in_steps = {name: torch.equal(a, b) for name, a, b in zip(NAMES, many, stepwise, strict=True)}
    return compared(many, one, again) | {"in steps": in_steps}


def compared(
    many: list[Tensor], one: list[Tensor], again: list[Tensor], rows: int | None = None
) -> dict[str, Any]:
    """Of all rows, or the errors of the first ones."""
    pairs = dict(zip(NAMES, zip(many, one, strict=True), strict=True))
    errors = {name: (a - b)[:rows].abs() for name, (a, b) in pairs.items()}
    return {
        "equal": {name: torch.equal(a, b) for name, (a, b) in pairs.items()},
        "error": {name: float(x.max()) if x.numel() else 0.0 for name, x in errors.items()},
        "repeats": all(torch.equal(a, b) for a, b in zip(many, again, strict=True)),
    }


def sums_of_ranks(
    size: int, balance: str, sizes: Sizes, dtype: torch.dtype, options: dict[str, Any], device: str = "cpu"
) -> dict[str, bool]:
    """Whether dk and dv are the unrounded gradients of every rank's rows, added in the order of ranks, rounded once.

    A group of one computes the sequence as one piece.
    """
    q, k, v, dout = inputs(sizes, dtype, device)
    dlse = lse_gradient(sizes[:3], dtype, device)
    tree = packed(**{name: options[name] for name in ("compression_rate", "max_top_nodes", "top_k")})
    totals: list[Tensor] = []
    for rank in range(size):
        parts = parts_of(rank, size, balance, sizes[1]) if size > 1 else (0,)
        starts = [part * sizes[1] // (size * len(parts)) for part in parts]
        length = sizes[1] // (size * len(parts))
        rows, upstream, of_lse = (
            torch.cat([x[:, at : at + length] for at in starts], 1) for x in (q, dout, dlse)
        )
        results = torch.ops.htree._attention_rows(rows, k, v, starts, True, *tree)
        _, *sums = torch.ops.htree._attention_rows_backward_sums(
            rows, k, v, *results, upstream, of_lse, starts, [True] * 3, *tree
        )
        assert all(x.dtype == torch.promote_types(dtype, torch.float32) for x in sums)
        totals = [a + b for a, b in zip(totals, sums, strict=True)] if totals else sums
    found = many_processes(size, balance, sizes, dtype, options, device)[3:]
    return {
        name: torch.equal(ours, total.to(dtype))
        for name, ours, total in zip(("dk", "dv"), found, totals, strict=True)
    }


def round_trip(
    size: int, balance: str, shape: tuple[int, ...], dim: int, device: str = "cpu"
) -> dict[str, Any]:
    """shard, unshard, and the gradient of a loss that every rank computes from the whole."""
    group = group_of(size)
    x = normal(shape, torch.float64, device, 0)
    part = shard_sequence(x, group, dim, balance=balance).requires_grad_()
    whole = unshard_sequence(part, group, dim, balance=balance)
    weight = normal(shape, torch.float64, device, 1) * (dist.get_rank(group) + 1)
    (gradient,) = torch.autograd.grad((whole * weight).sum(), part)
    total = normal(shape, torch.float64, device, 1) * sum(range(1, size + 1))
    wanted = shard_sequence(total, group, dim, balance=balance)
    return {
        "part": part.detach().cpu(),
        "whole": torch.equal(whole, x),
        "gradient": float((gradient - wanted).abs().max()),
    }


class Order(TorchDispatchMode):
    """What is sent, waited for and computed inside, in this order; the same thing several times in a row once."""

    NAMES: ClassVar[dict[str, str]] = {
        "_c10d_functional::all_gather_into_tensor": "gather",
        "_c10d_functional::all_to_all_single": "exchange",
        "_c10d_functional::wait_tensor": "wait",
        "htree::_attention_rows": "attend",
        "htree::_listed_attention_rows": "attend",
        "htree::_index_lists": "choose",
        "htree::_attention_rows_backward_sums": "attend",
        "htree::_attention_varlen_forward": "inside",
        "htree::_attention_varlen_backward": "inside",
    }

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = self.NAMES.get(func._schema.name)
        if name is not None and self.events[-1:] != [name]:
            self.events.append(name)
        return func(*args, **(kwargs or {}))


def order(size: int, steps: int | None, by_index: bool = False) -> tuple[list[str], list[str]]:
    """The events of a forward and of its backward; of packed documents where there are no steps."""
    group = group_of(size)
    q, k, v, dout = (shard_sequence(x, group) for x in inputs((1, 64, 4, 4, 4, 4), torch.float32))
    q.requires_grad_()
    k.requires_grad_()
    with Order() as forward:
        if steps is None:
            out = tree_attention_varlen_cp(q[0], k[0], v[0], [0, 9, 64], group, **OPTIONS)[None]
        else:
            index = (q.new_ones(1, 16, 1, 16),) * 2 if by_index else None
            out = tree_attention_cp(q, k, v, group, index=index, gather_steps=steps, **OPTIONS)
    with Order() as backward:
        torch.autograd.grad(out, (q, k), dout)
    return forward.events, backward.events


def counted(size: int, options: dict[str, Any]) -> tuple[int, int, int]:
    """The products of one process, those of all ranks together, and those of this rank's packed documents."""
    sizes, group = (1, 256, 4, 2, 8, 8), group_of(size)
    q, k, v, _ = inputs(sizes, torch.float32)
    index = index_of(sizes[:2], torch.float32, options, "cpu")
    with FlopCounterMode(display=False) as one:
        htree_ops.tree_attention(q, k, v, **(options | {"index": index}))
    q, k, v = (shard_sequence(x, group) for x in (q, k, v))
    shares = None if index is None else tuple(shard_sequence(x, group) for x in index)
    with FlopCounterMode(display=False) as many:
        tree_attention_cp(q, k, v, group, **(options | {"index": shares}))
    total = torch.tensor(many.get_total_flops())
    dist.all_reduce(total, group=group)
    with FlopCounterMode(display=False) as documents:
        tree_attention_varlen_cp(q[0], k[0], v[0], [0], group, **OPTIONS)
    return one.get_total_flops(), int(total), documents.get_total_flops()


def any_dtype(size: int, dtype: torch.dtype) -> bool:
    """Whether numbers that are no fp32 come back."""
    x = torch.arange(48).view(3, 16).remainder(5).to(torch.float32).to(dtype)
    back = unshard_sequence(shard_sequence(x, group_of(size)), group_of(size))
    return back.dtype == dtype and torch.equal(back.to(torch.complex64), x.to(torch.complex64))


def share(size: int, balance: str, tokens: int) -> list[int]:
    """The tokens of this rank."""
    return shard_sequence(torch.arange(tokens), group_of(size), 0, balance=balance).tolist()


OPTIONS: dict[str, Any] = {"compression_rate": 4, "max_top_nodes": 8, "top_k": 2}


def layers(
    size: int, balance: str, by_index: bool, device: str
) -> tuple[htree_ops.HTreeAttention, htree_ops.HTreeAttention]:
    """A layer, and one with the same weights for the ranks of a group; with an index that is not as it was drawn."""
    torch.manual_seed(1)
    width = 16 if by_index else 6
    options: dict[str, Any] = {**OPTIONS, "selection_span": None} if by_index else OPTIONS
    options = {**options, "index_dim": 16 if by_index else 0, "device": device}
    one = htree_ops.HTreeAttention(24, 4, 2, width, **options)
    many = htree_ops.HTreeAttention(24, 4, 2, width, cp_group=group_of(size), cp_balance=balance, **options)
    if by_index:
        with torch.no_grad():
            one.index_query_weight.add_(normal((4, 16, 16), torch.float32, device, 6, 0.1))
    many.load_state_dict(one.state_dict())
    return one, many


def layer(size: int, balance: str, device: str = "cpu", by_index: bool = False) -> dict[str, Any]:
    """HTreeAttention on a slice of a sequence, with gradients that the ranks add, and one layer on all of it."""
    group = group_of(size)
    one, many = layers(size, balance, by_index, device)
    x = normal((2, 256, 24), torch.float32, device, 5)
    expected, out = one(x), many(shard_sequence(x, group, balance=balance))
    difference = unshard_sequence(out, group, balance=balance) - expected
    errors = gradients_of_ranks(one, expected, many, out, group)
    return {"out": float(difference.abs().max()), "gradients": max(errors)}


def gradients_of_ranks(
    one: nn.Module, expected: Tensor, many: nn.Module, out: Tensor, group: dist.ProcessGroup
) -> list[float]:
    """The relative errors of gradients that the ranks add, from rows of one process and of these ranks."""
    expected.square().sum().backward()
    out.square().sum().backward()
    errors = []
    for ours, theirs in zip(many.parameters(), one.parameters(), strict=True):
        if theirs.grad is None:  # of an index that no loss has seen
            assert ours.grad is None
            continue
        dist.all_reduce(ours.grad, group=group)
        errors.append(float((ours.grad - theirs.grad).abs().max() / theirs.grad.abs().max()))
    return errors


def compiled(size: int, balance: str, device: str = "cpu", by_index: bool = False) -> dict[str, Any]:
    """Forward and backward under torch.compile, by the first group of this size alone: compiling takes seconds.

    With a second length the compiler takes the length for a symbol.
    """
    group = group_of(size)
    if dist.get_rank() >= size:
        return {"errors": [0.0]}

    width = 32 if by_index else 10

    def model(x: Tensor, w: Tensor) -> Tensor:
        q, k, v = (x @ w).split([24, 12, 12], -1)
        out = tree_attention_cp(
            q.unflatten(-1, (4, 6)),
            k.unflatten(-1, (2, 6)),
            v.unflatten(-1, (2, 6)),
            group,
            index=tuple(x.detach()[..., None, :].chunk(2, -1)) if by_index else None,
            balance=balance,
            **OPTIONS,
        )
        return out.flatten(2).cos()

    def results(call: Any, tokens: int) -> list[Tensor]:
        x = shard_sequence(
            normal((2, tokens, width), torch.float32, device, 0), group, balance=balance
        ).requires_grad_()
        w = normal((width, 48), torch.float32, device, 1, 0.5).requires_grad_()
        out = call(x, w)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), (x, w))]

    torch._dynamo.reset()
    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    pairs = [
        pair
        for tokens in (128, 256)
        for pair in zip(results(model, tokens), results(fast, tokens), strict=True)
    ]
    return {"errors": [float((a - b).abs().max()) for a, b in pairs]}


def autocast(size: int, device: str = "cpu") -> dict[str, Any]:
    """The dtype of a call under autocast, and whether it equals one that was cast by hand."""
    group = group_of(size)
    q, k, v, _ = (shard_sequence(x, group) for x in inputs((1, 64, 2, 1, 4, 4), torch.float32, device))
    with torch.autocast(device, dtype=torch.bfloat16):
        out = tree_attention_cp(q, k, v, group, **OPTIONS)
    by_hand = tree_attention_cp(*(x.bfloat16() for x in (q, k, v)), group, **OPTIONS)
    return {"dtype": str(out.dtype), "equal": torch.equal(out, by_hand)}


def each(change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The change of q, k and v."""
    return lambda call: {name: change(call[name]) for name in "qkv"}


#: What a rank of the group (None: each) passes instead of what the others do.
FAULTS: dict[str, tuple[int | None, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "other length": (2, each(lambda x: x[:, :24])),
    "other batch": (1, each(lambda x: x.expand(2, -1, -1, -1))),
    "other options": (3, lambda _: {"top_k": 4}),
    "other balance": (3, lambda _: {"balance": "contiguous"}),
    "other dtype": (3, each(Tensor.half)),
    "other device": (3, each(lambda x: x.to("meta"))),
    "other gradients": (0, lambda call: {"k": call["k"].requires_grad_()}),
    "bad rank": (1, lambda call: {"k": call["k"][..., :2]}),
    "bad option": (1, lambda _: {"compression_rate": 1}),
    "bad steps": (1, lambda _: {"gather_steps": 2}),
    "other index": (2, lambda _: {"index": None}),
    "other index width": (2, lambda call: {"index": tuple(torch.cat([x, x], -1) for x in call["index"])}),
    "short index key": (1, lambda call: {"index": (call["index"][0], call["index"][1][:, :8])}),
    "odd index": (1, lambda call: {"index": tuple(x[..., :10] for x in call["index"])}),
    "no pair of index": (1, lambda call: {"index": call["index"][0]}),
    "index and span": (1, lambda _: {"selection_span": 2}),
    "index and scope": (1, lambda _: {"scope": "q_head"}),
    "no tensor": (1, lambda _: {"q": None}),
    "uneven": (None, each(lambda x: x[:, :30])),
    "unknown balance": (None, lambda _: {"balance": "diagonal"}),
    "no group": (None, lambda _: {"group": "world"}),
}


def fault(what: str, size: int = 4, device: str = "cpu") -> None:
    """A call that must raise on every rank, without a rank that waits for another."""
    group = group_of(size)
    rank = dist.get_rank(group)
    call = {**dict(zip("qkv", inputs((1, 32, 2, 1, 4, 4), torch.float32, device), strict=False)), **OPTIONS}
    call |= {"group": group, "balance": "zigzag"}
    if "index" in what:
        call["index"] = normal((2, 1, 32, 1, 16), torch.float32, device, 5).unbind()
    q = call["q"]
    if what == "other call" and rank == 1:
        unshard_sequence(q, group)
    elif what == "unshard":
        unshard_sequence(q[:, : 32 - 2 * rank], group)
    elif what == "unshard another device":
        unshard_sequence(q.to("meta") if rank == 2 else q, group)
    elif what == "shard":
        shard_sequence(q[:, :27], group)
    elif what in FAULTS:
        who, change = FAULTS[what]
        if who in (None, rank):
            call |= change(call)
    tree_attention_cp(**call)


def outside(size: int) -> str:
    """What a process says of a mesh of the first ranks alone, of which it may be none."""
    mesh = DeviceMesh("cpu", torch.arange(size))
    x = torch.zeros(1, 8 * size, 2)
    try:
        return str(tuple(shard_sequence(x, mesh).shape))
    except TypeError as error:
        return str(error)


def copied(size: int) -> bool:
    """Whether a copy of a layer has weights of its own and the same rows, with the same ranks."""
    group = group_of(size)
    layer = htree_ops.HTreeAttention(24, 4, 2, 6, cp_group=group, **OPTIONS)
    holder = torch.nn.ModuleList([layer, layer])  # one layer in two places
    first, second = copies = copy.deepcopy(holder)
    x = shard_sequence(normal((1, 64, 24), torch.float32, "cpu", 0), group)
    rows = torch.equal(first(x), layer(x))
    own = first.q_proj.weight is not layer.q_proj.weight
    return rows and own and first is second and copies is not holder and first.cp_group is group


def leaves(stays: int) -> None:
    """Every rank but ``stays`` raises before the call."""
    if dist.get_rank() != stays:
        raise ValueError("this rank gives up")
    q, k, v, _ = inputs((1, 32, 2, 1, 4, 4), torch.float32)
    tree_attention_cp(q, k, v, None, **OPTIONS)
