"""sparse_attention at sizes and in places that only a GPU has: kernels beside each other, memory, streams, graphs."""

from dataclasses import replace

import pytest
import torch
from sparse_attention_helpers import GRADIENTS, OPS, assert_same_bits, op

import htree_ops
from tests.support.cases import case_id, normal
from tests.support.documents import offsets, with_gradients
from tests.support.graphs import assert_stream_and_graph
from tests.support.sparse_attention_cases import SparseCase

pytestmark = pytest.mark.gpu

_LONG = SparseCase(
    name="long", dtype=torch.bfloat16, T=5000, H=8, H_kv=2, K=64, V=64, n=24, block_size=16, lists="wild"
)
#: Every kernel of the tensor cores over lists of several tiles, beside the general kernels.
LONG_CASES = [
    _LONG,
    replace(_LONG, name="half", dtype=torch.float16, K=128, V=128, n=70),
    replace(_LONG, name="stride_2", selection_stride=2, K=32, V=32),
    replace(_LONG, name="stride_4", selection_stride=4, T_q=3000),
    replace(_LONG, name="stride_8", selection_stride=8, H=16, H_kv=1, K=128, V=128),
    replace(_LONG, name="stride_16", selection_stride=16, has_sinks=True, n=70),
    replace(_LONG, name="group_1", H=2, has_sinks=True),
    replace(_LONG, name="group_3", H=6, selection_stride=4),
    replace(_LONG, name="group_16", H=32, K=128, V=128),
    replace(_LONG, name="two_windows", T=9003, K=128, V=128),
    replace(_LONG, name="blocks_32", block_size=32, n=40, has_sinks=True),
    replace(_LONG, name="blocks_48", block_size=48, H_i=1, n=20),
    replace(_LONG, name="blocks_128", block_size=128, n=9, selection_stride=16, T=4999, T_q=7),
    replace(_LONG, name="longest", n=1024, T=20_000, T_q=64, lists="random"),
    replace(_LONG, name="longest_stride", n=1024, T=20_000, T_q=64, lists="random", selection_stride=16),
]


@pytest.mark.parametrize("kernels", ["auto", "per_query"])
@pytest.mark.parametrize("case", LONG_CASES, ids=case_id)
def test_tensor_cores_beside_the_general_kernels(case, kernels, monkeypatch):
    """The same rounded inputs in float32, whose kernels ask of every token whether it exists."""
    monkeypatch.setenv("HTREE_TREE_GATHER", kernels)
    inputs = case.make_inputs("cuda")
    found = with_gradients(op(case), inputs)
    wide = [x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs]
    wanted = with_gradients(op(replace(case, dtype=torch.float32)), wide)
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 3e-2}[case.dtype]
    for name, ours, theirs in zip(GRADIENTS, found, wanted, strict=False):
        scale = theirs[theirs.isfinite()].abs().max().item()
        torch.testing.assert_close(
            ours.float(), theirs, rtol=tolerance, atol=tolerance * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(("stride", "heads"), [(1, 16), (4, 16), (16, 16), (2, 8)])
def test_a_row_has_its_bits_in_other_chunks_and_for_wider_lists(stride, heads):
    """Calls of a few rows of a long one, with lists that are padded."""
    case = SparseCase(
        name="chunks", dtype=torch.bfloat16, T=60_000, H=heads, H_kv=2, K=128, V=128, n=64, block_size=16,
        selection_stride=stride,
    )  # fmt: skip
    query, key, value, blocks, _ = case.make_inputs("cuda")
    whole = with_gradients(op(case), (query, key, value, blocks, None))
    dout, dlse = (
        normal(tuple(x.shape), x.dtype, "cuda", 99 + i) for i, x in enumerate(whole[:2])
    )  # those of with_gradients
    for first in (0, 16, 2048, 4064, 4096, 31_200, 59_984):  # the longest lists have masked rows up to 4096
        rows = slice(first, first + 16)
        lists = blocks[:, first // stride : (first + 15) // stride + 1]
        padded = torch.cat([lists, torch.full_like(lists[..., :37], -1)], -1)
        leaf = query[:, rows].clone().requires_grad_()
        out, lse = op(case)(leaf, key[:, : first + 16], value[:, : first + 16], padded, None)
        (dq,) = torch.autograd.grad((out, lse), leaf, (dout[:, rows], dlse[:, rows]))
        assert_same_bits((out, lse, dq), [x[:, rows] for x in whole[:3]])


def test_memory_is_bounded():
    """Beside results, gradients and their fp32 sums, the scratch of a chunk, a packed copy of keys and values, and the
    tiles of those that masked rows see, here a quarter."""
    case = SparseCase(
        name="memory", dtype=torch.bfloat16, T=131_072, H=8, H_kv=4, K=128, V=128, n=256, block_size=16
    )
    inputs = case.make_inputs("cuda")
    leaves = [x.requires_grad_() for x in inputs[:3]]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = op(case)(*leaves, *inputs[3:])
    keys = 2 * inputs[1].numel() * 2
    states = 3 * lse.numel() * 4
    assert torch.cuda.max_memory_allocated() - before <= (520 << 20) + 1.35 * keys + out.nbytes + states
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(out, leaves, torch.ones_like(out))
    gradients = inputs[0].nbytes + keys
    assert torch.cuda.max_memory_allocated() - before <= (2432 << 20) + 3.45 * keys + 2 * gradients + states


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_streams_and_graphs(dtype):
    query, key, value = (normal((1, 3000, heads, 64), dtype, "cuda", heads) for heads in (8, 2, 3))
    value = value[:, :, :2].contiguous()
    blocks, _ = htree_ops.select_blocks(query[:, :, :2, :16], key[..., :16], 20)
    cu = offsets((1200, 0, 1700), "cuda")
    packed = (query[0], key[0], value[0], blocks[0], cu, cu, 1700, 1700)
    assert_stream_and_graph(
        lambda: (
            OPS.sparse_attention(query, key, value, blocks),
            htree_ops.sparse_attention_varlen(*packed, return_lse=True),
        ),
        query,
    )


@pytest.mark.parametrize("stride", [1, 16])
def test_more_than_2_31_elements(stride):
    """Offsets of keys, values, queries and lists beyond 2^31 elements, forward and backward."""
    B, T, rows = 9, 2**21, 32
    key = torch.zeros(B, T, 1, 128, dtype=torch.bfloat16, device="cuda")
    assert key.numel() > 2**31
    block = (T - 4096) // 16
    key[B - 1, block * 16] = 1.0
    value = torch.zeros_like(key)
    value[B - 1, block * 16] = 3.0
    query = torch.full((B, rows, 1, 128), 8.0, dtype=torch.bfloat16, device="cuda").requires_grad_()
    blocks = torch.tensor([block, 7, T // 16 - 1], dtype=torch.int32, device="cuda")
    out, _ = OPS.sparse_attention(
        query, key, value, blocks.expand(B, rows // stride, 1, 3), selection_stride=stride
    )
    assert bool((out[B - 1] == 3).all())
    assert bool((out[0] == 0).all())
    (dq,) = torch.autograd.grad(out.sum(), query)
    assert bool(dq.isfinite().all())
    del out
    leaf = value.requires_grad_()
    out, _ = OPS.sparse_attention(
        query.detach(), key, leaf, blocks.expand(B, rows // stride, 1, 3), selection_stride=stride
    )
    (dv,) = torch.autograd.grad(out.sum(), leaf)
    assert bool((dv[B - 1, block * 16] == rows).all())
    assert dv[B - 1, : block * 16].abs().max() < 1e-3
