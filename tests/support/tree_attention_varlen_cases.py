"""Problems of tree attention over packed documents (docs/semantics/tree_attention.md §1.16)."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from tests.support.cases import Case, normal
from tests.support.documents import DocumentFields
from tests.support.tree_attention_problem import OptionFields, TreeAttentionCase


@dataclass(frozen=True, kw_only=True)
class VarlenCase(DocumentFields, OptionFields, Case):
    """Documents of ``lengths`` keys, of which the last ``queries`` attend (None: all), and ``spare`` rows behind them.

    The options are those of :class:`TreeAttentionCase`.
    """

    H: int = 4
    H_kv: int = 2
    K: int = 8
    V: int = 6
    r: int = 4
    top_k: int = 2
    M: int = 8

    def documents(self) -> list[TreeAttentionCase]:
        """The documents that have queries, as problems of their own; they share no random numbers with this one."""
        names = ("dtype", "H", "H_kv", "K", "V", "r", "top_k", "M", *(x.name for x in fields(OptionFields)))
        shared: dict[str, Any] = {name: getattr(self, name) for name in names}
        return [
            TreeAttentionCase(name=self.name, T=keys, num_queries=queries, **shared)
            for queries, keys in zip(self.queries_of, self.lengths, strict=True)
            if queries
        ]

    def make_qkv(self, device: str | torch.device, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """query, key and value, packed."""
        N, N_k = self.sizes
        return (
            normal((N, self.H, self.K), self.dtype, device, 3 * seed),
            normal((N_k, self.H_kv, self.K), self.dtype, device, 3 * seed + 1),
            normal((N_k, self.H_kv, self.V), self.dtype, device, 3 * seed + 2),
        )

    def make_inputs(self, device: str | torch.device, seed: int = 0) -> tuple[Any, ...]:
        """query, key, value, both offsets and both bounds."""
        return (*self.make_qkv(device, seed), *self.places(device))

    def options(self) -> dict[str, Any]:
        """Keywords of ``tree_attention_varlen``."""
        return self.keywords()

    def bytes(self) -> int:
        """The inputs read and the output written once."""
        return sum(document.bytes() for document in self.documents())

    def flops(self) -> int:
        """Those of the documents."""
        return sum(document.flops() for document in self.documents())

    @property
    def shapes(self) -> str:
        """Sizes and the options that shape the trees."""
        count = len(self.lengths)
        span = "" if self.selection_span is None else f" c={self.selection_span}"
        return (
            f"{count} documents of {min(self.lengths, default=0)} to {max(self.lengths, default=0)}, "
            f"{sum(self.lengths)} tokens, H={self.H}/{self.H_kv} K={self.K} V={self.V} r={self.r} k={self.top_k} "
            f"M={self.M} s={self.selection_stride}{span}"
        )


def without_index(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """What :meth:`VarlenCase.make_inputs` gives as arguments of ``torch.ops.htree._attention_varlen``."""
    return (*inputs[:3], None, None, *inputs[3:])


@dataclass(frozen=True, kw_only=True)
class VarlenBackwardCase(Case):
    """The gradient of ``forward``: what ``_attention_varlen_forward`` gave, and a standard normal gradient of out."""

    forward: VarlenCase

    def make_inputs(self, device: str | torch.device, seed: int = 0) -> tuple[Any, ...]:
        """Arguments of ``torch.ops.htree._attention_varlen_backward`` before ``grouping``."""
        inputs = without_index(self.forward.make_inputs(device, seed))
        state = torch.ops.htree._attention_varlen_forward(*inputs, "auto", *self.forward.packed())
        dout = normal(tuple(state[0].shape), self.dtype, device, 3 * seed + 1_000_003)
        return (*inputs, *state, dout, None)

    def bytes(self) -> int:
        """query, key, value, out, dout read and their gradients written once."""
        case = self.forward
        rows = sum(case.queries_of) * case.H * (2 * case.K + 2 * case.V)
        return (rows + 2 * sum(case.lengths) * case.H_kv * (case.K + case.V)) * case.dtype.itemsize

    def flops(self) -> int:
        """Five products of the merged candidates."""
        total = 0
        for document in self.forward.documents():
            total += document.H * sum(document.num_candidates()[1]) * (6 * document.K + 4 * document.V)
        return total

    @property
    def shapes(self) -> str:
        return self.forward.shapes


def _spread(count: int, shortest: int, longest: int) -> tuple[int, ...]:
    """``count`` lengths, log-uniform between two, from seed 0."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(count, generator=generator, dtype=torch.float64, device="cpu")
    return tuple(int(x) for x in shortest * (longest / shortest) ** draws)


_RAGGED = VarlenCase(name="ragged", dtype=torch.float32, lengths=(33, 0, 1, 70, 9, 9, 40), spare=5)
#: For values, gradients, opcheck and compile.
CASES: list[VarlenCase] = [
    _RAGGED,
    replace(_RAGGED, name="double", dtype=torch.float64),
    replace(_RAGGED, name="span", selection_span=2, top_k=3),
    replace(_RAGGED, name="open_next", top_k=4, open_next=True),
    replace(_RAGGED, name="suffix", queries=(33, 0, 1, 20, 0, 9, 1)),
    replace(_RAGGED, name="stride", selection_stride=4, queries=(33, 0, 1, 22, 9, 1, 4)),
    replace(_RAGGED, name="one_document", lengths=(50,), spare=0),
    replace(_RAGGED, name="equal", lengths=(20, 20, 20), spare=0),
    replace(_RAGGED, name="no_document", lengths=(), spare=3),
    replace(_RAGGED, name="empty_documents", lengths=(0, 0), spare=0),
    replace(_RAGGED, name="half", dtype=torch.bfloat16, H=2, K=32, V=32),
    replace(_RAGGED, name="inv_freq", inv_freq=(1.0, -0.3, 0.01, 0.0)),
    replace(_RAGGED, name="joint", importance="exp_joint"),
    replace(_RAGGED, name="free_top", lengths=(33, 0, 1, 70, 13, 13, 100), M=13),
    replace(
        _RAGGED,
        name="free_top_stride",
        M=10,
        selection_stride=4,
        queries=(33, 0, 1, 22, 9, 1, 4),
        selection_span=2,
        open_next=True,
        top_k=2,
    ),
    replace(_RAGGED, name="free_top_half", M=20, dtype=torch.bfloat16, H=2, K=32, V=32),
    replace(_RAGGED, name="free_top_not_causal", M=20, importance="lse"),
    replace(_RAGGED, name="not_causal", importance="lse"),
]

_H200 = VarlenCase(
    name="spread", dtype=torch.bfloat16, lengths=_spread(39, 128, 16384), H=32, H_kv=4, K=128, V=128, r=16, top_k=512,
    M=8192, selection_stride=16,
)  # fmt: skip
_CPU = replace(
    _H200, dtype=torch.float32, lengths=_spread(39, 16, 2048), H=4, H_kv=1, K=64, V=64, top_k=64, M=1024
)
#: 39 documents of very different lengths; equal ones, which is a batch; documents so short that nothing is left out.
BENCHMARK_CASES: dict[str, list[VarlenCase]] = {
    "cuda": [
        _H200,
        replace(_H200, name="spread", selection_stride=1),
        replace(_H200, name="equal", lengths=(16384,) * 8),
        replace(_H200, name="dense", lengths=_spread(64, 512, 8192)),
    ],
    "cpu": [_CPU, replace(_CPU, name="dense", lengths=_spread(16, 64, 1024))],
}
