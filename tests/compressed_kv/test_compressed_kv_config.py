"""Blocks and splits of the CUDA decode kernel: pure functions, checked without a GPU."""

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tests.support.devices import EVEN_CLUSTERS, H100_CLUSTERS

host = pytest.importorskip("htree_ops._host", reason="_host is built per Python version")

#: What a block, a token of its split and the kernel that merges splits take to cost, in nanoseconds.
BLOCK, TOKEN, MERGE, MERGED_SPLIT = 9300, {4: 6, 16: 10}, 2200, 160
#: Tokens that a split is a multiple of, and the most blocks of a cluster.
STEP, CLUSTER = 128, 8
#: Clusters of 0 to 16 blocks that run at once, on code without clusters.
NONE = [0] * 17


def cost(
    capacity: int, groups: int, processors: int, clusters: list[int], bits: int, split: int, cluster: bool
) -> float:
    """The time until the last wave of blocks is done and merged."""
    splits, block = math.ceil(capacity / split), split * TOKEN[bits] + BLOCK
    if cluster:
        return math.ceil(groups / clusters[splits]) * block if clusters[splits] else math.inf
    waves = math.ceil(groups * splits / processors)
    return waves * block + (MERGE + splits * MERGED_SPLIT if splits > 1 else 0)


@given(
    capacity=st.integers(1, 200_000),
    groups=st.integers(1, 2000),
    processors=st.sampled_from([3, 16, 108, 132]),
    clusters=st.sampled_from([NONE, EVEN_CLUSTERS, H100_CLUSTERS]),
    bits=st.sampled_from([4, 16]),
)
def test_splits_are_whole_steps_and_no_split_count_is_cheaper(capacity, groups, processors, clusters, bits):
    split, cluster = host.compressed_kv_split_size(capacity, groups, processors, clusters, bits)
    steps = math.ceil(capacity / STEP)
    assert split % STEP == 0
    assert STEP <= split <= STEP * steps
    assert not cluster or 2 <= math.ceil(capacity / split) <= CLUSTER
    found = cost(capacity, groups, processors, clusters, bits, split, cluster)
    for count in range(1, min(steps, 256) + 1):
        other = STEP * math.ceil(steps / count)
        assert found <= cost(capacity, groups, processors, clusters, bits, other, False)
        if 2 <= math.ceil(capacity / other) <= CLUSTER:
            assert found <= cost(capacity, groups, processors, clusters, bits, other, True)


@pytest.mark.parametrize(
    ("capacity", "groups", "clusters", "split", "cluster"),
    [
        (32736, 64, H100_CLUSTERS, 16384, True),  # 8 sequences of 8 kv heads: two blocks each
        (4064, 8, H100_CLUSTERS, 512, True),
        (4064, 16, EVEN_CLUSTERS, 512, True),
        (4064, 16, H100_CLUSTERS, 768, True),  # not eight blocks: 15 of those clusters run at once
        (32736, 16, H100_CLUSTERS, 4096, False),  # all multiprocessors, without clusters
        (32736, 8, H100_CLUSTERS, 2048, False),
        (4064, 8, NONE, 384, False),
        (1, 1, H100_CLUSTERS, 128, False),
    ],
)
def test_the_known_sizes(capacity, groups, clusters, split, cluster):
    assert host.compressed_kv_split_size(capacity, groups, 132, clusters) == (split, cluster)


@given(tiles=st.integers(0, 5000), most=st.integers(1, 24))
def test_no_fewer_warps_take_the_tiles_in_as_many_rounds(tiles, most):
    warps = host.compressed_kv_warps(tiles, most)
    assert 1 <= warps <= most
    rounds = math.ceil(tiles / most)
    assert math.ceil(tiles / warps) == rounds
    assert warps <= min(12, most) or math.ceil(tiles / (warps - 1)) > rounds
    assert warps >= min(12, most)


@given(
    stage=st.integers(500, 40_000),
    table=st.sampled_from([65536, 131072]),
    merge=st.integers(1000, 100_000),
    padding=st.integers(500, 20_000),
    warps=st.sampled_from([8, 16, 24]),
    shared=st.sampled_from([101_376, 166_912, 232_448]),
)
def test_blocks_hold_their_rings(stage, table, merge, padding, warps, shared):
    num_warps, stages, used = host.compressed_kv_config(stage, table, merge, padding, warps, shared)
    assert 1 <= num_warps <= warps
    assert stages in (2, 4)
    assert used == table + max(num_warps * stages * stage + padding, merge)
    ring = shared - table - padding
    if ring >= 2 * stage:  # else the launcher refuses the call
        assert num_warps * stages * stage <= ring
        assert num_warps == warps or (num_warps + 1) * 2 * stage > ring
        assert stages == 4 or num_warps * 4 * stage > ring
