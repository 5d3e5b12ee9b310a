"""The tree: depth, levels, candidates and the lists that start a query (docs/semantics §1.2, §1.3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def accumulate_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of arithmetic and states: float64 for float64 inputs, else float32 (§0.1)."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def layer_sizes(length: int, compression_rate: int, max_top_nodes: int) -> list[int]:
    """Return the number of nodes of each layer, tokens first; the last one is at most `max_top_nodes`.

    Raises ValueError where the recursion N -> ceil(N / r) could not end (r < 2 or M < 1).
    """
    if compression_rate < 2:
        raise ValueError(f"compression_rate must be at least 2, got {compression_rate}")
    if max_top_nodes < 1:
        raise ValueError(f"max_top_nodes must be at least 1, got {max_top_nodes}")
    sizes = [length]
    while sizes[-1] > max_top_nodes:
        sizes.append(-(-sizes[-1] // compression_rate))
    return sizes


def child_counts(num_children: int, compression_rate: int, device: torch.device | None = None) -> Tensor:
    """Return c = min(r, N - i*r) for each parent i, int64 [ceil(N / r)]."""
    num_parents = -(-num_children // compression_rate)
    first = torch.arange(num_parents, device=device) * compression_rate
    return (num_children - first).clamp(max=compression_rate)


def mean_of_children(x: Tensor, compression_rate: int) -> Tensor:
    """Return the mean of each parent's existing children, [B,N,H,D] -> [B,ceil(N/r),H,D], unrounded.

    The sum runs over the children in order, in the accumulation dtype of x, which is also the result's.
    """
    batch, num_children, heads, width = x.shape
    counts = child_counts(num_children, compression_rate, x.device)
    padding = counts.numel() * compression_rate - num_children
    children = torch.nn.functional.pad(x.to(accumulate_dtype(x)), (0, 0, 0, 0, 0, padding))
    children = children.view(batch, counts.numel(), compression_rate, heads, width)
    total = torch.zeros_like(children[:, :, 0])
    for child_idx in range(compression_rate):
        total = total + children[:, :, child_idx]
    return total / counts.view(1, -1, 1, 1).to(total.dtype)


def tree_build(k: Tensor, v: Tensor, compression_rate: int = 16) -> tuple[Tensor, Tensor]:
    """Mean-pool one level: k [B,N,H,K], v [B,N,H,V] -> [B,ceil(N/r),H,K], [B,ceil(N/r),H,V], same dtype.

    Each parent is the mean of its c <= r existing children, summed in float32 (float64 for float64)
    and rounded once.
    """
    if compression_rate < 2:
        raise ValueError(f"compression_rate must be at least 2, got {compression_rate}")
    return (
        mean_of_children(k, compression_rate).to(k.dtype),
        mean_of_children(v, compression_rate).to(v.dtype),
    )


def span_means(k: Tensor, span: int) -> Tensor:
    """Mean of each `span` neighbouring rows, k [B,T,H,K] -> [B,ceil(T/span),H,K], summed as in `tree_build`."""
    if span < 1:
        raise ValueError(f"span must be at least 1, got {span}")
    return mean_of_children(k, span).to(k.dtype)


def tree_build_backward(
    dpk: Tensor, dpv: Tensor, n_child: int, compression_rate: int = 16
) -> tuple[Tensor, Tensor]:
    """Give each child 1/c of its parent's gradient: [B,ceil(N/r),H,·] -> [B,N,H,·]."""
    counts = child_counts(n_child, compression_rate, dpk.device)
    parent_of = torch.arange(n_child, device=dpk.device) // compression_rate

    def share(d: Tensor) -> Tensor:
        wide = d.to(accumulate_dtype(d)) / counts.view(1, -1, 1, 1)
        return wide[:, parent_of].to(d.dtype)

    return share(dpk), share(dpv)


def build_layers(
    k: Tensor, v: Tensor, compression_rate: int, max_top_nodes: int, compute_dtype: torch.dtype | None = None
) -> list[tuple[Tensor, Tensor]]:
    """Return (K, V) of every layer, tokens first, in `compute_dtype` (default: the accumulation dtype).

    The values are rounded to the storage dtype of k and v level by level, each level built from the
    rounded one below; gradients are those of the unrounded means.
    """
    wide = accumulate_dtype(k) if compute_dtype is None else compute_dtype
    layers = [(k.to(wide), v.to(wide))]
    for _ in layer_sizes(k.shape[1], compression_rate, max_top_nodes)[1:]:
        below_k, below_v = layers[-1]
        above_k = _round_values(mean_of_children(below_k, compression_rate), k.dtype)
        above_v = _round_values(mean_of_children(below_v, compression_rate), v.dtype)
        layers.append((above_k, above_v))
    return layers


def _round_values(x: Tensor, storage: torch.dtype) -> Tensor:
    rounded = x.detach().to(storage).to(x.dtype)
    return x + (rounded - x).detach() if x.requires_grad else rounded


