"""The rows before max_top_nodes, which Hopper computes as dense causal attention, beside the kernels that gather."""

import math

import pytest
import torch
from tree_attention_fast import (
    assert_batch_like_alone,
    assert_errors_of_sizes,
    assert_forward,
    assert_small_error,
    gradients_of,
    model,
)

import htree_ops  # noqa: F401
from tests.support.cases import case_id
from tests.support.graphs import assert_stream_and_graph
from tests.support.tree_attention_cases import frequencies
from tests.support.tree_attention_checks import reference_gradients

pytestmark = pytest.mark.gpu

op = torch.ops.htree

SHAPES = [
    # every number of heads per K/V head, so every arrangement of rows in a block, across several tiles
    *(model(f"group{g}", T=700, H=2 * g, K=128, V=128, M=640, top_k=40) for g in range(1, 17)),
    *(model(f"d{d}", T=1100, K=d, V=d, M=1024, top_k=64, selection_stride=4) for d in (32, 64, 128)),
    *(
        model(f"length{t}", T=t, K=128, V=128, M=1024, top_k=64)
        for t in (1, 2, 127, 128, 129, 385, 1023, 1024, 1025)
    ),
    model("batch", B=3, T=1100, K=64, V=64, M=512, top_k=32, selection_stride=16),
    model("end_inside_a_run", T=900, K=64, V=64, M=301, top_k=32),
    model("end_before_the_top", T=900, K=64, V=64, M=301, top_k=32, selection_stride=16),
    model("stride_beyond_the_top", T=200, K=64, V=64, M=13, top_k=2, selection_stride=16),
    model(
        "suffix_across_the_end", T=1100, num_queries=700, K=128, V=128, M=512, top_k=32, selection_stride=4
    ),
    model("suffix_of_dense_rows", T=500, num_queries=77, K=128, V=128, M=512, top_k=32),
    model("decode", T=500, num_queries=1, K=128, V=128, M=512, top_k=32),
    model("span", T=2000, K=64, V=64, M=512, top_k=32, selection_span=2),
    model("three_layers", T=9000, K=64, V=64, M=512, top_k=32),
    model("peaked", T=700, K=128, V=128, M=640, top_k=40, spread=4.0),
    model("no_rotation", T=700, K=128, V=128, M=640, top_k=40, rope_base=None),
    model("inv_freq", T=700, K=128, V=128, M=640, top_k=40, inv_freq=frequencies(128)),
    model("fused_projection", T=700, M=640, top_k=40, layout="fused_projection"),
]
CASES = [shape.with_dtype(dtype) for shape in SHAPES for dtype in (torch.bfloat16, torch.float16)]


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_output_log_sums_and_lists(case, nan_memory):
    assert_forward(case, case.spread)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_the_lists_are_those_of_the_other_kernels(case, monkeypatch):
    """A dense row stores the lists that its selection would have found: every parent up to its own."""
    q, k, v, options = case.make_call("cuda")
    parents = op.attention_forward(q, k, v, **options)[3]
    monkeypatch.setenv("HTREE_TREE_GATHER", "per_query")
    others = op.attention_forward(q, k, v, **options)[3]
    leaders = torch.arange(case.T - case.T_q, case.T, case.selection_stride, device="cuda")
    dense = leaders < options["max_top_nodes"] // case.selection_stride * case.selection_stride
    for mine, theirs in zip(parents, others, strict=True):
        assert torch.equal(mine[:, dense], theirs[:, dense])


@pytest.mark.parametrize("stride", [1, 4, 16])
@pytest.mark.parametrize("group", [1, 3, 8, 16])
def test_a_row_has_the_same_bits_in_every_call(group, stride):
    case = model("rows", T=1500, B=2, H=2 * group, K=128, V=128, M=1024, top_k=64, selection_stride=stride)
    q, k, v, options = case.make_call("cuda")
    whole = op.attention(q, k, v, **options)
    for end in (1, 17, 128, 700, 1008, 1024, 1040, 1500):
        assert torch.equal(op.attention(q[:, :end], k[:, :end], v[:, :end], **options), whole[:, :end]), end
        start = end // 2 // stride * stride
        part = op.attention(q[:, start:end], k[:, :end], v[:, :end], **options)
        assert torch.equal(part, whole[:, start:end]), (start, end)
    assert torch.equal(op.attention(q[1:], k[1:], v[1:], **options), whole[1:])


