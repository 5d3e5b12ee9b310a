"""Gradients of tree attention on the GPU where half precision could go wrong: ranges, futures, masks, memory."""

import dataclasses
import functools
import math

import pytest
import torch
from tree_attention_fast import assert_batch_like_alone, assert_small_error, assert_small_errors, gradients_of
from tree_attention_fast import model as fast_model

import htree_ops
from tests.support.tree_attention_checks import reference_gradients

pytestmark = pytest.mark.gpu

op = torch.ops.htree
STRIDES = [1, 4, 8, 16]


model = functools.partial(fast_model, "backward", T=900, H=16, K=128, V=128)


@pytest.mark.parametrize("size", [2.0**-40, 2.0**-12, 2.0**14, 2.0**40])
@pytest.mark.parametrize("stride", STRIDES)
def test_keys_and_queries_of_any_size(stride, size, nan_memory):
    """The scores do not change; powers of two bring dS, keys and queries into fp16's range."""
    case = model(selection_stride=stride)
    q, k, v = case.make_qkv("cuda")
    q, k = (q.double() / size).bfloat16(), (k.double() * size).bfloat16()
    assert_small_errors((q, k, v), case.reference_options())


@pytest.mark.parametrize(
    ("of_values", "of_gradients"),
    [(-110, 0), (-70, 0), (63, 0), (100, 0), (0, -90), (0, 64), (0, 100), (70, -70), (-80, 80), (-50, -50)],
)
@pytest.mark.parametrize("stride", STRIDES)
def test_values_and_gradients_of_any_size(stride, of_values, of_gradients, nan_memory):
    """Values and gradients are scaled by powers of two, some with squares beyond fp32's range."""
    case = model(selection_stride=stride)
    q, k, v = case.make_qkv("cuda")
    v *= 2.0**of_values
    assert_small_errors(
        (q, k, v), case.reference_options(), lambda out: torch.randn_like(out) * 2.0**of_gradients
    )


@pytest.mark.parametrize("stride", STRIDES)
def test_keys_of_mixed_size(stride, nan_memory):
    """Small keys stand beside large ones; the errors of each kind are compared with its own size."""
    case = model(T=1100, selection_stride=stride)
    q, k, v = case.make_qkv("cuda")
    k[:, 1::3] *= 2.0**-11
    k[:, 5::13] = 0.0
    q[:, 2::5] *= 2.0**-9
    kinds = [slice(None), slice(1, None, 3), slice(5, None, 13), slice(2, None, 5)]
    assert_small_errors((q, k, v), case.reference_options(), kinds=kinds)


# A case for each family of kernels, and whether each query gathers for itself.
FAMILIES = {
    "per_list": (model(selection_stride=16), False),
    "per_list_stride4": (model(selection_stride=4), False),
    "per_list_unrotated": (model(selection_stride=16, rope_base=None), False),
    "per_list_group16": (model(H=32, selection_stride=8), False),
    "shared_gather_parent_gradient": (model(), False),
    "shared_gather_stride2_group4": (model(H=8, selection_stride=2), False),
    "shared_gather_key_gradient": (model(H=4), False),
    "group3": (model(H=6, K=64, V=64, selection_stride=2), False),
    "per_query_group16": (model(H=32), False),
    "paired_queries": (model(H=8, rope_base=None, T=1501, top_k=4, M=32), False),
    "paired_queries_alone": (model(H=8, rope_base=None, T=1501, top_k=4, M=32), True),
    "paired_queries_alone_stride2_d64": (
        model(H=8, rope_base=None, T=1503, top_k=4, M=32, K=64, V=64, selection_stride=2),
        True,
    ),
    "paired_queries_alone_stride8_d32": (
        model(H=8, rope_base=None, T=1507, top_k=4, M=32, K=32, V=32, selection_stride=8),
        True,
    ),
    "paired_queries_stride2": (model(H=8, rope_base=None, T=1502, top_k=4, M=32, selection_stride=2), False),
    "paired_queries_stride8": (model(H=8, rope_base=None, T=1507, top_k=4, M=32, selection_stride=8), False),
    "per_query": (model(H=8, K=32, V=32, selection_stride=4), True),
    "dense_rows": (model(M=1024, top_k=64), False),
    "dense_rows_group3": (model(H=6, M=1024, top_k=64, selection_stride=4), False),
    "masked_rows": (model(rope_base=None), False),
    "masked_rows_group3_stride2": (model(H=6, rope_base=None, selection_stride=2), False),
    "three_layers": (model(T=3000, top_k=4, M=32, selection_stride=4), False),
    "three_layers_stride1": (model(T=3000, top_k=4, M=32), False),
}
FAR_ABOVE = 2.0**20


