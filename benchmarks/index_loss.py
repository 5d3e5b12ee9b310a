"""index_loss, forward and backward, against plain PyTorch that takes a few positions at a time.

Run: ``python -m benchmarks run index_loss --csv PATH``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.baselines import compile_every_case
from benchmarks.harness.suite import Benchmark, Candidate
from htree_ops.reference import index_loss as reference
from tests.support.index_loss_cases import BENCHMARK_CASES

#: Scores of the attention that the baseline holds at a time, in fp32.
CHUNK_SCORES = 1 << 28

Call = Callable[..., Tensor]


def chunk_loss(
    query: Tensor, key: Tensor, index_query: Tensor, index_key: Tensor, positions: Tensor, block_size: int
) -> Tensor:
    """Sum of the divergences at positions [B, n] of sequences whose length is a multiple of block_size."""
    blocks = torch.arange(key.shape[1] // block_size, device=key.device)
    before = (blocks < (positions // block_size)[..., None])[:, None]  # [B, 1, n, blocks]
    asked = query.gather(1, positions[..., None, None].expand(-1, -1, *query.shape[2:]))
    with torch.no_grad():
        grouped = asked.unflatten(2, (key.shape[2], -1)) * query.shape[-1] ** -0.5
        scores = torch.einsum("bnsgk,btsk->bsgnt", grouped, key).unflatten(-1, (-1, block_size))
        masses = scores.float().logsumexp(-1).masked_fill(~before[:, :, None], -torch.inf).softmax(-1)
        target = masses.flatten(1, 2).unflatten(1, (index_key.shape[2], -1)).mean(2)
    index = index_query.gather(1, positions[..., None, None].expand(-1, -1, *index_query.shape[2:]))
    products = torch.einsum("bnsd,btsd->bsnt", index, index_key).unflatten(-1, (-1, block_size))
    guess = products.amax(-1).float().masked_fill(~before, -torch.inf).log_softmax(-1)
    return (torch.xlogy(target, target) - target * guess.masked_fill(~before, 0)).sum()


def baseline(chunk: Call, block_size: int) -> Callable[..., tuple[Tensor, ...]]:
    """Loss and gradients, by as many positions at a time as CHUNK_SCORES allows."""

    def run(
        query: Tensor, key: Tensor, index_query: Tensor, index_key: Tensor, positions: Tensor, _: None
    ) -> tuple[Tensor, ...]:
        index = [x.detach().requires_grad_() for x in (index_query, index_key)]
        B, T, H = query.shape[:3]
        rows = max(1, CHUNK_SCORES // (B * T * H))
        share = positions.numel() * index_key.shape[2]
        total = torch.zeros((), device=query.device)
        for part in positions.split(rows, 1):
            loss = chunk(query, key, *index, part, block_size) / share
            loss.backward()
            total += loss.detach()
        gradients = [x.grad for x in index if x.grad is not None]
        return total, *gradients

    return run


def ours(block_size: int) -> Callable[..., tuple[Tensor, ...]]:
    """Loss and gradients of the op."""

    def run(
        query: Tensor, key: Tensor, index_query: Tensor, index_key: Tensor, positions: Tensor, _: None
    ) -> tuple[Tensor, ...]:
        index = [x.detach().requires_grad_() for x in (index_query, index_key)]
        loss = torch.ops.htree.index_loss(query, key, *index, positions, block_size=block_size)
        return loss.detach(), *torch.autograd.grad(loss, index)

    return run


def checks(block_size: int) -> Callable[[tuple[Any, ...], tuple[Tensor, ...]], None]:
    """Of some rows in float64, which find a wrong formula: other positions go the same way."""

    def check(inputs: tuple[Any, ...], result: tuple[Tensor, ...]) -> None:
        query, key, index_query, index_key, positions, _ = inputs
        found = []
        for t in positions[0, :8].tolist():
            q, k, iq, ik = (x[0, : t + 1].double() for x in (query, key, index_query, index_key))
            found.append(reference.divergences(q, k, iq, ik, t, block_size=block_size))
        mean = torch.stack(found).mean().item()
        assert 0.7 * mean < result[0].item() < 1.4 * mean
        assert all(bool(x.isfinite().all()) for x in result)

    return check


def make_benchmarks(device: str) -> list[Benchmark]:
    """All benchmarks of the loss on ``device`` ("cpu" or "cuda")."""
    compile_every_case()
    compiled = torch.compile(chunk_loss, dynamic=False)
    made = []
    for case in BENCHMARK_CASES[device]:
        size = case.block_size
        baselines = [
            Candidate("torch.compile", baseline(compiled, size), capturable=False),
            Candidate("eager", baseline(chunk_loss, size), capturable=False),
        ]
        candidate = Candidate("htree_ops", ours(size), capturable=False)
        made.append(Benchmark("index_loss", case, candidate, baselines, checks(size)))
    return made
