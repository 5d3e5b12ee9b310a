"""Caches whose top has more nodes than a list has children: max_top_nodes > k·r (docs/semantics/tree_cache.md §7.3).

A row walks the tree of the tokens up to its leader, so a step is judged by the row of the whole sequence.
"""

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_index_cache import tokens
from torch import Tensor

from htree_ops import TreeKVCache
from htree_ops.ops.tree_cache.functions import cache_layers, rope_positions, tree_cache_attention
from htree_ops.ops.tree_cache.ring import has_open_top
from htree_ops.reference.tree_attention import htree_forward_naive, index_parents
from tests.support.tree_attention_problem import packed

OPTIONS: dict[str, Any] = {"compression_rate": 4, "top_k": 3, "max_top_nodes": 30, "page_size": 8}
OPS = torch.ops.htree
Rows = list[Tensor]


def make(device: str = "cpu", capacity: int = 160, batch: int = 2, **others: Any) -> TreeKVCache:
    return TreeKVCache(
        batch, 2, 8, capacity, **(OPTIONS | {"dtype": torch.float32, "device": device} | others)
    )


def rows_of(cache: TreeKVCache, n: int, seed: int = 0) -> Rows:
    """Queries, keys and values of n tokens of every sequence, and both parts of the index of a cache that has one."""
    rows, index = tokens(cache, n, seed)
    return [*rows, *(index if cache.index_dim else ())]


def part(rows: Rows, begin: int, end: int) -> Rows:
    return [x[:, begin:end] for x in rows]


def decode(cache: TreeKVCache, rows: Rows, counts: list[int] | None = None) -> tuple[Tensor, Tensor]:
    index = {"index": tuple(rows[3:])} if cache.index_dim else {}
    return cache.decode(*rows[:3], counts, **index, return_lse=True)


def served(cache: TreeKVCache, rows: Rows, parts: list[int]) -> tuple[Tensor, Tensor]:
    """out and lse in so many tokens a call."""
    ends = pairwise(accumulate(parts, initial=0))
    found = [decode(cache, part(rows, begin, end)) for begin, end in ends]
    return tuple(torch.cat(x, dim=1) for x in zip(*found, strict=True))


def whole(cache: TreeKVCache, rows: Rows, n: int) -> tuple[Tensor, Tensor]:
    """out and lse of the reference over the first n tokens."""
    options = cache.options
    tree: dict[str, Any] = {
        "compression_rate": options.compression_rate,
        "max_top_nodes": options.top_nodes,
        "top_k_per_layer": options.top_k,
        "selection_stride": options.selection_stride,
        "open_next": options.open_next,
    }
    q, k, v, *index = (x[:, :n].cpu() for x in rows)
    parents = index_parents(*index, cache.num_kv_heads, **tree) if index else None
    found = htree_forward_naive(
        q, k, v, **tree, selection_span=options.selection_span, importance=options.importance, parents=parents
    )
    return found.out, found.lse


def assert_near(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], rtol: float = 1e-4) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs.to(ours.dtype), atol=rtol, rtol=rtol)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "strided": {"selection_stride": 4},
    "inside a stride": {"selection_stride": 4, "max_top_nodes": 29},
    "spans": {"selection_stride": 2, "selection_span": 2, "importance": "exp_joint", "max_top_nodes": 33},
    "next": {"open_next": True, "max_top_nodes": 17},
    "index": {"index_dim": 16},
    "strided index": {
        "index_dim": 16, "index_heads": 1, "selection_stride": 4, "max_top_nodes": 27, "open_next": True
    },
    "one node": {"top_k": 1},
    "all dense": {"max_top_nodes": 500},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_the_whole_sequence(kind, device):
    """Through depths 1, 2 and 3, in one call and token by token."""
    cache = make(device, **KINDS[kind])
    assert has_open_top(cache.options)
    rows = rows_of(cache, 150)
    found = served(cache, rows, [20, 1, 1, 9, 60, *[1] * 37, 3, 19])
    assert_near(found, whole(cache, rows, 150))
    cache.check()


