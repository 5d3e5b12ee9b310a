"""Pages that one sequence fills and another one begins behind, in one append (docs/semantics/tree_cache.md §7.2)."""

from dataclasses import replace

import pytest
import torch

from htree_ops.ops.tree_cache import tree_cache_append_
from tests.support.tree_cache_cases import CASES, filled_pools, offsets


@pytest.mark.parametrize("span", [None, 2])
def test_pages_that_a_call_fills_may_be_shared(device, span):
    """A sequence that begins behind full pages of another one, written in the same call, has the nodes of its tokens.

    Nodes of 16 and 64 tokens reach across pages of 8, so some have children that the other sequence writes.
    """
    case = replace(CASES[0], lengths=(100, 100), queries=(1, 1), selection_span=span)
    k, v = case.tokens(device)
    for x in (k, v):
        x[100:140] = x[:40]  # the same first five pages
    k_pool, v_pool, table = filled_pools(case, k, v)
    first, second = (x.clone() for x in case.empty_pools(device)[:2])
    shared = table.clone()
    shared[1, :5] = shared[0, :5]
    new = torch.cat([torch.arange(100), torch.arange(140, 200)]).to(device)
    before = torch.tensor([0, 40], dtype=torch.int32, device=device)
    tree_cache_append_(
        first,
        second,
        k[new],
        v[new],
        shared,
        before,
        offsets((100, 60), device),
        max_new=100,
        **case.options(),
    )
    for ours, theirs in ((first, k_pool), (second, v_pool)):
        for mine, own in ((table[0], table[0]), (shared[1], table[1])):
            got, expected = ours[mine[:13].long()], theirs[own[:13].long()]
            assert torch.equal(got.isnan(), expected.isnan())
            assert torch.equal(got.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize(
    ("lengths", "counts", "table"),
    [
        ((0, 8), (7, 4), [[0, 1, 2], [0, 3, 4]]),  # not filled
        ((0, 16), (16, 4), [[0, 1, 2], [1, 0, 3]]),  # at another place
        ((0, 4), (16, 4), [[0, 1, 2], [0, 3, 4]]),  # written by both
    ],
)
def test_pages_that_a_call_writes_may_not_be_shared_otherwise(lengths, counts, table):
    case = replace(CASES[0], lengths=(24, 24), queries=(1, 1))
    k, v = case.tokens("cpu")
    k_pool, v_pool, _ = case.empty_pools("cpu")
    rows = sum(counts)
    with pytest.raises(ValueError, match="only full pages can be shared"):
        tree_cache_append_(
            k_pool,
            v_pool,
            k[:rows],
            v[:rows],
            torch.tensor(table, dtype=torch.int32),
            torch.tensor(lengths, dtype=torch.int32),
            offsets(counts, "cpu"),
            **case.options(),
        )
    assert k_pool.isnan().all()
