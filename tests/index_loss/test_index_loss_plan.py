"""How index_loss cuts a call on a GPU, without one (csrc/ops/index_loss/index_loss_plan.h)."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

host = pytest.importorskip("htree_ops._host", reason="_host is built per Python version")

#: docs/semantics/index_loss.md §9.3, and what the bound holds for.
MOST_BYTES = 256 << 20
MOST_CELLS = 10**8


@pytest.mark.parametrize(
    ("half_dtype", "major", "key_dim", "block_size", "kernel"),
    [
        (True, 9, 128, 16, "tensor_core"),
        (True, 8, 16, 128, "tensor_core"),
        (True, 10, 256, 48, "tensor_core"),
        (True, 9, 272, 16, "general"),
        (True, 9, 72, 16, "general"),
        (True, 9, 128, 24, "general"),
        (True, 7, 128, 16, "general"),
        (False, 9, 128, 16, "general"),
    ],
)
def test_the_kernel_follows_from_dtype_width_block_and_device(half_dtype, major, key_dim, block_size, kernel):
    for rows, tokens, heads in ((1, 1, 1), (128, 131_072, 32), (5000, 2**30, 64)):
        found = host.index_loss_plan(1, rows, tokens, heads, 1, 1, key_dim, block_size, half_dtype, major)
        assert found["kernel"] == kernel
        assert found["unit"] == (16 if kernel == "tensor_core" else block_size)


@given(
    batch=st.integers(1, 300),
    rows=st.integers(1, 20_000),
    tokens=st.integers(0, 24).flatmap(lambda bits: st.integers(1, 2**bits)),
    group=st.integers(1, 70),
    kv_heads=st.integers(1, 16),
    shared=st.booleans(),
    width=st.integers(1, 20),
    block_size=st.integers(1, 64),
    half_dtype=st.booleans(),
)
def test_plans_cover_a_call_within_the_bound(
    batch, rows, tokens, group, kv_heads, shared, width, block_size, half_dtype
):
    index_heads = 1 if shared else kv_heads
    plan = host.index_loss_plan(
        batch, rows, tokens, group * kv_heads, kv_heads, index_heads, 16 * width, 16 * block_size, half_dtype
    )
    blocks = -(-tokens // (16 * block_size))
    assert plan["columns"] * plan["unit"] == blocks * 16 * block_size
    assert plan["part_heads"] & (plan["part_heads"] - 1) == 0
    assert plan["parts"] * plan["part_heads"] >= group > (plan["parts"] - 1) * plan["part_heads"]
    assert plan["splits"] * plan["split_columns"] >= plan["columns"]
    assert plan["splits"] <= 65_535
    assert plan["split_columns"] % 8 == 0
    assert plan["score_columns"] % 8 == 0
    assert 1 <= plan["batches"] <= batch
    assert plan["batches"] * kv_heads * plan["parts"] <= 65_535
    assert 1 <= plan["range_blocks"] <= max(1, blocks)
    held = min(plan["held_columns"], plan["columns"]) * plan["batches"] * rows
    bytes_held = held * (4 * kv_heads * plan["parts"] + 8 * index_heads)
    statistics = plan["splits"] * plan["batches"] * rows * group * kv_heads * 8
    if rows * kv_heads * plan["parts"] * 16 * block_size < MOST_CELLS:
        assert bytes_held <= MOST_BYTES
    if plan["splits"] > 1:  # else they are no more than the rows' own results
        assert statistics <= MOST_BYTES // 4


def test_the_measured_call_holds_all_blocks_at_once():
    plan = host.index_loss_plan(1, 128, 131_072, 32, 4, 4, 128, 16)
    assert plan["range_blocks"] == 8192
    assert (plan["part_heads"], plan["parts"]) == (8, 1)
    assert 40 <= plan["splits"] <= 128
