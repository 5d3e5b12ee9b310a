"""CompressedKVCache as a server uses it: several tokens a call, a length for each sequence, tokens taken back."""

import copy
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
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
from safetensors.torch import load, save
from torch import Tensor

from htree_ops import CompressedKVCache
from htree_ops.errors import OutOfPagesError, ShapeMismatchError, UnsupportedDtypeError
from htree_ops.reference import compressed_kv as reference
from tests.support.cases import normal
from tests.support.compare import assert_close_spec
from tests.support.compressed_kv_cases import decode_tolerance

#: Sequences see this many tokens at most, query heads per key head.
LONGEST, GROUP = 120, 2


def queries(device: str, length: int, seed: int, batch: int = BATCH) -> Tensor:
    return normal((batch, length, GROUP * HEADS, WIDTH), torch.float16, device, seed)


def assert_rows(a: tuple[Tensor, Tensor], e: tuple[Tensor, Tensor], device: str) -> None:
    """Outputs of the same tokens: bit for bit on the CPU, where one kernel computes both."""
    if device == "cpu":
        assert torch.equal(a[0], e[0])
        assert torch.equal(a[1], e[1])
        return
    assert_close_spec(a[0], e[0].double(), *decode_tolerance(a[0], 4.0))
    assert_close_spec(a[1], e[1].double(), 1e-4, 2e-3)


def free_tokens(cache: CompressedKVCache) -> list[int]:
    return [cache.capacity - n for n in cache.host_lengths()]


class Schedule:
    """Steps on a batch, which every sequence also takes alone."""

    def __init__(self, device: str, **options: Any) -> None:
        self.device = device
        self.batch = make(device, split_size=256, **options)
        self.alone = [make(device, batch=1, split_size=256, **options) for _ in range(BATCH)]

    def decode(self, counts: Sequence[int], seed: int) -> None:
        size = max(counts) + 1  # a row of padding at least
        q, (k, v) = queries(self.device, size, seed + 2), tokens(self.device, size, seed)
        for b, n in enumerate(counts):
            for x in (q, k, v):
                x[b, n:] = torch.nan  # what is padded must not matter
        out, lse = self.batch.decode(q, k, v, counts)
        for b, n in enumerate(counts):
            own = [x[b : b + 1, :n] for x in (q, k, v)]
            expected = self.alone[b].decode(*own)
            assert_rows((out[b : b + 1, :n], lse[b : b + 1, :n]), expected, self.device)
            assert not out[b, n:].any()
            assert (lse[b, n:] == -torch.inf).all()

    def append(self, counts: Sequence[int], seed: int) -> None:
        k, v = tokens(self.device, max(counts), seed)
        self.batch.append(k, v, counts)
        for b, n in enumerate(counts):
            self.alone[b].append(*(x[b : b + 1, :n] for x in (k, v)))

    def truncate(self, lengths: Sequence[int]) -> None:
        self.batch.truncate(lengths)
        for b, n in enumerate(lengths):
            self.alone[b].truncate([n])

    def check(self) -> None:
        assert self.batch.host_lengths() == [x.host_lengths()[0] for x in self.alone]
        assert self.batch.comp_len.tolist() == self.batch.compressed_lengths
        assert (self.batch.comp_len + self.batch.win_len).tolist() == self.batch.host_lengths()
        for b, one in enumerate(self.alone):
            assert_same_content(self.batch.select([b]), one)


