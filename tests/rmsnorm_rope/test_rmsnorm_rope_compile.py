"""rmsnorm_rope and head_rmsnorm_rope under opcheck, torch.compile, export, graphs, and every tuned CUDA kernel."""

import math
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import htree_ops
from tests.support.cases import case_id, normal
from tests.support.compare import assert_close_spec
from tests.support.compilers import BACKENDS
from tests.support.graphs import assert_stream_and_graph, kernels_of
from tests.support.opcheck import opcheck
from tests.support.rmsnorm_rope_cases import (
    CASES,
    DTYPES,
    RMSNormRoPEBackwardCase,
    RMSNormRoPECase,
    assert_forward,
    assert_gradients,
    tables,
)

op = torch.ops.htree.rmsnorm_rope


def forward_of(case: RMSNormRoPECase) -> Any:
    return torch.ops.htree.head_rmsnorm_rope if case.per_head else op


def backward_of(case: RMSNormRoPECase) -> Any:
    ops = torch.ops.htree
    return ops.head_rmsnorm_rope_backward if case.per_head else ops.rmsnorm_rope_backward


OPCHECK_CASES = [c for c in CASES if math.prod(c.shape) < 5_000][::5]


@pytest.mark.parametrize("case", OPCHECK_CASES, ids=case_id)
def test_opcheck(case, device):
    x, weight, *rest = case.make_inputs(device)
    dy = torch.randn_like(x)
    opcheck(forward_of(case).default, (x, weight, *rest))
    opcheck(forward_of(case).default, (x.clone().requires_grad_(), weight.clone().requires_grad_(), *rest))
    opcheck(backward_of(case).default, (dy, x, weight, *rest))


@pytest.mark.parametrize("of_each", [False, True])
@pytest.mark.parametrize(("dynamic", "backend"), BACKENDS)
def test_compile_with_views_and_backward(dynamic, backend, of_each, device):
    def model(x, weight, cos, sin):
        whole = htree_ops.rmsnorm_rope(x[..., 8:40].sin(), weight, cos, sin)
        heads = x[..., :32].unflatten(-1, (4, 8)).transpose(1, 2).transpose(1, 2)
        return whole.cos() + htree_ops.head_rmsnorm_rope(heads, weight[:8], cos, sin).flatten(-2)

    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    for length in (6, 9):
        x = normal((2, length, 40), torch.float64, device, length)
        weight = normal((32,), torch.float64, device, 1)
        cos, sin = tables(2 * length if of_each else length, 8, torch.float64, device)
        if of_each:
            cos, sin = (t.view(2, length, 8) for t in (cos, sin))
        ours = [t.clone().requires_grad_() for t in (x, weight)]
        eager = [t.clone().requires_grad_() for t in (x, weight)]
        compiled(*ours, cos, sin).sum().backward()
        model(*eager, cos, sin).sum().backward()
        for a, b in zip(ours, eager, strict=True):
            assert_close_spec(a.grad, b.grad, 1e-12, 1e-12)


@pytest.mark.parametrize("of_each", [False, True])
def test_new_lengths_do_not_recompile(of_each):
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def model(x, weight, cos, sin):
        heads = x.unflatten(-1, (-1, 16))
        return op(x, weight, cos, sin) + htree_ops.head_rmsnorm_rope(heads, weight[:16], cos, sin).flatten(-2)

    weight = torch.ones(64)
    for batch, length in ((2, 5), (3, 9), (4, 40), (7, 23)):
        cos, sin = tables(batch * length if of_each else length, 16, torch.float32, "cpu")
        if of_each:
            cos, sin = (t.view(batch, length, 16) for t in (cos, sin))
        model(torch.randn(batch, length, 64), weight, cos, sin)
    assert counter.frame_count == 1


