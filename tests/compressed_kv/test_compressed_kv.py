"""kv_prune, kv_compress and kv_decompress against the reference packer, bit for bit (docs/semantics §4.4, §4.5)."""

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import htree_ops
import htree_ops.compat
from htree_ops.ops.compressed_kv import CompressedKV
from htree_ops.reference import compressed_kv as reference
from tests.support.cases import case_id, normal
from tests.support.compressed_kv_cases import (
    COMPRESS_CASES,
    DTYPES,
    LAYOUT_CASES,
    assert_rows_within_bounds,
    rows_with_outliers,
)
from tests.support.devices import poisoned_memory
from tests.support.instruction_sets import ISAS, run_with
from tests.support.layouts import LAYOUTS
from tests.support.opcheck import opcheck

ops = torch.ops.htree


def assert_same_bits(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for name, a, e in zip(CompressedKV._fields, actual, expected, strict=True):
        assert a.dtype == e.dtype
        assert a.shape == e.shape, name
        assert a.is_contiguous()
        raw = torch.int16 if a.is_floating_point() else a.dtype  # NaN has one pattern
        assert torch.equal(a.view(raw), e.view(raw).to(a.device)), f"{name} differs"


def bits_of(x: Tensor) -> Tensor:
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])


@pytest.mark.parametrize("case", [*COMPRESS_CASES, *LAYOUT_CASES], ids=case_id)
def test_every_byte_and_its_decoding(case, device, nan_memory):
    x, keep, bits, weight = case.make_inputs(device)
    rows = ops.kv_compress(x, keep, bits, weight)
    assert_same_bits(rows, reference.kv_compress(x, keep, bits, weight))
    pruned, bitmap = ops.kv_prune(x, keep, weight)
    expected, expected_bitmap = reference.kv_prune(x, keep, weight)
    assert torch.equal(bitmap, expected_bitmap)
    assert torch.equal(bits_of(pruned), bits_of(expected.contiguous()))
    width = x.shape[-1]
    for dtype in (x.dtype,) if bits == 16 else DTYPES:
        decoded = ops.kv_decompress(*rows, width, keep, bits, dtype)
        assert decoded.is_contiguous()
        # the product of a code and a scale is exact in fp32, so one rounding leaves one answer
        assert torch.equal(decoded, reference.kv_decompress(*rows, width, keep, bits, dtype))
    if weight is None:
        exact = decoded if bits == 16 else ops.kv_decompress(*rows, width, keep, bits, torch.float32)
        assert_rows_within_bounds(x, exact, rows[0], rows[2], bits)


@given(
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 9)),
    width=st.sampled_from([64, 128, 192, 256, 320, 512]),
    fraction=st.floats(0, 1),
    bits=st.sampled_from([16, 8, 4]),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(sorted(LAYOUTS)),
    weighted=st.booleans(),
    power=st.integers(-30, 20),
    steps=st.sampled_from([0, 1, 3]),
    seed=st.integers(0, 2**31 - 1),
)
def test_property_every_byte(
    device, sizes, width, fraction, bits, dtype, layout, weighted, power, steps, seed
):
    """Inputs from subnormal scales to saturated ones, some with so few values that ties decide."""
    if bits == 16 and dtype == torch.float32:
        dtype = torch.float16
    keep = max(1, round(fraction * width))
    x = rows_with_outliers((*sizes, width), torch.float32, device, seed)
    x = (x * steps).round() if steps else x
    x = (x * 2.0**power).clamp(-6e4, 6e4).to(dtype)
    weight = normal((*sizes[:2], width), torch.float32, device, seed + 1).abs() if weighted else None
    with poisoned_memory():
        rows = ops.kv_compress(LAYOUTS[layout](x), keep, bits, weight)
    assert_same_bits(rows, reference.kv_compress(x, keep, bits, weight))
    assert (reference.unpack_bits(rows[0]).sum(-1) == keep).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_nan", [2, 3, 64])
