"""select_blocks at sizes and in places that only a GPU has: memory, streams, graphs, long sequences."""

import pytest
import torch

import htree_ops
from htree_ops.reference import selection as reference
from tests.support.cases import normal
from tests.support.documents import offsets
from tests.support.graphs import assert_stream_and_graph
from tests.support.select_blocks_cases import SelectBlocksCase, integers

pytestmark = pytest.mark.gpu
select_blocks = htree_ops.select_blocks
MOST_BYTES = 512 << 20  # docs/semantics/selection.md §9.1


def assert_equal(ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("d", [16, 32, 48, 64, 80, 128])
@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_several_splits_and_tiles(dtype, block_size, d):
    """More units than a thread block takes, and leaders that fill several tiles, with a rest."""
    T = 9000
    query, key = (integers((2, T, 2, d), dtype, "cuda", seed, largest=2) for seed in (1, 2))
    suffix = query[:, T - 200 :]
    for count, open_next in ((7, False), (24, True)):
        found = select_blocks(suffix, key, count, block_size=block_size, open_next=open_next)
        assert_equal(
            found, reference.select_blocks(suffix, key, count, block_size=block_size, open_next=open_next)
        )


@pytest.mark.parametrize("largest", [1, 15])
@pytest.mark.parametrize("block_size", [16, 32, 48, 128, 256])
def test_long_rows_are_cut_by_their_tiles(block_size, largest):
    """Few equal scores, and so many that they are chosen from whole rows, with what is forced and with none of it."""
    T = 280_000
    query, key = (integers((1, T, 2, 32), torch.bfloat16, "cuda", seed, largest=largest) for seed in (1, 2))
    key[:, 77_777, 0] = torch.nan
    suffix = query[:, T - 144 :]
    for count, options in (
        (1, {}),
        (9, {"local": 9}),
        (130, {"local": 20, "first": 3}),
        (200, {"selection_stride": 4, "first": 17}),
        (256, {"open_next": True}),
        (600, {}),
    ):
        found = select_blocks(suffix, key, count, block_size=block_size, **options)
        assert_equal(found, reference.select_blocks(suffix, key, count, block_size=block_size, **options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_do_not_depend_on_chunks(dtype):
    """A call of many chunks, and calls of a few of its rows."""
    T = 40_000
    query, key = (normal((1, T, 3, 32), dtype, "cuda", seed) for seed in (1, 2))
    blocks, scores = select_blocks(query, key, 33)
    for t in (0, 15, 16, 777, 19_999, 39_999):
        alone = select_blocks(query[:, t : t + 1], key[:, : t + 1], 33)
        assert_equal((blocks[:, t : t + 1], scores[:, t : t + 1]), alone)
    again = select_blocks(query, key, 33)
    assert_equal((blocks, scores), again)


@pytest.mark.parametrize("stride", [1, 16])
def test_memory_is_bounded(stride):
    case = SelectBlocksCase(
        name="memory", dtype=torch.bfloat16, T=262_144, count=8, H=2, d=32, block_size=16,
        selection_stride=stride, num_queries=8192, exact=False,
    )  # fmt: skip
    inputs = case.make_inputs("cuda")
    torch.ops.htree.select_blocks(*inputs)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = torch.ops.htree.select_blocks(*inputs)
    results = sum(x.numel() * x.element_size() for x in found)
    assert torch.cuda.max_memory_allocated() - before - results <= MOST_BYTES


def test_streams_and_graphs():
    query, key = (normal((1, 3000, 2, 32), torch.bfloat16, "cuda", seed) for seed in (1, 2))
    cu = offsets((1200, 0, 1700), "cuda")

    def both():
        packed = htree_ops.select_blocks_varlen(query[0], key[0], cu, cu, 3000, 3000, 20)
        return select_blocks(query, key, 20), packed

    assert_stream_and_graph(both, query)


def test_many_documents():
    """More documents than the table has threads, most of them shorter than a tile of leaders."""
    lengths = tuple(i % 37 for i in range(3000))
    total = sum(lengths)
    query, key = (integers((total, 2, 16), torch.bfloat16, "cuda", seed) for seed in (1, 2))
    cu = offsets(lengths, "cuda")
    found = htree_ops.select_blocks_varlen(query, key, cu, cu, 37, 37, 3, block_size=16)
    on_host = htree_ops.select_blocks_varlen(
        query.cpu(), key.cpu(), cu.cpu(), cu.cpu(), 37, 37, 3, block_size=16
    )
    assert_equal(tuple(x.cpu() for x in found), on_host)


def test_more_than_2_31_elements():
    """Offsets of keys beyond 2^31 elements."""
    T = 2**21
    key = torch.zeros(9, T, 1, 128, dtype=torch.bfloat16, device="cuda")
    assert key.numel() > 2**31
    key[8, T - 4096] = 1.0
    query = torch.ones(9, 16, 1, 128, dtype=torch.bfloat16, device="cuda")
    blocks, scores = select_blocks(query, key, 2)
    assert blocks[8, :, 0].tolist() == [[(T - 4096) // 16, T // 16 - 1]] * 16
    assert bool((scores[8, :, 0, 0] == 128.0).all())
    assert bool((blocks[7, :, 0, 0] == 0).all())
