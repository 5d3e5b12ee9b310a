"""``TreeKVCache`` on CPU and GPU: schedules, graphs, compiled steps (docs/semantics/tree_cache.md §7.4)."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from tree_cache_schedules import Run, Sequence, Shape, refusal, schedules

from htree_ops import HTreeAttention, TreeKVCache, tree_attention
from htree_ops.errors import DeviceError, OutOfPagesError
from htree_ops.ops.tree_cache.prompts import PROMPT_ROWS
from tests.support.graphs import capture, on_another_stream

OPTIONS: dict[str, Any] = {"compression_rate": 4, "top_k": 3, "max_top_nodes": 12}


def make(device: str = "cpu", batch: int = 2, capacity: int = 40, **others: Any) -> TreeKVCache:
    settings = {**OPTIONS, "page_size": 8, "dtype": torch.float32, "device": device, **others}
    return TreeKVCache(batch, 2, 8, capacity, **settings)


def rows(batch: int, n: int, heads: int, seed: int, device: str = "cpu") -> Tensor:
    return torch.randn(batch, n, heads, 8, generator=torch.Generator().manual_seed(seed)).to(device)


def fill(cache: TreeKVCache, n: int, seed: int = 0) -> Tensor:
    """n tokens of every sequence and their attention."""
    device = str(cache.device)
    cache.append(rows(cache.batch, n, 2, seed, device), rows(cache.batch, n, 2, seed + 1, device))
    return cache.attend(rows(cache.batch, n, 4, seed + 2, device))


# ---- a GPU beside the CPU


class GpuRun(Run):
    """A schedule on CUDA, where what only the device sees leaves a sequence as it was and is reported later."""

    sizes: tuple[int, ...] = (1, 1, 2, 3, 5, 12)
    reported = False

    def append(self) -> None:
        draw, shape = self.draw, self.shape
        most = draw.choice(self.sizes)
        counts = [draw.randint(0, most) for _ in self.model]
        ids = torch.randint(
            0, 256, (shape.batch, most), generator=torch.Generator().manual_seed(draw.randrange(1 << 30))
        )
        rows = (self.k[ids.cuda()], self.v[ids.cuda()])
        too_long = any(len(x.tokens) + n > shape.capacity for x, n in zip(self.model, counts, strict=True))
        on_device = draw.random() < 0.3  # counts that the host does not know
        if not on_device and too_long and self.cache.host.exact:
            key = self.of_index(index_key=ids.cuda())
            assert "exceed the capacity" in str(refusal(lambda: self.cache.append(*rows, counts, **key)))
            return
        given = torch.tensor(counts, dtype=torch.int32, device="cuda") if on_device else counts
        together = draw.random() < 0.5
        index, key = self.of_index(index=ids.cuda()), self.of_index(index_key=ids.cuda())
        found = (
            self.cache.decode(self.q[ids.cuda()], *rows, given, **index, return_lse=True)
            if together
            else None
        )
        if not together:
            self.cache.append(*rows, given, **key)
        for sequence, new, i in zip(self.model, ids.tolist(), range(shape.batch), strict=True):
            if len(sequence.tokens) + counts[i] > shape.capacity:
                self.reported = True
                if together:  # its rows are those of its last tokens
                    found[0][i], found[1][i] = 0.0, -torch.inf
                counts[i] = 0
            sequence.tokens += new[: counts[i]]
        self.attend(ids.cuda(), counts, True, found)

    def truncate(self) -> None:
        lengths = [self.draw.choice((-1, self.draw.randint(0, len(x.tokens) + 1))) for x in self.model]
        beyond = any(n > len(x.tokens) for n, x in zip(lengths, self.model, strict=True))
        if beyond and self.cache.host.exact and not self.cache._is_left_to_the_device(lengths):
            assert "at most what it holds" in str(refusal(self.cache.truncate, lengths))
            return
        if said := refusal(self.cache.truncate, lengths):
            # of shared pages, which the host cuts: nothing has changed
            assert "leader are in the ring" in said
            inside = [(x, n) for x, n in zip(self.model, lengths, strict=True) if n < len(x.tokens)]
            assert not all(self.may_end(x, n) for x, n in inside)
            return
        for n, x in zip(lengths, self.model, strict=True):
            if n <= len(x.tokens) and self.may_end(x, n):
                x.cut(len(x.tokens) if n < 0 else n)
            else:
                self.reported = True

    def run(self, steps: int) -> None:
        kinds = (*[self.append] * 4, self.truncate, self.reorder, self.fork, self.free)
        for _ in range(steps):
            self.draw.choice(kinds)()
            assert self.cache.lengths.tolist() == [len(x.tokens) for x in self.model]
        self.check_layers()
        if self.reported or self.missing:
            with pytest.raises(ValueError, match="sequence"):
                self.cache.check()
        self.cache.check()


def alike(near: float) -> Callable[[Tensor, Tensor], bool]:
    """Whether rows agree to a tolerance that is relative and absolute."""
    return lambda a, b: torch.allclose(a.float(), b.float(), rtol=near, atol=near, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("draw", [Shape.draw, Shape.draw_indexed, Shape.draw_open])
def test_schedules_on_a_gpu(draw):
    """Bytes bit for bit; rows to the tolerance of §1.11, but for the few whose selection is a matter of rounding."""
    tolerance = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
    different = compared = 0
    for seed in schedules(500):
        shape = replace(draw(seed), num_pages=None)
        if shape.dtype not in tolerance:
            shape = replace(shape, dtype=torch.float32)
        run = GpuRun(shape, "cuda", alike(tolerance[shape.dtype]))
        run.run(steps=8)
        different, compared = different + run.different, compared + run.rows
    assert different <= compared // 200, (different, compared)


class ServedRun(GpuRun):
    """Rows of Hopper's kernels: those that decoding computes have the bits of a fresh cache of that sequence alone."""

    sizes = (1, 1, 2, 17, 120, 400)
    repeated = 0

    def compare(self, sequence: Sequence, out: Tensor, expected: Tensor) -> None:
        super().compare(sequence, out, expected)
        length, stride = len(sequence.tokens), self.shape.stride
        begin = length - len(out)
        first = begin - begin % stride  # the leader of the first row
        if len(out) >= PROMPT_ROWS:
            sequence.prompted = length
        decoded = first == begin or (first in sequence.ring.values() and first >= sequence.prompted)
        if decoded and length - first < PROMPT_ROWS:  # a fresh cache takes more rows as a prompt
            alone = replace(self.shape, batch=1, seed=self.shape.seed + 1).cache(str(self.k.device))
            ids = torch.tensor([sequence.tokens], device=self.k.device)
            alone.append(self.k[ids], self.v[ids], **self.of_index(index_key=ids))
            rows = alone.attend(self.q[ids[:, first:]], **self.of_index(index_query=ids[:, first:]))
            assert torch.equal(out, rows[0, begin - first :]), (self.shape, begin, length)
            self.repeated += len(out)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "draw",
    [
        Shape.draw_served,
        partial(Shape.draw_indexed, served=True),
        partial(Shape.draw_open, served=True),
    ],
    ids=["scores", "index", "open"],
)
def test_schedules_of_served_sizes_on_a_gpu(draw):
    """Rows bit for bit whatever the schedule, the pages and the batch; near those of ``tree_attention``.

    Another kernel computes the latter, and where few nodes are opened, importances that nearly tie move whole rows.
    """
    repeated = different = compared = 0
    for seed in schedules(60):
        run = ServedRun(draw(seed), "cuda", alike(3e-2))
        run.run(steps=8)
        repeated += run.repeated
        different, compared = different + run.different, compared + run.rows
    assert repeated > compared // 10
    assert different <= compared // 200, (different, compared)


