"""CompressedKVCache: the policy of docs/semantics/compressed_kv.md §4.6, pages, beams and states."""

import copy
import io
import math

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from compressed_kv_helpers import (
    BATCH,
    HEADS,
    KINDS,
    WIDTH,
    assert_same_content,
    compressed_length,
    heads_last,
    make,
    tokens,
)
from hypothesis import given

import htree_ops
from htree_ops import CompressedKVCache
from htree_ops.errors import OutOfPagesError
from htree_ops.reference import compressed_kv as reference
from tests.support.cases import normal
from tests.support.compare import assert_close_spec
from tests.support.compressed_kv_cases import decode_tolerance
from tests.support.graphs import capture


@pytest.mark.parametrize("kind", KINDS)
def test_append_in_any_pieces_is_prefill(kind, device):
    k, v = tokens(device, 117)
    whole = make(device, **KINDS[kind])
    whole.prefill(k, v)
    for sizes in ([1] * 117, [117], [20, 1, 21, 75], [5, 16, 16, 80], [0, 37, 0, 80]):
        pieces = make(device, **KINDS[kind])
        for part in zip(k.split(sizes, dim=1), v.split(sizes, dim=1), strict=True):
            pieces.append(*part)
        pieces.settle()
        assert pieces.host_lengths() == [117] * BATCH
        assert pieces.compressed_lengths == [compressed_length(117)] * BATCH
        assert_same_content(pieces, whole)
        q = normal((BATCH, 8, WIDTH), torch.float16, device, seed=3)
        assert torch.equal(pieces.attend(q)[0], whole.attend(q)[0])


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    start=st.none() | st.lists(st.integers(0, 50), min_size=BATCH, max_size=BATCH),
    window=st.integers(0, 9),
    chunk=st.sampled_from([1, 4, 16]),
    kind=st.sampled_from(sorted(KINDS)),
    seed=st.integers(0, 1000),
)
def test_property_the_content_follows_the_length_alone(device, sizes, start, window, chunk, kind, seed):
    """After ragged prompts and pieces, each sequence is as if it had come alone and in one piece."""
    options = KINDS[kind] | {"window": window, "chunk": chunk, "capacity": 400}
    if "page_size" in options:
        options["page_size"] = min(chunk, int(options["page_size"]))
    begin = [0] * BATCH if start is None else start
    k, v = tokens(device, 50 + sum(sizes), seed)
    cache = make(device, **options)
    if start is not None:
        cache.prefill(k[:, :50], v[:, :50], start)
    at = 50
    for size in sizes:
        cache.append(k[:, at : at + size], v[:, at : at + size])
        at += size
    cache.settle()
    assert cache.host_lengths() == [n + sum(sizes) for n in begin]
    assert cache.compressed_lengths == [compressed_length(n, window, chunk) for n in cache.host_lengths()]
    assert cache.comp_len.tolist() == cache.compressed_lengths
    assert (cache.comp_len + cache.win_len).tolist() == cache.host_lengths()
    for i, n in enumerate(begin):
        alone = make(device, batch=1, **options)
        own = [torch.cat((x[i : i + 1, :n], x[i : i + 1, 50:]), dim=1) for x in (k, v)]
        alone.prefill(*own)
        assert_same_content(cache.select([i]), alone)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_the_packer(kind, device):
    options = {"keep": 20, "bits": 8} | KINDS[kind]
    k, v = tokens(device, 90)
    cache = make(device, **KINDS[kind])
    cache.prefill(k, v)
    group = int(options.get("hadamard_group", 0))
    k, v = heads_last(k), heads_last(v)  # states hold rows head by head
    stored = htree_ops.grouped_hadamard(k, group) if group else k
    state = cache.state_dict()
    for x, prefix, side in ((stored, "k", 0), (v, "v", 1)):
        keep, bits = (o[side] if isinstance(o, tuple) else o for o in (options["keep"], options["bits"]))
        expected = reference.kv_compress(x[:, :, :80], keep, bits)
        for name, e in zip(("bitmap", "values", "scales"), expected, strict=True):
            assert torch.equal(state[f"{prefix}_{name}"], e)
        assert torch.equal(state[f"{prefix}_win"], x[:, :, 80:])


