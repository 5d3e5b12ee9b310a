"""Caches that keep the keys of an index (docs/semantics/tree_cache.md §7.7).

Index rows are small whole numbers: products are exact in every order of sums, so lists are those of the whole sequence
on every device, and scores tie. All of it stands here, from a row to a cache, because each test needs those numbers.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from htree_ops import TreeKVCache, tree_attention
from htree_ops.errors import ShapeMismatchError, UnsupportedDtypeError
from htree_ops.ops.tree_cache.functions import tree_cache_attention
from tests.support.cases import STEP_SCALE, normal, one_step_apart
from tests.support.graphs import capture, on_another_stream
from tests.support.opcheck import opcheck

OPTIONS: dict[str, Any] = {"compression_rate": 4, "top_k": 3, "max_top_nodes": 12}
WIDTH = 16
CODES = torch.float8_e4m3fn
Rows = tuple[Tensor, Tensor, Tensor]
Index = tuple[Tensor, Tensor]
OPS = torch.ops.htree


def whole_numbers(
    shape: tuple[int, ...], device: str, seed: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    return (2 * normal(shape, torch.float32, device, seed)).round().to(dtype)


def make(
    device: str = "cpu", batch: int = 2, capacity: int = 96, head_dim: int = 8, **others: Any
) -> TreeKVCache:
    own = {"page_size": 8, "index_dim": WIDTH, "dtype": torch.float32, "device": device}
    return TreeKVCache(batch, 2, head_dim, capacity, **OPTIONS | own | others)


def row_dtype(cache: TreeKVCache) -> torch.dtype:
    """Of index rows that no cache rounds."""
    return torch.bfloat16 if cache.index_dtype == CODES else cache.index_dtype


def tokens(cache: TreeKVCache, n: int, seed: int = 0, heads: int = 4) -> tuple[Rows, Index]:
    """Queries, keys, values and both parts of the index of n tokens of every sequence."""
    device, kv_heads = str(cache.device), cache.num_kv_heads
    q, k, v = (
        normal((cache.batch, n, num, cache.head_dim), cache.dtype, device, seed + i)
        for i, num in enumerate((heads, kv_heads, kv_heads))
    )
    shape = (cache.batch, n, cache.index_heads, cache.index_dim)
    query, key = (whole_numbers(shape, device, seed + i, row_dtype(cache)) for i in (3, 4))
    return (q, k, v), (query, key)


def served(cache: TreeKVCache, rows: Rows, index: Index, parts: list[int]) -> Tensor:
    """The rows of :meth:`TreeKVCache.decode` in so many tokens a call."""
    pieces = [x[:, : sum(parts)].split(parts, dim=1) for x in (*rows, *index)]
    return torch.cat([cache.decode(*x[:3], index=x[3:]) for x in zip(*pieces, strict=True)], dim=1)


def whole(cache: TreeKVCache, rows: Rows, index: Index) -> Tensor:
    return tree_attention(*rows, index=index, options=cache.options)


def assert_near(found: Tensor, wanted: Tensor) -> None:
    """Bit for bit on the CPU, where one code computes both; else within the tolerance of §1.11."""
    if found.device.type == "cpu":
        assert torch.equal(found, wanted)
        return
    near = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}[found.dtype]
    torch.testing.assert_close(found, wanted, atol=near, rtol=near)


# ---- rows


@settings(max_examples=150)
@given(data=st.data(), seed=st.integers(0, 2**20))
def test_decoded_rows_are_those_of_the_whole_sequence(data, seed, device):
    draw = data.draw
    rate = draw(st.sampled_from((2, 3, 4)))
    top_k = draw(st.integers(1, 5))
    cache = make(
        device,
        batch=draw(st.integers(1, 2)),
        capacity=draw(st.sampled_from((120, 200))),
        compression_rate=rate,
        top_k=top_k,
        max_top_nodes=draw(st.integers(1, top_k * rate)),
        selection_stride=draw(st.sampled_from([s for s in (1, 2, 4) if rate % s == 0])),
        page_size=rate * draw(st.integers(1, 5)),
        open_next=draw(st.booleans()),
        index_dim=draw(st.sampled_from((16, 48))),
        index_heads=draw(st.sampled_from((1, 2))),
        index_dtype=draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16, CODES))),
    )
    parts = draw(st.lists(st.integers(1, 20), min_size=1, max_size=6))
    rows, index = tokens(cache, sum(parts), seed)
    if device == "cpu" and draw(st.booleans()):  # products that are rounded: one kernel computes both
        query, key = (normal(x.shape, x.dtype, device, seed + i) for i, x in enumerate(index))
        index = query, key
    found = served(cache, rows, index, parts)
    assert_near(found, whole(cache, rows, (index[0], held_keys(cache, sum(parts)))))
    cache.check()


def held_keys(cache: TreeKVCache, length: int) -> Tensor:
    """The index keys of all sequences as the pages hold them."""
    return cache.pools.index.tokens(cache.block_table, length)


@settings(max_examples=150)
@given(data=st.data(), seed=st.integers(0, 2**20))
def test_codes_are_keys_rounded_by_a_power_of_two(data, seed, device):
    """Each row by its largest magnitude, which has at least 7 bits of the code's 8 in front of it, or is a code."""
    cache = make(device, batch=1, index_dtype=CODES, index_heads=1)
    rows, (query, _) = tokens(cache, 40)
    scale = 2.0 ** data.draw(st.integers(-120, 120))
    key = (normal((1, 40, 1, WIDTH), torch.float32, device, seed) * scale).bfloat16()
    key[0, 3] = 0
    key[0, 4, 0, 2] = torch.nan
    key[0, 5, 0, 1] = -torch.inf
    served(cache, rows, (query, key), data.draw(st.sampled_from(([40], [7, 33], [39, 1]))))
    held = held_keys(cache, 40).float()
    wide = key.float()
    largest = wide.nan_to_num(0.0, torch.inf, -torch.inf).abs().amax(-1, keepdim=True)
    mantissa, exponent = torch.frexp(largest)  # largest = mantissa * 2**exponent, mantissa in [1/2, 1)
    exponent = torch.where(mantissa <= 0.875, exponent - 9, exponent - 8).float()
    exponent = torch.where(largest.isinf(), torch.inf, torch.where(largest == 0, -torch.inf, exponent))
    exponent = exponent.clamp(-117, 119)
    expected = (wide * torch.exp2(-exponent)).clamp(-448, 448).to(CODES).float() * torch.exp2(exponent)
    torch.testing.assert_close(held, expected, rtol=0, atol=0, equal_nan=True)
    stored = cache.pools.index.scales[cache.block_table[0].long()].transpose(1, 2).flatten(0, 1)[:40]
    assert torch.equal(stored[..., None].float() - 127, exponent[0])


