"""Decoding from a tree cache against dense decode attention, and an append against a copy of its rows.

Run: ``python -m benchmarks run tree_cache --csv PATH``; ``--device cpu`` on a CPU.
Dense attention reads every token and computes another function, so its rows say so. "tree_attention" builds the tree
again in each step and computes the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.baselines import dense_steps
from benchmarks.harness.suite import Benchmark, Candidate
from htree_ops.ops.tree_cache.functions import cache_layers, tree_cache_append_, tree_cache_attention
from htree_ops.reference import htree_forward_naive
from htree_ops.reference.tree_cache import gather_tokens
from tests.support.tree_cache_cases import BENCHMARK_CASES, TreeCacheCase, filled_pools, offsets

#: Largest error of a row, as a part of its norm, where float64 takes the lists that the op chose: two correct choices
#: may differ where importances nearly tie, and one node moves the positions of all behind it
#: (docs/semantics/tree_attention.md §1.11).
NEAR = 5e-3

ops = torch.ops.htree


@dataclass(frozen=True, kw_only=True)
class DecodeCase(TreeCacheCase):
    """With the table of rotations that a server keeps."""

    def make_inputs(self, device: str | torch.device, seed: int = 0) -> tuple[Any, ...]:
        table = ops.rope_cache(self.top_k * self.compression_rate, self.key_dim, device=torch.device(device))
        return (*super().make_inputs(device, seed), None, table)


def tree_options(case: TreeCacheCase) -> dict[str, Any]:
    """Those of ``tree_attention``."""
    options = case.options()
    del options["page_size"]
    options["top_k_per_layer"] = options.pop("top_k")
    return options


def rebuild(case: TreeCacheCase, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What a step takes without a cache."""
    return ops.attention(q, k, v, **tree_options(case))[:, -1]


def dense_inputs(case: TreeCacheCase, device: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, H, 1, K] and the dense cache [B, H_kv, T, .]; every sequence has one length."""
    batch, length = len(case.lengths), case.lengths[0]
    k, v = (x.unflatten(0, (batch, length)).transpose(1, 2).contiguous() for x in case.tokens(device, seed))
    return case.last_queries(device, seed)[:, :, None], k, v


def rebuild_inputs(case: TreeCacheCase, device: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    k, v = (x.unflatten(0, (len(case.lengths), case.lengths[0])) for x in case.tokens(device, seed))
    return case.last_queries(device, seed)[:, None], k, v


def check_row(case: TreeCacheCase, inputs: tuple[Any, ...], lists: list[Tensor], row: Tensor) -> None:
    """The last row of the first sequence against float64, which takes ``lists``, [H_kv, k] for each layer."""
    q, k_pool, v_pool, table, lengths = inputs[:5]
    length = int(lengths[0])
    k, v = (gather_tokens(pool, table[0], length, case.page_size)[None] for pool in (k_pool, v_pool))
    parents = [
        own[None, None] for own in lists[: cache_layers(length, case.compression_rate, case.max_top_nodes)]
    ]
    expected = htree_forward_naive(
        q[None, :1], k, v, **tree_options(case), parents=parents, compute_dtype=torch.float64
    ).out[0, 0]
    assert (row.double() - expected).norm() <= NEAR * expected.norm()


def check_decode(case: TreeCacheCase, inputs: tuple[Any, ...], result: Any) -> None:
    """A ring of one entry tells the lists."""
    table, device = inputs[3], inputs[3].device
    ring = torch.full((len(table), 1), -1, dtype=torch.int32, device=device)
    lists = ring.new_full((len(table), 1, case.layers, case.kv_heads, case.top_k), -1)
    given = (*inputs[:6], lists, ring)
    out, _, lists, _ = tree_cache_attention(*given, **case.options())
    assert torch.equal(out, result[0])
    check_row(case, inputs, list(lists[0, 0]), out[0])


def check_rebuild(case: TreeCacheCase, inputs: tuple[Any, ...], result: Tensor) -> None:
    q, k, v = rebuild_inputs(case, inputs[0].device.type, 0)
    parents = ops.attention_forward(q, k, v, **tree_options(case))[3]
    check_row(case, inputs, [own[0, -1] for own in parents], result[0])


@dataclass(frozen=True, kw_only=True)
class AppendCase(TreeCacheCase):
    """One more token for sequences that hold ``lengths``."""

    def make_inputs(self, device: str | torch.device, seed: int = 0) -> tuple[Any, ...]:
        k, v = self.tokens(device, seed)
        k_pool, v_pool, table = filled_pools(self, k, v, seed)
        batch = len(self.lengths)
        before = torch.tensor(self.lengths, dtype=torch.int32, device=device) - 1
        cu = offsets((1,) * batch, device)
        new = (x[:batch].clone() for x in (k, v))  # a view would keep all tokens
        return (k_pool, v_pool, *new, table, before, cu, None, 1)

    def bytes(self) -> int:
        """A row is read and written; each finishes a node of layer 1 in one of r steps, counted as if it did."""
        size = self.dtype.itemsize
        rows = 2 + (self.compression_rate + 1) * (self.layers > 1)
        return size * len(self.lengths) * self.kv_heads * (self.key_dim + self.value_dim) * rows

    def flops(self) -> int:
        return len(self.lengths) * self.kv_heads * (self.key_dim + self.value_dim) * self.compression_rate


def append(case: AppendCase, *inputs: Any) -> tuple[Tensor, Tensor]:
    tree_cache_append_(*inputs, **case.options())
    return inputs[0], inputs[1]


def copy_of(*inputs: Any) -> tuple[Tensor, Tensor]:
    return inputs[2].clone(), inputs[3].clone()


def check_append(case: AppendCase, inputs: tuple[Any, ...], result: tuple[Tensor, Tensor]) -> None:
    """The new token's rows of the first sequence."""
    token = case.lengths[0] - 1
    page = int(inputs[4][0, token // case.page_size])
    for pool, rows in zip(result, inputs[2:4], strict=True):
        assert torch.equal(pool[page, :, token % case.page_size], rows[0])


def decode_benchmark(case: TreeCacheCase, device: str) -> Benchmark:
    yardsticks = dense_steps(device, dense_inputs)
    case = DecodeCase(**vars(case))
    again = Candidate(
        "tree_attention", partial(rebuild, case), rebuild_inputs, check=partial(check_rebuild, case)
    )
    ours = Candidate(
        "htree_ops", partial(tree_cache_attention, page_size=case.page_size, options=case.tree_options())
    )
    return Benchmark("tree_cache_attention", case, ours, [again, *yardsticks], partial(check_decode, case))


def append_benchmark(case: TreeCacheCase) -> Benchmark:
    one = AppendCase(**vars(replace(case, name=f"append {case.name}")))
    copy = Candidate("copy of the rows", copy_of, same_function=False)
    return Benchmark(
        "tree_cache_append_",
        one,
        Candidate("htree_ops", partial(append, one)),
        [copy],
        partial(check_append, one),
    )


def make_benchmarks(device: str) -> list[Benchmark]:
    """All benchmarks of the family on ``device`` ("cpu" or "cuda")."""
    cases = BENCHMARK_CASES[device]
    widest = max(cases, key=lambda case: len(case.lengths))
    return [*(decode_benchmark(case, device) for case in cases), append_benchmark(widest)]
