"""Rows without rotations that multiply whole tiles of tokens under the bits of their lists, and those that gather."""

import functools
import math

import pytest
import torch
from tree_attention_fast import (
    assert_batch_like_alone,
    assert_errors_of_sizes,
    assert_fast_output,
    assert_forward,
    assert_small_error,
    assert_small_errors,
    gradients_of,
)
from tree_attention_fast import model as fast_model

import htree_ops  # noqa: F401
from tests.support.cases import case_id
from tests.support.graphs import assert_stream_and_graph
from tests.support.tree_attention_cases import TreeAttentionCase
from tests.support.tree_attention_checks import forced, reference_gradients

pytestmark = pytest.mark.gpu

op = torch.ops.htree
NAMES = ("dq", "dk", "dv")
model = functools.partial(fast_model, rope_base=None)


def bound(case: TreeAttentionCase) -> int:
    """Rows before this token are masked; docs/semantics §1.14."""
    return min(max(32 // (case.H // case.H_kv), 2), 8) * case.top_k * 16


SHAPES = [
    # every number of heads per K/V head, with rows on both sides of the bound where it lies below 2500
    *(model(f"group{g}", T=2500, H=2 * g, K=128, V=128) for g in range(1, 17)),
    *(model(f"d{d}", T=1500, H=8, H_kv=1, K=d, V=d, selection_stride=2) for d in (32, 64, 128)),
    # around the bound, 1024
    *(model(f"length{t}", T=t, H=8, H_kv=1, K=128, V=128) for t in (129, 143, 1008, 1023, 1024, 1025, 1039)),
    model("three_layers", T=3000, H=4, H_kv=1, K=128, V=128, top_k=8, M=64),
    model("three_layers_group16", T=3000, H=16, H_kv=1, top_k=8, M=64),
    model("lists_of_40", T=2500, H_kv=1, top_k=40, M=256, K=128, V=128),
    model("long_lists", T=5000, H_kv=1, top_k=128, M=512, K=128, V=128),
    model("one_walking_row_and_layer", T=127, M=127, selection_stride=2, K=128, V=128),
    model("batch", B=3, T=1100, H=8, H_kv=1),
    model("stride2_odd", T=1999, H=8, H_kv=1, selection_stride=2, K=128, V=128),
    model("stride2_group4", T=1999, H=8, H_kv=2, selection_stride=2, K=128, V=128),
    model("suffix", T=1301, H=8, H_kv=1, num_queries=677, K=128, V=128),
    model("suffix_inside_a_run", T=1000, H=2, H_kv=2, num_queries=37, K=128, V=128),
    model("decode", T=900, H=8, H_kv=1, num_queries=1, K=128, V=128),
    model("span", T=1500, selection_span=4, K=128, V=128),
    model("peaked", T=1500, spread=4.0, K=128, V=128),
    model("fused_projection", T=1500, layout="fused_projection"),
    model("misaligned", T=700, layout="misaligned"),
]
CASES = [shape.with_dtype(dtype) for shape in SHAPES for dtype in (torch.bfloat16, torch.float16)]
# of longer lists the tape of the reference takes tens of gigabytes
GRADIENT_CASES = [case for case in CASES if case.T * case.top_k <= 100_000]


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_output_log_sums_and_lists(case, nan_memory, monkeypatch):
    qkv, (out, _, _, parents) = assert_forward(case, case.spread**2)
    monkeypatch.setenv("HTREE_TREE_GATHER", "gathered")
    gathered, _, _, lists = op.attention_forward(*qkv, **case.reference_options())
    assert all(torch.equal(x, y) for x, y in zip(parents, lists, strict=True)), "one selection"
    first = max(0, bound(case) - (case.T - case.T_q))
    assert torch.equal(out[:, first:], gathered[:, first:]), "the other rows gather"


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("group", [1, 3, 8, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_row_has_the_same_bits_in_every_call(dtype, group, stride):
    """Of a run that a call cuts, the other rows are missing, and so may be tiles that they alone need."""
    case = model(
        "rows", dtype, T=1000, B=2, H=2 * group, K=128, V=128, top_k=8, M=64, selection_stride=stride
    )
    q, k, v, options = case.make_call("cuda")
    whole = op.attention(q, k, v, **options)
    for end in (1, 64, 65, 66, 79, 80, 81, 127, 128, 129, 256, 300, 511, 512, 513, 999):
        assert torch.equal(op.attention(q[:, :end], k[:, :end], v[:, :end], **options), whole[:, :end]), end
        start = end // 2 // stride * stride
        part = op.attention(q[:, start:end], k[:, :end], v[:, :end], **options)
        assert torch.equal(part, whole[:, start:end]), (start, end)
    for start in (60, 64, 66, 98, 250, 512, 514, 998):
        assert torch.equal(op.attention(q[:, start:], k, v, **options), whole[:, start:]), start
    assert torch.equal(op.attention(q[1:], k[1:], v[1:], **options), whole[1:])


@pytest.mark.parametrize("group", [1, 8])
def test_tiles_that_no_query_needs_change_nothing(group):
    """All queries want the same few parents, so most tiles are left out, in front, between and behind."""
    case = model("alike", T=1000, H=group, H_kv=1, K=64, V=64)
    q, k, v = case.make_qkv("cuda")
    same = q[:, :1, :1].clone()
    q[:] = same
    k[:, 130:400] += same
    options = case.reference_options()
    out, _, _, parents = op.attention_forward(q, k, v, **options)
    assert_fast_output(out, forced(q, k, v, parents, options).out, v)
    for start in (513, 777, 992, 999):
        assert torch.equal(op.attention(q[:, start:], k, v, **options), out[:, start:])


@pytest.mark.parametrize("group", [1, 3, 8, 16])
@pytest.mark.parametrize("stride", [1, 2])
def test_the_future_changes_nothing(stride, group):
    case = model("causal", T=900, H=group, H_kv=1, K=128, V=128, selection_stride=stride)
    q, k, v, options = case.make_call("cuda")
    out = op.attention(q, k, v, **options)
    for t in (127, 128, 129, 143, 144, 300, 511, 512, 700, 898):
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[:, t + 1 :] = math.nan
        assert torch.equal(op.attention(*changed, **options)[:, : t + 1], out[:, : t + 1]), t


@pytest.mark.parametrize("group", [1, 3, 8, 16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_reaches_its_readers_alone(group, value):
    """An infinite value reaches every later row, in its list or through a mean; where it has the weight 0 it is NaN."""
    case = model("poisoned", T=500, H=2 * group, K=128, V=128)
    q, k, v, options = case.make_call("cuda")
    clean = op.attention(q, k, v, **options)
    for token in (5, 127, 128, 130, 200, 255, 256, 383, 499):
        poisoned = v.clone()
        poisoned[:, token, :, 5] = value
        out = op.attention(q, k, poisoned, **options)
        assert torch.equal(out[:, :token], clean[:, :token])
        hit = out[:, token:, :, 5]
        assert (hit.isnan() if math.isnan(value) else hit.isnan() | (hit == value)).all()
        # rows of the token's own parent see it as it is, with a weight of its own
        own = out[:, token : token // 16 * 16 + 16, :, 5]
        assert (own.isnan() if math.isnan(value) else own == value).all()
        out[..., 5] = clean[..., 5]
        assert torch.equal(out, clean), "no other channel"
        poisoned = k.clone()
        poisoned[:, token] = value
        assert torch.equal(op.attention(q, poisoned, v, **options)[:, :token], clean[:, :token])


@pytest.mark.parametrize("group", [1, 3, 8, 16])
def test_a_row_has_the_same_bits_whatever_its_block_did_before(group):
    """Blocks with many tasks, whose neighbours need powers of two or have values that are not finite."""
    case = model("tasks", T=1000, B=6, H=4 * group, H_kv=4, K=128, V=128, M=128)
    q, k, v, options = case.make_call("cuda")
    clean = op.attention(q, k, v, **options)
    k[1] *= 2.0**14
    q[1] *= 2.0**-14
    k[3, 600] *= 2.0**14
    v[2, 135, :, 3] = math.nan
    v[4, 999, 1, 9] = -math.inf
    whole = op.attention(q, k, v, **options)
    for batch in range(case.B):
        one = slice(batch, batch + 1)
        alone = op.attention(q[one], k[one], v[one], **options)
        assert torch.equal(alone.view(torch.int16), whole[one].view(torch.int16)), batch
    for batch, end in ((0, 1000), (2, 135), (3, 600), (4, 999), (5, 1000)):
        assert torch.equal(whole[batch, :end], clean[batch, :end]), batch
    assert whole[2, 135:, :, 3].isnan().all()
    assert whole[1].isfinite().all()


@pytest.mark.parametrize("width", [32, 64, 128])
def test_powers_of_two_of_keys_are_those_of_the_tiles_that_are_left(width):
    """Keys of a few tokens need a power of two, and the tiles of a task are not the first ones of the sequence."""
    case = model("sizes", T=1000, H=8, H_kv=1, K=width, V=width)
    q, k, v = case.make_qkv("cuda")
    q[:] = q[:, :1, :1] * 2.0**-10
    k[:, 300:400:3] *= 2.0**12
    k[:, 700:720] *= 2.0**-11
    options = case.reference_options()
    out, _, _, parents = op.attention_forward(q, k, v, **options)
    assert_fast_output(out, forced(q, k, v, parents, options).out, v)


@pytest.mark.parametrize("case", GRADIENT_CASES, ids=case_id)
def test_gradients(case, nan_memory):
    q, k, v, options = case.make_call("cuda")
    out, gmax, gsum, parents = op.attention_forward(q, k, v, **options)
    saved = (torch.randn_like(out), q, k, v, out, gmax, gsum)
    gradients = op.attention_backward(*saved, parents, **options)
    wanted = reference_gradients(q, k, v, saved[0], parents, options)
    for name, gradient, expected in zip(NAMES, gradients, wanted, strict=True):
        assert_small_error(gradient, expected, name, 2e-2 * max(1.0, case.spread))
    for lists in (parents, []):
        for name, x, y in zip(NAMES, gradients, op.attention_backward(*saved, lists, **options), strict=True):
            assert torch.equal(x, y), f"{name}: a repeat has equal bits, with stored lists and without"


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("group", [1, 3, 8, 16])
def test_every_row_has_its_own_gradient(group, stride):
    """Rows whose dO is far above that of the others, so that a single row or tile that is wrong shows."""
    case = model("single", T=1100, H=group, H_kv=1, K=64, V=64, selection_stride=stride)
    q, k, v, options = case.make_call("cuda")
    out, gmax, gsum, parents = op.attention_forward(q, k, v, **options)
    for t in (128, 143, 191, 256, 383, 511, 512, 1099):
        dout = torch.randn_like(out)
        dout[:, t] *= 100.0
        got = op.attention_backward(dout, q, k, v, out, gmax, gsum, parents, **options)
        wanted = reference_gradients(q, k, v, dout, parents, options)
        assert_small_error(got[0][:, t], wanted[0][:, t], f"dq of row {t}", 3e-2)
        for name, gradient, expected in zip(NAMES[1:], got[1:], wanted[1:], strict=True):
            for first in range(0, case.T, 128):
                tile = slice(first, first + 128)
                assert_small_error(
                    gradient[:, tile], expected[:, tile], f"{name} from {first}, row {t}", 3e-2
                )


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("group", [1, 3, 8, 16])
def test_dq_of_a_row_has_the_same_bits_in_every_call(group, stride):
    """As long as all powers of two are the same: rows of q and of dO have one size, the first value is the largest."""
    case = model("rows", T=1000, H=2 * group, K=128, V=128, top_k=8, M=64, selection_stride=stride)
    q, k, v = case.make_qkv("cuda")
    q[..., 0] = 6.0
    v[:, 0] *= 16.0
    options = case.reference_options()
    dout = torch.randn_like(q).sign()

    def query_gradient(start, end):
        return gradients_of(dout[:, start:end], q[:, start:end], k[:, :end], v[:, :end], options)[0]

    whole = query_gradient(0, 1000)
    for start, end in (
        (0, 65),
        (0, 81),
        (64, 129),
        (98, 250),
        (250, 256),
        (300, 513),
        (510, 1000),
        (998, 999),
    ):
        assert torch.equal(query_gradient(start, end), whole[:, start:end]), (start, end)


@pytest.mark.parametrize("group", [1, 3, 8, 16])
def test_gradients_of_a_batch_have_the_bits_it_has_alone(group):
    case = model("rows", T=1100, B=3, H=2 * group, K=128, V=128)
    assert_batch_like_alone(case, slice(1, 2))


@pytest.mark.parametrize("group", [1, 3, 8, 16])
def test_gradients_where_tiles_are_left_out(group):
    """All queries want the same few parents."""
    case = model("alike", T=1000, H=group, H_kv=1, K=64, V=64)
    q, k, v = case.make_qkv("cuda")
    same = q[:, :1, :1].clone()
    q[:] = same
    k[:, 130:400] += same
    assert_small_errors((q, k, v), case.reference_options())


@pytest.mark.parametrize("width", [32, 64, 128])
def test_gradients_of_rows_whose_sizes_differ(width, nan_memory):
    case = model("sizes", T=1000, H=16, K=width, V=width)
    assert_errors_of_sizes(*case.make_qkv("cuda"), case.reference_options())


@pytest.mark.parametrize("group", [1, 3, 8, 16])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_gradients_that_are_not_finite_reach_their_tokens_alone(group, value):
    """A row of dO reaches its own dq and the tokens up to its own, and a key or a value no dq of an earlier row."""
    case = model("poisoned", T=500, H=2 * group, K=128, V=128)
    inputs = case.make_qkv("cuda")
    options = case.reference_options()
    dout = torch.randn_like(inputs[0])

    for token in (128, 130, 200, 255, 256, 383, 499):
        poisoned = dout.clone()
        poisoned[:, token, :, 5] = value
        dq, dk, dv = gradients_of(poisoned, *inputs, options)
        assert dq[:, token].isnan().all()
        assert dq[:, :token].isfinite().all()
        assert dq[:, token + 1 :].isfinite().all()
        for x in (dk, dv):
            assert not x[:, : token + 1, :, 5].isfinite().any()
            # the other queries and nodes of a task of the top may share its numbers, later parents do not
            assert x[:, (token // 256 + 1) * 256 :].isfinite().all(), "no later token"
        silent = dout.clone()
        silent[:, token:] = 0.0
        clean = gradients_of(silent, *inputs, options)[0]
        for poisoned_input in (1, 2):
            changed = [x.clone() for x in inputs]
            changed[poisoned_input][:, token] = value
            dq = gradients_of(silent, *changed, options)[0]
            assert_small_error(dq[:, :token], clean[:, :token].double(), "dq", 5e-3)


@pytest.mark.parametrize(
    "mask", [[True, False, False], [False, True, False], [False, False, True], [False, True, True]]
)
def test_some_of_the_gradients(mask, nan_memory):
    case = model("some", T=1100, H=8, H_kv=1, K=128, V=128)
    q, k, v, options = case.make_call("cuda")
    out, gmax, gsum, parents = op.attention_forward(q, k, v, **options)
    saved = (torch.randn_like(out), q, k, v, out, gmax, gsum, parents)
    some = op.attention_backward(*saved, **options, output_mask=mask)
    for wanted, full, gradient in zip(mask, op.attention_backward(*saved, **options), some, strict=True):
        assert not wanted or torch.equal(gradient, full)


def test_a_graph_replays_masked_rows_and_their_gradients():
    case = model("graph", T=1500, H=8, H_kv=1, K=128, V=128)
    q, k, v, options = case.make_call("cuda")
    assert_stream_and_graph(lambda: op.attention(q, k, v, **options), q)
    saved = op.attention_forward(q, k, v, **options)
    dout = torch.randn_like(q)
    assert_stream_and_graph(lambda: op.attention_backward(dout, q, k, v, *saved, **options), dout)


@pytest.mark.parametrize("heads", [(32, 4), (8, 8), (32, 2)], ids=str)
@pytest.mark.parametrize("stride", [1, 2])
def test_gradients_of_a_sequence_of_many_chunks(stride, heads, monkeypatch):
    """Chunks that begin anywhere in the sequence, and rows on both sides of the bound, beside kernels that gather."""
    H, H_kv = heads
    case = model("chunks", T=40_000, H=H, H_kv=H_kv, K=128, V=128, top_k=512, M=8192, selection_stride=stride)
    q, k, v, options = case.make_call("cuda")
    out, gmax, gsum, parents = op.attention_forward(q, k, v, **options)
    saved = (torch.randn_like(out), q, k, v, out, gmax, gsum, parents)
    gradients = op.attention_backward(*saved, **options)
    for name, x, y in zip(NAMES, gradients, op.attention_backward(*saved, **options), strict=True):
        assert torch.equal(x, y), name
    monkeypatch.setenv("HTREE_TREE_GATHER", "gathered")
    wanted = op.attention_backward(*saved, **options)
    for name, gradient, expected in zip(NAMES, gradients, wanted, strict=True):
        for first in range(0, case.T, 4096):
            part = slice(first, first + 4096)
            assert_small_error(gradient[:, part], expected[:, part].double(), f"{name} from {first}", 1e-2)


@pytest.mark.parametrize("stride", [1, 2])
def test_a_sequence_of_many_chunks(stride):
    """Chunks that begin anywhere in the sequence, and one that ends at the bound."""
    case = model("chunks", T=40_000, H=32, H_kv=4, K=128, V=128, top_k=512, M=8192, selection_stride=stride)
    q, k, v, options = case.make_call("cuda")
    out, _, _, parents = op.attention_forward(q, k, v, **options)
    for start in (8192, 20_000, 32_760, 39_984):  # the third ones stand on both sides of the bound
        rows = slice(start, start + 16)
        lists = [x[:, start // stride : (start + 16) // stride].contiguous() for x in parents]
        expected = forced(q[:, rows].contiguous(), k[:, : rows.stop], v[:, : rows.stop], lists, options)
        assert_fast_output(out[:, rows], expected.out, v)
    suffix = op.attention(q[:, -7296:], k, v, **options)
    assert torch.equal(suffix, out[:, -7296:])
