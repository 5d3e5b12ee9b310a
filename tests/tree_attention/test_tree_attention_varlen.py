"""Tree attention over packed documents: values, gradients, isolation and refusals (docs/semantics §1.16).

``grouping`` forces a way to put documents together. "auto" is what users get; on the CPU it runs document by document,
and "length" and "rank", which pad, are those of CUDA.
"""

import re
from dataclasses import replace
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor
from tree_attention_helpers import refused
from tree_attention_strategies import (
    CAUSAL,
    EVERY_IMPORTANCE,
    dtypes_of,
    frequencies_of,
    seeds,
    spans_of,
    switches,
)

import htree_ops
from htree_ops import tree_attention, tree_attention_varlen
from htree_ops.reference import tree_attention as reference
from tests.support.cases import case_id, normal
from tests.support.devices import poisoned_memory
from tests.support.documents import assert_others_keep_their_bits, offsets, one_by_one, with_gradients
from tests.support.graphs import capture, on_another_stream
from tests.support.opcheck import opcheck
from tests.support.tree_attention_problem import packed as packed_options
from tests.support.tree_attention_varlen_cases import CASES, VarlenCase, without_index

OPS = torch.ops.htree
GROUPINGS = ("auto", "document", "length", "rank")
by_case = pytest.mark.parametrize("case", CASES, ids=case_id)
by_grouping = pytest.mark.parametrize("grouping", GROUPINGS)


def groupings_of(case: VarlenCase) -> tuple[str, ...]:
    return GROUPINGS if case.importance != "lse" else GROUPINGS[:3]


def packed(case: VarlenCase, *inputs: Any, grouping: str = "auto") -> tuple[Tensor, Tensor]:
    return OPS._attention_varlen(*without_index(inputs), grouping, *case.packed())


def alone(case: VarlenCase, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """A call per document."""

    def call(rows: slice, keys: slice) -> Any:
        document = q[None, rows], k[None, keys], v[None, keys]
        return tree_attention(*document, **case.options(), store_parents=False, return_lse=True)

    return one_by_one(case, q, call)


def assert_equal_documents(case: VarlenCase, device: str, grouping: str, seed: int = 0) -> None:
    """Equal to a call per document: bit for bit on the CPU, where every row is computed for itself."""
    inputs = case.make_inputs(device, seed)
    wanted = with_gradients(partial(alone, case), inputs)
    with poisoned_memory():
        found = with_gradients(partial(packed, case, grouping=grouping), inputs)
    for name, ours, theirs in zip(("out", "lse", "dq", "dk", "dv"), found, wanted, strict=True):
        if device == "cpu" and (grouping in ("auto", "document") or name in ("out", "lse")):
            assert torch.equal(ours, theirs), name
        else:  # a padded batch may add the gradients of its chunks in another order
            tolerance = {torch.float64: 1e-12, torch.float32: 2e-5}.get(case.dtype, 2e-2)
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


# ---- values and gradients


@by_grouping
@by_case
def test_equal_to_a_call_per_document(case, grouping, device):
    if refused(case, device, lambda: packed(case, *case.make_inputs(device), grouping=grouping)):
        return
    if grouping in groupings_of(case):
        assert_equal_documents(case, device, grouping)
    else:
        with pytest.raises(ValueError, match="importance must not be 'lse' where grouping is 'rank'"):
            packed(case, *case.make_inputs(device), grouping=grouping)


@by_case
def test_equal_to_the_reference(case, device):
    case = replace(case, dtype=torch.float64 if device == "cpu" else torch.float32)
    inputs = case.make_inputs(device)
    options = {("top_k_per_layer" if name == "top_k" else name): x for name, x in case.options().items()}
    wide = [x.double().cpu() for x in inputs[:3]]
    wanted = reference.attention_varlen(*wide, *(x.cpu() for x in inputs[3:5]), **options)
    found = packed(case, *inputs)
    tolerance = 1e-9 if device == "cpu" else 2e-5
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double().cpu(), theirs, rtol=tolerance, atol=tolerance)


