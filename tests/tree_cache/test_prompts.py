"""Prompts from a ``TreeKVCache``: rows by the kernels of tree attention (docs/semantics/tree_cache.md §7.4)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from htree_ops import HTreeAttention, TreeKVCache, tree_attention
from htree_ops.ops.tree_cache import cache as cache_module
from htree_ops.ops.tree_cache import prompts
from htree_ops.ops.tree_cache.prompts import PROMPT_ROWS, attend_prompts

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


@pytest.fixture
def short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the CPU, whose every row has the bits of the whole text, can judge prompts of few rows."""
    monkeypatch.setattr(prompts, "PROMPT_ROWS", 6)
    monkeypatch.setattr(prompts, "LISTED_ROWS", 20)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("stride", [1, 2, 4])
@pytest.mark.parametrize("span", [None, 2])
@pytest.mark.usefixtures("short_prompts")
def test_rows_and_lists_are_those_of_the_cache(batch: int, stride: int, span: int | None) -> None:
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
            assert torch.equal(prompt._list_pos, plain._list_pos)
            known = prompt._list_pos >= 0
            assert torch.equal(prompt._lists[known], plain._lists[known])
            compared += sum(counts)
    assert compared > 1000


@pytest.mark.parametrize("stride", [1, 4])
@pytest.mark.parametrize("before", [0, 5])
@pytest.mark.usefixtures("short_prompts")
def test_sequences_without_rows_beside_a_prompt(stride: int, before: int) -> None:
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
def test_most_rows_of_a_prompt_go_through_tree_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """All with stride 1; with a stride all from the first leader on, the last of them with their lists."""
    took: list[int] = []

    def counted(q: Tensor, *arguments: Any, **options: Any) -> Any:
        took.append(q.shape[1])
        return tree_attention(q, *arguments, **options)

    monkeypatch.setattr(prompts, "tree_attention", counted)
    for stride in (1, 4):
        cache = small_cache(1, selection_stride=stride)
        cache.attend(step([cache], [1], 1, 0))  # so that token 1 has its leader's lists
        took.clear()
        attend_prompts(cache, step([cache], [50], 50, 1), [50], return_lse=False)
        # tokens 1 ... 50: with stride 4 the first leader is 4; the last 20 to 23 rows store lists
        assert took == ([50] if stride == 1 else [24])