def test_no_kind_of_nan_changes_the_scale_of_a_row(device):
    """A signalling NaN too, which fmax of the C library passes on."""
    cache = make(device, batch=1, index_dtype=CODES, index_heads=1)
    rows, (query, key) = tokens(cache, 16)
    key.fill_(8.0)
    bits = key.view(torch.int16)
    for i, kind in enumerate((0x7F81, 0x7FC0, 0x7FFF, -0x7F, -0x40)):  # the last two have a sign
        bits[0, 3 * i, 0, 5] = bits[0, 3 * i + 1, 0, -1] = kind
    nan = key.isnan()
    assert int(nan.sum()) == 10
    served(cache, rows, (query, key), [16])
    held = held_keys(cache, 16)
    assert torch.equal(held.isnan(), nan)
    assert bool((held[~nan] == 8).all())
    scales = cache.pools.index.scales
    assert bool((scales[cache.block_table[0, :2].long()] == 127 - 5).all())  # 8 = 256 / 2^5


def test_rows_of_coded_keys_are_those_of_the_decoded_ones(device):
    """Chosen by rounded keys, whose lists are not those of the keys themselves."""
    cache = make(device, index_dtype=CODES, selection_stride=4, open_next=True)
    rows, _ = tokens(cache, 90)
    query, key = (normal((2, 90, 2, WIDTH), torch.bfloat16, device, 7 + i) for i in range(2))
    found = served(cache, rows, (query, key), [80, 1, 9])
    held = held_keys(cache, 90)
    assert not torch.equal(held, key)
    torch.testing.assert_close(held.float(), key.float(), rtol=0.0625, atol=0.02)
    if device == "cpu":  # elsewhere products that are rounded may choose another node (§1.11)
        assert torch.equal(found, whole(cache, rows, (query, held)))
        assert not torch.equal(found, whole(cache, rows, (query, key)))


