"""States of ``TreeKVCache`` in caches of other capacities and pools (docs/semantics/tree_cache.md §7.4)."""

from typing import Any

import pytest
import torch
from torch import Tensor

from htree_ops import TreeKVCache
from htree_ops.errors import OutOfPagesError
from htree_ops.ops.tree_cache.state import PAGED
from tests.support.cases import normal
from tests.support.devices import poisoned_memory

#: A cache of 16 tokens has one layer, of 64 two, of 256 three and of 640 four.
OPTIONS: dict[str, Any] = {"compression_rate": 4, "top_k": 4, "max_top_nodes": 16, "page_size": 8}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "strided": {"selection_stride": 4},
    "spans": {"selection_stride": 2, "selection_span": 2, "value_dim": 32},
    "half": {"dtype": torch.bfloat16, "open_next": True},
    "packed": {"leaf_bits": 8, "dtype": torch.float16},
}
CAPACITIES = [(16, 24), (16, 640), (40, 48), (64, 65), (64, 640), (200, 300), (640, 64), (640, 16), (300, 40)]


def make(device: str, capacity: int, batch: int = 3, **options: Any) -> TreeKVCache:
    settings = {**OPTIONS, "dtype": torch.float32, "device": device} | options
    return TreeKVCache(batch, 2, 64, capacity, **settings)


def tokens(cache: TreeKVCache, n: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of n tokens of every sequence."""
    widths = ((4, cache.head_dim), (2, cache.head_dim), (2, cache.value_dim))
    q, k, v = (
        normal((cache.batch, n, *width), cache.dtype, str(cache.device), 3 * seed + i)
        for i, width in enumerate(widths)
    )
    return q, k, v


def step(cache: TreeKVCache, n: int, seed: int, lengths: list[int] | None = None) -> Tensor:
    q, k, v = tokens(cache, n, seed)
    cache.append(k, v, lengths)
    return cache.attend(q, lengths)


def fill(cache: TreeKVCache, longest: int) -> None:
    """Sequences of ``longest`` tokens, of one less and of a third, two of which share their first pages."""
    half = longest // 2
    step(cache, half, 1, [half, 0, 0])
    cache.fork(0, 1)
    rest = longest - half
    step(cache, rest, 2, [rest, rest - 1, longest // 3])


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def renumbered(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state whose pages have the numbers in which the table names them first, and stand in that order."""
    names = list(dict.fromkeys(page for page in state["block_table"].flatten().tolist() if page >= 0))
    place = {page: i for i, page in enumerate(state["pages"].tolist())}
    order = torch.tensor([place[page] for page in names], dtype=torch.int64)
    number = {page: i for i, page in enumerate(names)} | {-1: -1}
    table = [[number[page] for page in row] for row in state["block_table"].tolist()]
    paged = {name: x[order.to(x.device)] for name, x in state.items() if name in PAGED and name != "pages"}
    return state | paged | {"block_table": torch.tensor(table), "pages": torch.arange(len(names))}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("capacity", "other"), CAPACITIES)
def test_a_state_goes_into_another_capacity(capacity, other, kind, device):
    """The bytes are those of a cache that got the tokens itself, and so are all later results."""
    options = KINDS[kind]
    longest = min(capacity, other) - 1
    if kind == "packed":
        longest = min(longest, 8)  # all tokens are still there as they came
    with poisoned_memory():
        cache, loaded, filled = (make(device, n, **options) for n in (capacity, other, other))
        fill(cache, longest)
        fill(filled, longest)
        loaded.load_state_dict(cache.state_dict())
        ours, theirs = (renumbered(x.state_dict()) for x in (loaded, filled))
    assert ours.keys() == theirs.keys()
    written = set(ours) - {"lists"}  # of no leader is no list
    for name in written:
        assert same(ours[name], theirs[name]), name
    leaders = theirs["list_pos"] >= 0
    assert torch.equal(ours["lists"][leaders], theirs["lists"][leaders])
    assert loaded.num_bytes().used == filled.num_bytes().used
    assert [loaded.pages.shared(b) for b in range(3)] == [filled.pages.shared(b) for b in range(3)]
    for seed, lengths in enumerate(([1, 1, 0], [0, 0, 3], [0, 1, 6], [0, 0, 1])):
        n = max(lengths)
        if n <= loaded.capacity - longest // 3 - 4:
            assert same(step(loaded, n, 20 + seed, lengths), step(filled, n, 20 + seed, lengths))
    loaded.check()


