"""Selections that leave no doubt: scores without rounding, so that even the order of equal ones is that of §1.6."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from htree_ops.ops.tree_cache import tree_cache_attention
from tests.support.tree_cache_cases import TreeCacheCase, filled_pools, offsets

ops = torch.ops.htree

Draw = Callable[[int, torch.Generator], Tensor]


def integers(high: int) -> Draw:
    return lambda num, generator: torch.randint(0, high, (num,), generator=generator)


def one_far_away(num: int, generator: torch.Generator) -> Tensor:
    """One value beside many close ones: almost all keys fall into one digit of the first pass."""
    values = torch.randint(0, 256, (num,), generator=generator)
    values[num // 3] = 65535
    return values


#: Scores of the nodes in units of 1/2048: 16 bits, of which a key has the upper and the lower half.
DRAWS: dict[str, Draw] = {
    "all equal": lambda num, generator: torch.full((num,), 300),
    "two": integers(2),
    "two, one of them rare": lambda num, generator: (
        (torch.rand(num, generator=generator) < 0.01).long() * 9000
    ),
    "few": integers(24),
    "many": integers(1 << 16),
    "ascending": lambda num, generator: torch.arange(num) * (65535 // num),
    "descending": lambda num, generator: torch.arange(num, 0, -1) * (65535 // num),
    "bell": lambda num, generator: (
        (torch.randn(num, generator=generator) * 5000 + 32768).long().clamp(0, 65535)
    ),
    "one far away": one_far_away,
}


def expected_selection(values: list[int], top_k: int, open_next: bool) -> list[int]:
    """§1.6: the rightmost, then by score, the earlier first; with ``open_next`` what follows the best comes next."""
    last = len(values) - 1
    order = [last, *sorted(range(last), key=lambda p: (-values[p], p))]
    if open_next and top_k > 2:
        best = order[: (top_k + 1) // 2]
        behind = sorted({p + 1 for p in best} - set(best) - {last + 1})
        order = [*best, *behind, *(p for p in order if p not in {*best, *behind})]
    return sorted(order[:top_k])


def selected(
    values: Tensor, top_k: int, device: str, nan_head: int | None = None, **options: Any
) -> list[list[int]]:
    """The list at the tokens of a sequence whose nodes of layer 1 have the scores ``values`` [heads, nodes].

    The query of ``nan_head`` holds a NaN.
    """
    heads, nodes = values.shape
    length = nodes * 16 - 3  # the last node is not finished
    case = TreeCacheCase(
        name="exact",
        dtype=torch.bfloat16,
        lengths=(length,),
        queries=(1,),
        heads=heads,
        kv_heads=heads,
        key_dim=64,
        value_dim=64,
        page_size=256,
        max_top_nodes=top_k * 16,
        top_k=top_k,
        rope_base=None,
        **options,
    )
    k = torch.zeros(length, heads, 64)
    of_token = values.repeat_interleave(16, dim=1)[:, :length].T
    k[:, :, 0], k[:, :, 1] = of_token // 256, of_token % 256
    q = torch.zeros(1, heads, 64)
    q[:, :, 0], q[:, :, 1] = 1.0, 1 / 256  # times 1/8 from the scale: 1/8 and 1/2048
    if nan_head is not None:
        q[:, nan_head, 2] = torch.nan
    v = torch.randn(length, heads, 64, generator=torch.Generator().manual_seed(1))
    q, k, v = (x.to(device, torch.bfloat16) for x in (q, k, v))
    k_pool, v_pool, table = filled_pools(case, k, v)
    lists = torch.full((1, 1, case.layers, heads, top_k), -1, dtype=torch.int32, device=device)
    list_pos = torch.full((1, 1), -1, dtype=torch.int32, device=device)
    *_, lists, list_pos = tree_cache_attention(
        q,
        k_pool,
        v_pool,
        table,
        torch.tensor([length], dtype=torch.int32, device=device),
        offsets((1,), device),
        lists,
        list_pos,
        **case.options(),
    )
    assert list_pos.tolist() == [[length - 1]]
    return lists[0, 0, 0].tolist()


def all_draws(nodes: int) -> Tensor:
    generator = torch.Generator().manual_seed(nodes)
    return torch.stack([draw(nodes, generator) for draw in DRAWS.values()])


def assert_selected(values: Tensor, top_k: int, device: str, open_next: bool = False) -> None:
    found = selected(values, top_k, device, open_next=open_next)
    for name, row, own in zip(DRAWS, values.tolist(), found, strict=True):
        assert own == expected_selection(row, top_k, open_next), name


@pytest.mark.parametrize("open_next", [False, True], ids=["best", "open_next"])
@pytest.mark.parametrize(("nodes", "top_k"), [(41, 8), (600, 40), (7500, 512), (9000, 1000)])
def test_the_list_is_that_of_the_definition(device, nodes, top_k, open_next):
    assert_selected(all_draws(nodes), top_k, device, open_next)


@pytest.mark.gpu
@pytest.mark.parametrize("choice", ["1", "2", "4", "8", "16", "general"])
def test_whatever_the_number_of_blocks(choice, monkeypatch):
    monkeypatch.setenv("HTREE_TREE_DECODE", choice)
    assert_selected(all_draws(2000), 200, "cuda")


@pytest.mark.parametrize("nodes", [100, 7500])
def test_importances_that_are_nan_come_by_position(device, nodes):
    """All of a K/V head are, where its query is NaN; another head keeps its own."""
    values = torch.stack([torch.arange(nodes)] * 2)
    top_k = nodes // 15
    found = selected(values, top_k, device, nan_head=0)
    assert found[0] == [*range(top_k - 1), nodes - 1]
    assert found[1] == [*range(nodes - top_k, nodes)]