def test_what_codes_need(device):
    cache, plain = make(device, index_dtype=CODES), make(device)
    rows, (query, key) = tokens(cache, 20)
    served(cache, rows, (query, key), [20])
    (pool, scales), other = cache.pools.index_pool, plain.pools.index_pool[0]

    def call(index_query, index_pool, index_scales):
        tree_cache_attention(
            rows[0][:, -1],
            cache.k_pool,
            cache.v_pool,
            cache.block_table,
            cache.lengths,
            torch.arange(3, dtype=torch.int32, device=device),
            page_size=8,
            index_query=index_query,
            index_pool=index_pool,
            index_scales=index_scales,
            options=cache.options,
        )

    last = query[:, -1]
    call(last, pool, scales)
    for arguments, error, message in (
        ((last, pool, None), ValueError, "index_scales must be given where index_pool is uint8, got None"),
        ((last, other, scales), ValueError, "index_scales must be None where index_pool is not uint8"),
        ((last, pool, scales.int()), TypeError, "index_scales must have dtype torch.uint8, got torch.int32"),
        ((last, pool, scales[:, :, :4]), ValueError, "index_scales must be contiguous"),
        ((last, pool, scales[:, :, None]), ShapeMismatchError, "index_scales must be 3-D"),
        ((last, pool, scales[:, :1].contiguous()), ShapeMismatchError, "size 1 of index_scales must be 2"),
        (
            (last.half(), pool, scales),
            TypeError,
            "index_query must have dtype torch.bfloat16, got torch.float16",
        ),
    ):
        with pytest.raises(error, match=message):
            call(*arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_index_rows_are_rounded_to_the_dtype_of_the_pages(dtype):
    cache = make(dtype=dtype)
    assert cache.index_dtype == torch.bfloat16
    (q, k, v), _ = tokens(cache, 90)
    wide = tuple(normal((2, 90, 2, WIDTH), dtype, "cpu", 7 + i) for i in range(2))
    rounded = tuple(x.bfloat16() for x in wide)
    found = served(cache, (q, k, v), wide, [80, 1, 9])
    assert torch.equal(found, whole(cache, (q, k, v), rounded))
    assert not torch.equal(found, whole(cache, (q, k, v), wide))


def test_rows_depend_on_the_index_and_not_on_scores(device):
    cache = make(device)
    rows, (query, key) = tokens(cache, 90)
    other = make(device)
    found, negated = served(cache, rows, (query, key), [90]), served(other, rows, (-query, key), [90])
    assert not torch.allclose(found[:, 48:], negated[:, 48:], atol=1e-2)  # those that choose
    assert_near(found[:, :12], negated[:, :12])  # those that see every token


def test_ragged_prompts_drafts_and_beams(device):
    """Rows after truncations, forks and reorders are those of the sequences that are left."""
    cache = make(device, batch=3, selection_stride=4)
    rows, index = tokens(cache, 90)

    def at(place):
        """The rows of tokens [B, n]."""
        chosen = [x[torch.arange(3, device=x.device)[:, None], place] for x in (*rows, *index)]
        return tuple(chosen[:3]), tuple(chosen[3:])

    counts = [61, 7, 40]
    q, k, v, query, key = (x[:, :61] for x in (*rows, *index))
    out = cache.decode(q, k, v, counts, index=(query, key))
    for b, n in enumerate(counts):
        alone = [x[b : b + 1, :n] for x in (*rows, *index)]
        assert_near(out[b, :n], whole(cache, tuple(alone[:3]), tuple(alone[3:]))[0])
        assert not out[b, n:].any()
    cache.truncate([58, -1, 37])
    cache.fork(0, 1)
    cache.reorder_([2, 1, 0])
    source, held = [2, 0, 0], [37, 58, 58]
    more = 9
    place = torch.tensor([[n + i for i in range(more)] for n in held], device=device)
    # Sequence b goes on with the tokens of its source.
    (q, k, v), (query, key) = at(place)
    q, k, v, query, key = (
        torch.stack([x[src, n : n + more] for src, n in zip(source, held, strict=True)])
        for x in (*rows, *index)
    )
    out = cache.decode(q, k, v, index=(query, key))
    for b, (src, n) in enumerate(zip(source, held, strict=True)):
        alone = [x[src : src + 1, : n + more] for x in (*rows, *index)]
        expected = whole(cache, tuple(alone[:3]), tuple(alone[3:]))[0, n:]
        assert_near(out[b], expected)
    cache.check()
    cache.free(1)
    assert cache.host_lengths() == [46, 0, 67]


@pytest.mark.parametrize("dtype", [torch.float32, CODES], ids=str)
def test_keys_that_are_no_numbers_count_as_the_least(dtype, device):
    """And what no list can depend on is not read: index keys of the diagonal block, and of pages that are free."""
    cache = make(device, index_dtype=dtype)
    for pool in cache.pools.index_pool:
        pool.fill_(torch.nan if pool.is_floating_point() else 255)
    rows, (query, key) = tokens(cache, 83)
    key = key.clone()
    key[:, 4:8] = torch.nan
    key[:, 80:] = torch.nan
    found = served(cache, rows, (query, key), [82, 1])
    assert bool(found.isfinite().all())
    assert_near(found, whole(cache, rows, (query, key)))


def test_memory_of_a_step_follows_the_length_where_top_k_is_huge():
    rows, index = tokens(make(), 90)
    wide, enough = make(top_k=10**6), make(top_k=30)
    served(wide, rows, index, [1])  # makes what is kept
    rest = [x[:, 1:90] for x in (*rows, *index)]
    with torch.autograd.profiler.profile(profile_memory=True, use_kineto=True) as profile:
        found = wide.decode(*rest[:3], index=rest[3:])
    taken = [event.self_cpu_memory_usage for event in profile.function_events]
    assert 0 < max(taken) < 2**20
    assert torch.equal(found, served(enough, rows, index, [90])[:, 1:])


# ---- what a cache holds


@pytest.mark.parametrize("dtype", [torch.bfloat16, CODES], ids=str)
def test_states_and_copies(dtype, device):
    cache = make(device, index_dtype=dtype)
    other = make(device, capacity=300, num_pages=60, index_dtype=dtype)
    rows, index = tokens(cache, 90)
    served(cache, rows, index, [50, 7])
    state = cache.state_dict()
    assert state["index_keys"].shape[1:] == (2, 8, WIDTH)
    other.load_state_dict(state)
    assert cache.to(device) is cache
    rest = [x[:, 57:] for x in (*rows, *index)]
    ours, theirs = (one.decode(*rest[:3], index=rest[3:]) for one in (cache, other))
    assert torch.equal(ours, theirs)
    for b in range(2):
        kept = other.pools.index.tokens(other.block_table[b : b + 1], 90)[0]
        assert torch.equal(kept, index[1][b].to(kept.dtype))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"index_dim": 0},
            ValueError,
            "index_dim must be 16, that of the state, got 0: make the cache with index_dim=16",
        ),
        ({"index_dim": 32}, ValueError, "index_dim must be 16, that of the state, got 32"),
        ({"index_heads": 1}, ValueError, "index_heads must be 2, that of the state, got 1"),
        (
            {"index_dtype": torch.float16},
            TypeError,
            "index_dtype must be torch.bfloat16, that of the state, got torch.float16: make the cache with index_d",
        ),
        (
            {"index_dtype": CODES},
            TypeError,
            "index_dtype must be torch.bfloat16, that of the state, got torch.float8_e4m3fn: make the cache with",
        ),
    ],
    ids=str,
)
def test_states_of_another_index_are_refused(change, error, message):
    cache, other = make(), make(**change)
    rows, index = tokens(cache, 20)
    served(cache, rows, index, [20])
    with pytest.raises(error, match=message):
        other.load_state_dict(cache.state_dict())
    assert other.host_lengths() == [0, 0]
    if not other.index_dim:
        with pytest.raises(ValueError, match="index_dim must be 0, that of the state, got 16"):
            cache.load_state_dict(other.state_dict())


