"""What the tests of sharding rules and of functions on DTensors run on every rank."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from process_pool import group_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

import htree_ops
from htree_ops.distributed import sharding
from tests.support.cases import normal
from tests.support.tree_attention_problem import packed

TREE: dict[str, Any] = {"compression_rate": 4, "max_top_nodes": 8, "top_k": 2}


def mesh_of(size: int, device: str = "cpu") -> DeviceMesh:
    return DeviceMesh.from_group(group_of(size), device)


#: Behind the name of an op that has an index or none: the one with it.
INDEXED = " by an index"


def example(name: str) -> tuple[Any, ...]:
    """Arguments of an op, with sizes that four ranks divide."""
    by = INDEXED if name.endswith(INDEXED) else ""
    name = name.removesuffix(INDEXED)
    ops = torch.ops.htree

    def x(*shape: int, seed: int = 0) -> Tensor:
        return normal(shape, torch.float32, "cpu", seed)

    q, k, v = x(4, 40, 8, 4), x(4, 40, 4, 4, seed=1), x(4, 40, 4, 6, seed=2)
    tree, mask = packed(**TREE), [True] * 3
    rows = (q[:, :16], k, v, [12, 4], True, *tree)
    results = ops._attention_rows(*rows)
    gradients = (x(4, 16, 8, 6, seed=14), x(4, 16, 8, seed=15))
    rows_and_results = (*rows[:3], *results, *gradients, rows[3], mask, *tree)
    ends = torch.tensor([0, 13, 40], dtype=torch.int32)
    offsets = (ends, ends, 27, 27)
    wide, weight = x(4, 8, 16, seed=3), x(16, seed=4)
    heads, angles, of_each = x(4, 8, 4, 6, seed=5), x(8, 6, seed=6), x(4, 8, 6, seed=19)
    lists = torch.arange(4 * 40 * 4 * 2, dtype=torch.int32).view(4, 40, 4, 2) % 3
    index = x(4, 40, 4, 16, seed=26), x(4, 40, 4, 16, seed=27)
    qkv = (q[0], k[0], v[0])
    documents = {"": (*qkv, None, None, *offsets), INDEXED: (*qkv, index[0][0], index[1][0], *offsets)}[by]
    of_documents = (*documents, "auto", *tree)
    of_loss = (q, k, *index, torch.tensor([39, 17, 20, 20]))
    sinks, packed_lists = x(8, seed=23), (q[0], k[0], v[0], lists[0])
    mlp = (x(4, 8, 16, seed=7), x(12, 16, seed=8), x(12, 16, seed=9))
    gradient = x(4, 8, 12, seed=10)
    codes = [x(*shape, seed=11).to(torch.float8_e4m3fn) for shape in ((8, 64), (64, 12))]
    scales = (x(8, 1, seed=12).abs() + 1, x(1, 12, seed=13).abs() + 1)
    table: dict[str, Callable[[], tuple[Any, ...]]] = {
        "_attention": lambda: (q, k, v, True, *tree),
        "_attention_lse": lambda: (q, k, v, True, *tree),
        "_attention_rows": lambda: rows,
        "_attention_rows_backward": lambda: rows_and_results,
        "_attention_rows_backward_sums": lambda: rows_and_results,
        "_attention_varlen": lambda: of_documents,
        "_attention_varlen_forward": lambda: of_documents,
        "_attention_varlen_backward": lambda: (
            *documents,
            *ops._attention_varlen_forward(*of_documents),
            x(40, 8, 6, seed=18),
            None,
            "auto",
            mask,
            *tree,
        ),
        "_index_lists": lambda: (q, k, *index, [0], *tree),
        "_listed_attention": lambda: (q, k, v, ops._index_lists(q, k, *index, [0], *tree), *tree),
        "_listed_attention_rows": lambda: (
            *rows[:3],
            ops._index_lists(*rows[:2], index[0][:, :16], index[1], [12, 4], *tree),
            [12, 4],
            *tree,
        ),
        "sparse_attention": lambda: (q, k, v, lists, sinks),
        "_sparse_attention_backward": lambda: (
            q,
            k,
            v,
            lists,
            *ops.sparse_attention(q, k, v, lists, sinks),
            sinks,
            x(4, 40, 8, 6, seed=24),
            x(4, 40, 8, seed=25),
        ),
        "sparse_attention_varlen": lambda: (*packed_lists, ends, ends, sinks, 27, 27),
        "_sparse_attention_varlen_backward": lambda: (
            *packed_lists,
            ends,
            ends,
            *ops.sparse_attention_varlen(*packed_lists, ends, ends, sinks, 27, 27),
            sinks,
            x(40, 8, 6, seed=24),
            x(40, 8, seed=25),
            27,
            27,
        ),
        "select_blocks": lambda: (x(4, 36, 4, 16), x(4, 40, 4, 16, seed=20), 3, 4, 2),
        "select_blocks_varlen": lambda: (
            x(40, 4, 16, seed=21),
            x(40, 4, 16, seed=22),
            ends,
            ends,
            27,
            27,
            3,
            4,
            1,
            1,
            1,
            True,
        ),
        "index_loss": lambda: of_loss,
        "_index_loss_forward": lambda: of_loss,
        "_index_loss_backward": lambda: (*of_loss, *ops._index_loss_forward(*of_loss)[1:], torch.tensor(0.7)),
        "rope": lambda: (q, *angles.view(2, 8, 3)[:, :, :2], torch.arange(160).view(4, 40) % 8),
        "rmsnorm_rope": lambda: (wide, weight, angles[:, :4], angles[:, 2:], 1e-5, 4),
        "rmsnorm_rope_backward": lambda: (
            wide + 1,
            wide,
            weight,
            of_each[..., :4],
            of_each[..., 2:],
            1e-5,
            4,
        ),
        "head_rmsnorm_rope": lambda: (heads, weight[:6], of_each[:, :, None], of_each[:, :, None] + 1),
        "head_rmsnorm_rope_backward": lambda: (heads + 1, heads, weight[:6], angles[None], angles[None] + 1),
        "gated_mlp": lambda: mlp,
        "_gated_mlp_forward": lambda: mlp,
        "gated_mlp_backward": lambda: (gradient, *mlp),
        "_gated_mlp_saved_backward": lambda: (gradient, *ops._gated_mlp_forward(*mlp)[1:], *mlp),
        "fp8_compute_scale": lambda: (wide, "channel"),
        "fp8_quantize": lambda: (wide, None, "channel"),
        "fp8_dequantize": lambda: (codes[0], scales[0]),
        "fp8_fake_quant": lambda: (wide, torch.tensor(3.0), "tensor"),
        "_fp8_fake_quant_backward": lambda: (wide + 1, wide, torch.tensor(3.0), "tensor"),
        "fp8_gemm": lambda: (*codes, *scales, torch.float32),
        "fp8_gemm_exact": lambda: (*codes, *scales, torch.float32),
        "hadamard_transform": lambda: (wide,),
        "grouped_hadamard": lambda: (x(4, 8, 4, 4, seed=15), 2),
        "causal_softmax": lambda: (x(4, 6, 6, seed=16),),
        "causal_softmax_backward": lambda: (x(4, 6, 6, seed=17), ops.causal_softmax(x(4, 6, 6))),
    }
    return table[name]()


def spread(x: Any, mesh: DeviceMesh, placement: Placement | None) -> Any:
    """This rank's part of a tensor that every rank has, as a DTensor."""
    if placement is None:
        return x
    if placement == Partial():
        x = x / mesh.size()
    if isinstance(placement, Shard):
        part = x.chunk(mesh.size(), placement.dim)[mesh.get_local_rank()].contiguous()
        return DTensor.from_local(part, mesh, [placement], run_check=False)
    return DTensor.from_local(x, mesh, [placement], run_check=False)