@settings(max_examples=100)
@given(data=st.data(), seed=st.integers(0, 2**20))
def test_rows_to_the_precision_of_float64(data, seed):
    draw = data.draw
    rate, top_k = draw(st.sampled_from((2, 3, 4))), draw(st.integers(1, 4))
    has_index = draw(st.booleans())
    cache = make(
        capacity=draw(st.sampled_from((150, 300))),
        batch=1,
        dtype=torch.float64,
        compression_rate=rate,
        top_k=top_k,
        max_top_nodes=top_k * rate + draw(st.integers(1, 40)),
        selection_stride=draw(st.sampled_from([s for s in (1, 2, 4) if rate % s == 0])),
        selection_span=None
        if has_index
        else draw(st.sampled_from([None, *(c for c in (1, 2, 3) if rate % c == 0)])),
        importance="lse_causal" if has_index else draw(st.sampled_from(("lse_causal", "exp_joint"))),
        open_next=draw(st.booleans()),
        page_size=rate * draw(st.integers(1, 5)),
        index_dim=16 if has_index else 0,
    )
    parts = draw(st.lists(st.integers(1, 30), min_size=1, max_size=5))
    rows = rows_of(cache, sum(parts), seed)
    assert_near(served(cache, rows, parts), whole(cache, rows, sum(parts)), rtol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_neither_calls_nor_pages_nor_the_capacity_change_a_bit(kind, device):
    one = make(device, **KINDS[kind])
    other = make(device, **(KINDS[kind] | {"capacity": 700, "page_size": 12}))
    rows = rows_of(one, 150)
    found, again = served(one, rows, [150]), served(other, rows, [31, 1, 1, 40, 1, 60, 16])
    for ours, theirs in zip(found, again, strict=True):
        assert torch.equal(ours, theirs)
    both = one.num_layers
    assert torch.equal(one.ring.list_pos, other.ring.list_pos)
    assert torch.equal(one.ring.lists, other.ring.lists[:, :, :both])
    assert bool((other.ring.lists[:, :, both:] == -1).all())


@pytest.mark.parametrize("kind", ["strided", "inside a stride", "strided index"])
def test_lists_of_a_top_say_nothing(kind, device):
    """Those of a leader's top and of the layers above are -1, and nobody reads them."""
    cache = make(device, **KINDS[kind])
    rows = rows_of(cache, 150)
    served(cache, rows, [147])
    rate, nodes = cache.options.compression_rate, cache.options.top_nodes
    for leaders, kept in zip(cache.ring.list_pos.tolist(), cache.ring.lists, strict=True):
        for leader, lists in zip(leaders, kept, strict=True):
            top = cache_layers(leader + 1, rate, nodes) - 1
            assert top > 0
            assert bool((lists[top:] == -1).all())
            assert bool((lists[:top, :, 0] >= 0).all())
            lists[top:] = 12345
    wanted = whole(cache, rows, 150)
    assert_near(decode(cache, part(rows, 147, 150)), [x[:, 147:] for x in wanted])


def test_followers_of_a_dense_leader_are_dense(device):
    """Where max_top_nodes is no multiple of the stride, up to s - 1 tokens behind it."""
    options = {"selection_stride": 4, "max_top_nodes": 29}
    cache, dense = make(device, **options), make(device, **(options | {"max_top_nodes": 500}))
    rows = rows_of(cache, 40)
    found, every = served(cache, rows, [30, 1, 1, 8]), served(dense, rows, [40])
    assert torch.equal(found[0][:, :32], every[0][:, :32])  # token 28 is the last leader of at most 29 tokens
    assert not torch.allclose(found[0][:, 32:], every[0][:, 32:], atol=1e-3)


def test_a_wide_top_is_dense_attention(device):
    """And asks for no more capacity than the sequence has."""
    cache = make(device, max_top_nodes=(1 << 31) - 1, rope_base=None)
    assert cache.num_layers == 1
    assert rope_positions(cache.options, 160) == 160
    rows = rows_of(cache, 90)
    out, _ = served(cache, rows, [70, 20])
    q, k, v = (x.transpose(1, 2) for x in rows)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, expected.transpose(1, 2), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["plain", "strided", "inside a stride", "spans", "index", "strided index"])
def test_truncations_beams_and_states(kind, device):
    """A sequence that is cut back across a depth, copied and moved into a deeper cache goes on as it would have."""
    cache, larger = make(device, capacity=124, **KINDS[kind]), make(device, capacity=600, **KINDS[kind])
    rows = rows_of(cache, 150)
    served(cache, rows, [121])
    cache.truncate([119, 24])
    out, _ = decode(cache, part(rows, 119, 122), [3, 0])
    torch.testing.assert_close(
        out[0].cpu(), whole(cache, rows, 122)[0][0, 119:].to(out.dtype), atol=1e-4, rtol=1e-4
    )
    cache.fork(0, 1)
    larger.load_state_dict(cache.state_dict())
    assert larger.num_layers > cache.num_layers
    out, _ = decode(larger, [x[:1].expand(2, *x.shape[1:]) for x in part(rows, 122, 150)])
    expected = whole(cache, rows, 150)[0][:1, 122:]
    torch.testing.assert_close(out.cpu(), expected.expand(2, -1, -1, -1).to(out.dtype), atol=1e-4, rtol=1e-4)
    larger.check()


