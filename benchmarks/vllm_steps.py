"""A layer's step on vLLM's pages, as the backend for vLLM makes it, beside a ``TreeKVCache`` with the same tokens.

Run: ``python -m benchmarks.vllm_steps --csv PATH`` on a GPU with 80 GB; ``--quick`` measures with few repetitions,
``--device cpu`` a small setting on the CPU. H = 32, H_kv = 4, K = V = 128, bf16, pages of 256, random normal inputs.
Steps of the same number of rows in each sequence are replays of a graph (calls on a CPU), a prompt in chunks is calls.
Layers with memory of their own take turns, so that pages come from memory. A step of one row is repeated on vLLM's
pages, while a cache goes on to the next token: so its token is none that finishes a node. Before it is timed, a step's
rows are compared with those of the cache, bit by bit. Figures are reported, never asserted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import timing
from benchmarks.harness.plain_rows import Row, make_parser, measure_each, parse_for_gpu, where
from htree_ops import TreeKVCache, TreeOptions
from htree_ops.integrations.vllm.pages import LayerPools, page_sizes, pools_of, table_width
from htree_ops.integrations.vllm.steps import Index, Step, Steps, attend_step
from htree_ops.ops.tree_cache import tree_cache_append_
from htree_ops.tuning.clock import Call, clock_for

#: How nodes are chosen: options, and the width of an index.
CHOICES: dict[str, tuple[TreeOptions, int]] = {
    "span 2": (TreeOptions(selection_span=2, rope_base=None), 0),
    "index": (TreeOptions(top_k=128, rope_base=None).beside_index(), 32),
}
#: Calls in a graph, at least.
GRAPH_CALLS = 20


@dataclass(frozen=True, kw_only=True)
class Setting:
    """B sequences of T tokens, the last ``rows`` of which are new; with ``chunk`` a prompt in steps of so many rows."""

    choice: str
    B: int
    T: int
    rows: int = 1
    chunk: int = 0
    page: int = 256
    H: int = 32
    H_kv: int = 4
    D: int = 128


SETTINGS = {
    "cuda": (
        *(Setting(choice=choice, B=B, T=32_760) for choice in CHOICES for B in (1, 8, 64)),
        *(Setting(choice=choice, B=8, T=32_760, rows=5) for choice in CHOICES),
        *(Setting(choice=choice, B=B, T=32_760, rows=128) for choice in CHOICES for B in (1, 8)),
        *(Setting(choice=choice, B=1, T=65_536, chunk=4096) for choice in CHOICES),
    ),
    "cpu": (
        *(Setting(choice=choice, B=2, T=2048, rows=2, H=4, H_kv=2, D=64) for choice in CHOICES),
        *(Setting(choice=choice, B=1, T=2048, chunk=512, H=4, H_kv=2, D=64) for choice in CHOICES),
    ),
}


class Rows:
    """Random rows of a layer's sequences, [B, n, heads, .]: k, v, index keys, and queries if they attend."""

    def __init__(self, setting: Setting, n: int, device: str, seed: int, *, attends: bool = True) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        kv, width, dtype = setting.H_kv, CHOICES[setting.choice][1], dtype_on(device)

        def rows(heads: int, channels: int) -> Tensor:
            form = (setting.B, n, heads, channels)
            return torch.randn(form, generator=generator, device=device, dtype=dtype)

        self.k, self.v = rows(kv, setting.D), rows(kv, setting.D)
        self.index_key = rows(kv, width) if width else None
        self.q = rows(setting.H, setting.D) if attends else self.k[:, :0]
        self.index_query = rows(kv, width) if width and attends else None

    def of(self, new: slice) -> tuple[Tensor, Tensor, Tensor, Index | None]:
        """q, k, v and an index of some tokens."""
        query, key = self.index_query, self.index_key
        index = None if query is None or key is None else (query[:, new], key[:, new])
        return self.q[:, new], self.k[:, new], self.v[:, new], index


