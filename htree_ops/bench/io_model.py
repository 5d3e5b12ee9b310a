"""What bounds tree attention: bytes of the staged pipeline by kernel, from the sizes alone; the verdict of two times.

Formulas: docs/semantics/io_only.md §2.4, §2.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from htree_ops.flops import tree_candidates
from htree_ops.reference import tree_attention as reference

#: Query heads that a block of the scores and accumulation kernels serves: for more heads K or V is read again.
HEADS_PER_BLOCK = 8
#: A block of the accumulation kernel covers the value columns of at most 32 lanes, a 16-byte pack each.
LANES, PACK_BYTES = 32, 16


@dataclass(frozen=True, kw_only=True)
class PipelineProblem:
    """Sizes of one prefill, T_q = T. Defaults are those of the command line.

    Raises:
        ValueError: sizes that the ops would refuse.
    """

    batch: int = 1
    seq_len: int = 120_000
    hq: int = 16
    h_kv: int = 1
    k_dim: int = 16
    v_dim: int = 16
    compression_rate: int = 16
    max_top_nodes: int = 8192
    top_k: int = 512
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name in ("batch", "seq_len", "hq", "h_kv", "k_dim", "v_dim", "max_top_nodes", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.compression_rate < 2:
            raise ValueError(f"compression_rate must be at least 2, got {self.compression_rate}")
        if self.hq % self.h_kv:
            raise ValueError(f"hq must be a multiple of h_kv, got {self.hq} and {self.h_kv}")
        if self.k_dim % 2:
            raise ValueError(f"k_dim must be even, got {self.k_dim}")
        if self.max_top_nodes > self.capacity:
            raise ValueError(
                f"max_top_nodes must be at most top_k * compression_rate = {self.capacity}, "
                f"got {self.max_top_nodes}"
            )

    @property
    def group(self) -> int:
        """G, query heads per kv head."""
        return self.hq // self.h_kv

    @property
    def capacity(self) -> int:
        """k * r, scores per row and head."""
        return self.top_k * self.compression_rate

    @property
    def score_bytes_per_query(self) -> int:
        """Scores of one query row of all batches, fp32."""
        return 4 * self.batch * self.h_kv * self.capacity * self.group

    @property
    def score_bytes(self) -> int:
        """The whole score buffer, fp32: B * T * H_kv * k * r * G * 4."""
        return self.seq_len * self.score_bytes_per_query

    @property
    def input_bytes(self) -> int:
        """q, k, v, the tree above them and the output, at their dtype."""
        tokens = self.h_kv * (self.k_dim + self.v_dim)
        tree = -(-tokens // (self.compression_rate - 1))
        rows = self.hq * (self.k_dim + self.v_dim) + tokens + tree
        return self.batch * self.seq_len * rows * self.dtype.itemsize

    @property
    def row_bytes_per_query(self) -> int:
        """Bytes of one query row besides the scores: three lists, two states of the heads, their output."""
        return self.batch * (3 * 4 * self.h_kv * (self.top_k + 1) + 2 * 4 * self.hq * (2 + self.v_dim))


@dataclass(frozen=True)
class Traffic:
    """Bytes of one kernel: ``unique``, each distinct byte once, and ``requested``, the sum of issued accesses."""

    unique: int
    requested: int


def layer_sizes(problem: PipelineProblem) -> list[int]:
    """Nodes of each layer, tokens first; the last has at most ``max_top_nodes``."""
    return reference.layer_sizes(problem.seq_len, problem.compression_rate, problem.max_top_nodes)


def candidate_sums(problem: PipelineProblem) -> list[tuple[int, int]]:
    """Per layer, tokens first: (sum of n, sum of min(k, n)) over the queries of one batch and kv head (§1.3)."""
    sizes = (problem.seq_len, problem.seq_len, problem.compression_rate, problem.max_top_nodes)
    layers = tree_candidates(*sizes, problem.top_k)
    return [(scored, int(n.clip(max=problem.top_k).sum())) for scored, _, n in reversed(layers)]


def _value_spans(problem: PipelineProblem) -> int:
    pack = PACK_BYTES // problem.dtype.itemsize
    columns = LANES * (pack if problem.v_dim % pack == 0 else 1)
    return -(-problem.v_dim // columns)


def traffic(problem: PipelineProblem) -> dict[tuple[int, str], Traffic]:
    """Bytes by (layer, kernel) of one call; the layer of tree_build is the one it makes, -1 is the final step."""
    p, e = problem, problem.dtype.itemsize
    sizes = layer_sizes(p)
    rows = p.batch * p.seq_len  # A
    lists = rows * p.h_kv
    states = rows * p.hq * (8 + 4 * p.v_dim)
    chunks = -(-p.group // HEADS_PER_BLOCK)
    found: dict[tuple[int, str], Traffic] = {}
    for layer, (below, above) in enumerate(pairwise(sizes), start=1):
        build = p.batch * p.h_kv * (p.k_dim + p.v_dim) * e * (below + above)
        found[layer, "tree_build"] = Traffic(build, build)
    for layer, (candidates, kept) in reversed(list(enumerate(candidate_sums(p)))):
        s = candidates * p.batch * p.h_kv
        scores = 4 * p.group * lists * p.capacity  # the tail of -inf included
        queries_and_lists = rows * p.hq * p.k_dim * e + 4 * lists * p.top_k + 4 * lists
        gather_k = s * p.k_dim * e * chunks
        table = 4 * p.k_dim * (s + lists) * chunks
        layer_k, layer_v = (sizes[layer] * p.batch * p.h_kv * width * e for width in (p.k_dim, p.v_dim))
        found[layer, "compute_scores"] = Traffic(
            queries_and_lists + layer_k + 4 * p.k_dim * p.capacity + scores,
            queries_and_lists + gather_k + table + scores,
        )
        read_scores = 4 * p.group * s
        if layer:
            small = 4 * lists + 4 * p.top_k * lists
            found[layer, "select_topk"] = Traffic(read_scores + small, 2 * read_scores + small)
            mask = 4 * p.top_k * lists + 4 * p.group * kept * p.batch * p.h_kv
            found[layer, "mask_topk_scores_"] = Traffic(mask, mask)
        fixed = 4 * p.top_k * lists + states
        spans = _value_spans(p)
        found[layer, "accumulate_non_topk"] = Traffic(
            layer_v + read_scores + fixed,
            s * p.v_dim * e * chunks + 2 * read_scores * spans + fixed * chunks * spans,
        )
        found[layer, "merge_to_global_"] = Traffic(3 * states, 3 * states)
        if layer:
            next_lists = 8 * p.top_k * lists
            found[layer, "compute_next_parents"] = Traffic(next_lists, next_lists + 4 * p.top_k * lists)
    last = rows * p.hq * (4 + 4 * p.v_dim + p.v_dim * e)
    found[-1, "final_normalize"] = Traffic(last, last)
    return found


def overhead_percent(full_ms: float, io_ms: float) -> float:
    """100 * (full - io) / full: the share of the time that the traffic does not explain.

    Raises:
        ValueError: a time is not positive and finite.
    """
    for time in (full_ms, io_ms):
        if not 0 < time < float("inf"):
            raise ValueError(f"times must be positive and finite, got {full_ms} and {io_ms}")
    return 100.0 * (full_ms - io_ms) / full_ms


def verdict(full_ms: float, io_ms: float) -> str:
    """What bounds the full computation, by the unrounded overhead of :func:`overhead_percent`.

    Returns:
        "inconclusive" below 0, "IO-bound" below 20, "balanced" up to 50, else "compute-bound".
    """
    overhead = overhead_percent(full_ms, io_ms)
    if overhead < 0:
        return "inconclusive"
    if overhead < 20:
        return "IO-bound"
    return "balanced" if overhead <= 50 else "compute-bound"
