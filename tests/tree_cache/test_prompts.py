"""Prompts from a ``TreeKVCache``: rows by the kernels of tree attention (docs/semantics/tree_cache.md §7.4)."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from htree_ops import HTreeAttention, TreeKVCache, tree_attention
from htree_ops.ops.tree_attention import attention_forward
from htree_ops.ops.tree_cache import cache as cache_module
from htree_ops.ops.tree_cache import prompts
from htree_ops.ops.tree_cache.lengths import HostLengths
from htree_ops.ops.tree_cache.prompts import PROMPT_ROWS
from htree_ops.reference.tree_cache import gather_tokens
from tests.support.graphs import capture

KV_HEADS, HEADS, WIDTH = 2, 4, 8
GPU: dict[str, Any] = {"max_top_nodes": 256, "top_k": 16, "page_size": 64}


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def small_cache(batch: int, **others: Any) -> TreeKVCache:
    settings = {
        "compression_rate": 4,
        "top_k": 3,
        "max_top_nodes": 12,
        "page_size": 8,
        "dtype": torch.float32,
    }
    return TreeKVCache(batch, KV_HEADS, WIDTH, 120, **{**settings, **others})


def step(caches: list[TreeKVCache], counts: list[int], n: int, seed: int) -> Tensor:
    """Appends the same tokens to all caches; returns queries for them."""
    batch = len(counts)
    k, v = (normal(seed + i, batch, n, KV_HEADS, WIDTH) for i in range(2))
    for cache in caches:
        cache.append(k, v, counts)
    return normal(seed + 2, batch, n, HEADS, WIDTH)


def attend_prompts(
    cache: TreeKVCache, q: Tensor, counts: list[int], return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """What a cache on a GPU does with many rows of a sequence."""
    return cache.prompts.attend(q, None, cache.host_lengths(), counts, return_lse, cache._rows_at)


@pytest.fixture
def short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the CPU, whose every row has the bits of the whole sequence, can judge prompts of few rows."""
    monkeypatch.setattr(prompts, "PROMPT_ROWS", 6)
    monkeypatch.setattr(prompts, "LISTED_ROWS", 20)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("stride", [1, 2, 4])
@pytest.mark.parametrize("span", [None, 2])
@pytest.mark.usefixtures("short_prompts")
def test_rows_and_lists_are_those_of_the_cache(batch, stride, span):
    """Beside ``tree_cache_attention``, bit for bit, for many lengths, and so are the steps that follow."""
    compared = 0
    for seed in range(30):
        draw = torch.Generator().manual_seed(seed)
        prompt, plain = (small_cache(batch, selection_stride=stride, selection_span=span) for _ in range(2))
        for call in range(4):
            n = int(torch.randint(1, 26, (), generator=draw))
            counts = [
                n if seed % 3 else int(torch.randint(0, n + 1, (), generator=draw)) for _ in range(batch)
            ]
            q = step([prompt, plain], counts, n, 100 * seed + 10 * call)
            found = attend_prompts(prompt, q, counts, return_lse=True)
            expected = plain.attend(q, counts, return_lse=True)
            assert torch.equal(found[0], expected[0]), (seed, call, counts)
            torch.testing.assert_close(
                found[1], expected[1], rtol=1e-6, atol=1e-6
            )  # their logs differ by a rounding
            assert torch.equal(prompt.ring.list_pos, plain.ring.list_pos)
            known = prompt.ring.list_pos >= 0
            assert torch.equal(prompt.ring.lists[known], plain.ring.lists[known])
            compared += sum(counts)
    assert compared > 1000


