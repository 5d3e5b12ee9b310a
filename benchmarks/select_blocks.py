"""select_blocks against plain PyTorch that holds all block scores, by chunks of queries.

Run: ``python -m benchmarks run select_blocks --csv PATH``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.baselines import compile_every_case
from benchmarks.harness.suite import Benchmark, Candidate
from htree_ops.reference import selection as reference
from tests.support.select_blocks_cases import BENCHMARK_CASES

#: Scores of a chunk of the baseline, so that it fits beside the inputs at any length.
CHUNK_SCORES = 1 << 28

Chunk = Callable[[Tensor, Tensor, Tensor, int, int], tuple[Tensor, Tensor]]


def select_chunk(
    query: Tensor, key: Tensor, leaders: Tensor, count: int, block_size: int
) -> tuple[Tensor, Tensor]:
    """Lists of the leaders at tokens ``leaders``, without open_next: products, a maximum and torch.topk."""
    products = torch.einsum("blhd,bthd->blht", query, key)
    blocks = torch.arange(key.shape[1] // block_size, device=key.device)
    diagonal = (leaders // block_size)[:, None, None]
    scores = products.unflatten(-1, (-1, block_size)).amax(-1).float()
    scores = scores.masked_fill(blocks > diagonal, -torch.inf).masked_fill(blocks == diagonal, torch.inf)
    best, chosen = scores.topk(min(count, scores.shape[-1]), dim=-1)
    chosen = torch.where(chosen <= diagonal, chosen, len(blocks))
    chosen, order = chosen.sort(dim=-1)
    return torch.where(chosen < len(blocks), chosen, -1).int(), best.gather(-1, order)


def baseline(chunk: Chunk) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(
        index_query: Tensor,
        index_key: Tensor,
        count: int,
        block_size: int,
        stride: int,
        local: int,
        first: int,
        open_next: bool,
    ) -> tuple[Tensor, Tensor]:
        T, heads = index_key.shape[1:3]
        leaders = torch.arange(T - index_query.shape[1], T, stride, device=index_key.device)
        rows = max(1, CHUNK_SCORES // (T * heads))
        parts = [
            chunk(queries, index_key, places, count, block_size)
            for queries, places in zip(
                index_query[:, ::stride].split(rows, 1), leaders.split(rows), strict=True
            )
        ]
        return torch.cat([x for x, _ in parts], 1), torch.cat([x for _, x in parts], 1)

    return run


def check(inputs: tuple[Any, ...], result: tuple[Tensor, Tensor]) -> None:
    """Every 997th list: ascending, ending with the diagonal block, and as good as the best in float64.

    A baseline that sums in the dtype of its inputs may part at equal scores; what it chose must be as good to the
    error of such a sum.
    """
    query, key, count, block_size, stride, *_, open_next = inputs
    blocks, _ = result
    T = key.shape[1]
    for row in range(0, blocks.shape[1], 997):
        t = T - query.shape[1] + row * stride
        diagonal = t // block_size
        expected = reference.block_scores(
            query[:, row * stride : row * stride + 1].double(), key[:, : t + 1].double(), block_size
        )[:, 0]
        ours = blocks[:, row]
        valid = ours >= 0
        assert bool((ours.max(-1).values == diagonal).all())
        assert bool((valid.sum(-1) == min(count, diagonal + 1)).all())
        if open_next or diagonal < count:
            continue
        least = torch.where(ours == diagonal, torch.inf, expected.gather(-1, ours.clamp(min=0).long())).amin(
            -1
        )
        best = expected[..., :diagonal].topk(count - 1, dim=-1).values[..., -1] if count > 1 else least
        slack = 4 * key.shape[-1] ** 0.5 * 2.0**-8 if query.element_size() == 2 else 1e-3
        assert bool((least >= best - slack * (1 + best.abs())).all())


def make_benchmarks(device: str) -> list[Benchmark]:
    """All benchmarks of the selection of blocks on ``device`` ("cpu" or "cuda")."""
    compile_every_case()
    compiled = torch.compile(select_chunk, dynamic=False)
    baselines = (
        Candidate("torch.compile", baseline(compiled), capturable=False),
        Candidate("eager", baseline(select_chunk), capturable=False),
    )
    ours = Candidate("htree_ops", torch.ops.htree.select_blocks)
    plain = tuple(
        Candidate(x.name, x.run, same_function=False, capturable=False) for x in baselines
    )  # of open_next, which a baseline does not know
    return [
        Benchmark("select_blocks", case, ours, plain if case.open_next else baselines, check)
        for case in BENCHMARK_CASES[device]
    ]
