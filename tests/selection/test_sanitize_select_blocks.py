"""Small calls of every CUDA kernel of select_blocks, for compute-sanitizer (`make sanitize`), with their results."""

import pytest
import torch

from htree_ops.reference import selection as reference
from tests.support.cases import case_id
from tests.support.select_blocks_cases import CASES, VARLEN_CASES, integers

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", [case for case in CASES if case.dtype != torch.float64], ids=case_id)
def test_select_blocks(case):
    index = case.make_index("cuda")
    found = torch.ops.htree.select_blocks(*index, *case.options())
    for ours, theirs in zip(
        found, reference.select_blocks(*index, case.count, **case.keywords()), strict=True
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("case", [case for case in VARLEN_CASES if case.dtype != torch.float64], ids=case_id)
def test_select_blocks_varlen(case):
    torch.ops.htree.select_blocks_varlen(*case.make_inputs("cuda"))


@pytest.mark.parametrize("offsets", [[0, 40, 10, 2**31 - 1], [-5, 3, 3, 20], [7, 7, 7, 7]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_offset_leads_outside_of_the_tensors(dtype, offsets):
    index = torch.zeros(30, 2, 32, dtype=dtype, device="cuda")
    broken = torch.tensor(offsets, dtype=torch.int32, device="cuda")
    sound = torch.tensor([0, 10, 20, 30], dtype=torch.int32, device="cuda")
    for cu_q, cu_k in ((broken, sound), (sound, broken), (broken, broken)):
        blocks, scores = torch.ops.htree.select_blocks_varlen(index, index, cu_q, cu_k, 30, 30, 4)
        assert bool(((blocks >= -1) & (blocks < 2)).all())
        assert bool((scores.isnan() | scores.isinf() | (scores == 0)).all())


def test_rows_beyond_shared_memory():
    """70 000 blocks: their keys stand in device memory."""
    query = torch.ones(1, 2, 1, 16, device="cuda")
    key = torch.arange(70_000, device="cuda").remainder(64.0)[None, :, None, None].expand(1, -1, 1, 16)
    blocks, _ = torch.ops.htree.select_blocks(query, key.contiguous(), 5, 1)
    expected = reference.select_blocks(query, key, 5, block_size=1)[0]
    assert torch.equal(blocks, expected)


@pytest.mark.parametrize("block_size", [16, 128])
def test_long_rows_are_cut_by_their_tiles(block_size):
    T = 270_000
    query, key = (integers((1, T, 1, 16), torch.bfloat16, "cuda", seed, largest=15) for seed in (1, 2))
    found = torch.ops.htree.select_blocks(query[:, T - 8 :], key, 5, block_size)
    assert torch.equal(found[0], reference.select_blocks(query[:, T - 8 :], key, 5, block_size=block_size)[0])