def test_more_nan_than_stay(num_nan, dtype, device, nan_memory):
    """Exactly `keep` bits are set, equals go by channel, zeros follow the values, other rows do not change."""
    x = normal((1, 2, 3, 64), torch.float32, device, seed=1).to(dtype)
    x[0, 1, 1, 5 : 5 + num_nan] = math.nan
    x[0, 1, 1, 4] = math.inf
    for keep in (1, 3, 5):
        for weight in (None, torch.ones(1, 2, 64, device=device)):
            _, bitmap = ops.kv_prune(x, keep, weight)
            assert (reference.unpack_bits(bitmap).sum(-1) == keep).all()
            assert torch.equal(bitmap, reference.kv_prune(x, keep, weight)[1])
            for bits in (16, 8, 4):
                if bits == 16 and dtype == torch.float32:
                    continue
                rows = ops.kv_compress(x, keep, bits, weight)
                assert_same_bits(rows, reference.kv_compress(x, keep, bits, weight))


@pytest.mark.parametrize("isa", ISAS)
def test_more_nan_than_stay_for_every_instruction_set(isa):
    script = (
        "import torch, htree_ops\n"
        "for dtype in (torch.float16, torch.bfloat16, torch.float32):\n"
        "    x = torch.full((1, 1, 2, 128), float('nan'), dtype=dtype)\n"
        "    x[0, 0, 1, :100] = 1.0\n"
        "    bitmap = htree_ops.ops.compressed_kv.kv_prune(x, 3)[1]\n"
        "    assert bitmap.tolist() == [[[[7, 0], [0, 7 << 36]]]], (dtype, bitmap)\n"
    )
    ran = run_with(isa, script)
    assert ran.returncode == 0, ran.stderr


SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0, 65504.0, 3e38, 2.0**-24, 1e-40)


@given(
    keep=st.integers(1, 64),
    bits=st.sampled_from([8, 4]),
    places=st.lists(st.tuples(st.integers(0, 63), st.sampled_from(SPECIAL)), max_size=70),
    seed=st.integers(0, 2**31 - 1),
    dtype=st.sampled_from(DTYPES),
)
def test_property_special_values_stay_in_their_row(device, keep, bits, places, seed, dtype):
    x = normal((1, 2, 3, 64), torch.float32, device, seed)
    clean = ops.kv_compress(x.to(dtype), keep, bits)
    for channel, value in places:
        x[0, 1, 1, channel] = value
    rows = ops.kv_compress(x.to(dtype), keep, bits)
    assert_same_bits(rows, reference.kv_compress(x.to(dtype), keep, bits))
    others = torch.ones(1, 2, 3, dtype=torch.bool)
    others[0, 1, 1] = False
    for a, e in zip(rows, clean, strict=True):
        assert torch.equal(a[others], e[others])
    decoded = ops.kv_decompress(*rows, 64, keep, bits, torch.float32)[0, 1, 1]
    kept = reference.unpack_bits(rows[0])[0, 1, 1]
    assert not decoded[~kept].any()
    if not x.to(dtype)[0, 1, 1][kept].isfinite().all():
        assert decoded[kept].isnan().all()
    else:
        assert decoded.isfinite().all()


def test_nan_is_kept_before_infinity_and_ties_go_to_the_lower_channel(device):
    x = torch.full((1, 1, 1, 64), 1.0, device=device)
    x[..., 40], x[..., 50], x[..., 60] = math.inf, math.nan, -math.inf
    for keep, expected in ((1, {50}), (2, {40, 50}), (3, {40, 50, 60}), (5, {0, 1, 40, 50, 60})):
        _, bitmap = ops.kv_prune(x, keep)
        assert set(reference.unpack_bits(bitmap).flatten().nonzero().flatten().tolist()) == expected
    weight = torch.ones(1, 1, 64, device=device)
    weight[..., 40] = 0.0  # 0 * infinity is NaN
    weight[..., 7] = 2.0
    _, bitmap = ops.kv_prune(x, 3, weight)
    assert set(reference.unpack_bits(bitmap).flatten().nonzero().flatten().tolist()) == {40, 50, 60}


def test_a_decoded_row_packs_to_itself(device):
    """Compressing the decoded values gives the same codes, as long as the scale is not subnormal."""
    x = rows_with_outliers((2, 2, 50, 128), torch.float32, device, seed=3)
    for bits in (8, 4):
        rows = ops.kv_compress(x, 128, bits)
        decoded = ops.kv_decompress(*rows, 128, 128, bits, torch.float32)
        assert_same_bits(ops.kv_compress(decoded, 128, bits), rows)


