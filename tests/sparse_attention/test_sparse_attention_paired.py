"""Gradients of 4 query heads per K/V head: two queries share a tile of 8 rows, and a product takes the rows of four."""

from dataclasses import replace

import pytest
import torch
from sparse_attention_helpers import GRADIENTS, assert_equal_to_reference, op

from tests.support.cases import case_id, normal
from tests.support.sparse_attention_cases import SparseCase

pytestmark = pytest.mark.gpu

_MODEL = SparseCase(name="model", dtype=torch.bfloat16, T=403, H=8, H_kv=2, K=128, V=128, n=8, block_size=16)
CASES = [
    _MODEL,
    replace(_MODEL, name="half_64", dtype=torch.float16, K=64, V=64, T=402, B=2),
    replace(_MODEL, name="wild_32", K=32, V=32, T=401, lists="wild", n=20, has_sinks=True),
    replace(_MODEL, name="suffix", T=400, T_q=131),
    *(replace(_MODEL, name=f"stride_{stride}", selection_stride=stride, T=403, T_q=403 - 48) for stride in (2, 4, 8)),
    replace(_MODEL, name="stride_2_wild", selection_stride=2, lists="wild", n=20, T=401, dtype=torch.float16),
    replace(_MODEL, name="stride_8_wild", selection_stride=8, lists="wild", n=20, K=64, V=64, T=397),
    replace(_MODEL, name="shared_lists", H=16, H_kv=4, H_i=1, n=6, K=32, V=32),
]  # fmt: skip


@pytest.fixture(params=["gathered", "per_query"])
def gather(request, monkeypatch):
    """No row multiplies masked tiles."""
    monkeypatch.setenv("HTREE_TREE_GATHER", request.param)
    return str(request.param)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_equal_to_the_reference(case, gather, nan_memory):
    assert_equal_to_reference(case, "cuda")


@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("stride", [1, 2, 4, 8])
@pytest.mark.parametrize("queries", [*range(1, 10), 31, 32, 33, 35, 63, 65])
def test_any_number_of_queries_that_see_a_block(queries, stride, width, gather, nan_memory):
    """All lists hold the first blocks, so that their inverted lists have every query."""
    case = replace(
        _MODEL,
        dtype=torch.float16,
        T=48 + queries,
        T_q=queries,
        lists="all",
        n=7,
        K=width,
        V=width,
        selection_stride=stride,
    )
    assert_equal_to_reference(case, "cuda", queries)


def gradients_of(case, inputs, upstream):
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    return torch.autograd.grad(op(case)(*leaves, *inputs[3:]), leaves, upstream)


@pytest.mark.parametrize("stride", [1, 2, 4, 8])
def test_what_a_query_does_not_see_changes_no_bit_of_dq(stride, gather):
    """A NaN in a later key or value, also where the next query of the same list sees it."""
    case = replace(_MODEL, T=203, n=13, lists="all", selection_stride=stride)
    inputs = case.make_inputs("cuda")
    out, lse = op(case)(*inputs)
    upstream = [normal(tuple(x.shape), x.dtype, "cuda", 7) for x in (out, lse)]
    wanted = gradients_of(case, inputs, upstream)[0]
    for token in (1, 2, 3, 17, 100, 101, 102, 103, 201, 202):
        for side in (1, 2):
            changed = [None if x is None else x.clone() for x in inputs]
            changed[side][:, token, :, 5] = torch.nan
            dq = gradients_of(case, changed, upstream)[0]
            # Queries of a list share a power of two, which follows from all that one of them sees.
            first = token // stride * stride
            assert torch.equal(dq[:, :first], wanted[:, :first]), (token, side)
            assert dq[:, first:token].isfinite().all(), (token, side)
            torch.testing.assert_close(dq[:, first:token], wanted[:, first:token], rtol=3e-2, atol=3e-2)
            assert dq[:, token].isnan().any(-1).all(), (token, side)


@pytest.mark.parametrize("stride", [1, 2, 4, 8])
def test_a_query_that_is_not_finite_reaches_only_the_blocks_of_its_list(stride, gather):
    """Neither from its neighbours in a tile, nor from the places of a last tile that no query fills."""
    case = replace(_MODEL, B=1, T=203, n=3, selection_stride=stride)
    query, key, value, _, _ = case.make_inputs("cuda")
    rows = -(-case.T // stride)
    own = torch.arange(rows, device="cuda") * stride // 16
    # Every list has a block that all share, one of every fourth list alone, and its own.
    blocks = torch.stack(
        [torch.zeros_like(own), (torch.arange(rows, device="cuda") % 4 + 1).clamp(max=own), own], -1
    )
    blocks = blocks.int()[None, :, None].expand(1, rows, case.H_kv, 3).contiguous()
    out, lse = op(case)(query, key, value, blocks, None)
    for row in (0, 96, 97, 98, 99, 201, 202):
        for side in ("query", "dout", "dlse"):
            changed = query.clone()
            upstream = [normal(tuple(x.shape), x.dtype, "cuda", 7) for x in (out, lse)]
            poisoned = {"query": changed, "dout": upstream[0], "dlse": upstream[1]}[side]
            poisoned[0, row, 1] = torch.nan
            found = gradients_of(case, (changed, key, value, blocks, None), upstream)
            assert found[0][0, :row].isfinite().all()
            assert found[0][0, row + 1 :].isfinite().all()
            sees = torch.zeros(13 * 16, dtype=torch.bool, device="cuda")
            for block in blocks[0, row // stride, 0].tolist():
                sees[block * 16 : block * 16 + 16] = True
            for name, gradient in zip(GRADIENTS[3:], found[1:], strict=False):
                assert gradient[0, ~sees[: case.T]].isfinite().all(), (row, side, name)
                assert gradient[0, :, 1].isfinite().all(), (row, side, name)