def whole(x: Any) -> Any:
    """The whole of a DTensor; numbers of FP8 codes, whose bytes are sent, because no backend sends codes."""
    if not isinstance(x, DTensor):
        return x
    if x.dtype == torch.float8_e4m3fn:
        parts = DTensor.from_local(
            x.to_local().view(torch.uint8), x.device_mesh, x.placements, run_check=False
        )
        return parts.full_tensor().float()
    return x.full_tensor()


def plain(x: Any) -> Any:
    return x.view(torch.uint8).float() if isinstance(x, Tensor) and x.dtype == torch.float8_e4m3fn else x


def difference(ours: Tensor, theirs: Tensor) -> Tensor:
    """|ours - theirs|, 0 for equal infinities."""
    return torch.where(ours == theirs, 0.0, (ours - theirs).abs())


def follow_rules(size: int, name: str, mask: tuple[bool, ...] | None = None) -> list[dict[str, Any]]:
    """Runs an op under every way that its rule lists, and compares with the op itself."""
    mesh = mesh_of(size)
    args = example(name)
    name = name.removesuffix(INDEXED)
    op = getattr(torch.ops.htree, name).default
    if mask is not None:
        place = [a.name for a in op._schema.arguments].index("output_mask")
        defaults = [a.default_value for a in op._schema.arguments[len(args) : place]]
        args = (*args[:place], *defaults, list(mask), *args[place + 1 :])
    expected = op(*args)
    expected = expected if isinstance(expected, (list, tuple)) else (expected,)
    specs = [spread(x, mesh, Replicate())._spec if isinstance(x, Tensor) else x for x in args]
    found = []
    for outputs, inputs in sharding.ways_of(name, *specs):
        given = [spread(x, mesh, place) for x, place in zip(args, inputs, strict=True)]
        with CommDebugMode() as traffic:
            results = op(*given)
        results = results if isinstance(results, (list, tuple)) else (results,)
        places = [x.placements[0] if isinstance(x, DTensor) else None for x in results]
        errors = [
            float(difference(whole(ours).double(), plain(theirs).double()).max())
            for ours, theirs in zip(results, expected, strict=True)
            if theirs is not None
        ]
        found.append(
            {
                "way": repr(inputs),
                "as said": places == list(outputs),
                "messages": traffic.get_total_counts(),
                "error": max(errors),
                "whole": [x is None for x in results] == [x is None for x in expected],
            }
        )
    return found


