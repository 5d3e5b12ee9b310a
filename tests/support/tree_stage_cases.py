"""Problems of the staged kernels of tree attention for benchmarks: one layer, the last query rows of a sequence."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.support.cases import Case, normal


@dataclass(frozen=True, kw_only=True)
class StageCase(Case):
    """Arguments of ``op`` at the layer above the tokens or, for scores and accumulation, at the bottom.

    The tree has ``r * M`` tokens and ``M`` nodes above them; queries stand at its end, so that lists are full.
    """

    op: str
    queries: int
    group: int = 8
    width: int = 128
    rate: int = 16
    top_k: int = 512

    @property
    def capacity(self) -> int:
        """Candidates of a full list, k * r."""
        return self.rate * self.top_k

    @property
    def _t0(self) -> int:
        return self.capacity * self.rate - self.queries

    def make_inputs(self, device: str | torch.device, seed: int = 0) -> tuple[Any, ...]:
        """Positional arguments of the op; lists and scores come from the stages before it."""
        ops, rate, top_k, t0 = torch.ops.htree, self.rate, self.top_k, self._t0
        q = normal((1, self.queries, self.group, self.width), self.dtype, device, seed)
        tokens, nodes = (
            normal((1, size, 1, self.width), self.dtype, device, seed + place)
            for place, size in ((1_000_003, self.capacity * rate), (2_000_003, self.capacity))
        )
        cos, sin = ops.rope_cache(self.capacity, self.width, device=torch.device(device)).unbind()
        top = ops.top_parents(1, self.queries, 1, top_k, 2, rate, t0, device=torch.device(device))
        scores, count = ops.compute_scores(q, nodes, top, cos, sin, 1, rate, None, t0)
        positions = ops.select_topk(scores, count, top_k)
        lists = ops.compute_next_parents(top, positions, rate)
        if self.op == "select_topk":
            return scores, count, top_k
        if self.op == "compute_next_parents":
            return top, positions, rate
        bottom = (q, tokens, lists, cos, sin, 0, rate, None, t0)
        if self.op == "compute_scores":
            return bottom
        return (tokens, lists, *ops.compute_scores(*bottom), 0, rate, t0)

    def bytes(self) -> int:
        """Each operand and result once, and the whole layer of K or V, which the lists together touch."""
        rows, lists = self.queries * self.capacity * self.group * 4, 4 * self.queries * self.top_k
        layer = self.capacity * self.rate * self.width * self.dtype.itemsize
        heads = self.queries * self.group
        return {
            "compute_scores": layer + rows + lists + heads * self.width * self.dtype.itemsize,
            "select_topk": rows + lists,
            "compute_next_parents": 3 * lists,
            "accumulate_non_topk": layer + rows + lists + heads * 4 * (2 + self.width),
        }[self.op]

    def flops(self) -> int:
        """Products and sums of scores or values; a handful per score that is ranked."""
        scores = self.queries * self.capacity * self.group
        return {
            "compute_scores": 2 * self.width * scores,
            "select_topk": 4 * scores,
            "compute_next_parents": self.queries * self.top_k,
            "accumulate_non_topk": (2 * self.width + 3) * scores,
        }[self.op]

    @property
    def shapes(self) -> str:
        """Sizes in the letters of docs/semantics/tree_attention.md §1.1."""
        return f"B=1 T_q={self.queries} H={self.group}/1 K={self.width} V={self.width} r={self.rate} k={self.top_k}"


OPS = ("compute_scores", "select_topk", "compute_next_parents", "accumulate_non_topk")

#: Cases by device type. Plain PyTorch gathers rows of K or V for every query, which bounds the size.
BENCHMARK_STAGE_CASES: dict[str, list[StageCase]] = {
    "cuda": [
        StageCase(name=f"q{queries}_d128", dtype=torch.bfloat16, op=op, queries=queries)
        for op, queries in zip(OPS, (1024, 4096, 65_536, 1024), strict=True)
    ],
    "cpu": [
        StageCase(name="q128_d64", dtype=torch.float32, op=op, queries=128, width=64, top_k=64, group=4)
        for op in OPS
    ],
}


def importance_of_positions(scores: Tensor, count: Tensor, positions: Tensor) -> Tensor:
    """Sum of the importances of the selected candidates without the rightmost; float64 [B,T_q,H_kv]."""
    from htree_ops.reference import tree_attention as reference

    importance = reference.importance_of(scores.double(), count)
    return (
        importance.gather(-1, positions.clamp(min=0).long())[..., 1:]
        .masked_fill(positions[..., 1:] < 0, 0)
        .sum(-1)
    )
