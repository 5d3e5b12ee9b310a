"""What the tests of packed documents on several ranks run on every rank."""

from typing import Any

import torch
import torch.distributed as dist
from cp_on_ranks import compared, gradients_of_ranks, index_of, lse_gradient
from process_pool import group_of
from torch import Tensor

import htree_ops
from htree_ops.distributed import shard_sequence, tree_attention_varlen_cp, unshard_sequence
from tests.support.cases import normal

Sizes = tuple[int, int, int, int, int]  # N, H, H_kv, K, V


def inputs(sizes: Sizes, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """query, key, value and an upstream gradient of all tokens."""
    N, H, H_kv, K, V = sizes
    shapes = ((N, H, K), (N, H_kv, K), (N, H_kv, V), (N, H, V))
    return [normal(shape, dtype, device, seed) for seed, shape in enumerate(shapes)]


def one_process(
    sizes: Sizes, offsets: list[int], dtype: torch.dtype, options: dict[str, Any], device: str = "cpu"
) -> list[Tensor]:
    """out, lse and the gradients of query, key and value by one process."""
    *qkv, dout = inputs(sizes, dtype, device)
    q, k, v = (x.requires_grad_() for x in qkv)
    ends = torch.tensor(offsets, dtype=torch.int32, device=device)
    given = {name: value for name, value in options.items() if name not in ("scope", "store_parents")}
    given["index"] = index_of(sizes[:1], dtype, options, device)
    wide = (k, v)
    if options.get("scope") == "q_head":
        wide = tuple(x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    out, lse = htree_ops.tree_attention_varlen(
        q, *wide, ends, ends, sizes[0], sizes[0], return_lse=True, **given
    )
    gradients = torch.autograd.grad((out, lse), (q, k, v), (dout, lse_gradient(sizes[:2], dtype, device)))
    return [x.detach() for x in (out, lse, *gradients)]


def many_processes(
    size: int,
    balance: str,
    sizes: Sizes,
    offsets: list[int],
    dtype: torch.dtype,
    options: dict[str, Any],
    device: str = "cpu",
) -> list[Tensor]:
    """The same with the tokens on ``size`` ranks, put together again."""
    group = group_of(size)
    tensors = (*inputs(sizes, dtype, device), lse_gradient(sizes[:2], dtype, device))
    *qkv, dout, dlse = (shard_sequence(x, group, 0, balance=balance) for x in tensors)
    q, k, v = (x.requires_grad_() for x in qkv)
    index = index_of(sizes[:1], dtype, options, device)
    if index is not None:
        index = tuple(shard_sequence(x, group, 0, balance=balance) for x in index)
    options = options | {"index": index}
    out, lse = tree_attention_varlen_cp(q, k, v, offsets, group, balance=balance, return_lse=True, **options)
    found = (out, lse, *torch.autograd.grad((out, lse), (q, k, v), (dout, dlse)))
    return [unshard_sequence(x.detach(), group, 0, balance=balance) for x in found]


def compare(size: int, balance: str, *problem: Any) -> dict[str, Any]:
    """Which results equal those of one process bit for bit, the errors of the gradients, and whether a call repeats."""
    one, many = one_process(*problem), many_processes(size, balance, *problem)
    with torch.device("meta"):  # a default device that no tensor is to be on
        again = many_processes(size, balance, *problem)
    return compared(many, one, again, rows=problem[1][-1])


def some_gradients(size: int, wanted: tuple[bool, ...]) -> list[bool]:
    """Whether gradients of some of query, key and value equal those of a call that gives all."""
    group, offsets = group_of(size), [0, 5, 40, 60]
    options: dict[str, Any] = {"compression_rate": 4, "max_top_nodes": 8, "top_k": 2}
    *qkv, dout = (shard_sequence(x, group, 0) for x in inputs((64, 4, 2, 4, 4), torch.float32))
    every = [x.clone().requires_grad_() for x in qkv]
    some = [x.clone().requires_grad_(wants) for x, wants in zip(qkv, wanted, strict=True)]
    for tensors in (every, some):
        tree_attention_varlen_cp(*tensors, offsets, group, **options).backward(dout)
    pairs = zip(some, every, wanted, strict=True)
    return [torch.equal(a.grad, b.grad) if wants else a.grad is None for a, b, wants in pairs]


def layer(size: int, balance: str, scope: str, device: str = "cpu", by_index: bool = False) -> dict[str, Any]:
    """HTreeAttention on a share of packed documents with padding that is no number, and one layer on all of them."""
    group = group_of(size)
    torch.manual_seed(1)
    options: dict[str, Any] = {"compression_rate": 4, "max_top_nodes": 8, "top_k": 2, "scope": scope}
    width = 16 if by_index else 6  # heads of 6 have none
    one = htree_ops.HTreeAttention(24, 4, 2, width, device=device, **options)
    assert one.index_dim == (16 if by_index else 0)
    many = htree_ops.HTreeAttention(
        24, 4, 2, width, cp_group=group, cp_balance=balance, device=device, **options
    )
    many.load_state_dict(one.state_dict())
    ends = torch.tensor([0, 5, 64, 64, 119], dtype=torch.int32, device=device)
    x = normal((128, 24), torch.float32, device, 5)
    x[119:] = torch.nan
    expected = one(x, cu_seqlens=ends)
    out = many(shard_sequence(x, group, 0, balance=balance)[None], cu_seqlens=ends)[0]
    errors = gradients_of_ranks(one, expected, many, out, group)
    difference = unshard_sequence(out, group, 0, balance=balance) - expected
    return {"out": float(difference.abs().max()), "gradients": max(errors)}


def compiled(size: int) -> float:
    """The largest difference that torch.compile makes, by the first group of this size alone: it takes seconds."""
    group = group_of(size)
    if dist.get_rank() >= size:
        return 0.0

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options = {"compression_rate": 4, "max_top_nodes": 8, "top_k": 2}
        return tree_attention_varlen_cp(q.sin(), k, v, (0, 9, 64), group, **options).cos()

    parts = [
        shard_sequence(x, group, 0).requires_grad_() for x in inputs((64, 4, 2, 6, 6), torch.float32)[:3]
    ]

    def results(call: Any) -> list[Tensor]:
        out = call(*parts)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), parts)]

    torch._dynamo.reset()
    fast = torch.compile(model, backend="aot_eager")
    return max(float((a - b).abs().max()) for a, b in zip(results(model), results(fast), strict=True))