@pytest.mark.parametrize("leaf_bits", [8, 4])
@pytest.mark.parametrize("options", [{}, {"index_dim": 16, "max_top_nodes": 12}], ids=str)
def test_packed_tokens(options, leaf_bits, device):
    """Lists do not depend on the bits of tokens, nor do those of an index."""
    sizes = OPTIONS | {"selection_stride": 4, "dtype": torch.float32, "device": device} | options
    kinds = [TreeKVCache(2, 2, 64, 160, leaf_bits=bits, **sizes) for bits in (leaf_bits, None)]
    rows = rows_of(kinds[0], 150)
    packed_rows, plain = (served(cache, rows, [77, 1, 1, 71])[0] for cache in kinds)
    assert torch.equal(kinds[0].ring.lists, kinds[1].ring.lists)
    assert torch.nn.functional.cosine_similarity(packed_rows, plain, dim=-1).min() > 0.8


@pytest.mark.parametrize("kind", ["plain", "strided", "spans", "strided index"])
def test_long_prompts(kind, device):
    """Of any number of rows in one call."""
    cache = make(device, capacity=700, **KINDS[kind])
    rows = rows_of(cache, 600)
    found = served(cache, rows, [300, 300])
    assert not cache.prompts.kept
    assert_near(found, whole(cache, rows, 600))


def test_prompts_keep_no_copies(device):
    """These would have one depth. The tokens are gathered, and each part of the rows has its own tree."""
    cache = make(device)
    rows = rows_of(cache, 40)
    served(cache, rows, [40])
    options = packed(compression_rate=4, top_k=3, max_top_nodes=30)
    pools = (cache.k_pool, cache.v_pool)
    assert OPS._tree_cache_prompt_bytes(*pools, 2, 4, 160, *options) == 0
    call = (rows[0], *pools, cache.block_table, 40, None, 160, True, 8, *options)
    out, gmax, gsum, lists = OPS._tree_cache_prompt(*call)
    assert_near((out, gmax + gsum.log()), whole(cache, rows, 40))
    assert bool((lists[1] == -1).all())  # the top of all rows that have it
    assert bool((lists[0, :, :30] == -1).all())
    assert bool((lists[0, :, 30:, :, 0] >= 0).all())


#: Sequences whose tops are lists, as one without an index has them in test_prompts.py.
CLOSED = [{"index_dim": 16, "max_top_nodes": 12, "selection_stride": stride} for stride in (1, 4)]
SERVED = ["plain", "strided", "inside a stride", "spans", "index", "strided index"]


@pytest.mark.parametrize("options", [*(KINDS[kind] for kind in SERVED), *CLOSED], ids=str)
def test_prompts_that_the_kernels_of_tree_attention_compute(options, device, monkeypatch):
    """On the CPU too, which has no reason to: rows and ring are those of the other way."""
    monkeypatch.setattr("htree_ops.ops.tree_cache.prompts.PROMPT_ROWS", 16)
    monkeypatch.setattr("htree_ops.ops.tree_cache.prompts.LISTED_ROWS", 24)
    cache, other = (make(device, batch=3, capacity=170, **options) for _ in range(2))
    monkeypatch.setattr(cache, "_is_prompt", lambda n: n >= 16)
    monkeypatch.setattr(other, "_is_prompt", lambda n: False)
    rows = rows_of(cache, 170)
    begin = 0
    for n, counts in ((100, [100, 3, 41]), (60, [60, 60, 30]), (1, None), (2, [2, 0, 1])):
        found, wanted = (decode(one, part(rows, begin, begin + n), counts) for one in (cache, other))
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        assert torch.equal(cache.ring.list_pos, other.ring.list_pos)
        known = cache.ring.list_pos >= 0
        assert torch.equal(cache.ring.lists[known], other.ring.lists[known])
        begin += n
    cache.check()


def test_rope_tables_must_have_the_positions_of_the_top(device):
    cache = make(device)
    rows = rows_of(cache, 40)
    served(cache, rows, [40])

    def attend(positions):
        table = OPS.rope_cache(positions, 8, 10000.0, device=torch.device(device))
        cu = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
        pools = (cache.k_pool, cache.v_pool, cache.block_table, cache.lengths)
        out, *_ = tree_cache_attention(rows[0][:, -1], *pools, cu, rope_table=table, **OPTIONS)
        return out

    torch.testing.assert_close(attend(32).cpu(), whole(cache, rows, 40)[0][:, -1], atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="rope_table must have at least 32 positions"):
        attend(31)
