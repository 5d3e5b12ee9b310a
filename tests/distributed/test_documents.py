"""Packed documents over tokens on several ranks, against one process (docs/semantics/tree_attention.md §1.16)."""

import re
from typing import Any

import documents_on_ranks
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from htree_ops.distributed.collectives import parts_of, parts_per_rank
from htree_ops.distributed.documents import Piece, Share, Whole, share_of

BALANCES = ("zigzag", "striped", "contiguous", "work")
SMALL: dict[str, Any] = {"compression_rate": 4, "max_top_nodes": 8, "top_k": 2}
#: N, H, H_kv, K, V; the documents; the options.
CASES: dict[str, tuple[documents_on_ranks.Sizes, list[int], dict[str, Any]]] = {
    "one_document": ((128, 4, 2, 8, 6), [0, 128], SMALL),
    "across_borders": ((128, 4, 2, 8, 6), [0, 5, 40, 41, 100, 128], SMALL),
    "inside_parts": ((128, 4, 2, 8, 6), [0, 3, 16, 20, 32, 64, 112, 128], SMALL),
    "empty_and_padding": ((128, 3, 3, 4, 5), [0, 0, 50, 50, 97], SMALL | {"store_parents": False}),
    "none": ((64, 2, 1, 4, 4), [0], SMALL),
    "stride": ((128, 4, 1, 8, 8), [0, 12, 84, 128], SMALL | {"selection_stride": 4}),
    "stride_and_odd_ends": ((128, 4, 1, 8, 8), [0, 13, 16, 101, 104, 127], SMALL | {"selection_stride": 4}),
    "q_head": ((128, 4, 2, 8, 6), [0, 30, 128], SMALL | {"scope": "q_head"}),
    "span": ((128, 4, 2, 8, 6), [0, 30, 128], SMALL | {"selection_span": 2}),
    "open_next": ((128, 4, 2, 8, 6), [0, 30, 128], SMALL | {"top_k": 4, "open_next": True}),
    "lse": ((128, 4, 2, 8, 6), [0, 30, 127], SMALL | {"importance": "lse"}),
    "index": ((128, 4, 2, 8, 6), [0, 5, 40, 41, 100, 128], SMALL | {"index": (2, 16)}),
    "index_of_all_heads": ((128, 4, 2, 8, 6), [0, 3, 16, 70, 97], SMALL | {"index": (1, 16), "top_k": 3}),
    "index_free_top": (
        (128, 4, 1, 8, 8),
        [0, 12, 84, 128],
        SMALL | {"index": (1, 32), "max_top_nodes": 20, "selection_stride": 4},
    ),
    "frequencies": ((128, 2, 1, 4, 4), [0, 70, 100], SMALL | {"inv_freq": [0.7, 0.0]}),
}


# ---- who works on what


def test_a_document_inside_a_part_is_no_piece():
    """Parts of 10 tokens; the rank has the first and the last of four."""
    share = share_of([0, 3, 7, 33, 33, 38, 40], 10, (0, 3), 1)
    assert share.whole == (Whole(0, (0, 3, 7)), Whole(13, (0, 5, 7)))
    assert share.pieces == (Piece(rows=(7, 10), starts=(0, 23), length=3, begin=7, end=33),)
    assert share_of([0, 10, 20, 40], 10, (0, 1), 1) == Share(
        (Whole(0, (0, 10)), Whole(10, (0, 10))), (), True
    )
    assert not share_of([0, 10, 20, 30, 40], 10, (0, 3), 1).crosses


