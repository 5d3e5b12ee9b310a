"""What ``TreeKVCache`` refuses or reports (docs/semantics/tree_cache.md §7.4); what it does: test_tree_kv_cache.py."""

import re
from typing import Any

import pytest
import torch
from test_tree_kv_cache import OPTIONS, fill, make, rows

from htree_ops import TreeKVCache
from htree_ops.errors import DeviceError, OutOfPagesError, ShapeMismatchError, UnsupportedDtypeError


def test_an_append_that_does_not_fit_changes_nothing():
    cache = make(num_pages=4)
    fill(cache, 15)
    with pytest.raises(OutOfPagesError, match=r"TreeKVCache.append: 2 more pages of 8 tokens are needed"):
        fill(cache, 2)
    with pytest.raises(ValueError, match=r"sequence 0 holds 15 tokens; 26 more exceed the capacity of 40"):
        fill(cache, 26)
    with pytest.raises(OutOfPagesError, match=r"TreeKVCache.reserve: 2 more pages of 8 tokens are needed"):
        cache.reserve(2)
    assert cache.lengths.tolist() == [15, 15]
    fill(cache, 1)
    cache.free(0)
    cache.append(rows(2, 3, 2, 0), rows(2, 3, 2, 1), lengths=[0, 3])
    assert cache.lengths.tolist() == [0, 19]


@pytest.mark.parametrize("end", ["free", "reset", "truncate"])
def test_reserved_pages_of_empty_sequences_go_back(end, device):
    cache = make(device, num_pages=5)
    cache.reserve(9)
    if end == "free":
        cache.free(0)
        assert [len(row) for row in cache.pages.rows] == [0, 2], "what others have reserved stays"
        cache.free(1)
    elif end == "reset":
        cache.reset()
    else:
        cache.truncate(0)
    k = rows(2, 40, 2, 0, device)
    cache.append(k, k, lengths=[40, 0])
    assert cache.lengths.tolist() == [40, 0]
    cache.check()


def test_strides_limit_truncation():
    cache = make(selection_stride=4)
    for step in range(7):
        fill(cache, 4, seed=3 * step)
    cache.truncate([18, 13])
    assert cache.lengths.tolist() == [18, 13]
    with pytest.raises(ValueError, match="can be truncated to a multiple of selection_stride = 4"):
        cache.truncate([-1, 11])
    cache.truncate([-1, 12])
    with pytest.raises(ValueError, match="at most what it holds"):
        cache.truncate([19, -1])


@pytest.mark.parametrize("length", [-5, 999])
def test_lengths_that_somebody_has_broken_are_mended(length, device):
    cache, other = make(device, num_pages=8), make(device, num_pages=8)
    for x in (cache, other):
        fill(x, 9)
    cache.lengths[0] = length
    mended = min(max(length, 0), 16)  # it has two pages
    with pytest.raises(
        ValueError, match=rf"check: lengths .* got \[{length}, 9\]: they are \[{mended}, 9\] now"
    ):
        cache.check()
    assert cache.lengths.tolist() == cache.host_lengths() == [mended, 9]
    cache.check()
    for x in (cache, other):
        x.free(0)
    assert torch.equal(fill(cache, 3), fill(other, 3))


def test_a_leader_that_was_never_attended_is_reported():
    cache = make(selection_stride=4)
    cache.append(rows(2, 6, 2, 0), rows(2, 6, 2, 1))
    out = cache.attend(rows(2, 1, 4, 2))
    assert bool(out.isnan().all())
    with pytest.raises(ValueError, match=r"sequence 0 has a query whose leader .*; sequence 1 has"):
        cache.check()
    cache.check()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"head_dim": 7}, ValueError, "head_dim must be even"),
        ({"capacity": 0}, ValueError, "capacity must be between"),
        ({"page_size": 6}, ValueError, "page_size must be a multiple"),
        ({"importance": "lse"}, ValueError, "nodes that are not finished"),
        ({"top_k": 0}, ValueError, "top_k"),
        ({"max_top_nodes": 0}, ValueError, "max_top_nodes"),
        ({"selection_stride": 3}, ValueError, "selection_stride"),
        ({"selection_span": 3}, ValueError, "selection_span must be None or a divisor"),
        ({"dtype": torch.int8}, TypeError, "dtype must be"),
        ({"batch": 1.5}, TypeError, "batch must be an int"),
        ({"device": 2.5}, TypeError, r"device must be a torch\.device, a str or an int, got float"),
        ({"device": "ab"}, DeviceError, "device must be a device of torch, .* got 'ab'"),
    ],
    ids=str,
)
def test_options_are_checked(change, error, message):
    sizes: dict[str, Any] = {"batch": 2, "num_kv_heads": 2, "head_dim": 8, "capacity": 40}
    with pytest.raises(error, match=f"TreeKVCache: .*{message}"):
        TreeKVCache(**{**sizes, **OPTIONS, **change})


