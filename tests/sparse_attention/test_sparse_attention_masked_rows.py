"""Rows of sparse_attention that multiply whole tiles under the bits of their lists, beside those that gather."""

from dataclasses import replace

import pytest
import torch
from sparse_attention_helpers import (
    GRADIENTS,
    TOLERANCES,
    assert_equal_to_reference,
    assert_same_bits,
    op,
)
from torch import Tensor

from tests.support.cases import case_id, normal
from tests.support.documents import with_gradients
from tests.support.sparse_attention_cases import SparseCase

pytestmark = pytest.mark.gpu

_MODEL = SparseCase(name="model", dtype=torch.bfloat16, T=1000, H=8, H_kv=1, K=128, V=128, n=8, block_size=16)
#: With rows on both sides of the bound of full lists, which is 32 n ... 128 n tokens.
CASES = [
    *(
        replace(_MODEL, name=f"group_{group}", H=group * kv_heads, H_kv=kv_heads, n=n, K=width, V=width)
        for group, kv_heads, n, width in ((1, 2, 5, 64), (2, 2, 5, 32), (3, 1, 6, 64), (5, 1, 8, 128), (16, 1, 14, 128))
    ),
    _MODEL,
    replace(_MODEL, name="half", dtype=torch.float16, B=2, T=777),
    replace(_MODEL, name="wild", lists="wild", n=40),
    replace(_MODEL, name="wild_sinks", lists="wild", n=20, has_sinks=True, dtype=torch.float16),
    replace(_MODEL, name="stride_2", selection_stride=2, T=999, lists="wild", n=20),
    replace(_MODEL, name="stride_2_odd", selection_stride=2, T=999),
    replace(_MODEL, name="stride_4", selection_stride=4, T=999, n=20),
    replace(_MODEL, name="stride_4_suffix", selection_stride=4, T=901, T_q=477, n=30, H=12, H_kv=3, K=64, V=64, B=2),
    replace(_MODEL, name="stride_4_all", selection_stride=4, T=999, lists="all", n=63),
    replace(_MODEL, name="stride_8", selection_stride=8, H=4, n=20, dtype=torch.float16, has_sinks=True),
    replace(_MODEL, name="stride_8_group_3", selection_stride=8, H=3, n=30, lists="wild"),
    replace(_MODEL, name="stride_16_blocks_64", selection_stride=16, H=2, T=999, block_size=64, n=6),
    replace(_MODEL, name="suffix", T=901, T_q=477, n=20, has_sinks=True),
    replace(_MODEL, name="one_query", T=450, T_q=1, B=3),
    replace(_MODEL, name="blocks_48", block_size=48, n=3, lists="wild", K=64, V=64),
    replace(_MODEL, name="blocks_128", block_size=128, n=2, selection_stride=2),
    replace(_MODEL, name="shared_lists", H=12, H_kv=3, H_i=1, n=6, K=64, V=64),
    replace(_MODEL, name="all", lists="all", n=63),
]  # fmt: skip


