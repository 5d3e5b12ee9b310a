"""The staged pipeline of tree attention with full kernels or their IO-only variants, in pieces over the queries."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from htree_ops.bench.io_model import PipelineProblem

#: How the IO-only variant chooses positions: the hashes of §2.3, and the two modes that the design document rejects.
SELECTIONS = ("lcg", "stratified", "contiguous", "randint")

Result = TypeVar("Result")
Inputs = tuple[Tensor, Tensor, Tensor]


def make_inputs(problem: PipelineProblem, device: torch.device | str, seed: int) -> Inputs:
    """q [B,T,H,K], k [B,T,H_kv,K], v [B,T,H_kv,V], standard normal after ``manual_seed(seed)``."""
    torch.manual_seed(seed)
    p = problem
    shapes = ((p.hq, p.k_dim), (p.h_kv, p.k_dim), (p.h_kv, p.v_dim))
    q, k, v = (
        torch.randn(p.batch, p.seq_len, *shape, device=device, dtype=torch.float32).to(p.dtype)
        for shape in shapes
    )
    return q, k, v


class Recorder:
    """Times every op of a pipeline by (layer, kernel). A pipeline without a recorder only calls the ops."""

    def __init__(self, device: torch.device | str) -> None:
        self._cuda = torch.device(device).type == "cuda"
        self._marks: list[tuple[tuple[int, str], Any, Any]] = []

    @contextmanager
    def timed(self, layer: int, kernel: str) -> Iterator[None]:
        """Times the body on the device."""
        start = self._mark()
        yield
        self._marks.append(((layer, kernel), start, self._mark()))

    def _mark(self) -> Any:
        """A recorded event, or seconds of the clock."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self) -> dict[tuple[int, str], float]:
        """Sum of the times by (layer, kernel); waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
        total: dict[tuple[int, str], float] = {}
        for key, start, stop in self._marks:
            spent = start.elapsed_time(stop) if self._cuda else (stop - start) * 1e3
            total[key] = total.get(key, 0.0) + spent
        return total


@dataclass(frozen=True)
class Pipeline:
    """One call computes the whole prefill from the stages' ops.

    Attributes:
        problem: sizes.
        rows: queries of every piece but the last.
        io_only: whether to run the IO-only variants instead of the full kernels.
        select: one of :data:`SELECTIONS`; without ``io_only`` it has no effect.
        map_positions: whether the IO-only variants map positions to nodes.
    """

    problem: PipelineProblem
    rows: int
    io_only: bool = False
    select: str = "lcg"
    map_positions: bool = False

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, recorder: Recorder | None = None) -> Tensor:
        """[B, T, H, V] in the dtype of q; meaningless with ``io_only``."""
        ops, p = torch.ops.htree, self.problem

        def run(layer: int, kernel: str, op: Callable[..., Result], *arguments: Any) -> Result:
            if recorder is None:
                return op(*arguments)
            with recorder.timed(layer, kernel):
                return op(*arguments)

        layers = [(k, v)]
        while layers[-1][0].shape[1] > p.max_top_nodes:
            layers.append(run(len(layers), "tree_build", ops.tree_build, *layers[-1], p.compression_rate))
        cos, sin = ops.rope_cache(p.capacity, p.k_dim, device=q.device).unbind()
        out = torch.empty(*q.shape[:3], p.v_dim, dtype=q.dtype, device=q.device)
        for first in range(0, p.seq_len, self.rows):
            piece = q[:, first : first + self.rows]
            shape = piece.shape[:3]
            total = (
                torch.full(shape, -torch.inf, device=q.device),
                torch.zeros(shape, device=q.device),
                torch.zeros(*shape, p.v_dim, device=q.device),
            )
            sizes = (p.batch, piece.shape[1], p.h_kv, p.top_k, len(layers), p.compression_rate, first)
            parents = ops.top_parents(*sizes, device=q.device)
            for layer in reversed(range(len(layers))):
                keys, values = layers[layer]
                step = (layer, p.compression_rate)
                compute = ops.io_compute_scores if self.io_only else ops.compute_scores
                scores, num = run(
                    layer, "compute_scores", compute, piece, keys, parents, cos, sin, *step, None, first
                )
                lists = parents
                if layer:
                    positions = run(layer, "select_topk", self._select, scores, num, layer, first)
                    run(layer, "mask_topk_scores_", ops.mask_topk_scores_, scores, positions)
                    parents = run(layer, "compute_next_parents", self._next_parents, lists, positions)
                accumulate = ops.io_accumulate_non_topk if self.io_only else ops.accumulate_non_topk
                state = run(
                    layer, "accumulate_non_topk", accumulate, values, lists, scores, num, *step, first
                )
                del scores
                run(layer, "merge_to_global_", ops.merge_to_global_, *total, *state)
            normalised = run(-1, "final_normalize", ops.final_normalize, total[2], total[1], q.dtype)
            out[:, first : first + self.rows] = normalised
        return out

    def _select(self, scores: Tensor, num: Tensor, layer: int, first: int) -> Tensor:
        ops, top_k = torch.ops.htree, self.problem.top_k
        if not self.io_only:
            return ops.select_topk(scores, num, top_k)
        hashed = self.select if self.select in ("lcg", "stratified") else "lcg"
        # The scores are read in every mode; the rejected modes then replace the positions.
        positions = ops.io_select_topk(scores, num, top_k, layer, hashed, first)
        if self.select == hashed:
            return positions
        slots = torch.arange(top_k, device=scores.device, dtype=torch.int32)
        count = num.clamp(max=top_k)[..., None]
        if self.select == "contiguous":
            chosen = slots.expand_as(positions)
        else:
            drawn = torch.randint(0, 2**31 - 1, positions.shape, device=scores.device, dtype=torch.int32)
            chosen = drawn % num.clamp(min=1)[..., None]
        chosen = torch.where(slots == count - 1, num[..., None] - 1, chosen)
        return torch.where(slots < count, chosen, -1).to(torch.int32)

    def _next_parents(self, parents: Tensor, positions: Tensor) -> Tensor:
        ops, rate = torch.ops.htree, self.problem.compression_rate
        if self.io_only:
            return ops.io_compute_next_parents(parents, positions, rate, self.map_positions)
        return ops.compute_next_parents(parents, positions, rate)


def milliseconds(
    call: Callable[[], Any],
    device: torch.device | str,
    warmup: int,
    iters: int,
    show: Callable[[int], None] = lambda done: None,
) -> float:
    """Average time of one of ``iters`` calls after ``warmup`` calls, by CUDA events or by the clock.

    ``show`` is called with the number of calls that have ended, outside of the time that is measured.
    """
    for _ in range(warmup):
        call()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        show(warmup)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(iters):
            call()
        stop.record()
        torch.cuda.synchronize()
        show(warmup + iters)
        return start.elapsed_time(stop) / iters
    spent = 0.0
    show(warmup)
    for done in range(warmup + 1, warmup + iters + 1):
        begin = time.perf_counter()
        call()
        spent += time.perf_counter() - begin
        show(done)
    return spent * 1e3 / iters
