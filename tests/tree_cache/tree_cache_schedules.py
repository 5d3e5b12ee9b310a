"""Random schedules for a tree cache, beside a model that knows nothing but the sequences.

A sequence is a list of token numbers; the rows of a token are looked up in a bank. After every ``attend`` the rows are
compared with those of ``tree_attention`` over that whole sequence alone, and at the end every node of the
cache with ``tree_build`` over it, bit for bit.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from htree_ops import TreeKVCache, tree_attention
from tests.support.tree_attention_problem import SWITCHES

BANK = 256
INDEX_DIM = 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def schedules(default: int) -> range:
    """The seeds that ``HTREE_SCHEDULES`` asks for: so many, or from a first one on, as in "3000-6000"."""
    first, _, end = os.environ.get("HTREE_SCHEDULES", str(default)).rpartition("-")
    return range(int(first or 0), int(end))


@dataclass(frozen=True)
class Shape:
    """Sizes and options of one schedule."""

    seed: int
    batch: int
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    rate: int
    top_k: int
    top_nodes: int
    stride: int
    page_size: int
    capacity: int
    num_pages: int | None
    rope_base: float | None
    frequencies: tuple[float, ...] | None
    importance: str
    span: int | None
    dtype: torch.dtype
    leaf_bits: int | None = None
    switches: tuple[str, ...] = ()  # options that are on
    index_heads: int = 0  # 0: without an index
    index_dtype: torch.dtype = torch.bfloat16

    @staticmethod
    def draw(seed: int, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Shape:
        draw = random.Random(seed)
        rate, top_k = draw.randint(2, 4), draw.randint(1, 4)
        kv_heads, batch = draw.randint(1, 2), draw.randint(1, 3)
        page_size, capacity = rate * draw.randint(1, 4), draw.randint(6, 40)
        full = batch * -(-capacity // page_size)
        key_dim = draw.choice((2, 4, 6))
        own = draw.random() < 0.3
        return Shape(
            seed=seed,
            batch=batch,
            heads=kv_heads * draw.randint(1, 3),
            kv_heads=kv_heads,
            key_dim=key_dim,
            value_dim=draw.randint(1, 4),
            rate=rate,
            top_k=top_k,
            top_nodes=draw.randint(1, top_k * rate),
            stride=draw.choice([s for s in (1, 2, 4) if rate % s == 0]),
            page_size=page_size,
            capacity=capacity,
            num_pages=draw.choice((None, None, max(1, full // 2))),
            rope_base=10000.0 if own else draw.choice((10000.0, 10.0, None)),
            frequencies=tuple(draw.choice((0.0, 1.0, -0.2)) for _ in range(key_dim // 2)) if own else None,
            importance=draw.choice(("lse_causal", "exp_joint")),
            span=draw.choice([None, None, *(c for c in (1, 2, 3, 4) if rate % c == 0)]),
            dtype=draw.choice(dtypes),
            switches=tuple(name for name in SWITCHES if draw.random() < 0.3),
        )

    @staticmethod
    def draw_served(seed: int) -> Shape:
        """Sizes that Hopper's kernels for decoding and prompts take, with sequences of one to three layers."""
        draw = random.Random(seed)
        kv_heads, batch, top_k = draw.randint(1, 2), draw.randint(1, 3), draw.choice((4, 8, 12))
        width = draw.choice((64, 64, 128))
        own = draw.random() < 0.2
        return Shape(
            seed=seed,
            batch=batch,
            heads=kv_heads * draw.choice((1, 2, 3, 8)),
            kv_heads=kv_heads,
            key_dim=width,
            value_dim=width,
            rate=16,
            top_k=top_k,
            top_nodes=draw.randint(1, top_k * 16),
            stride=draw.choice((1, 1, 4, 16)),
            page_size=16 * draw.randint(1, 8),
            capacity=draw.randint(100, 1500),
            num_pages=None,
            rope_base=10000.0 if own else draw.choice((10000.0, None)),
            frequencies=tuple(0.5 ** (i / 4) for i in range(width // 2)) if own else None,
            importance=draw.choice(("lse_causal", "exp_joint")),
            span=draw.choice((None, None, 1, 2, 4, 16)),
            dtype=draw.choice((torch.bfloat16, torch.float16)),
            switches=tuple(name for name in SWITCHES if draw.random() < 0.3),
        )

    @staticmethod
    def draw_indexed(seed: int, *, served: bool = False) -> Shape:
        """The same sizes with an index, of heads for all K/V heads or one for each."""
        draw = random.Random(-1 - seed)
        shape = Shape.draw_served(seed) if served else Shape.draw(seed)
        return replace(
            shape,
            importance="lse_causal",
            span=None,
            index_heads=draw.choice((1, shape.kv_heads)),
            index_dtype=draw.choice((torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)),
        )

    @staticmethod
    def draw_open(seed: int, *, served: bool = False) -> Shape:
        """The same sizes where the top has more nodes than a list has children, every other one with an index."""
        draw = random.Random(-(1 << 40) - seed)
        shape = Shape.draw_indexed(seed, served=served) if seed % 2 else None
        shape = shape or (Shape.draw_served(seed) if served else Shape.draw(seed))
        most = shape.top_k * shape.rate
        top_nodes = most + draw.randint(1, 200 if served else 6)
        wider = {} if served else {"capacity": shape.capacity + draw.choice((0, 30))}
        return replace(shape, top_nodes=top_nodes, num_pages=None, **wider)

    def options(self) -> dict[str, object]:
        return {
            "compression_rate": self.rate,
            "max_top_nodes": self.top_nodes,
            "top_k": self.top_k,
            "selection_stride": self.stride,
            "rope_base": self.rope_base,
            "inv_freq": self.frequencies,
            "importance": self.importance,
            "selection_span": self.span,
            **dict.fromkeys(self.switches, True),
        }

    def cache(self, device: str) -> TreeKVCache:
        """An empty cache whose free pages stand in a random order."""
        cache = TreeKVCache(
            self.batch,
            self.kv_heads,
            self.key_dim,
            self.capacity,
            value_dim=self.value_dim,
            page_size=self.page_size,
            num_pages=self.num_pages,
            leaf_bits=self.leaf_bits,
            **(
                {
                    "index_dim": INDEX_DIM,
                    "index_heads": self.index_heads,
                    "index_dtype": self.index_dtype,
                }
                if self.index_heads
                else {}
            ),
            dtype=self.dtype,
            device=device,
            **self.options(),
        )
        order = torch.randperm(cache.num_pages, generator=torch.Generator().manual_seed(self.seed)).tolist()
        if cache.pages.is_whole:
            size = cache.pages.max_pages
            cache.pages.load([order[b * size : (b + 1) * size] for b in range(self.batch)])
        else:
            cache.pages.free = order
        for pool in (cache.k_pool, cache.v_pool, *cache.pools.index_pool):
            pool.fill_(
                torch.nan if pool.is_floating_point() else 255
            )  # what is read before it is written shows
        return cache


@cache
def bank(salt: int, heads: int, width: int, dtype: torch.dtype, device: str) -> Tensor:
    """The rows [BANK, heads, width] of all tokens."""
    generator = torch.Generator().manual_seed(salt)
    return torch.randn(BANK, heads, width, generator=generator, dtype=torch.float64).to(device, dtype)


@dataclass
class Sequence:
    """A sequence and the leaders in its ring, by slot."""

    tokens: list[int] = field(default_factory=list)
    ring: dict[int, int] = field(default_factory=dict)
    prompted: int = 0  # leaders before this token may have the lists of a prompt

    def copy(self) -> Sequence:
        return Sequence(list(self.tokens), dict(self.ring), self.prompted)

    def cut(self, length: int) -> None:
        del self.tokens[length:]
        self.prompted = min(self.prompted, length)
        self.ring = {slot: leader for slot, leader in self.ring.items() if leader < length}


class Run:
    """One schedule on one cache. ``same(ours, reference)`` compares a row of the two."""

    first_exact = 0  # the first layer that holds what a fresh build gives

    def __init__(self, shape: Shape, device: str, same: Callable[[Tensor, Tensor], bool]) -> None:
        self.shape, self.same = shape, same
        self.draw = random.Random(~shape.seed)
        self.cache = shape.cache(device)
        self.model = [Sequence() for _ in range(shape.batch)]
        self.q, self.k, self.v = (
            bank(salt, heads, width, shape.dtype, device)
            for salt, (heads, width) in enumerate(
                (
                    (shape.heads, shape.key_dim),
                    (shape.kv_heads, shape.key_dim),
                    (shape.kv_heads, shape.value_dim),
                )
            )
        )
        # Small whole numbers, so that scores tie.
        self.index = [
            (2 * bank(salt, max(1, shape.index_heads), INDEX_DIM, torch.float64, device))
            .round()
            .to(torch.bfloat16 if shape.index_dtype == torch.float8_e4m3fn else shape.index_dtype)
            for salt in (3, 4)
        ]
        self.missing = False
        self.refused: list[str] = []  # what truncations have said
        self.different = 0
        self.rows = 0

    def run(self, steps: int) -> None:
        kinds = (
            self.append,
            self.append,
            self.append,
            self.append,
            self.truncate,
            self.reorder,
            self.fork,
            self.free,
        )
        self.append()
        for _ in range(steps):
            self.draw.choice(kinds)()
        self.check_layers()
        reported = refusal(self.cache.check)
        assert (reported is not None and "leader" in reported) == self.missing
        self.cache.check()
        self.cache.load_state_dict(self.cache.state_dict())  # what a schedule leaves is a state
        self.check_layers()

    # ---- steps

    def append(self) -> None:
        """New tokens, and nearly always their queries at once."""
        shape, draw = self.shape, self.draw
        most = draw.choice((1, 1, 2, 3, 5, 12))
        ragged = draw.random() < 0.5
        counts = [draw.randint(0, most) if ragged else most for _ in self.model]
        tokens = [[draw.randrange(BANK) for _ in range(most)] for _ in self.model]
        ids = torch.tensor(tokens, device=self.k.device)
        before = self.cache.lengths.tolist()
        assert before == [len(x.tokens) for x in self.model]
        arguments = (self.k[ids], self.v[ids], counts if ragged else None)
        attends, together = draw.random() < 0.95, draw.random() < 0.5
        found: list[tuple[Tensor, Tensor]] = []

        def add() -> None:
            if attends and together:
                found.append(
                    self.cache.decode(self.q[ids], *arguments, **self.of_index(index=ids), return_lse=True)
                )
            else:
                self.cache.append(*arguments, **self.of_index(index_key=ids))

        if (refused := refusal(add)) is not None:
            assert self.cache.lengths.tolist() == before
            needed = sum(
                max(0, -(-(n + c) // shape.page_size) - len(held))
                for n, c, held in zip(before, counts, self.cache.pages.rows, strict=True)
            )
            too_long = any(n + c > shape.capacity for n, c in zip(before, counts, strict=True))
            assert "capacity" in refused if too_long else needed > len(self.cache.pages.free)
            return
        for sequence, count, new in zip(self.model, counts, tokens, strict=True):
            sequence.tokens += new[:count]
        if attends:
            self.attend(ids, counts, ragged, *found)

    def attend(
        self, ids: Tensor, counts: list[int], ragged: bool, found: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """Checks the rows of a call, those that ``decode`` has found or else those of ``attend``."""
        if found is None:
            found = self.cache.attend(
                self.q[ids], counts if ragged else None, **self.of_index(index_query=ids), return_lse=True
            )
        out, lse = found
        stride = self.shape.stride
        for b, (sequence, count) in enumerate(zip(self.model, counts, strict=True)):
            if count < ids.shape[1]:
                assert not out[b, count:].any()
                assert bool((lse[b, count:] == -torch.inf).all())
            if count == 0:
                continue
            begin, length = len(sequence.tokens) - count, len(sequence.tokens)
            expected = self.reference(sequence.tokens)[begin:].clone()
            leader = begin - begin % stride
            if leader < begin and leader not in sequence.ring.values():
                lost = min(leader + stride, length) - begin
                expected[:lost] = torch.nan
                self.missing = True
            self.compare(sequence, out[b, :count], expected)
            ring = {slot: token for slot, token in sequence.ring.items() if token < begin}
            ring |= {t // stride % 4: t for t in range(begin, length) if t % stride == 0}
            sequence.ring = ring

    def may_end(self, sequence: Sequence, length: int) -> bool:
        """Whether the ring has the leader of what is then the last token."""
        stride = self.shape.stride
        whole = length in (-1, len(sequence.tokens)) or length % stride == 0
        return whole or (length - 1) // stride * stride in sequence.ring.values()

    def truncate(self) -> None:
        lengths = [self.draw.choice((-1, self.draw.randint(0, len(x.tokens)))) for x in self.model]
        allowed = all(map(self.may_end, self.model, lengths))
        if (refused := refusal(self.cache.truncate, lengths)) is not None:
            assert not allowed or "more pages" in refused
            self.refused.append(refused)
            return
        assert allowed
        for sequence, length in zip(self.model, lengths, strict=True):
            if length >= 0:
                sequence.cut(length)

    def reorder(self) -> None:
        beams = [self.draw.randrange(self.shape.batch) for _ in self.model]
        if (refused := refusal(self.cache.reorder_, beams)) is not None:
            assert "more pages" in refused
            return
        self.model = [self.model[beam].copy() for beam in beams]

    def fork(self) -> None:
        source, target = (self.draw.randrange(self.shape.batch) for _ in range(2))
        if (refused := refusal(self.cache.fork, source, target)) is not None:
            assert "more pages" in refused
            return
        self.model[target] = self.model[source].copy()

    def free(self) -> None:
        sequence = self.draw.randrange(self.shape.batch)
        self.cache.free(sequence)
        self.model[sequence] = type(self.model[sequence])()

    # ---- checks

    def of_index(self, **ids: Tensor) -> dict[str, Any]:
        """The argument of an index with the rows of these tokens; none without an index."""
        if not self.shape.index_heads:
            return {}
        query, key = self.index
        rows = {"index": lambda x: (query[x], key[x]), "index_query": lambda x: query[x]}
        return {name: rows.get(name, lambda x: key[x])(x) for name, x in ids.items()}

    def reference(self, tokens: list[int]) -> Tensor:
        """All rows [T, H, V] of the sequence alone."""
        ids = torch.tensor(tokens, device=self.k.device)
        rows = (x[ids][None] for x in (self.q, self.k, self.v))
        return tree_attention(*rows, **self.of_index(index=ids[None]), **self.shape.options())[0]

    def compare(self, sequence: Sequence, out: Tensor, expected: Tensor) -> None:
        """The last rows of a sequence, whose ring is that before them."""
        self.rows += len(out)
        if not self.same(out, expected):
            self.different += sum(not self.same(a, b) for a, b in zip(out, expected, strict=True))

    def check_layers(self) -> None:
        for b, sequence in enumerate(self.model):
            ids = torch.tensor(sequence.tokens, dtype=torch.int64, device=self.k.device)
            keys, values = self.k[ids][None], self.v[ids][None]
            for layer in range(self.cache.num_layers):
                if layer:
                    keys, values = torch.ops.htree.tree_build(keys, values, self.shape.rate)
                ours = self.cache.layer(b, layer)
                if layer >= self.first_exact:
                    for rows, whole in zip(ours, (keys, values), strict=True):
                        assert torch.equal(rows, whole[0, : len(rows)])
                if not len(ours[0]):
                    break
            if self.shape.index_heads:
                kept = self.cache.pools.index.tokens(self.cache.block_table[b : b + 1], len(ids))[0]
                assert torch.equal(kept, self.index[1][ids])


def refusal(call: Callable[..., None], *arguments: object) -> str | None:
    """The message of the ValueError that the call raises; None where it raises none."""
    try:
        call(*arguments)
    except ValueError as error:
        return str(error)
    return None


def bitwise(out: Tensor, expected: Tensor) -> bool:
    """Equal bits, where any NaN is the NaN of a row that cannot be computed."""
    return bool(((out == expected) | (out.isnan() & expected.isnan())).all())