def pending_sums(size: int) -> dict[str, Any]:
    """An op on a tensor that is a pending sum, and attention whose heads the ranks do not divide."""
    mesh = mesh_of(size)
    x = normal((4, 8, 16), torch.float32, "cpu", 0)
    pending = DTensor.from_local(x / size, mesh, [Partial()], run_check=False)
    softmax = torch.ops.htree.causal_softmax(pending)
    q, k, v = (normal((1, 24, heads, 4), torch.float32, "cpu", heads) for heads in (6, 3, 3))
    sharded = [distribute_tensor(x, mesh, [Shard(2)]) for x in (q, k, v)]
    out = htree_ops.tree_attention(*sharded, **TREE)
    return {
        "softmax": float((softmax.full_tensor() - torch.ops.htree.causal_softmax(x)).abs().max()),
        "placed": str(out.placements[0]),
        "attention": torch.equal(out.full_tensor(), htree_ops.tree_attention(q, k, v, **TREE)),
    }


def log_sums(size: int, tokens: int) -> dict[str, Any]:
    """tree_attention with return_lse on the last ``tokens`` queries, with its heads on the ranks."""
    q, k, v = (normal((2, 24, heads, 4), torch.float32, "cpu", heads) for heads in (8, 4, 4))
    q = q[:, 24 - tokens :]
    sharded = [distribute_tensor(x, mesh_of(size), [Shard(2)]).requires_grad_() for x in (q, k, v)]
    found = htree_ops.tree_attention(*sharded, return_lse=True, **TREE)
    plain = [x.detach().requires_grad_() for x in (q, k, v)]
    expected = htree_ops.tree_attention(*plain, return_lse=True, **TREE)
    (found[1] * 2).sum().backward()  # of the lse alone
    (expected[1] * 2).sum().backward()
    found = (*found, *(x.grad for x in sharded))
    expected = (*expected, *(x.grad for x in plain))
    return {
        "equal": [torch.equal(a.full_tensor(), b) for a, b in zip(found, expected, strict=True)],
        "placed": [x.placements for x in found],
    }


def two_dimensions() -> dict[str, Any]:
    """Batch and heads on a mesh of 2 by 2."""
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2))
    q, k, v = (normal((2, 24, heads, 4), torch.float32, "cpu", heads).requires_grad_() for heads in (4, 2, 2))
    out = htree_ops.tree_attention(q, k, v, **TREE)
    expected = [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]
    sharded = [distribute_tensor(x.detach(), mesh, [Shard(0), Shard(2)]).requires_grad_() for x in (q, k, v)]
    with CommDebugMode() as traffic:
        placed = htree_ops.tree_attention(*sharded, **TREE)
        gradients = torch.autograd.grad(placed.square().sum(), sharded)
    pairs = zip((placed, *gradients), expected, strict=True)
    return {
        "messages": traffic.get_total_counts(),
        "placements": str(placed.placements),
        "error": max(float((a.full_tensor() - b).abs().max()) for a, b in pairs),
    }


