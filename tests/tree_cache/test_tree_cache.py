"""The ops of the tree cache against their reference, and what torch asks of ops (docs/semantics/tree_cache.md §7)."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import htree_ops
from htree_ops import TreeKVCache, tree_attention
from htree_ops.ops.tree_cache import page_rows, tree_cache_append_, tree_cache_attention
from htree_ops.reference import tree_cache as reference
from tests.support.cases import case_id
from tests.support.opcheck import opcheck
from tests.support.tree_attention_problem import packed as packed_options
from tests.support.tree_cache_cases import (
    CASES,
    TreeCacheCase,
    filled_pools,
    offsets,
    op_calls,
    op_options,
)

ops = torch.ops.htree
WIDE, MODEL = (next(case for case in CASES if case.name == name) for name in ("wide", "model"))
#: (a, b) of docs/semantics/tree_attention.md §1.11: |out - ref| <= a max|v| + b |ref|.
TOLERANCE = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (2e-5, 1e-4),
    torch.float16: (1e-3, 1e-3),
    torch.bfloat16: (8e-3, 8e-3),
}


def assert_near(out: Tensor, expected: Tensor, dtype: torch.dtype, largest: float = 4.0) -> None:
    a, b = TOLERANCE[dtype]
    torch.testing.assert_close(
        out.double().cpu(), expected.double().cpu(), atol=a * largest, rtol=b, equal_nan=True
    )


def on_cpu(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.cpu() for x in tensors]


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_append_writes_the_bytes_of_the_reference(device, case):
    case = replace(
        case, selection_span=None if case.page_size % 2 else 2 if case.compression_rate % 2 == 0 else 1
    )
    lengths = tuple(min(n, 70) for n in case.lengths)
    case = replace(case, lengths=lengths, queries=lengths)
    _, k, v = case.sequences(device)
    k_pool, v_pool, table = filled_pools(case, k, v)
    empty = case.empty_pools("cpu")
    none = torch.zeros(len(lengths), dtype=torch.int32)
    expected = reference.tree_cache_append(
        empty[:2], k.cpu(), v.cpu(), empty[2], none, offsets(lengths, "cpu"), **case.page_options()
    )
    assert torch.equal(table.cpu(), empty[2])
    for ours, theirs in zip((k_pool, v_pool), expected, strict=True):
        assert torch.equal(ours.cpu().isnan(), theirs.isnan())
        assert torch.equal(ours.cpu().nan_to_num(), theirs.nan_to_num())


def test_span_means_of_a_whole_node_are_its_keys(device):
    """With c = r they are the keys of layer 1 bit for bit."""
    case = replace(CASES[0], lengths=(61,), queries=(1,), selection_span=4)
    _, k, v = case.sequences(device)
    k_pool, _, table = filled_pools(case, k, v)
    keys, _ = ops.tree_build(k[None], v[None], 4)
    first = page_rows(8, case.layers, 4)[1]
    means = torch.cat([k_pool[page, :, first:].transpose(0, 1) for page in table[0].long()])
    assert torch.equal(means[:15], keys[0, :15])


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_attention_gives_the_rows_of_the_reference(device, case):
    inputs = case.make_inputs(device)
    out, lse, lists, list_pos = tree_cache_attention(*inputs, **case.options())
    wide = torch.float64 if case.dtype == torch.float64 else torch.float32
    expected = reference.tree_cache_attention(
        *on_cpu(*inputs),
        **case.options(),
        compute_dtype=wide,
    )
    if case.dtype in (torch.float32, torch.float64):  # half inputs select as fp32 does on the CPU alone
        assert torch.equal(list_pos.cpu(), expected[3])
        assert torch.equal(lists.cpu(), expected[2])
    assert_near(out, expected[0], case.dtype)
    assert_near(lse, expected[1], torch.float32, largest=10.0)


def test_float64_agrees_to_its_precision():
    case = replace(CASES[2], dtype=torch.float64)
    inputs = case.make_inputs("cpu")
    out, lse, *_ = tree_cache_attention(*inputs, **case.options())
    expected = reference.tree_cache_attention(*inputs, **case.options())
    assert_near(out, expected[0], torch.float64)
    assert lse.dtype == torch.float64


@pytest.mark.parametrize(("stride", "span"), [(1, None), (4, None), (1, 4), (4, 2)])
def test_decoding_has_the_bits_of_the_whole_sequence_on_the_cpu(stride, span):
    """Also where the page is larger than the sequence, and where the sequence outgrows several layers."""
    case = replace(MODEL, lengths=(1200,), queries=(1200,), selection_stride=stride, selection_span=span)
    q, k, v = (x[None] for x in case.sequences("cpu"))
    options = {
        name: value for name, value in case.options().items() if name not in ("page_size", "selection_span")
    }
    whole = tree_attention(q, k, v, **options)
    cache = TreeKVCache(1, 2, 64, 1200, dtype=case.dtype, **options)
    done = 0
    for n in (700, 1, 1, 1, 13, 1, 480, 1, 1, 1):
        cache.append(k[:, done : done + n], v[:, done : done + n])
        assert torch.equal(cache.attend(q[:, done : done + n]), whole[:, done : done + n])
        done += n
    assert done == 1200


def test_queries_may_come_in_any_groups(device):
    """A row has the same bits alone, in a chunk, beside other sequences and after them."""
    case = replace(WIDE, lengths=(200, 120), queries=(7, 120))
    q, k_pool, v_pool, table, lengths, cu, *_ = case.make_inputs(device)
    together, lse, *_ = tree_cache_attention(q, k_pool, v_pool, table, lengths, cu, **case.options())
    for sequence, (first, count) in enumerate(((0, 7), (7, 120))):
        for i in range(0, count, 3):
            one = tree_cache_attention(
                q[first + i : first + i + 1],
                k_pool,
                v_pool,
                table[sequence : sequence + 1],
                lengths[sequence : sequence + 1] - (count - 1 - i),
                torch.tensor([0, 1], dtype=torch.int32, device=device),
                **case.options(),
            )
            assert torch.equal(one[0][0], together[first + i])
            assert torch.equal(one[1][0], lse[first + i])


@pytest.mark.gpu
@pytest.mark.parametrize("span", [None, 4])
def test_more_rows_than_one_chunk_of_scratch_holds(span):
    """The call is worked off in pieces that end inside a stride; a row's bits do not show where."""
    case = TreeCacheCase(
        name="chunks",
        dtype=torch.bfloat16,
        lengths=(5000, 3001),
        queries=(1496, 777),
        heads=8,
        kv_heads=1,
        key_dim=64,
        value_dim=64,
        page_size=256,
        max_top_nodes=1024,
        selection_stride=16,
        selection_span=span,
        ring=4,
    )
    q, k_pool, v_pool, table, lengths, cu, lists, list_pos = case.make_inputs("cuda")
    whole, _, new_lists, new_pos = tree_cache_attention(
        q, k_pool, v_pool, table, lengths, cu, lists, list_pos, **case.options()
    )
    assert bool(whole.isfinite().all())
    for sequence, (first, count) in enumerate(((0, 1496), (1496, 777))):
        here = slice(sequence, sequence + 1)
        kept, kept_pos = lists[here], list_pos[here]
        for begin in range(0, count, 200):  # every other cut lies inside a stride: the ring has its leader
            end = min(begin + 200, count)
            part, _, kept, kept_pos = tree_cache_attention(
                q[first + begin : first + end],
                k_pool,
                v_pool,
                table[here],
                lengths[here] - (count - end),
                offsets((end - begin,), "cuda"),
                kept,
                kept_pos,
                **case.options(),
            )
            assert torch.equal(part, whole[first + begin : first + end])
        assert torch.equal(kept_pos, new_pos[here])
        assert torch.equal(kept, new_lists[here])