def test_rows_do_not_depend_on_their_neighbours(device):
    x = rows_with_outliers((3, 4, 70, 128), torch.bfloat16, device, seed=4)
    weight = normal((3, 4, 128), torch.float32, device, seed=5).abs()
    whole = ops.kv_compress(x, 39, 4, weight)
    alone = ops.kv_compress(x[1:2, 2:3, 33:34], 39, 4, weight[1:2, 2:3])
    for part, one in zip(whole, alone, strict=True):
        assert torch.equal(part[1:2, 2:3, 33:34], one)


def test_mutated_bitmaps_stay_in_bounds(device):
    """A bitmap that no compression writes: nothing outside its row is read, other rows decode as before."""
    x = normal((1, 2, 8, 128), torch.float16, device, seed=6)
    for bits, keep in ((16, 3), (8, 5), (4, 39)):
        rows = CompressedKV(*(t.clone() for t in ops.kv_compress(x, keep, bits)))
        before = ops.kv_decompress(*rows, 128, keep, bits, torch.float16)
        rows.bitmap[0, 1, 3] = -1
        rows.bitmap[0, 0, 0] = 0
        after = ops.kv_decompress(*rows, 128, keep, bits, torch.float16)
        assert not after[0, 0, 0].any()
        others = torch.ones(1, 2, 8, dtype=torch.bool)
        others[0, 1, 3] = others[0, 0, 0] = False
        assert torch.equal(after[others], before[others])
        own = before[0, 1, 3].unique()
        assert torch.isin(after[0, 1, 3], own).all(), "a value that the row does not hold"


# ---- Python layer, gradients, compilation


