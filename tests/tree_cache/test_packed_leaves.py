"""Tokens in 8 and 4 bits (docs/semantics/tree_cache.md §7.5): the ops, and caches with ``leaf_bits``."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_tree_cache import assert_near, on_cpu
from torch import Tensor
from tree_cache_schedules import DTYPES, Run, Sequence, Shape, bitwise, schedules

from htree_ops import HTreeAttention, TreeKVCache, kv_compress, kv_decompress
from htree_ops.ops.tree_cache import (
    page_rows,
    tree_cache_append_,
    tree_cache_append_packed_,
    tree_cache_attention,
)
from htree_ops.reference import tree_cache as reference
from tests.support.cases import case_id
from tests.support.graphs import capture, on_another_stream
from tests.support.opcheck import opcheck
from tests.support.tree_cache_cases import (
    PACKED_CASES,
    TreeCacheCase,
    empty_packed_pools,
    filled_packed_pools,
    filled_pools,
    offsets,
    op_options,
    packed_append_call,
)

ops = torch.ops.htree
CODES = ("k_codes", "k_scales", "v_codes", "v_scales")
BITS = pytest.mark.parametrize("bits", [8, 4])
CASE = pytest.mark.parametrize("case", PACKED_CASES, ids=case_id)


def same_bytes(ours: Tensor, theirs: Tensor) -> bool:
    """Equal values, where NaN equals NaN."""
    ours, theirs = ours.cpu(), theirs.cpu()
    if not ours.dtype.is_floating_point:
        return torch.equal(ours, theirs)
    return torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(ours.nan_to_num(), theirs.nan_to_num())


def expanded(x: Tensor, bits: int) -> Tensor:
    """Rows [N, H_kv, D] as they come back from so many bits."""
    rows = kv_compress(x.transpose(0, 1)[None], x.shape[2], bits)
    return kv_decompress(*rows, x.shape[2], x.shape[2], bits, x.dtype)[0].transpose(0, 1)


def expanded_pools(case: TreeCacheCase, bits: int, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """Plain pages with nodes of the tokens as they came, into which the tokens are put as they come back."""
    k_pool, v_pool, table = filled_pools(case, k, v)
    for pool, x in ((k_pool, expanded(k, bits)), (v_pool, expanded(v, bits))):
        for b, (length, first) in enumerate(zip(case.lengths, offsets(case.lengths, "cpu"), strict=False)):
            token = torch.arange(length, device=k.device)
            page, row = table[b].long()[token // case.page_size], token % case.page_size
            pool[page, :, row] = x[int(first) : int(first) + length]
    return {"k_pool": k_pool, "v_pool": v_pool}


def attention_of(
    case: TreeCacheCase, pools: dict[str, Tensor], table: Tensor, q: Tensor, device: str
) -> tuple[Tensor, ...]:
    lists: tuple[Tensor | None, Tensor | None] = case.make_inputs(device)[6:]
    return tree_cache_attention(
        q,
        pools["k_pool"],
        pools["v_pool"],
        table,
        torch.tensor(case.lengths, dtype=torch.int32, device=device),
        offsets(case.queries, device),
        *lists,
        **case.options(),
        **{name: pools[name] for name in CODES if name in pools},
    )


# ---- the ops


@BITS
@CASE
def test_append_writes_the_bytes_of_the_reference(device, case, bits):
    """In three calls that end inside nodes."""
    lengths = tuple(min(n, 70) for n in case.lengths)
    case = replace(case, lengths=lengths, queries=lengths)
    k, v = case.tokens(device)
    pools, table = empty_packed_pools(case, bits, device)
    expected = tuple(x.cpu() for x in pools.values())
    firsts, done = offsets(lengths, "cpu")[:-1], torch.zeros(len(lengths), dtype=torch.int32)
    for part in (3, 2, 1):
        new = (torch.tensor(lengths, dtype=torch.int32) - done) // part
        rows = torch.cat(
            [torch.arange(f, f + n) for f, n in zip((firsts + done).tolist(), new.tolist(), strict=True)]
        )
        cu, at = offsets(tuple(new.tolist()), "cpu"), rows.to(device)
        tree_cache_append_packed_(
            *pools.values(), k[at], v[at], table, done.to(device), cu.to(device), **case.options()
        )
        expected = reference.tree_cache_append(
            expected, k.cpu()[rows], v.cpu()[rows], table.cpu(), done, cu, **case.page_options()
        )
        done = done + new
    assert done.tolist() == list(lengths)
    for (name, ours), theirs in zip(pools.items(), expected, strict=True):
        assert same_bytes(ours, theirs), name


@BITS
@CASE
def test_nodes_are_those_of_plain_pages_and_codes_those_of_kv_compress(device, case, bits):
    k, v = case.tokens(device)
    pools, table = filled_packed_pools(case, bits, k, v)
    plain_k, plain_v, _ = filled_pools(case, k, v)
    assert same_bytes(pools["k_pool"], plain_k[:, :, case.page_size :])
    assert same_bytes(pools["v_pool"], plain_v[:, :, case.page_size :])
    for name, x in (("k", k), ("v", v)):
        _, codes, scales = kv_compress(x.transpose(0, 1)[None], x.shape[2], bits)
        for b, (length, first) in enumerate(zip(case.lengths, offsets(case.lengths, "cpu"), strict=False)):
            token = torch.arange(length, device=device)
            page, row = table[b].long()[token // case.page_size], token % case.page_size
            here = slice(int(first), int(first) + length)
            assert torch.equal(pools[f"{name}_codes"][page, :, row], codes[0, :, here].transpose(0, 1))
            assert torch.equal(pools[f"{name}_scales"][page, :, row], scales[0, :, here].transpose(0, 1))


@BITS
@CASE
def test_attention_gives_the_rows_of_the_reference(device, case, bits):
    q, k, v = case.last_queries(device), *case.tokens(device)
    pools, table = filled_packed_pools(case, bits, k, v)
    out, lse, lists, list_pos = attention_of(case, pools, table, q, device)
    inputs = case.make_inputs("cpu")
    expected = reference.tree_cache_attention(
        *on_cpu(q, pools["k_pool"], pools["v_pool"], table),
        *inputs[4:],
        **case.options(),
        **{name: pools[name].cpu() for name in CODES},
        compute_dtype=torch.float32,
    )
    if case.dtype == torch.float32:
        assert torch.equal(list_pos.cpu(), expected[3])
        assert torch.equal(lists.cpu(), expected[2])
    assert_near(out, expected[0], case.dtype)
    assert_near(lse, expected[1], torch.float32, largest=10.0)


@BITS
@CASE
def test_a_row_has_the_bits_of_plain_pages_with_these_tokens(device, case, bits, monkeypatch):
    """On CUDA by the general kernels; those of the decode kernel are in test_packed_decode.py."""
    monkeypatch.setenv("HTREE_TREE_DECODE", "general")
    q, k, v = case.last_queries(device), *case.tokens(device)
    pools, table = filled_packed_pools(case, bits, k, v)
    ours = attention_of(case, pools, table, q, device)
    theirs = attention_of(case, expanded_pools(case, bits, k, v), table, q, device)
    assert bool(ours[0].isfinite().all())
    for name, a, b in zip(("out", "lse", "lists", "list_pos"), ours, theirs, strict=True):
        assert torch.equal(a, b), name


def test_tokens_that_are_not_finite_poison_their_own_rows(device):
    case = replace(PACKED_CASES[0], lengths=(9,), queries=(9,))
    q, k, v = case.sequences(device)
    v[3, 0, 5], v[4, 1, 0] = torch.inf, torch.nan
    pools, table = filled_packed_pools(case, 8, k, v)
    out, *_ = attention_of(case, pools, table, q, device)
    first, second = out[:, :2], out[:, 2:]  # of the two K/V heads
    for rows_of_head, begin in ((first, 3), (second, 4)):
        assert bool(rows_of_head[:begin].isfinite().all())
        assert bool(rows_of_head[begin:].isnan().all())


def test_nothing_behind_a_length_is_read(device):
    case = replace(PACKED_CASES[0], lengths=(37, 22), queries=(2, 1))
    q, k, v = case.last_queries(device), *case.tokens(device)
    pools, table = filled_packed_pools(case, 4, k, v)
    shorter = replace(case, lengths=(31, 16))
    out, *_ = attention_of(shorter, pools, table, q, device)
    for b, length in enumerate(shorter.lengths):
        token = torch.arange(length, case.lengths[b], device=device)
        page, row = table[b].long()[token // case.page_size], token % case.page_size
        for name in ("k_scales", "v_scales"):
            pools[name][page, :, row] = torch.nan
    again, *_ = attention_of(shorter, pools, table, q, device)
    assert bool(out.isfinite().all())
    assert torch.equal(out, again)


def test_opcheck_of_attention_from_packed_tokens(device):
    """That of the append is in test_tree_cache.py."""
    case = replace(PACKED_CASES[3], lengths=(21, 9), queries=(2, 1))
    q, k, v = case.last_queries(device), *case.tokens(device)
    pools, table = filled_packed_pools(case, 8, k, v)
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    arguments = (q, pools["k_pool"], pools["v_pool"], table, lengths, offsets(case.queries, device))
    packed = [pools[name] for name in CODES]
    opcheck(
        ops._tree_cache_attention.default,
        (*arguments, *[None] * 4, *packed, *[None] * 3, case.page_size, *case.packed()),
    )


WIDE = torch.zeros(1, 1, 1, 1, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k_codes": None}, ValueError, "must be given together, got 3 of them"),
        ({"k_codes": WIDE}, ValueError, "size 0 of k_codes must be 7"),
        ({"k_codes": WIDE[0]}, ValueError, "k_codes must be"),
        ({"v_scales": WIDE}, ValueError, "v_scales must be"),
        ({"v_scales": torch.zeros(7, 2, 8)}, TypeError, "v_scales must have dtype torch.float16"),
        (
            {"k_codes": torch.zeros(7, 2, 8, 48, dtype=torch.uint8)},
            ValueError,
            "a byte for each channel or for each two",
        ),
        (
            {"v_codes": torch.zeros(7, 2, 8, 128, dtype=torch.uint8)},
            ValueError,
            r"V \* bits / 8 = 64 bytes for V = 128 of v_pool and the 4 bits of k_codes, got \[7, 2, 8, 128\]",
        ),
        (
            dict.fromkeys(("k_codes", "v_codes"), torch.zeros(7, 2, 8, 64, dtype=torch.uint8)),
            ValueError,
            r"V \* bits / 8 = 128 bytes for V = 128 of v_pool and the 8 bits of k_codes, got \[7, 2, 8, 64\]",
        ),
        ({"k_pool": torch.zeros(7, 2, 11, 64)}, ValueError, "rows of a page"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_attention_refuses(change, error, message):
    case = replace(PACKED_CASES[0], lengths=(21, 9), queries=(2, 1))
    q, k, v = case.last_queries("cpu"), *case.tokens("cpu")
    pools, table = filled_packed_pools(case, 4, k, v)
    tails = ("k_tail", "v_tail")
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    named = {name: x for name, x in pools.items() if name not in tails} | {
        "block_table": table,
        "lengths": lengths,
        "cu_q": offsets(case.queries, "cpu"),
    }
    with pytest.raises(error, match=message):
        tree_cache_attention(q, **(named | case.options() | change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"k_tail": torch.zeros(2, 2, 6, 64), "v_tail": torch.zeros(2, 2, 6, 128)},
            ValueError,
            "multiple of compression_rate = 4",
        ),
        ({"v_tail": torch.zeros(2, 2, 4, 128)}, ValueError, "tokens of k_tail"),
        ({"k_tail": torch.zeros(3, 2, 8, 64)}, ValueError, "B of block_table"),
        ({"k": torch.zeros(5, 2, 32)}, ValueError, "K of k_pool"),
        (
            {"v_codes": torch.zeros(7, 2, 8, 128, dtype=torch.uint8)},
            ValueError,
            "v_codes must have V .* = 64 bytes for V = 128",
        ),
        ({"lengths": torch.tensor([22, 1], dtype=torch.int32)}, ValueError, "at most max_pages"),
        (
            {"block_table": torch.full((2, 3), 99, dtype=torch.int32)},
            IndexError,
            "must be a page of the pool",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_append_refuses_and_writes_nothing(change, error, message):
    (k_pool, v_pool, leaves, *rest), options = packed_append_call("cpu")
    arguments = (k_pool, v_pool, *leaves, *rest)
    written = ("k_pool", "v_pool", *CODES, "k_tail", "v_tail")
    names = (*written, "k", "v", "block_table", "lengths", "cu_new", "new_lengths", "max_new")
    named = dict(zip(names, arguments, strict=True)) | options
    before = {name: named[name].clone() for name in written}
    with pytest.raises(error, match=message):
        tree_cache_append_packed_(**named | change)
    assert all(same_bytes(named[name], x) for name, x in before.items())


def test_append_refuses_another_number_of_leaves():
    (k_pool, v_pool, leaves, *rest), options = packed_append_call("cpu")
    with pytest.raises(ValueError, match="leaves must have 0 or 6 tensors, got 4"):
        ops._tree_cache_append_(k_pool, v_pool, leaves[:4], *rest, **op_options(options))


def test_rows_of_a_page():
    assert page_rows(256, 3, 16, 4) == (256 + 16 + 1 + 64, 256 + 16 + 1)
    assert page_rows(256, 3, 16, 4, packed_tokens=True) == (16 + 1 + 64, 16 + 1)
    assert page_rows(256, 1, packed_tokens=True) == (0, 0)


# ---- schedules


class PackedSequence(Sequence):
    """A sequence, and the first token that its tail still has."""

    tail_begin = 0

    def copy(self) -> PackedSequence:
        copied = PackedSequence(list(self.tokens), dict(self.ring))
        copied.tail_begin = self.tail_begin
        return copied

    def cut(self, length: int) -> None:
        super().cut(length)
        self.tail_begin = min(self.tail_begin, length)


class PackedRun(Run):
    """A schedule on a cache with ``leaf_bits``, beside a cache that gets one whole sequence at once."""

    first_exact = 1

    def __init__(self, shape: Shape, device: str = "cpu") -> None:
        super().__init__(shape, device, bitwise)
        self.model = [PackedSequence() for _ in range(shape.batch)]

    def fresh(self, tokens: list[int]) -> tuple[TreeKVCache, Tensor]:
        """A cache of the sequence alone, and its rows."""
        cache = replace(self.shape, batch=1, num_pages=None).cache(str(self.k.device))
        ids = torch.tensor([tokens], dtype=torch.int64, device=self.k.device)
        cache.append(self.k[ids], self.v[ids])
        return cache, cache.attend(self.q[ids])[0]

    def reference(self, tokens: list[int]) -> Tensor:
        return self.fresh(tokens)[1]

    def append(self) -> None:
        super().append()
        for x in self.model:
            x.tail_begin = max(x.tail_begin, len(x.tokens) - self.shape.page_size)

    def may_end(self, sequence: Sequence, length: int) -> bool:
        begin = length - length % self.shape.rate  # of the node whose other tokens are taken back
        whole = length in (-1, begin, len(sequence.tokens))
        return (whole or begin >= sequence.tail_begin) and super().may_end(sequence, length)

    def check_layers(self) -> None:
        super().check_layers()
        assert self.cache.pools.leaves.tail_begin.tolist() == [x.tail_begin for x in self.model]
        for b, sequence in enumerate(self.model):
            whole, _ = self.fresh(sequence.tokens)
            for layer in range(self.cache.num_layers):
                for rows, again in zip(self.cache.layer(b, layer), whole.layer(0, layer), strict=True):
                    assert torch.equal(rows, again)


def packed_shape(seed: int) -> Shape:
    draw = random.Random(seed)
    shape = Shape.draw(seed, DTYPES[:3])
    wide = {"key_dim": 64, "value_dim": draw.choice((64, 128)), "leaf_bits": draw.choice((8, 4))}
    frequencies = None if shape.frequencies is None else tuple(draw.random() for _ in range(32))
    top_nodes = shape.top_nodes + draw.choice((0, 0, 6))  # more than a list has children, or not
    return replace(shape, **wide, frequencies=frequencies, top_nodes=top_nodes)


def test_any_schedule_gives_the_bytes_and_the_rows_of_the_whole_sequence():
    """Appends, truncations, reorders and forks: what a cache holds follows from the sequence, and so do its rows."""
    seeds = schedules(10_000)[::10]
    refused = 0
    for seed in seeds:
        run = PackedRun(packed_shape(seed))
        try:
            run.run(steps=5)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {run.shape}") from error
        assert run.different == 0, f"seed {seed}: {run.shape}"
        refused += sum("with leaf_bits" in said for said in run.refused)
    assert refused > len(seeds) // 40  # the rule of truncations was tried


# ---- the cache


def make(device: str, bits: int | None = 8, **others: Any) -> TreeKVCache:
    settings = {
        "compression_rate": 4, "top_k": 3, "max_top_nodes": 12, "page_size": 8, "dtype": torch.float32,
        "device": device, "leaf_bits": bits,
    }  # fmt: skip
    return TreeKVCache(2, 2, 64, 60, **(settings | others))


def rows(n: int, heads: int, seed: int, device: str) -> Tensor:
    return torch.randn(2, n, heads, 64, generator=torch.Generator().manual_seed(seed)).to(device)


def test_a_cache_decodes_close_to_one_of_whole_tokens(device):
    q, k, v = rows(50, 4, 0, device), rows(50, 2, 1, device), rows(50, 2, 2, device)
    for bits, bound in ((8, 0.02), (4, 0.3)):
        packed, plain = make(device, bits), make(device, None)
        outs = []
        for cache in (packed, plain):
            cache.append(k[:, :37], v[:, :37])
            parts = [cache.attend(q[:, :37])]
            for t in range(37, 50):
                cache.append(k[:, t : t + 1], v[:, t : t + 1])
                parts.append(cache.attend(q[:, t : t + 1]))
            outs.append(torch.cat(parts, dim=1).double())
        assert 0 < float((outs[0] - outs[1]).norm() / outs[1].norm()) < bound


def test_a_prompt_has_the_bits_of_single_steps(device):
    """Plain caches on a GPU build a tree on the tokens of 256 rows and more; of packed ones it would be another."""
    settings: dict[str, Any] = {"compression_rate": 4, "top_k": 3, "max_top_nodes": 12, "page_size": 16}
    q, k, v = (rows(300, heads, seed, device)[:1].bfloat16() for heads, seed in ((4, 0), (2, 1), (2, 2)))
    caches = [TreeKVCache(1, 2, 64, 300, **settings, leaf_bits=4, device=device) for _ in range(2)]
    caches[0].append(k, v)
    out = caches[0].attend(q)
    for t in range(300):
        caches[1].append(k[:, t : t + 1], v[:, t : t + 1])
        if t % 17 == 0 or t > 290:
            step = caches[1].attend(q[:, t : t + 1])
            assert torch.equal(step[:, 0], out[:, t])


def test_truncation_that_would_need_lost_tokens(device):
    """Inside a node whose tokens the tail has lost: refused on the CPU, reported on a GPU; a whole node is allowed."""
    cache = make(device)
    cache.append(rows(30, 2, 1, device), rows(30, 2, 2, device))
    if device == "cpu":
        with pytest.raises(
            ValueError, match="sequence 1 can be truncated to a multiple of compression_rate = 4"
        ):
            cache.truncate([29, 9])
        assert cache.lengths.tolist() == [30, 30]
    else:
        cache.truncate([-1, 9])
        with pytest.raises(ValueError, match="sequence 1 was truncated inside a node"):
            cache.check()
        assert cache.lengths.tolist() == [30, 30]
    cache.truncate([26, 8])
    cache.check()
    assert cache.lengths.tolist() == [26, 8]


def test_forks_beams_and_states_take_codes_and_tails_along(device):
    q, k, v = rows(30, 4, 0, device), rows(30, 2, 1, device), rows(30, 2, 2, device)

    def go_on(cache):
        cache.append(k[:, 19:], v[:, 19:])
        return cache.attend(q[:, 19:])

    cache = make(device, num_pages=24)
    cache.append(k[:, :19], v[:, :19])
    state = cache.state_dict()
    other = make(device, num_pages=17)
    other.load_state_dict({name: x.cpu() for name, x in state.items()})
    cache.reorder_([1, 0])
    cache.reorder_([1, 0])
    expected = go_on(cache)
    assert torch.equal(go_on(other), expected)
    forked = make(device, num_pages=24)
    forked.append(k[:, :19], v[:, :19])
    forked.fork(0, 1)
    out = go_on(forked)
    assert torch.equal(out[0], expected[0])
    with pytest.raises(ValueError, match="leaf_bits must be 8, that of the state, got None"):
        make(device, None).load_state_dict(state)
    with pytest.raises(ValueError, match="leaf_bits must be 8, that of the state, got 4"):
        make(device, 4).load_state_dict(
            state | {"k_codes": state["k_codes"][..., :32], "v_codes": state["v_codes"][..., :32]}
        )
    with pytest.raises(ValueError, match="tail_begin and lengths do not fit"):
        make(device).load_state_dict(state | {"tail_begin": state["tail_begin"] * 0 + 40})


@BITS
def test_bytes_and_repr(device, bits):
    cache = make(device, bits, dtype=torch.float16)
    cache.append(rows(9, 2, 1, device).half(), rows(9, 2, 2, device).half())
    page = 2 * 2 * (8 * (64 * bits // 8 + 2) + (2 + 1) * 64 * 2)  # tokens, then 2 and 1 nodes
    found = cache.num_bytes()
    assert found.tokens == 18
    assert found.used == 4 * page
    assert found.allocated > 16 * page
    assert f"leaf_bits={bits}" in repr(cache)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"leaf_bits": 16}, ValueError, "leaf_bits must be None, 8 or 4, got 16"),
        ({"leaf_bits": True}, ValueError, "leaf_bits must be None, 8 or 4, got True"),
        ({"leaf_bits": 8.0}, ValueError, r"leaf_bits must be None, 8 or 4, got 8\.0"),
        ({"leaf_bits": torch.tensor(8)}, ValueError, r"leaf_bits must be None, 8 or 4, got tensor\(8\)"),
        (
            {"value_dim": 32},
            ValueError,
            "value_dim must be a multiple of 64 up to 512 with leaf_bits, got 32",
        ),
        ({"dtype": torch.float64}, TypeError, "dtype must be"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_are_checked(change, error, message):
    with pytest.raises(error, match=message):
        make("cpu", **({"bits": change.pop("leaf_bits")} if "leaf_bits" in change else {}), **change)


def test_a_step_compiles(device):
    """Append, attend and truncate in one graph."""

    def step(cache, q, k, v):
        cache.append(k, v)
        out = cache.attend(q)
        cache.truncate(20)
        return out

    outs = []
    for compiled in (False, True):
        cache = make(device)
        cache.append(rows(20, 2, 1, device), rows(20, 2, 2, device))
        function = torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step
        outs += [function(cache, *(rows(1, heads, 3, device) for heads in (4, 2, 2))) for _ in range(2)]
        assert cache.lengths.tolist() == [20, 20]
        cache.check()
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_a_module_makes_such_a_cache(device):
    torch.manual_seed(0)
    layer = HTreeAttention(128, 2, 1, 64, compression_rate=4, top_k=3, max_top_nodes=12).to(device)
    x = torch.randn(1, 40, 128, device=device)
    with torch.no_grad():
        whole = layer(x)
        cache = layer.make_cache(1, 40, page_size=8, leaf_bits=8)
        parts = torch.cat([layer(x[:, :31], cache=cache), layer(x[:, 31:], cache=cache)], dim=1)
    assert cache.leaf_bits == 8
    assert 0 < float((parts - whole).norm() / whole.norm()) < 0.02


@pytest.mark.gpu
def test_a_captured_step_follows_the_lengths():
    """Append, attend and a truncation that is refused, in a graph."""
    cache, eager = (make("cuda", dtype=torch.bfloat16) for _ in range(2))
    q, k, v = (rows(1, heads, 3, "cuda").bfloat16() for heads in (4, 2, 2))
    long = [rows(20, 2, seed, "cuda").bfloat16() for seed in (1, 2)]
    for each in (cache, eager):
        each.append(*long)

    request = torch.tensor([9, -1], dtype=torch.int32, device="cuda")

    def step(each):
        each.append(k, v)
        out = each.attend(q)
        each.truncate(request)
        return out

    on_another_stream(lambda: (step(cache), step(eager)))
    graph, captured = capture(lambda: step(cache))
    for _ in range(5):
        graph.replay()
        assert torch.equal(captured, step(eager))
    assert cache.lengths.tolist() == eager.lengths.tolist() == [26, 26]
    with pytest.raises(ValueError, match="sequence 0 was truncated inside a node"):
        cache.check()


@pytest.mark.gpu
def test_the_pools_of_a_gpu_are_those_of_the_cpu():
    """Codes, scales, nodes and tails, after prompts of more than a page, single tokens, truncations and beams."""
    for seed in range(24):
        draw = random.Random(seed)
        bits, dtype, span = draw.choice((8, 4)), draw.choice(DTYPES[:3]), draw.choice((None, 2))
        caches = [make(device, bits, dtype=dtype, selection_span=span) for device in ("cpu", "cuda")]
        for step in range(8):
            held = caches[0].lengths.tolist()
            n = draw.choice((1, 1, 5, 23))
            beams, cut = draw.choice(([1, 0], [0, 0])), [x // 2 // 4 * 4 for x in held]
            for cache in caches:
                device = str(cache.device)
                if step % 4 == 2:
                    cache.truncate(cut)
                elif step % 4 == 3:
                    cache.reorder_(beams)
                elif max(held) + n <= 60:
                    cache.append(rows(n, 2, step, device).to(dtype), rows(n, 2, step + 9, device).to(dtype))
            caches[1].check()
        assert caches[0].lengths.tolist() == caches[1].lengths.tolist()
        for b in range(2):
            for layer in range(caches[0].num_layers):
                for ours, theirs in zip(caches[1].layer(b, layer), caches[0].layer(b, layer), strict=True):
                    assert torch.equal(ours.cpu(), theirs)
        leaves = [cache.pools.leaves for cache in caches]
        for name in leaves[0].OF_SEQUENCES:
            assert torch.equal(leaves[1].tensors()[name].cpu(), leaves[0].tensors()[name]), (seed, name)


def test_plain_pages_are_written_as_before(device):
    """A cache without leaf_bits uses ``tree_cache_append_`` and has no other tensors."""
    cache = make(device, None)
    cache.append(rows(9, 2, 1, device), rows(9, 2, 2, device))
    k_pool, v_pool = cache.k_pool.clone(), cache.v_pool.clone()
    zero = torch.zeros(2, dtype=torch.int32, device=device)
    tree_cache_append_(
        k_pool, v_pool, rows(9, 2, 1, device).flatten(0, 1), rows(9, 2, 2, device).flatten(0, 1), cache.block_table,
        zero, offsets((9, 9), device), page_size=8, compression_rate=4, max_top_nodes=12,
    )  # fmt: skip
    pages = cache.block_table[:, :1].flatten().long()
    for ours, theirs in ((k_pool, cache.k_pool), (v_pool, cache.v_pool)):
        # as bytes: rows that nothing was written to may hold NaN
        assert torch.equal(ours[pages].view(torch.uint8), theirs[pages].view(torch.uint8))
