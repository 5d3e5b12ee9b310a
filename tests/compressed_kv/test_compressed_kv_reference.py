"""The reference packer against one in plain Python numbers, byte by byte, and the figures of §4.4 and §4.5."""

import math
import struct

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from htree_ops.ops.compressed_kv import format as row_format
from htree_ops.ops.compressed_kv.storage import RowFormat
from htree_ops.reference import compressed_kv as reference
from tests.support.cases import case_id
from tests.support.compressed_kv_cases import COMPRESS_CASES, assert_rows_within_bounds


def as_float(x: float) -> float:
    """The float32 nearest to x. For a quotient of two float32 this is what their division gives."""
    return struct.unpack("<f", struct.pack("<f", x))[0]


def half_bits(x: float) -> int:
    """The bits of the float16 nearest to x, at most 65504."""
    if math.isnan(x):
        return 0x7E00
    try:
        return struct.unpack("<H", struct.pack("<e", x))[0]
    except OverflowError:
        return 0x7BFF


def pack_row(row: list[float], keep: int, bits: int, weight: list[float]) -> tuple[list[int], bytes, int]:
    """(words, values, scale bits) of one row of float32 values; 8 or 4 bits (docs/semantics §4.4, §4.5)."""

    def rank(channel: int) -> tuple[bool, float, int]:
        importance = as_float(abs(row[channel]) * weight[channel])
        return (not math.isnan(importance), 0.0 if math.isnan(importance) else -importance, channel)

    kept = sorted(sorted(range(len(row)), key=rank)[:keep])
    words = [0] * (len(row) // 64)
    for channel in kept:
        words[channel // 64] |= 1 << channel % 64
    signed = [word - (1 << 64) if word >> 63 else word for word in words]
    largest_code = 127 if bits == 8 else 7
    values = [row[channel] for channel in kept]
    if all(map(math.isfinite, values)):
        largest = max(map(abs, values))
        scale_bits = half_bits(as_float(largest / largest_code))
        if largest > 0 and scale_bits == 0:
            scale_bits = 1
        scale = struct.unpack("<e", struct.pack("<H", scale_bits))[0]
        codes = [round(as_float(x / scale)) if scale else 0 for x in values]
        codes = [max(-largest_code, min(largest_code, code)) for code in codes]
    else:
        scale_bits, codes = 0x7E00, [0] * keep
    if bits == 8:
        packed = bytes(code & 0xFF for code in codes)
        return signed, packed + bytes(-len(packed) % 4), scale_bits
    nibbles = [code + 8 for code in codes]
    nibbles += [8] * (-len(nibbles) % 8)
    return signed, bytes(a | b << 4 for a, b in zip(nibbles[::2], nibbles[1::2], strict=True)), scale_bits


def assert_packed_alike(x: torch.Tensor, keep: int, bits: int, weight: torch.Tensor | None) -> None:
    bitmap, values, scales = reference.kv_compress(x, keep, bits, weight)
    for b in range(x.shape[0]):
        for h in range(x.shape[1]):
            weights = [1.0] * x.shape[3] if weight is None else weight[b, h].float().tolist()
            for s in range(x.shape[2]):
                row = x[b, h, s].float().tolist()
                words, packed, scale_bits = pack_row(row, keep, bits, weights)
                assert bitmap[b, h, s].tolist() == words
                assert bytes(values[b, h, s].tolist()) == packed
                assert int(scales[b, h, s].view(torch.int16)) & 0xFFFF == scale_bits


SMALL = [c for c in COMPRESS_CASES if c.bits != 16 and math.prod(c.shape[:3]) <= 100]


@pytest.mark.parametrize("case", SMALL, ids=case_id)
def test_two_packers_agree_on_every_byte(case):
    x, keep, bits, weight = case.make_inputs("cpu", seed=1)
    assert_packed_alike(x, keep, bits, weight)


numbers = st.floats(width=16) | st.floats(-4, 4, width=16) | st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0**-24])


@given(
    row=st.lists(numbers, min_size=64, max_size=64),
    weight=st.none() | st.lists(st.floats(0, 8, width=16), min_size=64, max_size=64),
    keep=st.integers(1, 64),
    bits=st.sampled_from([8, 4]),
)
def test_property_two_packers_agree_on_every_byte(row, weight, keep, bits):
    weights = None if weight is None else torch.tensor(weight)[None, None]
    assert_packed_alike(torch.tensor(row)[None, None, None], keep, bits, weights)