def test_python_functions_and_names(device):
    x = normal((2, 2, 5, 64), torch.float16, device, seed=7)
    weight = normal((2, 2, 64), torch.float32, device, seed=8).abs()
    rows = htree_ops.kv_compress(x, 20, 4, weight)
    assert isinstance(rows, CompressedKV)
    assert_same_bits(rows, ops.kv_compress(x, 20, 4, weight))
    assert torch.equal(rows.bitmap, htree_ops.ops.compressed_kv.kv_prune(x, 20, weight)[1])
    assert_same_bits(htree_ops.compat.convert_key_batched_quant(x, 20), ops.kv_compress(x, 20, 8))
    decoded = htree_ops.kv_decompress(*rows, 64, 20, 4)
    assert decoded.dtype == torch.float16
    assert torch.equal(decoded, ops.kv_decompress(*rows, 64, 20, 4, torch.float16))
    grouped = htree_ops.compat.apply_grouped_hadamard(x, 2)
    assert torch.equal(grouped, htree_ops.grouped_hadamard(x, 2))
    cos, sin = torch.ops.htree.rope_cache(9, 64, device=device)
    positions = torch.tensor([0, 3, 8, 1, 2], device=device)
    rotated = htree_ops.compat.apply_rotary_pos_emb_q(x, cos, sin, positions)
    expected = torch.ops.htree.rope(x.transpose(1, 2).contiguous(), cos, sin, positions).transpose(1, 2)
    assert torch.equal(rotated, expected)
    assert torch.equal(htree_ops.compat.apply_rotary_pos_emb_k(x, cos, sin, positions), expected)
    assert torch.equal(rotated[:, :, 0], x[:, :, 0])  # position 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rotary_positions_by_the_tables_of_transformers(dtype, device):
    """A row for each token: of one table for all sequences, or of one for each."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    x = normal((2, 3, 5, 64), dtype, device, seed=7)
    angle = normal((2, 5, 32), torch.float32, device, seed=8, scale=3.0)
    for angles in (angle, angle[:1]):
        tables = (
            torch.cat((angles, angles), -1).cos().to(dtype),
            torch.cat((angles, angles), -1).sin().to(dtype),
        )
        expected = llama.apply_rotary_pos_emb(x.float(), x.float(), *(t.float() for t in tables))[0].to(dtype)
        for columns in (64, 32):
            given = [t[..., :columns] for t in tables]
            for rotate in (htree_ops.compat.apply_rotary_pos_emb_q, htree_ops.compat.apply_rotary_pos_emb_k):
                torch.testing.assert_close(rotate(x, *given), expected)
        compiled = torch.compile(htree_ops.compat.apply_rotary_pos_emb_q, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x, *tables), htree_ops.compat.apply_rotary_pos_emb_q(x, *tables))
    leaf = x.float().requires_grad_()
    cos, sin = (t.float() for t in tables)
    ours = torch.autograd.grad(htree_ops.compat.apply_rotary_pos_emb_q(leaf, cos, sin).square().sum(), leaf)
    theirs = torch.autograd.grad(llama.apply_rotary_pos_emb(leaf, leaf, cos, sin)[0].square().sum(), leaf)
    torch.testing.assert_close(ours, theirs)


def test_there_is_no_gradient(device):
    x = torch.randn(1, 1, 2, 64, device=device, requires_grad=True)
    pruned, _ = ops.kv_prune(x, 20)
    with pytest.raises(RuntimeError, match="not implemented"):
        pruned.sum().backward()


OPCHECK_CASES = [c for c in [*COMPRESS_CASES, *LAYOUT_CASES] if math.prod(c.shape) < 6000][::13]


@pytest.mark.parametrize("case", OPCHECK_CASES, ids=case_id)
def test_opcheck(case, device):
    x, keep, bits, weight = case.make_inputs(device)
    opcheck(ops.kv_prune.default, (x, keep, weight))
    opcheck(ops.kv_compress.default, (x, keep, bits, weight))
    rows = ops.kv_compress(x, keep, bits, weight)
    opcheck(ops.kv_decompress.default, (*rows, x.shape[-1], keep, bits, x.dtype))


def round_trip(x: Tensor, weight: Tensor | None, bits: int) -> tuple[Any, ...]:
    """Compression and decompression of views, through the Python functions."""
    heads = x.transpose(1, 2)[:, :, 1:]
    rows = htree_ops.kv_compress(heads, 39, bits, weight)
    pruned, bitmap = htree_ops.ops.compressed_kv.kv_prune(heads, 39, weight)
    return (*rows, htree_ops.kv_decompress(*rows, 128, 39, bits, torch.float16), pruned, bitmap)


@pytest.mark.parametrize(
    ("bits", "dynamic", "backend"),
    [(16, False, "aot_eager"), (8, True, "inductor"), (4, False, "aot_eager"), (4, True, "aot_eager")],
)
def test_compile_with_views(bits, dynamic, backend, device):
    torch.compiler.reset()  # the limit of recompilations counts those of other tests
    compiled = torch.compile(round_trip, backend=backend, fullgraph=True, dynamic=dynamic)
    for length in (6, 9):
        x = normal((2, length, 3, 128), torch.float16, device, length)
        weight = normal((2, 3, 128), torch.float32, device, seed=1).abs()
        for given_weight in (None, weight):
            for a, e in zip(compiled(x, given_weight, bits), round_trip(x, given_weight, bits), strict=True):
                assert torch.equal(a, e)
                assert a.stride() == e.stride()


def test_new_lengths_do_not_recompile():
    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(round_trip, backend=counter, fullgraph=True, dynamic=True)
    for batch, length in ((2, 6), (3, 9), (4, 40), (5, 23)):
        compiled(torch.randn(batch, length, 3, 128).half(), None, 8)
    assert counter.frame_count == 1


def test_export_keeps_one_node_each(device):
    class Compress(torch.nn.Module):
        def forward(self, x):
            return tuple(htree_ops.kv_compress(x, 20, 4))

    length = torch.export.Dim("length", min=2, max=100)
    x = torch.randn(2, 3, 6, 64, device=device)
    program = torch.export.export(Compress(), (x,), dynamic_shapes={"x": {2: length}})
    calls = [n.target for n in program.graph.nodes if n.op == "call_function" and "htree" in str(n.target)]
    assert calls == [ops.kv_compress.default]
    longer = torch.randn(2, 3, 11, 64, device=device)
    assert_same_bits(program.module()(longer), ops.kv_compress(longer, 20, 4))
