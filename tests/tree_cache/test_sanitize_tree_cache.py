"""Every CUDA kernel of the tree cache at a small size, for compute-sanitizer; the results are checked as well."""

from dataclasses import replace

import pytest
import torch

from htree_ops import TreeKVCache, tree_attention
from htree_ops.ops.tree_cache import tree_cache_attention
from tests.support.cases import case_id
from tests.support.tree_cache_cases import (
    CASES,
    DECODE_CASES,
    PACKED_CASES,
    TreeCacheCase,
    filled_packed_pools,
    offsets,
)

pytestmark = pytest.mark.gpu

#: Calls that the decode kernel takes on Hopper: sequences that end inside a slot, both numbers of head tiles, both
#: sizes, span means that score before the walk and within it, rows that use the lists of a leader, and last rows that
#: have a launch of their own.
DECODED = [
    case
    for case in DECODE_CASES
    if case.name
    in (
        *("ragged", "half, 128, G = 16", "three layers, span 4", "stride", "span 8, stride"),
        *("next", "next, stride, span 2", "many rows"),
    )
]


#: Small calls of the general kernels in both widths.
GENERAL = [
    replace(case, dtype=dtype)
    for case in CASES
    if case.name not in ("model", "wide")
    for dtype in (torch.float32, torch.bfloat16)
]


@pytest.mark.parametrize("case", [*GENERAL, *DECODED], ids=case_id)
def test_pages_are_filled_and_read(case):
    out, lse, *_ = tree_cache_attention(*case.make_inputs("cuda"), **case.options())
    assert out.shape == (sum(case.queries), case.heads, case.value_dim)
    assert not lse.isinf().any()


@pytest.mark.parametrize(("stride", "span", "width"), [(1, None, 64), (4, 4, 64), (16, None, 128)])
def test_chunks_of_a_prompt(stride, span, width):
    """The second chunk adds to the copies of the first."""
    options = {"top_k": 4, "max_top_nodes": 32, "selection_stride": stride, "selection_span": span}
    cache = TreeKVCache(1, 1, width, 700, page_size=32, device="cuda", **options)
    assert cache.dtype == torch.bfloat16
    q, k, v = (torch.randn(1, 640, heads, width, device="cuda", dtype=cache.dtype) for heads in (8, 1, 1))
    for rows in (slice(0, 320), slice(320, 640)):
        cache.append(k[:, rows], v[:, rows])
        out = cache.attend(q[:, rows])
    whole = tree_attention(q, k, v, **cache.options.to_dict())
    assert torch.equal(out, whole[:, 320:])


@pytest.mark.parametrize("case", [*PACKED_CASES[:6], *DECODED], ids=case_id)
@pytest.mark.parametrize("bits", [8, 4])
def test_packed_tokens_are_written_and_read(case, bits):
    pools, table = filled_packed_pools(case, bits, *case.tokens("cuda"))
    packed = {name: pools[name] for name in ("k_codes", "k_scales", "v_codes", "v_scales")}
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device="cuda")
    rows = (case.last_queries("cuda"), pools["k_pool"], pools["v_pool"], table, lengths)
    out, lse, *_ = tree_cache_attention(
        *rows, offsets(case.queries, "cuda"), *case.make_inputs("cuda")[6:], **case.options(), **packed
    )
    assert out.shape == (sum(case.queries), case.heads, case.value_dim)
    assert not lse.isinf().any()


@pytest.mark.parametrize("key_dim", [8, 32])
@pytest.mark.parametrize("heads", [1, 4, 9])
def test_heads_and_widths(heads, key_dim):
    """One instance of each kernel: heads of a group, wide and narrow loads, several chunks of heads."""
    case = TreeCacheCase(
        name="one",
        dtype=torch.float16,
        lengths=(90, 33),
        queries=(3, 1),
        heads=heads,
        kv_heads=1,
        key_dim=key_dim,
        value_dim=key_dim // 2 + 4,
        page_size=32,
        compression_rate=4,
        max_top_nodes=8,
        top_k=3,
    )
    out, *_ = tree_cache_attention(*case.make_inputs("cuda"), **case.options())
    assert bool(out.isfinite().all())


def test_every_step_of_a_cache():
    options = {"compression_rate": 4, "top_k": 3, "max_top_nodes": 12, "selection_stride": 4}
    cache = TreeKVCache(3, 2, 8, 64, page_size=8, num_pages=20, dtype=torch.float32, device="cuda", **options)
    q, k = (torch.randn(3, 40, heads, 8, device="cuda") for heads in (4, 2))
    for begin, end in ((0, 21), (21, 22), (22, 40)):  # more than a page at once, one token, a few
        cache.append(k[:, begin:end], k[:, begin:end])
        out = cache.attend(q[:, begin:end])
    whole = tree_attention(q, k, k, **options)
    torch.testing.assert_close(out, whole[:, 22:], atol=1e-4, rtol=1e-4)
    cache.truncate([39, 25, 8])
    cache.reorder_([1, 1, 0])
    cache.truncate([-1, -1, 13])
    with pytest.raises(ValueError, match="inside a stride"):
        cache.check()
    cache.fork(2, 0)
    with pytest.raises(ValueError, match="sequence 2 can be truncated to a multiple of selection_stride = 4"):
        cache.truncate([-1, -1, 13])  # into pages that it shares, which is the host's to do
    cache.free(1)
    cache.reserve(4)
    assert cache.lengths.tolist() == [39, 0, 39]
    counts = torch.full((3,), 30, dtype=torch.int32, device="cuda")
    cache.append(
        k[:, :30], k[:, :30], counts
    )  # beyond the capacity of two sequences, which the host does not see
    with pytest.raises(ValueError, match="beyond the capacity"):
        cache.check()


@pytest.mark.parametrize(
    ("dtype", "index_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float8_e4m3fn)],
)
@pytest.mark.parametrize(("stride", "index_heads"), [(1, 2), (4, 1)])
@pytest.mark.parametrize(("rope_base", "max_top_nodes"), [(10_000.0, 32), (None, 32), (None, 640)])
def test_an_index_chooses_from_pages(rope_base, max_top_nodes, stride, index_heads, dtype, index_dtype):
    """A prompt, and steps of one row and of several; fp32 takes the general kernels.

    In three layers, or with a top of tokens in two parts.
    """
    options = {"top_k": 4, "max_top_nodes": max_top_nodes, "selection_stride": stride, "page_size": 32}
    options["rope_base"] = rope_base
    cache = TreeKVCache(
        2,
        2,
        64,
        700,
        index_dim=16,
        index_heads=index_heads,
        index_dtype=index_dtype,
        dtype=dtype,
        device="cuda",
        **options,
    )
    q, k, v = (torch.randn(2, 612, heads, 64, device="cuda", dtype=dtype) for heads in (8, 2, 2))
    # Whole numbers, whose products are exact.
    shape = (2, 612, index_heads, 16)
    index = [torch.randint(-3, 4, shape, device="cuda").to(dtype) for _ in range(2)]
    outs, begin = [], 0
    for n in (600, 1, 1, 10):
        rows = slice(begin, begin + n)
        outs.append(cache.decode(q[:, rows], k[:, rows], v[:, rows], index=tuple(x[:, rows] for x in index)))
        begin += n
    cache.reorder_([1, 0])
    cache.check()
    whole = tree_attention(q, k, v, index=tuple(index), **cache.options.to_dict())
    near = 1e-4 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(torch.cat(outs, dim=1), whole, atol=near, rtol=near)