def test_frozen_weight_compiles(device):
    cos, sin = tables(4, 8, torch.float32, device)
    weight = torch.ones(16, device=device)
    x = torch.randn(2, 4, 16, device=device, requires_grad=True)
    compiled = torch.compile(
        lambda a: op(a, weight, cos, sin).square().sum(), backend="aot_eager", fullgraph=True
    )
    (ours,) = torch.autograd.grad(compiled(x), x)
    (eager,) = torch.autograd.grad(op(x, weight, cos, sin).square().sum(), x)
    assert_close_spec(ours, eager, 1e-5, 1e-5)


def test_export_keeps_one_node(device):
    module = htree_ops.FusedRMSNormRoPE(64, 16).to(device)
    cos, sin = tables(64, 16, torch.float32, device)
    length = torch.export.Dim("length", min=2, max=60)
    x = torch.randn(2, 5, 64, device=device)
    with torch.no_grad():
        program = torch.export.export(module, (x, cos, sin), dynamic_shapes=({1: length}, None, None))
    calls = [n.target for n in program.graph.nodes if n.op == "call_function"]
    assert [c for c in calls if c == op.default] == [op.default]
    longer = torch.randn(2, 9, 64, device=device)
    assert torch.equal(program.module()(longer, cos, sin), module(longer, cos, sin))


@pytest.mark.gpu
def test_stream_graph_and_one_kernel():
    x = torch.randn(4, 33, 2048, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(2048, device="cuda")
    cos, sin = tables(33, 128, torch.float32, "cuda")
    assert_stream_and_graph(lambda: op(x, weight, cos, sin), x)
    kernels = kernels_of(lambda: op(x, weight, cos, sin))
    assert len(kernels) == 1, kernels


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [64, 128, 256])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_every_tuned_kernel(dtype, block_size, num_stages):
    config = [block_size, block_size // 32, num_stages]
    for pairs in (1, 2, 4):
        width = block_size * pairs * 32 // dtype.itemsize
        x = normal((3, 7, width), dtype, "cuda", 9)
        weight = normal((width,), dtype, "cuda", 10)
        cos, sin = tables(7, 64, dtype, "cuda")
        inputs = (x, weight, cos, sin, 1e-6, None)
        if pairs > dtype.itemsize:
            with pytest.raises(NotImplementedError, match="holds rows of"):
                op(*inputs, config)
        else:
            assert_forward(op(*inputs, config), inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("table", ["unequal", "batched"])
def test_more_rows_than_blocks(table):
    """Each block takes several rows, the ring wraps around, and the last blocks have one row less."""
    for shape, head_dim in (((3, 1000, 1024), 128), ((2, 501, 7, 128), 128), ((2, 700, 4096), 64)):
        case = RMSNormRoPECase(name="many", dtype=torch.bfloat16, shape=shape, head_dim=head_dim, table=table)
        inputs = case.make_inputs("cuda")
        assert_forward(forward_of(case)(*inputs), inputs)
        backward = RMSNormRoPEBackwardCase(name="many", dtype=torch.bfloat16, forward=case)
        inputs = backward.make_inputs("cuda")
        assert_gradients(backward_of(case)(*inputs), inputs)


@pytest.mark.parametrize("dynamic", [None, True])
def test_layers_of_different_eps(dynamic):
    """The second value makes eps symbolic while the graph is traced."""
    x, cos, sin = torch.randn(2, 3, 8), torch.randn(3, 4), torch.randn(3, 4)
    torch._dynamo.reset()
    for eps in (1e-6, 1e-5, 1e-3):
        layer = htree_ops.FusedRMSNormRoPE(8, 4, eps)
        compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        assert torch.equal(compiled(x, cos, sin), layer(x, cos, sin))

    def head(eps):
        return htree_ops.head_rmsnorm_rope(x.view(2, 3, 2, 4), torch.ones(4), cos, sin, eps)

    compiled_head = torch.compile(head, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for eps in (1e-6, 1e-5, 1e-3):
        assert torch.equal(compiled_head(eps), head(eps))
