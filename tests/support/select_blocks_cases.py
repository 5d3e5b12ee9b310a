"""Problems of ``select_blocks`` and ``select_blocks_varlen`` (docs/semantics/selection.md §9)."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.support.cases import Case, normal
from tests.support.documents import DocumentFields


def integers(
    shape: tuple[int, ...], dtype: torch.dtype, device: str | torch.device, seed: int, largest: int = 1
) -> Tensor:
    """Whole numbers from -largest to largest. Their products and sums are exact in every dtype, and many are equal."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    drawn = torch.randint(-largest, largest + 1, shape, generator=generator, device="cpu")
    return drawn.to(device, dtype)


@dataclass(frozen=True, kw_only=True)
class BlockFields(Case):
    """Sizes and options that both ops have. ``exact``: values are small whole numbers, else standard normal."""

    count: int
    H: int = 2
    d: int = 16
    block_size: int = 4
    selection_stride: int = 1
    local: int = 1
    first: int = 0
    open_next: bool = False
    exact: bool = True

    def keywords(self) -> dict[str, Any]:
        """Keywords of the functions."""
        names = ("block_size", "selection_stride", "local", "first", "open_next")
        return {name: getattr(self, name) for name in names}

    def options(self) -> tuple[Any, ...]:
        """Arguments of the ops from ``count`` on."""
        return (self.count, *self.keywords().values())

    def values(self, shape: tuple[int, ...], device: str | torch.device, seed: int) -> Tensor:
        return (integers if self.exact else normal)(shape, self.dtype, device, seed)