@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_that_of_the_dense_content(kind, device):
    k, v = tokens(device, 120)
    cache = make(device, **KINDS[kind])
    cache.prefill(k[:, :100], v[:, :100], [100, 3, 60])
    q = normal((BATCH, 1, 8, WIDTH), torch.float16, device, seed=4)
    for t in range(100, 120):
        cache.append(k[:, t : t + 1], v[:, t : t + 1])
        out, lse = cache.attend(q)
        keys, values = cache.to_dense()
        assert keys.shape[1] == max(cache.host_lengths())
        present = (
            torch.arange(keys.shape[1], device=device)
            < torch.tensor(cache.host_lengths(), device=device)[:, None]
        )
        expected, expected_lse = reference.attention(q[:, 0], heads_last(keys), heads_last(values), present)
        # transformed keys come back with one more rounding of 64 channels
        slack = 2e-2 if cache.hadamard_group else 2e-3
        rtol, atol = decode_tolerance(q, float(values.abs().max()))
        assert_close_spec(out[:, 0], expected, rtol, atol + slack)
        assert_close_spec(lse[:, 0], expected_lse, 1e-4, slack)
        assert not keys[~present].any()


def test_the_newest_tokens_are_exact_and_the_chunk_is_compressed_after_its_step(device):
    k, v = tokens(device, 40)
    cache = make(device, capacity=64)
    cache.append(k[:, :20], v[:, :20])
    assert cache.compressed_lengths == [0] * BATCH
    cache.append(k[:, 20:21], v[:, 20:21])
    assert cache.compressed_lengths == [0] * BATCH, "the step that fills the window still sees it dense"
    assert torch.equal(cache.to_dense()[0], k[:, :21])
    cache.append(k[:, 21:22], v[:, 21:22])
    assert cache.compressed_lengths == [16] * BATCH
    assert torch.equal(cache.to_dense()[1][:, 16:], v[:, 16:22])
    assert not torch.equal(cache.to_dense()[1][:, :16], v[:, :16])


def test_sixteen_bits_of_all_channels_lose_nothing(device):
    k, v = tokens(device, 101)
    cache = make(device, keep=64, bits=16, page_size=8)
    cache.prefill(k, v)
    for actual, expected in zip(cache.to_dense(), (k, v), strict=True):
        assert torch.equal(actual, expected)
    q = normal((BATCH, 8, WIDTH), torch.float16, device, seed=5)
    keys, values = (heads_last(x).double() for x in (k, v))
    expected = F.scaled_dot_product_attention(q[:, :, None].double(), keys, values, enable_gqa=True)[:, :, 0]
    assert_close_spec(cache.attend(q)[0], expected, *decode_tolerance(q, float(v.abs().max())))


# ---- pages


def poison_free_pages(cache: CompressedKVCache) -> None:
    """Pages that no token stands in, whether a sequence has them or not."""
    table = cache.storage.pages
    lengths = cache.compressed_lengths
    used = {page for row, n in zip(table.rows, lengths, strict=True) for page in row[: table.pages_for(n)]}
    others = sorted(set(range(table.num_pages)) - used)
    pages = torch.tensor(others, dtype=torch.int64, device=cache.device)
    for part in cache.storage.parts:
        for x in part:
            x[pages] = math.nan if x.is_floating_point() else 0x5A


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("page_size", [4, 16])
def test_unused_pages_may_hold_anything(page_size, bits, device):
    k, v = tokens(device, 120)
    q = normal((BATCH, 8, WIDTH), torch.float16, device, seed=6)
    plain, clean, poisoned = (
        make(device, bits=bits),
        make(device, bits=bits, page_size=page_size),
        make(device, bits=bits, page_size=page_size),
    )
    poison_free_pages(poisoned)
    caches = (plain, clean, poisoned)
    for cache in caches:
        cache.prefill(k[:, :70], v[:, :70], [70, 0, 33])
    poison_free_pages(poisoned)
    for t in range(70, 120):
        for cache in caches:
            cache.append(k[:, t : t + 1], v[:, t : t + 1])
        for a, e in zip(poisoned.attend(q), clean.attend(q), strict=True):
            assert torch.equal(a, e)
        poison_free_pages(poisoned)
    out, lse = plain.attend(q)
    assert_close_spec(poisoned.attend(q)[0], out.double(), *decode_tolerance(q, float(v.abs().max())))
    assert_close_spec(poisoned.attend(q)[1], lse.double(), 1e-4, 2e-3)
    assert_same_content(plain, poisoned)