@st.composite
def batches(draw: Any, device: str, importances: tuple[str, ...] = CAUSAL) -> VarlenCase:
    """Documents around the lengths that add a layer, some empty, some with a suffix of queries."""
    r = draw(st.sampled_from((2, 4, 5)))
    top_k = draw(st.integers(1, 4))
    stride = draw(st.sampled_from([s for s in (1, 2, 4) if r % s == 0]))
    lengths = draw(st.lists(st.one_of(st.integers(0, 6), st.integers(0, 60)), max_size=6))
    queries = None
    if draw(st.booleans()):
        before = [draw(st.integers(0, keys // stride)) * stride for keys in lengths]
        queries = tuple(keys - skipped for keys, skipped in zip(lengths, before, strict=True))
    kv_heads = draw(st.integers(1, 2))
    importance = draw(st.sampled_from(importances))
    width = draw(st.sampled_from((2, 6, 16)))
    return VarlenCase(
        name="drawn",
        dtype=draw(st.sampled_from(dtypes_of(device))),
        lengths=tuple(lengths),
        queries=queries,
        spare=draw(st.integers(0, 4)),
        H=kv_heads * draw(st.integers(1, 3)),
        H_kv=kv_heads,
        K=width,
        V=draw(st.integers(1, 5)),
        r=r,
        top_k=top_k,
        M=draw(st.integers(1, 3 * top_k * r)),
        selection_stride=stride,
        selection_span=None if importance == "lse" else draw(spans_of(r)),
        **draw(switches),
        importance=importance,
        inv_freq=draw(frequencies_of(width)),
    )


@given(data=st.data(), seed=seeds)
def test_any_batch_equals_a_call_per_document(data, seed, device):
    case = data.draw(batches(device, EVERY_IMPORTANCE))
    grouping = data.draw(st.sampled_from(groupings_of(case)))
    assert_equal_documents(case, device, grouping, seed)


@given(data=st.data(), seed=seeds)
def test_a_broken_document_reaches_no_other(data, seed, device):
    """NaN in one document: its rows may become NaN, and every other row and gradient keeps its bits."""
    case = data.draw(batches(device).filter(lambda case: any(case.queries_of)))
    grouping = data.draw(st.sampled_from(GROUPINGS))
    broken = data.draw(st.sampled_from([i for i, n in enumerate(case.queries_of) if n]))
    inputs = case.make_inputs(device, seed)
    which = data.draw(st.sampled_from((0, 1, 2)))
    poison = data.draw(st.sampled_from((torch.nan, torch.inf, -torch.inf)))
    call = partial(packed, case, grouping=grouping)
    assert_others_keep_their_bits(case, call, inputs, broken, which, poison)


@by_grouping
def test_thousands_of_short_documents(grouping, device):
    lengths = tuple(1 + (i * 7) % 5 for i in range(2000))
    case = VarlenCase(name="short", dtype=torch.float32, lengths=lengths, H=2, H_kv=1, K=4, V=3)
    inputs = case.make_inputs(device)
    out, lse = packed(case, *inputs, grouping=grouping)
    starts = inputs[3][:-1].long()
    torch.testing.assert_close(
        out[starts], inputs[2][starts].expand(-1, 2, -1)
    )  # a first token sees itself alone
    some = range(0, 2000, 97)
    for i in some:
        rows = slice(int(starts[i]), int(starts[i]) + lengths[i])
        own = tree_attention(*(x[None, rows] for x in inputs[:3]), **case.options())
        torch.testing.assert_close(out[rows], own[0], rtol=1e-5, atol=1e-6)
    assert lse.isfinite().all()


@by_case
def test_as_many_offsets_as_rows_give_the_same_bits(case, device):
    """As one gives them who does not know how many documents there are; "length" reads them, as "auto" does on CUDA."""
    if case.dtype == torch.float64 and device == "cuda":
        case = replace(case, dtype=torch.float32)
    q, k, v, cu_q, cu_k, *rest = case.make_inputs(device)
    grouping = "length" if case.importance != "lse" else "document"
    tail = [x.new_full((len(k),), int(x[-1])) for x in (cu_q, cu_k)]
    longer = (q, k, v, torch.cat((cu_q, tail[0])), torch.cat((cu_k, tail[1])), *rest)
    results = []
    for inputs in ((q, k, v, cu_q, cu_k, *rest), longer):
        leaves = [x.detach().clone().requires_grad_() for x in inputs[:3]]
        out, lse = packed(case, *leaves, *inputs[3:], grouping=grouping)
        gradients = torch.autograd.grad(out.float().square().sum(), leaves)
        results.append((out, lse, *gradients))
    for exact, bounded in zip(*results, strict=True):
        assert torch.equal(exact.nan_to_num(7.0), bounded.nan_to_num(7.0))


@by_grouping
def test_one_huge_document_among_tiny_ones(grouping, device):
    lengths = (3,) * 20 + (1500,) + (2,) * 20
    case = VarlenCase(name="huge", dtype=torch.float32, lengths=lengths, M=32, top_k=8)
    assert_equal_documents(case, device, grouping)


def test_results_of_stored_and_of_packed_views_agree(device):
    """Slices of one projection, heads in another order, and rows off the grid of 16 bytes give the same bits."""
    case = CASES[0]
    q, k, v, *rest = case.make_inputs(device)
    for grouping in GROUPINGS:
        wanted = packed(case, q, k, v, *rest, grouping=grouping)[0]
        joint = torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], 1)
        parts = joint.split([x[0].numel() for x in (q, k, v)], dim=1)
        views = [part.unflatten(1, x.shape[1:]) for part, x in zip(parts, (q, k, v), strict=True)]
        assert torch.equal(packed(case, *views, *rest, grouping=grouping)[0], wanted)
        heads = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
        assert torch.equal(packed(case, *heads, *rest, grouping=grouping)[0], wanted)
        last = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
        assert torch.equal(packed(case, *last, *rest, grouping=grouping)[0], wanted)


def test_gradcheck():
    case = replace(CASES[1], lengths=(3, 0, 9), spare=1, H=2, H_kv=1, K=2, V=2, top_k=3, M=12)
    q, k, v, *rest = case.make_inputs("cpu")
    leaves = tuple(x.requires_grad_() for x in (q, k, v))
    for grouping in GROUPINGS:
        assert torch.autograd.gradcheck(lambda *x, g=grouping: packed(case, *x, *rest, grouping=g)[0], leaves)


def test_frozen_inputs_cost_no_gradient(device):
    case = CASES[0]
    q, k, v, *rest = case.make_inputs(device)
    out, lse = packed(case, q, k.requires_grad_(), v, *rest)
    full = with_gradients(partial(packed, case), (q, k.detach(), v, *rest))
    upstream = [normal(tuple(x.shape), x.dtype, x.device, 99 + i) for i, x in enumerate((out, lse))]
    (dk,) = torch.autograd.grad((out, lse), k, upstream, create_graph=True)
    assert torch.equal(dk, full[3])
    state = OPS._attention_varlen_forward(q, k.detach(), v, None, None, *rest, "auto", *case.packed())
    found = OPS._attention_varlen_backward(
        q, k, v, None, None, *rest, *state, out, None, "auto", [True, False, True], *case.packed()
    )
    assert [x is not None for x in found] == [True, False, True]


def test_double_backward_is_refused(device):
    case = CASES[0]
    q, k, v, *rest = case.make_inputs(device)
    out, _ = packed(case, q.requires_grad_(), k, v, *rest)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        dq.sum().backward()


# ---- documents that break the rules

BROKEN: dict[str, tuple[dict[str, Any], int, str]] = {
    "more_queries": ({"q": [0, 20, 30]}, 0, "cu_seq_q must give no document more queries .* 20 and 15 in document 0"),
    "long_queries": ({"max_q": 19}, 1, "max_q must be at least .*got 19 and 20 rows in document 1"),
    "long_keys": ({"max_k": 24}, 1, "max_k must be at least .*got 24 and 25 rows in document 1"),
    "offset": ({"q": [0, 9, 29]}, 0, "cu_seq_q and cu_seq_k must differ by a multiple .* 9 queries and 15 keys"),
    "descends": ({"q": [0, 10, 8]}, 1, "cu_seq_q must not descend, got 8 behind 10 at document 1"),
    "too_far": ({"k": [0, 15, 99]}, 1, "cu_seq_k must end at or before the last row of key .*, got 99 at document 1"),
    "begins": ({"k": [1, 15, 40]}, 0, "cu_seq_k must begin with 0, got 1"),
    "negative": ({"q": [0, -5, 20]}, 0, "cu_seq_q must not descend, got -5 behind 0 at document 0"),
}  # fmt: skip


def broken_call(change: dict[str, Any], device: str, grouping: str) -> tuple[Any, ...]:
    values = {"q": [0, 10, 30], "k": [0, 15, 40], "max_q": 25, "max_k": 25, "stride": 1} | change
    q, k, v = (normal(size, torch.float32, device, 1) for size in ((32, 2, 4), (40, 1, 4), (40, 1, 3)))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    cu = [torch.tensor(values[name], dtype=torch.int32, device=device) for name in "qk"]
    stride = 4 if values["q"][1] == 9 else 1
    options = packed_options(4, 8, 2, selection_stride=stride)
    out, lse = OPS._attention_varlen(
        *leaves, None, None, *cu, values["max_q"], values["max_k"], grouping, *options
    )
    return out, lse, *torch.autograd.grad(out.sum(), leaves)


@pytest.mark.parametrize("name", BROKEN)
def test_a_document_that_breaks_the_rules_is_named_on_the_cpu(name):
    change, _, message = BROKEN[name]
    with pytest.raises(ValueError, match=f"attention_varlen_forward: {message}"):
        broken_call(change, "cpu", "auto")


@pytest.mark.parametrize("grouping", ["length", "rank"])
@pytest.mark.parametrize("name", BROKEN)
def test_a_document_that_breaks_the_rules_is_nan_elsewhere(name, grouping, device):
    change, document, _ = BROKEN[name]
    found = broken_call(change, device, grouping)
    if grouping == "length" and device == "cuda":
        for ours, theirs in zip(broken_call(change, device, "auto"), found, strict=True):
            assert torch.equal(ours.isnan(), theirs.isnan())
    assert found[0].isnan().any() or name in ("descends", "negative")  # those have no row of their own
    fine = broken_call({}, device, grouping)
    queries, keys = ((0, 10), (10, 30))[1 - document], ((0, 15), (15, 40))[1 - document]
    if "q" in change or "k" in change:  # the offsets of the other document changed as well
        return
    for i, (ours, theirs) in enumerate(zip(found, fine, strict=True)):
        first, last = queries if i < 3 else keys
        assert torch.equal(ours[first:last], theirs[first:last])
    for x in found[:3]:
        assert x[slice(*((0, 10), (10, 30))[document])].isnan().all()
    assert (found[0][30:] == 0).all()


@pytest.mark.parametrize("first", [5, 99])
def test_offsets_that_all_begin_too_late_break_the_first_document(first, device):
    """Also where the documents behind it are empty, as those that are cut off at the end."""
    q = normal((8, 2, 8), torch.float32, device, 0)
    k, v = (normal((8, 1, 8), torch.float32, device, seed) for seed in (1, 2))
    cu = torch.tensor([first] * 3, dtype=torch.int32, device=device)
    for grouping in ("length", "rank"):
        out, lse = OPS._attention_varlen(
            q, k, v, None, None, cu, cu, 8, 8, grouping, *packed_options(2, 4, 2)
        )
        rows = min(first, 8)
        assert out[:rows].isnan().all()
        assert lse[:rows].isnan().all()
        assert (out[rows:] == 0).all()


@given(
    offsets_q=st.lists(st.integers(-70, 70), min_size=1, max_size=5),
    data=st.data(),
    bounds=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    grouping=st.sampled_from(("auto", "length", "rank")),
    stride=st.sampled_from((1, 2)),
)
def test_any_offsets_stay_in_bounds(offsets_q, data, bounds, grouping, stride, device):
    """Numbers without sense are refused or give NaN, and touch no other memory; the result repeats."""
    offsets_k = data.draw(st.lists(st.integers(-70, 70), min_size=len(offsets_q), max_size=len(offsets_q)))
    q, k, v = (normal(size, torch.float32, device, 1) for size in ((30, 2, 4), (33, 1, 4), (33, 1, 3)))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    cu = [torch.tensor(x, dtype=torch.int32, device=device) for x in (offsets_q, offsets_k)]
    options = packed_options(4, 8, 2, selection_stride=stride)

    def run():
        with poisoned_memory():
            out, lse = OPS._attention_varlen(*leaves, None, None, *cu, *bounds, grouping, *options)
            return out, lse, *torch.autograd.grad(out, leaves, torch.ones_like(out))

    def complaint():
        """What the CPU says about offsets that it does not run."""
        if grouping == "auto" and device == "cpu":
            try:
                run()
            except ValueError as error:
                return str(error)
        return ""

    if message := complaint():
        assert re.match("attention_varlen_forward: (cu_seq_[qk]|max_[qk]) ", message)
        return
    first = run()
    for ours, theirs in zip(first, run(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    kept = ~first[0].isnan().any(-1)
    assert torch.equal(kept, ~first[1].isnan())


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"query": torch.zeros(1, 9, 4, 8)}, htree_ops.ShapeMismatchError, "query must be 3-D"),
        ({"key": torch.zeros(9, 3, 8)}, htree_ops.ShapeMismatchError, "H of query must be a positive multiple"),
        ({"key": torch.zeros(9, 2, 6)}, htree_ops.ShapeMismatchError, "size 2 of key must be 8"),
        ({"value": torch.zeros(8, 2, 6)}, htree_ops.ShapeMismatchError, "size 0 of value must be 9"),
        ({"value": torch.zeros(9, 2, 6).half()}, htree_ops.UnsupportedDtypeError, "value must have the dtype of query"),
        ({"cu_seq_q": torch.zeros(2).long()}, htree_ops.UnsupportedDtypeError, "cu_seq_q must have dtype torch.int32"),
        ({"cu_seq_k": offsets((4, 5), "cpu")}, htree_ops.ShapeMismatchError, "size 0 of cu_seq_k must be 2"),
        ({"cu_seq_q": torch.zeros(0, dtype=torch.int32)}, htree_ops.ShapeMismatchError, "at least one element"),
        ({"max_q": -1}, ValueError, "max_q must be at least 0, got -1"),
        ({"max_k": 3}, ValueError, "max_k must be at least the length of every document, got 3 and 9 rows"),
        ({"max_q": 9.0}, TypeError, "max_q must be an int, got float"),
        ({"top_k": 0}, ValueError, "top_k must be between 1"),
        ({"return_lse": 1}, TypeError, "return_lse must be a bool"),
        ({"importance": "most"}, ValueError, "importance must be one of"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_bad_input_is_named(change, kind, message):
    call = {
        "query": torch.zeros(9, 4, 8),
        "key": torch.zeros(9, 2, 8),
        "value": torch.zeros(9, 2, 6),
        "cu_seq_q": offsets((9,), "cpu"),
        "cu_seq_k": offsets((9,), "cpu"),
        "max_q": 9,
        "max_k": 9,
    }
    with pytest.raises(kind, match=f"tree_attention_varlen: .*{message}"):
        tree_attention_varlen(**(call | change))


def test_return_lse_and_defaults():
    q, k, v = (normal((9, heads, 8), torch.float32, "cpu", heads) for heads in (4, 2, 2))
    cu = offsets((4, 5), "cpu")
    out, lse = tree_attention_varlen(q, k, v, cu, cu, 5, 5, return_lse=True)
    assert torch.equal(tree_attention_varlen(q, k, v, cu, cu, 5, 5), out)
    wanted, its_lse = tree_attention(q[None, 4:], k[None, 4:], v[None, 4:], return_lse=True)
    assert torch.equal(out[4:], wanted[0])
    assert torch.equal(lse[4:], its_lse[0])


# ---- torch's machinery

CHECKED = ("ragged", "span", "stride", "empty_documents", "half", "inv_freq")


@pytest.mark.parametrize("case", [x for x in CASES if x.name in CHECKED], ids=case_id)
def test_opcheck(case, device):
    q, k, v, *rest = without_index(case.make_inputs(device))
    options = ("auto", *case.packed())
    opcheck(OPS._attention_varlen_forward.default, (q, k, v, *rest, *options))
    leaves = (x.clone().requires_grad_() for x in (q, k))
    opcheck(OPS._attention_varlen.default, (*leaves, v, *rest, *options))
    state = OPS._attention_varlen_forward(q, k, v, *rest, *options)
    gradients = (torch.ones_like(state[0]), torch.ones_like(state[2]))
    backward = (q, k, v, *rest, *state, *gradients, "auto", [True] * 3, *case.packed())
    opcheck(OPS._attention_varlen_backward.default, backward)


@pytest.mark.parametrize("grad", [False, True])
def test_lengths_alone_do_not_recompile(grad, device):
    torch._dynamo.reset()
    case = CASES[0]
    names = ("compression_rate", "max_top_nodes", "top_k")
    options = {name: case.options()[name] for name in names}

    def model(q, k, v, cu, longest):
        out = tree_attention_varlen(q * 2, k, v, cu, cu, longest, longest, **options)
        return out.cos()

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for step, lengths in enumerate([(33, 70, 9), (1, 1, 110), (40, 0, 72), (20, 60, 5), (90, 7, 7)]):
        case = replace(CASES[0], lengths=lengths)
        q, k, v = case.make_qkv(device, step)
        cu = offsets(lengths, device)
        longest = 112 - step  # another bound each time
        with torch.compiler.set_stance("default" if step == 0 else "fail_on_recompile"):
            leaves = [x.detach().requires_grad_(grad) for x in (q, k, v)]
            found = compiled(*leaves, cu, longest)
            wanted = model(q, k, v, cu, longest)
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
            if grad:
                found.sum().backward()
                assert all(x.grad is not None for x in leaves)


def test_autocast(device):
    case = CASES[0]
    inputs = case.make_inputs(device)
    with torch.autocast(device, torch.bfloat16):
        out, lse = packed(case, *inputs)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    wanted = packed(case, *(x.bfloat16() for x in inputs[:3]), *inputs[3:])
    assert torch.equal(out, wanted[0])


def test_compiled_autograd(device):
    case = CASES[0]
    q, k, v, *rest = case.make_inputs(device)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def gradients(traced):
        from contextlib import nullcontext

        from torch._dynamo import compiled_autograd

        out, _ = packed(case, *leaves, *rest)
        with compiled_autograd._enable(torch.compile(backend="eager")) if traced else nullcontext():
            out.square().sum().backward()
        found = [x.grad for x in leaves]
        for x in leaves:
            x.grad = None
        return found

    for ours, theirs in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(ours, theirs)


# ---- CUDA alone


@pytest.mark.gpu
def test_a_graph_follows_lengths_on_the_device():
    case = VarlenCase(
        name="graph", dtype=torch.bfloat16, lengths=(300, 200, 12), spare=88, K=32, V=32, M=64, top_k=16
    )
    q, k, v, cu, *_ = case.make_inputs("cuda")
    longest = (512, 512)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    dout = normal((600, 4, 32), torch.bfloat16, "cuda", 5)

    def step():
        out, lse = OPS._attention_varlen(*leaves, None, None, cu, cu, *longest, "auto", *case.packed())
        return out, lse, *torch.autograd.grad(out, leaves, dout)

    on_another_stream(
        lambda: OPS._attention_varlen(*leaves, None, None, cu, cu, *longest, "rank", *case.packed())
    )
    graph, captured = capture(step)
    for lengths in ((300, 200, 12), (1, 500, 99), (0, 0, 512), (200, 200, 200)):
        now = replace(case, lengths=lengths, spare=600 - sum(lengths))
        cu.copy_(offsets(lengths, "cuda"))
        graph.replay()
        wanted = with_gradients(partial(packed, now, grouping="rank"), (*leaves, cu, cu, *longest))
        assert torch.equal(captured[0], wanted[0])
        own = alone(now, q.detach(), k.detach(), v.detach())
        torch.testing.assert_close(captured[0], own[0], rtol=2e-2, atol=2e-2)
    with (
        pytest.raises(RuntimeError, match="have to be read on the host"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        OPS._attention_varlen(q, k, v, None, None, cu, cu, *longest, "length", *case.packed())


@pytest.mark.gpu
@pytest.mark.parametrize("stride", [1, 16])
@pytest.mark.parametrize("grouping", GROUPINGS)
def test_tensor_cores_give_the_rows_of_a_call_per_document(grouping, stride):
    """Bit for bit where every document runs with its own depth, on the kernels of models."""
    lengths = (700, 2048, 300, 1900, 1, 2048, 16, 640)
    case = VarlenCase(
        name="models", dtype=torch.bfloat16, lengths=lengths, H=8, H_kv=2, K=128, V=128, r=16, top_k=32, M=512,
        selection_stride=stride,
    )  # fmt: skip
    inputs = case.make_inputs("cuda")
    wanted = with_gradients(partial(alone, case), inputs)
    found = with_gradients(partial(packed, case, grouping=grouping), inputs)
    for i, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        if i < 2 and grouping in ("document", "length"):
            assert torch.equal(ours, theirs)
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=4e-2, atol=4e-2)
    for ours, theirs in zip(
        found, with_gradients(partial(packed, case, grouping=grouping), inputs), strict=True
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("stride", [1, 16])
def test_long_documents_on_cuda_run_where_they_lie(stride):
    """Alone, and as equal neighbours, at rows that no power of two divides, beside short ones that are copied."""
    lengths = (5001, 4990, 37, 12, 4990, 4990, 700)
    case = VarlenCase(
        name="where_they_lie", dtype=torch.bfloat16, lengths=lengths, H=32, H_kv=4, K=128, V=128, r=16, top_k=64,
        M=1024, selection_stride=stride, spare=3,
    )  # fmt: skip
    inputs = case.make_inputs("cuda")
    wanted = with_gradients(partial(alone, case), inputs)
    with poisoned_memory():
        found = with_gradients(partial(packed, case, grouping="length"), inputs)
    for i, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        if i < 2:
            assert torch.equal(ours, theirs)
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=4e-2, atol=4e-2)


@pytest.mark.gpu
def test_scratch_is_that_of_one_sequence():
    lengths = (4096, 3900, 1000, 7000, 128, 256, 8192, 8192)
    case = VarlenCase(
        name="scratch", dtype=torch.bfloat16, lengths=lengths, H=8, H_kv=2, K=64, V=64, r=16, top_k=64, M=1024
    )
    inputs = case.make_inputs("cuda")
    peaks = []
    for call in (
        lambda: packed(case, *inputs),
        lambda: tree_attention(*(x[None] for x in inputs[:3]), **case.options()),
    ):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    sizes = sum(x.numel() * x.element_size() for x in (*inputs[:3], inputs[0]))
    assert peaks[0] <= peaks[1] + 2 * sizes
