"""Problems of the tree cache (docs/semantics/tree_cache.md §7): filled pages, and the last tokens' queries."""

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor

from htree_ops.ops.tree_attention.options import NAMES, Importance
from htree_ops.ops.tree_cache.cache import TreeKVCache
from htree_ops.ops.tree_cache.functions import (
    cache_layers,
    page_rows,
    tree_cache_append_,
    tree_cache_append_packed_,
)
from tests.support.cases import Case, normal
from tests.support.tree_attention_cases import frequencies
from tests.support.tree_attention_problem import OptionFields, packed


@dataclass(frozen=True, kw_only=True)
class TreeCacheCase(OptionFields, Case):
    """Sequences of ``lengths`` tokens, of which the last ``queries`` attend.

    ``capacity`` is what a sequence's pages can hold, where that is more than the longest of them needs.
    """

    reads_a_part: ClassVar[bool] = True

    lengths: tuple[int, ...]
    queries: tuple[int, ...]
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    page_size: int
    compression_rate: int = 16
    max_top_nodes: int = 8192
    top_k: int = 512
    ring: int | None = None
    capacity: int = 0

    @property
    def max_pages(self) -> int:
        return max(1, -(-max(*self.lengths, self.capacity) // self.page_size))

    @property
    def layers(self) -> int:
        return cache_layers(self.max_pages * self.page_size, self.compression_rate, self.max_top_nodes)

    def page_options(self) -> dict[str, Any]:
        """Keywords of the references of ``tree_cache_append_`` and ``tree_cache_append_packed_``."""
        return {
            "page_size": self.page_size,
            "compression_rate": self.compression_rate,
            "max_top_nodes": self.max_top_nodes,
            "selection_span": self.selection_span,
        }

    def options(self) -> dict[str, Any]:
        """Keywords of ``tree_cache_append_``, ``tree_cache_append_packed_`` and ``tree_cache_attention``."""
        return {"page_size": self.page_size, **self.keywords()}

    def tokens(self, device: str | torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
        """k and v of all tokens, packed one sequence after the other."""
        rows = sum(self.lengths)
        return (
            normal((rows, self.kv_heads, self.key_dim), self.dtype, device, seed + 1),
            normal((rows, self.kv_heads, self.value_dim), self.dtype, device, seed + 2),
        )

    def last_queries(self, device: str | torch.device, seed: int = 0) -> Tensor:
        """q of the last tokens, packed."""
        return normal((sum(self.queries), self.heads, self.key_dim), self.dtype, device, seed)

    def sequences(self, device: str | torch.device, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of all tokens."""
        return (replace(self, queries=self.lengths).last_queries(device, seed), *self.tokens(device, seed))

    def empty_pools(self, device: str | torch.device, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """k_pool and v_pool of NaN, and a block table whose pages stand in a random order."""
        num_pages = len(self.lengths) * self.max_pages + 1
        key_rows, value_rows = page_rows(
            self.page_size, self.layers, self.compression_rate, self.selection_span
        )
        pools = [
            torch.full((num_pages, self.kv_heads, rows, width), torch.nan, dtype=self.dtype, device=device)
            for rows, width in ((key_rows, self.key_dim), (value_rows, self.value_dim))
        ]
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed), device="cpu")
        table = order[: num_pages - 1].view(len(self.lengths), self.max_pages).int()
        return pools[0], pools[1], table.to(device)

    def make_inputs(self, device: str | torch.device, seed: int = 0) -> tuple[Any, ...]:
        rows = self.last_queries(device, seed)
        k_pool, v_pool, table = filled_pools(self, *self.tokens(device, seed), seed)
        lists: tuple[Tensor | None, Tensor | None] = (None, None)
        if self.ring is not None:
            shape = (len(self.lengths), self.ring)
            empty = torch.full(shape, -1, dtype=torch.int32, device=device)
            wide = (*shape, self.layers, self.kv_heads, self.top_k)
            lists = (torch.full(wide, -1, dtype=torch.int32, device=device), empty)
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=device)
        return (rows, k_pool, v_pool, table, lengths, offsets(self.queries, device), *lists)

    def rows_read(self) -> tuple[int, int]:
        """Rows of keys and of values that the selection reads, each once for a K/V head."""
        rate, below = self.compression_rate, self.top_k * self.compression_rate
        nodes = means = 0
        for length, n in zip(self.lengths, self.queries, strict=True):
            layers = cache_layers(max(1, length), rate, self.max_top_nodes)
            for layer in range(layers):
                seen = max(below, self.max_top_nodes) if layer + 1 == layers else below
                count = min(seen, -(-length // rate**layer))
                nodes += n * count
                if layer > 0 and self.selection_span is not None:
                    means += n * min(count * rate**layer, length) // self.selection_span
        return (nodes + means) * self.kv_heads, nodes * self.kv_heads

    def bytes(self) -> int:
        """What :meth:`rows_read` counts, and queries and outputs."""
        size = self.dtype.itemsize
        keys, values = self.rows_read()
        heads = sum(self.queries) * self.heads
        return size * ((keys + heads) * self.key_dim + (values + heads) * self.value_dim)

    def flops(self) -> int:
        keys, values = self.rows_read()
        return 2 * (keys * self.key_dim + values * self.value_dim) * self.heads // self.kv_heads


def offsets(counts: tuple[int, ...], device: str | torch.device) -> Tensor:
    """int32 [B + 1]: where the rows of each sequence begin."""
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)


def filled_pools(case: TreeCacheCase, k: Tensor, v: Tensor, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """The pools after one append of all tokens, and the block table."""
    k_pool, v_pool, table = case.empty_pools(k.device, seed)
    none = torch.zeros(len(case.lengths), dtype=torch.int32, device=k.device)
    tree_cache_append_(k_pool, v_pool, k, v, table, none, offsets(case.lengths, k.device), **case.options())
    return k_pool, v_pool, table


def empty_packed_pools(
    case: TreeCacheCase, bits: int, device: str | torch.device, seed: int = 0
) -> tuple[dict[str, Any], Tensor]:
    """What ``tree_cache_append_packed_`` writes, by name and filled with what shows, and a block table.

    The tails hold two nodes.
    """
    k_pool, v_pool, table = case.empty_pools(device, seed)
    pages, rate = (len(k_pool), case.kv_heads, case.page_size), case.compression_rate
    pools = {"k_pool": k_pool[:, :, case.page_size :], "v_pool": v_pool[:, :, case.page_size :]}
    widths = {"k": case.key_dim, "v": case.value_dim}
    for name, width in widths.items():
        pools[f"{name}_codes"] = torch.full((*pages, width * bits // 8), 7, dtype=torch.uint8, device=device)
        pools[f"{name}_scales"] = torch.full(pages, torch.nan, dtype=F16, device=device)
    for name, width in widths.items():
        tail = (len(case.lengths), case.kv_heads, 2 * rate, width)
        pools[f"{name}_tail"] = torch.full(tail, torch.nan, dtype=case.dtype, device=device)
    return {name: x.contiguous() for name, x in pools.items()}, table


def filled_packed_pools(
    case: TreeCacheCase, bits: int, k: Tensor, v: Tensor, seed: int = 0
) -> tuple[dict[str, Any], Tensor]:
    """The same after one append of all tokens."""
    pools, table = empty_packed_pools(case, bits, k.device, seed)
    none = torch.zeros(len(case.lengths), dtype=torch.int32, device=k.device)
    new: dict[str, Any] = {"k": k, "v": v, "cu_new": offsets(case.lengths, k.device)}
    tree_cache_append_packed_(**pools, **new, block_table=table, lengths=none, **case.options())
    return pools, table


F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
_SMALL: dict[str, Any] = {
    "heads": 4, "kv_heads": 2, "key_dim": 8, "value_dim": 6, "compression_rate": 4, "max_top_nodes": 12, "top_k": 4,
    "page_size": 8,
}  # fmt: skip
#: The top has more nodes than a list has children: rows of up to 31 tokens are dense, of up to 124 have two layers.
_OPEN: dict[str, Any] = {"max_top_nodes": 31}
_ODD: dict[str, Any] = {"page_size": 9, "compression_rate": 3, "max_top_nodes": 5, "top_k": 2}
_MODEL: dict[str, Any] = {"page_size": 256, "max_top_nodes": 128, "top_k": 8}
SPANS: list[tuple[int, Importance]] = [(1, "lse_causal"), (2, "lse_causal"), (4, "exp_joint")]


def _heads(heads: int, kv_heads: int, key_dim: int, value_dim: int | None = None) -> dict[str, Any]:
    sizes = {"heads": heads, "kv_heads": kv_heads, "key_dim": key_dim}
    return sizes | {"value_dim": key_dim if value_dim is None else value_dim}


def _small(
    name: str, lengths: tuple[int, ...], queries: tuple[int, ...], dtype: torch.dtype = F32, **others: Any
) -> TreeCacheCase:
    return TreeCacheCase(name=name, dtype=dtype, lengths=lengths, queries=queries, **(_SMALL | others))


CASES = [
    _small("decode", (37, 1, 64), (1, 1, 1)),
    _small("ragged", (21, 0, 9, 50), (4, 0, 9, 1)),
    _small("stride", (40, 29), (16, 9), selection_stride=4, ring=4),
    _small("ring", (40, 29), (9, 9), ring=2),
    _small("joint", (60,), (7,), importance="exp_joint"),
    _small("next", (60, 41), (7, 2), open_next=True),
    _small("next, span 2, stride", (61, 38), (9, 3), selection_span=2, selection_stride=4, ring=4, open_next=True),
    _small("plain", (60,), (3,), rope_base=None),
    _small("inv_freq", (60, 37), (3, 1), inv_freq=(1.0, -0.3, 0.01, 0.0)),
    *(
        _small(f"span {span}", (61, 38), (9, 3), selection_span=span, importance=importance, ring=4)
        for span, importance in SPANS
    ),
    _small("open", (130, 31, 70), (9, 3, 1), **_OPEN),
    # 32 ends the dense rows: leader 28 has one layer, and so have its followers
    _small("open, stride", (40, 128, 30), (12, 13, 2), selection_stride=4, ring=4, **_OPEN),
    _small(
        "open, span 2, next, stride", (135, 90), (14, 2), selection_span=2, selection_stride=2, ring=4, open_next=True,
        **_OPEN,
    ),
    _small("open, joint, span 4", (126, 33), (3, 3), selection_span=4, importance="exp_joint", **_OPEN),
    _small("open, k = 1, pages for more", (64, 9), (2, 9), capacity=300, max_top_nodes=7, top_k=1),
    _small("open, all dense", (61,), (5,), max_top_nodes=(1 << 31) - 1),
    _small("odd rates", (100, 77), (5, 2), **_heads(3, 1, 6, 5), **_ODD),
    _small(
        "wide", (700, 300), (2, 3), **_heads(16, 1, 64), page_size=64, max_top_nodes=64, top_k=8, compression_rate=16
    ),
    *(
        _small(
            name, (1500, 1030), (1, 2), dtype, **_heads(8, 2, 64), **(_MODEL | {"max_top_nodes": top_nodes}),
            compression_rate=16,
        )
        for name, dtype, top_nodes in (
            ("model", F32, 128),
            ("model", F16, 128),
            ("model", BF16, 128),
            ("model, open", F32, 200),
        )
    ),
]  # fmt: skip


_PACKED = _heads(4, 2, 64, 128)

#: Tokens in 8 or 4 bits.
PACKED_CASES = [
    _small("decode", (37, 1, 64), (1, 1, 1), **_PACKED),
    _small("ragged", (21, 0, 9, 50), (4, 0, 9, 1), F16, **_PACKED),
    _small("stride", (40, 29), (16, 9), selection_stride=4, ring=4, **_PACKED),
    _small("span", (61, 38), (9, 3), BF16, selection_span=2, **_PACKED),
    _small("one layer", (11, 5), (3, 5), BF16, **_PACKED),
    _small("open", (130, 40), (6, 12), selection_stride=4, ring=4, **_PACKED, **_OPEN),
    _small(
        "odd rates", (100, 77), (5, 2), **_heads(1, 1, 192, 64), **_ODD, rope_base=None, importance="exp_joint"
    ),
    *(
        _small(f"model, {dim}", (1500, 1030), (1, 2), dtype, **_heads(16, 2, dim), **_MODEL, compression_rate=16)
        for dim, dtype in ((64, BF16), (128, F16), (512, F32))
    ),
]  # fmt: skip


def _decoded(
    name: str,
    dtype: torch.dtype = BF16,
    lengths: tuple[int, ...] = (700, 300),
    queries: tuple[int, ...] | None = None,
    **others: Any,
) -> TreeCacheCase:
    sizes: dict[str, Any] = {**_heads(8, 1, 64), "page_size": 64, "max_top_nodes": 64, "top_k": 8}
    queries = (1,) * len(lengths) if queries is None else queries
    return TreeCacheCase(name=name, dtype=dtype, lengths=lengths, queries=queries, **(sizes | others))


_LARGE_HEADS: dict[str, Any] = {"key_dim": 128, "value_dim": 128}
_SERVED: dict[str, Any] = {**_heads(16, 2, 128), "max_top_nodes": 8192}

#: Calls that the decode kernel takes on Hopper.
DECODE_CASES = [
    _decoded("three layers", BF16, (1500, 1030), (2, 1)),
    _decoded("half, 128, G = 16", F16, heads=16, **_LARGE_HEADS),
    _decoded("128, G = 3", heads=6, kv_heads=2, **_LARGE_HEADS),
    _decoded("ragged", F16, (700, 0, 5, 129), (3, 0, 2, 7)),
    _decoded("plain", rope_base=None),
    _decoded("inv_freq", inv_freq=frequencies(64)),
    _decoded("inv_freq, 128, span 2", F16, inv_freq=frequencies(128), selection_span=2, **_LARGE_HEADS),
    _decoded("joint", importance="exp_joint"),
    _decoded("stride", BF16, (600, 429), (9, 5), selection_stride=4, ring=4),
    _decoded("ring", queries=(3, 5), ring=2),
    _decoded("span 1", selection_span=1),
    _decoded("span 4", selection_span=4, ring=4, importance="exp_joint"),
    _decoded("span 8, stride", F16, selection_span=8, selection_stride=2, queries=(5, 3), **_LARGE_HEADS),
    _decoded("next", open_next=True),
    _decoded("next, stride, span 2", selection_span=2, selection_stride=16, queries=(30, 20), open_next=True),
    _decoded("next, three layers", F16, (1500, 1030), (2, 1), open_next=True, **_LARGE_HEADS),
    _decoded("three layers, span 4", BF16, (1500, 1030), (2, 1), selection_span=4),
    _decoded("span 2, large pages", BF16, (1500, 700), selection_span=2, page_size=256, **_LARGE_HEADS),
    _decoded("wide lists", BF16, (6000, 33), max_top_nodes=600, top_k=40),
    _decoded("as served", BF16, (20000,), **_SERVED, top_k=512),
    _decoded("k = 500", BF16, (10000, 8100), max_top_nodes=8000, top_k=500),
    _decoded("k = 600", BF16, (11000, 9700), max_top_nodes=9600, top_k=600),
    _decoded("k = 1024, 128", F16, (17000,), max_top_nodes=16384, top_k=1024, **_LARGE_HEADS),
    _decoded("k = 1000, span 2", BF16, (16500,), max_top_nodes=16000, top_k=1000, selection_span=2),
    # Tops of more nodes than a list has children: dense rows, rows of two and of three layers; more slots at the top
    # than below; the widest top, and the first that the kernel leaves to the general ones.
    _decoded("open", BF16, (5000, 300, 700), (2, 3, 1), max_top_nodes=300),
    _decoded("open, 128, G = 16", F16, (700, 3000), heads=16, max_top_nodes=520, **_LARGE_HEADS),
    _decoded("open, plain", BF16, (1500, 1030), max_top_nodes=1024, rope_base=None),
    _decoded("open, stride", BF16, (309, 620, 5000), (12, 7, 20), max_top_nodes=301, selection_stride=4, ring=4),
    _decoded("open, next, stride", BF16, (900, 400), (9, 5), max_top_nodes=208, selection_stride=16, open_next=True),
    _decoded("open, span 2", BF16, (5000, 700), (2, 1), max_top_nodes=300, selection_span=2, **_LARGE_HEADS),
    _decoded(
        "open, span 4, stride, joint", F16, (5000, 309), (9, 12), max_top_nodes=301, selection_stride=2,
        selection_span=4, importance="exp_joint",
    ),
    _decoded("open, as served", BF16, (20000, 8000), **_SERVED, top_k=128, page_size=256),
    _decoded("open, 1024 slots", F16, (17000, 16384), max_top_nodes=16384, top_k=64),
    _decoded("open, more slots", F16, (17000, 16400), max_top_nodes=16400, top_k=64),
    _decoded("open, many rows", BF16, (700, 3000), (90, 50), max_top_nodes=520),
    # A choice among nodes of many span means, then one in a list; and tiles of span means that pages cut.
    _decoded("three choices, span 4", BF16, (5000, 2600), selection_span=4),
    _decoded("three choices, span 2, 128", F16, (5000, 257), selection_span=2, **_LARGE_HEADS),
    _decoded("pages of 48, span 2", BF16, (3000, 700), selection_span=2, page_size=48),
    _decoded("pages of 48, span 8", BF16, (6000, 700), (2, 2), selection_span=8, page_size=48),
    # More rows than a GPU takes at once, so that the last of them have a launch of their own.
    _decoded("many rows", queries=(90, 50)),
    _decoded(
        "many rows, stride, span 2, 128", F16, queries=(91, 52), selection_stride=4, selection_span=2, **_LARGE_HEADS
    ),
    _decoded(
        "many rows, k = 500", BF16, (10000, 8100), (9, 8), max_top_nodes=8000, top_k=500, heads=16, kv_heads=2
    ),
    # Every kernel that is compiled.
    *(
        _decoded(f"{size}, G = {group}", dtype, heads=group, key_dim=size, value_dim=size)
        for dtype in (F16, BF16)
        for size in (64, 128)
        for group in (8, 16)
    ),
    *(
        _decoded(f"{size}, span 2", dtype, key_dim=size, value_dim=size, selection_span=2)
        for dtype in (F16, BF16)
        for size in (64, 128)
    ),
]  # fmt: skip


def _served(name: str, batch: int, length: int, **others: Any) -> TreeCacheCase:
    """One token for each of ``batch`` sequences of ``length`` tokens, 32 heads of 128 on 4 K/V heads."""
    sizes: dict[str, Any] = {**_heads(32, 4, 128), "page_size": 256}
    return TreeCacheCase(
        name=name, dtype=BF16, lengths=(length,) * batch, queries=(1,) * batch, **(sizes | others)
    )


#: Decoding with one graph per layer in mind: a long sequence, a longer one, batches, a narrow selection, span means,
#: shorter ones, and one of these in pages for a long one, which must not cost more than in pages of its own.
BENCHMARK_CASES = {
    "cuda": [
        _served("B=1 T=131072", 1, 1 << 17),
        _served("B=1 T=1048576", 1, 1 << 20),
        _served("B=8 T=131072", 8, 1 << 17),
        _served("B=64 T=131072", 64, 1 << 17),
        _served("B=1 T=131072 k=128", 1, 1 << 17, top_k=128, max_top_nodes=2048),
        _served("B=1 T=1048576 k=128", 1, 1 << 20, top_k=128, max_top_nodes=2048),
        _served("B=1 T=131072 span=4", 1, 1 << 17, selection_span=4),
        _served("B=1 T=1048576 span=4", 1, 1 << 20, selection_span=4),
        _served("B=1 T=131072 span=2", 1, 1 << 17, selection_span=2),
        _served("B=1 T=1048576 span=2", 1, 1 << 20, selection_span=2),
        _served("B=1 T=131072 kv=8", 1, 1 << 17, kv_heads=8),
        _served("B=2 T=131072", 2, 1 << 17),
        _served("B=2 T=131072 kv=8", 2, 1 << 17, kv_heads=8),
        _served("B=1 T=8192", 1, 1 << 13),
        _served("B=1 T=8192 span=2", 1, 1 << 13, selection_span=2),
        _served("B=1 T=32768", 1, 1 << 15),
        _served("B=1 T=32768 span=2", 1, 1 << 15, selection_span=2),
        _served("B=1 T=8192 in 1048576", 1, 1 << 13, capacity=1 << 20),
    ],
    "cpu": [
        _small(
            "B=1 T=32768", (1 << 15,), (1,), **_heads(4, 1, 64), page_size=256, max_top_nodes=1024, top_k=64,
            compression_rate=16,
        )
    ],
}  # fmt: skip


#: What a call of ``_tree_cache_attention`` may leave out where a Python function makes it.
NOT_GIVEN = (
    "q_lengths",
    "rope_table",
    "k_codes",
    "k_scales",
    "v_codes",
    "v_scales",
    "index_query",
    "index_pool",
    "index_scales",
)


def op_options(options: dict[str, Any]) -> dict[str, Any]:
    """Keywords of an op from those of its function: the options of the tree are packed."""
    of_tree = {name: value for name, value in options.items() if name in NAMES}
    others = {name: value for name, value in options.items() if name not in NAMES}
    return others | (
        dict(zip(("option_ints", "option_floats"), packed(**of_tree), strict=True)) if of_tree else {}
    )


def op_calls(device: str) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments of a small call of every op of the family, and options as :func:`op_options` takes them."""
    case = replace(CASES[2], lengths=(21, 9), queries=(5, 9))
    inputs = case.make_inputs(device)
    k_pool, v_pool, table, lengths = inputs[1:5]
    _, k, v = case.sequences(device)
    prompt = replace(case, lengths=(21, 21), queries=(13, 13))
    prompt_q, *prompt_pools = prompt.make_inputs(device)[:4]
    copies = torch.empty(
        0, dtype=torch.uint8, device=device
    )  # the general kernels and those of the CPU read none
    new = (lengths - 5, offsets((3, 2), device), None, 4)
    sizes = (prompt.heads, 3, 21, 30)
    of_bytes = {name: x for name, x in prompt.options().items() if name != "page_size"}
    return {
        "_tree_cache_prompt_bytes": ((*prompt_pools[:2], 2, prompt.heads, 30), of_bytes),
        "_tree_cache_pack_prompt_": ((copies, *prompt_pools, *sizes), prompt.options()),
        "_tree_cache_prompt": (
            (prompt_q.unflatten(0, (2, 13)), *prompt_pools, 21, copies, 30, True),
            prompt.options(),
        ),
        "_tree_cache_append_": ((k_pool, v_pool, [], k[:5], v[:5], table, *new), case.options()),
        "_tree_cache_attention": (inputs, case.options() | dict.fromkeys(NOT_GIVEN)),
        "_tree_cache_step_": (step_arguments(case, device), case.options()),
        "_tree_cache_truncate_": truncate_arguments(device),
        "tree_cache_copy_": (
            (k_pool, v_pool, torch.tensor([[1, -1], [0, 0]], dtype=torch.int32, device=device)),
            {},
        ),
    }


def packed_append_call(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and options of ``_tree_cache_append_`` on packed tokens."""
    case = replace(PACKED_CASES[2], lengths=(21, 9), queries=(5, 9))
    _, k, v = case.sequences(device)
    pools, table = filled_packed_pools(case, 4, k, v)
    k_pool, v_pool, *leaves = pools.values()
    lengths = torch.tensor([16, 4], dtype=torch.int32, device=device)
    new = (lengths, offsets((3, 2), device), None, 4)
    return (k_pool, v_pool, leaves, k[:5], v[:5], table, *new), case.options()


def step_arguments(case: TreeCacheCase, device: str) -> tuple[Any, ...]:
    """Those of ``_tree_cache_step_`` but the page size and the options: 3 new tokens for each sequence of a cache."""
    batch, n, capacity = len(case.lengths), 3, 30
    sizes = (batch, case.kv_heads, case.key_dim, capacity)
    cache = TreeKVCache(*sizes, value_dim=case.value_dim, dtype=case.dtype, device=device, **case.options())
    for pool in (cache.k_pool, cache.v_pool):
        pool.zero_()  # two caches are compared, and what no token has written is whatever was in memory
    heads = ((case.heads, case.key_dim), (case.kv_heads, case.key_dim), (case.kv_heads, case.value_dim))
    q, k, v = (normal((batch, n, *x), case.dtype, device, seed) for seed, x in enumerate(heads))
    cache.decode(q, k, v)  # their leaders' lists are there
    counts = torch.full((batch,), n, dtype=torch.int32, device=device)
    rows = (counts, False, offsets((n,) * batch, device), None, capacity)
    state = (cache._state, cache.block_table)
    return (cache.k_pool, cache.v_pool, [], [], *state, q, k, v, None, None, *rows)


def truncate_arguments(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and options of ``_tree_cache_truncate_``: sequences of 9 and 5 tokens become 4 and 5."""

    def integers(*values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    ring = torch.full((2, 4), -1, dtype=torch.int32, device=device)
    lists = torch.full((2, 4, 1, 1, 2), -1, dtype=torch.int32, device=device)
    state = [integers(9, 5), integers(0, 0), torch.zeros(2, 2, dtype=torch.int32, device=device), ring, lists]
    table = integers([0, 1], [2, 3])
    options = {"page_size": 8, "compression_rate": 4, "top_k": 2, "max_top_nodes": 8, "selection_stride": 2}
    return ([], state, table, integers(4, -1), integers(0, 0)), options
