"""The log-sum-exp as a differentiable output (docs/semantics/tree_attention.md §1.10)."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.export.experimental import _export_forward_backward
from torch.utils._python_dispatch import TorchDispatchMode
from tree_attention_fast import assert_small_error
from tree_attention_helpers import refused
from tree_attention_models import OPTIONS, qkv
from tree_attention_strategies import EVERY_IMPORTANCE, dtypes_of, problems, seeds

import htree_ops.reference.tree_attention as ref
from htree_ops import tree_attention, tree_attention_varlen
from tests.support.cases import case_id, normal
from tests.support.devices import poisoned_memory
from tests.support.tree_attention_cases import CASES, GRADIENT_SHAPES
from tests.support.tree_attention_checks import assert_gradients, reference_gradients
from tests.support.tree_attention_problem import TreeAttentionCase, packed

OPS = torch.ops.htree
by_use = pytest.mark.parametrize("uses", ["out", "lse", "both"])
by_small_case = pytest.mark.parametrize("case", GRADIENT_SHAPES, ids=case_id)


def used(results: tuple[Tensor, Tensor], uses: str) -> tuple[Tensor, ...]:
    return {"out": results[:1], "lse": results[1:], "both": results}[uses]


def upstream(results: tuple[Tensor, ...], seed: int = 0) -> tuple[Tensor, ...]:
    """A normal gradient for each of the results."""
    return tuple(normal(tuple(x.shape), x.dtype, x.device, seed + 40 + x.dim()) for x in results)


def leaves_of(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    return [x.detach().requires_grad_() for x in tensors]


def gradients(case: TreeAttentionCase, tensors: tuple[Tensor, ...], uses: str, store: bool = True) -> Any:
    leaves = leaves_of(tensors)
    with poisoned_memory():
        results = used(OPS._attention_lse(*leaves, store, *case.packed()), uses)
        return torch.autograd.grad(results, leaves, upstream(results))


@contextmanager
def ops_of_htree(calls: list[tuple[str, tuple[Any, ...]]]) -> Iterator[None]:
    """Collects the names and arguments of the ops of htree below autograd."""

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "htree":
                calls.append((func.__name__.removesuffix(".default"), args))
            return func(*args, **(kwargs or {}))

    with Record():
        yield


# ---- values


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_lse_is_that_of_the_states(case, device):
    q, k, v = case.make_qkv(device)
    if refused(case, device, lambda: OPS._attention_lse(q, k, v, True, *case.packed())):
        return
    out, gmax, gsum, _ = OPS.attention_forward(q, k, v, **case.reference_options())
    for leaves in ((q, k, v), leaves_of((q, k, v))):
        found = OPS._attention_lse(*leaves, True, *case.packed())
        assert torch.equal(found[0], out)
        assert torch.equal(found[1], gmax + gsum.log())
        assert found[1].dtype == gmax.dtype


# ---- gradients


@by_small_case
@by_use
@pytest.mark.parametrize("store_parents", [True, False])
def test_gradcheck(case, uses, store_parents):
    inputs = leaves_of(case.make_separated("cpu"))
    assert torch.autograd.gradcheck(
        lambda *x: used(OPS._attention_lse(*x, store_parents, *case.packed()), uses), inputs
    )


@pytest.mark.parametrize("case", CASES, ids=case_id)
@pytest.mark.parametrize("uses", ["lse", "both"])
def test_gradients_are_the_reference_under_the_same_lists(case, uses, device):
    tensors = case.make_qkv(device)
    if refused(case, device, lambda: OPS._attention_lse(*tensors, True, *case.packed())):
        return
    got = gradients(case, tensors, uses)
    again = gradients(case, tensors, uses, store=False)
    assert all(torch.equal(x, y) for x, y in zip(got, again, strict=True))
    check_against_reference(case, tensors, uses, got)


def check_against_reference(
    case: TreeAttentionCase, tensors: tuple[Tensor, ...], uses: str, got: tuple[Tensor, ...]
) -> None:
    out, gmax, _, parents = OPS.attention_forward(*tensors, **case.reference_options())
    given_gradients = dict(zip(("out", "lse"), upstream((out, gmax)), strict=True))
    dlse = given_gradients["lse"].cpu()
    dout = given_gradients["out"].cpu() if uses == "both" else torch.zeros_like(out).cpu()
    cpu = [x.detach().cpu() for x in tensors]
    lists = [x.cpu() for x in parents]
    wanted = reference_gradients(*cpu, dout, lists, case.reference_options(), dlse)
    assert_gradients([x.cpu() for x in got], wanted, dout, *cpu, dlse)


@given(data=st.data(), seed=seeds)
def test_gradients_of_drawn_problems(data, seed, device):
    case = data.draw(problems(dtypes_of(device), importances=EVERY_IMPORTANCE, max_length=60))
    tensors = case.make_qkv(device, seed)
    uses = data.draw(st.sampled_from(["lse", "both"]))
    check_against_reference(case, tensors, uses, gradients(case, tensors, uses))


@by_small_case
def test_the_formula_of_the_reference(case):
    """D less the gradient of the lse, beside autograd."""
    q, k, v, options = case.make_call("cpu")
    forward = ref.htree_forward_naive(q, k, v, **options)
    dout, dlse = upstream((forward.out, forward.lse))
    names = ("compression_rate", "scale", "rope_base", "inv_freq")
    rest = {name: options[name] for name in names if name in options}
    found = ref.htree_backward_naive(dout, q, forward, dlse=dlse, **rest)
    wanted = reference_gradients(q, k, v, dout, forward.parents, options, dlse)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("store_parents", [True, False])
def test_a_gradient_of_out_alone_has_the_bits_of_attention(store_parents, device):
    for case in (x for x in CASES if x.dtype in (torch.float32, torch.bfloat16)):
        leaves = leaves_of(case.make_qkv(device))
        out = OPS._attention(*leaves, store_parents, *case.packed())
        wanted = torch.autograd.grad(out, leaves, upstream((out,)))
        found = gradients(case, tuple(leaves), "out", store_parents)
        assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


def test_zeros_for_one_output_change_no_gradient(device):
    """An output that is not used is not filled with zeros, and that gives the same."""
    leaves = leaves_of(qkv(device))
    for place in (0, 1):
        results = tree_attention(*leaves, **OPTIONS, return_lse=True)
        given_gradients = list(upstream(results))
        given_gradients[1 - place] = torch.zeros_like(given_gradients[1 - place])
        wanted = torch.autograd.grad(results, leaves, given_gradients, retain_graph=True)
        found = torch.autograd.grad(results[place], leaves, given_gradients[place])
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@by_use
@pytest.mark.parametrize("documents", [False, True])
def test_one_forward_and_only_gradients_that_came(uses, documents, device):
    leaves = leaves_of(qkv(device, B=1))
    calls = []
    with ops_of_htree(calls):
        if documents:
            cu = torch.tensor([0, 15, 40], dtype=torch.int32, device=device)
            rows = [x[0] for x in leaves]
            results = tree_attention_varlen(*rows, cu, cu, 25, 25, **OPTIONS, return_lse=True)
        else:
            results = tree_attention(*leaves, **OPTIONS, return_lse=True)
        sum(x.sum() for x in used(results, uses)).backward()
    forward, backward = ("varlen_forward", "varlen_backward") if documents else ("rows", "rows_backward")
    assert [name for name, _ in calls] == [f"_attention_{forward}", f"_attention_{backward}"]
    place = 12 if documents else 7
    given_gradients = calls[1][1][place : place + 2]
    assert [x is not None for x in given_gradients] == [uses != "lse", uses != "out"]
    if uses == "lse":
        assert not leaves[2].grad.any()  # the lse does not depend on v


@by_use
def test_frozen_inputs_get_no_gradient(uses, device):
    tensors = qkv(device)
    full = torch.autograd.grad(
        [x.sum() for x in used(tree_attention(*tensors, **OPTIONS, return_lse=True), uses)], tensors
    )
    for wanted in range(3):
        leaves = [x.detach().requires_grad_(i == wanted) for i, x in enumerate(tensors)]
        results = used(tree_attention(*leaves, **OPTIONS, return_lse=True), uses)
        (found,) = torch.autograd.grad([x.sum() for x in results], leaves[wanted])
        assert torch.equal(found, full[wanted])


def test_merging_with_another_branch(device):
    """Two attentions over parts of the keys, merged by their lse, are the attention over all of them."""
    T, half = 24, 12
    exact = {"compression_rate": 4, "max_top_nodes": 32, "top_k": 8, "rope_base": None}
    dtype = torch.float64 if device == "cpu" else torch.float32
    q, k, v = leaves_of(tuple(normal((2, T, heads, 8), dtype, device, heads) for heads in (4, 2, 2)))
    late = q[:, half:]
    own = tree_attention(late, k[:, half:], v[:, half:], **exact, return_lse=True)
    keys, values = (x[:, :half].repeat_interleave(2, 2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bths", late, keys) * 8**-0.5
    other = (torch.einsum("bths,bshd->bthd", scores.softmax(-1), values), scores.logsumexp(-1))
    lse = torch.logaddexp(own[1], other[1])
    merged = sum(out * (part - lse).exp()[..., None] for out, part in (own, other))
    whole = tree_attention(late, k, v, **exact)
    dout = normal(tuple(whole.shape), dtype, device, 7)
    tolerance = 1e-11 if device == "cpu" else 1e-4
    torch.testing.assert_close(merged, whole, rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(
        torch.autograd.grad(merged, (q, k, v), dout), torch.autograd.grad(whole, (q, k, v), dout), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@by_use
def test_gradcheck_of_packed_documents(uses):
    leaves = leaves_of(tuple(normal((17, heads, 4), torch.float64, "cpu", heads) for heads in (2, 1, 1)))
    cu = torch.tensor([0, 11, 11, 15], dtype=torch.int32)

    def call(*x):
        out, lse = tree_attention_varlen(
            *x, cu, cu, 11, 11, compression_rate=3, max_top_nodes=4, top_k=2, return_lse=True
        )
        return used((out, lse[:15]), uses)  # the rows behind have no difference quotient

    assert torch.autograd.gradcheck(call, leaves)


@pytest.mark.parametrize("grouping", ["auto", "length", "rank"])
def test_rows_that_see_nothing_have_no_gradient(grouping, device):
    leaves = leaves_of(tuple(normal((40, heads, 8), torch.float32, device, heads) for heads in (4, 2, 2)))
    cu = torch.tensor([0, 9, 30], dtype=torch.int32, device=device)
    out, lse = OPS._attention_varlen(*leaves, None, None, cu, cu, 21, 21, grouping, *packed(4, 8, 2))
    assert (lse[30:] == -torch.inf).all()
    upstream_out, upstream_lse = (torch.ones_like(x) for x in (out, lse))
    upstream_lse[30:] = torch.nan  # what a merge of -inf with -inf sends back
    found = torch.autograd.grad((out, lse), leaves, (upstream_out, upstream_lse))
    for x in found:
        assert x.isfinite().all()
        assert not x[30:].any()


# ---- torch's machinery


@by_use
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(uses, dynamic, device):
    torch._dynamo.reset()

    def model(q, k, v):
        return used(tree_attention(q * 2, k, v, **OPTIONS, return_lse=True), uses)

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for T in (40, 57, 5):
        leaves = qkv(device, T)
        found, wanted = compiled(*leaves), model(*leaves)
        both = (
            (*x, *torch.autograd.grad(x, leaves, upstream(x), allow_unused=True)) for x in (found, wanted)
        )
        for ours, theirs in zip(*both, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


class Loss(torch.nn.Module):
    """A loss of the used outputs."""

    def __init__(self, uses: str) -> None:
        super().__init__()
        self.uses = uses

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        results = used(tree_attention(q, k, v, **OPTIONS, return_lse=True), self.uses)
        return torch.stack([x.square().sum() for x in results]).sum()


@by_use
def test_export_takes_lengths_of_every_depth(uses, device):
    T = torch.export.Dim("T", min=2, max=300)
    model = Loss(uses)
    forward = torch.export.export(model, qkv(device), dynamic_shapes=({1: T},) * 3)
    assert names_of(forward.graph) == ["htree._attention_lse.default"]
    joint = _export_forward_backward(forward)
    assert names_of(joint.graph) == [
        "htree._attention_rows.default",
        "htree._attention_rows_backward.default",
    ]
    for length in (40, 129, 5):
        leaves = qkv(device, length)
        loss = model(*leaves)
        expected = (loss, *torch.autograd.grad(loss, leaves))
        for ours, theirs in zip(joint.graph_module(*leaves), expected, strict=True):
            assert torch.equal(ours, theirs)


def names_of(graph: torch.fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if "htree" in str(node.target)]


@by_use
def test_compiled_autograd(uses, device):
    from torch._dynamo import compiled_autograd

    found = []
    for traced in (True, False):
        leaves = qkv(device)
        loss = sum(x.square().sum() for x in used(tree_attention(*leaves, **OPTIONS, return_lse=True), uses))
        if traced:
            with compiled_autograd._enable(torch.compile(backend="eager")):
                loss.backward()
        else:
            loss.backward()
        found.append([x.grad for x in leaves])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


@by_use
def test_double_backward_is_refused(uses, device):
    leaves = qkv(device)
    results = used(tree_attention(*leaves, **OPTIONS, return_lse=True), uses)
    (dk,) = torch.autograd.grad(sum(x.square().sum() for x in results), leaves[1], create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        dk.sum().backward()


def test_autocast(device):
    leaves = qkv(device)
    with torch.autocast(device, torch.bfloat16):
        out, lse = tree_attention(*leaves, **OPTIONS, return_lse=True)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    (lse.sum() + out.float().sum()).backward()
    assert all(x.grad.dtype == torch.float32 for x in leaves)


# ---- the kernels of a GPU

MODEL = TreeAttentionCase(
    name="lse", dtype=torch.bfloat16, T=900, H=16, H_kv=2, K=128, V=128, r=16, top_k=16, M=128
)
FAMILIES = {
    "per_list": replace(MODEL, selection_stride=16),
    "per_list_group16": replace(MODEL, H=32, selection_stride=8),
    "shared_gather": MODEL,
    "per_query": replace(MODEL, H=8, K=32, V=32, selection_stride=4),
    "dense_rows": replace(MODEL, M=1024, top_k=64),
    "masked_rows": replace(MODEL, rope_base=None),
    "two_batches": replace(MODEL, B=2, selection_stride=4),
    "suffix": replace(MODEL, num_queries=300),
    "general": replace(MODEL, K=48, V=40),
    "general_single": replace(MODEL, dtype=torch.float32),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
@by_use
def test_gradients_of_every_family(name, uses, nan_memory):
    case = FAMILIES[name]
    tensors = case.make_qkv("cuda")
    got = gradients(case, tensors, uses)
    out, gmax, _, parents = OPS.attention_forward(*tensors, **case.reference_options())
    dout, dlse = upstream((out, gmax))
    if uses != "both":
        (dout if uses == "lse" else dlse).zero_()
    wanted = reference_gradients(*tensors, dout, parents, case.reference_options(), dlse)
    for label, gradient, expected in zip(("dq", "dk", "dv"), got, wanted, strict=True):
        if expected.any():
            assert_small_error(gradient, expected, label)
        else:
            assert not gradient.any()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2.0**-60, 2.0**20, 2.0**60])
@pytest.mark.parametrize("stride", [1, 4, 16])
def test_gradients_of_the_lse_of_any_size(stride, size):
    """dS is brought to fp16 by powers of two that follow from D, which holds the gradient of the lse."""
    case = replace(MODEL, selection_stride=stride)
    leaves = leaves_of(case.make_qkv("cuda"))
    _, lse = OPS._attention_lse(*leaves, True, *case.packed())
    dlse = upstream((lse,))[0] * size
    got = torch.autograd.grad(lse, leaves[:2], dlse)
    *_, parents = OPS.attention_forward(*(x.detach() for x in leaves), **case.reference_options())
    nothing = torch.zeros_like(leaves[0])
    wanted = reference_gradients(*leaves, nothing, parents, case.reference_options(), dlse)
    for label, gradient, expected in zip(("dq", "dk"), got, wanted, strict=False):
        assert_small_error(gradient, expected, label)