#: What a rank (None: each) passes instead of what the others do.
FAULTS: dict[str, tuple[int | None, dict[str, Any]]] = {
    "other documents": (1, {"cu_seqlens": [0, 11, 128]}),
    "descending": (2, {"cu_seqlens": [0, 12, 11]}),
    "too long": (None, {"cu_seqlens": [0, 129]}),
    "stride": (None, {"selection_stride": 4}),
    "odd": (None, {"rows": 31, "cu_seqlens": [0, 124]}),
    "odd stripes": (None, {"rows": 28, "cu_seqlens": [0, 112], "balance": "striped"}),
    "offsets without numbers": (None, {"cu_seqlens": torch.empty(3, dtype=torch.int32, device="meta")}),
    "wide offsets": (None, {"cu_seqlens": torch.tensor([0, 10, 128])}),
    "word": (None, {"cu_seqlens": "offsets"}),
    "no offsets": (None, {"cu_seqlens": []}),
    "bad option": (None, {"compression_rate": 1}),
    "other keys": (3, {"keys": 30}),
}


def fault(what: str) -> None:
    """A call that must raise on every rank."""
    group = group_of(4)
    who, change = FAULTS[what]
    call = {"cu_seqlens": [0, 10, 128], "compression_rate": 4, "max_top_nodes": 8, "top_k": 2}
    if who in (None, dist.get_rank(group)):
        call |= change
    rows = call.pop("rows", 32)
    q, k, v = (x[:rows] for x in inputs((32, 2, 1, 4, 4), torch.float32)[:3])
    tree_attention_varlen_cp(q, k[: call.pop("keys", rows)], v, group=group, **call)