class Launches(TorchDispatchMode):
    """The ops that a GPU would launch something for."""

    VIEWS = (
        "alias",
        "detach",
        "expand",
        "empty",
        "select",
        "slice",
        "transpose",
        "unsqueeze",
        "view",
        "_unsafe_view",
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


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.usefixtures("short_prompts")
def test_a_chunk_takes_few_launches(batch: int) -> None:
    """From the second on: constants are made once, and nothing is rolled where the leaders come in whole rings."""
    cache = small_cache(batch, selection_stride=4, top_k=30, max_top_nodes=120)
    assert cache.num_layers == 1
    q, k, v = (normal(i, batch, 16, heads, WIDTH) for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    for chunk in range(4):
        with Launches() as launches:
            cache.append(k, v)
            attend_prompts(cache, q, [16] * batch, return_lse=False)
        names = ["tree_cache_pages_", "tree_cache_append_", "index_select", "index_select"]
        names += ["attention_forward", "copy_", "add"]
        if chunk:
            assert [name for name in launches.names if batch == 1 or name != "clone"] == names


def test_constants_follow_their_key_and_are_not_those_of_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = small_cache(2)
    first = cache._counts("", None, 3)
    assert cache._counts("", None, 3) is first
    assert cache._counts("", None, 4).tolist() == [4, 4]
    assert cache._counts("", None, 3).tolist() == [3, 3]
    kept = cache._cu(3)
    assert kept.tolist() == [0, 3, 6]
    monkeypatch.setattr(cache_module, "is_recorded", lambda device: True)
    assert cache._cu(3) is not kept
    assert cache._cu(5).tolist() == [0, 5, 10]
    monkeypatch.undo()
    assert cache._cu(3) is kept


@pytest.mark.usefixtures("short_prompts")
def test_a_prompt_reports_a_leader_that_nobody_has() -> None:
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
def test_the_host_knows_the_lengths(steps: list[tuple[str, list[int]]]) -> None:
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
        except ValueError:  # more than it holds or has room for: nothing changed
            pass
        if cache.host_lengths.known is not None:
            assert cache.host_lengths.known == cache.lengths.tolist()
        assert cache.host_lengths.read(cache.lengths) == cache.lengths.tolist()


def test_what_only_the_device_knows_is_read() -> None:
    lengths = prompts.HostLengths(2)
    lengths.append([3, 4], 10, torch.device("cpu"))
    lengths.append([7, 7], 10, torch.device("cpu"))  # the second does not fit
    assert lengths.known == [10, 4]
    lengths.append(None, 10, torch.device("cpu"))
    assert lengths.known is None
    assert lengths.read(torch.tensor([1, 2])) == [1, 2]
    assert lengths.known == [1, 2]


@pytest.mark.usefixtures("short_prompts")
def test_a_backward_is_refused() -> None:
    cache = small_cache(1)
    q = step([cache], [20], 20, 0).requires_grad_()
    out = attend_prompts(cache, q, [20], return_lse=False)
    assert isinstance(out, Tensor)
    with pytest.raises(NotImplementedError, match=r"TreeKVCache\.attend"):
        out.sum().backward()


# ---- on a GPU


def gpu_step(cache: TreeKVCache, n: int, heads: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    sizes = (
        (heads, cache.head_dim),
        (cache.num_kv_heads, cache.head_dim),
        (cache.num_kv_heads, cache.value_dim),
    )
    return tuple(
        normal(seed + i, cache.batch, n, *size).to("cuda", cache.dtype) for i, size in enumerate(sizes)
    )  # type: ignore[return-value]


@pytest.mark.gpu
@pytest.mark.parametrize("stride", [1, 2, 4, 16])
@pytest.mark.parametrize("span", [None, 4])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_chunks_of_a_prompt_have_the_bits_of_one_call(
    stride: int, span: int | None, width: int, dtype: torch.dtype
) -> None:
    """But for rows around a chunk's prompt, which have the bits that ``tree_cache_attention`` gives to every row."""
    options = {**GPU, "selection_stride": stride, "selection_span": span, "dtype": dtype}
    cache, plain = (TreeKVCache(2, 2, width, 4000, device="cuda", **options) for _ in range(2))
    tokens = gpu_step(cache, 2500, 8, 0)
    expected = tree_attention(*tokens, **cache.options.to_dict())
    assert isinstance(expected, Tensor)
    begin = prompt_rows = 0
    for n in (700, 333, 1, 466, 1000):
        q, k, v = (x[:, begin : begin + n] for x in tokens)
        for own in (cache, plain):
            own.append(k, v)
        out = cache.attend(q)
        rows, _ = plain.attend_pages(q, plain.lengths, None)
        first = prompts.prompt_begin(begin + n, n, stride)
        assert isinstance(out, Tensor)
        assert torch.equal(out[:, first:], expected[:, begin + first : begin + n])
        # Two kernels may choose other nodes where importances nearly tie: a row in a hundred, all rows of its stride.
        near = (out - rows).float().norm(dim=(2, 3)) <= 0.05 * rows.float().norm(dim=(2, 3))
        assert int((~near).sum()) <= 2 * stride + n // 20
        begin, prompt_rows = begin + n, prompt_rows + n - first
    assert prompt_rows >= 2450
    cache.check()


@pytest.mark.gpu
@pytest.mark.parametrize("stride", [1, 4])
def test_a_prompt_does_not_wait_for_the_device(stride: int) -> None:
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
    assert isinstance(out, Tensor)
    assert bool(torch.isfinite(out).all())


@pytest.mark.gpu
def test_sequences_of_other_lengths_and_other_company() -> None:
    """A sequence has the same bits alone, beside others, and in other pages."""
    lengths = [900, 0, 300, 899]
    together = TreeKVCache(4, 2, 64, 1000, device="cuda", **GPU)
    q, k, v = gpu_step(together, 900, 8, 3)
    together.append(k, v, lengths)
    out = together.attend(q, lengths)
    assert isinstance(out, Tensor)
    for b, n in enumerate(lengths):
        alone = TreeKVCache(1, 2, 64, 1000, device="cuda", **GPU)
        alone.append(k[b : b + 1, :n], v[b : b + 1, :n])
        own = alone.attend(q[b : b + 1, :n])
        assert isinstance(own, Tensor)
        assert torch.equal(own[0], out[b, :n])
        assert not out[b, n:].any()
    together.check()


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [256, 300, 320])
def test_cuda_ring_after_chunks_of_a_prompt(chunk: int) -> None:
    """Entry i % ring has leader i and the lists that ``attention_forward`` gives it, and -1 behind its text's top."""
    cache = TreeKVCache(2, 2, 64, 2000, device="cuda", selection_stride=4, **GPU)
    q, k, v = gpu_step(cache, 4 * chunk, 8, 7)
    for begin in range(0, 4 * chunk, chunk):
        rows = slice(begin, begin + chunk)
        cache.append(k[:, rows], v[:, rows])
        cache.attend(q[:, rows])
        length = begin + chunk
        options = cache.options.of_ops()
        options["top_k_per_layer"] = options.pop("top_k")
        lists = torch.ops.htree.attention_forward(
            q[:, begin:length], k[:, :length], v[:, :length], **options, store_parents=True
        )[3]
        ring, kept = cache.ring
        for leader in range(length // 4 - 4, length // 4):
            assert kept[:, leader % 4].tolist() == [4 * leader] * 2
            for layer, own in enumerate(lists):
                assert torch.equal(ring[:, leader % 4, layer], own[:, leader - begin // 4])
    cache.check()


@pytest.mark.gpu
def test_lengths_that_a_graph_has_changed_are_read() -> None:
    cache, eager = (TreeKVCache(1, 2, 64, 2000, device="cuda", **GPU) for _ in range(2))
    q, k, v = gpu_step(cache, 600, 8, 5)
    single = [x[:, :1].clone() for x in (q, k, v)]
    for own in (cache, eager):
        own.append(k, v)
        own.attend(q)
        own.append(*single[1:])
        own.attend(single[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.append(*single[1:])
        cache.attend(single[0])
    for _ in range(3):
        graph.replay()
        eager.append(*single[1:])
    for own in (cache, eager):
        own.append(k, v)
    assert torch.equal(cache.lengths, eager.lengths)
    assert torch.equal(cache.attend(q), eager.attend(q))  # type: ignore[arg-type]


@pytest.mark.gpu
def test_a_layer_takes_a_prompt_and_goes_on() -> None:
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


def test_a_prompt_has_some_hundreds_of_rows() -> None:
    assert PROMPT_ROWS == 256
