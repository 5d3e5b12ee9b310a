"""The decode kernel of the tree cache on tokens in 8 and 4 bits (docs/semantics/tree_cache.md §7.5)."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from test_decode_kernel import TOLERANCE
from test_packed_leaves import BITS, attention_of, expanded_pools
from test_tree_cache import on_cpu
from torch import Tensor

from htree_ops import TreeKVCache
from htree_ops.reference import tree_cache as reference
from tests.support.cases import case_id
from tests.support.graphs import capture, kernels_of, on_another_stream
from tests.support.tree_cache_cases import (
    DECODE_CASES,
    TreeCacheCase,
    filled_packed_pools,
)

pytestmark = pytest.mark.gpu
ops = torch.ops.htree
HALF_TYPES = (torch.float16, torch.bfloat16)

#: A page of the last two holds packed tokens and no other key, and packed tokens and span means.
CASES = [
    *DECODE_CASES,
    replace(DECODE_CASES[0], name="one layer", lengths=(61, 17), queries=(3, 1), max_top_nodes=64),
    replace(DECODE_CASES[0], name="one layer, span 2", lengths=(64, 33), max_top_nodes=64, selection_span=2),
]
CASE = pytest.mark.parametrize("case", CASES, ids=case_id)
#: Both sizes, both numbers of head tiles, span means, and a stride.
SOME = [
    case for case in CASES if case.name in ("ragged", "stride", "half, 128, G = 16", "three layers, span 4")
]


def inputs_of(case: TreeCacheCase, device: str = "cuda") -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v: the same numbers on every device."""
    q, k, v = (x.to(device) for x in (case.last_queries("cpu"), *case.tokens("cpu")))
    return q, k, v


def attend(
    case: TreeCacheCase, bits: int, choice: str, monkeypatch: pytest.MonkeyPatch, device: str = "cuda"
) -> tuple[Tensor, ...]:
    monkeypatch.setenv("HTREE_TREE_DECODE", choice)
    q, k, v = inputs_of(case, device)
    pools, table = filled_packed_pools(case, bits, k, v)
    return attention_of(case, pools, table, q, device)


