"""Which packed documents run together (csrc/ops/tree_attention/plan/varlen.h): pure functions, tested on the CPU."""

from collections import Counter
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tests.support.tree_attention_varlen_cases import BENCHMARK_CASES

host = pytest.importorskip("htree_ops._host", reason="_host is built per Python version")

MOST_ROWS = 65536
lengths = st.lists(st.one_of(st.integers(1, 40), st.integers(1, 100_000)), max_size=60)


def candidates(num_keys: int, r: int = 16, M: int = 8192, k: int = 512) -> float:
    """What a query of a sequence scores on average."""
    total, nodes = 0.0, num_keys
    while nodes > M:
        total += min(k * r, nodes / 2)
        nodes = -(-nodes // r)
    return total + nodes / 2


@given(keys=lengths, data=st.data())
def test_groups_by_length_hold_every_document_once(keys, data):
    """Each is padded to the longest of its group, and to no deeper tree."""
    queries = [data.draw(st.sampled_from((n, n, (n + 1) // 2, 1))) for n in keys]
    groups = host.varlen_groups(queries, keys, "length")
    assert sum(count for count, *_ in groups) == len(keys)
    offsets = sorted((n - q, n) for q, n in zip(queries, keys, strict=True))
    for count, num_queries, num_keys, _ in groups:
        assert count == 1 or count * num_keys <= MOST_ROWS
        assert 1 <= num_queries <= num_keys
        assert num_keys in keys
        assert any(offset == num_keys - num_queries for offset, _ in offsets)
    in_place = Counter((q, n) for count, q, n, where_it_lies in groups if where_it_lies for _ in range(count))
    rest = Counter(zip(queries, keys, strict=True))
    assert in_place <= rest
    bounds = [(q, n) for count, q, n, where_it_lies in groups if not where_it_lies for _ in range(count)]
    copied = sorted((rest - in_place).elements(), key=lambda x: (x[1] - x[0], x[1]))
    bounds.sort(key=lambda x: (x[1] - x[0], x[1]))
    assert len(bounds) == len(copied)
    # Padding lies behind a document or, to reach the offset of its group, is part of its queries.
    assert all(
        n <= bound and n - q >= bound - most for (q, n), (most, bound) in zip(copied, bounds, strict=True)
    )
    depths = {n > 8192 for n in keys}
    assert {num_keys > 8192 for _, _, num_keys, _ in groups} == depths


@given(keys=lengths)
def test_groups_by_rank_hold_any_lengths_of_as_many_rows(keys):
    """Document of rank i, longest first, fits the bound of its group, and all of them take few rows."""
    groups = host.varlen_groups(keys, keys, "rank")
    bounds = [num_keys for count, _, num_keys, _ in groups for _ in range(count)]
    assert all(n <= bound for n, bound in zip(sorted(keys, reverse=True), bounds, strict=False))
    assert len(bounds) == len(keys)
    assert bounds == sorted(bounds, reverse=True)
    assert all(count == 1 or count * num_keys <= MOST_ROWS for count, _, num_keys, _ in groups)
    harmonic = sum(1 / i for i in range(1, len(keys) + 1))
    assert sum(bounds) <= min(len(keys) * max(keys, default=0), 1.25 * sum(keys) * harmonic)


@given(keys=st.lists(st.integers(1, 4), max_size=40))
def test_equal_neighbours_run_together_where_they_lie(keys):
    groups = host.varlen_groups(keys, keys, "document")
    assert [n for count, _, n, _ in groups for _ in range(count)] == keys
    assert all(in_place for *_, in_place in groups)
    assert all(a[2] != b[2] for a, b in pairwise(groups))


def test_equal_documents_are_one_batch_without_copies():
    assert host.varlen_groups([8192] * 8, [8192] * 8, "length") == [(8, 8192, 8192, True)]
    assert host.varlen_groups([8192] * 8, [8192] * 8, "rank") == [(8, 8192, 8192, False)]
    assert host.varlen_groups([16384] * 8, [16384] * 8, "length") == [(4, 16384, 16384, True)] * 2


def test_padding_of_very_different_documents_costs_little():
    case = BENCHMARK_CASES["cuda"][0]
    keys = list(case.lengths)
    groups = host.varlen_groups(keys, keys, "length", num_heads=case.H)
    work = sum(n * candidates(n) for n in keys)
    padded = sum(count * n * candidates(n) for count, _, n, _ in groups)
    assert padded <= 1.03 * work
    assert len(groups) <= 24
    assert sum(count * n for count, _, n, in_place in groups if not in_place) <= 0.15 * sum(keys)


@pytest.mark.parametrize("keys", [[16384, 9000, 8000, 5000], [9000, 9001, 9002], [4200] * 2 + [300] + [4200]])
def test_long_documents_run_where_they_lie(keys):
    """Their copies would take longer than a batch of their own, however alike they are."""
    groups = host.varlen_groups(keys, keys, "length", num_heads=32)
    assert all(in_place for count, _, n, in_place in groups if n > 4096)
    assert sorted(n for count, _, n, _ in groups for _ in range(count)) == sorted(keys)


def test_short_documents_are_copied_into_one_batch():
    assert host.varlen_groups([500, 495, 498], [500, 495, 498], "length") == [(3, 500, 500, False)]


def test_equal_neighbours_among_others_are_a_batch_without_copies():
    keys = [6000] * 3 + [100, 101] + [6000] * 2
    groups = host.varlen_groups(keys, keys, "length", num_heads=32)
    assert groups == [(3, 6000, 6000, True), (2, 6000, 6000, True), (2, 101, 101, False)]


@given(keys=lengths)
def test_the_longest_group_runs_first(keys):
    groups = host.varlen_groups(keys, keys, "length")
    costs = [count * n * (candidates(n) + 256 + 32) for count, _, n, _ in groups]
    assert all(a >= b * (1 - 1e-9) for a, b in pairwise(costs))