@settings(max_examples=200)
@given(
    lengths=st.lists(st.integers(0, 30), max_size=12),
    size=st.sampled_from((1, 2, 3, 4)),
    balance=st.sampled_from(BALANCES),
    stride=st.sampled_from((1, 2, 4)),
    more=st.integers(0, 20),
)
def test_every_row_of_a_document_is_somewhere_once(lengths, size, balance, stride, more):
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    count = size * parts_per_rank(balance)
    length = -(-(offsets[-1] + more) // count)
    seen = []
    for rank in range(size):
        parts = parts_of(rank, size, balance, length * count)
        place_of = [part * length + row for part in parts for row in range(length)]
        share = share_of(offsets, length, parts, stride)
        for row, ends in share.whole:
            assert all(place_of[row] + end in offsets for end in ends)
            seen += place_of[row : row + ends[-1]]
        for piece in share.pieces:
            assert share.crosses
            assert len(piece.rows) == 1 or piece.length % stride == 0
            for row, start in zip(piece.rows, piece.starts, strict=True):
                assert place_of[row] == piece.begin + start
                assert place_of[row + piece.length - 1] < piece.end
                seen += place_of[row : row + piece.length]
    assert sorted(seen) == list(range(offsets[-1]))


# ---- against one process


def assert_matches(found: dict[str, Any], tolerance: float, exact_dq: bool = True) -> None:
    """Forward and the gradient of queries bit for bit; those of keys and values up to the order of sums."""
    assert found["repeats"]
    assert found["equal"]["out"], found
    assert found["equal"]["lse"], found
    if exact_dq:
        assert found["equal"]["dq"], found
    assert max(found["error"]["dk"], found["error"]["dv"], 0.0) < tolerance, found


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name, ranks):
    sizes, offsets, options = CASES[name]
    for size in (1, 2, 4):
        for balance in BALANCES:
            if sizes[0] // (size * parts_per_rank(balance)) % options.get("selection_stride", 1):
                continue  # a long document has parts of whole strides
            call = (size, balance, sizes, offsets, torch.float32, options)
            for found in ranks.run(documents_on_ranks.compare, *call):
                # Beside an index a row keeps its lse in one process, and in a piece its maximum and its sum.
                assert_matches(found, 2e-5, exact_dq="index" not in options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_equals_one_process_in_other_dtypes(dtype, ranks):
    sizes, offsets, options = CASES["across_borders"]
    tolerance = {torch.float64: 1e-12, torch.float16: 2e-2, torch.bfloat16: 6e-2}[dtype]
    for found in ranks.run(documents_on_ranks.compare, 4, "zigzag", sizes, offsets, dtype, options):
        assert_matches(found, tolerance)


def test_documents_inside_parts_have_the_gradients_of_one_process(ranks):
    """Nothing is gathered, and nothing is added."""
    sizes, _, options = CASES["inside_parts"]
    call = (4, "zigzag", sizes, [0, 7, 16, 32, 48, 60, 64, 96], torch.bfloat16, options)
    for found in ranks.run(documents_on_ranks.compare, *call):
        assert all(found["equal"].values()), found


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    size=st.sampled_from((2, 4)),
    balance=st.sampled_from(BALANCES),
    options=st.fixed_dictionaries(
        {
            "compression_rate": st.sampled_from((2, 3, 4)),
            "top_k": st.just(3),
            "max_top_nodes": st.integers(1, 6),
            "scope": st.sampled_from(("kv_head", "q_head")),
            "store_parents": st.booleans(),
        }
    ),
    more=st.integers(0, 9),
)
def test_equals_one_process_for_any_documents(lengths, size, balance, options, more, ranks):
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    count = size * parts_per_rank(balance)
    tokens = max(1, -(-(offsets[-1] + more) // count)) * count
    call = (size, balance, (tokens, 4, 2, 4, 3), offsets, torch.float64, options)
    for found in ranks.run(documents_on_ranks.compare, *call):
        assert_matches(found, 1e-12)


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
def test_gradients_that_are_not_wanted(wanted, ranks):
    for found in ranks.run(documents_on_ranks.some_gradients, 2, wanted):
        assert found == [True] * 3


@pytest.mark.parametrize(("scope", "by_index"), [("kv_head", False), ("q_head", False), ("kv_head", True)])
@pytest.mark.parametrize("balance", BALANCES)
def test_the_module_equals_one_rank(balance, scope, by_index, ranks):
    for found in ranks.run(documents_on_ranks.layer, 4, balance, scope, "cpu", by_index):
        assert found["out"] < 1e-5, found
        assert found["gradients"] < 1e-4, found


def test_runs_between_compiled_graphs(ranks):
    assert max(ranks.run(documents_on_ranks.compiled, 2)) < 1e-4


@pytest.mark.gpu
def test_equals_one_gpu(gpus):
    """Two GPUs, or one with a group of one; the tensor-core kernels and the general ones."""
    size = len(gpus.processes)
    for dtype, width, bound in ((torch.bfloat16, 128, 0.25), (torch.float32, 8, 1e-3)):
        sizes, offsets = (16384, 8, 2, width, width), [0, 1000, 1600, 9000, 16000, 16300]
        options = {"top_k": 64, "max_top_nodes": 512}
        for balance in BALANCES:
            call = (size, balance, sizes, offsets, dtype, options, "cuda")
            for found in gpus.run(documents_on_ranks.compare, *call):
                assert found["repeats"]
                assert max(found["error"].values()) < bound, found
    for found in gpus.run(documents_on_ranks.layer, size, "zigzag", "kv_head", "cuda"):
        assert found["out"] < 1e-4, found
        assert found["gradients"] < 1e-3, found


# ---- faults


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "other documents",
            r"cu_seqlens must be the same on every rank, got \(0, 1[01], 128\) on this one and another",
        ),
        ("too long", "cu_seqlens must end at or before the 128 tokens of all ranks, got 129"),
        (
            "stride",
            "must begin a multiple of selection_stride = 4 before each border, got document 0 at 0"
            "|must begin a multiple of selection_stride = 4 before each border, got document 1 at 10 and parts of 16",
        ),
        ("odd", r"must be a multiple of 2 \* n = 8, got 4 \* 31 = 124; the next length that works is 128"),
        (
            "odd stripes",
            r"must be a multiple of 8 \* n = 32, got 4 \* 28 = 112; the next length that works is 128",
        ),
        ("offsets without numbers", "cu_seqlens must have numbers to read, got a tensor on meta"),
        ("wide offsets", "cu_seqlens must have dtype torch.int32, got torch.int64"),
        ("word", r"cu_seqlens must be ints or an int32 tensor \[documents \+ 1\], got str"),
        ("no offsets", "cu_seqlens must have at least one element, got none"),
        ("bad option", "tree_attention_varlen_cp: compression_rate must be between 2 and"),
    ],
)
def test_a_fault_raises_on_every_rank(what, message, ranks):
    for _, found in ranks.refusals(documents_on_ranks.fault, what):
        assert re.search(message, found), found


@pytest.mark.parametrize(
    ("what", "rank", "message"),
    [
        ("descending", 2, r"cu_seqlens must ascend from 0, got \[0, 12, 11\]"),
        ("other keys", 3, "size 0 of key must be N/n of query = 32"),
    ],
)
def test_the_mistake_of_one_rank_stops_all(what, rank, message, ranks):
    for place, (_, found) in enumerate(ranks.refusals(documents_on_ranks.fault, what)):
        assert re.search(message if place == rank else f"rank {rank} of the group has refused", found), found