@pytest.mark.gpu
@pytest.mark.parametrize("stride", [1, 4])
def test_a_captured_step_follows_the_lengths(stride):
    cache, eager = (make("cuda", selection_stride=stride, dtype=torch.bfloat16) for _ in range(2))
    for one in (cache, eager):
        k = rows(2, 5, 2, 0, "cuda").bfloat16()
        one.append(k, k)
        one.attend(rows(2, 5, 4, 1, "cuda").bfloat16())
    q, k = (torch.zeros(2, 1, heads, 8, dtype=torch.bfloat16, device="cuda") for heads in (4, 2))
    cache.reserve(30)
    before = copy.deepcopy(cache.state_dict())

    def step():
        cache.append(k, k)
        return cache.attend(q)

    on_another_stream(step)
    cache.load_state_dict(before)
    graph, out = capture(step)
    for i in range(30):
        new_k, new_q = (rows(2, 1, heads, 50 + i, "cuda").bfloat16() for heads in (2, 4))
        k.copy_(new_k)
        q.copy_(new_q)
        graph.replay()
        cache.advance()
        eager.append(new_k, new_k)
        assert torch.equal(out, eager.attend(new_q))
        if i % 7 == 3:  # beams change between two replays, by the table
            cache.reorder_([1, 1] if i % 2 else [1, 0])
            eager.reorder_([1, 1] if i % 2 else [1, 0])
    cache.check()
    graph.replay()
    with pytest.raises(
        ValueError, match=r"the host has counted \[35, 35\] tokens where the device has \[36, 36\]"
    ):
        cache.check()
    assert cache.host_lengths() == [36, 36]


