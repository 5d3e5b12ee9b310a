"""The copies of a sequence that grows by chunks (csrc/ops/tree/plan/growing_tree.h), on the host.

A copy is a row of units. Here a unit holds, for each of its nodes, whether it was finished when the unit was written;
after every chunk the units must be those of copies that are made at once.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

host = pytest.importorskip("htree_ops._host", reason="_host is built per Python version")

RATE, TILE = 16, 128
#: Copies by name and layer: unit to the flags of its nodes.
Copies = dict[tuple[str, int], dict[int, tuple[bool, ...]]]


@dataclass(frozen=True)
class GrowingSequence:
    """Options of a sequence, whose lengths vary."""

    group: int = 8
    kv_heads: int = 2
    dim: int = 64
    max_top_nodes: int = 128
    top_k: int = 8
    stride: int = 1
    span: int = 0
    gpu: dict[str, Any] = field(default_factory=dict)

    def call(self, tokens: int) -> host.TreeAttentionCall:
        sizes = (1, tokens, 1, self.group * self.kv_heads, self.kv_heads, self.dim, self.dim)
        options = {"max_top_nodes": self.max_top_nodes, "top_k": self.top_k, "selection_stride": self.stride}
        return host.TreeAttentionCall(sizes, True, **options, selection_span=self.span, **self.gpu)

    def layers(self, tokens: int) -> int:
        layers = 1
        while tokens > self.max_top_nodes:
            tokens, layers = -(-tokens // RATE), layers + 1
        return layers

    def span_nodes(self, layer: int) -> tuple[int, int]:
        """(nodes, tiles) of a group of tiles of span means."""
        means = RATE**layer // self.span
        in_tile = min(means, 32)
        return TILE // in_tile, means // in_tile


def nodes_of_unit(sequence: GrowingSequence, name: str, layer: int, unit: int) -> range:
    if name in ("packed", "spans"):
        return range(unit * RATE, (unit + 1) * RATE)
    if name == "top":
        return range(unit * TILE, (unit + 1) * TILE)
    nodes, tiles = sequence.span_nodes(layer)
    return range(unit // tiles * nodes, (unit // tiles + 1) * nodes)


def write(sequence: GrowingSequence, copies: Copies, begin: int, end: int) -> set[tuple[str, int]]:
    """Writes what tokens [begin, end) change; returns the copies that a sequence of ``end`` tokens has."""
    packed, spans, top, top_spans = sequence.call(end).growing_change(begin)
    last = len(packed) - 1
    assert last + 1 == sequence.layers(end)
    ranges = {("packed", layer): units for layer, units in enumerate(packed)}
    ranges |= {("spans", layer): units for layer, units in enumerate(spans)}
    ranges |= {("top", last): top, ("top_spans", last): top_spans}
    for (name, layer), (first, stop) in ranges.items():
        finished = end // RATE**layer
        for unit in range(first, stop):
            nodes = nodes_of_unit(sequence, name, layer, unit)
            copies.setdefault((name, layer), {})[unit] = tuple(node < finished for node in nodes)
    # Tiles of another top stand in the same memory.
    for key in [key for key in copies if key[0].startswith("top") and key[1] != last]:
        del copies[key]
    return {key for key, units in ranges.items() if units[1]}


OPTIONS = st.builds(
    GrowingSequence,
    group=st.sampled_from([1, 3, 8, 16]),
    max_top_nodes=st.sampled_from([64, 100, 128]),
    top_k=st.sampled_from([8, 9]),
    stride=st.sampled_from([1, 16]),
    span=st.sampled_from([0, 0, 1, 2, 4, 16]),
    gpu=st.sampled_from([{}, {"major": 8, "hopper_kernels": False}]),
)


@given(
    sequence=OPTIONS, chunks=st.lists(st.integers(1, 6000), min_size=1, max_size=8), more=st.integers(0, 5000)
)
def test_a_sequence_in_chunks_has_the_copies_of_one_call(sequence, chunks, more):
    parents, span_rows, top_tiles, top_span_tiles = sequence.call(sum(chunks) + more).growing_capacity()
    grown = {}
    begin = 0
    for chunk in chunks:
        end = begin + chunk
        at_once = {}
        wanted = write(sequence, at_once, 0, end)
        assert write(sequence, grown, begin, end) == wanted
        assert ("packed", sequence.layers(end) - 1) in wanted
        for name, layer in wanted:
            units = at_once[name, layer]
            assert units.keys() == set(range(len(units)))
            assert {unit: grown[name, layer][unit] for unit in units} == units, (name, layer, begin, end)
            covered = nodes_of_unit(sequence, name, layer, len(units) - 1)[-1] + 1
            assert covered >= -(-end // RATE**layer) > covered - len(nodes_of_unit(sequence, name, layer, 0))
            capacity = {"packed": parents[layer], "spans": parents[layer], "top": top_tiles}
            assert len(units) <= capacity.get(name, top_span_tiles)
            assert name != "spans" or span_rows[layer] == RATE**layer // sequence.span
        begin = end


@pytest.mark.parametrize("span", [0, 2])
def test_a_chunk_changes_what_it_adds(span):
    """Of 128k tokens in chunks of 4096 each chunk writes its own units, and what was open before."""
    sequence = GrowingSequence(max_top_nodes=8192, top_k=512, dim=128, kv_heads=4, stride=16, span=span)
    for end in range(16_384, 131_073, 4096):
        packed, spans, top, top_spans = sequence.call(end).growing_change(end - 4096)
        assert [stop - first for first, stop in packed] == [256, 16]
        assert not any(stop for _, stop in spans)
        assert top[1] - top[0] == 2
        assert top_spans[1] - top_spans[0] == (16 if span else 0)
    unaligned = sequence.call(20_001).growing_change(16_390)[0]
    assert unaligned == [(1024, 1251), (64, 79)]


@given(sequence=OPTIONS, capacity=st.integers(1, 40_000))
def test_copies_lie_one_behind_the_other(sequence, capacity):
    call = sequence.call(capacity)
    parents, span_rows, top_tiles, top_span_tiles = call.growing_capacity()
    parent_bytes, span_bytes = RATE * (4 * sequence.dim + 4), RATE * (2 * sequence.dim + 4)
    tile_bytes = -(-sequence.dim // 64) * TILE * 128
    sizes = {
        "inv_freq": 4 * sequence.dim,
        "rope": (sequence.top_k * RATE + 1) * sequence.dim * 4,
        "fragment_rotations": (sequence.top_k + 1) * sequence.dim * 2,
        "dim_rotations": (sequence.top_k + 1) * sequence.dim * 2,
        "top": sequence.kv_heads * top_tiles * (2 * tile_bytes + TILE * 4 + 4),
        "top_span_keys": sequence.kv_heads * top_span_tiles * tile_bytes,
        "top_span_scales": sequence.kv_heads * top_span_tiles * TILE * 4,
        "top_span_scaled": sequence.kv_heads * top_span_tiles * 4,
    }
    base = 1 << 20
    end = base
    for name, layer, address in call.growing_memory(base):
        if name == "spans" and span_rows[layer] == 0:
            assert address == 0
            continue
        assert address % 256 == 0
        assert address >= end, name
        if name == "packed":
            end = address + sequence.kv_heads * parents[layer] * parent_bytes
        elif name == "spans":
            end = address + sequence.kv_heads * parents[layer] * span_rows[layer] * span_bytes
        else:
            end = address + sizes.get(name, 0)