def test_pages_may_lie_anywhere(device):
    case = CASES[1]
    q, k_pool, v_pool, table, lengths, cu, *_ = case.make_inputs(device)
    out, *_ = tree_cache_attention(q, k_pool, v_pool, table, lengths, cu, **case.options())
    order = torch.randperm(len(k_pool), generator=torch.Generator().manual_seed(9)).to(device)
    moved_k, moved_v = torch.empty_like(k_pool), torch.empty_like(v_pool)
    moved_k[order], moved_v[order] = k_pool, v_pool
    moved, *_ = tree_cache_attention(
        q, moved_k, moved_v, order.int()[table.long()], lengths, cu, **case.options()
    )
    assert torch.equal(moved, out)


def test_rows_that_do_not_count(device):
    """Behind q_lengths, before the first token, and in no sequence."""
    case = replace(CASES[0], lengths=(5, 3), queries=(4, 4))
    q, k, v = case.sequences(device)
    k_pool, v_pool, table = filled_pools(case, k, v)
    lengths = torch.tensor([5, 3], dtype=torch.int32, device=device)
    cu = torch.tensor([0, 4, 8], dtype=torch.int32, device=device)
    rows = torch.cat([q, q])[:9]
    counts = torch.tensor([2, 4], dtype=torch.int32, device=device)
    out, lse, *_ = tree_cache_attention(
        rows, k_pool, v_pool, table, lengths, cu, q_lengths=counts, **case.options()
    )
    absent = torch.tensor([2, 3, 4, 8], device=device)  # two behind, one before token 0, one in no sequence
    assert not out[absent].any()
    assert bool((lse[absent] == -torch.inf).all())
    first = tree_attention(
        rows[None, 5:8],
        k[None, 5:8],
        v[None, 5:8],
        **{
            name: value
            for name, value in case.options().items()
            if name not in ("page_size", "selection_span")
        },
    )
    assert_near(out[5:8], first[0], torch.float32)