@pytest.mark.gpu
@pytest.mark.parametrize("stride", [1, 4])
def test_a_captured_verification_keeps_what_the_device_accepts(stride):
    """Speculative tokens in a graph: the device says how many of them stay."""
    cache, eager = (make("cuda", batch=1, selection_stride=stride, dtype=torch.bfloat16) for _ in range(2))
    q, k = (torch.zeros(1, 4, heads, 8, dtype=torch.bfloat16, device="cuda") for heads in (4, 2))
    kept = torch.zeros(1, dtype=torch.int32, device="cuda")

    def verify():
        begin = cache.lengths.clone()
        out = cache.decode(q, k, k)
        cache.truncate(begin + kept)
        return out

    verify()
    cache.reset()
    graph, out = capture(verify)
    for step in range(9):
        q.copy_(rows(1, 4, 4, step, "cuda"))
        k.copy_(rows(1, 4, 2, 50 + step, "cuda"))
        accepted = 1 + step % 4
        kept.fill_(accepted)
        graph.replay()
        cache.advance(accepted)
        assert torch.equal(out, eager.decode(q, k, k))
        eager.truncate([cache.host_lengths()[0]])
        cache.check()
        eager.check()


@pytest.mark.gpu
def test_a_graph_writes_into_no_page_that_others_have():
    cache = make("cuda", batch=2)
    fill(cache, 19)
    cache.fork(0, 1)
    before = [x.clone() for x in cache.layer(1, 0)]
    for wanted, left in (([15, -1], [19, 19]), ([16, -1], [16, 19])):  # two pages of 8 are shared
        cache.truncate(torch.tensor(wanted, dtype=torch.int32, device="cuda"))
        assert cache.lengths.tolist() == left
    with pytest.raises(ValueError, match="sequence 0 was truncated on the device into pages that it shares"):
        cache.check()
    fill(cache, 3, seed=9)
    for old, new in zip(before, cache.layer(1, 0), strict=True):
        assert torch.equal(old, new[:19])


@pytest.mark.gpu
def test_a_refused_cut_of_shared_pages_changes_no_sequence():
    """The device could take tokens of sequence 0 back, and the host refuses sequence 2."""
    cache = make("cuda", batch=3, selection_stride=4)
    fill(cache, 30)
    cache.fork(1, 2)
    before = [x.clone() for x in cache.layer(0, 0)]
    with pytest.raises(ValueError, match="sequence 2 can be truncated to a multiple of selection_stride = 4"):
        cache.truncate([29, -1, 6])
    assert cache.lengths.tolist() == [30, 30, 30]
    cache.check()
    for old, new in zip(before, cache.layer(0, 0), strict=True):
        assert torch.equal(old, new)


# ---- both devices


