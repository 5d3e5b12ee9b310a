"""A top_k far above what a sequence can hold: memory follows the length (docs/semantics/tree_attention.md §1.8)."""

from typing import Any

import pytest
import torch
from torch import Tensor

from htree_ops import TreeOptions, tree_attention, tree_attention_varlen
from tests.support.cases import normal

OPS = torch.ops.htree
HUGE = 10**8
OPTIONS: dict[str, Any] = {"compression_rate": 4, "max_top_nodes": 16}
WAYS: dict[str, dict[str, Any]] = {
    "means": {},
    "index": {"index": True},
    "open_next": {"index": True, "open_next": True},
    "spans": {"selection_span": 2},
    "stride": {"selection_stride": 4},
    "lists_not_stored": {"store_parents": False},
}


def tensors(T: int, device: str) -> list[Tensor]:
    return [normal((T, 2, 16), torch.float32, device, seed) for seed in range(5)]


def results(call: Any, leaves: list[Tensor]) -> list[Tensor]:
    out, lse = call(*(x.requires_grad_() for x in leaves))
    return [out, lse, *torch.autograd.grad(out.square().sum() + lse[..., :40, :].sum(), leaves)]


@pytest.mark.parametrize("name", WAYS)
def test_it_gives_what_the_number_of_nodes_gives(name, device):
    """Everything is opened by both."""
    options = OPTIONS | WAYS[name]
    by_index = options.pop("index", False)
    *qkv, index_query, index_key = tensors(90, device)
    cu = torch.tensor([0, 40, 90], dtype=torch.int32, device=device)

    def whole(q, k, v, top_k):
        index = (index_query[None], index_key[None]) if by_index else None
        return tree_attention(q[None], k[None], v[None], index=index, return_lse=True, top_k=top_k, **options)

    def packed(q, k, v, top_k):
        index = (index_query, index_key) if by_index else None
        bounds = (cu, cu, 50, 50)
        return tree_attention_varlen(q, k, v, *bounds, index=index, return_lse=True, top_k=top_k, **options)

    for call in (whole, packed):
        found, wanted = (results(lambda *x, k=k, f=call: f(*x, k), qkv) for k in (HUGE, 1025))
        for ours, theirs in zip(found, wanted, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("T", "stride", "rate", "top_k", "width"),
    [
        (90, 1, 4, 60, 60),
        (90, 1, 4, 1025, 1025),
        (90, 1, 4, HUGE, 1025),
        (6000, 1, 4, HUGE, 1500),
        (6001, 4, 4, HUGE, 1501),
        (6000, 1, 4, 1400, 1400),
        (50, 1, 4096, 2000, 1025),
    ],
)
def test_the_width_of_lists(T, stride, rate, top_k, width):
    options = TreeOptions(compression_rate=rate, top_k=top_k, max_top_nodes=HUGE, selection_stride=stride)
    q = torch.empty(1, T, 1, 16, device="meta")
    for lists in (
        OPS._attention_rows(q, q, q, [0], True, *options.packed())[3],
        OPS._index_lists(q, q, q, q, [0], *options.packed()),
    ):
        assert lists.shape[3] == width


def test_a_compiled_call_of_any_length(device):
    options = TreeOptions(top_k=2000, **OPTIONS)

    def call(q, k, v):
        return tree_attention(q[None], k[None], v[None], return_lse=True, options=options)

    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for T in (90, 50, 4500, 9000):
            leaves = tensors(T, device)[:3]
            pairs = zip(results(compiled, leaves), results(call, leaves), strict=True)
            assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