@pytest.mark.parametrize("t", [112, 640, 645, 899])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_value_that_no_gradient_reads(family, t, nan_memory, monkeypatch):
    """A value far above the others, from which on nothing flows back, as padding has it, costs no digits elsewhere."""
    case, alone = FAMILIES[family]
    monkeypatch.setenv("HTREE_TREE_GATHER", "per_query" if alone else "auto")
    q, k, v, options = case.make_call("cuda")
    dout = torch.randn_like(q)
    dout[:, t:] = 0.0
    expected = gradients_of(dout, q, k, v, options)
    v[:, t] *= FAR_ABOVE
    gradients = gradients_of(dout, q, k, v, options)
    # Sixteen queries may share a task, sixteen keys a parent; both share powers of two with the value.
    run = t // 16 * 16
    others = torch.ones(case.T, dtype=torch.bool, device="cuda")
    others[run : run + 16] = False
    assert torch.equal(gradients[0][:, :run], expected[0][:, :run])
    for name, gradient, wanted in zip(("dq", "dk", "dv"), gradients, expected, strict=True):
        assert gradient.isfinite().all(), name
        assert_small_error(gradient[:, others], wanted[:, others].double(), name, 5e-3)


@pytest.mark.parametrize("zeros", [1, 8, 40, 300])
@pytest.mark.parametrize("family", FAMILIES)
def test_keys_of_zeros_alone(family, zeros, nan_memory, monkeypatch):
    """As a sequence begins that was padded with zeros: the first rows see no other keys."""
    case, alone = FAMILIES[family]
    monkeypatch.setenv("HTREE_TREE_GATHER", "per_query" if alone else "auto")
    q, k, v = case.make_qkv("cuda")
    k[:, :zeros] = 0.0
    assert_small_errors((q, k, v), case.reference_options())