def masked_rows(case: SparseCase, blocks: Tensor) -> Tensor:
    """Which rows multiply masked tiles where no token is wild, bool [B, T_q, H_kv]: docs/semantics §8."""
    rows, parts = blocks.shape[1], case.block_size // 16
    count = -(-case.T // case.block_size)
    leaders = torch.arange(rows, device=blocks.device) * case.selection_stride + case.T - case.num_queries
    leaders = leaders.view(1, -1, 1)
    own = leaders // case.block_size
    kept = blocks.where((blocks >= 0) & (blocks <= own[..., None]), count).long()
    held = torch.zeros(*blocks.shape[:3], count + 1, dtype=torch.bool, device=blocks.device)
    held = held.scatter(-1, kept, True)[..., :count]
    holds_own = held.gather(-1, own[..., None].expand(*blocks.shape[:3], 1))[..., 0]
    own_parts = leaders % case.block_size // 16 + 1
    sixteens = held.sum(-1) * parts - torch.where(holds_own, parts - own_parts, 0)
    group, stride = case.H // case.H_kv, case.selection_stride
    factor = min(max(32 // group, 2), 8) if stride < 4 else 2 * (stride * group <= 32)
    found = (leaders // 16 < factor * sixteens).repeat_interleave(case.selection_stride, 1)
    return found[:, : case.num_queries].expand(-1, -1, case.H_kv)


def of_heads(case: SparseCase, rows: Tensor) -> Tensor:
    """Rows of K/V heads as rows of all heads."""
    return rows.repeat_interleave(case.H // case.H_kv, -1)


def some_lists(case: SparseCase, seed: int = 0) -> Tensor:
    """Lists of all lengths: dead ones, some without their diagonal block, in any order, with entries that repeat."""
    blocks = case.make_blocks("cuda", seed)
    generator = torch.Generator(device="cuda").manual_seed(seed)
    blocks = blocks.masked_fill(torch.rand(blocks.shape, device="cuda", generator=generator) < 0.2, -1)
    blocks[:, 5::7] = -1
    blocks[:, 3::11, :, 2:] = -1
    blocks[..., -1] = blocks[..., 0]
    return blocks


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_equal_to_the_reference(case, nan_memory):
    assert_equal_to_reference(case, "cuda")


@pytest.mark.parametrize("of", ["out", "lse"])
def test_each_gradient_alone(of, nan_memory):
    assert_equal_to_reference(replace(_MODEL, lists="wild", n=20, T=500), "cuda", 1, of)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_a_list_says_which_rows_are_masked(case, monkeypatch):
    """The others have the bits of a call whose rows all gather, dead ones too."""
    query, key, value, _, sinks = case.make_inputs("cuda")
    inputs = (query, key, value, some_lists(case), sinks)
    found = with_gradients(op(case), inputs)
    masked = of_heads(case, masked_rows(case, inputs[3]))
    monkeypatch.setenv("HTREE_TREE_GATHER", "gathered")
    gathered = with_gradients(op(case), inputs)
    tolerance = TOLERANCES[case.dtype]
    for name, ours, theirs in zip(GRADIENTS, found, gathered, strict=False):
        largest = theirs[theirs.isfinite()].abs().max().item()
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * largest, msg=name)
    assert_same_bits([x[~masked] for x in found[:3]], [x[~masked] for x in gathered[:3]])
    if masked.any() and case.num_queries > 100:
        assert not torch.equal(found[0][masked], gathered[0][masked]), (
            "the masked rows are computed otherwise"
        )
        assert not torch.equal(found[2][masked], gathered[2][masked])


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_order_repetition_and_padding_change_no_bit(case):
    query, key, value, _, sinks = case.make_inputs("cuda")
    blocks = some_lists(case)
    wanted = with_gradients(op(case), (query, key, value, blocks, sinks))
    assert_same_bits(with_gradients(op(case), (query, key, value, blocks, sinks)), wanted)
    ascending = blocks.sort(-1).values.where(blocks.sort(-1).values >= 0, 2**31 - 1)
    ascending = ascending.sort(-1).values
    assert_same_bits(with_gradients(op(case), (query, key, value, ascending, sinks)), wanted)
    padding = torch.tensor([-1, -2, -9, -(2**31), case.T, 2**31 - 1], dtype=torch.int32, device="cuda")
    padding = padding.expand(*blocks.shape[:3], 6)
    wide = torch.cat([padding, blocks.flip(-1), blocks[..., :3], padding], -1)
    if wide.shape[-1] * case.block_size <= 16_384:
        assert_same_bits(with_gradients(op(case), (query, key, value, wide, sinks)), wanted)


@pytest.mark.parametrize(
    ("group", "stride"),
    [
        *((group, stride) for group in (1, 3, 4, 8, 16) for stride in (1, 2)),
        (1, 4),
        (4, 4),
        (8, 4),
        (4, 8),
        (2, 16),
    ],
)
def test_a_row_has_the_same_bits_in_every_call(group, stride):
    """Of a run that a call cuts, the other rows are missing, and so may be tiles that they alone need."""
    case = replace(_MODEL, B=2, T=700, H=2 * group, H_kv=2, n=10, selection_stride=stride)
    query, key, value, _, _ = case.make_inputs("cuda")
    blocks = some_lists(case)
    whole = with_gradients(op(case), (query, key, value, blocks, None))
    dout, dlse = (normal(tuple(x.shape), x.dtype, "cuda", 99 + i) for i, x in enumerate(whole[:2]))

    def assert_part(start, end, batch, lists):
        rows = slice(start, end)
        lists = lists[batch, start // stride : -(-end // stride)]
        leaf = query[batch, rows].clone().requires_grad_()
        out, lse = op(case)(leaf, key[batch, :end], value[batch, :end], lists, None)
        upstream = (dout[batch, rows], dlse[batch, rows])
        (dq,) = torch.autograd.grad((out, lse), leaf, upstream)
        assert_same_bits((out, lse, dq), [x[batch, rows] for x in whole[:3]], (f"{start}:{end}",) * 3)

    every = slice(0, 2)
    for end in (1, 64, 65, 66, 79, 80, 127, 128, 129, 300, 511, 512, 513, 698):
        if end % stride:
            continue  # queries that share a list share a power of two
        assert_part(0, end, every, blocks)
        assert_part(end // 2 // stride * stride, end, every, blocks)
    for start in (60, 64, 66, 250, 512, 514, 688, 698):
        if start % stride == 0:
            assert_part(start, 700, every, blocks)
    assert_part(0, 700, slice(1, 2), blocks)
    # Other lists beside it: a row that gathers, or sees nothing, becomes a masked one, and the other way round.
    others = blocks.roll(1, 1)
    others[:, 96 // stride] = blocks[:, 96 // stride]
    out, lse = op(case)(query, key, value, others, None)
    mine = slice(96, 96 + stride)
    assert_same_bits((out[:, mine], lse[:, mine]), [x[:, mine] for x in whole[:2]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("group", [3, 8])
def test_what_a_row_does_not_see_changes_no_bit(group, dtype):
    """Values that a weight of 0 would not silence: in blocks of other rows, and behind a row in its own block."""
    case = replace(_MODEL, dtype=dtype, T=600, H=group, n=12)
    query, key, value, _, _ = case.make_inputs("cuda")
    blocks = some_lists(case)
    clean = with_gradients(op(case), (query, key, value, blocks, None))
    large = 3e38 if dtype == torch.bfloat16 else torch.inf
    for token, side, poison in (
        (3, key, torch.nan), (100, key, -torch.inf), (127, value, torch.nan), (128, value, torch.inf),
        (130, value, 6e4), (335, key, 6e4), (336, value, large), (599, value, torch.nan),
    ):  # fmt: skip
        inputs = [x.clone() for x in (key, value)]
        poisoned = inputs[0 if side is key else 1]
        poisoned[:, token, :, 5] = poison
        sees = (blocks == token // 16).any(-1).repeat_interleave(group, -1)
        sees[:, :token] = False
        assert sees.any() or token == 599
        found = with_gradients(op(case), (query, *inputs, blocks, None))
        for name, ours, theirs in zip(GRADIENTS[:3], found, clean, strict=False):
            assert torch.equal(ours[~sees], theirs[~sees]), (name, token, poison)
        if poisoned[0, token, 0, 5].isnan():
            assert found[0][sees].isnan().any(-1).all(), (token, poison)


def test_rows_that_see_large_values_are_right():
    """They gather, since beside such values the products of masked tiles might overflow."""
    case = replace(_MODEL, T=400, n=12)
    query, key, value, blocks, _ = case.make_inputs("cuda")
    value[:, 40:300:16, :, 3] = 2.0**40
    out, _ = op(case)(query, key, value, blocks, None)
    wanted, _ = op(replace(case, dtype=torch.float32))(
        query.float(), key.float(), value.float(), blocks, None
    )
    torch.testing.assert_close(out.float(), wanted, rtol=3e-2, atol=3e-2)


def test_a_gradient_that_is_not_finite_stays_with_what_its_row_sees():
    case = replace(_MODEL, T=500, n=12)
    query, key, value, _, _ = case.make_inputs("cuda")
    blocks = some_lists(case)
    masked = masked_rows(case, blocks)
    row = int(masked[0, 250:, 0].nonzero()[0, 0]) + 250
    dead = int((blocks[0, 250:, 0] < 0).all(-1).nonzero()[0, 0]) + 250
    leaves = [x.requires_grad_() for x in (query, key, value)]
    out, lse = op(case)(*leaves, blocks, None)
    dout, dlse = (normal(tuple(x.shape), x.dtype, "cuda", 7) for x in (out, lse))
    for at, upstream in ((row, dout), (row, dlse), (dead, dout), (dead, dlse)):
        gradients = [dout.clone(), dlse.clone()]
        gradients[0 if upstream is dout else 1][0, at, 2] = torch.nan
        dq, dk, dv = torch.autograd.grad((out, lse), leaves, gradients, retain_graph=True)
        others = torch.arange(case.T, device="cuda") != at
        assert dq[0, others].isfinite().all()
        sees = torch.zeros(case.T, dtype=torch.bool, device="cuda")
        for block in blocks[0, at, 0][blocks[0, at, 0] >= 0].tolist():
            sees[block * 16 : block * 16 + 16] = True
        sees[at + 1 :] = False
        for gradient in (dk, dv):
            assert gradient[0, ~sees].isfinite().all()
        assert bool(dq[0, at].isnan().any()) == (at == row)
        assert bool(dk[0, sees].isnan().all()) == (at == row) or at == dead


def test_tiles_that_no_row_needs_are_left_out():
    """All rows read the same few blocks, so most tiles have no mark, in front, between and behind."""
    case = replace(_MODEL, T=1000, n=24)
    query, key, value, _, _ = case.make_inputs("cuda")
    same = torch.tensor([9, 10, 11, 12, 20, 33], dtype=torch.int32, device="cuda")
    blocks = torch.full((1, 1000, 1, 24), -1, dtype=torch.int32, device="cuda")
    blocks[..., :6] = same
    assert masked_rows(case, blocks)[0, 200:300].any()
    out, lse = op(case)(query, key, value, blocks, None)
    wide = (x.float() for x in (query, key, value))
    wanted = op(replace(case, dtype=torch.float32))(*wide, blocks, None)
    torch.testing.assert_close(out.float(), wanted[0], rtol=3e-2, atol=3e-2)
    torch.testing.assert_close(lse, wanted[1], rtol=3e-2, atol=3e-2)