@dataclass(frozen=True, kw_only=True)
class SelectBlocksCase(BlockFields):
    """The last ``num_queries`` of ``T`` tokens (None: all) of ``B`` sequences select."""

    T: int
    num_queries: int | None = None
    B: int = 1

    @property
    def T_q(self) -> int:
        return self.T if self.num_queries is None else self.num_queries

    def make_index(self, device: str | torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
        """index_query and index_key."""
        return (
            self.values((self.B, self.T_q, self.H, self.d), device, 2 * seed),
            self.values((self.B, self.T, self.H, self.d), device, 2 * seed + 1),
        )

    def make_inputs(self, device: str | torch.device, seed: int = 0) -> tuple[Any, ...]:
        """Arguments of ``torch.ops.htree.select_blocks``."""
        return (*self.make_index(device, seed), *self.options())

    @property
    def leaders(self) -> range:
        """The tokens whose queries select."""
        return range(self.T - self.T_q, self.T, self.selection_stride)

    def bytes(self) -> int:
        """The leaders' queries and all keys read, the lists and their scores written once."""
        inputs = self.B * self.H * self.d * (len(self.leaders) + self.T) * self.dtype.itemsize
        return inputs + self.B * self.H * len(self.leaders) * self.count * 8

    def flops(self) -> int:
        """Products of the leaders with the keys of the blocks before their own."""
        keys = sum(t // self.block_size * self.block_size for t in self.leaders)
        return 2 * self.B * self.H * self.d * keys

    @property
    def shapes(self) -> str:
        """Sizes and options."""
        return (
            f"B={self.B} T_q={self.T_q} T={self.T} H_i={self.H} d={self.d} k={self.count} r={self.block_size} "
            f"s={self.selection_stride}{' open_next' if self.open_next else ''}"
        )


@dataclass(frozen=True, kw_only=True)
class SelectBlocksVarlenCase(DocumentFields, BlockFields):
    """Documents of ``lengths`` keys, of which the last ``queries`` select (None: all); ``spare`` rows lie behind."""

    def make_index(self, device: str | torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
        """index_query and index_key, packed."""
        rows, keys = self.sizes
        return (
            self.values((rows, self.H, self.d), device, 2 * seed),
            self.values((keys, self.H, self.d), device, 2 * seed + 1),
        )

    def make_inputs(self, device: str | torch.device, seed: int = 0) -> tuple[Any, ...]:
        """Arguments of ``torch.ops.htree.select_blocks_varlen``."""
        return (*self.make_index(device, seed), *self.places(device), *self.options())

    def documents(self) -> list[SelectBlocksCase]:
        """The documents as problems of their own; they share no random numbers with this one."""
        shared = {name: getattr(self, name) for name in ("name", "dtype", "count", "H", "d", "exact")}
        return [
            SelectBlocksCase(T=keys, num_queries=queries, **shared, **self.keywords())
            for queries, keys in zip(self.queries_of, self.lengths, strict=True)
        ]

    def bytes(self) -> int:
        """Those of the documents."""
        return sum(document.bytes() for document in self.documents())

    def flops(self) -> int:
        """Those of the documents."""
        return sum(document.flops() for document in self.documents())

    @property
    def shapes(self) -> str:
        """Sizes and options."""
        return (
            f"{len(self.lengths)} documents, {sum(self.lengths)} tokens, H_i={self.H} d={self.d} k={self.count} "
            f"r={self.block_size} s={self.selection_stride}{' open_next' if self.open_next else ''}"
        )


_PLAIN = SelectBlocksCase(name="plain", dtype=torch.float32, T=77, count=5, B=2)
#: Values exact: lists and scores are those of the reference.
CASES: list[SelectBlocksCase] = [
    _PLAIN,
    replace(_PLAIN, name="plain", dtype=torch.float16),
    replace(_PLAIN, name="plain", dtype=torch.bfloat16),
    replace(_PLAIN, name="plain", dtype=torch.float64),
    *(
        replace(_PLAIN, name=f"stride{s}", selection_stride=s, block_size=16, T=200, H=3, B=1)
        for s in (2, 4, 8, 16)
    ),
    replace(_PLAIN, name="suffix", num_queries=13),
    replace(_PLAIN, name="suffix_stride", num_queries=29, T=81, selection_stride=4, block_size=4),
    replace(_PLAIN, name="one_query", num_queries=1),
    replace(_PLAIN, name="local", local=3, count=6),
    replace(_PLAIN, name="first", first=2, count=6),
    replace(_PLAIN, name="all_forced", local=3, first=2, count=5),
    replace(_PLAIN, name="count1", count=1),
    replace(_PLAIN, name="count2", count=2),
    replace(_PLAIN, name="more_than_there_are", count=50),
    replace(_PLAIN, name="open_next", count=6, open_next=True, block_size=2),
    replace(_PLAIN, name="open_next_odd", count=7, open_next=True, block_size=2, local=2, first=1),
    replace(_PLAIN, name="open_next_forced", count=6, open_next=True, block_size=2, local=2, first=3),
    replace(_PLAIN, name="open_next_stride", count=6, open_next=True, selection_stride=4, T=160),
    replace(_PLAIN, name="block1", block_size=1),
    replace(_PLAIN, name="block3", block_size=3),
    replace(_PLAIN, name="block32", block_size=32, T=300, selection_stride=8, count=3),
    replace(_PLAIN, name="block48", block_size=48, T=500, selection_stride=16, count=3, dtype=torch.bfloat16),
    replace(_PLAIN, name="block64", block_size=64, T=700, count=4, dtype=torch.float16, B=1),
    replace(_PLAIN, name="block128", block_size=128, T=1000, count=3, dtype=torch.bfloat16, B=1),
    *(replace(_PLAIN, name=f"d{d}", d=d, H=1) for d in (32, 48, 80, 128)),
    *(
        replace(_PLAIN, name=f"d{d}", d=d, H=1, dtype=torch.bfloat16, block_size=16, T=333, count=6)
        for d in (16, 32, 48, 64, 96, 112, 128)
    ),
    replace(_PLAIN, name="many_blocks", T=1500, block_size=2, count=40, H=1, B=1),
    replace(_PLAIN, name="one_token", T=1),
    replace(_PLAIN, name="one_block", T=4),
    replace(_PLAIN, name="no_query", num_queries=0),
    replace(_PLAIN, name="no_token", T=0),
    replace(_PLAIN, name="no_sequence", B=0),
    replace(_PLAIN, name="no_head", H=0),
]

_RAGGED = SelectBlocksVarlenCase(
    name="ragged", dtype=torch.float32, lengths=(33, 0, 1, 70, 9, 9, 40), spare=5, count=4
)
VARLEN_CASES: list[SelectBlocksVarlenCase] = [
    _RAGGED,
    replace(_RAGGED, name="ragged", dtype=torch.bfloat16, block_size=16, d=32),
    replace(_RAGGED, name="double", dtype=torch.float64),
    replace(_RAGGED, name="suffix", queries=(33, 0, 1, 20, 0, 9, 1)),
    replace(_RAGGED, name="stride", selection_stride=4, queries=(33, 0, 1, 22, 9, 1, 4)),
    replace(_RAGGED, name="open_next", open_next=True, block_size=2, local=2, first=1),
    replace(_RAGGED, name="one_document", lengths=(50,), spare=0),
    replace(_RAGGED, name="no_document", lengths=(), spare=3),
    replace(_RAGGED, name="empty_documents", lengths=(0, 0), spare=0),
    replace(_RAGGED, name="normal", exact=False),
]

_H200 = SelectBlocksCase(
    name="s1", dtype=torch.bfloat16, T=131_072, count=128, H=4, d=32, block_size=16, exact=False
)
_CPU = replace(_H200, dtype=torch.float32, T=8192, count=64, H=1)
#: The rows of docs/semantics: the index of four K/V heads over 131 072 tokens, and other lengths and widths.
BENCHMARK_CASES: dict[str, list[SelectBlocksCase]] = {
    "cuda": [
        _H200,
        *(
            replace(_H200, name=f"s{s}", selection_stride=s, open_next=open_next)
            for s, open_next in ((4, False), (16, False), (16, True))
        ),
        replace(_H200, name="s1_32k", T=32_768),
        replace(_H200, name="s4_1m", T=1_048_576, selection_stride=4),
        replace(_H200, name="d64", d=64),
        replace(_H200, name="d128", d=128),
        replace(_H200, name="block64", block_size=64, count=32),
        replace(_H200, name="float", dtype=torch.float32, T=32_768),
    ],
    "cpu": [
        _CPU,
        replace(_CPU, name="s4", selection_stride=4, T=32_768),
        replace(_CPU, name="s16", selection_stride=16, T=32_768),
        replace(_CPU, name="s1_bfloat16", dtype=torch.bfloat16),
    ],
}
