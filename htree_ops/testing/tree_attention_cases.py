"""Problems of tree attention (docs/semantics.md §1): every edge of §1.9, with their bytes and flops.

One list feeds the tests, the gradient checks, opcheck and the benchmarks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from htree_ops.reference import tree_attention as reference
from htree_ops.testing import layouts
from htree_ops.testing.cases import Case, normal

__all__ = [
    "BENCHMARK_CASES",
    "CASES",
    "DTYPES",
    "GRADIENT_SHAPES",
    "LAYOUTS",
    "SHAPES",
    "Stage",
    "TreeAttentionCase",
]

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def _fused_projection(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as slices of one projection [B,T,...]; q takes its last rows where it is shorter."""
    rows = torch.cat([_padded_front(q, k.shape[1]).flatten(2), k.flatten(2), v.flatten(2)], dim=-1)
    widths = [x.shape[2] * x.shape[3] for x in (q, k, v)]
    parts = rows.split(widths, dim=-1)
    views = [part.unflatten(-1, x.shape[2:]) for part, x in zip(parts, (q, k, v), strict=True)]
    return views[0][:, k.shape[1] - q.shape[1] :], views[1], views[2]


def _padded_front(q: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(q, (0, 0, 0, 0, length - q.shape[1], 0), value=torch.nan)


def _each(layout: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    return lambda q, k, v: (layout(q), layout(k), layout(v))


def _head_major(x: Tensor) -> Tensor:
    """[B,T,H,D] stored as [B,H,T,D]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


#: How q, k and v lie in memory. Unit stride in the last dim: the first five; the others are copied (§0.2).
LAYOUTS: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]] = {
    "contiguous": lambda q, k, v: (q, k, v),
    "fused_projection": _fused_projection,
    "head_major": _each(_head_major),
    "in_larger": _each(layouts.in_larger),
    "misaligned": _each(layouts.misaligned),
    "non_unit_last_stride": _each(layouts.non_unit_last_stride),
    "transposed": _each(layouts.transposed),
}


@dataclass(frozen=True)
class Stage:
    """What the ops of one layer get: keys and values [B,N,H_kv,·], lists [B,ceil(T_q/s),H_kv,k]."""

    layer: int
    layer_k: Tensor
    layer_v: Tensor
    parents: Tensor


@dataclass(frozen=True, kw_only=True)
class TreeAttentionCase(Case):
    """q [B,T_q,H,K], k [B,T,H_kv,K], v [B,T,H_kv,V] and the options of ``attention`` (§1.8).

    ``num_queries`` None means T. ``spread`` multiplies q: 1 gives scores of standard deviation about 1.
    """

    B: int = 1
    T: int
    num_queries: int | None = None
    H: int = 2
    H_kv: int = 1
    K: int = 8
    V: int = 8
    r: int = 4
    top_k: int = 2
    M: int = 8
    selection_stride: int = 1
    importance: str = "lse_causal"
    scale: float | None = None
    rope_base: float | None = 10000.0
    layout: str = "contiguous"
    spread: float = 1.0

    @property
    def T_q(self) -> int:
        """Number of query rows."""
        return self.T if self.num_queries is None else self.num_queries

    @property
    def t0(self) -> int:
        """Position of the first query."""
        return self.T - self.T_q

    @property
    def sizes(self) -> list[int]:
        """Nodes of each layer, tokens first."""
        return reference.layer_sizes(self.T, self.r, self.M)

    @property
    def state_dtype(self) -> torch.dtype:
        """dtype of scores, states and rotary tables."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def with_dtype(self, dtype: torch.dtype) -> TreeAttentionCase:
        """The same problem in another dtype."""
        return dataclasses.replace(self, dtype=dtype)

    def make_qkv(self, device: str | torch.device, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v with the case's values, in its layout."""
        q = normal((self.B, self.T_q, self.H, self.K), self.dtype, device, 3 * seed, self.spread)
        k = normal((self.B, self.T, self.H_kv, self.K), self.dtype, device, 3 * seed + 1)
        v = normal((self.B, self.T, self.H_kv, self.V), self.dtype, device, 3 * seed + 2)
        q, k, v = LAYOUTS[self.layout](q, k, v)
        return q, k, v

    def make_inputs(self, device: str | torch.device, seed: int = 0) -> tuple[Any, ...]:
        """Positional arguments of ``torch.ops.htree.attention``, ``store_parents`` left out."""
        return (*self.make_qkv(device, seed), *self.op_options())

    def op_options(self) -> tuple[Any, ...]:
        """The arguments of ``attention`` after q, k, v, ``store_parents`` left out."""
        return (
            self.r,
            self.M,
            self.top_k,
            self.scale,
            self.rope_base,
            self.importance,
            self.selection_stride,
        )

    def reference_options(self) -> dict[str, Any]:
        """Keywords of ``reference.tree_attention.htree_forward_naive``."""
        return {
            "compression_rate": self.r,
            "max_top_nodes": self.M,
            "top_k_per_layer": self.top_k,
            "scale": self.scale,
            "rope_base": self.rope_base,
            "importance": self.importance,
            "selection_stride": self.selection_stride,
        }

    def make_separated(
        self, device: str | torch.device, seed: int = 0, gap: float = 1e-4
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v whose selection no perturbation far below ``gap`` changes: for gradient checks.

        The importances of the last selected and the first dropped candidate differ by more than ``gap``
        relatively, at every layer and query. Draws seeds from ``seed`` upwards until that holds.

        Raises:
            RuntimeError: none of 200 draws is separated; the case is too large for it.
        """
        for attempt in range(200):
            inputs = self.make_qkv(device, seed + 1000 * attempt)
            if self._smallest_gap(*inputs) > gap:
                return inputs
        raise RuntimeError(f"case {self.name}: no draw keeps importances {gap} apart")

    def _smallest_gap(self, q: Tensor, k: Tensor, v: Tensor) -> float:
        forward = reference.htree_forward_naive(
            q, k, v, **self.reference_options(), compute_dtype=torch.float64
        )
        smallest = float("inf")
        for step in forward.trace:
            num = step.candidates.num[:, :: self.selection_stride]
            if step.layer == 0 or not num.numel() or int(num.max()) <= self.top_k:
                continue
            scores = step.scores[:, :: self.selection_stride]
            importance = reference.importance_of(scores, num, self.importance)
            order = reference.order_by_key(importance, num)
            ranked = importance.gather(-1, order)
            last, first = ranked[..., self.top_k - 1], ranked[..., self.top_k]
            relative = (last - first) / last
            matters = num > max(self.top_k, 1)
            if self.top_k > 1 and bool(matters.any()):
                smallest = min(smallest, float(relative[matters].min()))
        return smallest

    def make_table(self, device: str | torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin [k*r, K/2] for the staged ops, the library's own dtype."""
        table = reference.rope_cache(
            self.top_k * self.r, self.K, self.rope_base, dtype=self.state_dtype, device=torch.device(device)
        )
        return table[0], table[1]

    def make_stages(self, q: Tensor, k: Tensor, v: Tensor) -> list[Stage]:
        """Inputs of the staged ops, bottom layer first, with the lists that the reference selects."""
        forward = reference.htree_forward_naive(
            q, k, v, **self.reference_options(), compute_dtype=torch.float64
        )
        return [
            Stage(layer, layer_k.to(k.dtype), layer_v.to(v.dtype), parents)
            for layer, ((layer_k, layer_v), parents) in enumerate(
                zip(forward.layers, forward.parents, strict=True)
            )
        ]

    def num_candidates(self) -> tuple[list[int], list[int]]:
        """Candidates and merged ones, summed over the queries of one head, by layer (§1.3)."""
        times = torch.arange(self.t0, self.T)
        num_layers = len(self.sizes)
        found, merged = [0] * num_layers, [0] * num_layers
        lists = times // self.r**num_layers + 1
        for layer in reversed(range(num_layers)):
            n = (lists - 1) * self.r + times // self.r**layer % self.r + 1
            lists = n.clamp(max=self.top_k)
            found[layer] = int(n.sum())
            merged[layer] = found[layer] - (int(lists.sum()) if layer else 0)
        return found, merged

    def bytes(self) -> int:
        """q, k, v read and out written once, in the forward."""
        q_and_out = self.B * self.T_q * self.H * (self.K + self.V)
        k_and_v = self.B * self.T * self.H_kv * (self.K + self.V)
        return (q_and_out + k_and_v) * self.dtype.itemsize

    def flops(self) -> int:
        """Forward: 2K per score, 2 per score that is ranked, 2V and 2 per merged candidate."""
        found, merged = self.num_candidates()
        per_head = 2 * self.K * sum(found) + 2 * sum(found[1:]) + (2 * self.V + 2) * sum(merged)
        return self.B * self.H * per_head

    @property
    def shapes(self) -> str:
        """Sizes and the options that shape the tree."""
        queries = "" if self.num_queries is None else f" T_q={self.T_q}"
        return (
            f"B={self.B} T={self.T}{queries} H={self.H}/{self.H_kv} K={self.K} V={self.V} "
            f"r={self.r} k={self.top_k} M={self.M} s={self.selection_stride}"
        )


@dataclass(frozen=True, kw_only=True)
class TreeAttentionBackwardCase(Case):
    """The gradient of ``forward``: what ``attention_forward`` gave, and a standard normal upstream gradient."""

    forward: TreeAttentionCase

    def make_inputs(self, device: str | torch.device, seed: int = 0) -> tuple[Any, ...]:
        """Positional arguments of ``torch.ops.htree.attention_backward``; runs the forward op."""
        q, k, v, *options = self.forward.make_inputs(device, seed)
        out, gmax, gsum, parents = torch.ops.htree.attention_forward(q, k, v, *options)
        dout = normal(tuple(out.shape), self.dtype, device, 3 * seed + 1_000_003)
        return (dout, q, k, v, out, gmax, gsum, parents, *options)

    def bytes(self) -> int:
        """q, k, v, out, dout read and dq, dk, dv written once; the lists read once."""
        case = self.forward
        outputs = case.B * case.T_q * case.H * 2 * case.V
        lists = 4 * case.B * -(-case.T_q // case.selection_stride) * case.H_kv * case.top_k * len(case.sizes)
        operands = case.B * (case.T_q * case.H * case.K + case.T * case.H_kv * (case.K + case.V))
        return (outputs + 2 * operands) * case.dtype.itemsize + lists

    def flops(self) -> int:
        """Five products of the merged candidates: scores, dP, dV, dQ, dK."""
        case = self.forward
        _, merged = case.num_candidates()
        return case.B * case.H * sum(merged) * (6 * case.K + 4 * case.V)

    @property
    def shapes(self) -> str:
        """As of the forward."""
        return self.forward.shapes


def _shape(name: str, **sizes: Any) -> TreeAttentionCase:
    return TreeAttentionCase(name=name, dtype=torch.float32, **sizes)


#: Every edge of §1.9, once, in float32; ``with_dtype`` gives the others.
SHAPES: tuple[TreeAttentionCase, ...] = (
    # lengths around the boundaries of layers: M = 8, r = 4
    _shape("empty_sequence", T=0),
    _shape("empty_batch", B=0, T=9),
    _shape("one_token", T=1),
    _shape("two_tokens", T=2),
    _shape("below_r", T=3),
    _shape("one_layer_full", T=8),
    _shape("two_layers_first", T=9),
    _shape("two_layers_full", T=32),
    _shape("three_layers_first", T=33),
    _shape("three_layers_full", T=128),
    _shape("four_layers_first", T=129),
    _shape("ragged_everywhere", T=107, r=3, top_k=3, M=5),
    # branching and list width
    _shape("binary", T=61, r=2, top_k=3, M=5),
    _shape("binary_deep", T=200, r=2, top_k=2, M=2),
    _shape("r16", T=300, r=16, top_k=2, M=20),
    _shape("r5", T=77, r=5, top_k=2, M=10),
    _shape("only_the_rightmost", T=70, r=4, top_k=1, M=4),
    _shape("single_top_node", T=40, r=3, top_k=2, M=1),
    _shape("narrow_top", T=90, r=4, top_k=4, M=3),
    _shape("wide_lists", T=150, r=4, top_k=16, M=64),
    _shape("everything_selected", T=100, r=3, top_k=40, M=9),
    _shape("uneven_k", T=190, r=4, top_k=7, M=28),
    # heads and widths
    _shape("batch", B=3, T=50, H=4, H_kv=2),
    _shape("multi_head", T=45, H=3, H_kv=3),
    _shape("group_of_8", T=70, H=8, H_kv=1),
    _shape("group_of_3", B=2, T=40, H=6, H_kv=2),
    _shape("group_of_16", T=66, H=16, H_kv=1, K=16, V=16),
    _shape("narrow_key", T=60, K=2, V=4),
    _shape("odd_value", T=60, K=4, V=5),
    _shape("one_value", T=60, K=6, V=1),
    _shape("wide_value", T=40, K=4, V=70),
    _shape("key_18", T=50, K=18, V=18),
    _shape("head_64", T=80, H=4, H_kv=2, K=64, V=64, r=4, top_k=4, M=16),
    _shape("head_128", T=70, H=8, H_kv=2, K=128, V=128, r=16, top_k=4, M=16),
    # suffixes of the keys, strides of the selection
    _shape("decode", T=107, num_queries=1),
    _shape("chunk", B=2, T=107, num_queries=19),
    _shape("no_query", T=20, num_queries=0),
    _shape("stride2", T=107, r=4, selection_stride=2),
    _shape("stride4", B=2, T=130, H=4, H_kv=2, r=4, top_k=3, M=12, selection_stride=4),
    _shape("stride16", T=301, r=16, top_k=2, M=16, selection_stride=16),
    _shape("ragged_suffix", T=108, num_queries=27, r=3, top_k=3),
    _shape("stride4_suffix", T=125, num_queries=37, r=4, top_k=3, selection_stride=4),
    # options
    _shape("importance_lse", B=2, T=100, H=6, H_kv=2, importance="lse"),
    _shape("importance_joint", B=2, T=100, H=6, H_kv=2, importance="exp_joint"),
    _shape("no_rotation", T=100, rope_base=None),
    _shape("other_base", T=100, rope_base=500.0),
    _shape("other_scale", T=100, scale=0.7),
    _shape("peaked", T=107, H=4, H_kv=2, spread=8.0),
    # layouts
    _shape("fused_projection", B=2, T=60, H=4, H_kv=2, K=8, V=6, layout="fused_projection"),
    _shape("fused_suffix", B=2, T=60, num_queries=11, H=4, H_kv=2, layout="fused_projection"),
    _shape("head_major", B=2, T=60, H=4, H_kv=2, layout="head_major"),
    _shape("in_larger", B=2, T=60, H=4, H_kv=2, layout="in_larger"),
    _shape("misaligned", B=2, T=60, H=4, H_kv=2, layout="misaligned"),
    _shape("copied_last_stride", B=2, T=60, H=4, H_kv=2, layout="non_unit_last_stride"),
    _shape("copied_transposed", B=2, T=60, H=4, H_kv=2, layout="transposed"),
)

#: Every shape in every dtype.
CASES = [shape.with_dtype(dtype) for shape in SHAPES for dtype in DTYPES]

#: Small problems in float64 for gradcheck and gradient comparisons: several layers, all options.
GRADIENT_SHAPES: tuple[TreeAttentionCase, ...] = tuple(
    shape.with_dtype(torch.float64)
    for shape in (
        _shape("two_layers", T=9, H=2, H_kv=1, K=4, V=3, r=2, top_k=2, M=4),
        _shape("three_layers_ragged", T=31, H=2, H_kv=1, K=2, V=2, r=3, top_k=2, M=4),
        _shape("grouped", T=13, H=4, H_kv=2, K=2, V=1, r=2, top_k=2, M=3),
        _shape("only_the_rightmost", T=17, H=2, H_kv=1, K=2, V=2, r=3, top_k=1, M=3),
        _shape("exact_regime", T=12, H=2, H_kv=2, K=4, V=2, r=2, top_k=12, M=4),
        _shape("one_layer", T=6, H=1, H_kv=1, K=2, V=3, r=2, top_k=4, M=8),
        _shape("suffix", T=21, num_queries=6, H=2, H_kv=1, K=2, V=2, r=3, top_k=2, M=4),
        _shape("decode", T=21, num_queries=1, H=2, H_kv=1, K=2, V=2, r=3, top_k=2, M=4),
        _shape("stride", T=22, H=2, H_kv=1, K=2, V=2, r=4, top_k=2, M=4, selection_stride=2),
        _shape("no_rotation", T=15, H=2, H_kv=1, K=2, V=2, r=2, top_k=2, M=3, rope_base=None),
        _shape(
            "fused_projection", B=2, T=11, H=2, H_kv=1, K=2, V=2, r=2, top_k=2, M=3, layout="fused_projection"
        ),
    )
)


def _model(T: int, dtype: torch.dtype, **sizes: Any) -> TreeAttentionCase:
    defaults = {"H": 32, "H_kv": 4, "K": 128, "V": 128, "r": 16, "top_k": 512, "M": 8192}
    stride = sizes.get("selection_stride", 1)
    return TreeAttentionCase(name=f"T{T}_s{stride}", T=T, dtype=dtype, **{**defaults, **sizes})


#: Sizes of the results tables by device type.
BENCHMARK_CASES: dict[str, list[TreeAttentionCase]] = {
    "cuda": [
        _model(T, torch.bfloat16, selection_stride=stride)
        for T in (32_768, 65_536, 131_072)
        for stride in (1, 16)
    ],
    "cpu": [
        _model(T, torch.float32, H=4, H_kv=1, K=64, V=64, top_k=64, M=1024, selection_stride=stride)
        for T in (32_768, 65_536)
        for stride in (1, 16)
    ],
}

BENCHMARK_BACKWARD_CASES: dict[str, list[TreeAttentionBackwardCase]] = {
    device: [
        TreeAttentionBackwardCase(name=case.name, dtype=case.dtype, forward=case)
        for case in cases
        if case.T <= 32_768
    ]
    for device, cases in BENCHMARK_CASES.items()
}