def test_chunks_ragged_rows_and_drafts(device):
    """A chunk, single tokens, speculative tokens of which some are taken back, and rows that do not count."""
    cache = make(device, selection_stride=4)
    q, k, v = (rows(2, 30, heads, seed, device) for seed, heads in ((1, 4), (2, 2), (3, 2)))
    whole = tree_attention(q, k, v, selection_stride=4, **OPTIONS)
    cache.append(k[:, :11], v[:, :11])
    torch.testing.assert_close(cache.attend(q[:, :11]), whole[:, :11], atol=1e-4, rtol=1e-4)
    drafts = rows(2, 9, 2, 7, device)
    cache.append(drafts, drafts)
    cache.attend(rows(2, 9, 4, 8, device))
    cache.truncate(11)
    cache.append(k[:, 11:13], v[:, 11:13], lengths=[2, 1])
    out = cache.attend(q[:, 11:13], lengths=[2, 1])
    torch.testing.assert_close(out[0], whole[0, 11:13], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out[1, :1], whole[1, 11:12], atol=1e-4, rtol=1e-4)
    assert not out[1, 1].any()
    assert cache.lengths.tolist() == [13, 12]
    cache.check()


def test_eight_threads_with_a_cache_each(device):
    """On a GPU each has a stream of its own."""

    def generate(seed):
        stream = torch.cuda.Stream() if device == "cuda" else None
        with torch.cuda.stream(stream) if stream else nullcontext():
            cache = make(device, selection_stride=4)
            outs = [fill(cache, n, seed=100 * seed + i) for i, n in enumerate((13, 1, 1, 9, 1, 4))]
            cache.truncate(27)
            cache.reorder_([1, 0])
            outs.append(fill(cache, 3, seed=seed))
            if stream:
                stream.synchronize()
        return outs

    alone = [generate(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(generate, range(8)))
    for ours, theirs in zip(alone, together, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_rows_that_a_short_sequence_lacks(device):
    cache = make(device)
    fill(cache, 2)
    out, lse = cache.attend(rows(2, 5, 4, 9, device), return_lse=True)
    assert not out[:, :3].any()
    assert bool((lse[:, :3] == -torch.inf).all())
    assert bool(lse[:, 3:].isfinite().all())


def test_no_tokens_and_no_queries(device):
    cache = make(device, selection_stride=4)
    assert fill(cache, 0).shape == (2, 0, 4, 8)
    fill(cache, 6)
    assert fill(cache, 0).shape == (2, 0, 4, 8)
    assert cache.lengths.tolist() == [6, 6]
    cache.check()


def test_a_step_of_the_module_compiles(device):
    layer = HTreeAttention(32, 4, 2, selection_stride=4, device=device, **OPTIONS)
    x = torch.randn(2, 12, 32, device=device)
    cache, eager = layer.make_cache(2, 30), layer.make_cache(2, 30)
    step = torch.compile(lambda part: layer(part, cache=cache), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for part in x.split((9, 1, 1, 1), dim=1):
            torch.testing.assert_close(step(part), layer(part, cache=eager), atol=1e-5, rtol=1e-5)
    assert cache.lengths.tolist() == [12, 12]


def test_a_compiled_truncation_to_its_own_lengths_takes_nothing(device):
    cache = make(device)
    fill(cache, 9)
    torch.compile(lambda: cache.truncate(cache.lengths), fullgraph=True, backend="aot_eager")()
    assert cache.host_lengths() == [9, 9]
    cache.check()


@pytest.mark.parametrize("length", [5, np.int64(5)], ids=["int", "int64"])
def test_one_number_truncates_every_sequence(length, device):
    cache = make(device)
    fill(cache, 9)
    cache.truncate(length)
    assert cache.host_lengths() == cache.lengths.tolist() == [5, 5]


def test_a_fork_owns_its_open_page(device):
    """Full pages are shared, and what one writes the other does not see."""
    cache = make(device, batch=3, num_pages=9)
    fill(cache, 19)
    cache.free(1)
    cache.free(2)
    cache.fork(0, 1)
    table = cache.block_table.tolist()
    assert table[0][:2] == table[1][:2]
    assert table[0][2] != table[1][2]
    page = cache.num_bytes().used // 4
    assert cache.num_bytes().used == 4 * page == 4 * (cache.k_pool[0].nbytes + cache.v_pool[0].nbytes)
    assert len(cache.pages.free) == 5
    before = [x.clone() for x in cache.layer(0, 0)]
    fill(cache, 3, seed=20)
    for old, new in zip(before, cache.layer(0, 0), strict=True):
        assert torch.equal(old, new[:19])
    assert cache.lengths.tolist() == [22, 22, 3]
    assert not torch.equal(cache.layer(0, 0)[0], cache.layer(1, 0)[0])
    # a truncation into a shared page gets a copy of it
    cache.truncate([12, -1, -1])
    table = cache.block_table.tolist()
    assert table[0][0] == table[1][0]
    assert table[0][1] != table[1][1]
    old = cache.layer(1, 0)[0].clone()
    fill(cache, 4, seed=30)
    assert torch.equal(cache.layer(1, 0)[0][:22], old)


def test_a_fork_without_a_free_page_says_so(device):
    cache = make(device, batch=2, num_pages=3)
    q, k, v = (rows(2, 19, heads, seed, device) for seed, heads in enumerate((4, 2, 2)))
    cache.decode(q, k, v, [19, 0])
    table = cache.block_table.tolist()
    with pytest.raises(OutOfPagesError, match=r"TreeKVCache\.fork: 1 more pages of 8 tokens are needed"):
        cache.fork(0, 1)
    assert cache.block_table.tolist() == table
    assert cache.host_lengths() == [19, 0]


def test_a_state_goes_into_another_cache(device):
    cache = make(device, selection_stride=4)
    fill(cache, 18)
    cache.fork(0, 1)
    other = make(device, selection_stride=4)
    fill(other, 3, seed=40)
    other.load_state_dict(cache.state_dict())
    for x, y in zip((cache, other), (other, cache), strict=True):
        assert x.lengths.tolist() == y.lengths.tolist()
    assert torch.equal(fill(cache, 5, seed=50), fill(other, 5, seed=50))
    assert other.num_bytes().used == cache.num_bytes().used
    again = copy.deepcopy(cache)
    assert torch.equal(fill(cache, 1, seed=60), fill(again, 1, seed=60))


def test_bytes_and_repr(device):
    cache = make(device)
    assert cache.num_bytes()[:2] == (0, 0)
    fill(cache, 9)
    assert cache.num_bytes().tokens == 18
    assert cache.num_bytes().used == 4 * (cache.k_pool[0].nbytes + cache.v_pool[0].nbytes)
    assert cache.num_bytes().allocated > 10 * cache.num_bytes().used // 4
    assert "compression_rate=4" in repr(cache)
    assert "page_size=8" in repr(cache)


@pytest.mark.parametrize("options", [{}, {"selection_stride": 4}, {"leaf_bits": 8}], ids=str)
@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_a_cache_without_numbers(kind, options):
    """It says what a cache takes, and gives the shapes of results."""
    # a table of rotations is made on CUDA alone, so the bytes are those of the CPU only without one
    sizes: dict[str, Any] = {**OPTIONS, "rope_base": None, "page_size": 8, **options}
    real = TreeKVCache(2, 2, 64, 40, device="cpu", **sizes)
    device = "meta" if kind == "meta" else "cpu"
    with FakeTensorMode() if kind == "fake" else nullcontext():
        cache = TreeKVCache(2, 2, 64, 40, device=device, **sizes)
        k = torch.zeros(2, 9, 2, 64, dtype=torch.bfloat16, device=device)
        cache.append(k, k)
        assert cache.attend(k).shape == k.shape
        cache.truncate([7, -1])
        assert cache.host_lengths() == [7, 9]
        cache.reorder_([1, 1])
    assert repr(cache) == repr(real).replace("'cpu'", f"'{device}'")
    assert cache.num_bytes() == (0, 0, real.num_bytes().allocated)
    if kind == "fake":
        return  # what needs a number is refused by the mode
    for name, call in (
        ("check", cache.check),
        ("layer", lambda: cache.layer(0, 0)),
        ("state_dict", cache.state_dict),
        ("load_state_dict", lambda: cache.load_state_dict(real.state_dict())),
        ("to", lambda: cache.to("cpu")),
    ):
        with pytest.raises(
            DeviceError, match=rf"TreeKVCache\.{name}: cache must be on a device .*, got meta"
        ):
            call()
    with pytest.raises(DeviceError, match=r"TreeKVCache\.to: device must be one that holds .*, got meta"):
        real.to("meta")