def test_calls_are_checked():
    cache = make()
    k = rows(2, 3, 2, 0)
    for bad, error, message in (
        (k[:1], ShapeMismatchError, r"size 0 of k must be 2 \(B of block_table\), got 1 in"),
        (k[..., :6], ShapeMismatchError, r"size 3 of k must be 8 \(K of the cache\), got 6 in"),
        (k[0], ShapeMismatchError, r"k must be 4-D \[B, n, heads, channels\], got 3-D"),
        (
            k.double(),
            UnsupportedDtypeError,
            r"k must have the dtype of the cache \(torch.float32\), got torch.float64",
        ),
        (k.to("meta"), DeviceError, r"k must be on the device of the cache \(cpu\), got meta"),
        (k.to_sparse(), TypeError, "k must be a dense tensor"),
        (
            torch.nested.nested_tensor(list(k)),
            TypeError,
            "append: k must be a dense tensor, got a nested one",
        ),
        (3, TypeError, "k must be a Tensor, got int"),
    ):
        with pytest.raises(error, match=message):
            cache.append(bad, k)
    with pytest.raises(ValueError, match="lengths must be 2 numbers between 0 and 3, got"):
        cache.append(k, k, lengths=[4, 0])
    one = torch.ones(2, dtype=torch.int32)
    for lengths, error, message in (
        ([1], ValueError, r"lengths must be 2 numbers between 0 and [13], got \[1\]"),
        (one[None], ValueError, r"lengths must be 1-D, got 2-D \(1, 2\)"),
        (one.float(), TypeError, r"lengths must have dtype torch\.int32 or torch\.int64, got torch\.float32"),
        (one.to(torch.uint8), TypeError, r"lengths must have dtype .* got torch\.uint8"),
        ({0, 1}, TypeError, "lengths must be a list of ints or a Tensor, got set"),
    ):
        with pytest.raises(error, match=message):
            cache.append(k, k, lengths=lengths)
        with pytest.raises(error, match=message.replace("lengths", "beams")):
            cache.reorder_(lengths)
    q = rows(2, 3, 4, 0)
    for call in (cache.attend, lambda q, **lse: cache.decode(q, k, k, **lse)):
        with pytest.raises(TypeError, match=r"TreeKVCache\.\w+: q must be a dense tensor, got a nested one"):
            call(torch.nested.nested_tensor(list(q)))
        for value in ("x", 2, None):
            with pytest.raises(TypeError, match=r"TreeKVCache\.\w+: return_lse must be a bool, got"):
                call(q, return_lse=value)
    with pytest.raises(ShapeMismatchError, match=r"TreeKVCache.decode: size 1 of k must be 1"):
        cache.decode(rows(2, 1, 4, 0), k, k)
    with pytest.raises(ValueError, match=r"beams must be 2 numbers between 0 and 1, got \[0, 2\]"):
        cache.reorder_([0, 2])
    with pytest.raises(ValueError, match="tokens must be 2 numbers between -40 and"):
        cache.advance([1])
    fill(cache, 9)
    for tokens in ([32, 0], [0, -10]):
        message = rf"must leave each sequence between 0 and capacity = 40, got {re.escape(str(tokens))} beside \[9, 9\]"
        with pytest.raises(ValueError, match=message):
            cache.advance(tokens)
    with pytest.raises(TypeError, match=r"TreeKVCache\.advance: tokens must be a list of ints, got \["):
        cache.advance(1.0)
    assert cache.host_lengths() == [9, 9]
    cache.check()
    with pytest.raises(ValueError, match="target must be between 0 and 1"):
        cache.fork(0, 2)
    with pytest.raises(ValueError, match="layer must be between"):
        cache.layer(0, 9)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_numbers_that_int32_cannot_hold_do_not_wrap(dtype):
    cache = make()
    fill(cache, 9)
    beyond = torch.tensor([5, 1]).to(dtype) + (2**32 if dtype == torch.int64 else 99)
    for call in (
        cache.truncate,
        cache.reorder_,
        lambda lengths: cache.append(rows(2, 6, 2, 0), rows(2, 6, 2, 1), lengths),
        lambda lengths: cache.attend(rows(2, 6, 4, 0), lengths),
    ):
        with pytest.raises(ValueError, match="TreeKVCache"):
            call(beyond)
    for wrong in (1.0, None, torch.tensor([3, 3]).to_sparse()):
        with pytest.raises(
            TypeError, match=r"TreeKVCache\.truncate: lengths must be (an int, a list|a dense tensor)"
        ):
            cache.truncate(wrong)
    for numbers in ([-2, 3], torch.tensor([-2, 3])):
        with pytest.raises(ValueError, match=r"TreeKVCache\.truncate: lengths must be .* -1.*, got .*-2"):
            cache.truncate(numbers)
    with pytest.raises(DeviceError, match=r"TreeKVCache\.truncate: lengths must be .* got meta"):
        cache.truncate(torch.zeros(2, dtype=torch.int32, device="meta"))
    assert cache.lengths.tolist() == [9, 9]