def test_bytes_and_repr(device):
    plain, cache, wide = make(device, index_dim=0), make(device), make(device, index_dtype=torch.float32)
    of_index = cache.num_pages * 2 * 8 * WIDTH * 2
    assert cache.num_bytes().allocated - plain.num_bytes().allocated == of_index
    assert wide.num_bytes().allocated - plain.num_bytes().allocated == 2 * of_index
    coded = make(device, index_dtype=CODES)
    assert coded.num_bytes().allocated - plain.num_bytes().allocated == of_index // 2 + of_index // 2 // WIDTH
    rows, index = tokens(cache, 9)
    served(cache, rows, index, [9])
    assert cache.num_bytes().used == 4 * cache.pools.page_bytes()
    assert "index_dim=16, index_heads=2, index_dtype=torch.bfloat16" in repr(cache)
    assert "index_heads" not in repr(plain)


# ---- what is refused


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"index_dim": 8}, ValueError, "index_dim must be a multiple of 16 up to 128, got 8"),
        ({"index_dim": 144}, ValueError, "index_dim must be a multiple of 16 up to 128, got 144"),
        ({"index_dim": -16}, ValueError, "index_dim must be"),
        ({"index_dim": 16.0}, TypeError, "index_dim must be an int"),
        ({"index_heads": 3}, ValueError, "index_heads must be 1 or num_kv_heads = 2, got 3"),
        ({"index_dtype": torch.float64}, UnsupportedDtypeError, "index_dtype must be .*, got torch.float64"),
        (
            {"index_dim": 0, "index_heads": 1},
            ValueError,
            "index_heads must be None where index_dim is 0, got 1",
        ),
        (
            {"index_dim": 0, "index_dtype": torch.half},
            ValueError,
            "index_dtype must be None where index_dim is 0",
        ),
        ({"selection_span": 2}, ValueError, "index_dim must be 0 beside selection_span = 2, got 16"),
        (
            {"importance": "exp_joint"},
            ValueError,
            "index_dim must be 0 beside importance = 'exp_joint', got 16",
        ),
    ],
    ids=str,
)
def test_options_that_an_index_does_not_take(change, error, message):
    with pytest.raises(error, match=f"TreeKVCache: {message}"):
        make(**change)