def test_a_row_without_its_leader_is_nan(device):
    case = replace(CASES[2], lengths=(30,), queries=(1,), ring=None)
    out, lse, lists, list_pos = tree_cache_attention(*case.make_inputs(device), **case.options())
    assert bool(out.isnan().all())
    assert bool(lse.isnan().all())
    assert list_pos.tolist() == [[-1] * 4]
    assert lists.shape == (1, 4, case.layers, 2, 4)


def test_nothing_behind_a_length_is_read(device, nan_memory):
    """Other pages, rows of the open page behind the sequence and nodes that are not finished may hold anything."""
    case = replace(CASES[0], lengths=(37, 22), queries=(2, 1))
    q, k_pool, v_pool, table, lengths, cu, *_ = case.make_inputs(device)  # NaN where nothing was written
    for pool in (k_pool, v_pool):
        pool[table[1, 2:].long()] = torch.inf
    out, *_ = tree_cache_attention(q, k_pool, v_pool, table, lengths - 6, cu, **case.options())
    table[0, 4:] = -7
    table[1, 2:] = 1 << 30
    again, *_ = tree_cache_attention(q, k_pool, v_pool, table, lengths - 6, cu, **case.options())
    assert bool(out.isfinite().all())
    assert torch.equal(out, again)


def test_a_rope_table_may_be_given(device):
    case = CASES[0]
    inputs = case.make_inputs(device)
    table = ops.rope_cache(16, 8, 10000.0, device=torch.device(device))
    out, *_ = tree_cache_attention(*inputs, **case.options())
    given, *_ = tree_cache_attention(*inputs, rope_table=table, **case.options())
    assert_near(given, out, torch.float32)