class Recorder(TorchDispatchMode):
    """The ops of this package that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "htree":
            self.names.add(func._schema.name.removeprefix("htree::"))
        return func(*args, **(kwargs or {}))


def ops_of_models() -> set[str]:
    """The ops that the modules and the functions for models run, with and without gradients, on several ranks too."""
    x = normal((2, 16, 16), torch.float32, "cpu", 0)
    angles = normal((16, 4), torch.float32, "cpu", 1)
    ends = torch.tensor([0, 5, 32], dtype=torch.int32)
    padding = torch.arange(16).repeat(2, 1) >= 12
    layer = htree_ops.HTreeAttention(16, 4, 2, **TREE)
    shared = htree_ops.HTreeAttention(16, 4, 2, cp_group=group_of(2), **TREE)
    by_index = htree_ops.HTreeAttention(16, 1, index_dim=16, **TREE, selection_span=None)
    shared_by_index = htree_ops.HTreeAttention(
        16, 1, index_dim=16, cp_group=group_of(2), **TREE, selection_span=None
    )

    def learning(x: Tensor) -> Tensor:
        with htree_ops.index_losses(rows=2) as losses:
            return by_index(x).mean() + losses.mean()

    linear = nn.Linear(16, 16)
    calls: list[Callable[[Tensor], Tensor]] = [
        layer,
        lambda x: htree_ops.tree_attention(*[x.unflatten(-1, (4, 4))] * 3, return_lse=True, **TREE)[0],
        functools.partial(layer, key_padding_mask=padding),
        lambda x: layer(x.flatten(0, 1), cu_seqlens=ends),
        shared,
        by_index,
        lambda x: by_index(x.flatten(0, 1), cu_seqlens=ends),
        shared_by_index,
        learning,
        htree_ops.FusedGatedMLP(16, 32),
        lambda x: htree_ops.FusedRMSNormRoPE(16, 8)(x, angles, angles),
        lambda x: htree_ops.head_rmsnorm_rope(x.unflatten(-1, (2, 8)), x.new_ones(8), angles, angles),
        lambda x: torch.ops.htree.rope(x.unflatten(-1, (2, 8)), angles, angles, torch.arange(16)),
        htree_ops.HadamardTransform(),
        lambda x: htree_ops.HadamardTransform(2)(x.unflatten(-1, (2, 8)).transpose(1, 2)),
        htree_ops.causal_softmax,
        htree_ops.fp8_fake_quant,
        lambda x: htree_ops.fp8_dequantize(*htree_ops.fp8_quantize(x.detach())[:2], torch.float32),
        lambda x: htree_ops.FP8Linear.from_linear(linear)(x.detach()),
        lambda x: htree_ops.FP8Linear.from_linear(linear, 10.0)(x.detach()),
    ]
    with Recorder() as recorder:
        for call in calls:
            with torch.no_grad():
                call(x)
            out = call(x.clone().requires_grad_())
            if out.requires_grad:
                out.sum().backward()
    return recorder.names


def functions_of_an_index(
    size: int, H_i: int, kv_heads: int = 4, device: str = "cpu"
) -> dict[str, dict[str, Any]]:
    """What takes an index or lists, with its heads on the ranks: results and gradients, bit for bit."""
    mesh = mesh_of(size, device)

    def x(*shape: int, seed: int) -> Tensor:
        return normal(shape, torch.float32, device, seed)

    q, k, v = x(2, 80, 8, 4, seed=1), x(2, 80, kv_heads, 4, seed=2), x(2, 80, kv_heads, 6, seed=3)
    index = x(2, 80, H_i, 16, seed=4), x(2, 80, H_i, 16, seed=5)
    tree = {"compression_rate": 4, "max_top_nodes": 17, "top_k": 3, "selection_stride": 2}
    ends = torch.tensor([0, 34, 80], dtype=torch.int32, device=device)
    positions = torch.tensor([79, 4, 40, 40, 33], device=device)

    def attention(q: Tensor, k: Tensor, v: Tensor, *index: Tensor) -> tuple[Tensor, ...]:
        return htree_ops.tree_attention(q, k, v, index=index, return_lse=True, **tree)

    def documents(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        *index, ends = rest
        call = {"index": tuple(index), "return_lse": True, **tree}
        return htree_ops.tree_attention_varlen(q, k, v, ends, ends, 46, 46, **call)

    def selection(*index: Tensor) -> tuple[Tensor, ...]:
        return htree_ops.select_blocks(*index, 3, block_size=4, selection_stride=2)

    def selection_of_documents(iq: Tensor, ik: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
        return htree_ops.select_blocks_varlen(iq, ik, ends, ends, 46, 46, 3, block_size=4)

    def sparse(q: Tensor, k: Tensor, v: Tensor, *index: Tensor) -> tuple[Tensor, ...]:
        blocks, _ = htree_ops.select_blocks(*index, 3)
        return htree_ops.sparse_attention(q, k, v, blocks, return_lse=True)

    def sparse_documents(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        *index, ends = rest
        blocks, _ = htree_ops.select_blocks_varlen(*index, ends, ends, 46, 46, 2)
        call = (q, k, v, blocks, ends, ends, 46, 46)
        return htree_ops.sparse_attention_varlen(*call, return_lse=True)

    def loss(q: Tensor, k: Tensor, *index: Tensor) -> tuple[Tensor, ...]:
        return (htree_ops.index_loss(q, k, *index, positions=positions, block_size=4),)

    def loss_of_drawn(q: Tensor, k: Tensor, *index: Tensor) -> tuple[Tensor, ...]:
        return (htree_ops.index_loss(q, k, *index, rows=7, block_size=4),)

    def loss_of_documents(q: Tensor, k: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        *index, _ = rest
        call = {"positions": positions, "cu_seqlens": ends, "block_size": 4}  # as every rank has them
        return (htree_ops.index_loss(q, k, *index, **call),)

    packed = [[y[0] for y in group] for group in ((q, k, v), index)]
    calls: dict[str, tuple[Callable[..., tuple[Tensor, ...]], list[Tensor], int]] = {
        "tree_attention": (attention, [q, k, v, *index], 3),
        "tree_attention_varlen": (documents, [*packed[0], *packed[1], ends], 3),
        "select_blocks": (selection, list(index), 0),
        "select_blocks_varlen": (selection_of_documents, [*packed[1], ends], 0),
        "sparse_attention": (sparse, [q, k, v, *index], 3),
        "sparse_attention_varlen": (sparse_documents, [*packed[0], *packed[1], ends], 3),
        "index_loss": (loss, [q, k, *index], 4),
        "index_loss of drawn positions": (loss_of_drawn, [q, k, *index], 4),
        "index_loss of documents": (loss_of_documents, [*packed[0][:2], *packed[1], ends], 4),
    }
    found = {}
    for name, (call, tensors, leaves) in calls.items():
        seeds = (3, 3 + dist.get_rank(mesh.get_group()))  # whose positions are those of the first rank
        results = []
        for seed, is_placed in zip(seeds, (False, True), strict=True):
            given = [y.detach().requires_grad_(i < leaves) for i, y in enumerate(tensors)]
            if is_placed:
                of_heads = [y.dim() > 1 and y.shape[-2] % size == 0 for y in tensors]
                places = [
                    [Shard(y.dim() - 2)] if o else [Replicate()]
                    for y, o in zip(tensors, of_heads, strict=True)
                ]
                given = [
                    distribute_tensor(y.detach(), mesh, p).requires_grad_(i < leaves)
                    for i, (y, p) in enumerate(zip(tensors, places, strict=True))
                ]
            torch.manual_seed(seed)
            out = call(*given)
            total = sum(whole(y).square().sum() for y in out) if leaves else None
            wanted = [y for y in given if y.requires_grad]
            grads = torch.autograd.grad(total, wanted, allow_unused=True) if leaves else ()
            results.append([*out, *(y for y in grads if y is not None)])
        one, many = results
        found[name] = {
            "equal": [torch.equal(whole(a), b) for a, b in zip(many, one, strict=True)],
            "error": max(float(difference(whole(a), b).max()) for a, b in zip(many, one, strict=True)),
            "placed": [str(y.placements[0]) for y in many],
        }
    return found