@pytest.mark.parametrize("t", [112, 645, 899])
@pytest.mark.parametrize("of", ["k", "v"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_future_changes_no_bit_of_dq(family, of, t, monkeypatch):
    """However large a later row is, and whatever flows back from the queries that see it."""
    case, alone = FAMILIES[family]
    monkeypatch.setenv("HTREE_TREE_GATHER", "per_query" if alone else "auto")
    inputs = dict(zip("qkv", case.make_qkv("cuda"), strict=True))
    options = case.reference_options()
    dout = torch.randn_like(inputs["q"])
    expected = gradients_of(dout, **inputs, options=options)[0]
    for factor in (FAR_ABOVE, 2.0**-20, 2.0**100):
        changed = {**inputs, of: inputs[of].clone()}
        changed[of][:, t] *= factor
        dq = gradients_of(dout, **changed, options=options)[0]
        run = t // 16 * 16
        assert torch.equal(dq[:, :run], expected[:, :run]), factor


@pytest.mark.parametrize("family", FAMILIES)
def test_values_far_above_the_others(family, nan_memory, monkeypatch):
    """Where gradients read such a value they follow the reference, and those of another batch do not change."""
    case, alone = FAMILIES[family]
    case = dataclasses.replace(case, B=2)
    monkeypatch.setenv("HTREE_TREE_GATHER", "per_query" if alone else "auto")
    q, k, v, options = case.make_call("cuda")
    dout = torch.randn_like(q)
    expected = gradients_of(dout, q, k, v, options)
    v[1, 333] *= FAR_ABOVE
    out, gmax, gsum, parents = op.attention_forward(q, k, v, **options)
    gradients = op.attention_backward(dout, q, k, v, out, gmax, gsum, parents, **options)
    wanted = reference_gradients(q, k, v, dout, parents, options)
    for name, gradient, reference, before in zip(
        ("dq", "dk", "dv"), gradients, wanted, expected, strict=True
    ):
        assert torch.equal(gradient[0], before[0]), name
        assert_small_error(gradient, reference, name)


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("t", [15, 100, 643])
def test_a_future_that_is_not_finite(stride, t):
    """dq of a query is finite whatever later tokens hold, also those under its diagonal parent."""
    case = model(selection_stride=stride)
    q, k, v, options = case.make_call("cuda")
    dout = torch.randn_like(q)
    dout[:, t + 1 :] = 0.0
    saved = op.attention_forward(q, k, v, **options)
    expected = op.attention_backward(dout, q, k, v, *saved, **options, output_mask=[True, False, False])[0]
    for x in (k, v):
        x[:, t + 1 :] = math.nan
    dq = gradients_of(dout, q, k, v, options)[0]
    assert_small_error(dq[:, : t + 1], expected[:, : t + 1].double(), "dq", 5e-3)


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("scale", [-0.2, 0.0])
def test_scales_that_are_not_positive(stride, scale, nan_memory):
    case = model(selection_stride=stride)
    q, k, v = case.make_qkv("cuda")
    options = {**case.reference_options(), "scale": scale}
    out, gmax, gsum, parents = op.attention_forward(q, k, v, **options)
    dout = torch.randn_like(out)
    dq, dk, dv = op.attention_backward(dout, q, k, v, out, gmax, gsum, parents, **options)
    wanted = reference_gradients(q, k, v, dout, parents, options)
    if scale == 0.0:
        assert not dq.any()
        assert not dk.any()
    else:
        assert_small_error(dq, wanted[0], "dq")
        assert_small_error(dk, wanted[1], "dk")
    assert_small_error(dv, wanted[2], "dv")


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize(
    "mask", [[False, True, False], [False, False, True], [False, True, True], [True, False, True]]
)
def test_some_of_the_gradients(stride, mask, nan_memory):
    case = model(selection_stride=stride)
    q, k, v, options = case.make_call("cuda")
    out, gmax, gsum, parents = op.attention_forward(q, k, v, **options)
    dout = torch.randn_like(out)
    saved = (dout, q, k, v, out, gmax, gsum, parents)
    gradients = op.attention_backward(*saved, **options)
    some = op.attention_backward(*saved, **options, output_mask=mask)
    for wanted, full, gradient in zip(mask, gradients, some, strict=True):
        assert gradient is None or not wanted or torch.equal(gradient, full)
        assert not wanted or gradient is not None


@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("group", [3, 4, 8, 16])
@pytest.mark.parametrize("stride", [1, 2, 4, 8])
def test_queries_that_start_within_a_node(stride, group, width, nan_memory):
    """The first run of 16 queries at the top begins before the first query, with three layers and with one."""
    for nodes in (32, 1024):
        case = model(
            T=709,
            H=2 * group,
            K=width,
            V=width,
            M=nodes,
            top_k=8 if nodes == 32 else 64,
            selection_stride=stride,
        )
        q, k, v = case.make_qkv("cuda")
        q = q[:, 37 // stride * stride :].contiguous()
        assert_small_errors((q, k, v), case.reference_options())


@pytest.mark.parametrize("stride", [1, 2, 4, 16])
def test_the_kernels_of_every_gpu_agree_at_length(stride, monkeypatch):
    """Hopper's kernels with several chunks, windows and launches agree with those of every GPU, which have none."""
    case = model(T=40_000, H=8, H_kv=1, top_k=512, M=8192, selection_stride=stride)
    q, k, v, options = case.make_call("cuda")
    out, gmax, gsum, parents = op.attention_forward(q, k, v, **options)
    saved = (torch.randn_like(out), q, k, v, out, gmax, gsum, parents)
    gradients = op.attention_backward(*saved, **options)
    monkeypatch.setenv("HTREE_TREE_GATHER", "private")
    wanted = op.attention_backward(*saved, **options)
    for name, gradient, expected in zip(("dq", "dk", "dv"), gradients, wanted, strict=True):
        assert_small_error(gradient, expected.double(), name, 1e-2)


@pytest.mark.parametrize(
    ("length", "stride", "stored"),
    [
        *((32_768, stride, stored) for stride in (1, 16) for stored in (True, False)),
        (131_072, 1, False),  # the call that needs most
    ],
)
def test_scratch_is_bounded(length, stride, stored):
    """At most 2 GB beyond gradients, fp32 sums, the tree and one packed copy of K and V; a repeat has equal bits."""
    case = model(T=length, H=32, H_kv=4, top_k=512, M=8192, selection_stride=stride)
    q, k, v, options = case.make_call("cuda")
    out, gmax, gsum, parents = op.attention_forward(q, k, v, **options)
    dout = torch.randn_like(out)
    saved = (dout, q, k, v, out, gmax, gsum, parents if stored else [])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients = op.attention_backward(*saved, **options)
    torch.cuda.synchronize()
    # Elements of K and V in all layers: tokens and the pooled nodes above them, a 16th and less.
    pooled = 2 * k.numel() // 16 * 17 // 16
    elements = 2 * k.numel() + pooled
    sums, copy, tree = elements * 4, elements * 2, pooled * 2
    results = sum(gradient.numel() * 2 for gradient in gradients)
    used = torch.cuda.max_memory_allocated() - before - results - sums - copy - tree
    assert used < 2e9, f"{used / 1e6:.0f} MB"
    for first, second in zip(gradients, op.attention_backward(*saved, **options), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("width", [32, 48])
def test_more_batches_and_heads_than_a_grid_is_wide(width):
    """Each batch has the gradients it has alone, on the tensor cores and on the general kernels."""
    case = model(B=33_000, T=20, H=4, H_kv=2, K=width, V=width, top_k=1, M=16)
    assert_batch_like_alone(case, slice(0, 3), slice(32_766, 32_769), slice(32_997, None))


@pytest.mark.parametrize("top_k", [1025, 3000])
@pytest.mark.parametrize("width", [32, 64])
def test_lists_too_long_for_the_tensor_cores_kept_or_not(width, top_k):
    """Outputs and gradients have the same bits, whether or not T tokens can fill a list."""
    case = model(T=300, H=4, K=width, V=width, top_k=top_k, M=20)
    inputs = [x.requires_grad_() for x in case.make_qkv("cuda")]
    options = {"max_top_nodes": case.M, "top_k": case.top_k}
    results = []
    for stored in (True, False):
        out = htree_ops.tree_attention(*inputs, **options, store_parents=stored)
        results.append((out, *torch.autograd.grad(out, inputs, torch.ones_like(out))))
    with torch.no_grad():
        results.append((htree_ops.tree_attention(*inputs, **options),))
    for result in results[1:]:
        for name, got, wanted in zip(("out", "dq", "dk", "dv"), result, results[0], strict=False):
            assert torch.equal(got, wanted), name