def integers(values: Any, device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def test_truncations_are_those_of_the_reference(device):
    """Random ones, possible or not: what is not leaves a sequence as it was and sets a bit."""
    met = 0
    for seed in range(300):
        draw = random.Random(seed)
        batch, stride, rate, packed = draw.randint(1, 200), draw.choice((1, 2, 4)), 4, seed % 2 == 0
        lengths = [draw.randint(0, 30) for _ in range(batch)]
        leaders = [[draw.randint(-1, 7) * stride for _ in range(4)] for _ in range(batch)]
        begins = [draw.randint(0, 20) for _ in range(batch)]
        counts = [draw.randint(-1, length + draw.randint(0, 1)) for length in lengths]
        own_from = [draw.choice((0, 0, 8)) for _ in range(batch)]
        state = [integers(x, device) for x in (lengths, [0] * batch, [[0] * batch] * 2, leaders)]
        lists = torch.zeros(batch, 4, 1, 1, 2, dtype=torch.int32, device=device)
        tail = torch.zeros(batch, 1, 8, 64, device=device)
        leaves = [tail, tail, tail, tail, tail, tail, integers(begins, device)] if packed else []
        options = {"compression_rate": rate, "top_k": 2, "max_top_nodes": 8, "selection_stride": stride}
        table = torch.zeros(batch, 4, dtype=torch.int32, device=device)
        asked = (integers(counts, device), integers(own_from, device), 8, *packed_options(**options))
        ops._tree_cache_truncate_(leaves, [*state, lists], table, *asked)
        given = (lengths, leaders, begins if packed else None, counts, own_from)
        after, ring, tails, errors = reference.truncate(*given, stride=stride, rate=rate)
        assert state[0].tolist() == after, seed
        assert state[3].tolist() == ring, seed
        assert state[1].tolist() == errors, seed
        assert not packed or leaves[6].tolist() == tails, seed
        met |= sum({bit for error in errors for bit in (4, 8, 32, 128) if error & bit})
    assert met == 4 + 8 + 32 + 128


@pytest.mark.parametrize("stride", [1, 2])
def test_appends_take_what_their_pages_hold(device, stride):
    """Tokens that have no place leave their sequence alone, whatever the table says; the others are taken.

    On the CPU the call raises instead, and nothing changes.
    """
    met = 0
    for seed in range(60):
        draw = random.Random(seed)
        cache = TreeKVCache(
            5, 1, 8, 40, page_size=8, num_pages=12, compression_rate=4, top_k=2, max_top_nodes=8,
            selection_stride=stride, dtype=torch.float32, device=device,
        )  # fmt: skip
        pages = draw.sample(range(12), 12)
        held = [pages[2 * b : 2 * b + 2] for b in range(5)]
        lengths = [draw.randint(0, 16) for _ in range(5)]
        table = [[*row, -1, -1, -1] for row in held]
        counts = [draw.randint(0, 8) for _ in range(5)]
        for b in range(5):
            wrong = draw.choice((None, None, "page", "hole", "length", "end", "pool"))
            if wrong == "hole" and lengths[b] < 9:
                table[b][1] = -1
            elif wrong == "page":
                table[b][1] = 12
            elif wrong == "length":
                lengths[b] = -draw.randint(1, 2**31)
            elif wrong == "end":
                lengths[b] = draw.randint(33, 2**31 - 1)
        cache.block_table.copy_(integers(table, device))
        cache.lengths.copy_(integers(lengths, device))
        for pool in (cache.k_pool, cache.v_pool):
            pool.zero_()
        k = torch.ones(5, 8, 1, 8, device=device)
        before, behind = cache.step_arguments(integers(counts, device), 8)
        sizes = {"num_pages": 12, "capacity": 40, "page_size": 8}
        after, taken, errors = reference.advance(lengths, counts, table, **sizes)
        broken = device == "cpu" and any(
            n and not 0 <= page < 12
            for n, row, end in zip(taken, table, after, strict=True)
            for page in row[: -(-end // 8)]
        )
        if broken or (device == "cpu" and any(errors)):  # an earlier page is looked at by the CPU alone
            met |= sum({bit for error in errors for bit in (1, 2, 4, 64) if error & bit})
            with pytest.raises((IndexError, ValueError), match=r"of the pool|more exceed"):
                ops._tree_cache_step_(*before, None, k, k, None, None, *behind)
            assert cache.lengths.tolist() == lengths
            assert not cache.v_pool.any()
            continue
        ops._tree_cache_step_(*before, None, k, k, None, None, *behind)
        assert cache.lengths.tolist() == after, seed
        assert cache._state[2].tolist() == [lengths, taken], seed
        assert cache._errors.tolist() == errors, seed
        met |= sum({bit for error in errors for bit in (1, 2, 4, 64) if error & bit})
        written = cache.v_pool[:, 0, :8].any(dim=2).sum(dim=1)
        for b, row in enumerate(table):
            for place, page in enumerate(row[:2]):
                inside = range(max(after[b] - taken[b], 8 * place), min(after[b], 8 * place + 8))
                if 0 <= page < 12:
                    assert int(written[page]) == len(inside), (seed, b, place)
        cache._errors.zero_()
    assert met == 1 + 2 + 4 + 64


# ---- what torch asks of ops


@pytest.mark.parametrize(
    "name",
    [
        "_tree_cache_append_",
        "_tree_cache_attention",
        "_tree_cache_step_",
        "_tree_cache_truncate_",
        "tree_cache_copy_",
        "_tree_cache_prompt_bytes",
        "_tree_cache_pack_prompt_",
        "_tree_cache_prompt",
    ],
)
def test_opcheck(device, name):
    arguments, options = op_calls(device)[name]
    opcheck(getattr(ops, name).default, arguments, op_options(options))


def test_a_step_compiles_and_exports(device):
    """Append and attend in one graph, with views as inputs, and another batch of lengths."""
    case = replace(CASES[0], lengths=(21, 9), queries=(1, 1))

    def step(q, k_pool, v_pool, k, v, table, lengths):
        cu = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
        tree_cache_append_(k_pool, v_pool, k[:, 0], v[:, 0], table, lengths, cu, **case.options())
        return tree_cache_attention(q[:, 0], k_pool, v_pool, table, lengths + 1, cu, **case.options())[0]

    q, k, v = (x[:4].unflatten(0, (2, 2)) for x in case.sequences(device))
    _, all_k, all_v = case.sequences(device)
    k_pool, v_pool, table = filled_pools(case, all_k, all_v)
    lengths = torch.tensor([20, 8], dtype=torch.int32, device=device)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for count in (0, 1, 4):
        pools = [x.clone() for x in (k_pool, v_pool)], [x.clone() for x in (k_pool, v_pool)]
        held = lengths - count
        expected = step(q, *pools[0], k, v, table, held)
        assert torch.equal(compiled(q, *pools[1], k, v, table, held), expected)
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*pools, strict=True))

    class Step(torch.nn.Module):
        def forward(self, *tensors):
            return step(*tensors)

    arguments = (q, k_pool.clone(), v_pool.clone(), k, v, table, lengths)
    exported = torch.export.export(Step(), arguments, strict=False)
    arguments = (q, k_pool.clone(), v_pool.clone(), k, v, table, lengths)
    assert torch.equal(exported.module()(*arguments), step(q, k_pool.clone(), v_pool.clone(), *arguments[3:]))


def test_no_gradient():
    calls = op_calls("cpu")
    arguments, options = calls["_tree_cache_attention"]
    out, *_ = ops._tree_cache_attention(arguments[0].requires_grad_(), *arguments[1:], **op_options(options))
    with pytest.raises(RuntimeError, match="not implemented"):
        out.nansum().backward()
    arguments, options = calls["_tree_cache_append_"]
    pools, (k, *rest) = arguments[:2], arguments[3:]
    with pytest.raises(NotImplementedError, match="no gradient"):
        tree_cache_append_(*pools, k.requires_grad_(), *rest, **options)


# ---- prompts


def prompt_call(device: str, **change: Any) -> tuple[Any, ...]:
    arguments, options = op_calls(device)["_tree_cache_prompt"]
    names = ("q", "k_pool", "v_pool", "block_table", "length", "copies", "capacity", "store_lists")
    return ops._tree_cache_prompt(**op_options(dict(zip(names, arguments, strict=True)) | options | change))


@pytest.mark.parametrize("span", [None, 2])
@pytest.mark.parametrize("stride", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_prompt(device, dtype, stride, span):
    """Those of ``_attention_rows`` over the tokens, bit for bit, and those of the reference."""
    case = replace(
        CASES[2],
        lengths=(41, 41),
        queries=(13, 13),
        dtype=dtype,
        selection_stride=stride,
        selection_span=span,
    )
    q, k_pool, v_pool, table = case.make_inputs(device)[:4]
    arguments = (q.unflatten(0, (2, 13))[:, 13 - 41 % stride - 8 :], k_pool, v_pool, table, 41, None, 0, True)
    out, gmax, gsum, lists = ops._tree_cache_prompt(*arguments, case.page_size, *case.packed())
    k, v = (x.unflatten(0, (2, 41)) for x in case.tokens(device))
    start = 41 - arguments[0].shape[1]
    *wanted, rows = ops._attention_rows(arguments[0], k, v, [start], True, *case.packed())
    wanted.append(rows.unflatten(1, (len(lists), -1)).transpose(0, 1))
    for ours, theirs in zip((out, gmax, gsum, lists), wanted, strict=True):
        assert torch.equal(ours, theirs)
    expected = reference.tree_cache_prompt(
        *(x.cpu() if isinstance(x, Tensor) else x for x in arguments), **case.options()
    )
    if dtype == torch.float32:
        assert torch.equal(lists.cpu(), expected[2])
        torch.testing.assert_close(out.cpu(), expected[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close((gmax + gsum.log()).cpu(), expected[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(2, 13, 4, 6)}, ValueError, "K of k_pool"),
        ({"q": torch.zeros(3, 13, 4, 8)}, ValueError, "B of block_table"),
        ({"q": torch.zeros(2, 13, 3, 8)}, ValueError, "H of q must be a positive multiple"),
        ({"q": torch.zeros(2, 13, 4, 8, dtype=torch.float16)}, TypeError, "q must have the dtype of k_pool"),
        ({"q": torch.zeros(2, 22, 4, 8)}, ValueError, "q must have at most length = 21 rows"),
        ({"q": torch.zeros(2, 12, 4, 8)}, ValueError, "must be a multiple of selection_stride = 4"),
        ({"length": 99}, ValueError, "length must lie between 0 and max_pages"),
        ({"copies": torch.zeros(3, dtype=torch.uint8)}, ValueError, "copies must have the 0 bytes"),
        ({"copies": torch.zeros(0)}, TypeError, "copies must have dtype torch.uint8"),
        ({"capacity": 20}, ValueError, "capacity must be at least 21"),
        ({"importance": "lse"}, ValueError, 'importance must be "lse_causal" or "exp_joint"'),
        ({"max_top_nodes": 0}, ValueError, "max_top_nodes must be at least 1 and below 2\\^31, got 0"),
        ({"inv_freq": [1.0]}, ValueError, "inv_freq must have K/2 numbers"),
        (
            {"block_table": torch.full((2, 3), 99, dtype=torch.int32)},
            IndexError,
            "must be a page of the pool",
        ),
        ({"block_table": torch.zeros(2, 3)}, TypeError, "block_table must have dtype torch.int32"),
    ],
    ids=str,
)
def test_rows_of_a_prompt_refuse(change, error, message):
    with pytest.raises(error, match=message):
        prompt_call("cpu", **change)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"copies": torch.zeros(3, dtype=torch.uint8)}, ValueError, "copies must have the 0 bytes"),
        ({"copies": torch.zeros(2, 0, dtype=torch.uint8)}, ValueError, "copies must"),
        ({"begin": 22}, ValueError, "begin must lie between 0 and end = 21"),
        ({"begin": -1}, ValueError, "begin must lie between"),
        ({"end": 90}, ValueError, "end must lie between 0 and max_pages"),
        ({"capacity": 20}, ValueError, "capacity must be at least 21"),
        ({"num_heads": 3}, ValueError, "num_heads must be a positive multiple of H_kv = 2"),
        ({"page_size": 6}, ValueError, "page_size must be a multiple"),
    ],
    ids=str,
)
def test_copies_of_a_prompt_refuse(change, error, message):
    names = ("copies", "k_pool", "v_pool", "block_table", "num_heads", "begin", "end", "capacity")
    arguments, options = op_calls("cpu")["_tree_cache_pack_prompt_"]
    with pytest.raises(error, match=message):
        ops._tree_cache_pack_prompt_(
            **op_options(dict(zip(names, arguments, strict=True)) | options | change)
        )


