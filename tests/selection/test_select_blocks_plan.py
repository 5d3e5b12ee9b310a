"""How select_blocks cuts a call, on either device, without a GPU (csrc/ops/selection/plan)."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

host = pytest.importorskip("htree_ops._host", reason="_host is built per Python version")

#: docs/semantics/selection.md §9.1
MOST_BYTES = 512 << 20
sizes = st.integers(0, 31).flatmap(lambda bits: st.integers(0, 2**bits - 1))


@pytest.mark.parametrize(
    ("half_dtype", "major", "block_size", "kernel"),
    [
        (True, 9, 16, "tensor_core"),
        (True, 8, 128, "tensor_core"),
        (True, 10, 48, "tensor_core"),
        (True, 9, 8, "general"),
        (True, 9, 24, "general"),
        (True, 7, 16, "general"),
        (False, 9, 16, "general"),
    ],
)
def test_the_kernel_follows_from_dtype_block_and_device(half_dtype, major, block_size, kernel):
    for most_tokens, slots, heads in ((1, 1, 1), (70_000, 9, 3), (2**30, 2**30, 64)):
        found = host.select_blocks_launch(half_dtype, major, most_tokens, slots, heads, block_size)
        assert found[0] == kernel
        assert found[1] == (16 if kernel == "tensor_core" else block_size)


@given(
    half_dtype=st.booleans(),
    most_tokens=sizes,
    slots=sizes,
    heads=st.integers(1, 100_000),
    block_size=st.integers(1, 2**20),
)
def test_launches_cover_a_call_within_the_bound(half_dtype, most_tokens, slots, heads, block_size):
    kernel, unit, units, row, chunk_heads, leaders, splits, held = host.select_blocks_launch(
        half_dtype, 9, most_tokens, slots, heads, block_size
    )
    blocks = max(0, most_tokens - 1) // block_size
    assert units * unit == blocks * block_size
    assert row % 8 == 0
    assert row >= units + 1  # whole tiles of units, and a key for the diagonal block
    assert 1 <= chunk_heads <= min(heads, 65535)
    assert 1 <= leaders <= max(1, slots)
    tile = 64 if kernel == "tensor_core" else 8
    assert -(-leaders // tile) <= 65535  # rows of a grid
    assert splits * 256 >= units
    assert held == 4 * row * chunk_heads * leaders
    if blocks <= 2**24:
        assert held <= MOST_BYTES


def test_the_bars_of_the_benchmark_fill_a_gpu():
    """131 072 tokens, four index heads: thread blocks of the scores of a chunk beside 132 multiprocessors."""
    _, _, units, row, heads, leaders, splits, held = host.select_blocks_launch(
        True, 9, 131_072, 131_072, 4, 16
    )
    assert (units, row, heads, leaders) == (8191, 8192, 4, 2048)
    assert leaders // 128 * heads * splits >= 4 * 132
    assert held == 256 << 20


@given(
    num_heads=st.integers(1, 4096),
    num_blocks=sizes.filter(lambda n: n <= 2**27),
    leaders=sizes,
    block_size=st.integers(1, 2**16),
    d=st.sampled_from((16, 32, 48, 128)),
    lanes=st.sampled_from(((4, 4), (8, 4), (16, 8))),
    size=st.sampled_from((4, 8)),
)
def test_chunks_cover_a_call_within_the_bound(num_heads, num_blocks, leaders, block_size, d, lanes, size):
    width, tile = lanes[0] * 4 // size, lanes[1]
    groups, heads, segment, tokens, rows = host.select_blocks_chunks(
        num_heads, num_blocks, leaders, block_size, d, width, tile, size
    )
    assert groups == -(-num_blocks // width)
    assert 1 <= heads <= num_heads
    assert 1 <= segment <= max(1, groups)
    assert 1 <= tokens <= block_size
    assert tokens == block_size or segment == 1, "a block is cut where one group of blocks alone is too large"
    assert heads == 1 or (tokens == block_size and segment == max(1, groups)), "heads share whole sequences"
    assert rows % tile == 0
    assert rows >= tile
    assert heads * segment * tokens * d * width * size <= max(64 << 20, d * width * size)
    scores = heads * rows * groups * width * size
    assert scores <= max(16 << 20, tile * groups * width * size)