def test_calls_with_and_without_an_index(device):
    cache, plain = make(device), make(device, index_dim=0)
    (q, k, v), (query, key) = tokens(cache, 5)
    for call, argument in (
        (lambda: cache.append(k, v), r"append: index_key must be \[2, n, 2, 16\]"),
        (lambda: cache.attend(q), r"attend: index_query must be \[2, n, 2, 16\]"),
        (
            lambda: cache.decode(q, k, v),
            r"decode: index must be \(index_query, index_key\), \[2, n, 2, 16\] each,",
        ),
        (lambda: cache.decode(q, k, v, index=(query, None)), r"decode: index_key must be \[2, n, 2, 16\]"),
    ):
        with pytest.raises(ValueError, match=f"{argument} where the cache has index_dim = 16, got None: a c"):
            call()
    for call, argument, got in (
        (lambda: plain.append(k, v, index_key=key), "append: index_key", "Tensor"),
        (lambda: plain.attend(q, index_query=query), "attend: index_query", "Tensor"),
        (lambda: plain.decode(q, k, v, index=(query, key)), "decode: index", "tuple of length 2"),
    ):
        rule = "must be None where the cache has index_dim = 0"
        with pytest.raises(
            ValueError, match=f"{argument} {rule}, got {got}: make the cache with the index_d"
        ):
            call()
    assert cache.host_lengths() == plain.host_lengths() == [0, 0]
    for bad, error, message in (
        (
            key[:, :4],
            ShapeMismatchError,
            r"append: size 1 of index_key must be 5 \(the new tokens of k\), got 4",
        ),
        (
            key[:, :, :1],
            ShapeMismatchError,
            r"size 2 of index_key must be 2 \(H_i of the cache's index keys\), got 1",
        ),
        (
            key[..., :8],
            ShapeMismatchError,
            r"size 3 of index_key must be 16 \(d of the cache's index keys\), got 8",
        ),
        (key[0], ShapeMismatchError, "index_key must be 4-D"),
        (key.int(), UnsupportedDtypeError, "index_key must have dtype"),
        (key.to("meta"), RuntimeError, "index_key must be on the device"),
        (3, TypeError, "index_key must be a Tensor, got int"),
    ):
        with pytest.raises(error, match=message):
            cache.append(k, v, index_key=bad)
    with pytest.raises(
        ShapeMismatchError, match=r"decode: size 1 of index_query must be 5 \(the rows of q\), got 4"
    ):
        cache.decode(q, k, v, index=(query[:, :4], key))
    with pytest.raises(TypeError, match=r"decode: index must be \(index_query, index_key\), got Tensor"):
        cache.decode(q, k, v, index=query)
    assert cache.host_lengths() == cache.lengths.tolist() == [0, 0]