def test_sizes_of_copies_refuse():
    arguments, options = op_calls("cpu")["_tree_cache_prompt_bytes"]
    assert ops._tree_cache_prompt_bytes(*arguments, **op_options(options)) == 0
    for place, value, message in (
        (2, -1, "num_sequences must be at least 0"),
        (3, 5, "num_heads must be a positive multiple"),
        (4, 0, "capacity must be at least 1"),
    ):
        wrong = [*arguments[:place], value, *arguments[place + 1 :]]
        with pytest.raises(ValueError, match=message):
            ops._tree_cache_prompt_bytes(*wrong, **op_options(options))


# ---- what is refused


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"page_size": 6}, ValueError, "page_size must be a multiple of compression_rate = 4"),
        ({"compression_rate": 1}, ValueError, "compression_rate must be"),
        ({"max_top_nodes": 0}, ValueError, "max_top_nodes must be at least 1 and below 2\\^31, got 0"),
        ({"selection_span": 3}, ValueError, "selection_span must be None or a divisor"),
        ({"selection_stride": 8}, ValueError, "selection_stride"),
        ({"importance": "lse"}, ValueError, 'importance must be "lse_causal" or "exp_joint"'),
        ({"rope_base": -1.0}, ValueError, "rope_base must be positive"),
        ({"top_k": 5}, ValueError, "lists must have shape"),
        ({"q": torch.zeros(14, 3, 8)}, ValueError, "H of q must be a positive multiple"),
        ({"q": torch.zeros(14, 4, 6)}, ValueError, "K of k_pool"),
        ({"q": torch.zeros(14, 4, 8, dtype=torch.float16)}, TypeError, "q must have the dtype of k_pool"),
        (
            {"lengths": torch.tensor([21, 90], dtype=torch.int32)},
            ValueError,
            "lengths must lie between 0 and",
        ),
        ({"lengths": torch.tensor([21, 9])}, TypeError, "lengths must have dtype torch.int32"),
        ({"cu_q": torch.tensor([0, 9, 5], dtype=torch.int32)}, ValueError, "cu_q must ascend"),
        ({"q_lengths": torch.tensor([6, 1], dtype=torch.int32)}, ValueError, "q_lengths must lie between"),
        ({"lists": None}, ValueError, "lists and list_pos must be given together"),
        (
            {"block_table": torch.full((2, 3), 99, dtype=torch.int32)},
            IndexError,
            "must be a page of the pool",
        ),
        ({"rope_table": torch.zeros(2, 8, 4)}, ValueError, "rope_table must have at least 16 positions"),
    ],
    ids=str,
)
def test_attention_refuses(change, error, message):
    names = ("q", "k_pool", "v_pool", "block_table", "lengths", "cu_q", "lists", "list_pos")
    arguments, options = op_calls("cpu")["_tree_cache_attention"]
    with pytest.raises(error, match=message):
        tree_cache_attention(**dict(zip(names, arguments, strict=True)) | options | change)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k": torch.zeros(5, 1, 8)}, ValueError, "H_kv of k_pool"),
        ({"v": torch.zeros(4, 2, 6)}, ValueError, "the new tokens of k"),
        ({"lengths": torch.tensor([22, 1], dtype=torch.int32)}, ValueError, "at most max_pages"),
        ({"lengths": torch.tensor([-1, 1], dtype=torch.int32)}, ValueError, "at least 0"),
        ({"cu_new": torch.tensor([0, 7, 5], dtype=torch.int32)}, ValueError, "cu_new must ascend"),
        ({"max_new": 2}, ValueError, "max_new = 2 must be at least"),
        ({"max_new": 0}, ValueError, "max_new = 0 must be at least"),
        ({"new_lengths": torch.tensor([4, 1], dtype=torch.int32)}, ValueError, "new_lengths must lie"),
        (
            {"block_table": torch.full((2, 3), -1, dtype=torch.int32)},
            IndexError,
            "must be a page of the pool",
        ),
        ({"k_pool": torch.zeros(7, 2, 12, 8)}, ValueError, "rows of a page"),
        ({"v_pool": torch.zeros(7, 2, 6, 12).mT}, ValueError, "contiguous|rows of a page"),
    ],
    ids=str,
)
def test_append_refuses_and_writes_nothing(change, error, message):
    names = ("k_pool", "v_pool", "k", "v", "block_table", "lengths", "cu_new", "new_lengths", "max_new")
    arguments, options = op_calls("cpu")["_tree_cache_append_"]
    named = dict(zip(names, (*arguments[:2], *arguments[3:]), strict=True)) | options
    before = [named[name].clone() for name in ("k_pool", "v_pool")]
    with pytest.raises(error, match=message):
        tree_cache_append_(**named | change)
    for name, pool in zip(("k_pool", "v_pool"), before, strict=True):
        assert torch.equal(named[name].nan_to_num(), pool.nan_to_num())