def assert_same(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> None:
    """Equal bits of out, lse, lists and list_pos, where NaN equals NaN."""
    for a, b in zip(ours, theirs, strict=True):
        if a.dtype.is_floating_point:
            assert torch.equal(a.isnan(), b.isnan())
            a, b = (x.masked_fill(x.isnan(), 0) for x in (a, b))
        assert torch.equal(a, b)


@BITS
@CASE
def test_a_row_has_the_bits_of_plain_pages_with_these_tokens(case, bits, monkeypatch):
    """The decode kernel expands tokens as pages of 16 bits hold them, and adds them in the same order."""
    monkeypatch.setenv("HTREE_TREE_DECODE", "auto")
    q, k, v = inputs_of(case)
    pools, table = filled_packed_pools(case, bits, k, v)
    ours = attention_of(case, pools, table, q, "cuda")
    assert_same(ours, attention_of(case, expanded_pools(case, bits, k, v), table, q, "cuda"))
    assert ours[0].isfinite().any()


@BITS
@CASE
def test_rows_near_those_of_the_general_kernels(case, bits, monkeypatch):
    out, lse, lists, list_pos = attend(case, bits, "auto", monkeypatch)
    general = attend(case, bits, "general", monkeypatch)
    a, b = TOLERANCE[case.dtype]
    torch.testing.assert_close(out, general[0], atol=4 * a, rtol=b, equal_nan=True)
    torch.testing.assert_close(lse, general[1], atol=2e-4, rtol=1e-4, equal_nan=True)
    assert torch.equal(list_pos, general[3])
    assert lists.numel() == 0 or (lists == general[2]).float().mean() > 0.9  # near ties may differ


@BITS
@pytest.mark.parametrize("case", SOME, ids=case_id)
def test_rows_near_those_of_the_reference(case, bits, monkeypatch):
    monkeypatch.setenv("HTREE_TREE_DECODE", "auto")
    q, k, v = inputs_of(case)
    pools, table = filled_packed_pools(case, bits, k, v)
    out, lse, *_ = attention_of(case, pools, table, q, "cuda")
    named = {name: x.cpu() for name, x in pools.items() if "codes" in name or "scales" in name}
    expected = reference.tree_cache_attention(
        *on_cpu(q, pools["k_pool"], pools["v_pool"], table),
        *case.make_inputs("cpu")[4:],
        **case.options(),
        **named,
        compute_dtype=torch.float32,
    )
    a, b = TOLERANCE[case.dtype]
    torch.testing.assert_close(out.cpu().float(), expected[0].float(), atol=4 * a, rtol=b, equal_nan=True)
    torch.testing.assert_close(lse.cpu(), expected[1].float(), atol=2e-4, rtol=1e-4, equal_nan=True)


@BITS
@CASE
def test_the_number_of_blocks_does_not_show(case, bits, monkeypatch):
    one = attend(case, bits, "1", monkeypatch)
    for choice in ("2", "4", "8", "16"):
        assert_same(attend(case, bits, choice, monkeypatch), one)


@BITS
@pytest.mark.parametrize("case", SOME, ids=case_id)
def test_a_call_takes_the_kernel_on_hopper(case, bits, monkeypatch):
    """It does not where HTREE_TREE_DECODE says so, nor where scales do not begin at a multiple of 16 bytes."""
    q, k, v = inputs_of(case)
    pools, table = filled_packed_pools(case, bits, k, v)
    scales = pools["v_scales"]
    moved = scales.new_empty(scales.numel() + 1)[1:].view(scales.shape).copy_(scales)
    hopper = torch.cuda.get_device_capability() == (9, 0)
    for choice, of_values, taken in (
        ("auto", scales, hopper),
        ("general", scales, False),
        ("auto", moved, False),
    ):
        monkeypatch.setenv("HTREE_TREE_DECODE", choice)
        call = partial(attention_of, case, pools | {"v_scales": of_values}, table, q, "cuda")
        call()
        assert any("cache_decode_kernel" in name for name in kernels_of(call)) == taken


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@BITS
def test_scales_that_are_not_finite(bits, dtype, monkeypatch):
    """A NaN poisons the rows of its own K/V head that read the token; infinities and codes of 0 do what x̂ does."""
    monkeypatch.setenv("HTREE_TREE_DECODE", "auto")
    case = TreeCacheCase(
        name="one", dtype=dtype, lengths=(40,), queries=(40,), heads=4, kv_heads=2, key_dim=128, value_dim=128,
        page_size=32, max_top_nodes=64, top_k=8,
    )  # fmt: skip
    q, k, v = inputs_of(case)
    pools, table = filled_packed_pools(case, bits, k, v)
    plain = expanded_pools(case, bits, k, v)
    finite, *_ = attention_of(case, pools, table, q, "cuda")
    for name, token, head, scale in (("v", 3, 0, torch.inf), ("v", 33, 0, torch.nan), ("k", 9, 1, torch.nan)):
        page, row = int(table[0, token // 32]), token % 32
        pools[f"{name}_scales"][page, head, row] = scale
        codes = pools[f"{name}_codes"][page, head, row]
        if bits == 8:
            numbers = codes.view(torch.int8).float()
        else:
            numbers = torch.stack([codes & 15, codes >> 4], dim=1).flatten().float() - 8
        plain[f"{name}_pool"][page, head, row] = (numbers * scale).to(dtype)
    out, lse, *others = attention_of(case, pools, table, q, "cuda")
    assert_same((out, lse, *others), attention_of(case, plain, table, q, "cuda"))
    first, second = out[:, :2], out[:, 2:]  # of the two K/V heads
    assert torch.equal(first[:3], finite[:3, :2])
    assert not bool(first[3:].isfinite().any())
    assert bool(first[33:].isnan().all())
    assert torch.equal(second[:9], finite[:9, 2:])
    assert bool(second[9:].isnan().all())
    assert bool(lse[9:, 2:].isnan().all())


@BITS
@pytest.mark.parametrize("case", SOME, ids=case_id)
def test_nothing_behind_a_row_is_read(case, bits):
    """Scales and codes of later tokens and of pages that no sequence has do not reach a row."""
    q, k, v = inputs_of(case)
    pools, table = filled_packed_pools(case, bits, k, v)
    expected = attention_of(case, pools, table, q, "cuda")
    unused = torch.ones(pools["k_scales"].shape[::2], dtype=torch.bool, device="cuda")  # [pages, tokens]
    for b, length in enumerate(case.lengths):
        token = torch.arange(length, device="cuda")
        unused[table[b].long()[token // case.page_size], token % case.page_size] = False
    for name in ("k", "v"):
        pools[f"{name}_scales"].masked_fill_(unused[:, None], torch.nan)
        pools[f"{name}_codes"].masked_fill_(unused[:, None, :, None], 255)
    assert_same(attention_of(case, pools, table, q, "cuda"), expected)


@BITS
def test_a_row_does_not_depend_on_the_others(bits):
    """Nor on the pages, nor on how many rows there are."""
    case = replace(DECODE_CASES[0], lengths=(700, 45, 333), queries=(2, 1, 3))
    q, k, v = inputs_of(case)
    pools, table = filled_packed_pools(case, bits, k, v)
    together = attention_of(case, pools, table, q, "cuda")
    other_pools, other_table = filled_packed_pools(case, bits, k, v, seed=5)
    assert not torch.equal(other_table, table)
    assert_same(attention_of(case, other_pools, other_table, q, "cuda"), together)
    for sequence, (first, count) in enumerate(((0, 2), (2, 1), (3, 3))):
        alone = replace(case, lengths=case.lengths[sequence : sequence + 1], queries=(count,))
        rows = slice(first, first + count)
        out, lse, *_ = attention_of(alone, pools, table[sequence : sequence + 1], q[rows], "cuda")
        assert torch.equal(out, together[0][rows])
        assert torch.equal(lse, together[1][rows])


@BITS
@pytest.mark.parametrize("span", [None, 4])
def test_a_captured_step_follows_the_lengths(bits, span):
    """Steps of a graph have the bits of steps without one; the sequences grow beyond a page and a choice."""
    settings: dict[str, Any] = {
        "top_k": 8, "max_top_nodes": 64, "page_size": 32, "selection_span": span, "dtype": torch.bfloat16,
        "device": "cuda", "leaf_bits": bits,
    }  # fmt: skip
    cache, eager = (TreeKVCache(2, 2, 64, 400, **settings) for _ in range(2))
    draw = torch.Generator().manual_seed(0)

    def rows(n, heads):
        return torch.randn(2, n, heads, 64, generator=draw).bfloat16().cuda()

    prompt = [rows(120, 2) for _ in range(2)]
    for each in (cache, eager):
        each.append(*prompt)
    q, k, v = rows(1, 16), rows(1, 2), rows(1, 2)

    def step(each):
        each.append(k, v)
        return each.attend(q)

    on_another_stream(lambda: (step(cache), step(eager)))
    graph, captured = capture(lambda: step(cache))
    for _ in range(40):
        for x, new in ((q, rows(1, 16)), (k, rows(1, 2)), (v, rows(1, 2))):
            x.copy_(new)
        graph.replay()
        assert torch.equal(captured, step(eager))
    assert cache.lengths.tolist() == eager.lengths.tolist() == [161, 161]