def test_heads_are_checked_before_the_lists(device):
    """A call that is refused reports no missing leader."""
    cache = make(device, selection_stride=4)
    cache.append(rows(2, 6, 2, 0, device), rows(2, 6, 2, 1, device))
    with pytest.raises(
        ShapeMismatchError, match=r"attend: H of q must be a positive multiple of H_kv = 2, got \[2, 1, 3"
    ):
        cache.attend(rows(2, 1, 3, 2, device))
    cache.check()


@pytest.mark.parametrize("compiled", [True, False])
def test_lengths_that_only_a_device_knows_are_reported(device, compiled):
    """In a compiled call, and on a GPU in every call. Lengths of a list are refused at once there too."""
    wrap = (lambda f: torch.compile(f, fullgraph=True, backend="aot_eager")) if compiled else (lambda f: f)
    cache = make(device)
    append, attend = wrap(cache.append), wrap(cache.attend)
    k = rows(2, 3, 2, 0, device)
    given = torch.tensor([2, 9], dtype=torch.int32, device=device)
    calls = (lambda lengths: append(k, k, lengths), lambda lengths: attend(rows(2, 3, 4, 1, device), lengths))
    for call in calls:
        if compiled or device == "cuda":
            call(given)
            assert cache.lengths.tolist() == [2, 0]
            with pytest.raises(ValueError, match="sequence 1 was given a negative length or one beyond"):
                cache.check()
        with pytest.raises(Exception, match="lengths must be 2 numbers between 0 and 3, got"):
            call([2, 9])


def test_tokens_that_are_not_written_do_not_count():
    """Whatever the op that writes refuses: rows of the cache's own pages, a table that somebody has broken."""
    cache, other = make(batch=1), make(batch=1)
    for x in (cache, other):
        fill(x, 7)
    own = cache.k_pool[:1, :, :2].transpose(1, 2)
    with pytest.raises(RuntimeError, match="the cache must not share memory with k"):
        cache.append(own, own.clone())
    table = cache.block_table.clone()
    cache.block_table[0, 0] = 99
    new = (rows(1, 1, 2, 3), rows(1, 1, 2, 4))
    with pytest.raises(
        IndexError, match=r"TreeKVCache.append: block_table must name pages of the pool, between 0"
    ):
        cache.append(*new)
    assert cache.lengths.tolist() == cache.host_lengths() == [7]
    cache.block_table.copy_(table)
    assert torch.equal(fill(cache, 5, seed=3), fill(other, 5, seed=3))


