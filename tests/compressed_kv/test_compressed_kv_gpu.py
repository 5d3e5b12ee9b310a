"""Compressed decode attention on the GPU at the sizes of real models: widths, splits, pages, streams, graphs, bytes."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import htree_ops  # noqa: F401
from tests.support.cases import case_id, normal
from tests.support.compressed_kv_cases import DecodeCase, assert_decode, decode_tolerance
from tests.support.graphs import assert_stream_and_graph, capture, kernels_of

pytestmark = pytest.mark.gpu

op = torch.ops.htree
HALVES = (torch.float16, torch.bfloat16)


def model(name: str, dtype: torch.dtype = torch.float16, **sizes: object) -> DecodeCase:
    """A case whose rows the op packs; other tests of the family compare its packing with the reference."""
    defaults: dict[str, object] = {"B": 2, "H": 8, "H_kv": 2, "S": 3000, "W": 33}
    return DecodeCase(name=name, dtype=dtype, packer=op.kv_compress, **{**defaults, **sizes})


def run(case: DecodeCase, inputs: tuple[object, ...]) -> tuple[Tensor, Tensor]:
    out, lse = op.kv_decode_attention(*inputs, **case.options())
    return out, lse


WIDTHS = [
    model(f"d{width}_{k_bits}_{v_bits}", dtype, D=width, k_bits=k_bits, v_bits=v_bits, k_keep=width * 3 // 10,
          v_keep=width // 2 + 1, S=1000)
    for width in (64, 128, 192, 256)
    for k_bits in (4, 8, 16)
    for v_bits in (4, 8, 16)
    for dtype in HALVES
]  # fmt: skip
SHAPES = [
    *(model(f"keep{keep}_{bits}", k_keep=keep, v_keep=keep, k_bits=bits, v_bits=bits, S=500)
      for bits in (4, 8, 16) for keep in (1, 2, 63, 127, 128)),
    *(model(f"group{group}_{bits}", H=2 * group, k_bits=bits, v_bits=bits)
      for bits in (4, 16) for group in (1, 3, 5, 8, 9, 16, 20)),
    *(model(f"tokens{tokens}", S=tokens, k_bits=4) for tokens in (1, 15, 16, 17, 31, 255, 256, 257)),
    *(model(f"odd{tokens}_d{width}", S=tokens, D=width, k_keep=19, v_keep=33, v_bits=4)
      for tokens in (301, 777) for width in (64, 128, 192, 256)),
    *(model(f"split{split}", split_size=split, comp_len=(3000, 1234)) for split in (1, 16, 272, 4096)),
    *(model(f"split16_runs_page{page}", split_size=16, page=page, k_bits=16, v_bits=16, k_keep=64,
            S=2992, comp_len=(2992, 1234)) for page in (0, 16)),
    *(model(f"page{page}", page=page, comp_len=(2999, 17), k_bits=4, v_bits=16) for page in (16, 48, 256)),
    model("many_heads", B=1, H=70_000, H_kv=70_000, S=17, W=3, D=64, k_keep=20, v_keep=20, k_bits=4),
    model("long", B=1, H=32, H_kv=8, S=40000, k_bits=4, v_bits=4),
    model("ragged", B=8, comp_len=(0, 1, 15, 16, 17, 1500, 2999, 3000), win_len=(0, 1, 33, 5, 0, 33, 2, 7)),
    model("window", W=300, S=0),
    *(model(f"queries{queries}_{bits}", queries=queries, k_bits=bits, v_bits=bits, win_len=(33, 5))
      for bits in (4, 8, 16) for queries in (2, 5, 33)),
    *(model(f"queries_d{width}", queries=7, D=width, k_keep=width // 2, v_keep=19, win_len=(33, 3), k_bits=4)
      for width in (64, 256)),
    *(model(f"general_d{width}_v{v}_{bits}", dtype, D=width, V=v, k_bits=bits, v_bits=24 - bits if bits != 4 else 4,
            k_keep=width * 2 // 3, v_keep=v - 1, S=700)
      for width, v, bits, dtype in (
          (192, 128, 8, torch.float16), (320, 320, 16, torch.bfloat16), (384, 384, 4, torch.float16),
          (448, 448, 8, torch.float16), (512, 512, 8, torch.bfloat16), (512, 64, 16, torch.float16),
          (64, 512, 4, torch.float16), (192, 192, 8, torch.float32), (320, 448, 8, torch.float32),
      )),
    model("general_transformed_512", D=512, V=256, k_keep=512, v_keep=100, hadamard_group=2),
    model("queries_group_of_3", H=6, queries=3, win_len=(20, 33)),
    model("queries_window", queries=9, W=300, S=100),
    model("queries_page", queries=9, page=24, comp_len=(2999, 17)),
    model("queries_float", torch.float32, queries=9, win_len=(33, 4)),
    model("queries_transformed", hadamard_group=2, k_keep=128, queries=9),
    model("transformed", hadamard_group=1, k_keep=128, k_bits=4),
    model("transformed_16", torch.bfloat16, hadamard_group=1, k_keep=128, k_bits=16),
]  # fmt: skip


@pytest.mark.parametrize("case", [*WIDTHS, *SHAPES], ids=case_id)
def test_against_float64(case, nan_memory):
    inputs = case.make_inputs("cuda")
    result = run(case, inputs)
    assert_decode(case, result, inputs)
    for first, second in zip(result, run(case, inputs), strict=True):
        assert torch.equal(first, second), "two runs must agree bit for bit"


def one_of(inputs: tuple[object, ...], b: int) -> tuple[object, ...]:
    return tuple(x[b : b + 1] if isinstance(x, Tensor) else x for x in inputs)


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_a_fixed_split_makes_sequences_independent_of_their_batch(bits):
    case = model("batch", B=5, comp_len=(3000, 5, 999, 2048, 1), k_bits=bits, v_bits=bits, split_size=512)
    inputs = case.make_inputs("cuda")
    out, lse = run(case, inputs)
    for b in range(case.B):
        alone = run(replace(case, B=1), one_of(inputs, b))
        assert torch.equal(alone[0], out[b : b + 1])
        assert torch.equal(alone[1], lse[b : b + 1])


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_pages_change_no_bit(bits):
    flat = model("flat", k_bits=bits, v_bits=bits, split_size=256, comp_len=(2996, 700), S=3008)
    paged = replace(flat, page=64)
    for first, second in zip(
        run(flat, flat.make_inputs("cuda")), run(paged, paged.make_inputs("cuda")), strict=True
    ):
        assert torch.equal(first, second)


def test_scales_of_very_different_sizes():
    """With values of 2^-20 to 2^10 in one sequence, weights times scales neither overflow nor vanish."""
    case = model("scales", S=2048, W=0, k_bits=8, v_bits=8)
    q, k, v = case.dense("cuda")
    for factor in (2.0**-20, 2.0**10):
        v = (
            v
            * torch.where(torch.arange(case.S, device="cuda") < 1024, factor, factor * 2.0**-6)[
                :, None
            ].half()
        )
        rows = (*op.kv_compress(k, case.k_keep, 8), *op.kv_compress(v, case.v_keep, 8))
        inputs = (q, *rows, k[:, :, :0], v[:, :, :0], None, None, None, None)
        out, lse = run(case, inputs)
        dense = op.kv_decompress(*rows[3:], 128, case.v_keep, 8, torch.float32).double()
        keys = op.kv_decompress(*rows[:3], 128, case.k_keep, 8, torch.float32).double()
        dense, keys = (x.repeat_interleave(4, dim=1) for x in (dense, keys))
        scores = torch.einsum("bhd,bhsd->bhs", q.double(), keys) * 128**-0.5
        expected = torch.einsum("bhs,bhsd->bhd", scores.softmax(-1), dense)
        rtol, atol = decode_tolerance(q, float(dense.abs().max()))
        assert bool(((out.double() - expected).abs() <= atol + rtol * expected.abs() + 2.0**-25).all())
        assert torch.allclose(lse.double(), scores.logsumexp(-1), atol=2e-3)


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_stream_and_graph(bits):
    """The lengths stay on the device, so a captured step follows their changes."""
    case = model("graph", k_bits=bits, v_bits=bits, comp_len=(3000, 40), win_len=(3, 33))
    inputs = case.make_inputs("cuda")
    assert_stream_and_graph(lambda: run(case, inputs), inputs[0])
    graph, captured = capture(lambda: run(case, inputs))
    lengths = inputs[9]
    lengths.copy_(torch.tensor([100, 2500], dtype=torch.int32))
    graph.replay()
    for a, b in zip(run(case, inputs), captured, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_poisoned_rows_reach_only_their_channels(bits):
    case = model("poison", B=1, H=4, H_kv=1, S=700, k_bits=bits, v_bits=bits, v_keep=40)
    inputs = list(case.make_inputs("cuda"))
    v = normal((1, 1, case.S, 128), case.dtype, "cuda", seed=5)
    v[0, 0, 333, 17] = float("nan")
    inputs[4:7] = op.kv_compress(v, case.v_keep, bits)
    out = run(case, tuple(inputs))[0]
    kept = inputs[4][0, 0, 333].view(torch.uint8).cpu()
    mask = torch.tensor([bool(kept[d // 8] >> (d % 8) & 1) for d in range(128)])
    if bits == 16:  # no scale: the one value is NaN
        mask = torch.arange(128) == 17
    assert torch.equal(out.isnan().cpu(), mask.expand(1, 4, 128))


@pytest.mark.parametrize("splits", [1, 2, 7, 8])
def test_one_kernel_up_to_the_splits_of_a_cluster(splits):
    """With clusters, one kernel also reads the window and merges the splits."""
    case = model("launches", S=512 * splits - 3, split_size=512, W=32, win_len=(32, 5))
    inputs = case.make_inputs("cuda")
    result = run(case, inputs)
    kernels = kernels_of(lambda: run(case, inputs))
    clusters = torch.cuda.get_device_capability()[0] >= 9
    assert len(kernels) == (1 if clusters or splits == 1 else 2), kernels
    assert_decode(case, result, inputs)


def test_many_rows_pass_2_to_the_31_bytes():
    case = model("large", B=1, H=2, H_kv=2, S=2**23, W=0, k_bits=16, v_bits=16, k_keep=128, v_keep=128)
    x = normal((1, 2, 2**16, 128), torch.float16, "cuda", seed=1)
    rows = [part.repeat(1, 1, 128, *[1] * (part.dim() - 3)) for part in op.kv_compress(x, 128, 16)[:2]]
    scales = torch.empty(1, 2, 0, dtype=torch.float16, device="cuda")
    q, window = normal((1, 2, 128), torch.float16, "cuda", seed=2), x[:, :, :0]
    out, lse = run(case, (q, *rows, scales, *rows, scales, window, window, None, None, None, None))
    scores = torch.einsum("bhd,bhsd->bhs", q.double(), x.double()) * 128**-0.5
    expected = torch.einsum("bhs,bhsd->bhd", scores.softmax(-1), x.double())
    assert torch.allclose(out.double(), expected, rtol=2e-3, atol=2e-3)
    assert torch.allclose(lse.double(), scores.logsumexp(-1) + math.log(128), atol=2e-3)
