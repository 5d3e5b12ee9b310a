"""One problem of tree attention (docs/semantics §1): its tensors, options, stages, bytes and flops."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from htree_ops.ops.tree_attention.options import DEFAULTS, OP_KWARGS, Importance, TreeOptions, pack
from htree_ops.reference import tree_attention as reference
from tests.support import layouts
from tests.support.cases import Case, normal

#: Options by their letters in the documentation, as cases of few tokens have them.
SHORT = {"compression_rate": "r", "max_top_nodes": "M"}
#: Options that are on or off, which drawn problems have in every mix.
SWITCHES = tuple(name for name, kind, _ in OP_KWARGS if kind == "bool")


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


def _correlated(noise: Tensor, rho: float) -> Tensor:
    """A stationary AR(1) process over dim 1 from independent values [B,T,...], by sums over doubled windows.

    The first value has the variance of the process; powers of ρ below 1e-6 are left out.
    """
    x = noise.to(torch.promote_types(noise.dtype, torch.float32), copy=True)
    x[:, 1:] *= (1 - rho * rho) ** 0.5
    window = 1
    while window < x.shape[1] and rho**window > 1e-6:
        x[:, window:] += rho**window * x[:, :-window].clone()
        window *= 2
    return x.to(noise.dtype)


#: How q, k and v lie in memory. The first five have unit stride in the last dim; the others are copied (§0.2).
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


def packed(*documented: Any, **others: Any) -> tuple[list[int], list[float]]:
    """The last two arguments of an op with packed options, from options in the order of the documents and by name.

    Options that no op takes are packed too, so that the op refuses them.
    """
    names = [name for name, _, _ in OP_KWARGS]
    given = dict(zip(names, documented, strict=False)) | others
    if "top_k_per_layer" in given:
        given["top_k"] = given.pop("top_k_per_layer")
    options: Any = SimpleNamespace(**(vars(DEFAULTS) | given))
    options.top_nodes = TreeOptions.top_nodes.fget(options)  # type: ignore[attr-defined]
    ints, floats = pack(options)
    return list(ints), list(floats)


@dataclass(frozen=True, kw_only=True)
class OptionFields:
    """The options of a case, by the names of :class:`htree_ops.TreeOptions` or by those of :data:`SHORT`."""

    selection_stride: int = 1
    selection_span: int | None = None
    open_next: bool = False
    importance: Importance = "lse_causal"
    scale: float | None = None
    rope_base: float | None = 10000.0
    inv_freq: tuple[float, ...] | None = None

    def keywords(self) -> dict[str, Any]:
        """Keywords of ``tree_attention``: all options that ops take."""
        attributes = {name: SHORT[name] if name not in vars(self) else name for name, _, _ in OP_KWARGS}
        return {name: getattr(self, attribute) for name, attribute in attributes.items()}

    def tree_options(self) -> TreeOptions:
        """The same as one object."""
        return TreeOptions(**self.keywords())

    def packed(self) -> tuple[list[int], list[float]]:
        """The last two arguments of the ops that take packed options."""
        return self.tree_options().packed()


@dataclass(frozen=True, kw_only=True)
class TreeAttentionCase(OptionFields, Case):
    """q [B,T_q,H,K], k [B,T,H_kv,K], v [B,T,H_kv,V] and the options of ``attention`` (§1.8).

    ``num_queries`` None means T. ``spread`` multiplies q: 1 gives scores of standard deviation about 1.
    ``correlation`` makes neighbouring tokens alike: each channel of q, k and v is a stationary AR(1) process over the
    tokens, x_t = ρ·x_(t-1) + √(1-ρ²)·ε_t, of variance 1; 0 gives independent tokens.
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
    layout: str = "contiguous"
    spread: float = 1.0
    correlation: float = 0.0

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
        if self.correlation:
            q, k, v = (_correlated(x, self.correlation) for x in (q, k, v))
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

    def make_call(
        self, device: str | torch.device, seed: int = 0
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        """q, k and v, and the keywords."""
        return *self.make_qkv(device, seed), self.reference_options()

    def reference_options(self) -> dict[str, Any]:
        """Keywords of ``reference.tree_attention.htree_forward_naive`` and of ``torch.ops.htree.attention``."""
        options = self.keywords()
        return options | {"top_k_per_layer": options.pop("top_k")}

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
            importance = step.importance
            if importance is None or not num.numel() or int(num.max()) <= self.top_k:
                continue
            order = reference.order_by_key(importance, num)
            ranked = importance.gather(-1, order)
            if self.open_next:  # any two of them may change places
                counted = torch.arange(1, ranked.shape[-1], device=num.device) < num[..., None]
                steps = (ranked[..., :-1] - ranked[..., 1:]) / ranked[..., :-1]
                crowded = counted & (num > self.top_k)[..., None]
                crowded[..., 0] = False  # the rightmost
                if bool(crowded.any()):
                    smallest = min(smallest, float(steps[crowded].min()))
                continue
            last, first = ranked[..., self.top_k - 1], ranked[..., self.top_k]
            relative = (last - first) / last
            matters = num > max(self.top_k, 1)
            if self.top_k > 1 and bool(matters.any()):
                smallest = min(smallest, float(relative[matters].min()))
        return smallest

    def make_table(self, device: str | torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin [k*r, K/2] for the staged ops, in the library's own dtype."""
        table = reference.rope_cache(
            self.top_k * self.r,
            self.K,
            self.rope_base,
            dtype=self.state_dtype,
            device=torch.device(device),
            inv_freq=self.inv_freq,
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
        """Candidates, and merged candidates, by layer, summed over the queries of one head (§1.3)."""
        times = torch.arange(self.t0, self.T, device="cpu")
        num_layers = len(self.sizes)
        found, merged = [0] * num_layers, [0] * num_layers
        tops = torch.full_like(times, num_layers - 1)
        if self.top_k * self.r < self.M:
            leaders = times - times % self.selection_stride
            tops = reference.OwnTops.of(leaders, self.r, self.M, self.top_k).tops
        lists = torch.ones_like(times)
        for layer in reversed(range(num_layers)):
            own = times // self.r**layer
            n = torch.where(tops > layer, (lists - 1) * self.r + own % self.r + 1, 0)
            n = torch.where(tops == layer, own + 1, n)
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
        span = "" if self.selection_span is None else f" c={self.selection_span}"
        span += " open_next" * self.open_next
        alike = f" AR(1) {self.correlation}" if self.correlation else ""
        return (
            f"B={self.B} T={self.T}{queries} H={self.H}/{self.H_kv} K={self.K} V={self.V} "
            f"r={self.r} k={self.top_k} M={self.M} s={self.selection_stride}{span}{alike}"
        )


@dataclass(frozen=True, kw_only=True)
class TreeAttentionBackwardCase(Case):
    """The gradient of ``forward``: what ``attention_forward`` gave, and a standard normal upstream gradient."""

    forward: TreeAttentionCase

    def make_inputs(self, device: str | torch.device, seed: int = 0) -> tuple[Any, ...]:
        """Positional arguments of ``torch.ops.htree.attention_backward``; runs the forward op."""
        q, k, v, *options = self.forward.make_inputs(device, seed)
        span = self.forward.selection_span
        out, gmax, gsum, parents = torch.ops.htree.attention_forward(q, k, v, *options, selection_span=span)
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
        """The sizes of the forward."""
        return self.forward.shapes