def dtype_on(device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.bfloat16


class Pages:
    """A layer's memory as vLLM binds it, with pages in a random order."""

    def __init__(self, setting: Setting, device: str, *, takes_prompts: bool) -> None:
        self.setting = setting
        self.options, self.width = CHOICES[setting.choice]
        place, page = torch.device(device), setting.page
        self.columns = table_width(setting.T, page)
        held = -(-setting.T // page)
        num_pages = 1 + setting.B * held
        sizes = page_sizes(self.options, page, self.columns, self.width)
        stride = sizes.elements(setting.H_kv, setting.D, setting.D, dtype_on(device))
        memory = torch.empty(num_pages * stride, dtype=dtype_on(device), device=place)
        form = (num_pages, setting.H_kv, page, 2 * setting.D)
        self.memory = memory.as_strided(form, (stride, page * 2 * setting.D, 2 * setting.D, 1))
        self.pools: LayerPools = pools_of(self.memory, sizes, setting.D, setting.D)
        order = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(0)).add(1)
        self.table = torch.zeros(setting.B, self.columns, dtype=torch.int32)
        self.table[:, :held] = order.view(setting.B, held)
        self.table = self.table.to(place)
        self.takes_prompts = takes_prompts

    def step(self, length: int, rows: int) -> Step:
        """The last ``rows`` of sequences of ``length`` tokens."""
        batch, page, place = self.setting.B, self.setting.page, self.table.device
        cu_rows = torch.arange(0, (batch + 1) * rows, rows, dtype=torch.int32)
        lengths = torch.full((batch,), length, dtype=torch.int32)
        token = torch.arange(length - rows, length, device=place)
        slots = (self.table[:, token // page].long() * page + token % page).flatten()
        on_host = (cu_rows.tolist(), lengths.tolist())
        steps = Steps(batch, batch * rows, page, self.options, place, takes_prompts=self.takes_prompts)
        given = (cu_rows.to(place), lengths.to(place), self.table, slots)
        return steps.make(batch * rows, rows, *given, on_host)

    def fill(self, rows: Rows) -> None:
        """Appends the first tokens of every sequence."""
        (batch, tokens), place = rows.k.shape[:2], self.table.device
        none = torch.zeros(batch, dtype=torch.int32, device=place)
        cu = torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=place)
        tree_cache_append_(
            self.pools.keys,
            self.pools.values,
            rows.k.flatten(0, 1),
            rows.v.flatten(0, 1),
            self.table,
            none,
            cu,
            page_size=self.setting.page,
            options=self.options,
        )
        if rows.index_key is not None and self.pools.index_keys is not None:
            token = torch.arange(tokens, device=place)
            page = self.table[:, token // self.setting.page].long()
            self.pools.index_keys[page, :, (token % self.setting.page).expand_as(page)] = rows.index_key

    def attend(self, step: Step, out: Tensor, q: Tensor, k: Tensor, v: Tensor, index: Index | None) -> Tensor:
        """The step of a layer."""
        flat = None if index is None else (index[0].flatten(0, 1), index[1].flatten(0, 1))
        query, key, value = (x.flatten(0, 1) for x in (q, k, v))
        attend_step(self.options, self.memory, query, key, value, step, out, flat)
        return out


def cache_of(setting: Setting, device: str, prompt_bytes: int | None = None) -> TreeKVCache:
    """An empty cache whose pages hold as much."""
    options, width = CHOICES[setting.choice]
    return TreeKVCache(
        setting.B,
        setting.H_kv,
        setting.D,
        table_width(setting.T, setting.page) * setting.page + GRAPH_CALLS * setting.rows,
        page_size=setting.page,
        options=options,
        index_dim=width,
        index_dtype=dtype_on(device) if width else None,
        prompt_bytes=prompt_bytes,
        dtype=dtype_on(device),
        device=device,
    )


def repeated(calls: Sequence[Call], back: Sequence[Call], device: str) -> tuple[Call, int]:
    """(a graph, or on a CPU calls, of all of them again and again and then what takes their tokens back; how many)."""
    count = -(-GRAPH_CALLS // len(calls))

    def run() -> None:
        for _ in range(count):
            for call in calls:
                call()
        for call in back:
            call()

    if device == "cpu":
        return run, count * len(calls)
    run()  # what is made once
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay, count * len(calls)


def steps_of(setting: Setting, device: str) -> tuple[tuple[Call, int], tuple[Call, int]]:
    """Steps of the backend and of caches, whose rows were compared."""
    layer_bytes = setting.B * setting.T * setting.H_kv * 2 * setting.D * dtype_on(device).itemsize
    mine: list[Call] = []
    theirs: list[Call] = []
    back: list[Call] = []
    for layer in range(timing.num_input_sets(layer_bytes) if device == "cuda" else 1):
        before = setting.T - setting.rows
        pages, cache = Pages(setting, device, takes_prompts=False), cache_of(setting, device)
        held = Rows(setting, before, device, 2 * layer, attends=False)
        pages.fill(held)
        cache.append(held.k, held.v, index_key=held.index_key)
        q, k, v, index = Rows(setting, setting.rows, device, 2 * layer + 1).of(slice(None))
        step = pages.step(setting.T, setting.rows)
        out = torch.empty(setting.B * setting.rows, setting.H, setting.D, dtype=q.dtype, device=device)
        mine.append(partial(pages.attend, step, out, q, k, v, index))
        theirs.append(partial(cache.decode, q, k, v, index=index))
        taken = torch.full((setting.B,), before, dtype=torch.int32, device=device)
        found = theirs[-1]()
        assert isinstance(found, Tensor)
        if not torch.equal(mine[-1](), found.flatten(0, 1)):
            raise RuntimeError(f"the rows of vLLM's pages are not those of the cache: {setting}")
        cache.truncate(taken)
        back.append(partial(cache.truncate, taken))
    return repeated(mine, (), device), repeated(theirs, back, device)


def prompts_of(setting: Setting, device: str, prompt_bytes: int | None) -> tuple[Call, Call]:
    """All chunks of a prompt, by the backend and by a cache, whose last rows were compared."""
    rows = Rows(setting, setting.T, device, 0)
    pages = Pages(setting, device, takes_prompts=True)
    cache = cache_of(setting, device, prompt_bytes)
    out = torch.empty(setting.chunk, setting.H, setting.D, dtype=rows.q.dtype, device=device)
    found: list[Tensor] = []

    def chunks() -> Iterator[tuple[int, tuple[Any, ...]]]:
        for end in range(setting.chunk, setting.T + 1, setting.chunk):
            yield end, rows.of(slice(end - setting.chunk, end))

    steps = [pages.step(end, setting.chunk) for end, _ in chunks()]  # an engine makes one for all layers

    def by_pages() -> None:
        for step, (_, new) in zip(steps, chunks(), strict=True):
            pages.attend(step, out, *new)

    def by_cache() -> None:
        cache.reset()
        found.clear()
        for _, (q, k, v, index) in chunks():
            last = cache.decode(q, k, v, index=index)
        assert isinstance(last, Tensor)
        found.append(last)

    by_pages()
    by_cache()
    if not torch.equal(out, found[0][0]):
        raise RuntimeError(f"the rows of vLLM's pages are not those of the cache: {setting}")
    return by_pages, by_cache


def measure(setting: Setting, device: str, effort: timing.Effort) -> Iterator[Row]:
    """A row; of a prompt two, for a cache that keeps copies for the next chunk is another comparison.

    Microseconds of a layer's step, or of all steps of a prompt; ``ratio`` is the backend's by the cache's.
    """
    clock = clock_for(device)

    def row(what: str, mine: tuple[Call, int], theirs: tuple[Call, int]) -> Row:
        calls = {"pages": [mine[0]], "cache": [theirs[0]]}
        times = timing.measure_undisturbed(calls, clock, effort)
        pages_us, cache_us = (
            times[name].median_us / count for name, (_, count) in (("pages", mine), ("cache", theirs))
        )
        return {
            **where(device),
            "what": what,
            "choice": setting.choice,
            "B": setting.B,
            "T": setting.T,
            "rows": setting.chunk or setting.rows,
            "pages_us": pages_us,
            "cache_us": cache_us,
            "ratio": pages_us / cache_us,
        }

    with torch.no_grad():
        if setting.chunk == 0:
            yield row("step", *steps_of(setting, device))
            return
        for what, prompt_bytes in (("prompt", 0), ("prompt beside kept copies", None)):
            mine, theirs = prompts_of(setting, device, prompt_bytes)
            yield row(what, (mine, 1), (theirs, 1))


def name_of(setting: Setting) -> str:
    rows = f"chunks of {setting.chunk}" if setting.chunk else f"{setting.rows} rows"
    return f"{setting.choice} B={setting.B} T={setting.T} {rows}"


def main(argv: Sequence[str] | None = None, settings: Sequence[Setting] | None = None) -> int:
    """Prints the table and writes it where ``--csv`` says."""
    parser = make_parser(
        "a layer's step on vLLM's pages, beside a tree cache", quick="few repetitions", cpu=True
    )
    arguments = parse_for_gpu(parser, argv)
    effort = timing.QUICK if arguments.quick else timing.Effort()
    chosen = settings or SETTINGS[arguments.device]
    return measure_each(chosen, name_of, lambda x: measure(x, arguments.device, effort), arguments.csv)


if __name__ == "__main__":
    sys.exit(main())