def test_beams_share_pages_and_give_them_back(device):
    k, v = tokens(device, 100)
    cache = make(device, page_size=8, num_pages=3 * 10)
    cache.prefill(k[:, :85], v[:, :85])  # 80 compressed tokens each: every page is taken
    assert not cache.storage.pages.free
    with pytest.raises(OutOfPagesError, match=r"append: 6 more pages of 8 tokens are needed than are free"):
        cache.append(k[:, 83:], v[:, 83:])
    assert cache.host_lengths() == [85] * BATCH
    cache.reorder_([1, 1, 1])
    assert len(cache.storage.pages.free) == 20
    cache.append(k[:, 83:], v[:, 83:])
    cache.settle()
    assert len(cache.storage.pages.free) == 14
    for i in range(BATCH):
        alone = make(device, batch=1)
        alone.prefill(*(torch.cat((x[1:2, :85], x[i : i + 1, 83:]), dim=1) for x in (k, v)))
        assert_same_content(cache.select([i]), alone)
    cache.reset()
    assert sorted(cache.storage.pages.free) == list(range(30))


@pytest.mark.parametrize(
    "options", [{"capacity": 20}, {"num_pages": 0}, {"capacity": 3, "batch": 0}], ids=str
)
def test_a_pool_without_pages_attends(options, device):
    paged, plain = (
        make(device, page_size=8, **options),
        make(device, **{n: x for n, x in options.items() if n != "num_pages"}),
    )
    k, v = tokens(device, 3, batch=paged.batch)
    q = normal((paged.batch, 8, WIDTH), torch.float16, device, seed=14)
    for cache in (paged, plain):
        cache.append(k, v)
    for a, e in zip(paged.attend(q), plain.attend(q), strict=True):
        torch.testing.assert_close(a, e, rtol=2e-3, atol=2e-3)  # a GPU may split them differently
    paged.reorder_(range(paged.batch))
    assert_same_content(paged, plain)
    if "num_pages" in options:
        with pytest.raises(OutOfPagesError, match="12 more pages of 8 tokens are needed"):
            paged.append(*tokens(device, 40))


# ---- beams and states


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", [[2, 0, 1], [0, 0, 2], [1, 1, 1]], ids=str)
def test_reorder_and_select(kind, index, device):
    k, v = tokens(device, 100)
    q = normal((BATCH, 8, WIDTH), torch.float16, device, seed=7)
    cache = make(device, split_size=256, **KINDS[kind])
    cache.prefill(k[:, :90], v[:, :90], [90, 37, 2])
    cache.key_weight = normal((BATCH, HEADS, WIDTH), torch.float32, device, seed=8).abs()
    chosen = cache.select(torch.tensor(index, device=device))
    out, lse = cache.attend(q)
    cache.reorder_(torch.tensor(index, device=device))
    assert cache.host_lengths() == chosen.host_lengths() == [[90, 37, 2][i] for i in index]
    assert_same_content(cache, chosen)
    for a in (cache, chosen):
        after, after_lse = a.attend(q[index])
        assert torch.equal(after, out[index])
        assert torch.equal(after_lse, lse[index])
    for a in (cache, chosen):
        a.append(k[:, 90:], v[:, 90:])
    assert_same_content(cache, chosen)
    assert cache.select([0, 2, 2, 0]).host_lengths() == [cache.host_lengths()[i] for i in (0, 2, 2, 0)]
    assert cache.select([]).host_lengths() == []