@given(
    kind=st.sampled_from(sorted(KINDS)),
    window=st.integers(0, 6),
    chunk=st.sampled_from([1, 4, 16]),
    rollback=st.none() | st.integers(0, 16),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_property_a_ragged_batch_is_each_sequence_alone(device, kind, window, chunk, rollback, seed, data):
    options = KINDS[kind] | {"window": window, "chunk": chunk, "capacity": LONGEST}
    options["rollback"] = None if rollback is None else min(rollback, chunk)
    if "page_size" in options:
        options["page_size"] = min(chunk, options["page_size"])
    schedule = Schedule(device, **options)
    for step in range(data.draw(st.integers(1, 4))):
        what = data.draw(st.sampled_from(["decode", "decode", "append", "truncate"]))
        if what == "truncate":
            schedule.truncate([data.draw(st.integers(-1, n)) for n in schedule.batch.host_lengths()])
        else:
            counts = [data.draw(st.integers(0, min(n, 40))) for n in free_tokens(schedule.batch)]
            getattr(schedule, what)(counts, seed + 10 * step)
        schedule.check()


@pytest.mark.parametrize("kind", KINDS)
def test_several_tokens_are_as_one_at_a_time(kind, device):
    """Also where chunks are compressed between them, and at every place of the chunk."""
    q, (k, v) = queries(device, 100, 2), tokens(device, 100)
    single, several = (make(device, split_size=256, **KINDS[kind]) for _ in range(2))
    for cache in (single, several):
        cache.prefill(k[:, :30], v[:, :30], [30, 7, 19])
    at = 30
    for size in (1, 3, 7, 0, 15, 44):
        part = slice(at, at + size)
        out, lse = several.decode(q[:, part], k[:, part], v[:, part])
        for i in range(size):
            one = slice(at + i, at + i + 1)
            single.append(k[:, one], v[:, one])
            expected = single.attend(q[:, one])
            assert_rows((out[:, i : i + 1], lse[:, i : i + 1]), expected, device)
        assert_same_content(several, single)
        at += size


def test_several_queries_of_what_the_cache_holds(device):
    """attend() after append() sees what is compressed as it is now; each query sees the tokens up to its own."""
    cache = make(device)
    k, v = tokens(device, 60)
    cache.append(k, v, [60, 2, 40])
    assert cache.compressed_lengths == [48, 0, 32]
    q = queries(device, 5, 3)
    out, lse = cache.attend(q, 0.25, [5, 5, 3])
    keys, values = map(heads_last, cache.to_dense())
    places = torch.arange(60, device=device)
    for i in range(5):
        last = torch.tensor([55 + i, i - 3, 37 + i], device=device)  # the token of each query
        expected, expected_lse = reference.attention(q[:, i], keys, values, places <= last[:, None], 0.25)
        expected[2], expected_lse[2] = (expected[2], expected_lse[2]) if i < 3 else (0.0, -torch.inf)
        assert_close_spec(out[:, i], expected, *decode_tolerance(q, float(values.abs().max())))
        assert_close_spec(lse[:, i], expected_lse, 1e-4, 1e-2)  # to_dense() rounds keys to float16
    with pytest.raises(
        ValueError, match=r"attend: the queries must be those of dense tokens, got 13 queries for the 12"
    ):
        cache.attend(queries(device, 13, 3))
    with pytest.raises(ValueError, match=r"attend: lengths must be 3 numbers between 0 and 5"):
        cache.attend(q, lengths=[6, 1, 1])


# ---- tokens that are taken back


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rollback", [0, 3, 16])
def test_drafts_leave_no_trace(kind, rollback, device):
    """At every length: the last tokens go, others come, and the bytes are those of the others alone."""
    options = KINDS[kind] | {"rollback": rollback}
    k, v = tokens(device, 100)
    drafts = tokens(device, 16, seed=5)
    plain, drafted = make(device, **options), make(device, **options)
    for length in range(100):
        for cache in (plain, drafted):
            cache.append(k[:, length : length + 1], v[:, length : length + 1])
        count = (5 * length) % (rollback + 1)
        drafted.append(*(x[:, :count] for x in drafts))
        drafted.truncate(length + 1)
        assert drafted.host_lengths() == [length + 1] * BATCH
        kept = copy.deepcopy(drafted)
        kept.settle()
        settled = copy.deepcopy(plain)
        settled.settle()
        assert_same_content(kept, settled)
    q = queries(device, 1, 7)
    for cache in (plain, drafted):
        cache.settle()
    assert_rows(drafted.attend(q), plain.attend(q), device)


def test_a_prompt_can_be_cut_back(device):
    k, v = tokens(device, 90)
    for cut in range(6):
        cache, shorter = make(device), make(device)
        cache.prefill(k[:, :85], v[:, :85], [85, 53, 20])
        cache.truncate([85 - cut, 53 - cut, -1])
        shorter.prefill(k[:, :85], v[:, :85], [85 - cut, 53 - cut, 20])
        assert_same_content(cache, shorter)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_among_compressed_tokens_keeps_the_others(kind, device):
    """What is kept stays as it is; new tokens go to the window, and chunks end at multiples of C again."""
    k, v = tokens(device, 110)
    cache = make(device, rollback=0, **KINDS[kind])
    cache.append(k[:, :90], v[:, :90])
    cache.settle()
    before = cache.to_dense()
    lengths = [3, 50, 82]
    cache.truncate(lengths)
    assert cache.host_lengths() == lengths
    assert cache.compressed_lengths == [3, 50, 80]
    cache.truncate(-1)
    cache.append(k[:, 90:], v[:, 90:])
    cache.settle()
    assert cache.compressed_lengths == [compressed_length(n + 20) for n in lengths]
    for x, old in zip(cache.to_dense(), before, strict=True):
        for b, same in enumerate((3, 50, 80)):
            assert torch.equal(x[b, :same], old[b, :same])
    q = queries(device, 1, 9)
    out, lse = cache.attend(q)
    keys, values = map(heads_last, cache.to_dense())
    ends = torch.tensor(cache.host_lengths(), device=device)
    present = torch.arange(keys.shape[2], device=device) < ends[:, None]
    expected, expected_lse = reference.attention(q[:, 0], keys, values, present)
    slack = 2e-2 if cache.hadamard_group else 2e-3
    rtol, atol = decode_tolerance(q, float(values.abs().max()))
    assert_close_spec(out[:, 0], expected, rtol, atol + slack)
    assert_close_spec(lse[:, 0], expected_lse, 1e-4, slack)
    cache.truncate(0)
    assert cache.host_lengths() == [0] * BATCH
    again = make(device, **KINDS[kind])
    for one in (cache, again):
        one.append(k[:, :70], v[:, :70])
    assert_same_content(cache, again)

    whole = make(device, **KINDS[kind])  # the rows of its last chunk are still there
    whole.append(k[:, :90], v[:, :90])
    whole.settle()
    whole.truncate(lengths)
    assert whole.compressed_lengths == [3, 50, 64]
    for x, new in zip(whole.to_dense(), (k, v), strict=True):
        same = torch.equal(x[2, 64:82], new[2, 64:82])
        assert same or (whole.hadamard_group and x is not new), "dense again"


def test_a_shared_page_is_copied_when_it_is_opened(device):
    k, v = tokens(device, 60)
    cache = make(device, page_size=8, num_pages=12, rollback=0)
    cache.append(k[:, :38], v[:, :38])  # 32 compressed tokens, 4 pages each
    cache.reorder_([0, 0, 0])
    assert len(cache.storage.pages.free) == 8
    cache.truncate(20)
    assert len(cache.storage.pages.free) == 8 + 1 - 2
    kept = cache.to_dense()
    cache.append(k[:, 30:55], v[:, 30:55])
    cache.settle()
    assert cache.compressed_lengths == [32] * BATCH
    assert len(cache.storage.pages.free) == 12 - 2 - 3 * 2
    for x, old, new in zip(cache.to_dense(), kept, (k, v), strict=True):
        assert torch.equal(x[:, :20], old[:, :20])
        assert torch.equal(x[:, 32:], new[:, 42:55])
        assert not torch.equal(x[0, 20:32], x[1, 20:32])
    small = make(device, page_size=8, num_pages=6, rollback=0)
    small.append(k[:, :22], v[:, :22])
    small.reorder_([0, 0, 2])
    small.append(k[:, :17], v[:, :17], [0, 0, 17])
    assert not small.storage.pages.free
    before = small.state_dict()
    with pytest.raises(OutOfPagesError, match="truncate: 1 more pages of 8 tokens are needed"):
        small.truncate([12, -1, -1])
    assert all(torch.equal(x, before[name]) for name, x in small.state_dict().items())
    small.truncate([12, 8, -1])  # the last user of a page keeps it
    with pytest.raises(OutOfPagesError, match="append: 2 more pages of 8 tokens are needed"):
        small.append(k[:, :30], v[:, :30], [30, 0, 0])
    small.append(k[:, :10], v[:, :10], [10, 0, 0])
    assert small.compressed_lengths == [16, 8, 32]


def test_a_sequence_ends_and_another_begins_as_a_copy(device):
    k, v = tokens(device, 60)
    cache = make(device, page_size=8, num_pages=12)
    cache.append(k[:, :38], v[:, :38])  # 32 compressed tokens, 4 pages each
    expected = cache.select([1, 1, 2])
    cache.free(0)
    assert cache.host_lengths() == [0, 38, 38]
    assert len(cache.storage.pages.free) == 4
    cache.fork(source=1, target=0)
    assert len(cache.storage.pages.free) == 4, "shared"
    assert_same_content(cache, expected)
    for name, call in (
        ("fork: target", lambda: cache.fork(0, 3)),
        ("free: sequence", lambda: cache.free(-1)),
    ):
        with pytest.raises(ValueError, match=name):
            call()
    few = make(device, page_size=8, num_pages=2, rollback=0)
    few.append(k[:, :26], v[:, :26], [26, 0, 0])
    few.truncate([12, -1, -1])  # its second page is open
    with pytest.raises(
        OutOfPagesError, match=r"CompressedKVCache\.fork: 1 more pages of 8 tokens are needed"
    ):
        few.fork(0, 1)
    assert few.host_lengths() == [12, 0, 0]


def test_what_is_taken_back_may_not_be_more(device):
    cache = make(device)
    cache.append(*tokens(device, 30), [30, 3, 0])
    before = copy.deepcopy(cache)
    for lengths, kind in (
        ([31, -1, -1], ValueError), ([1, 1], ValueError), (-2, ValueError), (1, ValueError), ([1.5, 1, 0], TypeError),
        ([True, 1, 0], TypeError),
    ):  # fmt: skip
        with pytest.raises(kind, match="truncate: lengths must be"):
            cache.truncate(lengths)
    assert_same_content(cache, before)
    cache.truncate(torch.tensor([-1, 2, 0]))
    assert cache.host_lengths() == [30, 2, 0]
    with pytest.raises(ValueError, match=r"rollback must be between 0 and 16, got 17"):
        make(device, rollback=17)


def test_graphs_and_beams_keep_what_can_be_taken_back(device):
    k, v = tokens(device, 40)
    for index in ([0, 1, 2], [2, 2, 0]):
        cache = make(device)
        cache.prefill(k[:, :18], v[:, :18])
        expected = cache.select(index)
        for t in range(18, 24):
            cache.write_token(k[:, t : t + 1], v[:, t : t + 1])
            cache.advance()
        assert cache.compressed_lengths == [16] * BATCH
        chosen = cache.select(index)
        cache.reorder_(index)
        for one in (cache, chosen, copy.deepcopy(cache)):
            one.truncate(18)
            assert_same_content(one, expected)


# ---- errors of calls with several tokens


def test_a_refused_call_changes_nothing(device):
    cache = make(device, capacity=50)
    k, v = tokens(device, 60)
    q = queries(device, 60, 4)
    cache.append(k[:, :20], v[:, :20], [20, 0, 9])
    before = copy.deepcopy(cache)
    ones = [x[:, :1] for x in (q, k, v)]
    for call, kind, message in (
        (lambda: cache.append(k, v, [30, 51, 1]), ValueError, r"append: sequence 1 holds 0 tokens; 51 more exceed"),
        (lambda: cache.decode(q, k, v, [31, 1, 1]), ValueError, r"decode: sequence 0 holds 20 tokens; 31 more exceed"),
        (lambda: cache.append(k, v, [61, 0, 0]), ValueError, r"append: lengths must be 3 numbers between 0 and 60"),
        (lambda: cache.append(k, v, [1, 0]), ValueError, r"append: lengths must be 3 numbers"),
        (lambda: cache.decode(q[:, :2], *ones[1:]), ShapeMismatchError, r"decode: q must be \[B, S of k, H, D\]"),
        (lambda: cache.decode(q[:, 0], *ones[1:]), ShapeMismatchError, r"decode: q must be"),
        (lambda: cache.decode(q[:, :1, :3], *ones[1:]), ShapeMismatchError, r"a positive multiple of H_kv = 4"),
        (lambda: cache.decode(q.float(), k, v), UnsupportedDtypeError, r"decode: q must have dtype"),
        (lambda: cache.decode(*ones, scale=torch.inf), ValueError, r"decode: scale must be finite"),
    ):  # fmt: skip
        with pytest.raises(kind, match=message):
            call()
    assert_same_content(cache, before)
    few = make(device, page_size=8, num_pages=4)
    few.append(k[:, :20], v[:, :20])
    with pytest.raises(OutOfPagesError, match=r"decode: 2 more pages of 8 tokens are needed than are free"):
        few.decode(*(x[:, :2] for x in (q, k, v)))
    assert few.host_lengths() == [20] * BATCH
    few.decode(*(x[:, :2] for x in (q, k, v)), [2, 0, 2])


# ---- states, moves and words


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_fits_safetensors(kind, device):
    k, v = tokens(device, 90)
    cache = make(device, **KINDS[kind])
    cache.append(k, v, [90, 0, 41])
    cache.truncate([33, -1, -1])
    for weight in (None, normal((BATCH, HEADS, WIDTH), torch.float32, device, 3).abs().transpose(0, 0)):
        cache.key_weight = weight
        state = cache.state_dict()
        assert all(isinstance(x, Tensor) and x.is_contiguous() for x in state.values())
        starts = [x.data_ptr() for x in state.values() if x.numel()]
        assert len(set(starts)) == len(starts)
        other = make(device, **KINDS[kind])
        other.load_state_dict(load(save(state)))
        assert_same_content(other, cache)
        assert (other.key_weight is None) is (weight is None)
        for one in (cache, other):
            one.append(k[:, :30], v[:, :30], [30, 5, 30])
        assert_same_content(other, cache)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_moves(kind, device):
    cache = make(device, **KINDS[kind])
    cache.append(*tokens(device, 60), [60, 0, 30])
    cache.key_weight = torch.ones(BATCH, HEADS, WIDTH, device=device)
    before = copy.deepcopy(cache)
    assert cache.to(torch.float16) is cache is cache.to(device) is cache.to(device=device, dtype=torch.half)
    other = cache.to(device, torch.bfloat16)
    assert other.dtype == other.k_win.dtype == torch.bfloat16
    assert other.host_lengths() == cache.host_lengths()
    for x, e in zip(other.to_dense(), cache.to_dense(), strict=True):
        torch.testing.assert_close(x, e.bfloat16(), rtol=2**-7, atol=0.05 if cache.hadamard_group else 1e-6)
    assert_same_content(other.to(torch.bfloat16), other)
    other.append(*(x.bfloat16() for x in tokens(device, 20)))
    other.settle()
    assert_same_content(cache, before)
    back = cache.to(torch.bfloat16).to(dtype=torch.float16)
    assert back.compressed_lengths == cache.compressed_lengths
    assert back.key_weight is not cache.key_weight
    if 16 in (cache.formats[0].bits, cache.formats[1].bits):
        with pytest.raises(UnsupportedDtypeError, match="dtype must be"):
            cache.to(torch.float32)
    else:
        wide = cache.to(torch.float32).to(torch.float16)
        assert_same_content(wide, cache)
        wide.truncate(-1)
    with pytest.raises(TypeError, match="to: takes a device and a dtype, got int"):
        cache.to(1)
    with pytest.raises(UnsupportedDtypeError, match="dtype must be"):
        cache.to(torch.float64)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_moves_to_a_gpu_and_back(kind):
    cache = make("cpu", **KINDS[kind])
    cache.append(*tokens("cpu", 60), [60, 0, 30])
    there = cache.to("cuda")
    assert there.k_win.is_cuda
    for part in there.storage.parts:
        assert part.bitmap.is_cuda
    there.append(*tokens("cuda", 1))
    there.truncate([60, 0, 30])
    assert_same_content(there.to("cpu"), cache)


@pytest.mark.parametrize(("width", "value_width"), [(192, 128), (64, 320)])
def test_values_of_another_size(width, value_width, device):
    options: dict[str, Any] = {"keep": (width // 3, value_width), "bits": (8, 4), "window": 5, "chunk": 16}
    options["dtype"] = torch.float16
    cache = CompressedKVCache(2, 2, width, 70, value_dim=value_width, device=device, page_size=8, **options)
    q, k = (normal((2, 60, heads, width), torch.float16, device, heads) for heads in (4, 2))
    v = normal((2, 60, 2, value_width), torch.float16, device, 3)
    cache.prefill(k[:, :50], v[:, :50], [50, 20])
    out, lse = cache.decode(q[:, 50:], k[:, 50:], v[:, 50:], [10, 0])
    assert out.shape == (2, 10, 4, value_width)
    keys, values = map(heads_last, cache.to_dense())
    assert keys.shape == (2, 2, 60, width)
    present = torch.ones(2, 60, dtype=torch.bool, device=device)
    expected, expected_lse = reference.attention(q[:, 59], keys, values, present)
    assert_close_spec(out[0, 9], expected[0], *decode_tolerance(q, float(values.abs().max())))
    assert_close_spec(lse[0, 9], expected_lse[0], 1e-4, 1e-2)
    assert not cache.decode(q[:, :0], k[:, :0], v[:, :0])[0].numel()
    other = CompressedKVCache(2, 2, width, 70, value_dim=value_width, device=device, **options)
    other.load_state_dict(load(save(cache.state_dict())))
    assert_same_content(other.to(torch.bfloat16).select([1, 0]), cache.to(torch.bfloat16).select([1, 0]))
    assert f"value_dim={value_width}" in repr(other)
    one = CompressedKVCache(2, 2, width, 70, device=device, **{**options, "keep": 20})
    with pytest.raises(ValueError, match=f"value_dim of the state must be that of the cache, {width}, got"):
        one.load_state_dict(cache.state_dict())
    with pytest.raises(ShapeMismatchError, match=rf"append: v must be \[2, S, 2, {width}\]"):
        one.append(k, v)
    with pytest.raises(
        ShapeMismatchError, match="value_dim must be a multiple of 64 between 64 and 512, got 100"
    ):
        CompressedKVCache(2, 2, width, 70, value_dim=100, device=device, **options)


def test_its_words(device):
    cache = make(device, page_size=8, keep=(20, 30))
    cache.append(*tokens(device, 30), [30, 0, 7])
    words = repr(cache)
    for part in (
        "CompressedKVCache(batch=3, num_kv_heads=4, head_dim=64, value_dim=64, keep=(20, 30), bits=(8, 8), window=5",
        "chunk=16", "capacity=130", "page_size=8", "rollback=5", "dtype=torch.float16", f"device='{cache.device}'",
        "lengths=[30, 0, 7]",
    ):  # fmt: skip
        assert part in words