def test_an_index_has_no_gradient(device):
    cache = make(device)
    (q, k, v), index = tokens(cache, 20)
    wanted = tuple(x.float().requires_grad_() for x in index)
    out = cache.decode(q, k, v, index=wanted)
    assert not out.requires_grad


# ---- what torch asks of ops


@pytest.mark.parametrize("stride", [1, 4])
@pytest.mark.parametrize(("heads", "dtype"), [(1, torch.bfloat16), (2, torch.bfloat16), (2, CODES)], ids=str)
def test_opcheck(stride, heads, dtype, device):
    cache = make(device, selection_stride=stride, index_heads=heads, index_dtype=dtype, capacity=40)
    for pool in cache.pools.tensors():
        pool.zero_()
    (q, k, v), (query, key) = tokens(cache, 30)
    served(cache, (q, k, v), (query, key), [21])
    before, behind = cache.step_arguments(None, 3)
    rows = [x[:, 21:24] for x in (q, k, v, query, key)]
    opcheck(OPS._tree_cache_step_.default, (*before, *rows, *behind))
    cu = torch.tensor([0, 3, 6], dtype=torch.int32, device=device)
    opcheck(
        OPS._tree_cache_attention.default,
        (
            q[:, 18:21].flatten(0, 1),
            cache.k_pool,
            cache.v_pool,
            cache.block_table,
            cache.lengths,
            cu,
            cache.ring.lists,
            cache.ring.list_pos,
            *[None] * 6,
            query[:, 18:21].flatten(0, 1),
            *(*cache.pools.index_pool, None)[:2],
            cache.page_size,
            *cache.options.packed(),
        ),
    )