@pytest.mark.parametrize("kind", KINDS)
def test_states_travel_between_layouts(kind, device):
    k, v = tokens(device, 100)
    cache = make(device, **KINDS[kind])
    cache.prefill(k, v, [100, 1, 55])
    file = io.BytesIO()
    torch.save(cache.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    for page_size in (None, 8, 16):
        other = make(device, capacity=101, **(KINDS[kind] | {"page_size": page_size}))
        other.append(*tokens(device, 50, seed=9))  # this content is replaced
        other.load_state_dict(state)
        assert_same_content(other, cache)
    again = copy.deepcopy(cache)
    again.append(*tokens(device, 1, seed=10))
    assert cache.host_lengths() == [100, 1, 55]


# ---- weights, bytes, graphs


def test_weights_decide_what_is_kept_from_now_on(device):
    k, v = tokens(device, 60)
    cache = make(device)
    cache.append(k[:, :21], v[:, :21])
    cache.settle()
    cache.key_weight = torch.zeros(BATCH, HEADS, WIDTH, device=device)
    cache.key_weight[..., 40:60] = 1.0
    cache.append(k[:, 21:], v[:, 21:])
    kept = reference.unpack_bits(cache.state_dict()["k_bitmap"])
    expected = torch.zeros(64, dtype=torch.bool, device=device)
    expected[40:60] = True
    assert (kept[:, :, 16:] == expected).all()
    assert not (kept[:, :, :16] == expected).all()


def test_the_byte_report(device):
    cache = make(device, page_size=8)
    assert cache.num_bytes().per_token == 0
    assert cache.num_bytes().of_dense == 1
    cache.prefill(*tokens(device, 117), [117, 4, 50])
    report = cache.num_bytes()
    compressed = 112 + 0 + 32
    assert report.tokens == 171
    assert report.compressed == compressed * HEADS * 2 * (8 + 20 + 2)
    assert report.window == (171 - compressed) * HEADS * 2 * 64 * 2
    assert report.dense == 171 * HEADS * 2 * 64 * 2
    assert report.per_token == (report.compressed + report.window) / 171
    assert report.of_dense == (report.compressed + report.window) / report.dense
    tensors = [x for part in cache.storage.parts for x in part]
    tensors += [*cache._dense_rows.tensors(), cache.comp_len, cache.win_len, cache.storage.block_table]
    assert report.allocated == sum(x.untyped_storage().nbytes() for x in tensors if x is not None)


def test_the_parts_of_a_step_for_graphs(device):
    k, v = tokens(device, 90)
    q = normal((BATCH, 8, WIDTH), torch.float16, device, seed=11)
    eager, parts = make(device), make(device)
    for cache in (eager, parts):
        cache.prefill(k[:, :30], v[:, :30], [30, 7, 19])
    for t in range(30, 90):
        new = (k[:, t : t + 1], v[:, t : t + 1])
        eager.append(*new)
        parts.write_token(*new)
        for a, e in zip(parts.attend(q), eager.attend(q), strict=True):
            assert torch.equal(a, e)
        parts.advance()
        eager.settle()
        assert_same_content(parts, eager)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_step_replays(kind):
    k, v = tokens("cuda", 120)
    q = normal((120, BATCH, 8, WIDTH), torch.float16, "cuda", seed=12)
    eager, replayed = (make("cuda", split_size=256, **KINDS[kind]) for _ in range(2))
    for cache in (eager, replayed):
        cache.prefill(k[:, :30], v[:, :30], [30, 7, 19])
    k_new, v_new, q_new = k[:, :1].clone(), v[:, :1].clone(), q[0].clone()

    def step(cache):
        cache.write_token(k_new, v_new)
        return cache.attend(q_new)

    step(copy.deepcopy(replayed))
    graph, (out, lse) = capture(lambda: step(replayed))
    for t in range(30, 120):
        for buffer, x in ((k_new, k[:, t : t + 1]), (v_new, v[:, t : t + 1]), (q_new, q[t])):
            buffer.copy_(x)
        graph.replay()
        eager.append(k[:, t : t + 1], v[:, t : t + 1])
        expected, expected_lse = eager.attend(q[t])
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)
        replayed.advance()
    eager.settle()
    assert_same_content(eager, replayed)