@pytest.mark.parametrize("kind", ["plain", "strided", "spans", "half"])
def test_a_grown_cache_serves_to_its_own_end(kind, device):
    """A sequence that fills a small cache goes on in a larger one, whose tree becomes deeper."""
    options = {**KINDS[kind], "batch": 1}
    alone, cache = make(device, 320, **options), make(device, 16, **options)
    for capacity, chunk in ((16, 11), (16, 5), (64, 1), (64, 30), (64, 17), (320, 1), (320, 200), (320, 55)):
        if cache.capacity != capacity:
            larger = make(device, capacity, **options)
            step(larger, 13, 99)  # what it has held before does not matter
            larger.load_state_dict(cache.state_dict())
            cache = larger
        assert same(step(cache, chunk, chunk), step(alone, chunk, chunk))
    assert cache.lengths.tolist() == [320]
    cache.truncate(64)
    alone.truncate(64)
    assert same(step(cache, 9, 77), step(alone, 9, 77))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_hold_nothing_are_zeros(kind, device):
    """A state follows from the tokens alone, whatever the memory and former sequences have left."""
    with poisoned_memory():
        new, used = (make(device, 300, **KINDS[kind], page_size=12) for _ in range(2))
        step(used, 70, 9)
        used.reset()
        for cache in (new, used):
            fill(cache, 90)
            cache.truncate([84, -1, -1])
        ours, theirs = (renumbered(cache.state_dict()) for cache in (new, used))
    for name, x in ours.items():
        assert torch.equal(x, theirs[name]), name
    assert not torch.equal(ours["keys"], torch.zeros_like(ours["keys"]))


def test_a_truncated_state_grows(device):
    """Leaders that were taken back have no lists, in the larger cache neither."""
    cache, alone = (make(device, n, selection_stride=4) for n in (64, 640))
    for x in (cache, alone):
        fill(x, 50)
        x.truncate([45, -1, 12])
    larger = make(device, 640, selection_stride=4)
    larger.load_state_dict(cache.state_dict())
    assert same(step(larger, 70, 5), step(alone, 70, 5))
    larger.check()


@pytest.mark.parametrize(
    ("capacity", "message"),
    [
        (40, "capacity must be at least 50, what a sequence of the state has taken, got 40"),
        (49, "capacity must be at least 50, .* got 49"),
    ],
)
def test_a_capacity_that_is_too_small_is_named(capacity, message, device):
    cache, small = make(device, 640), make(device, capacity)
    fill(cache, 50)
    step(small, 3, 1)
    kept = small.state_dict()
    with pytest.raises(ValueError, match=rf"TreeKVCache\.load_state_dict: {message}"):
        small.load_state_dict(cache.state_dict())
    assert all(same(x, kept[name]) for name, x in small.state_dict().items())
    cache.truncate([30, 30, -1])
    small.load_state_dict(cache.state_dict())
    assert small.lengths.tolist() == [30, 30, 16]
    table = cache.state_dict()["block_table"]
    table[0, 4:7] = torch.tensor([70, 71, 72], device=device)  # pages that were reserved for 50 tokens
    state = cache.state_dict() | {"block_table": table}
    pages = [70, 71, 72]
    for name in ("pages", "keys", "values"):
        new = torch.tensor(pages).int() if name == "pages" else state[name][:3]
        state[name] = torch.cat((state[name], new.to(device)))
    with pytest.raises(
        ValueError, match="capacity must be at least 49, what a sequence of the state has taken"
    ):
        make(device, 48).load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"batch": 2}, ValueError, "batch must be 3, that of the state, got 2: make the cache with batch=3"),
        ({"batch": 4}, ValueError, "batch must be 3, that of the state, got 4: make the cache with batch=3"),
        (
            {"dtype": torch.bfloat16},
            TypeError,
            "dtype must be torch.float32, that of the state, got torch.bfloat16: make the cache with dtype=torch.fl",
        ),
        ({"value_dim": 32}, ValueError, "value_dim must be 64, that of the state, got 32"),
        (
            {"leaf_bits": 8},
            ValueError,
            "leaf_bits must be None, that of the state, got 8: make the cache with leaf_bits=None",
        ),
    ],
    ids=str,
)
def test_the_state_of_a_cache_of_other_sizes_is_named_by_its_argument(change, error, message, device):
    cache, other = make(device, 40), make(device, 40, **change)
    fill(cache, 9)
    with pytest.raises(error, match=rf"TreeKVCache\.load_state_dict: {message}"):
        other.load_state_dict(cache.state_dict())
    assert other.host_lengths() == [0] * other.batch
    wanted = {"leaf_bits": "must be 8, that of the state, got None"} if "leaf_bits" in change else {}
    for argument, words in wanted.items():
        with pytest.raises(error, match=f"{argument} {words}"):
            cache.load_state_dict(other.state_dict())
    narrow = TreeKVCache(3, 4, 32, 40, **{**OPTIONS, "dtype": torch.float32, "device": device})
    with pytest.raises(ValueError, match="num_kv_heads must be 2, that of the state, got 4"):
        narrow.load_state_dict(cache.state_dict())
    narrow = TreeKVCache(3, 2, 32, 40, **{**OPTIONS, "dtype": torch.float32, "device": device})
    with pytest.raises(ValueError, match="head_dim must be 64, that of the state, got 32"):
        narrow.load_state_dict(cache.state_dict())


