"""Tree attention under torch's machinery: opcheck, compile, export, autocast, streams and graphs.

The values are those of eager mode, which other tests compare with the reference (docs/semantics §0.3-0.5).
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export.experimental import _export_forward_backward
from tree_attention_models import CASES, NAMES, OPS, OPTIONS, assert_same, gradients, qkv

import htree_ops
from tests.support.cases import normal
from tests.support.compilers import BACKENDS
from tests.support.graphs import capture
from tests.support.opcheck import opcheck
from tests.support.tree_attention_calls import calls

# ---- opcheck


def test_the_cases_exist():
    assert set(CASES) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name, device):
    for call in calls(CASES[name], device):
        call.opcheck()


@pytest.mark.parametrize("mask", [(True, False, True), (False, False, True), (False, False, False)], ids=str)
def test_opcheck_of_a_masked_backward(mask, device):
    call = next(c for c in calls(CASES["batch"], device) if c.op == "attention_backward")
    found = call.overload(*call.args, output_mask=mask)
    assert [gradient is not None for gradient in found] == list(mask)
    opcheck(call.overload, call.args, {"output_mask": mask})


@pytest.mark.parametrize("name", NAMES)
def test_meta_agrees_with_the_kernels(name, device):
    for call in calls(CASES[name], device):
        call.assert_meta_agrees()


# ---- compile


#: Options under which lengths of 31, 121 and 481 tokens begin a layer where M is above k*r, "free".
KINDS: dict[str, dict[str, Any]] = {
    "plain": OPTIONS,
    "span": OPTIONS | {"selection_span": 2},
    "open_next": {
        "compression_rate": 4,
        "max_top_nodes": 12,
        "top_k": 4,
        "selection_span": 2,
        "open_next": True,
    },
    "free": {"compression_rate": 4, "max_top_nodes": 30, "top_k": 4, "selection_span": 2},
}
by_top = pytest.mark.parametrize("kind", ["plain", "free"])


class Layer(torch.nn.Module):
    """The attention alone."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.options = KINDS[kind]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return htree_ops.tree_attention(q, k, v, **self.options)


class Views(Layer):
    """Attention on slices of one projection, with work on both sides."""

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        q, k, v = (x @ w).split([32, 16, 16], dim=-1)
        heads = (q.unflatten(-1, (4, 8)), k.unflatten(-1, (2, 8)), v.unflatten(-1, (2, 8)))
        return super().forward(*heads).flatten(2).cos()


@pytest.mark.parametrize(
    ("kind", "dynamic", "backend"),
    [
        *((kind, *backend) for kind in ("plain", "free") for backend in BACKENDS),
        *((kind, dynamic, "aot_eager") for kind in ("span", "open_next") for dynamic in (False, True)),
    ],
)
def test_compile_of_views_with_backward(kind, dynamic, backend, device):
    torch._dynamo.reset()
    views = Views(kind)
    compiled = torch.compile(views, backend=backend, fullgraph=True, dynamic=dynamic)
    for T in (40, 57, 150):
        x = normal((2, T, 12), torch.float32, device, T).requires_grad_()
        w = normal((12, 64), torch.float32, device, 1, 0.3).requires_grad_()
        assert_same(gradients(compiled, (x, w)), gradients(views, (x, w)), rtol=1e-4, atol=1e-4)


@by_top
@pytest.mark.parametrize("grad", [False, True])
def test_lengths_alone_do_not_recompile(grad, kind, device):
    torch._dynamo.reset()
    compiled = torch.compile(Layer(kind), backend="aot_eager", fullgraph=True, dynamic=True)
    for T in (40, 41, 57, 128, 129, 5, 9, 31, 150, 513):  # 1 to 5 layers
        leaves = tuple(x.requires_grad_(grad) for x in qkv(device, T))
        with torch.compiler.set_stance("default" if T == 40 else "fail_on_recompile"):
            found = gradients(compiled, leaves) if grad else (compiled(*leaves),)
        wanted = gradients(Layer(kind), leaves) if grad else (Layer(kind)(*leaves),)
        assert_same(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("stride", [1, 4])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_bounds_over_several_depths_are_one_graph(backend, stride, device):
    """`mark_dynamic` with bounds raises where a graph does not hold for each length between them."""
    torch._dynamo.reset()

    def model(q, k, v):
        return htree_ops.tree_attention(q, k, v, **OPTIONS, selection_stride=stride)

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for T in (20, 35, 129, 8, 3, 300):  # 2, 3, 4, 1, 1 and 4 layers; 3 tokens share a list at stride 4
        leaves = qkv(device, T)
        for x in leaves:
            torch._dynamo.mark_dynamic(x, 1, min=2, max=300)
        with torch.compiler.set_stance("default" if T == 20 else "fail_on_recompile"):
            found = gradients(compiled, leaves)
        for ours, theirs in zip(found, gradients(model, leaves), strict=True):
            assert torch.equal(ours, theirs)


def test_a_query_over_sequences_of_several_depths_is_one_graph(device):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: htree_ops.tree_attention(q, k, v, **OPTIONS), backend="aot_eager", fullgraph=True
    )
    for T in (40, 129, 5):
        q, k, v = qkv(device, T)
        q = q[:, -1:].detach().clone().requires_grad_()
        for x in (k, v):
            torch._dynamo.mark_dynamic(x, 1, min=2, max=300)
        with torch.compiler.set_stance("default" if T == 40 else "fail_on_recompile"):
            compiled(q, k, v).sum().backward()
        assert q.grad is not None