def test_attention_from_pools_of_a_caller(device):
    cache = make(device)
    rows, (query, key) = tokens(cache, 70)
    served(cache, rows, (query, key), [70])
    pool = torch.zeros_like(cache.pools.index_pool[0])
    place = torch.arange(70, device=device)
    for b in range(2):
        pool[cache.block_table[b].long()[place // 8], :, place % 8] = key[b]
    arguments = {
        "q": rows[0][:, 60:].flatten(0, 1),
        "k_pool": cache.k_pool,
        "v_pool": cache.v_pool,
        "block_table": cache.block_table,
        "lengths": cache.lengths,
        "cu_q": torch.tensor([0, 10, 20], dtype=torch.int32, device=device),
        "page_size": 8,
        "index_query": query[:, 60:].flatten(0, 1),
        "index_pool": pool,
        "options": cache.options,
    }
    out = tree_cache_attention(**arguments)[0]
    assert_near(out.unflatten(0, (2, 10)), whole(cache, rows, (query, key))[:, 60:])
    for change, message in (
        ({"index_pool": None}, "index_query and index_pool must be given together"),
        ({"index_pool": pool[1:]}, "size 0 of index_pool must be 24"),
        ({"index_pool": pool[:, :, :4].contiguous()}, "size 2 of index_pool must be 8"),
        (
            {"index_pool": pool[..., :8].contiguous()},
            "d, the last size of index_pool, must be a multiple of 16",
        ),
        ({"index_pool": pool.mT}, "index_pool must be contiguous"),
        ({"index_pool": pool.repeat(1, 2, 1, 1)}, "index_pool must have 1 or H_kv = 2 heads, got 4"),
        (
            {"index_query": arguments["index_query"][1:]},
            r"size 0 of index_query must be 20 \(the rows of q\)",
        ),
        ({"importance": "exp_joint"}, "importance must be lse_causal beside an index"),
        ({"selection_span": 2}, "selection_span must be None beside an index"),
    ):
        with pytest.raises(ValueError, match=message):
            tree_cache_attention(**arguments | change)
    with pytest.raises(TypeError, match="index_query must have the dtype of index_pool"):
        tree_cache_attention(**arguments | {"index_query": arguments["index_query"].half()})


def test_the_op_refuses_half_of_an_index():
    cache = make()
    (q, k, v), (query, key) = tokens(cache, 3)
    before, behind = cache.step_arguments(None, 3)
    for rows, message in (
        ((q, k, v, None, key), "index_query must be given beside q and index_pool, got None"),
        ((q, k, v, query, None), "index_key must be given beside k and index_pool, got None"),
        ((q, None, None, query, key), "index_key must be None where k or index_pool is missing"),
        ((None, k, v, query, key), "index_query must be None where q or index_pool is missing"),
    ):
        with pytest.raises(ValueError, match=message):
            OPS._tree_cache_step_(*before, *rows, *behind)
    assert cache.lengths.tolist() == [0, 0]


def test_a_step_compiles(device):
    torch._dynamo.reset()
    cache, eager = make(device), make(device)
    rows, index = tokens(cache, 64)
    step = torch.compile(
        lambda q, k, v, query, key: cache.decode(q, k, v, index=(query, key)),
        fullgraph=True,
        backend="aot_eager",
    )
    pieces = [x.split((61, 1, 1, 1), dim=1) for x in (*rows, *index)]
    for q, k, v, query, key in zip(*pieces, strict=True):
        assert torch.equal(step(q, k, v, query, key), eager.decode(q, k, v, index=(query, key)))
    assert cache.lengths.tolist() == eager.lengths.tolist() == [64, 64]


def test_a_cache_on_meta():
    cache = make("meta")
    shapes = ((2, 3, 4, 8), (2, 3, 2, 8), (2, 3, 2, 8))
    q, k, v = (torch.empty(shape, device="meta") for shape in shapes)
    query = torch.empty(2, 3, 2, WIDTH, device="meta")
    assert cache.decode(q, k, v, index=(query, query)).shape == (2, 3, 4, 8)


# ---- a GPU's kernels


def served_cache(batch: int, capacity: int, **others: Any) -> TreeKVCache:
    """One of the sizes that Hopper's decode kernel takes."""
    sizes = {"compression_rate": 16, "top_k": 8, "max_top_nodes": 128, "page_size": 256, "index_dim": 32}
    return make("cuda", batch, capacity, 64, dtype=torch.bfloat16, **sizes | others)


@pytest.mark.gpu
@pytest.mark.parametrize("index_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("index_heads", [1, 2])
@pytest.mark.parametrize("stride", [1, 4, 16])
@pytest.mark.parametrize("leaf_bits", [None, 8])
@pytest.mark.parametrize(("rope_base", "top_k"), [(10_000.0, 8), (None, 8), (None, 40)])
def test_decode_kernels_take_the_lists_of_an_index(
    rope_base,
    top_k,
    leaf_bits,
    stride,
    index_heads,
    index_dtype,
    monkeypatch,
):
    """Three layers, of which a list of 40 nodes has two parts; steps of one row and of several.

    Beside the general kernels and the whole sequence.
    """
    options = {"selection_stride": stride, "index_heads": index_heads, "index_dtype": index_dtype}
    options |= {"rope_base": rope_base, "top_k": top_k}
    cache, general = (served_cache(2, 6144, leaf_bits=leaf_bits, **options) for _ in range(2))
    rows, index = tokens(cache, 5000, heads=8)
    parts = [4900, 1, 1, 7, 1, 64, 1, 25]
    found = served(cache, rows, index, parts)
    monkeypatch.setenv("HTREE_TREE_DECODE", "general")
    near = served(general, rows, index, parts)
    torch.testing.assert_close(found.float(), near.float(), atol=3e-2, rtol=3e-2)
    if stride > 1:
        assert torch.equal(cache.ring.lists, general.ring.lists)
    if leaf_bits is None:
        torch.testing.assert_close(found.float(), whole(cache, rows, index).float(), atol=3e-2, rtol=3e-2)
    cache.check()


@pytest.mark.gpu
@pytest.mark.parametrize("rope_base", [10_000.0, None])
def test_rows_of_an_index_depend_on_their_sequence_alone(rope_base):
    """Bit for bit, whatever the batch, the pages and the calls."""
    cache = served_cache(3, 6144, rope_base=rope_base)
    rows, index = tokens(cache, 5000, heads=8)
    out = served(cache, rows, index, [4990, 1, 9])[:, 4990:]
    for b in range(3):
        alone = served_cache(1, 5120, rope_base=rope_base)
        single = tuple(x[b : b + 1] for x in rows), tuple(x[b : b + 1] for x in index)
        assert torch.equal(served(alone, *single, [4990, 3, 7])[:, 4990:], out[b : b + 1])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rope_base", "begin", "max_top_nodes"),
    [(10_000.0, 4960, 128), (None, 4960, 128), (None, 490, 4096), (None, 4080, 4096)],
)
@pytest.mark.parametrize("stride", [1, 4])
def test_a_captured_step_with_an_index(stride, rope_base, begin, max_top_nodes):
    """Also where a sequence grows by a part, and where it gets another top."""
    options = {"selection_stride": stride, "rope_base": rope_base, "max_top_nodes": max_top_nodes}
    cache, eager = (served_cache(2, 6144, **options) for _ in range(2))
    rows, index = tokens(cache, begin + 40, heads=8)
    for one in (cache, eager):
        served(one, rows, index, [begin])
    held = [x[:, :1].clone() for x in (*rows, *index)]
    state = cache.state_dict()
    on_another_stream(lambda: cache.decode(*held[:3], index=held[3:]))
    cache.load_state_dict(state)
    graph, out = capture(lambda: cache.decode(*held[:3], index=held[3:]))
    for step in range(begin, begin + 40):
        piece = [x[:, step : step + 1] for x in (*rows, *index)]
        for to, x in zip(held, piece, strict=True):
            to.copy_(x)
        graph.replay()
        cache.advance()
        assert torch.equal(out, eager.decode(*piece[:3], index=piece[3:]))
    cache.check()


@pytest.mark.gpu
@pytest.mark.parametrize(("top_k", "max_top_nodes"), [(8, 128), (3, 40), (5, 700), (40, 8192)])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "group"),
    [(torch.bfloat16, 128, 8), (torch.float16, 64, 1), (torch.bfloat16, 64, 16), (torch.float16, 128, 11)],
    ids=str,
)
def test_rows_without_rotations_in_parts(dtype, head_dim, group, top_k, max_top_nodes, monkeypatch):
    """Sequences of all depths, one of them empty, beside the general kernels; what they open reaches no row above."""
    options = {"compression_rate": 16, "page_size": 64, "rope_base": None}
    options |= {"top_k": top_k, "max_top_nodes": max_top_nodes}
    cache = make("cuda", 6, 12_800, head_dim, dtype=dtype, **options)
    (q, k, v), (query, key) = tokens(cache, 12_000, heads=2 * group)
    q[4] *= 4  # tiles of keys weigh more than all before them
    lengths = [12_000, 1, 0, 16, 511, 4097]
    cache.append(k, v, lengths, index_key=key)
    rows, drafts = q[:, :3], [3, 1, 0, 2, 3, 3]

    def attend() -> tuple[Tensor, ...]:
        return cache.attend(rows, drafts, index_query=query[:, :3], return_lse=True)

    out, lse = attend()
    monkeypatch.setenv("HTREE_TREE_DECODE", "general")
    others, other_lse = attend()
    # A token of mean weight that is left out moves the lse by 2e-4 and more.
    torch.testing.assert_close(lse, other_lse, atol=5e-5, rtol=0)
    near = 1e-2 if dtype == torch.bfloat16 else 2e-3
    torch.testing.assert_close(out, others, atol=near, rtol=near)
    monkeypatch.delenv("HTREE_TREE_DECODE")
    for b in (0, 4, 5):  # a row alone has the same bits
        one = make("cuda", 1, 12_032, head_dim, dtype=dtype, **options)
        one.append(
            k[b : b + 1, : lengths[b]], v[b : b + 1, : lengths[b]], index_key=key[b : b + 1, : lengths[b]]
        )
        alone = one.attend(rows[b : b + 1], index_query=query[b : b + 1, :3])
        assert torch.equal(alone, out[b : b + 1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scores_one_step_beyond_another(device, dtype):
    """Floats from 2^27 on lie 16 apart: a reference that stays one step behind leaves weights of 2^16."""
    options = {"compression_rate": 16, "page_size": 64, "rope_base": None, "top_k": 8, "max_top_nodes": 2048}
    cache = make(device, 1, 1280, 64, dtype=dtype, scale=STEP_SCALE, **options)
    (q, k, v), (query, key) = tokens(cache, 1100, heads=8)
    one_step_apart(q, k, dim=1, run=64)
    cache.append(k, v, [1100], index_key=key)
    out = cache.attend(q[:, -1:], index_query=query[:, -1:])
    expected = v[:, 1088:].float().mean(1, keepdim=True).repeat_interleave(4, 2)
    near = 1e-2 if dtype == torch.bfloat16 else 2e-3
    torch.testing.assert_close(out.float(), expected, atol=near, rtol=near)
