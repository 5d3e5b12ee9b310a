"""sparse_attention under torch's machinery: opcheck, compile, export, AOTInductor, autocast (docs/semantics §0.3-0.5).

The values are those of eager mode, which other tests compare with the reference.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from sparse_attention_helpers import OPS, for_device, op
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import htree_ops
from tests.support.cases import case_id, normal
from tests.support.compilers import BACKENDS
from tests.support.documents import with_gradients
from tests.support.opcheck import opcheck
from tests.support.sparse_attention_cases import CASES, VARLEN_CASES, SparseBackwardCase, SparseCase

OPTIONS = {"block_size": 16, "selection_stride": 4}


def leaves_of(inputs: Sequence[Any]) -> list[Any]:
    return [
        x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs
    ]


# ---- opcheck


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_opcheck(case, device):
    case = for_device(case, device)
    inputs = case.make_inputs(device)
    opcheck(OPS.sparse_attention.default, inputs, case.options())
    opcheck(OPS.sparse_attention.default, tuple(leaves_of(inputs)), case.options())
    for of_lse in (False, True):
        backward = SparseBackwardCase(name=case.name, dtype=case.dtype, forward=case, of_lse=of_lse)
        opcheck(OPS._sparse_attention_backward.default, backward.make_inputs(device), backward.options())


@pytest.mark.parametrize("case", VARLEN_CASES, ids=case_id)
def test_opcheck_of_documents(case, device):
    if device == "cuda":
        case = replace(case, block_size=max(16, case.block_size), dtype=torch.float32)
    inputs = case.make_inputs(device)
    opcheck(OPS.sparse_attention_varlen.default, inputs, case.options())
    opcheck(OPS.sparse_attention_varlen.default, tuple(leaves_of(inputs)), case.options())
    query, key, value, blocks, cu_q, cu_k, sinks, max_q, max_k = inputs
    out, lse = OPS.sparse_attention_varlen(*inputs, **case.options())
    args = (query, key, value, blocks, cu_q, cu_k, out, lse, sinks, out, lse.nan_to_num(), max_q, max_k)
    opcheck(OPS._sparse_attention_varlen_backward.default, args, case.options())


@pytest.mark.parametrize("mask", [(True, False, True, False), (False, False, False, True), (False,) * 4])
def test_opcheck_of_a_masked_backward(mask, device):
    case = replace(CASES[6], block_size=16, n=2)
    args = SparseBackwardCase(name="sinks", dtype=case.dtype, forward=case).make_inputs(device)
    opcheck(OPS._sparse_attention_backward.default, args, {**case.options(), "output_mask": mask})


# ---- compile and export


def views(x: Tensor, w: Tensor, blocks: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Attention on slices of one projection, with work on both sides, and both results used."""
    q, k, v = (x @ w).split([32, 16, 16], dim=-1)
    out, lse = htree_ops.sparse_attention(
        q.unflatten(-1, (4, 8)),
        k.unflatten(-1, (2, 8)),
        v.unflatten(-1, (2, 8)),
        blocks,
        sinks=sinks,
        return_lse=True,
        **OPTIONS,
    )
    return out.flatten(2).cos(), lse.clamp_min(-9).sin()


def view_inputs(T: int, device: str) -> list[Any]:
    case = SparseCase(name="views", dtype=torch.float32, B=2, T=T, H_kv=2, n=2, **OPTIONS)
    x = normal((2, T, 12), torch.float32, device, T)
    return [
        x,
        normal((12, 64), torch.float32, device, 1, 0.3),
        case.make_blocks(device),
        normal((4,), torch.float32, device, 2),
    ]


@pytest.mark.parametrize(("dynamic", "backend"), BACKENDS)
def test_compile_of_views_with_backward(dynamic, backend, device):
    torch._dynamo.reset()
    compiled = torch.compile(views, backend=backend, fullgraph=True, dynamic=dynamic)
    for T in (40, 57):
        inputs = view_inputs(T, device)
        for ours, theirs in zip(with_gradients(compiled, inputs), with_gradients(views, inputs), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("grad", [False, True])
def test_lengths_alone_do_not_recompile(grad, device):
    torch._dynamo.reset()
    compiled = torch.compile(views, backend="aot_eager", fullgraph=True, dynamic=True)

    def run(T):
        inputs = view_inputs(T, device)
        if grad:
            with_gradients(compiled, inputs)
        else:
            compiled(*inputs)

    run(40)
    with torch.compiler.set_stance("fail_on_recompile"):
        for T in (41, 57, 128, 9, 200):
            run(T)


def test_compile_of_documents(device):
    torch._dynamo.reset()
    case = replace(VARLEN_CASES[0], block_size=16)

    def call(*x):
        return OPS.sparse_attention_varlen(*x, **case.options())

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    inputs = case.make_inputs(device)
    for ours, theirs in zip(with_gradients(compiled, inputs), with_gradients(call, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


class Layer(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor) -> Tensor:
        out = htree_ops.sparse_attention(q, k, v, blocks, **OPTIONS)
        return out * 2


def test_export_takes_any_length(device):
    inputs = SparseCase(name="export", dtype=torch.float32, n=2, T=40, **OPTIONS).make_inputs(device)[:4]
    T = torch.export.Dim("T", min=1, max=50)
    dims = ({1: 4 * T}, {1: 4 * T}, {1: 4 * T}, {1: T})
    program = torch.export.export(Layer(), inputs, dynamic_shapes=dims)
    names = [str(node.target) for node in program.graph.nodes if "htree" in str(node.target)]
    assert names == ["htree.sparse_attention.default"]
    for length in (40, 8, 160):
        other = SparseCase(name="export", dtype=torch.float32, n=2, T=length, **OPTIONS).make_inputs(device)[
            :4
        ]
        assert torch.equal(program.module()(*other), Layer()(*other))


def test_aot_inductor(device, tmp_path):
    inputs = SparseCase(name="aot", dtype=torch.float32, n=2, T=40, **OPTIONS).make_inputs(device)[:4]
    program = torch.export.export(Layer(), inputs)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
    torch.testing.assert_close(torch._inductor.aoti_load_package(path)(*inputs), Layer()(*inputs))


# ---- autocast, FLOPs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_all_but_sinks(dtype, device):
    case = replace(CASES[6], block_size=16, n=2)
    inputs = case.make_inputs(device)
    with torch.autocast(device, dtype):
        found = with_gradients(op(case), inputs)
    assert found[0].dtype == dtype
    assert found[1].dtype == torch.float32
    assert {x.dtype for x in found[2:]} == {torch.float32}
    wanted = op(case)(*(x.to(dtype) for x in inputs[:3]), *inputs[3:])
    assert torch.equal(found[0], wanted[0])


def test_flops(device):
    case = replace(CASES[0], T=640, K=8, V=16, n=4, block_size=16)
    inputs = leaves_of(case.make_inputs(device))
    pairs = 640 * 4 * 64
    with FlopCounterMode(display=False) as counter:
        out, _ = op(case)(*inputs)
    assert counter.get_total_flops() == 2 * pairs * (8 + 16)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * pairs * (3 * 8 + 2 * 16)