def test_lengths_and_positions_of_stages_do_not_recompile(device):
    torch._dynamo.reset()

    def lists(k, t0):
        return OPS.top_parents(k.shape[0], k.shape[1], k.shape[2], 4, 2, 4, t0, device=k.device)

    compiled = torch.compile(lists, backend="aot_eager", fullgraph=True, dynamic=True)
    for T, t0 in ((20, 4), (21, 8), (30, 12), (33, 16)):
        k = normal((2, T, 2, 8), torch.float32, device, 0)
        with torch.compiler.set_stance("default" if T == 20 else "fail_on_recompile"):
            assert torch.equal(compiled(k, t0), lists(k, t0))


def staged(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """Two layers from the staged ops, the mutating ones included."""
    B, T, H = q.shape[:3]
    cos, sin = table[0], table[1]
    pk, pv = OPS.tree_build(k, v, 4)
    parents = OPS.top_parents(B, T, k.shape[2], 4, 2, 4, device=q.device)
    scores, count = OPS.compute_scores(q, pk, parents, cos, sin, 1, 4)
    positions = OPS.select_topk(scores, count, 4)
    OPS.mask_topk_scores_(scores, positions)
    state = OPS.accumulate_non_topk(pv, parents, scores, count, 1, 4)
    gmax = q.new_full((B, T, H), -torch.inf)
    gsum, gout = q.new_zeros(B, T, H), q.new_zeros(B, T, H, v.shape[3])
    OPS.merge_to_global_(gmax, gsum, gout, *state)
    lists = OPS.compute_next_parents(parents, positions, 4)
    OPS.merge_to_global_(gmax, gsum, gout, *OPS.bottom_accumulate(q, k, v, lists, cos, sin, 4))
    return OPS.final_normalize(gout, gsum)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_functionalization_keeps_mutations(backend, device):
    torch._dynamo.reset()
    q, k, v = (x.detach() for x in qkv(device, 60))
    table = htree_ops.ops.tree_attention.rope_cache(16, 8, device=device)
    expected = staged(q, k, v, table)
    whole = htree_ops.tree_attention(q, k, v, compression_rate=4, max_top_nodes=16, top_k=4)
    torch.testing.assert_close(expected, whole, rtol=1e-4, atol=1e-5)
    compiled = torch.compile(staged, backend=backend, fullgraph=True)
    assert_same((compiled(q, k, v, table),), (expected,), rtol=1e-4, atol=1e-5)


def test_a_compiled_region_without_gradient_formula_fails_in_its_backward(device):
    torch._dynamo.reset()
    q, k, v = qkv(device)

    def model(q):
        return OPS.attention_forward(q, k.detach(), v.detach(), 4, 8, 2)[0]

    out = torch.compile(model, backend="aot_eager", fullgraph=True)(q)
    assert torch.equal(out, model(q))
    with pytest.raises(RuntimeError, match=r"attention_forward.*torch\.no_grad\(\)"):
        out.sum().backward()


# ---- export


@pytest.mark.parametrize("kind", KINDS)
def test_export_keeps_one_node_and_dynamic_lengths(kind, device):
    T = torch.export.Dim("T", min=2)
    q, k, v = (x.detach() for x in qkv(device))
    program = torch.export.export(Layer(kind), (q, k, v), dynamic_shapes=({1: T}, {1: T}, {1: T}))
    names = [str(node.target) for node in program.graph.nodes if "htree" in str(node.target)]
    assert names == ["htree._attention.default"]
    for length in (40, 71, 200):
        inputs = tuple(x.detach() for x in qkv(device, length))
        assert torch.equal(program.module()(*inputs), Layer(kind)(*inputs))


@by_top
@pytest.mark.parametrize("strict", [False, True])
def test_export_with_gradients_takes_lengths_of_every_depth(strict, kind, device):
    T = torch.export.Dim("T", min=2, max=600)
    program = torch.export.export(Layer(kind), qkv(device), dynamic_shapes=({1: T},) * 3, strict=strict)
    exported = program.module()
    for length in (40, 20, 129, 5, 300, 500):
        leaves = qkv(device, length)
        assert_same(gradients(exported, leaves), gradients(Layer(kind), leaves), rtol=0, atol=0)


class Loss(Layer):
    """What a joint graph of forward and backward is exported from."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().forward(q, k, v).square().sum()


def test_an_exported_joint_graph_takes_lengths_of_every_depth(device):
    T = torch.export.Dim("T", min=2, max=300)
    forward = torch.export.export(Loss(), qkv(device), dynamic_shapes=({1: T},) * 3)
    joint = _export_forward_backward(forward)
    names = [str(node.target) for node in joint.graph.nodes if "htree" in str(node.target)]
    assert names == ["htree._attention_rows.default", "htree._attention_rows_backward.default"]
    for length in (40, 20, 129, 5, 300):
        leaves = qkv(device, length)
        loss = Loss()(*leaves)
        expected = (loss, *torch.autograd.grad(loss, leaves))
        for ours, theirs in zip(joint.graph_module(*leaves), expected, strict=True):
            assert torch.equal(ours, theirs)


def test_aot_inductor(device, tmp_path):
    q, k, v = (x.detach() for x in qkv(device))
    program = torch.export.export(Layer(), (q, k, v))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
    loaded = torch._inductor.aoti_load_package(path)
    torch.testing.assert_close(loaded(q, k, v), Layer()(q, k, v))


class Normalize(torch.nn.Module):
    """An op that is called with an explicit ScalarType."""

    def forward(self, gout: Tensor, gsum: Tensor) -> Tensor:
        return OPS.final_normalize(gout, gsum, torch.bfloat16)


@pytest.mark.xfail(
    torch.__version__ < (2, 15),
    strict=torch.__version__ < (2, 12),
    reason="AOTInductor of torch 2.11 rejects ops called with a ScalarType; that of 2.15 takes them",
)
def test_aot_inductor_with_a_scalar_type(device, tmp_path):
    gout, gsum = normal((2, 5, 3, 4), torch.float32, device, 0), torch.ones(2, 5, 3, device=device)
    program = torch.export.export(Normalize(), (gout, gsum))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "normalize.pt2"))
    torch.testing.assert_close(torch._inductor.aoti_load_package(path)(gout, gsum), Normalize()(gout, gsum))


# ---- autocast, module


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_q_k_v_and_nothing_else(dtype, device):
    leaves = qkv(device)
    with torch.autocast(device, dtype):
        out, *grads = gradients(lambda *x: htree_ops.tree_attention(*x, **OPTIONS), leaves)
        forward = OPS.attention_forward(*(x.detach() for x in leaves), 4, 8, 2)
    assert out.dtype == forward[0].dtype == dtype
    assert forward[1].dtype == forward[2].dtype == torch.float32
    assert [g.dtype for g in grads] == [torch.float32] * 3
    cast = [x.detach().to(dtype) for x in leaves]
    assert torch.equal(out, htree_ops.tree_attention(*cast, **OPTIONS))
    wide = [x.detach().double() for x in leaves]
    if device == "cpu":
        with torch.autocast(device, dtype):
            assert htree_ops.tree_attention(*wide, **OPTIONS).dtype == torch.float64
    with torch.autocast(device, dtype):
        scores, _ = OPS.compute_scores(*stage_arguments(device))
        assert scores.dtype == torch.float32


def stage_arguments(device: str) -> tuple[Any, ...]:
    return next(c for c in calls(CASES["batch"], device) if c.op == "compute_scores").args


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_under_autocast(dynamic, device):
    torch._dynamo.reset()

    def model(q, k, v):
        with torch.autocast(device, torch.bfloat16):
            out = htree_ops.tree_attention(q, k, v, **OPTIONS)
        return out.float()

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    assert_same(gradients(compiled, qkv(device)), gradients(model, qkv(device)), rtol=2e-2, atol=2e-2)


def test_module_compiles_and_refuses_masks(device):
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = htree_ops.HTreeAttention(16, 4, 2, **OPTIONS, device=device)
    assert set(dict(layer.named_parameters())) == {f"{x}_proj.weight" for x in "qkvo"}
    assert "num_kv_heads=2" in repr(layer)
    x = normal((2, 50, 16), torch.float32, device, 0).requires_grad_()
    leaves = (x, *layer.parameters())
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    found = gradients(lambda x, *_: compiled(x), leaves)
    expected = gradients(lambda x, *_: layer(x), leaves)
    assert_same(found, expected, rtol=1e-4, atol=1e-5)
    mask = torch.ones(50, 50, dtype=torch.bool, device=device)
    with pytest.raises(NotImplementedError, match="attn_mask"):
        layer(x, attn_mask=mask)


# ---- streams and graphs


@pytest.mark.gpu
def test_runs_on_the_current_stream_and_in_a_graph():
    inputs = tuple(x.detach() for x in qkv("cuda", 300))

    def model():
        return htree_ops.tree_attention(*inputs, **OPTIONS)

    expected = model()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    originals = [x.clone() for x in inputs]
    for x in inputs:
        x.fill_(torch.nan)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(
            50_000_000
        )  # a kernel on another stream would read the NaN before they are replaced
        for x, original in zip(inputs, originals, strict=True):
            x.copy_(original)
        on_stream = model()
    stream.synchronize()
    assert torch.equal(on_stream, expected)

    graph, captured = capture(model)
    for x in inputs:
        x.mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, model())
    assert not torch.equal(captured, expected)


@pytest.mark.gpu
def test_every_op_can_be_captured():
    case = CASES["stride4_suffix"]
    for call in calls(case, "cuda"):
        call()
        graph, _ = capture(call)
        graph.replay()
        torch.cuda.synchronize()