def top_parents(
    B: int,
    T: int,
    heads: int,
    top_k: int,
    num_layers: int,
    compression_rate: int = 16,
    t0: int = 0,
    selection_stride: int = 1,
    *,
    device: torch.device | None = None,
) -> Tensor:
    """Virtual parents above the top layer, int32 [B,ceil(T/s),heads,k], for queries t0 ... t0+T-1.

    Row t holds 0 ... floor(floor(t / r^(L-1)) / r), padded with -1 (§1.3).
    """
    leaders = torch.arange(0, T, selection_stride, device=device) + t0
    counts = leaders // compression_rate ** (num_layers - 1) // compression_rate + 1
    slots = torch.arange(top_k, device=device)
    rows = torch.where(slots < counts[:, None], slots, -1).to(torch.int32)
    return rows[None, :, None, :].expand(B, -1, heads, -1).contiguous()


@dataclass
class OwnTops:
    """Where the tree of each row's own prefix ends, for M > k*r (§1.3).

    Row t, with its leader t0, walks a tree of L layers, the least L with ceil((t0 + 1) / r^(L - 1)) <= M. Its list at
    layer L - 1 holds every parent up to its own; that list and those above follow from t0 alone and are kept as -1.

    tops: int64 [ceil(T_q/s)], L - 1 of each leader. leaders: its place t0. width: of the widest list.
    """

    tops: Tensor
    leaders: Tensor
    width: int
    compression_rate: int

    @classmethod
    def of(cls, leaders: Tensor, compression_rate: int, max_top_nodes: int, top_k: int) -> OwnTops:
        """Those of the rows whose leaders stand at `leaders`, int64 [ceil(T_q/s)]."""
        tops, nodes = torch.zeros_like(leaders), leaders + 1
        while (nodes > max_top_nodes).any():
            above = nodes > max_top_nodes
            tops = tops + above
            nodes = torch.where(above, -(-nodes // compression_rate), nodes)
        own_parents = leaders // compression_rate**tops // compression_rate
        width = max([top_k, *(own_parents + 1).tolist()])
        return cls(tops, leaders, width, compression_rate)

    def lists(self, chosen: Tensor, layer: int) -> Tensor:
        """The lists [B,rows,S,width] of `layer`, where the layers above chose `chosen` [B,rows,S,k or width]."""
        parents = self.leaders // self.compression_rate**layer // self.compression_rate
        slots = torch.arange(self.width, device=chosen.device)
        every = torch.where(slots <= parents[:, None], slots, -1).to(chosen.dtype)[None, :, None]
        wide = torch.nn.functional.pad(chosen, (0, self.width - chosen.shape[-1]), value=-1)
        tops = self.tops[None, :, None, None]
        return torch.where(tops == layer, every, torch.where(tops > layer, wide, -1))

    def kept(self, lists: Tensor, layer: int, top_k: int) -> Tensor:
        """`lists` of `layer` as they are stored, int32 [B,rows,S,k]."""
        return torch.where(self.tops[None, :, None, None] > layer, lists[..., :top_k], -1).to(torch.int32)


@dataclass
class Candidates:
    """The candidates of one layer for queries t0 ... t0+T_q-1.

    nodes: int64 [B,T_q,S,C], node of each position (0 where absent, so that it can index).
    num: int64 [B,T_q,S], n of §1.3.
    inside: bool [B,T_q,S,C], position < n.
    present: bool [B,T_q,S,C], inside and the node exists and starts at or before the query.
    """

    nodes: Tensor
    num: Tensor
    inside: Tensor
    present: Tensor

    def rows(self, rows: slice) -> Candidates:
        """The candidates of some of the query rows."""
        return Candidates(self.nodes[:, rows], self.num[:, rows], self.inside[:, rows], self.present[:, rows])


def num_parents(parents: Tensor) -> Tensor:
    """Count the entries before the first -1, int64 [...]."""
    return ((parents == -1).cumsum(-1) == 0).sum(-1)


def rows_of_queries(parents: Tensor, num_queries: int, selection_stride: int) -> Tensor:
    """Give every query the list of its leader: [B,ceil(T_q/s),S,k] -> [B,T_q,S,k]."""
    return parents.repeat_interleave(selection_stride, dim=1)[:, :num_queries]


def candidates(parents: Tensor, layer: int, num_nodes: int, compression_rate: int, t0: int = 0) -> Candidates:
    """Expand parent lists [B,T_q,S,k] (any integer dtype) to the candidates of `layer` (§1.3).

    Position p is node P[p // r] * r + p % r. Lists that break the invariants stay harmless: nodes that
    are negative, >= num_nodes or beyond the query's diagonal block are absent.
    """
    rate = compression_rate
    lists = parents.long()
    num_queries = lists.shape[1]
    rightmost = (torch.arange(num_queries, device=lists.device) + t0) // rate**layer
    counts = num_parents(lists)
    num = torch.where(counts > 0, (counts - 1) * rate + (rightmost % rate).view(1, -1, 1) + 1, 0)
    nodes = (lists[..., None] * rate + torch.arange(rate, device=lists.device)).flatten(-2)
    inside = torch.arange(nodes.shape[-1], device=lists.device) < num[..., None]
    present = inside & (nodes >= 0) & (nodes < num_nodes) & (nodes <= rightmost.view(1, -1, 1, 1))
    return Candidates(torch.where(present, nodes, 0), num, inside, present)