@pytest.mark.parametrize("pages", [(-2, 0), (7, 0), (0, -1), (0, 7)], ids=str)
def test_copy_refuses_pages_that_are_none(device, pages):
    """A device leaves such a copy out; the host says so and copies nothing, not even what comes before."""
    k_pool, v_pool = (torch.randn(7, 2, 12, 8, device=device) for _ in range(2))
    before = k_pool.clone()
    call = torch.tensor([[1, -1, pages[0]], [2, 3, pages[1]]], dtype=torch.int32, device=device)
    if device == "cpu":
        with pytest.raises(
            IndexError, match=f"between 0 and num_pages - 1 = 6, got {pages[0]} and {pages[1]}"
        ):
            ops.tree_cache_copy_(k_pool, v_pool, call)
    else:
        ops.tree_cache_copy_(k_pool, v_pool, call)
        before[2] = before[1]
    assert torch.equal(k_pool, before)


def test_a_page_with_other_tokens_is_not_written():
    """The pages that an append writes belong to one sequence; full pages, and rows behind it, may be anything."""
    arguments, options = op_calls("cpu")["_tree_cache_append_"]
    k_pool, v_pool, _, k, v, _, _, cu, *_ = arguments
    pools = [x.clone() for x in (k_pool, v_pool)]

    def append(table, lengths):
        now = (torch.tensor(x, dtype=torch.int32) for x in (table, lengths))
        tree_cache_append_(*pools, k, v, *now, cu, **options)

    for table, lengths, words in (
        ([[0, 1, 2], [0, 3, 4]], [9, 3], r"page 0, which is written, at \[1, 0\] and \[0, 0\]"),
        ([[0, 1, 2], [3, 1, 4]], [9, 9], r"page 1, which is written, at \[1, 1\] and \[0, 1\]"),
        ([[0, 0, 2], [3, 1, 4]], [9, 9], r"page 0, which is written, at \[0, 1\] and \[0, 0\]"),
    ):
        with pytest.raises(ValueError, match=words):
            append(table, lengths)
    assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(pools, arguments[:2], strict=True))
    append([[0, 1, 1], [0, 3, 1]], [9, 9])


