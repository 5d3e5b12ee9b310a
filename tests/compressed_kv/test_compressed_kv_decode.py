"""kv_decode_attention against float64 attention on the decompressed rows (docs/semantics §4.2, §4.6)."""

import math
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import htree_ops
import htree_ops.compat
from htree_ops.reference import compressed_kv as reference
from htree_ops.reference.hadamard import grouped_hadamard
from tests.support.cases import STEP_SCALE, case_id, normal, one_step_apart
from tests.support.compare import assert_close_spec
from tests.support.compressed_kv_cases import (
    DECODE_CASES,
    DTYPES,
    DecodeCase,
    assert_decode,
    decode_tolerance,
    rows_with_outliers,
)
from tests.support.devices import poisoned_memory
from tests.support.opcheck import opcheck

ops = torch.ops.htree
op = ops.kv_decode_attention
K_SCALES, V_BITMAP, V_SCALES, K_WIN, V_WIN, COMP_LEN, WIN_LEN, TABLE = 3, 4, 6, 7, 8, 9, 10, 12


def run(case: DecodeCase, inputs: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    out, lse = op(*inputs, **case.options())
    return out, lse


@pytest.mark.parametrize("case", DECODE_CASES, ids=case_id)
def test_against_float64(case, device, nan_memory):
    inputs = case.make_inputs(device)
    out, lse = run(case, inputs)
    assert out.is_contiguous()
    assert lse.is_contiguous()
    assert_decode(case, (out, lse), inputs)
    again = run(case, inputs)
    assert torch.equal(out, again[0])
    assert torch.equal(lse, again[1]), "two runs must agree bit for bit"


@pytest.mark.parametrize("k_bits", [4, 8, 16])
@pytest.mark.parametrize("v_bits", [4, 8, 16])
@pytest.mark.parametrize("width", [64, 128, 192, 256])
def test_every_number_of_warps(width, k_bits, v_bits, device):
    """The number of warps follows from the rows of a tile; it need not divide what they merge."""
    for keep in (1, width // 4, width // 2, width * 3 // 4, width - 1, width):
        case = DecodeCase(
            name="warps", dtype=torch.float16, B=1, H=8, H_kv=1, D=width, S=700, W=32,
            k_keep=width // 2, v_keep=keep, k_bits=k_bits, v_bits=v_bits, packer=ops.kv_compress,
        )  # fmt: skip
        inputs = case.make_inputs(device)
        assert_decode(case, run(case, inputs), inputs)


@given(
    batch=st.integers(1, 3),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (8, 8), (8, 4), (10, 1), (16, 2)]),
    width=st.sampled_from([64, 128, 192, 256, 448]),
    value_width=st.sampled_from([0, 0, 64, 128, 320]),
    keeps=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    bits=st.tuples(*[st.sampled_from([16, 8, 4])] * 2),
    sizes=st.tuples(st.integers(0, 90), st.integers(0, 20)),
    page=st.sampled_from([0, 0, 1, 8, 24]),
    group=st.sampled_from([0, 0, 1, 2]),
    split=st.sampled_from([0, 0, 16, 300]),
    dtype=st.sampled_from(DTYPES),
    queries=st.sampled_from([1, 1, 2, 5, 25]),
    four_d=st.booleans(),
    seed=st.integers(0, 2**31 - 1),
    data=st.data(),
)
def test_property_against_float64(
    device,
    batch,
    heads,
    width,
    value_width,
    keeps,
    bits,
    sizes,
    page,
    group,
    split,
    dtype,
    queries,
    four_d,
    seed,
    data,
):
    S, W = sizes
    lengths = [data.draw(st.none() | st.tuples(*[st.integers(0, n)] * batch)) for n in sizes]
    case = DecodeCase(
        name="drawn", dtype=dtype, B=batch, H=heads[0], H_kv=heads[1], D=width, S=S, W=W,
        V=value_width, k_keep=max(1, round(keeps[0] * width)), v_keep=max(1, round(keeps[1] * (value_width or width))),
        k_bits=bits[0], v_bits=bits[1], comp_len=lengths[0], win_len=lengths[1], page=page,
        hadamard_group=0 if width & (width - 1) else group if heads[1] % max(group, 1) == 0 else 1,
        split_size=split, queries=queries, four_d=four_d and queries == 1,
    )  # fmt: skip
    inputs = case.make_inputs(device, seed)
    with poisoned_memory():
        actual = run(case, inputs)
    assert_decode(case, actual, inputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page", [0, 16])
def test_all_channels_and_bits_are_dense_attention(dtype, page, device):
    case = DecodeCase(
        name="dense", dtype=dtype, S=300, W=20, H=8, k_keep=128, v_keep=128, k_bits=16, v_bits=16, page=page
    )
    q, k, v = case.dense(device, seed=1)
    expected = F.scaled_dot_product_attention(
        q[:, :, None].double(), k.double(), v.double(), enable_gqa=True
    )[:, :, 0]
    out, _ = run(case, case.make_inputs(device, seed=1))
    assert_close_spec(out, expected, *decode_tolerance(q, float(v.abs().max())), dtype=dtype)


# ---- which storage of keys is exact: the rows of §4.2

SCHEMES = DecodeCase(
    name="schemes",
    dtype=torch.float32,
    H=8,
    H_kv=4,
    D=64,
    S=40,
    W=8,
    k_keep=64,
    v_keep=64,
    k_bits=8,
    v_bits=8,
)


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    """Scaled scores [B, H, S], in which an error shows that lse and weights would hide."""
    return torch.einsum("bhd,bhsd->bhs", q.double(), k.double().repeat_interleave(2, 1)) / 8


@pytest.mark.parametrize("group", [0, 1, 2, 4])
def test_every_storage_gives_the_attention_of_the_keys(group, device):
    """With dense 16-bit rows of transformed keys only their rounding to float16 differs from plain attention."""
    case = replace(
        SCHEMES,
        dtype=torch.float16,
        hadamard_group=group,
        k_bits=16,
        v_bits=16,
        win_len=(8, 3),
        comp_len=(11, 40),
    )
    q, k, v = case.dense(device, seed=2)
    out, lse = run(case, case.make_inputs(device, seed=2))
    tokens = torch.arange(48, device=device)
    present = torch.stack(
        [(tokens < c) | ((tokens >= 40) & (tokens < 40 + w)) for c, w in ((11, 8), (40, 3))]
    )
    expected, expected_lse = reference.attention(q, k, v, present)
    # a score moves by the rounding of D transformed channels
    largest = float(scores_of(q.abs(), k.abs()).max()) * 2**-11 if group else 2e-3
    atol = decode_tolerance(q, float(v.abs().max()))[1] + 2 * largest * float(v.abs().max())
    assert_close_spec(out, expected, 2e-3, atol)
    assert_close_spec(lse, expected_lse, 1e-4, largest)


@pytest.mark.parametrize("group", [1, 2, 4])
def test_what_the_op_computes_differs_from_the_wrong_recipes(group, device):
    """Reading transformed keys as plain ones, or with per-head queries for G > 1, gives a far result."""
    case = replace(SCHEMES, hadamard_group=group)
    inputs = case.make_inputs(device, seed=3)
    _, right = run(case, inputs)
    _, untransformed = run(replace(case, hadamard_group=0), inputs)
    assert (right - untransformed).abs().max() > 0.1
    if group > 1:
        _, per_head = run(replace(case, hadamard_group=1), inputs)
        assert (right - per_head).abs().max() > 0.1


@pytest.mark.parametrize("group", [1, 2, 4])
def test_the_two_exact_recipes_agree(group):
    """The expanded query times the stored row equals the query times the restored keys, in float64."""
    q = normal((2, 8, 64), torch.float64, "cpu", seed=4)
    k = normal((2, 4, 30, 64), torch.float64, "cpu", seed=5)
    stored = grouped_hadamard(k, group)
    parts = reference.expanded_query(q, 4, group)
    rows = stored.unflatten(1, (4 // group, group))[:, torch.arange(8) // 2 // group]
    expanded = torch.einsum("bhgd,bhgsd->bhs", parts, rows)
    expected = torch.einsum("bhd,bhsd->bhs", q, k.repeat_interleave(2, 1))
    inverse = torch.einsum("bhd,bhsd->bhs", q, grouped_hadamard(stored, group).repeat_interleave(2, 1))
    assert_close_spec(expanded, expected, 0.0, 1e-12)
    assert_close_spec(inverse, expected, 0.0, 1e-12)


def test_the_unnormalised_transform_needs_another_scale(device):
    case = replace(SCHEMES, k_bits=16, v_bits=16, dtype=torch.float16)
    q, k, v = case.dense(device, seed=6)
    k = k / 4  # the unnormalised transform must fit float16
    raw = [grouped_hadamard(x[:, :, None] if x.dim() == 3 else x, 1, 1.0).half() for x in (q, k)]
    rows = [*reference.kv_compress(raw[1], 64, 16), *reference.kv_compress(v, 64, 16)]
    empty = k[:, :, :0]
    options = case.options()
    _, lse = op(raw[0][:, :, 0], *rows, empty, empty, scale=64**-0.5 / 64, **options)
    _, expected = reference.attention(q, k, v, torch.ones(2, 48, dtype=torch.bool, device=device))
    assert_close_spec(lse, expected, 1e-3, 1e-2)
    _, wrong = op(raw[0][:, :, 0], *rows, empty, empty, **options)
    assert (wrong.double() - expected).abs().max() > 1


# ---- what must not matter


@pytest.mark.parametrize("page", [0, 16])
def test_rows_past_the_lengths_are_not_read(page, device):
    case = DecodeCase(
        name="lengths", dtype=torch.float16, B=3, S=70, comp_len=(0, 17, 69), win_len=(5, 0, 9), page=page
    )
    inputs = list(case.make_inputs(device, seed=7))
    clean = run(case, tuple(inputs))
    for i, compressed in enumerate(case.comp_len or ()):
        for part in range(1, 7):
            x = inputs[part]
            poison = math.nan if x.is_floating_point() else 0x5A
            if page:
                pool_rows = [(t // page, t % page) for t in range(compressed, 70)]
                for column, row in pool_rows:
                    x[int(inputs[TABLE][i, column]), :, row] = poison
            else:
                x[i, :, compressed:] = poison
        for part in (K_WIN, V_WIN):
            inputs[part][i, :, (case.win_len or ())[i] :] = math.nan
    if page:
        for i, compressed in enumerate(case.comp_len or ()):
            inputs[TABLE][i, -(-compressed // page) :] = 2**31 - 1 if i else -(2**31)
    out, lse = run(case, tuple(inputs))
    assert torch.equal(out, clean[0])
    assert torch.equal(lse, clean[1])


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("keep", [1, 39, 128])
@pytest.mark.parametrize("page", [0, 16])
def test_mutated_bytes_stay_in_their_heads(page, keep, bits, device):
    """Random bytes, full bitmaps and any lengths: no other head changes, and no read is out of bounds."""
    case = DecodeCase(
        name="mutated", dtype=torch.float16, B=2, H=6, H_kv=3, S=128, k_keep=keep, v_keep=keep, k_bits=bits,
        v_bits=bits, page=page, comp_len=(128, 128),
    )  # fmt: skip
    inputs = list(case.make_inputs(device, seed=14))
    clean = run(case, tuple(inputs))
    generator = torch.Generator().manual_seed(keep * bits)
    pages = inputs[TABLE][1, :-1].long() if page else torch.tensor([1], device=device)
    for full in (False, True):
        for part in range(1, 7):
            x = inputs[part][pages, 2]
            noise = torch.randint(0, 256, (x.numel() * x.element_size(),), generator=generator)
            inputs[part][pages, 2] = noise.to(torch.uint8).view(x.dtype).view(x.shape).to(device)
            if full and part in (1, 4):
                inputs[part][pages, 2] = -1
        longest = (
            128 if page else 2**31 - 1
        )  # beyond the capacity is the capacity; the table has an unused page
        inputs[COMP_LEN] = torch.tensor([128, longest if full else 77], dtype=torch.int32, device=device)
        out, lse = run(case, tuple(inputs))
        assert torch.equal(out[0], clean[0][0])
        assert torch.equal(lse[0], clean[1][0])
        assert torch.equal(out[1, :4], clean[0][1, :4]) is full
    inputs[COMP_LEN] = torch.tensor([128, -5], dtype=torch.int32, device=device)
    empty = torch.tensor([128, 0], dtype=torch.int32, device=device)
    expected = run(case, (*inputs[:COMP_LEN], empty, *inputs[COMP_LEN + 1 :]))
    for a, e in zip(run(case, tuple(inputs)), expected, strict=True):
        assert torch.equal(a, e), "below 0 is 0"


@pytest.mark.parametrize("part", ["k_scales", "v_scales", "k_win", "v_win", "q"])
def test_a_nan_stays_with_its_heads(part, device):
    case = DecodeCase(name="nan", dtype=torch.float16, B=2, H=6, H_kv=3, S=40, W=5)
    inputs = list(case.make_inputs(device, seed=8))
    clean, clean_lse = run(case, tuple(inputs))
    place = {"k_scales": K_SCALES, "v_scales": V_SCALES, "k_win": K_WIN, "v_win": V_WIN, "q": 0}[part]
    inputs[place][1, 2, 3] = math.nan
    out, lse = run(case, tuple(inputs))
    touched = torch.zeros(2, 6, dtype=torch.bool, device=device)
    touched[1, 2 if part == "q" else slice(4, 6)] = True
    assert torch.equal(out[~touched], clean[~touched])
    assert torch.equal(lse[~touched], clean_lse[~touched])
    if part.startswith("v"):
        assert torch.equal(lse, clean_lse)
        kept = torch.ones(128, dtype=torch.bool, device=device)
        if part == "v_scales":
            kept = reference.unpack_bits(inputs[V_BITMAP])[1, 2, 3]
        assert out[1, 4:, kept].isnan().all()
    else:
        assert out[touched].isnan().all()
        assert lse[touched].isnan().all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("negative", ["some", "all"])
def test_scales_of_either_sign(negative, bits, device):
    """kv_compress makes none below zero, but any bytes are rows; -inf poisons the channels that its row keeps."""
    case = DecodeCase(name="sign", dtype=torch.float16, B=2, S=90, k_bits=bits, v_bits=bits)
    inputs = list(case.make_inputs(device, seed=13))
    for place in (K_SCALES, V_SCALES):
        signs = torch.where(torch.arange(90, device=device) % 3 == 0, 1, -1) if negative == "some" else -1
        inputs[place] = inputs[place] * signs
    assert_decode(case, run(case, tuple(inputs)), tuple(inputs))
    inputs[V_SCALES][1, 0, 5] = -math.inf
    out, _ = run(case, tuple(inputs))
    kept = reference.unpack_bits(inputs[V_BITMAP])[1, 0, 5]
    group = case.H // case.H_kv
    assert torch.equal(out.isfinite()[1, :group], ~kept.expand(group, -1))
    assert out[0].isfinite().all()
    assert out[1, group:].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("score", "expected"), [(-math.inf, 0.0), (math.inf, math.nan)])
def test_infinite_scores(score, expected, dtype, device):
    case = DecodeCase(name="infinite", dtype=dtype, S=40, W=3, comp_len=(0, 40))
    inputs = list(case.make_inputs(device, seed=14))
    inputs[0][0] = inputs[0][0].abs() + 1
    inputs[K_WIN][0, ..., 7] = score
    out, lse = run(case, tuple(inputs))
    assert_decode(case, (out, lse), tuple(inputs))
    torch.testing.assert_close(out[0], torch.full_like(out[0], expected), equal_nan=True)
    assert (lse[0].isnan() if score > 0 else lse[0] == score).all()
    assert out[1].isfinite().all()


def test_sequences_do_not_depend_on_their_batch_with_a_fixed_split(device):
    case = DecodeCase(
        name="batch", dtype=torch.bfloat16, B=3, H=8, S=1100, W=7, comp_len=(1100, 300, 5), split_size=256
    )
    inputs = case.make_inputs(device, seed=9)
    out, lse = run(case, inputs)
    for i in range(3):
        one = tuple(x[i : i + 1].contiguous() if isinstance(x, Tensor) else x for x in inputs)
        alone = op(*one, **case.options())
        assert torch.equal(alone[0], out[i : i + 1])
        assert torch.equal(alone[1], lse[i : i + 1])


@pytest.mark.parametrize("page", [1, 24, 64, 512])
def test_pages_do_not_matter(page, device):
    """Large pages use the kernels of rows without pages; small ones have kernels of their own on CUDA."""
    case = DecodeCase(name="pages", dtype=torch.float16, S=512, split_size=256, comp_len=(512, 77))
    inputs = case.make_inputs(device, seed=10)
    plain, paged = run(case, inputs), replace(case, page=page)
    actual = run(paged, paged.make_inputs(device, seed=10))
    if device == "cpu" or page % 64 == 0:
        assert torch.equal(actual[0], plain[0])
        assert torch.equal(actual[1], plain[1])
    assert_decode(case, actual, inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [0, 2])
def test_several_queries_are_single_ones_of_shorter_windows(dtype, group, device):
    case = DecodeCase(
        name="single", dtype=dtype, queries=11, W=70, S=90, H=12, B=3, split_size=256, hadamard_group=group,
        comp_len=(90, 0, 7), win_len=(70, 40, 3),
    )  # fmt: skip
    inputs = list(case.make_inputs(device, seed=15))
    q, lengths = inputs[0], inputs[WIN_LEN]
    out, lse = run(case, tuple(inputs))
    for i in range(case.queries):
        inputs[0], inputs[WIN_LEN] = q[:, :, i], (lengths - (case.queries - 1 - i)).clamp(min=0)
        one, one_lse = run(case, tuple(inputs))
        if device == "cpu":  # one kernel, whose rows do not know of each other
            assert torch.equal(out[:, :, i], one)
            assert torch.equal(lse[:, :, i], one_lse)
        assert_close_spec(out[:, :, i], one.double(), *decode_tolerance(q, 4.0))
        assert_close_spec(lse[:, :, i], one_lse.double(), 1e-4, 2e-3)


def test_parts_merge_as_softmax_does(device):
    """Attention over both parts follows from that over each one and their lse."""
    case = DecodeCase(name="merge", dtype=torch.float32, S=60, W=12)
    inputs = list(case.make_inputs(device, seed=11))
    both, lse = run(case, tuple(inputs))
    zeros = torch.zeros(2, dtype=torch.int32, device=device)
    no_window, no_rows = list(inputs), list(inputs)
    no_window[WIN_LEN], no_rows[COMP_LEN] = zeros, zeros
    (a, lse_a), (b, lse_b) = run(case, tuple(no_window)), run(case, tuple(no_rows))
    weight = torch.sigmoid(lse_a.double() - lse_b.double())[..., None]
    assert_close_spec(both, weight * a.double() + (1 - weight) * b.double(), 1e-4, 1e-5)
    assert_close_spec(lse, torch.logaddexp(lse_a.double(), lse_b.double()), 1e-6, 1e-5)


def test_large_scores_do_not_overflow(device):
    case = DecodeCase(name="large", dtype=torch.float32, scale=300.0)
    inputs = case.make_inputs(device, seed=12)
    out, lse = run(case, inputs)
    assert out.isfinite().all()
    assert lse.isfinite().all()
    expected, expected_lse = reference.kv_decode_attention(*inputs, **case.options())
    assert_close_spec(lse, expected_lse, 1e-5, 1e-3)
    assert_close_spec(out, expected, 0.0, 2e-2)  # scores of some thousands carry an fp32 error of 1e-3


class Steps(DecodeCase):
    """Scores from 2^27 on in powers of two, where floats lie 16 apart; each is one such step above those before."""

    def dense(self, device: str | torch.device, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().dense(device, seed)
        one_step_apart(q, k, dim=2, run=8)
        return q, k, v


@pytest.mark.parametrize("v_bits", [16, 8, 4])
def test_scores_one_step_beyond_another(v_bits, device):
    """A maximum that stays one step behind leaves weights of 2^16, which is beyond float16."""
    case = Steps(name="steps", dtype=torch.float16, scale=STEP_SCALE, k_bits=16, v_bits=v_bits, W=0)
    inputs = case.make_inputs(device, seed=14)
    out, lse = run(case, inputs)
    assert lse.isfinite().all()
    expected, _ = reference.kv_decode_attention(*inputs, **case.options())
    assert_close_spec(out, expected, 2e-3, 2e-3)


def test_any_layout_of_the_window_and_the_query(device):
    case = DecodeCase(name="strides", dtype=torch.float16)
    inputs = list(case.make_inputs(device, seed=13))
    clean = run(case, tuple(inputs))
    for place in (0, K_WIN, V_WIN):
        inputs[place] = torch.cat((inputs[place], inputs[place]), -1)[..., :128]
    inputs[K_WIN] = inputs[K_WIN].transpose(1, 2).contiguous().transpose(1, 2)
    for place in range(1, 7):
        inputs[place] = torch.cat((inputs[place], inputs[place]), 2)[:, :, : inputs[place].shape[2]]
    out, lse = run(case, tuple(inputs))
    assert torch.equal(out, clean[0])
    assert torch.equal(lse, clean[1])


# ---- Python layer, gradients, compilation


def test_python_function_and_its_other_name(device):
    for name in ("paged_hadamard", "four_d", "no_window"):
        case = next(c for c in DECODE_CASES if c.name == name)
        inputs = case.make_inputs(device)
        expected = run(case, inputs)
        for function in (htree_ops.kv_decode_attention, htree_ops.compat.mustafar_attention):
            for a, e in zip(function(*inputs, **case.options()), expected, strict=True):
                assert torch.equal(a, e)


def test_there_is_no_gradient(device):
    case = DecodeCase(name="gradient", dtype=torch.float32)
    q, *others = case.make_inputs(device)
    out, _ = op(q.requires_grad_(), *others, **case.options())
    with pytest.raises(RuntimeError, match="not implemented"):
        out.sum().backward()


@pytest.mark.parametrize("case", DECODE_CASES[::9], ids=case_id)
def test_opcheck(case, device):
    opcheck(op.default, case.make_inputs(device), case.options())


def step(
    x: Tensor, rows: tuple[Tensor, ...], lengths: tuple[Tensor, Tensor], group: int
) -> tuple[Tensor, Tensor]:
    """One decode step whose query and window are views of one projection."""
    q, k_win, v_win = x.split((8, 2, 2), dim=2)
    windows = (k_win.transpose(1, 2), v_win.transpose(1, 2))
    return htree_ops.kv_decode_attention(
        q[:, -1], *rows, *windows, *lengths, k_keep=39, v_keep=39, k_bits=4, v_bits=8, hadamard_group=group
    )


@pytest.mark.parametrize(("group", "dynamic", "backend"), [(0, False, "aot_eager"), (2, True, "inductor")])
def test_compile_with_views(group, dynamic, backend, device):
    torch.compiler.reset()  # the limit of recompilations counts those of other tests
    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=dynamic)
    for length in (5, 9):
        x = normal((2, length, 12, 64), torch.float16, device, length)
        k, v = rows_with_outliers((2, 2, 2, 30 + length, 64), torch.float16, device, length)
        rows = (*ops.kv_compress(k, 39, 4), *ops.kv_compress(v, 39, 8))
        lengths = tuple(torch.tensor(n, dtype=torch.int32, device=device) for n in ((3, 33), (1, length)))
        for a, e in zip(compiled(x, rows, lengths, group), step(x, rows, lengths, group), strict=True):
            assert torch.equal(a, e)
            assert a.stride() == e.stride()


def test_new_lengths_do_not_recompile():
    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    for batch, length in ((3, 5), (4, 9), (6, 40), (5, 23)):  # a first size of 2 would be taken for H_kv
        x = torch.randn(batch, length, 12, 64).half()
        k, v = torch.randn(2, batch, 2, 30 + length, 64).half()
        rows = (*ops.kv_compress(k, 39, 4), *ops.kv_compress(v, 39, 8))
        lengths = tuple(torch.full((batch,), n, dtype=torch.int32) for n in (30, length))
        compiled(x, rows, lengths, 0)
    assert counter.frame_count == 1
