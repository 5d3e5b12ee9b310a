"""Problems of attention over lists of blocks (docs/semantics/sparse_attention.md §8)."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.support.cases import Case, normal
from tests.support.documents import DocumentFields


def make_blocks(
    shape: tuple[int, ...], last: Tensor, count: int, kind: str, device: str | torch.device, seed: int
) -> Tensor:
    """int32 lists [B, rows, heads, n].

    Args:
        last: [rows] the diagonal block of each row.
        count: number of blocks.
        kind: "random": blocks up to the diagonal one, each once, the diagonal one first, -1 at the end; "alike": the
            same, about four of five entries shared by all rows; "wild": any numbers, repeated, too large, negative;
            "all": 0, 1, ... What "tree" is in the benchmark comes from tree attention.
    """
    n = shape[-1]
    generator = torch.Generator(device=device).manual_seed(seed)
    if kind == "all":
        return torch.arange(n, dtype=torch.int32, device=device).expand(shape).contiguous()
    if kind == "wild":
        return torch.randint(-3, count + 3, shape, dtype=torch.int32, device=device, generator=generator)
    last = last.to(device).view(1, -1, 1, 1)
    blocks = torch.full(shape, -1, dtype=torch.int32, device=device)
    if n == 0:
        return blocks
    shared = torch.zeros(count, device=device)
    if kind == "alike":
        shared = (torch.rand(count, device=device, generator=generator) < 0.8 * n / count).float()
    rows = max(1, 2**26 // (count * shape[0] * shape[2]))
    for first in range(0, shape[1], rows):  # the keys of a few rows at a time
        part = slice(first, first + rows)
        here = last[:, part]
        keys = torch.rand((shape[0], here.shape[1], shape[2], count), device=device, generator=generator)
        keys += shared  # what is 1 here goes first
        ids = torch.arange(count, device=device)
        keys = keys.masked_fill(ids > here, -1.0).masked_fill(ids == here, 3.0)
        found, order = keys.topk(min(n, count), -1)
        blocks[:, part, :, : order.shape[-1]] = order.int().masked_fill(found < 0, -1)
    return blocks


@dataclass(frozen=True, kw_only=True)
class SparseCase(Case):
    """One call of ``sparse_attention``; ``H_i`` heads of lists (0: H_kv), ``T_q`` queries (0: T)."""

    B: int = 1
    T: int = 40
    T_q: int = 0
    H: int = 4
    H_kv: int = 2
    H_i: int = 0
    K: int = 8
    V: int = 6
    n: int = 3
    block_size: int = 4
    selection_stride: int = 1
    scale: float | None = None
    has_sinks: bool = False
    lists: str = "random"

    @property
    def num_queries(self) -> int:
        return self.T_q or self.T

    def make_qkv(self, device: str | torch.device, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        return (
            normal((self.B, self.num_queries, self.H, self.K), self.dtype, device, 3 * seed),
            normal((self.B, self.T, self.H_kv, self.K), self.dtype, device, 3 * seed + 1),
            normal((self.B, self.T, self.H_kv, self.V), self.dtype, device, 3 * seed + 2),
        )

    def make_blocks(self, device: str | torch.device, seed: int = 0) -> Tensor:
        rows = -(-self.num_queries // self.selection_stride)
        places = torch.arange(rows, device="cpu") * self.selection_stride + self.T - self.num_queries
        shape = (self.B, rows, self.H_i or self.H_kv, self.n)
        count = -(-self.T // self.block_size)
        return make_blocks(shape, places // self.block_size, count, self.lists, device, 3 * seed + 7)

    def make_sinks(self, device: str | torch.device, seed: int = 0) -> Tensor | None:
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        return normal((self.H,), dtype, device, 3 * seed + 11) if self.has_sinks else None

    def make_inputs(self, device: str | torch.device, seed: int = 0) -> tuple[Any, ...]:
        """Arguments of ``torch.ops.htree.sparse_attention``."""
        return (*self.make_qkv(device, seed), self.make_blocks(device, seed), self.make_sinks(device, seed))

    def options(self) -> dict[str, Any]:
        """Keywords of the op."""
        return {"block_size": self.block_size, "selection_stride": self.selection_stride, "scale": self.scale}

    def listed(self) -> int:
        """Pairs of a query and a token that the lists of "random" hold."""
        t = torch.arange(self.T - self.num_queries, self.T, device="cpu")
        blocks = (t // self.block_size + 1).clamp(max=self.n)
        tokens = (blocks - 1) * self.block_size + t % self.block_size + 1
        return self.B * int(tokens[blocks > 0].sum())

    def bytes(self) -> int:
        """query, key, value and the lists read and out written once."""
        rows = self.num_queries * self.H * (self.K + self.V) + self.T * self.H_kv * (self.K + self.V)
        lists = -(-self.num_queries // self.selection_stride) * (self.H_i or self.H_kv) * self.n
        return self.B * (rows * self.dtype.itemsize + 4 * lists)

    def flops(self) -> int:
        """Two products of the listed pairs."""
        return 2 * self.H * self.listed() * (self.K + self.V)

    @property
    def shapes(self) -> str:
        return (
            f"B={self.B} T={self.T} T_q={self.num_queries} H={self.H}/{self.H_kv} K={self.K} V={self.V} n={self.n} "
            f"block={self.block_size} s={self.selection_stride} {self.lists}{' sinks' if self.has_sinks else ''}"
        )


@dataclass(frozen=True, kw_only=True)
class SparseBackwardCase(Case):
    """The gradient of ``forward`` for standard normal gradients of out and, with ``of_lse``, of lse."""

    forward: SparseCase
    of_lse: bool = False

    def make_inputs(self, device: str | torch.device, seed: int = 0) -> tuple[Any, ...]:
        """Arguments of ``torch.ops.htree._sparse_attention_backward``."""
        query, key, value, blocks, sinks = self.forward.make_inputs(device, seed)
        out, lse = torch.ops.htree.sparse_attention(
            query, key, value, blocks, sinks, **self.forward.options()
        )
        dout = normal(tuple(out.shape), out.dtype, device, 3 * seed + 1_000_003)
        dlse = normal(tuple(lse.shape), lse.dtype, device, 3 * seed + 1_000_007) if self.of_lse else None
        return query, key, value, blocks, out, lse, sinks, dout, dlse

    def options(self) -> dict[str, Any]:
        return self.forward.options()

    def bytes(self) -> int:
        """What the forward reads, out and dout read and the gradients written once."""
        case = self.forward
        rows = case.num_queries * case.H * (2 * case.K + 2 * case.V) + 2 * case.T * case.H_kv * (
            case.K + case.V
        )
        return case.B * rows * case.dtype.itemsize

    def flops(self) -> int:
        """Five products of the listed pairs."""
        return self.forward.H * self.forward.listed() * (6 * self.forward.K + 4 * self.forward.V)

    @property
    def shapes(self) -> str:
        return self.forward.shapes


@dataclass(frozen=True, kw_only=True)
class SparseVarlenCase(DocumentFields, SparseCase):
    """Documents of ``lengths`` keys, whose last ``queries`` attend (None: all), and ``spare`` rows behind them."""

    lists: str = "wild"

    def make_inputs(self, device: str | torch.device, seed: int = 0) -> tuple[Any, ...]:
        """Arguments of ``torch.ops.htree.sparse_attention_varlen``."""
        N, N_k = self.sizes
        count = -(-max(self.lengths, default=0) // self.block_size)
        rows = (1, N, self.H_i or self.H_kv, self.n)
        return (
            normal((N, self.H, self.K), self.dtype, device, 3 * seed),
            normal((N_k, self.H_kv, self.K), self.dtype, device, 3 * seed + 1),
            normal((N_k, self.H_kv, self.V), self.dtype, device, 3 * seed + 2),
            make_blocks(rows, torch.zeros(N), count, self.lists, device, 3 * seed + 7)[0],
            *self.make_offsets(device),
            self.make_sinks(device, seed),
            *self.bounds,
        )


_PLAIN = SparseCase(name="plain", dtype=torch.float32)
#: For values, gradients, opcheck and compilation.
CASES: list[SparseCase] = [
    _PLAIN,
    replace(_PLAIN, name="double", dtype=torch.float64, B=2),
    replace(_PLAIN, name="suffix", T_q=13, B=2),
    replace(_PLAIN, name="stride", selection_stride=4, T_q=16, T=44),
    replace(_PLAIN, name="wild", lists="wild", n=9),
    replace(_PLAIN, name="shared_lists", H_i=1, H=6, H_kv=3),
    replace(_PLAIN, name="sinks", has_sinks=True, lists="wild"),
    replace(_PLAIN, name="odd_widths", K=5, V=3, has_sinks=True),
    replace(_PLAIN, name="single_tokens", block_size=1, n=7),
    replace(_PLAIN, name="odd_blocks", block_size=7, n=2, lists="wild"),
    replace(_PLAIN, name="one_block", block_size=64, n=1),
    replace(_PLAIN, name="all", lists="all", n=10),
    replace(_PLAIN, name="no_entry", n=0),
    replace(_PLAIN, name="one_token", T=1, n=1),
    replace(_PLAIN, name="bfloat16", dtype=torch.bfloat16, K=32, V=32, T=70, block_size=16),
    replace(_PLAIN, name="float16", dtype=torch.float16, K=32, V=16, T=70, block_size=16, has_sinks=True),
    replace(_PLAIN, name="scale", scale=0.7, B=2, lists="wild"),
]

_FAST = SparseCase(name="fast", dtype=torch.bfloat16, B=2, T=300, H=8, H_kv=2, K=64, V=64, n=6, block_size=16)
#: Widths, groups, blocks and strides that tensor cores take.
FAST_CASES: list[SparseCase] = [
    _FAST,
    replace(_FAST, name="half_128", dtype=torch.float16, K=128, V=128),
    replace(_FAST, name="wild", lists="wild", n=20),
    replace(_FAST, name="stride_2", selection_stride=2),
    replace(_FAST, name="stride_4", selection_stride=4, T_q=132, lists="wild"),
    replace(_FAST, name="stride_16", selection_stride=16, K=128, V=128),
    replace(_FAST, name="blocks_64", block_size=64, n=3, lists="wild"),
    replace(_FAST, name="blocks_128", block_size=128, n=2, selection_stride=4),
    replace(_FAST, name="one_head", H=2, K=128, V=128),
    replace(_FAST, name="sixteen_heads", H=16, H_kv=1, n=4),
    replace(_FAST, name="shared_lists", H_i=1, lists="wild", n=9),
    replace(_FAST, name="sinks", has_sinks=True, lists="wild", n=9),
    replace(_FAST, name="suffix", T_q=1),
    replace(_FAST, name="no_entry", n=0),
]

_RAGGED = SparseVarlenCase(
    name="ragged", dtype=torch.float32, lengths=(33, 0, 1, 70, 9, 9, 40), spare=5, n=5, has_sinks=True
)
VARLEN_CASES: list[SparseVarlenCase] = [
    _RAGGED,
    replace(_RAGGED, name="double", dtype=torch.float64),
    replace(_RAGGED, name="suffix", queries=(33, 0, 1, 20, 0, 9, 1), has_sinks=False),
    replace(_RAGGED, name="stride", selection_stride=4, queries=(33, 0, 1, 22, 9, 1, 4)),
    replace(_RAGGED, name="large_blocks", block_size=512, selection_stride=256, n=2),
    replace(_RAGGED, name="shared_lists", H_i=1, block_size=16),
    replace(_RAGGED, name="one_document", lengths=(50,), spare=0),
    replace(_RAGGED, name="no_document", lengths=()),
    replace(_RAGGED, name="empty_documents", lengths=(0, 0), spare=0),
    replace(_RAGGED, name="bfloat16", dtype=torch.bfloat16, K=32, V=32, block_size=16),
    replace(
        _RAGGED, name="group_4", dtype=torch.bfloat16, H=8, K=32, V=32, block_size=16, selection_stride=2
    ),
]

_H200 = SparseCase(
    name="random", dtype=torch.bfloat16, T=131_072, H=32, H_kv=4, K=128, V=128, n=128, block_size=16
)
_CPU = replace(_H200, dtype=torch.float32, T=8192, H=4, H_kv=1, K=64, V=64, n=32)
#: 2048 tokens of 131 072, lists of neighbours independent or 80 % alike; and the lists that tree attention chooses.
BENCHMARK_CASES: dict[str, list[SparseCase]] = {
    "cuda": [
        replace(_H200, name=lists, lists=lists, selection_stride=stride)
        for lists in ("random", "alike")
        for stride in (1, 4)
    ]
    + [
        replace(_H200, name="tree", lists="tree", T=T, n=n, selection_stride=stride)
        for T in (32_768, 131_072)
        for n in (64, 128, 256, 512)
        for stride in (1, 4, 16)
    ],
    "cpu": [_CPU, replace(_CPU, name="alike", lists="alike", selection_stride=4)],
}