@pytest.mark.parametrize(("length", "width"), [(40, 128), (130, 32), (200, 64), (300, 128)])
@pytest.mark.parametrize("group", [1, 2, 3, 8, 16])
def test_a_sequence_among_many_has_the_bits_of_the_sequence_alone(group, length, width):
    """A block takes ten tasks or more. A sequence alone is first in its block, its queries rotated by other warps."""
    runs = -(-length // (128 // 2 ** (group - 1).bit_length()))
    sequences = -(-10 * torch.cuda.get_device_properties("cuda").multi_processor_count // (2 * runs))
    case = model("sequences", B=sequences, T=length, H=2 * group, K=width, V=width, M=512, top_k=32)
    q, k, v = case.make_qkv("cuda")
    q[1::3, ::7] *= 2.0**-12
    q[2::7, 5, 0, 1] = math.inf
    k[::5, 3] *= 2.0**-11
    v[1::4, -1, :, 3] = math.inf
    options = case.reference_options()
    out = op.attention(q, k, v, **options)
    for sequence in {*range(0, sequences, max(1, sequences // 40)), sequences - 1}:
        alone = op.attention(*(x[sequence : sequence + 1] for x in (q, k, v)), **options)
        torch.testing.assert_close(out[sequence : sequence + 1], alone, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("group", [1, 3, 8, 16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_reaches_its_readers_alone(group, value):
    case = model("poisoned", T=500, H=2 * group, K=128, V=128, M=512, top_k=32)
    q, k, v, options = case.make_call("cuda")
    clean = op.attention(q, k, v, **options)
    for token in (0, 1, 7, 127, 128, 200, 383, 499):
        poisoned = v.clone()
        poisoned[:, token, :, 5] = value
        out = op.attention(q, k, poisoned, **options)
        assert torch.equal(out[:, :token], clean[:, :token])
        hit = out[:, token:, :, 5]
        assert (hit.isnan() if math.isnan(value) else hit == value).all()
        out[..., 5] = clean[..., 5]
        assert torch.equal(out, clean), "no other channel"
        poisoned = k.clone()
        poisoned[:, token] = value
        assert torch.equal(op.attention(q, poisoned, v, **options)[:, :token], clean[:, :token])


@pytest.mark.parametrize("group", [1, 3, 8, 16])
@pytest.mark.parametrize("stride", [1, 16])
def test_a_row_has_the_same_bits_whatever_its_block_did_before(group, stride):
    """Blocks with many tasks, whose neighbours need powers of two or have values that are not finite."""
    case = model(
        "tasks", T=2048, B=6, H=4 * group, H_kv=4, K=128, V=128, M=2048, top_k=128, selection_stride=stride
    )
    q, k, v, options = case.make_call("cuda")
    clean = op.attention(q, k, v, **options)
    k[1] *= 2.0**14
    q[1] *= 2.0**-14
    k[3, 1500] *= 2.0**14
    v[2, 5, :, 3] = math.nan
    v[2, 1000, :, 7] = math.inf
    v[4, 2047, 1, 9] = -math.inf
    whole = op.attention(q, k, v, **options)
    for batch in range(case.B):
        one = slice(batch, batch + 1)
        alone = op.attention(q[one], k[one], v[one], **options)
        assert torch.equal(alone.view(torch.int16), whole[one].view(torch.int16)), batch
        short = op.attention(q[one, :300], k[one, :300], v[one, :300], **options)
        assert torch.equal(short.view(torch.int16), whole[one, :300].view(torch.int16)), batch
    for batch, end in ((0, 2048), (2, 5), (3, 1500), (4, 2047), (5, 2048)):
        assert torch.equal(whole[batch, :end], clean[batch, :end]), batch
    assert whole[2, 5:, :, 3].isnan().all()
    assert (whole[2, 1000:, :, 7] == math.inf).all()
    assert whole[1].isfinite().all()


@pytest.mark.parametrize("width", [32, 64, 128])
def test_rows_that_are_not_aligned_have_the_same_bits(width):
    case = model("aligned", T=1024, B=4, H=32, H_kv=4, K=width, V=width, M=1024, top_k=64)
    q, k, v, options = case.make_call("cuda")

    def moved(x):
        """The same numbers in rows that start at odd multiples of 2 bytes."""
        wider = x.new_full((*x.shape[:-1], width + 1), math.nan)
        wider[..., 1:] = x
        return wider[..., 1:]

    expected = op.attention(q, k, v, **options)
    assert torch.equal(op.attention(moved(q), moved(k), moved(v), **options), expected)
    assert torch.equal(op.attention(moved(q), k, v, **options), expected)


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_gradients(case, stored, nan_memory):
    q, k, v, options = case.make_call("cuda")
    out, gmax, gsum, parents = op.attention_forward(q, k, v, **options)
    dout = torch.randn_like(out)
    saved = (dout, q, k, v, out, gmax, gsum, parents if stored else [])
    gradients = op.attention_backward(*saved, **options)
    wanted = reference_gradients(q, k, v, dout, parents, options)
    for name, gradient, expected in zip(("dq", "dk", "dv"), gradients, wanted, strict=True):
        if (
            case.T == 1 and name != "dv"
        ):  # the only token has weight 1, so these are the rounding of `out` alone
            assert gradient.abs().max() < 0.1, name
        else:
            assert_small_error(gradient, expected, name, 2e-2 * max(1.0, case.spread))
    for first, second in zip(gradients, op.attention_backward(*saved, **options), strict=True):
        assert torch.equal(first, second), "a repeat has equal bits"


@pytest.mark.parametrize("group", [1, 3, 8, 16])
def test_gradients_of_a_batch_have_the_bits_it_has_alone(group):
    case = model("rows", T=1100, B=3, H=2 * group, K=128, V=128, M=1024, top_k=64)
    assert_batch_like_alone(case, slice(1, 2))


@pytest.mark.parametrize("group", [1, 3, 8, 16])
def test_dq_of_a_row_has_the_same_bits_in_every_call(group):
    """Its power of two follows from the row and from the tokens that it sees."""
    case = model("rows", T=1000, H=2 * group, K=128, V=128, M=1024, top_k=64)
    q, k, v = case.make_qkv("cuda")
    v[:, 500] *= 2.0**20
    options = case.reference_options()
    dout = torch.randn(q.shape, device="cuda", dtype=q.dtype)

    def query_gradient(start, end):
        return gradients_of(dout[:, start:end], q[:, start:end], k[:, :end], v[:, :end], options)[0]

    whole = query_gradient(0, 1000)
    for start, end in ((0, 1), (0, 17), (0, 128), (64, 129), (300, 700), (999, 1000)):
        assert torch.equal(query_gradient(start, end), whole[:, start:end]), (start, end)


@pytest.mark.parametrize("group", [1, 3, 8, 16])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_gradients_that_are_not_finite_reach_their_tokens_alone(group, value):
    """A row of dO reaches dk and dv of the tokens up to its own, and a key or a value no dq of an earlier row."""
    case = model("poisoned", T=500, H=2 * group, K=128, V=128, M=512, top_k=32)
    inputs = case.make_qkv("cuda")
    options = case.reference_options()
    dout = torch.randn_like(inputs[0])

    for token in (0, 1, 7, 127, 128, 200, 383, 499):
        poisoned = dout.clone()
        poisoned[:, token, :, 5] = value
        dq, dk, dv = gradients_of(poisoned, *inputs, options)
        assert dq[:, token].isnan().all()
        assert dq[:, :token].isfinite().all()
        assert dq[:, token + 1 :].isfinite().all()
        for x in (dk, dv):
            assert x[:, : token + 1].isnan().all()
            assert x[:, token + 1 :].isfinite().all(), "no later token"
        silent = dout.clone()
        silent[:, token:] = 0.0
        clean = gradients_of(silent, *inputs, options)[0]
        for poisoned_input in (1, 2):
            changed = [x.clone() for x in inputs]
            changed[poisoned_input][:, token] = value
            dq = gradients_of(silent, *changed, options)[0]
            assert_small_error(dq[:, :token], clean[:, :token].double(), "dq", 5e-3)


@pytest.mark.parametrize("width", [32, 64, 128])
def test_gradients_of_rows_whose_sizes_differ(width, nan_memory):
    case = model("sizes", T=700, H=16, K=width, V=width, M=640, top_k=40)
    assert_errors_of_sizes(*case.make_qkv("cuda"), case.reference_options())


def test_many_batches_of_dense_rows_are_laid_out_in_parts():
    case = model("parts", B=6, T=8192, H=32, H_kv=4, K=128, V=128, M=8192, top_k=512)
    assert_batch_like_alone(case, slice(5, None))


def test_a_graph_replays_dense_rows():
    case = model("graph", T=700, K=128, V=128, M=1024, top_k=64, selection_stride=16)
    q, k, v, options = case.make_call("cuda")
    assert_stream_and_graph(lambda: op.attention(q, k, v, **options), q)