@pytest.mark.gpu
def test_bad_tables_leave_memory_alone_on_a_gpu():
    """Random lengths, offsets, pages and lists: attention stays in bounds, and what does not fit is not written."""
    generator = torch.Generator().manual_seed(5)
    case = replace(CASES[2], lengths=(40, 29, 17), queries=(5, 5, 5), ring=4)
    for _ in range(200):
        q, k_pool, v_pool, table, lengths, _, lists, list_pos = case.make_inputs("cuda")

        def noise(like, low, high):
            drawn = torch.randint(low, high, like.shape, generator=generator, dtype=torch.int32)
            return torch.where(torch.rand(like.shape, generator=generator) < 0.3, drawn, like.cpu()).to(
                "cuda"
            )

        bad_table, bad_lengths = noise(table, -9, 99), noise(lengths, -50, 90)
        cu = noise(offsets((5, 5, 5), "cuda"), -3, 40)
        bad_lists, bad_pos = noise(lists, -9, 1 << 30), noise(list_pos, -9, 60)
        tree_cache_attention(
            q, k_pool, v_pool, bad_table, bad_lengths, cu, bad_lists, bad_pos, **case.options()
        )
        guard = [x.clone() for x in (k_pool, v_pool)]
        tree_cache_append_(
            k_pool, v_pool, q[:, :2], q[:, :2, :6], bad_table, bad_lengths % 9 - 9, cu, **case.options()
        )
        for pool, old in zip((k_pool, v_pool), guard, strict=True):
            assert torch.equal(pool.nan_to_num(), old.nan_to_num())
    torch.cuda.synchronize()


def test_names_are_exported():
    assert "TreeKVCache" in htree_ops.__all__
    assert {"tree_cache_append_", "tree_cache_attention"} <= set(htree_ops.ops.tree_cache.__all__)
