"""M above k*r: each row walks the tree of its own prefix (docs/semantics/tree_attention.md §1.3).

Nodes that an index chooses: test_tree_index.py, test_tree_index_varlen.py. Packed documents:
test_tree_attention_varlen.py. Queries anywhere in the sequence: test_tree_attention_rows.py. What the rule means, in
scalar loops: test_tree_attention_reference.py.
"""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tree_attention_fast import (
    TENSOR_CORE_DELTA,
    assert_fast_call,
    assert_fast_output,
    assert_small_error,
    model,
)
from tree_attention_helpers import forward
from tree_attention_strategies import CAUSAL, EVERY_IMPORTANCE, dtypes_of, problems, seeds

import htree_ops
import htree_ops.reference.tree_attention as ref
from htree_ops.correctness import fault_of_lists
from tests.support.cases import case_id, normal
from tests.support.devices import poisoned_memory
from tests.support.tree_attention_calls import calls
from tests.support.tree_attention_cases import FREE_SHAPES, SHAPES
from tests.support.tree_attention_checks import (
    assert_epsilon_optimal,
    assert_gradients,
    assert_lists,
    assert_output,
    forced,
    reference_gradients,
)

ops = torch.ops.htree
#: M far above k*r, once and three times.
MOST_TOP = 4


def case_named(name):
    return next(shape for shape in FREE_SHAPES if shape.name == f"{name}_free")


