"""Tree attention on the GPU at the shapes of real models: tensor-core paths, large tensors, streams, graphs."""

import math

import pytest
import torch
from tree_attention_fast import (
    TENSOR_CORE_DELTA,
    TENSOR_CORE_TOLERANCE,
    assert_fast_output,
    assert_forward,
    model,
)

import htree_ops  # noqa: F401
from tests.support.cases import STEP_SCALE, case_id, one_step_apart
from tests.support.compare import assert_close_spec
from tests.support.graphs import assert_stream_and_graph
from tests.support.tree_attention_cases import frequencies
from tests.support.tree_attention_checks import (
    GRADIENT_FACTOR,
    assert_epsilon_optimal,
    forced,
    reference_gradients,
)

pytestmark = pytest.mark.gpu

op = torch.ops.htree

SHAPES = [
    model("d32", K=32, V=32),
    model("d64"),
    model("d128", K=128, V=128),
    model("k64_v128", V=128),
    *(model(f"group{g}", H=2 * g, K=128, V=128) for g in (1, 2, 4, 8, 16)),
    model("group3", H=6),
    model("batch", B=2, T=700),
    model("three_layers", T=3000, top_k=4, M=32),
    model("wide_lists", T=3000, top_k=64, M=1024),
    model("one_layer", T=900, M=1024, top_k=64),
    # the last length with a number of layers and the first with one more: M, 16 M and 256 M
    *(
        model(f"boundary{t}_stride{stride}", T=t, M=128, K=128, V=128, selection_stride=stride)
        for t in (128, 129, 2048, 2049)
        for stride in (1, 16)
    ),
    *(
        model(f"boundary{t}_stride{stride}", T=t, num_queries=48 + t % 16, selection_stride=stride)
        for t in (32_768, 32_769)
        for stride in (1, 16)
    ),
    model("stride2", selection_stride=2, K=128, V=128),
    model("stride16", selection_stride=16, K=128, V=128),
    model("stride16_three_layers", T=3000, top_k=4, M=32, selection_stride=16),
    # rows, head dims and layers of the per-list kernels, where the GPU has them
    *(model(f"stride16_d{d}", H=16, K=d, V=d, selection_stride=16) for d in (32, 64)),
    *(model(f"stride16_group{g}", H=2 * g, K=128, V=128, selection_stride=16) for g in (1, 3, 5, 8, 12, 16)),
    *(model(f"stride{s}_group8", H=16, K=128, V=128, selection_stride=s) for s in (4, 8)),
    model("stride8_d32", H=16, K=32, V=32, selection_stride=8),
    model("stride16_batch", B=2, T=2111, H=16, K=128, V=128, top_k=33, M=512, selection_stride=16),
    model("stride16_one_layer", T=900, M=1024, top_k=64, K=128, V=128, selection_stride=16),
    model("stride16_wide_lists", T=5003, H=16, H_kv=2, top_k=80, M=1280, selection_stride=16),
    model("stride8_three_layers", T=3000, H=16, top_k=4, M=32, selection_stride=8),
    model("stride16_suffix", T=1501, num_queries=77 + 16 * 4, selection_stride=16),
    model("stride16_no_rotation", rope_base=None, K=128, V=128, selection_stride=16),
    model("stride16_fused_projection", layout="fused_projection", selection_stride=16),
    model("stride16_peaked", spread=4.0, K=128, V=128, selection_stride=16),
    *(model(f"stride16_short{t}", T=t, K=128, V=128, selection_stride=16) for t in (1, 15, 16, 17, 64)),
    model("suffix", num_queries=77),
    model("decode", num_queries=1),
    model("fused_projection", layout="fused_projection"),
    model("joint", importance="exp_joint"),
    model("no_rotation", rope_base=None),
    *(
        model(f"stride{s}_d{d}_inv_freq", H=16, K=d, V=d, selection_stride=s, inv_freq=frequencies(d))
        for s in (1, 4, 16)
        for d in (32, 64, 128)
    ),
    model("k64_v128_inv_freq", V=128, inv_freq=frequencies(64)),
    model("one_layer_inv_freq", T=900, M=1024, top_k=64, inv_freq=frequencies(64)),
    model("group1_inv_freq", H=2, K=128, V=128, inv_freq=frequencies(128)),
    model("span_inv_freq", selection_span=2, inv_freq=frequencies(64)),
    model("peaked", spread=4.0),
    *(
        model(f"many_tiles{name}", T=20_000, K=128, V=128, top_k=128, M=2048, **sizes)
        for name, sizes in (
            ("", {"num_queries": 333}),
            ("_group16", {"num_queries": 77, "H": 32}),
            ("_group1", {"num_queries": 150, "H": 2}),
            ("_stride16", {"num_queries": 320, "selection_stride": 16}),
            ("_lse", {"num_queries": 50, "importance": "lse"}),
            ("_joint", {"num_queries": 50, "importance": "exp_joint", "H": 4}),
        )
    ),
    model("many_tiles_d32", T=20_000, K=32, V=32, top_k=128, M=2048, num_queries=100),
    *(model(f"short{t}", T=t, K=128, V=128) for t in (1, 15, 16, 17, 64)),
]
CASES = [s.with_dtype(dtype) for s in SHAPES for dtype in (torch.bfloat16, torch.float16)] + [
    s.with_dtype(torch.float32) for s in (*SHAPES[:4], *(s for s in SHAPES if s.inv_freq and s.K == 64))
]


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_forward_under_its_own_selection(case, nan_memory):
    qkv, (out, _, _, parents) = assert_forward(case, case.spread)
    delta = TENSOR_CORE_DELTA[case.dtype] * max(1.0, case.spread)
    assert_epsilon_optimal(*qkv, parents, case.reference_options(), delta)
    again = op.attention_forward(*qkv, **case.reference_options())
    assert torch.equal(out, again[0])
    assert all(torch.equal(x, y) for x, y in zip(parents, again[3], strict=True))


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_backward_under_the_same_selection(case, nan_memory):
    q, k, v = case.make_qkv("cuda")
    out, gmax, gsum, parents = op.attention_forward(q, k, v, **case.reference_options())
    dout = torch.randn_like(out)
    options = case.reference_options()
    gradients = op.attention_backward(dout, q, k, v, out, gmax, gsum, parents, **options)
    wanted = reference_gradients(q, k, v, dout, parents, options)
    a = TENSOR_CORE_TOLERANCE[case.dtype] * GRADIENT_FACTOR
    atol = a * float(dout.abs().max()) * max(float(x.abs().max()) for x in (q, k, v))
    for name, gradient, expected in zip(("dq", "dk", "dv"), gradients, wanted, strict=True):
        assert_close_spec(gradient, expected, rtol=a, atol=atol, dtype=case.dtype, name=name)
        norm = (gradient.double() - expected).norm() / expected.norm().clamp(min=1e-30)
        assert norm < 2e-2 or expected.norm() < 1e-6, f"{name}: relative norm of the error {norm:.2e}"
    recomputed = op.attention_backward(dout, q, k, v, out, gmax, gsum, [], **options)
    for stored, fresh in zip(gradients, recomputed, strict=True):
        assert torch.equal(stored, fresh), "recomputed lists give the same bits"
    only_dq = op.attention_backward(
        dout, q, k, v, out, gmax, gsum, parents, **options, output_mask=[True, False, False]
    )
    assert torch.equal(only_dq[0], gradients[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stride", [1, 4, 16])
@pytest.mark.parametrize("group", [1, 2, 8, 16])
def test_the_future_changes_nothing(dtype, stride, group):
    case = model("causal", dtype, T=4500, H=2 * group, K=128, V=128, top_k=32, M=512, selection_stride=stride)
    q, k, v = case.make_qkv("cuda")
    out = op.attention(q, k, v, **case.reference_options())
    for t in (0, 15, 100, 1023, 2500, 4002):
        # A NaN among the rotated keys must not change the guard of earlier queries, and scores of a later
        # query in the same thread block must not change the maximum that an earlier one's sums refer to.
        for factor in (math.nan, 300.0):
            changed = [x.clone() for x in (q, k, v)]
            for x in changed:
                x[:, t + 1 :] *= factor
            again = op.attention(*changed, **case.reference_options())
            assert torch.equal(again[:, : t + 1], out[:, : t + 1])


@pytest.mark.parametrize("stride", [1, 16])
@pytest.mark.parametrize("size", [2.0**-66, 2.0**-12, 2.0**14, 2.0**60, 2.0**100])
def test_the_range_of_bfloat16(size, stride):
    """Rows in half-precision scratch are scaled by powers of two, so any size of q and k is as accurate as 1."""
    case = model("range", T=3000, K=128, V=128, top_k=16, M=256, selection_stride=stride)
    q, k, v, options = case.make_call("cuda")
    q, k = (q.double() / size).bfloat16(), (k.double() * size).bfloat16()
    out, gmax, gsum, parents = op.attention_forward(q, k, v, **options)
    expected = forced(q, k, v, parents, options)
    assert_fast_output(out, expected.out, v)
    assert_close_spec(gmax.double() + gsum.double().log(), expected.lse, rtol=2e-3, atol=2e-3, name="lse")
    assert_epsilon_optimal(q, k, v, parents, options, TENSOR_CORE_DELTA[case.dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stride", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("size", [2.0**24, 2.0**28, 2.0**31, 2.0**34, 2.0**60])
def test_scores_with_steps_of_many_powers_of_two(dtype, stride, size):
    """Half a step beyond the largest score is no weight: outputs stay finite and within the values."""
    case = model("steep", dtype, T=2100, H=16, K=128, V=128, M=256, selection_stride=stride)
    q, k, v = case.make_qkv("cuda")
    out, gmax, gsum, _ = op.attention_forward(q, k, v, **{**case.reference_options(), "scale": size})
    assert gmax.isfinite().all()
    assert gsum.isfinite().all()
    assert (gsum > 0.9).all()
    assert out.isfinite().all()
    assert out.abs().max() <= v.abs().max() * (1 + 2**-6)


@pytest.mark.parametrize("M", [64, 4096], ids=["gathered", "dense"])
@pytest.mark.parametrize("stride", [1, 4, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scores_one_step_beyond_another(dtype, stride, M):
    """Floats from 2^27 on lie 16 apart: a reference that stays one step behind leaves weights of 2^16."""
    case = model("step", dtype, T=1100, M=M, selection_stride=stride, rope_base=None)
    q, k, v = case.make_qkv("cuda")
    one_step_apart(q, k, dim=1, run=64)
    out = op.attention(q, k, v, **{**case.reference_options(), "scale": STEP_SCALE})
    assert out.isfinite().all()
    assert out.abs().max() <= v.abs().max() * (1 + 2**-6)


def test_mixed_sizes_of_keys_and_queries():
    """Rows of q and of k stand next to rows of far different sizes."""
    case = model("mixed", T=3000, K=128, V=128, top_k=16, M=256)
    q, k, v = case.make_qkv("cuda")
    size = 2.0 ** (torch.arange(case.T, device="cuda", dtype=torch.float64) // 256 % 5 * 20 - 40)
    k = (k.double() * size[None, :, None, None]).bfloat16()
    q = (q.double() * 2.0**-80 * size.flip(0)[None, :, None, None]).bfloat16()  # scores of about 1 at most
    options = case.reference_options()
    out, _, _, parents = op.attention_forward(q, k, v, **options)
    expected = forced(q, k, v, parents, options)
    assert_fast_output(out, expected.out, v)


@pytest.mark.parametrize("value", [0.0, math.nan], ids=["ties", "nan"])
@pytest.mark.parametrize("stride", [1, 16])
def test_equal_importances_go_by_position(value, stride):
    case = model("ties", T=6000, K=64, V=64, top_k=32, M=512, selection_stride=stride)
    q, k, v = case.make_qkv("cuda")
    parents = op.attention_forward(q * value, k, v, **case.reference_options())[3]
    rank = torch.arange(0, case.T, stride, device="cuda") // 16
    wanted = torch.arange(32, device="cuda").expand(len(rank), 32).clone()
    wanted[:, 31] = rank.clamp(min=31)
    wanted[wanted > rank[:, None]] = -1
    assert torch.equal(parents[0][0].long(), wanted[:, None].expand(-1, case.H_kv, -1))


@pytest.mark.parametrize(("query", "plain", "guarded"), [(8, -7, -10), (-14, 12, 15)], ids=["small", "large"])
@pytest.mark.parametrize("stride", [1, 16])
def test_keys_of_mixed_size(query, plain, guarded, stride, nan_memory):
    """Key rows that need a power of two stand beside others that need none and beside rows of zeros."""
    case = model("mixed", T=1100, H=16, K=128, V=128, selection_stride=stride)
    q, k, v = case.make_qkv("cuda")
    q = q * 2.0**query
    k[:, ::3] *= 2.0**guarded
    k[:, 1::3] *= 2.0**plain
    k[:, 2::3] *= 2.0**plain
    k[:, 5::13] = 0.0
    options = case.reference_options()
    out, _, _, parents = op.attention_forward(q, k, v, **options)
    expected = forced(q, k, v, parents, options)
    assert_fast_output(out, expected.out, v)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("stride", [1, 4, 16])
def test_values_that_are_not_finite_reach_their_readers_alone(value, stride):
    case = model("poisoned", T=700, H=16, K=64, V=64, M=1024, top_k=64, selection_stride=stride)
    q, k, v, options = case.make_call("cuda")
    clean = op.attention(q, k, v, **options)
    token, channel = 645, 5  # inside the parent of tokens 640 ... 655
    v[:, token, :, channel] = value
    out = op.attention(q, k, v, **options)
    assert torch.equal(out[:, :token], clean[:, :token])
    hit = out[:, token:, :, channel]
    assert (hit.isnan() if math.isnan(value) else hit == value).all()
    others = [c for c in range(case.V) if c != channel]
    assert torch.equal(out[..., others], clean[..., others])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("inv_freq", [None, frequencies(64)], ids=["base", "inv_freq"])
def test_stream_and_graph(dtype, inv_freq):
    case = model("graph", dtype, T=600, K=64, V=64, inv_freq=inv_freq)
    q, k, v = case.make_qkv("cuda")
    assert_stream_and_graph(lambda: op.attention(q, k, v, **case.reference_options()), q)


@pytest.mark.parametrize("stride", [1, 4, 16])
@pytest.mark.parametrize("group", [1, 3, 4, 8, 16])
def test_bits_do_not_depend_on_the_length(group, stride):
    """In sequences with as many layers; with more of them before M, and if no top is dense everywhere (§1.14)."""
    case = model("lengths", T=5200, H=2 * group, top_k=13, M=200, selection_stride=stride)
    q, k, v = case.make_qkv("cuda")
    two_layers, three_layers = (208, 304, 1501, 3200), (3201, 4096, 5200)
    rows = {
        length: op.attention(q[:, :length], k[:, :length], v[:, :length], **case.reference_options())
        for length in (200, *two_layers, *three_layers)
    }
    for depth in (two_layers, three_layers):
        for length in depth[:-1]:
            assert torch.equal(rows[length], rows[depth[-1]][:, :length]), length
    dense_top = group != 3
    for length, shorter in rows.items():
        same = case.M if dense_top else length
        assert torch.equal(shorter[:, :same], rows[5200][:, :same]), length


@pytest.mark.parametrize(("length", "stride"), [(65_536, 1), (524_288, 16)])
def test_temporary_memory_is_bounded(length, stride):
    """Beyond the output and one packed copy of K and V, at most 1 GB (docs/semantics §1.8)."""
    case = model("memory", T=length, H=32, H_kv=4, K=128, V=128, top_k=512, M=8192, selection_stride=stride)
    q, k, v = case.make_qkv("cuda")
    op.attention(q[:, :64], k[:, :64], v[:, :64], **case.reference_options())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = op.attention(q, k, v, **case.reference_options())
    torch.cuda.synchronize()
    used = torch.cuda.max_memory_allocated() - before - 2 * (out.numel() + k.numel() + v.numel())
    assert used <= 10**9, f"{used / 10**6:.0f} MB"