def test_a_row_by_hand():
    x = torch.zeros(1, 1, 1, 64)
    x[..., 5], x[..., 63], x[..., 2] = 12.7, -6.35, 0.1
    bitmap, values, scales = reference.kv_compress(x, 2, 8)
    assert bitmap.item() == -(1 << 63) + (1 << 5)
    scale = float(torch.tensor(0.1).half())
    assert scales.item() == scale
    assert values.flatten().tolist() == [127, 256 - round(6.35 / scale), 0, 0]
    bitmap, values, scales = reference.kv_compress(x, 3, 4)
    scale = float(torch.tensor(12.7 / 7).half())
    assert scales.item() == scale
    # codes of the channels 2, 5 and 63: 0, 7 and -3 or -4, as code + 8, the lower nibble first, then padding
    assert values.flatten().tolist() == [8 | 15 << 4, (round(-6.35 / scale) + 8) | 8 << 4, 0x88, 0x88]


@pytest.mark.parametrize(
    ("value", "bits"), [(math.nan, 0x7E00), (65519.0, 0x7BFF), (65520.0, 0x7BFF), (1e30, 0x7BFF)]
)
def test_the_halves_of_the_python_packer(value, bits):
    assert half_bits(value) == bits


@pytest.mark.parametrize("case", [c for c in COMPRESS_CASES if c.weight is None], ids=case_id)
def test_bounds(case):
    x, keep, bits, _ = case.make_inputs("cpu", seed=2)
    bitmap, values, scales = reference.kv_compress(x, keep, bits)
    rows = reference.kv_decompress(bitmap, values, scales, x.shape[-1], keep, bits, torch.float64, x.dtype)
    assert_rows_within_bounds(x, rows, bitmap, scales, bits)
    assert torch.equal(reference.unpack_bits(bitmap).sum(-1), torch.full(x.shape[:3], keep))


def test_sixteen_bits_keep_every_bit():
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).view(1, 2, 256, 128)
        bitmap, values, scales = reference.kv_compress(x, 128, 16)
        assert scales.shape == (1, 2, 0)
        assert torch.equal(values.view(torch.int16), x.view(torch.int16))
        assert (bitmap == -1).all()


# rows of the table of §4.5: width, kept channels at 50 and 70 %, bytes per element at 16, 8 and 4 bits
TABLE = {
    (64, 0.5): (32, 1.125, 0.656, 0.406),
    (64, 0.7): (20, 0.750, 0.469, 0.344),
    (128, 0.5): (64, 1.125, 0.641, 0.391),
    (128, 0.7): (39, 0.750, 0.453, 0.297),
    (256, 0.5): (128, 1.125, 0.633, 0.383),
    (256, 0.7): (77, 0.734, 0.445, 0.289),
}


@pytest.mark.parametrize(("width", "sparsity"), TABLE)
def test_bytes_per_element_are_those_of_the_page(width, sparsity):
    keep, *per_element = TABLE[width, sparsity]
    assert reference.num_kept(width, sparsity) == row_format.num_kept(width, sparsity) == keep
    for bits, expected in zip((16, 8, 4), per_element, strict=True):
        size = RowFormat(width, keep, bits).num_bytes()
        assert size / width == pytest.approx(expected, abs=6e-4)
        x = torch.zeros(1, 1, 1, width, dtype=torch.float16)
        assert size == sum(t.numel() * t.element_size() for t in reference.kv_compress(x, keep, bits))


@given(keep=st.integers(1, 256), bits=st.sampled_from([16, 8, 4]))
def test_property_row_bytes(keep, bits):
    size = reference.row_bytes(keep, bits)
    assert size == row_format.row_bytes(keep, bits) == math.ceil(math.ceil(keep * bits / 8) / 4) * 4


def test_attention_is_torchs():
    q, k, v = torch.randn(2, 6, 64), torch.randn(2, 3, 40, 64), torch.randn(2, 3, 40, 64)
    present = torch.rand(2, 40) < 0.7
    out, lse = reference.attention(q, k, v, present)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q[:, :, None].double(), k.double(), v.double(), attn_mask=present[:, None, None], enable_gqa=True
    )
    torch.testing.assert_close(out, expected[:, :, 0])
    scores = torch.einsum("bhd,bhsd->bhs", q.double(), k.double().repeat_interleave(2, 1)) / 8
    torch.testing.assert_close(lse, scores.masked_fill(~present[:, None], -math.inf).logsumexp(-1))
    out, lse = reference.attention(q, k, v, torch.zeros(2, 40, dtype=torch.bool))
    assert not out.any()
    assert (lse == -math.inf).all()


def test_the_weight_of_the_queries():
    q = torch.randn(2, 6, 40, 64)
    weight = reference.key_weight_from_queries(q, 3, 8)
    assert weight.shape == (2, 3, 64)
    expected = (q[1, 2, -8:, 5].abs().mean() + q[1, 3, -8:, 5].abs().mean()).double()
    torch.testing.assert_close(weight[1, 1, 5], expected, rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match=r"sparsity must be between 0 and 1, got 1\.5"):
        reference.num_kept(64, 1.5)