def test_pages_that_the_pool_lacks_get_others(device):
    cache = make(device, 64)
    step(cache, 30, 1)
    for sequence in (0, 1):
        cache.free(sequence)
    state = cache.state_dict()
    assert state["pages"].max() > 4
    small = make(device, 64, num_pages=4)
    small.load_state_dict(state)
    assert small.block_table[2].tolist()[:5] == [0, 1, 2, 3, -1]
    other = make(device, 64)
    other.load_state_dict(state)  # which has them all
    assert torch.equal(other.block_table[2, :4], cache.block_table[2, :4])
    lengths = [0, 0, 2]
    wanted = step(cache, 2, 5, lengths)
    assert same(step(small, 2, 5, lengths), wanted)
    assert same(step(other, 2, 5, lengths), wanted)
    with pytest.raises(OutOfPagesError, match="num_pages must be at least 4, the pages of the state, got 3"):
        make(device, 64, num_pages=3).load_state_dict(state)


def test_packed_tokens_alone_give_no_nodes(device):
    """A cache of so few tokens that its tree has one layer keeps no node, and packed tokens are not what came."""
    options = KINDS["packed"]
    cache, large = make(device, 16, **options), make(device, 640, **options)
    step(cache, 9, 1)
    with pytest.raises(
        ValueError, match=r"with leaf_bits .* above max_top_nodes.* got tokens from \[1, 1, 1\] on"
    ):
        large.load_state_dict(cache.state_dict())
    assert large.lengths.tolist() == [0, 0, 0]
    make(device, 16, **options).load_state_dict(cache.state_dict())
    cache, filled = make(device, 64, **options), make(device, 640, **options)
    for x in (cache, filled):
        step(x, 40, 1)
    large.load_state_dict(cache.state_dict())
    assert same(step(large, 30, 3), step(filled, 30, 3))


def test_another_depth_of_the_tree_is_named_by_its_option(device):
    options: dict[str, Any] = {"compression_rate": 4, "top_k": 2, "page_size": 8, "dtype": torch.float32}
    states = [TreeKVCache(1, 2, 16, 200, max_top_nodes=m, device=device, **options) for m in (13, 8)]
    with pytest.raises(ValueError, match=r"options must be .*max_top_nodes=8.*, got .*max_top_nodes=13"):
        states[1].load_state_dict(states[0].state_dict())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [3, 300])
def test_a_cache_of_no_sequence_takes_every_call(n, kind, device):
    """As a batch that has become empty brings it: results and states of no sequence, and nothing raises."""
    cache, other = (make(device, 640, batch=0, **KINDS[kind]) for _ in range(2))
    assert step(cache, n, 1).shape == (0, n, 4, cache.value_dim)
    assert step(cache, n, 1, []).shape == (0, n, 4, cache.value_dim)
    q, k, v = tokens(cache, n, 2)
    out, lse = cache.decode(q, k, v, return_lse=True)
    assert (out.shape, lse.shape) == ((0, n, 4, cache.value_dim), (0, n, 4))
    for lengths in ([], 3, 0):
        cache.truncate(lengths)
    cache.reorder_([])
    cache.reserve(3)
    for tokens_of_replays in (1, [], None):
        cache.advance(tokens_of_replays)
        cache.check()
    state = cache.state_dict()
    other.load_state_dict(state)
    assert other.host_lengths() == []
    assert all(same(x, state[name]) for name, x in other.state_dict().items())
    with pytest.raises(ValueError, match="batch must be 0, that of the state, got 3"):
        make(device, 640, **KINDS[kind]).load_state_dict(state)