@pytest.mark.parametrize("stride", [1, 4])
@pytest.mark.parametrize("before", [0, 5])
@pytest.mark.usefixtures("short_prompts")
def test_sequences_without_rows_beside_a_prompt(stride, before):
    for counts in ([40, 0], [0, 40], [40, 0, 40], [40, 40, 0], [0, 0, 40], [40, 1], [0, 0]):
        prompt, plain = (small_cache(len(counts), selection_stride=stride) for _ in range(2))
        q = step([prompt, plain], [before] * len(counts), max(before, 1), 7)
        for cache in (prompt, plain):
            cache.attend(q, [before] * len(counts))
        q = step([prompt, plain], counts, 40, 0)
        found = attend_prompts(prompt, q, counts, return_lse=True)
        expected = plain.attend(q, counts, return_lse=True)
        assert torch.equal(found[0], expected[0]), counts
        torch.testing.assert_close(found[1], expected[1], rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("short_prompts")
def test_most_rows_of_a_prompt_go_through_tree_attention():
    """All with stride 1; with a stride all from the first leader on, the last of them with their lists."""
    for stride in (1, 4):
        cache = small_cache(1, selection_stride=stride)
        cache.attend(step([cache], [1], 1, 0))  # so that token 1 has its leader's lists
        q = step([cache], [50], 50, 1)
        with StampedCopies() as copies:
            attend_prompts(cache, q, [50], return_lse=False)
        # tokens 1 ... 50: with stride 4 the first leader is 4; the last 20 to 23 rows store lists
        assert copies.calls == ([(50, False)] if stride == 1 else [(24, False), (23, True)])


class StampedCopies(TorchDispatchMode):
    """Copies on the CPU, whose kernels read none: a stamp of every token, which a call must find as the pages say it.

    A stamp is the first key channel of the token, which no other token of these tests has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, bool]] = []
        self.packed: list[tuple[int, int]] = []

    def __torch_dispatch__(
        self, op: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        name = op.overloadpacket.__name__
        if name == "_tree_cache_prompt_bytes":
            return 4 * arguments[2] * arguments[4]
        if name == "_tree_cache_pack_prompt_":
            copies, k_pool, _, table, _, begin, end, capacity, page_size, *_ = arguments
            assert 0 <= begin <= end <= capacity
            found = self.tokens(k_pool, table, end, page_size)
            copies.view(torch.float32).view(len(table), capacity)[:, begin:end] = found[:, begin:]
            self.packed.append((begin, end))
            return None
        if name == "_tree_cache_prompt":
            q, k_pool, v_pool, table, length, copies, capacity, listed, page_size, *packed = arguments
            stamps = copies.view(torch.float32).view(len(table), capacity)[:, :length]
            assert torch.equal(stamps, self.tokens(k_pool, table, length, page_size))
            self.calls.append((q.shape[1], listed))
            arguments = (q, k_pool, v_pool, table, length, None, 0, listed, page_size, *packed)
        return op(*arguments, **(options or {}))

    @staticmethod
    def tokens(k_pool: Tensor, table: Tensor, length: int, page_size: int) -> Tensor:
        return torch.stack([gather_tokens(k_pool, row, length, page_size)[:, 0, 0] for row in table])


def attend(cache: TreeKVCache, q: Tensor, counts: list[int]) -> Tensor:
    """As a cache on a GPU does it."""
    prompt = q.shape[1] >= prompts.PROMPT_ROWS
    return attend_prompts(cache, q, counts, return_lse=False) if prompt else cache.attend(q, counts)


@pytest.mark.parametrize("stride", [1, 4])
@pytest.mark.usefixtures("short_prompts")
def test_copies_never_outlive_their_sequence(stride):
    """Random chunks, steps, truncations, reorders, forks and states: every call finds the copies of its sequence."""
    reused = 0
    for seed in range(40):
        draw = torch.Generator().manual_seed(seed)

        def number(low, high, draw=draw):
            return int(torch.randint(low, high + 1, (), generator=draw))

        cache, plain = (small_cache(3, selection_stride=stride, num_pages=60) for _ in range(2))
        saved = plain.state_dict()
        with StampedCopies() as copies:
            for call in range(14):
                kind = number(0, 15)
                lengths = plain.lengths.tolist()
                for own in (cache, plain):
                    if kind == 0:
                        cut = [length // 2 // stride * stride for length in lengths]
                        own.truncate([cut[0], -1, cut[2]] if call % 2 else torch.tensor(cut))
                    elif kind == 1:
                        own.reorder_([(0, 0, 2), (1, 0, 2), (0, 1, 2)][call % 3])
                    elif kind == 2:
                        own.fork(0, 1)
                    elif kind == 3:
                        own.free(call % 3)
                    elif kind == 4:
                        own.load_state_dict(saved)
                if kind <= 4:
                    continue
                if kind == 8:
                    saved = plain.state_dict()
                n = number(1, 4) if kind == 5 else number(6 if stride == 1 else 13, 20)
                n = min(n, 120 - max(lengths))
                counts = [n if number(0, 3) else 0 for _ in lengths] if kind < 8 else [n, n, n]
                if n:
                    q = step([cache, plain], counts, n, 1000 * seed + 10 * call)
                    expected = plain.attend(q, counts)
                    torch.testing.assert_close(
                        attend(cache, q, counts), expected, rtol=0, atol=0, equal_nan=True
                    )
        reused += sum(begin > 0 for begin, _ in copies.packed)
    assert reused > 20


@pytest.mark.parametrize("stride", [1, 4])
@pytest.mark.usefixtures("short_prompts")
def test_rows_may_come_again(stride):
    """With a stride the first of many rows are computed over a sequence that ends before the copies do."""
    cache, plain = (small_cache(1, selection_stride=stride) for _ in range(2))
    with StampedCopies():
        for call, (new, rows) in enumerate(((40, 40), (40, 40), (5, 40), (0, 40))):
            if new:
                step([cache, plain], [new], new, 10 * call)
            q = normal(10 * call + 5, 1, rows, HEADS, WIDTH)
            expected = plain.attend(q, [rows])
            torch.testing.assert_close(attend(cache, q, [rows]), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("short_prompts")
def test_copies_are_kept_from_the_second_chunk_to_the_next_step():
    cache = small_cache(2, num_pages=60)
    kept = cache.prompts

    def chunk(*counts):
        n = max(counts)
        attend(cache, step([cache], list(counts), n, sum(cache.lengths.tolist())), list(counts))

    with StampedCopies() as copies:
        chunk(16, 0)
        assert kept.kept == ()
        chunk(16, 0)
        assert [(x.sequences, x.tokens, x.capacity) for x in kept.kept] == [((0,), 32, 48)]
        assert cache.num_bytes().allocated >= kept.num_bytes() == 4 * 48
        chunk(0, 2)  # of another sequence
        chunk(16, 0)
        chunk(16, 0)  # more than there is space for: all of it again
        assert copies.packed == [(0, 16), (0, 32), (32, 48), (0, 64)]
        assert kept.kept[0].capacity == 96
        cache.truncate([-1, 0])
        cache.reorder_([0, 0])  # sequence 0 stays
        assert [x.sequences for x in kept.kept] == [(0,)]
        chunk(8, 8)  # another company
        assert [x.sequences for x in kept.kept] == [(0, 1)]
        cache.append(*(normal(i, 2, 1, KV_HEADS, WIDTH) for i in range(2)))
        assert kept.kept
        cache.attend(normal(3, 2, 1, HEADS, WIDTH))
        assert kept.kept == ()
        chunk(8, 0)
        chunk(8, 8)
        assert [x.sequences for x in kept.kept] == [(0,), (1,)]
        chunk(8, 1)
        assert [x.sequences for x in kept.kept] == [(0,)]
        other = small_cache(2, num_pages=60)
        other.prompts.kept = kept.kept
        other.load_state_dict(cache.state_dict())
        assert other.prompts.kept == ()
        cache.advance(0)  # a graph may have changed the sequence
        assert kept.kept == ()
        packed = len(copies.packed)
        chunk(8, 0)
        assert [begin for begin, _ in copies.packed[packed:]] == [0]


@pytest.mark.usefixtures("short_prompts")
def test_kept_copies_are_bounded():
    for most, kept in ((0, []), (4 * 30, []), (4 * 48, [32, 48]), (None, [32, 48, 64])):
        cache = small_cache(1, prompt_bytes=most)
        found = []
        with StampedCopies():
            for seed in range(4):
                attend(cache, step([cache], [16], 16, seed), [16])
                found.extend(x.tokens for x in cache.prompts.kept)
        assert found == kept
    with pytest.raises(ValueError, match="prompt_bytes"):
        small_cache(1, prompt_bytes=-1)


class Launches(TorchDispatchMode):
    """The ops that a GPU would launch something for."""

    VIEWS = (
        "alias",
        "detach",
        "expand",
        "empty",
        "permute",
        "select",
        "slice",
        "transpose",
        "unsqueeze",
        "view",
        "_unsafe_view",
        "_tree_cache_prompt_bytes",
    )

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, op: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        if (name := op.overloadpacket.__name__) not in self.VIEWS:
            self.names.append(name)
        return op(*arguments, **(options or {}))


@pytest.mark.parametrize(("layers", "top_k", "later"), [(1, 30, 1), (2, 8, 2)])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.usefixtures("short_prompts")
def test_a_chunk_takes_few_launches(batch, layers, top_k, later):
    """Once constants are made, and it has all layers; nothing is rolled where leaders come in whole rings."""
    cache = small_cache(batch, selection_stride=4, top_k=top_k, max_top_nodes=top_k * 4)
    assert cache.num_layers == layers
    q, k, v = (normal(i, batch, 16, heads, WIDTH) for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    for chunk in range(4):
        with Launches() as launches:
            cache.append(k, v)
            attend_prompts(cache, q, [16] * batch, return_lse=False)
        names = ["_tree_cache_step_", "_tree_cache_prompt", "copy_", "add"]
        if chunk >= later:
            assert [name for name in launches.names if batch == 1 or name != "clone"] == names


def test_constants_follow_their_key_and_are_not_those_of_a_recording(monkeypatch):
    cache = small_cache(2)
    first = cache._constants(3, recorded=False)
    assert cache._constants(3, recorded=False) is first
    assert [x.tolist() for x in cache._constants(4, recorded=False)] == [[4, 4], [0, 4, 8]]
    kept = cache._constants(3, recorded=False)
    assert [x.tolist() for x in kept] == [[3, 3], [0, 3, 6]]
    monkeypatch.setattr(cache_module, "is_recorded", lambda device: True)
    assert cache.step_arguments(None, 3)[1][2] is not kept[1]
    assert [x.tolist() for x in cache._constants(5, recorded=True)] == [[5, 5], [0, 5, 10]]
    monkeypatch.undo()
    assert cache.step_arguments(None, 3)[1][2] is kept[1]


@pytest.mark.usefixtures("short_prompts")
def test_a_prompt_reports_a_leader_that_nobody_has():
    cache = small_cache(1, selection_stride=4)
    step([cache], [5], 5, 0)  # never attended
    attend_prompts(cache, step([cache], [40], 40, 1), [40], return_lse=False)
    with pytest.raises(ValueError, match="leader"):
        cache.check()
    attend_prompts(cache, step([cache], [3], 3, 2), [3], return_lse=False)  # up to token 48
    attend_prompts(cache, step([cache], [40], 40, 3), [40], return_lse=False)
    cache.check()


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.lists(st.integers(0, 40), min_size=2, max_size=2)),
            st.tuples(st.just("truncate"), st.lists(st.integers(-1, 30), min_size=2, max_size=2)),
            st.tuples(st.just("reorder_"), st.lists(st.integers(0, 1), min_size=2, max_size=2)),
            st.tuples(st.just("copy"), st.just([])),
        ),
        max_size=8,
    )
)
def test_the_host_knows_the_lengths(steps):
    cache = small_cache(2)
    for kind, numbers in steps:
        try:
            if kind == "append":
                step([cache], numbers, 40, 0)
            elif kind == "truncate":
                cache.truncate(numbers)
            elif kind == "reorder_":
                cache.reorder_(numbers)
            else:
                other = small_cache(2)
                other.load_state_dict(cache.state_dict())
                cache = other
        except ValueError:  # more than it holds or has space for: nothing changed
            pass
        assert cache.host.exact
        assert cache.host.most == cache.host_lengths() == cache.lengths.tolist()


def test_what_only_the_device_knows_is_read():
    device = torch.zeros(2, dtype=torch.int32)
    lengths = HostLengths(device)
    lengths.grow([3, 4], 10, exact=True)
    assert lengths.read() == [3, 4]
    lengths.grow([5, 9], 10, exact=False)  # at most so many
    assert lengths.most == [8, 10]
    device.copy_(torch.tensor([3, 9]))
    assert lengths.read() == [3, 9]
    assert lengths.exact
    device.fill_(1)
    lengths.lose()
    assert lengths.read() == [1, 1]


@pytest.mark.usefixtures("short_prompts")
def test_a_backward_is_refused():
    cache = small_cache(1)
    q = step([cache], [20], 20, 0).requires_grad_()
    out = attend_prompts(cache, q, [20], return_lse=False)
    with pytest.raises(NotImplementedError, match=r"TreeKVCache\.attend"):
        out.sum().backward()


# ---- on a GPU


#: What decides which copies a sequence has: head dim, query heads of two K/V heads, and options. With at most 200 nodes
#: at the top a sequence of 201 ... 3200 tokens has two layers, a longer one three.
COPIED: dict[str, tuple[int, int, dict[str, Any]]] = {
    "per list": (128, 16, {"selection_stride": 16}),
    "per list, spans": (64, 16, {"selection_stride": 4, "selection_span": 4}),
    "shared gather": (128, 8, {}),
    "shared gather, spans": (32, 4, {"selection_span": 1}),
    "spans of a node": (64, 8, {"selection_stride": 2, "selection_span": 16}),
    "no dense top": (64, 6, {"selection_span": 2}),
    "masked tiles, then gathered": (64, 16, {"rope_base": None}),
    "frequencies": (64, 8, {"inv_freq": [0.5 ** (i / 4) for i in range(32)], "selection_stride": 4}),
    "half": (128, 8, {"dtype": torch.float16, "importance": "exp_joint"}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("choice", ["auto", "per_query"])
@pytest.mark.parametrize("name", COPIED)
def test_kept_copies_give_the_bits_of_one_call(name, choice, monkeypatch):
    """For chunks of any length, while the buffer grows and the top moves up; after a truncation and a fork.

    One call has the sequence up to the chunk's end. A longer sequence may have a layer more, and where a top is dense
    its rows agree with these to rounding alone (docs/semantics/tree_attention.md §1.14).
    """
    monkeypatch.setenv("HTREE_TREE_GATHER", choice)
    width, heads, others = COPIED[name]
    options = {"max_top_nodes": 200, "top_k": 13, "page_size": 48, **others}
    stride = options.get("selection_stride", 1)
    cache = TreeKVCache(2, 2, width, 6000, device="cuda", **options)
    single = TreeKVCache(2, 2, width, 6000, device="cuda", prompt_bytes=0, **options)
    tokens = gpu_step(cache, 5200, heads, 0)

    def chunk(begin, end, kept):
        q, k, v = (x[:, begin:end] for x in tokens)
        expected = tree_attention(*(x[:, :end] for x in tokens), **cache.options.to_dict())
        first = prompts.prompt_begin(end, end - begin, stride)
        for own in (cache, single):
            own.append(k, v)
            out = own.attend(q)
            assert torch.equal(out[:, first:], expected[:, begin + first :]), (begin, end)
        assert bool(cache.prompts.kept) == kept
        assert not single.prompts.kept

    ends = [300, 556, 830, 1279, 1920, 2817, 3200, 3471, 4100, 4400]
    for begin, end in zip([0, *ends], ends, strict=False):
        chunk(begin, end, kept=begin > 0)
    assert cache.prompts.kept[0].tokens == 4400
    for own in (cache, single):
        own.truncate(3200)  # tokens that come again are others for a moment
        own.append(*(x.flip(1)[:, :400] for x in tokens[1:]))
        own.truncate(3200)
    assert not cache.prompts.kept
    chunk(3200, 3900, kept=True)
    chunk(3900, 4500, kept=True)
    for own in (cache, single):
        own.fork(0, 1)
    assert not cache.prompts.kept  # they were those of both
    tokens = tuple(torch.stack([x[0], x[0]]) for x in tokens)
    chunk(4500, 5000, kept=True)
    chunk(5000, 5001, kept=False)
    chunk(5001, 5200, kept=False)
    cache.check()


@pytest.mark.gpu
def test_copies_of_sequences_of_several_lengths():
    """Each group grows by itself, and a sequence without a row keeps its copies."""
    lengths = [[600, 300, 0, 600], [512, 0, 700, 512], [400, 400, 400, 400], [300, 300, 1, 300]]
    together = TreeKVCache(4, 2, 64, 3000, device="cuda", selection_stride=4, **GPU)
    sequences = gpu_step(together, 3000, 8, 11)
    alone = [TreeKVCache(1, 2, 64, 3000, device="cuda", selection_stride=4, **GPU) for _ in range(4)]
    held = [0] * 4
    for counts in lengths:
        n = max(counts)
        q, k, v = (torch.stack([x[b, begin : begin + n] for b, begin in enumerate(held)]) for x in sequences)
        together.append(k, v, counts)
        out = together.attend(q, counts)
        for b, count in enumerate(counts):
            alone[b].append(k[b : b + 1, :count], v[b : b + 1, :count])
            if count:
                assert torch.equal(alone[b].attend(q[b : b + 1, :count])[0], out[b, :count])
            held[b] += count
    assert [x.sequences for x in together.prompts.kept] == [(0, 3), (1,)]
    together.check()


@pytest.mark.gpu
def test_a_step_frees_the_copies_of_a_prompt():
    cache = TreeKVCache(1, 2, 128, 20_000, device="cuda", **GPU)
    q, k, v = gpu_step(cache, 8000, 8, 0)
    before = torch.cuda.memory_allocated()
    for begin in (0, 4000):
        rows = slice(begin, begin + 4000)
        cache.append(k[:, rows], v[:, rows])
        cache.attend(q[:, rows])
    kept = torch.cuda.memory_allocated() - before
    pages = (
        12_000 * 2 * 2 * 128 * 2 * 16 // 15
    )  # of tokens and nodes, with space for half as many tokens again
    assert cache.prompts.num_bytes() <= kept
    assert pages <= cache.prompts.num_bytes() <= 1.1 * pages + (1 << 20)
    cache.append(k[:, :1], v[:, :1])
    cache.attend(q[:, :1])
    assert cache.prompts.num_bytes() == 0
    assert torch.cuda.memory_allocated() - before < kept - pages + (1 << 20)


def gpu_step(cache: TreeKVCache, n: int, heads: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    sizes = (
        (heads, cache.head_dim),
        (cache.num_kv_heads, cache.head_dim),
        (cache.num_kv_heads, cache.value_dim),
    )
    return tuple(
        normal(seed + i, cache.batch, n, *size).to("cuda", cache.dtype) for i, size in enumerate(sizes)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("stride", [1, 2, 4, 16])
@pytest.mark.parametrize("span", [None, 4])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_chunks_of_a_prompt_have_the_bits_of_one_call(stride, span, width, dtype):
    """But for rows around a chunk's prompt, which have the bits that ``tree_cache_attention`` gives to every row.

    One call has all chunks: these sequences have two layers each, so no bit depends on the length.
    """
    options = {**GPU, "selection_stride": stride, "selection_span": span, "dtype": dtype}
    cache, plain = (TreeKVCache(2, 2, width, 4000, device="cuda", **options) for _ in range(2))
    tokens = gpu_step(cache, 2500, 8, 0)
    expected = tree_attention(*tokens, **cache.options.to_dict())
    begin = prompt_rows = 0
    for n in (700, 333, 1, 466, 1000):
        q, k, v = (x[:, begin : begin + n] for x in tokens)
        for own in (cache, plain):
            own.append(k, v)
        out = cache.attend(q)
        rows, _ = plain._rows_at(q, None, plain.host_lengths(), [n] * 2)
        first = prompts.prompt_begin(begin + n, n, stride)
        assert torch.equal(out[:, first:], expected[:, begin + first : begin + n])
        # Two kernels may choose other nodes where importances nearly tie: a row in a hundred, all rows of its stride.
        near = (out - rows).float().norm(dim=(2, 3)) <= 0.05 * rows.float().norm(dim=(2, 3))
        assert int((~near).sum()) <= 2 * stride + n // 20
        begin, prompt_rows = begin + n, prompt_rows + n - first
    assert prompt_rows >= 2450
    cache.check()


@pytest.mark.gpu
@pytest.mark.parametrize("stride", [1, 4])
def test_a_prompt_does_not_wait_for_the_device(stride):
    cache = TreeKVCache(2, 2, 64, 4000, device="cuda", selection_stride=stride, **GPU)
    warm = TreeKVCache(2, 2, 64, 4000, device="cuda", selection_stride=stride, **GPU)
    q, k, v = gpu_step(cache, 1000, 8, 0)
    warm.append(k, v)
    warm.attend(q)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        cache.append(k, v)
        out = cache.attend(q)
        cache.append(k[:, :300], v[:, :300])
        cache.attend(q[:, :300])
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert bool(torch.isfinite(out).all())


@pytest.mark.gpu
def test_sequences_of_other_lengths_and_other_company():
    """A sequence has the same bits alone, beside others, and in other pages."""
    lengths = [900, 0, 300, 899]
    together = TreeKVCache(4, 2, 64, 1000, device="cuda", **GPU)
    q, k, v = gpu_step(together, 900, 8, 3)
    together.append(k, v, lengths)
    out = together.attend(q, lengths)
    for b, n in enumerate(lengths):
        alone = TreeKVCache(1, 2, 64, 1000, device="cuda", **GPU)
        alone.append(k[b : b + 1, :n], v[b : b + 1, :n])
        own = alone.attend(q[b : b + 1, :n])
        assert torch.equal(own[0], out[b, :n])
        assert not out[b, n:].any()
    together.check()


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [256, 300, 320])
def test_cuda_ring_after_chunks_of_a_prompt(chunk):
    """Entry i % ring has leader i and the lists that ``attention_forward`` gives it, and -1 behind the top."""
    cache = TreeKVCache(2, 2, 64, 2000, device="cuda", selection_stride=4, **GPU)
    q, k, v = gpu_step(cache, 4 * chunk, 8, 7)
    for begin in range(0, 4 * chunk, chunk):
        rows = slice(begin, begin + chunk)
        cache.append(k[:, rows], v[:, rows])
        cache.attend(q[:, rows])
        length = begin + chunk
        lists = attention_forward(q[:, begin:length], k[:, :length], v[:, :length], options=cache.options)[3]
        ring, kept = cache.ring.lists, cache.ring.list_pos
        for leader in range(length // 4 - 4, length // 4):
            assert kept[:, leader % 4].tolist() == [4 * leader] * 2
            for layer, own in enumerate(lists):
                assert torch.equal(ring[:, leader % 4, layer], own[:, leader - begin // 4])
    cache.check()


@pytest.mark.gpu
def test_the_host_follows_the_replays_of_a_graph():
    cache, eager = (TreeKVCache(1, 2, 64, 2000, device="cuda", **GPU) for _ in range(2))
    q, k, v = gpu_step(cache, 600, 8, 5)
    single = [x[:, :1].clone() for x in (q, k, v)]
    for own in (cache, eager):
        own.append(k, v)
        own.attend(q)
        own.append(*single[1:])
        own.attend(single[0])
    graph, _ = capture(lambda: (cache.append(*single[1:]), cache.attend(single[0])))
    for _ in range(3):
        graph.replay()
        cache.advance()
        eager.append(*single[1:])
    for own in (cache, eager):
        assert own.host_lengths() == [604]
        own.append(k, v)
    assert torch.equal(cache.lengths, eager.lengths)
    assert torch.equal(cache.attend(q), eager.attend(q))


@pytest.mark.gpu
def test_a_layer_takes_a_prompt_and_goes_on():
    layer = HTreeAttention(
        512, num_heads=8, num_kv_heads=2, top_k=16, max_top_nodes=256, selection_stride=4, device="cuda"
    ).to(torch.bfloat16)
    cache = layer.make_cache(1, 2000)
    x = normal(0, 1, 1001, 512).to("cuda", torch.bfloat16)
    with torch.no_grad():
        whole = layer(x)
        parts = torch.cat([layer(x[:, :1000], cache=cache), layer(x[:, 1000:], cache=cache)], 1)
    assert (whole - parts).float().norm() <= 0.02 * whole.float().norm()
    cache.check()


def test_a_prompt_has_some_hundreds_of_rows():
    assert PROMPT_ROWS == 256