def own_tops(case):
    """The top layer of each leader's prefix, by counting."""
    found = []
    for leader in range(case.t0, case.T, case.selection_stride):
        top, nodes = 0, leader + 1
        while nodes > case.M:
            top, nodes = top + 1, -(-nodes // case.r)
        found.append(top)
    return torch.tensor(found, dtype=torch.long)


def assert_equals_the_reference(case, device, seed=0, gradients=True):
    """Lists by ε-optimality, everything else under the lists of the op; stored or not, the same bits."""
    q, k, v, options = case.make_call(device, seed)
    out, gmax, gsum, parents = forward(q, k, v, case)
    with poisoned_memory():
        assert torch.equal(ops.attention(q, k, v, **options), out), "stored or not, the same bits"
    dout = normal(tuple(out.shape), case.dtype, device, 3)
    stored, again = (
        ops.attention_backward(dout, q, k, v, out, gmax, gsum, lists, **options) for lists in (parents, [])
    )
    assert all(torch.equal(x, y) for x, y in zip(stored, again, strict=True)), "selected again, the same bits"
    q, k, v, out, dout, gmax, gsum = (x.cpu() for x in (q, k, v, out, dout, gmax, gsum))
    parents = [x.cpu() for x in parents]
    assert_lists(parents, case.T_q, case.T, options)
    assert_epsilon_optimal(q, k, v, parents, options)
    wanted = forced(q, k, v, parents, options)
    assert_output(out, wanted.out, v)
    bound = 1e-10 if case.dtype == torch.float64 else 1e-4
    torch.testing.assert_close(gmax.double() + gsum.double().log(), wanted.lse, rtol=bound, atol=bound)
    if gradients:
        wanted = reference_gradients(q, k, v, dout, parents, options)
        assert_gradients([x.cpu() for x in stored], wanted, dout, q, k, v)


# ---- values, lists, gradients


@given(data=st.data(), seed=seeds)
def test_any_call_equals_the_reference(data, seed, device):
    """M below, at and far above k*r."""
    case = data.draw(problems(dtypes_of(device), importances=EVERY_IMPORTANCE, most_top=MOST_TOP))
    assert_equals_the_reference(case, device, seed, gradients=case.dtype.itemsize > 2)


@pytest.mark.parametrize("case", [shape for shape in FREE_SHAPES if shape.T_q], ids=case_id)
def test_lists_of_a_top_are_minus_one_and_nobody_reads_them(case, device):
    q, k, v = case.make_qkv(device)
    out, gmax, gsum, parents = forward(q, k, v, case)
    tops = own_tops(case).to(device)
    for layer, lists in enumerate(parents):
        assert bool((lists[:, tops <= layer] == -1).all())
        assert bool((lists[:, tops > layer, :, 0] >= 0).all())
    dout = normal(tuple(out.shape), case.dtype, device, 3)
    broken = [torch.where((tops <= i).view(1, -1, 1, 1), 3, x) for i, x in enumerate(parents)]
    found, wanted = (
        ops.attention_backward(dout, q, k, v, out, gmax, gsum, lists, **case.reference_options())
        for lists in (broken, parents)
    )
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


def test_the_judge_of_lists_sees_what_is_wrong():
    """The tests above rest on it."""
    case = dataclasses.replace(case_named("three_layers"), dtype=torch.float32)
    options = case.reference_options()
    lists = ref.htree_forward_naive(*case.make_qkv("cpu"), **options).parents
    assert fault_of_lists(lists, case.T_q, case.T, options) is None
    for layer, row, place, entry in (
        (0, 7, 0, 0),  # a dense row
        (1, 60, 0, 0),  # the top of a tree of two layers
        (2, 300, 0, 0),  # the top of all
        (0, 60, 1, 14),  # a node that does not contain the query at the end
        (0, 300, 0, -1),
        (1, 300, 0, 18),  # twice the same node
    ):
        changed = [x.clone() for x in lists]
        changed[layer][0, row, 0, place] = entry
        assert fault_of_lists(changed, case.T_q, case.T, options) is not None, (layer, row)


@pytest.mark.parametrize("case", [shape for shape in SHAPES if shape.T_q], ids=case_id)
def test_up_to_kr_the_top_is_listed_as_ever(case, device):
    """M <= k*r: the top list holds the virtual parents, for every row up to its own."""
    lists = forward(*case.make_qkv(device), case)[3]
    rows = (case.B, case.T_q, case.H_kv, case.top_k)
    wanted = ref.top_parents(*rows, len(lists), case.r, case.t0, case.selection_stride, device=device)
    assert torch.equal(lists[-1], wanted)


@given(data=st.data(), seed=seeds)
def test_at_kr_and_one_above_it_dense_rows_agree(data, seed, device):
    """Where the rule changes its form the function does not: rows that open everything are dense in both."""
    case = data.draw(problems((torch.float32,), importances=CAUSAL))
    case = dataclasses.replace(case, M=case.top_k * case.r)
    q, k, v = case.make_qkv(device, seed)
    below = ops.attention(q, k, v, **case.reference_options())
    above = ops.attention(q, k, v, **dataclasses.replace(case, M=case.M + 1).reference_options())
    rows = max(0, min(case.M, case.T) - case.t0)
    torch.testing.assert_close(below[:, :rows], above[:, :rows], rtol=1e-4, atol=1e-5)


# ---- a row and its prefix


def assert_rows_agree(ours, theirs, case, device):
    """Results of rows that two calls share: on the CPU the same bits, on a GPU to rounding (§1.14).

    There a row may choose other nodes where importances nearly tie.
    """
    *states, parents = ours
    *others, lists = theirs
    depth = min(len(parents), len(lists))
    for rest in (*parents[depth:], *lists[depth:]):
        assert bool((rest == -1).all())
    same = torch.ones(case.B, states[0].shape[1], case.H_kv, dtype=torch.bool, device=device)
    for x, y in zip(parents[:depth], lists[:depth], strict=True):
        equal = (x == y).all(-1)
        same &= equal.repeat_interleave(case.selection_stride, 1)[:, : same.shape[1]]
    if device == "cpu":
        assert bool(same.all())
        assert all(torch.equal(x, y) for x, y in zip(states, others, strict=True))
        return
    assert same.double().mean() > 0.98
    heads = same.repeat_interleave(case.H // case.H_kv, 2)
    torch.testing.assert_close(states[0][heads], others[0][heads], rtol=2e-2, atol=2e-2)


@given(data=st.data(), seed=seeds, part=st.floats(0, 1))
def test_a_row_keeps_its_bits_when_the_sequence_grows(data, seed, part, device):
    case = data.draw(problems(dtypes_of(device), importances=CAUSAL, most_top=MOST_TOP, max_length=150))
    case = dataclasses.replace(case, layout="contiguous", num_queries=None)
    if case.top_k * case.r >= case.M and device == "cuda":
        return  # test_tree_attention_fast_properties.py
    q, k, v = case.make_qkv(device, seed)
    whole = forward(q, k, v, case)
    n = 1 + int(part * (case.T - 1))
    rows = -(-n // case.selection_stride)
    short = forward(q[:, :n], k[:, :n], v[:, :n], case)
    if case.top_k * case.r >= case.M:  # a layer more opens everything, and is listed
        assert all(torch.equal(x, y[:, :n]) for x, y in zip(short[:3], whole[:3], strict=True))
        return
    cut = (*(x[:, :n] for x in whole[:3]), [x[:, :rows] for x in whole[3]])
    assert_rows_agree(short, cut, case, device)


@given(data=st.data(), seed=seeds, part=st.floats(0, 1))
def test_a_row_has_the_same_bits_among_fewer_queries(data, seed, part, device):
    case = data.draw(problems(dtypes_of(device), importances=CAUSAL, most_top=MOST_TOP, max_length=150))
    case = dataclasses.replace(case, layout="contiguous", num_queries=None)
    q, k, v = case.make_qkv(device, seed)
    out = forward(q, k, v, case)[0]
    first = int(part * (case.T - 1)) // case.selection_stride * case.selection_stride
    assert torch.equal(ops.attention(q[:, first:], k, v, **case.reference_options()), out[:, first:])


@given(data=st.data(), seed=seeds, poison=st.sampled_from((float("nan"), float("inf"), -3e4, 0.0)))
def test_later_tokens_change_no_bit(data, seed, poison, device):
    case = data.draw(problems(dtypes_of(device), importances=CAUSAL, most_top=MOST_TOP))
    q, k, v = case.make_qkv(device, seed)
    before = forward(q, k, v, case)
    row = data.draw(st.integers(0, case.T_q - 1))
    q, k, v = (x.clone() for x in (q, k, v))
    q[:, row + 1 :] = poison
    k[:, case.t0 + row + 1 :] = poison
    v[:, case.t0 + row + 1 :] = poison
    after = forward(q, k, v, case)
    for ours, theirs in zip(before[:3], after[:3], strict=True):
        assert torch.equal(ours[:, : row + 1], theirs[:, : row + 1])


@given(data=st.data(), seed=seeds)
def test_followers_of_a_dense_leader_are_dense(data, seed, device):
    """Whatever scores: M need not be a multiple of the stride."""
    case = data.draw(problems((torch.float32,), importances=EVERY_IMPORTANCE, most_top=MOST_TOP))
    if case.top_k * case.r >= case.M:
        case = dataclasses.replace(case, M=case.top_k * case.r + 1 + seed % 7)
    q, k, v = case.make_qkv(device, seed)
    out = forward(q, k, v, case)[0].cpu()
    q, k, v = (x.cpu() for x in (q, k, v))
    dense = ref.dense_causal_attention(
        q, k, v, case.scale, case.rope_base, case.inv_freq, compute_dtype=torch.float64
    )
    end = -(-case.M // case.selection_stride) * case.selection_stride
    rows = max(0, min(end, case.T) - case.t0)
    assert_output(out[:, :rows], dense[:, :rows], v)


@pytest.mark.parametrize("stride", [2, 4, 16])
def test_followers_of_a_dense_leader_are_dense_beside_an_index(stride, device):
    M = 41
    q, k, v, iq, ik = (
        normal((1, 200, heads, 16), torch.float32, device, i) for i, heads in enumerate((4, 2, 2, 2, 2))
    )
    out = htree_ops.tree_attention(q, k, v, index=(iq, ik), top_k=2, max_top_nodes=M, selection_stride=stride)
    rows = -(-M // stride) * stride
    dense = ref.dense_causal_attention(q.cpu(), k.cpu(), v.cpu(), compute_dtype=torch.float64)
    assert_output(out[:, :rows].cpu(), dense[:, :rows], v.cpu())


# ---- torch's machinery

#: Ops over whole sequences.
WHOLE = ("attention", "_attention", "tree_attention")


def whole_calls(name, device):
    return [call for call in calls(case_named(name), device) if call.op.startswith(WHOLE)]


@pytest.mark.parametrize("name", ["three_layers", "stride4_suffix", "misaligned", "next_stride4_span2"])
def test_opcheck(name, device):
    found = whole_calls(name, device)
    assert len(found) >= 10
    for call in found:
        call.opcheck()


@pytest.mark.parametrize("name", ["one_layer_full", "two_layers_first", "three_layers", "chunk", "stride4"])
def test_meta_agrees_with_the_kernels(name, device):
    for call in whole_calls(name, device):
        call.assert_meta_agrees()


# ---- the kernels of the tensor cores

FAST = [
    model(f"d{width}_g{group}_s{stride}_c{span}_k{top_k}_m{nodes}_t{length}", torch.bfloat16, K=width, V=width,
          H=group * heads, H_kv=heads, T=length, num_queries=queries, top_k=top_k, M=nodes,
          selection_stride=stride, selection_span=span, open_next=stride == 16,
          rope_base=None if stride == 2 else 10000.0)
    for width, group, heads, stride, span, length, queries, top_k, nodes in [
        # whole sequences of one and of two layers
        (64, 4, 2, 1, None, 500, None, 8, 512),
        (64, 1, 2, 1, None, 1500, None, 8, 512),
        (64, 3, 2, 1, 2, 1500, None, 8, 512),
        (128, 4, 1, 1, None, 2100, None, 16, 1000),
        (128, 8, 1, 4, 2, 2100, None, 16, 1000),
        (64, 8, 2, 2, None, 1500, None, 8, 250),
        (64, 16, 1, 16, 2, 2500, None, 8, 1000),
        # suffixes around the token at which a layer is added, and far behind it
        (64, 4, 2, 1, None, 8272, 160, 8, 512),
        (128, 8, 1, 4, None, 8272, 160, 8, 512),
        (64, 8, 1, 2, None, 16_080, 160, 16, 1000),
        (128, 3, 2, 1, 4, 20_000, 64, 8, 512),
        (64, 4, 1, 4, 2, 20_000, 64, 16, 1000),
        (128, 8, 1, 1, None, 20_000, 64, 16, 2048),
        (64, 8, 1, 16, 2, 20_000, 64, 8, 2048),
    ]
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("case", FAST, ids=case_id)
def test_shapes_of_the_tensor_cores(case):
    qkv, (*_, parents), dout, gradients = assert_fast_call(case)
    wanted = reference_gradients(*qkv, dout, parents, case.reference_options())
    for name, ours, theirs in zip(("dq", "dk", "dv"), gradients, wanted, strict=True):
        assert_small_error(ours, theirs, name)


@pytest.mark.gpu
@pytest.mark.parametrize("stride", [1, 2, 4, 16])
@pytest.mark.parametrize("top_k", [8, 16])
def test_long_sequences_of_the_tensor_cores(stride, top_k):
    """20 000 queries, three layers: any of them equal those of a call with few queries, and of a shorter sequence."""
    case = model("long", T=20_000, H=8, H_kv=1, K=128, V=128, top_k=top_k, M=1000, selection_stride=stride)
    q, k, v, options = case.make_call("cuda")
    out, gmax, gsum, parents = forward(q, k, v, case)
    assert_lists(parents, case.T_q, case.T, options)
    for begin in (0, 960, 8000, 15_968, 19_904):
        rows = slice(begin, begin + 96)
        part = q[:, rows], k[:, : rows.stop], v[:, : rows.stop]
        of_rows = [x[:, begin // stride : rows.stop // stride] for x in parents]
        depth = len(ref.layer_sizes(rows.stop, 16, case.M))
        wanted = forced(*part, of_rows[:depth], options)
        assert_fast_output(out[:, rows], wanted.out, v)
        short = ops.attention_forward(*part, **options)
        cut = (*(x[:, rows] for x in (out, gmax, gsum)), of_rows)
        assert_rows_agree(short, cut, case, "cuda")


@pytest.mark.gpu
@given(
    seed=seeds,
    length=st.integers(1, 1200),
    nodes=st.integers(33, 300),
    top_k=st.integers(1, 6),
    group=st.sampled_from((1, 2, 3, 4, 8, 16)),
    width=st.sampled_from((32, 64, 128)),
    stride=st.sampled_from((1, 2, 4, 8, 16)),
    span=st.sampled_from((None, 1, 2, 4, 16)),
    rope_base=st.sampled_from((None, 10000.0)),
    dtype=st.sampled_from((torch.bfloat16, torch.float16)),
)
def test_any_shape_of_the_tensor_cores(
    seed, length, nodes, top_k, group, width, stride, span, rope_base, dtype
):
    case = model(
        "drawn", dtype, T=length, H=group, H_kv=1, K=width, V=width, top_k=top_k, M=nodes,
        selection_stride=stride, selection_span=span, rope_base=rope_base,
    )  # fmt: skip
    q, k, v, options = case.make_call("cuda", seed)
    *states, parents = forward(q, k, v, case)
    *again, lists = forward(q, k, v, case)
    assert all(torch.equal(x, y) for x, y in zip((*states, *parents), (*again, *lists), strict=True))
    assert_lists(parents, case.T_q, case.T, options)
    assert_epsilon_optimal(q, k, v, parents, options, TENSOR_CORE_DELTA[dtype])
    assert_fast_output(states[0], forced(q, k, v, parents, options).out, v)
