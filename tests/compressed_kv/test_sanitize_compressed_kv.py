"""Every CUDA kernel of the compressed_kv family at a small size, for compute-sanitizer (`make sanitize`)."""

import os

import pytest
import torch
from torch import Tensor

from htree_ops.reference import compressed_kv as reference
from tests.support.compressed_kv_cases import DecodeCase, assert_decode, rows_with_outliers

pytestmark = pytest.mark.gpu

op = torch.ops.htree
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [64, 128, 192, 256, 320, 512])
def test_rows(width, dtype):
    x = rows_with_outliers((2, 3, 7, width), dtype, "cuda", seed=width)
    weight = torch.rand(2, 3, width, device="cuda")
    for bits in (4, 8, 16) if dtype != torch.float32 else (4, 8):
        for w in (None, weight):
            rows = op.kv_compress(x, width // 3, bits, w)
            for actual, expected in zip(rows, reference.kv_compress(x, width // 3, bits, w), strict=True):
                assert torch.equal(actual, expected)
            op.kv_decompress(*rows, width, width // 3, bits, dtype)
    pruned, bitmap = op.kv_prune(x, 5, weight)
    assert torch.equal(pruned, reference.kv_prune(x, 5, weight)[0])
    assert bitmap.shape == (2, 3, 7, width // 64)


def case_of(width: int, k_bits: int, v_bits: int, dtype: torch.dtype, **sizes: object) -> DecodeCase:
    defaults: dict[str, object] = {
        "B": 2, "H": 6, "H_kv": 2, "S": 131, "W": 5, "D": width, "k_keep": 29, "v_keep": 33, "comp_len": (131, 20)
    }  # fmt: skip
    fields = {**defaults, **sizes}
    return DecodeCase(name="case", dtype=dtype, k_bits=k_bits, v_bits=v_bits, **fields)


CASES = [
    case_of(width, k_bits, v_bits, dtype)
    for width in (64, 128, 192, 256)
    for k_bits in (4, 8, 16)
    for v_bits in (4, 8, 16)
    for dtype in (torch.float16, torch.bfloat16)
] + [
    case_of(128, 4, 8, torch.float32),
    case_of(256, 16, 16, torch.float32, hadamard_group=2),
    case_of(64, 4, 4, torch.float16, hadamard_group=1),
    *(
        case_of(width, 8, 4, torch.float16, V=value_width, queries=3)
        for width, value_width in ((320, 320), (512, 64), (192, 128), (448, 512))
    ),
    case_of(128, 8, 4, torch.float16, page=16),
    case_of(128, 8, 4, torch.float16, page=5),
    case_of(128, 4, 16, torch.bfloat16, H=24, split_size=32),
    # A single warp, with values in runs of chunks.
    case_of(128, 16, 16, torch.bfloat16, k_keep=64, v_keep=64, split_size=16),
    # Enough tiles that warps copy the next one while they attend, also with an odd number of scales.
    *(
        case_of(128, bits, bits, torch.float16, B=1, H=4, H_kv=1, S=S, comp_len=(S,), split_size=2048)
        for S, bits in ((1700, 4), (1700, 8), (1700, 16), (1701, 4), (1701, 8))
    ),
    # The last head's rows begin inside a chunk of scales, so that the last full tile has a chunk that ends behind them.
    *(case_of(128, bits, bits, torch.float16, B=1, S=34, comp_len=(34,), split_size=64) for bits in (4, 8)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.shapes}-{c.dtype}")
def test_decode(case):
    inputs = case.make_inputs("cuda")
    assert_decode(case, op.kv_decode_attention(*inputs, **case.options()), inputs)


def spoiled(x: Tensor, seed: int) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    noise = torch.randint(0, 256, (x.numel() * x.element_size(),), generator=generator, device="cuda")
    return noise.to(torch.uint8).view(x.dtype).view(x.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("keep", [1, 39, 128])
def test_mutated_bytes_stay_in_bounds(keep, bits, dtype):
    """With random bytes, full bitmaps, wrong pages and lengths every read stays inside the tensors.

    A bitmap with more bits than its row has values makes a warp read what the next warp is still copying. What
    comes out is unspecified either way, but racecheck reports it: under that tool the bitmaps stay as they are.
    """
    bitmaps = () if os.environ.get("HTREE_SANITIZER") == "racecheck" else (1, 4)
    case = case_of(128, bits, bits, dtype, k_keep=keep, v_keep=keep, page=16, S=128, comp_len=(128, 16))
    inputs = list(case.make_inputs("cuda"))
    expected_shape = inputs[0].shape
    for round_number in range(2):
        for i in (*bitmaps, 2, 3, 5, 6):
            if inputs[i].numel():
                inputs[i] = spoiled(inputs[i], seed=i)
        if round_number == 1:
            for i in bitmaps:
                inputs[i].fill_(-1)  # every channel kept, whatever keep says
        inputs[9] = torch.tensor([2**31 - 1, -5], dtype=torch.int32, device="cuda")
        inputs[12] = torch.full_like(inputs[12], 2**31 - 1)
        inputs[12][1:] = -(2**31)
        out, lse = op.kv_decode_attention(*inputs, **case.options())
        torch.cuda.synchronize()
        assert out.shape == expected_shape
        assert lse.shape == expected_shape[:2]
        decoded = op.kv_decompress(*inputs[1:4], 128, keep, bits, torch.float16)
        torch.cuda.synchronize()
        assert decoded.shape[-1] == 128