@pytest.mark.parametrize("stride", [1, 4])
def test_a_cache_made_in_inference_mode_serves_outside(stride, device):
    with torch.inference_mode():
        cache = make(device, selection_stride=stride)
        fill(cache, 9)
    other = make(device, selection_stride=stride)
    fill(other, 9)
    for x in (cache, other):
        x.reorder_([1, 1])
    assert torch.equal(fill(cache, 3), fill(other, 3))
    cache.load_state_dict(other.state_dict())


def test_a_bound_of_many_bytes():
    assert make(prompt_bytes=1 << 40).prompts.most_bytes == 1 << 40


def test_states_are_checked():
    cache = make()
    fill(cache, 9)
    state = cache.state_dict()
    with pytest.raises(ValueError, match=r"options must be .* scale=-1\.0, .* got .* scale=None, "):
        make(scale=-1.0).load_state_dict(state)
    with pytest.raises(TypeError, match="state must be a dict, got NoneType"):
        cache.load_state_dict(None)
    table = state["block_table"].clone()
    table[0, 0] = table[1, 0]
    twice = table.clone()
    twice[0, 1] = twice[0, 0]
    for change, error, message in (
        ({"options": state["options"] + 1}, ValueError, "options must be"),
        ({"keys": state["keys"].double()}, TypeError, "keys must be a Tensor"),
        ({"lengths": state["lengths"] + 20}, ValueError, "lengths and block_table do not fit"),
        ({"block_table": twice}, ValueError, "each once"),
        ({"block_table": table}, ValueError, "every page must be in block_table"),
        ({"pages": state["pages"] + 90}, ValueError, "block_table must name pages of the state"),
        ({"pages": state["pages"] - 90}, ValueError, "pages must be distinct and at least 0"),
    ):
        with pytest.raises(error, match=message):
            cache.load_state_dict(state | change)
    kept = cache.layer(0, 0)[0]
    for name in state:
        with pytest.raises(DeviceError, match=f"{name} must be .* got meta"):
            cache.load_state_dict(state | {name: state[name].to("meta")})
        with pytest.raises(TypeError, match=f"{name} must be a dense tensor"):
            cache.load_state_dict(state | {name: state[name].to_sparse()})
    assert torch.equal(cache.layer(0, 0)[0], kept)
    with pytest.raises(ValueError, match="the state must hold"):
        cache.load_state_dict({})
    cache.load_state_dict(state)


@pytest.mark.parametrize(
    "leaders",
    [
        [16, 4, 8, 13],  # no leader
        [16, 4, 8, -4],
        [0, 4, 8, 28],  # behind the sequence, whose length is 18
        [20, 4, 8, 12],
        [16, 8, 4, 12],  # in places of others
        [16, 16, 8, 12],
        [-2, 4, 8, 12],
    ],
    ids=str,
)
def test_lists_of_other_leaders_are_refused(leaders):
    cache = make(selection_stride=4)
    fill(cache, 18)
    state = cache.state_dict()
    assert state["list_pos"].tolist() == [[16, 4, 8, 12]] * 2
    fill(cache, 5, seed=3)
    before = cache.state_dict()
    wrong = torch.tensor([[16, 4, 8, 12], leaders], dtype=torch.int32)
    message = r"load_state_dict: list_pos must have -1 or a multiple t of selection_stride = 4 below the length 18 in "
    with pytest.raises(ValueError, match=message + rf"entry t / 4 mod 4, got {re.escape(str(leaders))}"):
        cache.load_state_dict(state | {"list_pos": wrong})
    for name, x in cache.state_dict().items():
        assert torch.equal(x.nan_to_num(), before[name].nan_to_num()), name
    cache.load_state_dict(
        state | {"list_pos": torch.tensor([[16, 4, 8, 12], [0, -1, 8, -1]], dtype=torch.int32)}
    )
