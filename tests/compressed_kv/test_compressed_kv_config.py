"""Blocks and splits of the CUDA decode kernel: pure functions, checked without a GPU."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

try:
    from htree_ops import _host as host
except ImportError:  # built for one Python version; the package works without it
    host = None

pytestmark = pytest.mark.skipif(host is None, reason="_host is not built for this Python")

#: What the choice takes starting a block to cost, in tokens.
OVERHEAD = 1024
#: The cost of the kernel that merges the splits, which runs where they are more than a cluster has blocks.
MERGE, CLUSTER = 512, 8


def cost(capacity: int, groups: int, processors: int, split: int) -> int:
    """The time until the last wave of blocks is done, in tokens."""
    splits = math.ceil(capacity / split)
    waves = math.ceil(groups * splits / processors)
    return waves * (split + OVERHEAD) + (MERGE if splits > CLUSTER else 0)


@given(
    capacity=st.integers(1, 200_000), groups=st.integers(1, 2000), processors=st.sampled_from([16, 108, 132])
)
def test_splits_are_whole_steps_and_no_split_count_is_cheaper(
    capacity: int, groups: int, processors: int
) -> None:
    split = host.compressed_kv_split_size(capacity, groups, processors)
    steps = math.ceil(capacity / 256)
    assert split % 256 == 0
    assert 256 <= split <= 256 * steps
    counts = range(1, min(steps, 256) + 1)
    assert cost(capacity, groups, processors, split) <= min(
        cost(capacity, groups, processors, 256 * math.ceil(steps / count)) for count in counts
    )


def test_the_known_sizes() -> None:
    assert (
        host.compressed_kv_split_size(32736, 64, 132) == 16384
    )  # 8 sequences of 8 kv heads: two blocks each
    assert host.compressed_kv_split_size(4064, 8, 132) == 512  # the eight splits of a cluster
    assert host.compressed_kv_split_size(32736, 8, 132) == 2048
    assert host.compressed_kv_split_size(1, 1, 132) == 256


@given(tiles=st.integers(0, 5000), most=st.integers(1, 24))
def test_no_fewer_warps_take_the_tiles_in_as_many_rounds(tiles: int, most: int) -> None:
    warps = host.compressed_kv_warps(tiles, most)
    assert 1 <= warps <= most
    rounds = math.ceil(tiles / most)
    assert math.ceil(tiles / warps) == rounds
    assert warps == 1 or math.ceil(tiles / (warps - 1)) > rounds


@given(
    stage=st.integers(500, 40_000),
    table=st.sampled_from([65536, 131072]),
    merge=st.integers(1000, 100_000),
    padding=st.integers(500, 20_000),
    warps=st.sampled_from([8, 16, 24]),
    shared=st.sampled_from([101_376, 166_912, 232_448]),
)
def test_blocks_hold_their_rings(
    stage: int, table: int, merge: int, padding: int, warps: int, shared: int
) -> None:
    num_warps, stages, used = host.compressed_kv_config(stage, table, merge, padding, warps, shared)
    assert 1 <= num_warps <= warps
    assert stages in (2, 4)
    assert used == table + max(num_warps * stages * stage + padding, merge)
    room = shared - table - padding
    if room >= 2 * stage:  # else the launcher refuses the call
        assert num_warps * stages * stage <= room
        assert num_warps == warps or (num_warps + 1) * 2 * stage > room
        assert stages == 4 or num_warps * 4 * stage > room
