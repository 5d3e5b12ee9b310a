"""Problems of ``index_loss`` (docs/semantics/index_loss.md §9.3)."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.support.cases import Case, normal
from tests.support.documents import offsets


@dataclass(frozen=True, kw_only=True)
class IndexLossCase(Case):
    """``rows`` positions of each of ``B`` sequences of ``T`` tokens, or of packed documents of ``lengths`` tokens.

    ``shared``: the same positions for all sequences. ``spare``: rows behind the documents.
    """

    T: int = 70
    rows: int = 9
    B: int = 1
    H: int = 4
    H_kv: int = 2
    H_i: int = 2
    K: int = 16
    d: int = 16
    block_size: int = 4
    scale: float | None = None
    shared: bool = False
    lengths: tuple[int, ...] | None = None
    spare: int = 3

    @property
    def tokens(self) -> int:
        """Rows of a sequence, or of all documents."""
        return self.T if self.lengths is None else sum(self.lengths) + self.spare

    def make_offsets(self, device: str | torch.device) -> Tensor | None:
        """cu_seqlens of documents."""
        return None if self.lengths is None else offsets(self.lengths, device)

    def make_tensors(self, device: str | torch.device, seed: int = 0) -> tuple[Tensor, ...]:
        """query, key, index_query and index_key."""
        sizes = ((self.H, self.K), (self.H_kv, self.K), (self.H_i, self.d), (self.H_i, self.d))
        shape = (self.B, self.T) if self.lengths is None else (self.tokens,)
        return tuple(
            normal((*shape, *size), self.dtype, device, 4 * seed + i) for i, size in enumerate(sizes)
        )

    def eligible(self) -> list[int]:
        """Tokens that have an earlier block."""
        if self.lengths is None:
            return list(range(self.block_size, self.T))
        starts = [sum(self.lengths[:i]) for i in range(len(self.lengths))]
        return [
            start + t
            for start, n in zip(starts, self.lengths, strict=True)
            for t in range(self.block_size, n)
        ]

    def make_positions(self, device: str | torch.device, seed: int = 0) -> Tensor:
        """Drawn with replacement."""
        choices = torch.tensor(self.eligible(), dtype=torch.int64)
        size = (self.rows,) if self.shared or self.lengths is not None else (self.B, self.rows)
        generator = torch.Generator().manual_seed(seed)
        return choices[torch.randint(len(choices), size, generator=generator)].to(device)

    def make_inputs(self, device: str | torch.device, seed: int = 0) -> tuple[Any, ...]:
        """Positional arguments of ``torch.ops.htree.index_loss``."""
        tensors = self.make_tensors(device, seed)
        return (*tensors, self.make_positions(device, seed), self.make_offsets(device))

    def options(self) -> dict[str, Any]:
        """Keywords of the op."""
        return {"scale": self.scale, "block_size": self.block_size}

    def counted(self) -> int:
        """Tokens that the positions of a sequence of this length count on average, all sequences together."""
        return self.B * self.rows * (self.T // 2)

    def bytes(self) -> int:
        """Keys and index keys read twice, and the gradient of index keys written."""
        keys = self.B * self.tokens * self.dtype.itemsize
        return keys * (2 * self.H_kv * self.K + 3 * self.H_i * self.d)

    def flops(self) -> int:
        """Of the attention once and the index twice; an average position counts half of the tokens."""
        return self.counted() * (2 * (self.H * self.K + 2 * self.H_i * self.d) + self.H)

    @property
    def shapes(self) -> str:
        """Sizes and options."""
        return (
            f"B={self.B} T={self.T} rows={self.rows} H={self.H} H_kv={self.H_kv} H_i={self.H_i} K={self.K} d={self.d} "
            f"r={self.block_size}"
        )


_PLAIN = IndexLossCase(name="plain", dtype=torch.float32, B=2)
_RAGGED = replace(_PLAIN, name="ragged", B=1, rows=14, lengths=(33, 0, 1, 70, 4, 9, 40))
CASES: list[IndexLossCase] = [
    _PLAIN,
    replace(_PLAIN, name="plain", dtype=torch.float16),
    replace(_PLAIN, name="plain", dtype=torch.bfloat16),
    replace(_PLAIN, name="plain", dtype=torch.float64),
    replace(_PLAIN, name="shared", shared=True),
    replace(_PLAIN, name="one_index_head", H_i=1),
    replace(_PLAIN, name="many_heads", H=15, H_kv=3, H_i=3),
    replace(_PLAIN, name="many_heads_one_index", H=15, H_kv=3, H_i=1),
    replace(_PLAIN, name="mha", H=3, H_kv=3, H_i=3),
    replace(_PLAIN, name="mqa", H=37, H_kv=1, H_i=1),
    replace(_PLAIN, name="odd_width", K=13),
    replace(_PLAIN, name="wide", K=300, d=128),
    replace(_PLAIN, name="scale", scale=-0.7),
    replace(_PLAIN, name="block1", block_size=1),
    replace(_PLAIN, name="block16", block_size=16),
    replace(_PLAIN, name="block48", block_size=48, T=200),
    replace(_PLAIN, name="block300", block_size=300, T=1000),
    replace(_PLAIN, name="one_row", rows=1),
    replace(_PLAIN, name="one_block", T=5, rows=3),
    replace(_PLAIN, name="repeated", T=8, rows=40),
    _RAGGED,
    replace(_RAGGED, name="ragged", dtype=torch.bfloat16),
    replace(_RAGGED, name="ragged_one_index", H_i=1),
    replace(_RAGGED, name="ragged_double", dtype=torch.float64),
    replace(_RAGGED, name="one_document", lengths=(50,), spare=0),
]

_FAST = IndexLossCase(
    name="fast", dtype=torch.bfloat16, T=700, rows=50, H=16, H_kv=2, H_i=2, K=128, d=32, block_size=16
)
#: What the tensor cores take: half dtypes, K and block_size multiples of 16.
FAST_CASES: list[IndexLossCase] = [
    _FAST,
    replace(_FAST, name="fast", dtype=torch.float16, B=2),
    *(replace(_FAST, name=f"group{g}", H=2 * g) for g in (1, 2, 3, 4, 5, 12, 16, 24, 32, 40)),
    *(replace(_FAST, name=f"width{K}", K=K) for K in (16, 48, 64, 96, 160, 256)),
    replace(_FAST, name="one_index_head", H_i=1, d=64),
    replace(_FAST, name="one_index_head_mqa", H=24, H_kv=1, H_i=1, d=128, K=192),
    replace(_FAST, name="block64", block_size=64),
    replace(_FAST, name="block48", block_size=48, dtype=torch.float16),
    replace(_FAST, name="block512", block_size=512, T=1700),
    replace(_FAST, name="long", T=9000, rows=7),
    replace(_FAST, name="many_rows", rows=700, T=300),
    replace(_FAST, name="documents", lengths=(100, 0, 16, 17, 333, 40, 250), rows=90),
    replace(_FAST, name="documents64", lengths=(100, 0, 16, 17, 333, 40, 250), rows=90, block_size=64, H_i=1),
]

_H200 = replace(_FAST, name="128k", T=131_072, rows=128, H=32, H_kv=4, H_i=4)
_CPU = replace(_H200, name="8k", dtype=torch.float32, T=8192, rows=16, H=4, H_kv=1, H_i=1, K=64)
#: The row of docs/semantics: 128 positions of 131 072 tokens, and other lengths, widths and index heads.
BENCHMARK_CASES: dict[str, list[IndexLossCase]] = {
    "cuda": [
        _H200,
        replace(_H200, name="32k", T=32_768),
        replace(_H200, name="4k_b8", T=4096, B=8, rows=256),
        replace(_H200, name="1m", T=1_048_576),
        replace(_H200, name="128k_rows512", rows=512),
        replace(_H200, name="128k_one_index_head", H_i=1, d=64),
        replace(_H200, name="128k_d64", d=64),
        replace(_H200, name="32k_float", dtype=torch.float32, T=32_768),
    ],
    "cpu": [_CPU, replace(_CPU, name="8k_bfloat16", dtype=torch.bfloat16)],
}
