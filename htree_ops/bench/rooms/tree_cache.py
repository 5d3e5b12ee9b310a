"""Decoding from a tree cache against dense decode attention, and an append against a copy of its rows.

Run: ``python -m htree_ops bench --room tree_cache --json PATH --csv PATH``; ``--device cpu`` on a CPU.
Dense attention reads every token and computes another function, so its rows say so. "tree_attention" builds the tree
again in each step and computes the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from htree_ops.bench.suite import Benchmark, Candidate
from htree_ops.reference.tree_cache import gather_tokens
from htree_ops.testing.tree_cache_cases import BENCHMARK_CASES, TreeCacheCase, filled_pools, offsets

BACKENDS = {
    "cuda": {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention-2": SDPBackend.FLASH_ATTENTION},
    "cpu": {"flash": SDPBackend.FLASH_ATTENTION},
}
#: Largest part of a row's norm by which two sets of kernels may differ: they round scores differently, and select
#: differently where importances tie (docs/semantics/tree_attention.md §1.11).
NEAR = 2e-2

ops = torch.ops.htree


def tree_options(case: TreeCacheCase) -> dict[str, Any]:
    """Those of ``tree_attention``."""
    options = case.options()
    del options["page_size"]
    options["top_k_per_layer"] = options.pop("top_k")
    return options


def rebuild(case: TreeCacheCase, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What a step takes without a cache."""
    return ops.attention(q, k, v, **tree_options(case))[:, -1]


def dense_attention(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def dense_inputs(case: TreeCacheCase, device: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, H, 1, K] and the dense cache [B, H_kv, T, .]; every sequence has one length."""
    batch, length = len(case.lengths), case.lengths[0]
    k, v = (x.unflatten(0, (batch, length)).transpose(1, 2).contiguous() for x in case.tokens(device, seed))
    return case.last_queries(device, seed)[:, :, None], k, v


def rebuild_inputs(case: TreeCacheCase, device: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    k, v = (x.unflatten(0, (len(case.lengths), case.lengths[0])) for x in case.tokens(device, seed))
    return case.last_queries(device, seed)[:, None], k, v


def check_decode(case: TreeCacheCase, inputs: tuple[Any, ...], result: Any) -> None:
    """The first sequence against ``tree_attention`` over its tokens."""
    q, k_pool, v_pool, table, lengths = inputs[:5]
    length = int(lengths[0])
    k, v = (gather_tokens(pool, table[0], length, case.page_size)[None] for pool in (k_pool, v_pool))
    expected = ops.attention(q[None, :1], k, v, **tree_options(case))[0, 0].float()
    out = (result[0] if isinstance(result, tuple) else result)[0].float()
    assert (out - expected).norm() <= NEAR * expected.norm()


@dataclass(frozen=True, kw_only=True)
class AppendCase(TreeCacheCase):
    """One more token for sequences that hold ``lengths``."""

    def make_inputs(self, device: str | torch.device, seed: int = 0) -> tuple[Any, ...]:
        k, v = self.tokens(device, seed)
        k_pool, v_pool, table = filled_pools(self, k, v, seed)
        batch = len(self.lengths)
        before = torch.tensor(self.lengths, dtype=torch.int32, device=device) - 1
        cu = offsets((1,) * batch, device)
        return (k_pool, v_pool, k[:batch], v[:batch], table, before, cu, None, 1)

    def bytes(self) -> int:
        """A row is read and written; each finishes a node of layer 1 in one of r steps, counted as if it did."""
        size = torch.empty((), dtype=self.dtype).element_size()
        rows = 2 + (self.compression_rate + 1) * (self.layers > 1)
        return size * len(self.lengths) * self.kv_heads * (self.key_dim + self.value_dim) * rows

    def flops(self) -> int:
        return len(self.lengths) * self.kv_heads * (self.key_dim + self.value_dim) * self.compression_rate


def append(case: AppendCase, *inputs: Any) -> tuple[Tensor, Tensor]:
    ops.tree_cache_append_(*inputs, **case.page_options())
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
    yardsticks = [
        Candidate(f"dense SDPA, {name}", partial(dense_attention, backend), dense_inputs, same_function=False)
        for name, backend in BACKENDS[device].items()
    ]
    again = Candidate("tree_attention", partial(rebuild, case), rebuild_inputs)
    ours = Candidate("htree_ops", partial(ops.tree_cache_attention, **case.options()))
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
    """All benchmarks of the room on ``device`` ("cpu" or "cuda")."""
    cases = BENCHMARK_CASES[device]
    widest = max(cases, key=lambda case: len(case.lengths))
    return [*(decode_benchmark(case, device) for case in cases), append_benchmark(widest)]
