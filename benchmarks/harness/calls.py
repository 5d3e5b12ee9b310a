"""What programs of benchmarks/ measure: dense attention, backwards whose forward has run, graphs, kernels, memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.harness import timing
from htree_ops.tuning.clock import Call, clock_for

T = TypeVar("T")


def dense_heads_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Dense causal attention of tensors in its own layout [B, H, T, D]; on a GPU by cuDNN."""
    only: Any = sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if q.is_cuda else nullcontext()
    with only:
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def dense(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    """The same of tensors [B, T, H, D]."""
    return dense_heads_first(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def forward_of(call: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Call:
    """``call(*inputs)`` that records nothing."""
    return torch.no_grad()(partial(call, *inputs))


def backward_of(
    call: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    upstream: Callable[[Tensor], Tensor] = torch.randn_like,
    num_leaves: int = 3,
) -> Call:
    """The backward of ``call(*inputs)`` to the first inputs. Its forward runs here, and it can be called again."""
    leaves = [x.detach().requires_grad_() for x in inputs[:num_leaves]]
    out = call(*leaves, *inputs[num_leaves:])
    return partial(torch.autograd.grad, out, leaves, upstream(out), retain_graph=True)


def medians_ms(
    candidates: Mapping[str, Sequence[Call]], device: str, effort: timing.Effort
) -> dict[str, float]:
    """Milliseconds of a call of each candidate, taken in turns."""
    times = timing.measure_undisturbed(candidates, clock_for(device), effort)
    return {name: time.median_us / 1e3 for name, time in times.items()}


def sustained_ms(
    candidates: Mapping[str, Sequence[Call]], medians: Mapping[str, float], device: str, effort: timing.Effort
) -> dict[str, float]:
    """The same under load, by what :func:`medians_ms` gave."""
    clock = clock_for(device)
    times = {name: timing.sustained(x, clock, medians[name] * 1e3, effort) for name, x in candidates.items()}
    return {name: time.median_us / 1e3 for name, time in times.items()}


def replayed_us(candidates: Mapping[str, Sequence[Call]], effort: timing.Effort) -> dict[str, float]:
    """Microseconds of a call of each candidate in a CUDA graph, taken in turns."""
    for calls in candidates.values():
        for call in calls:
            call()  # a graph cannot hold what is made once
    graphs = {name: timing.capture(calls) for name, calls in candidates.items()}
    replays = {name: [replay] for name, (replay, _) in graphs.items()}
    times = timing.measure_undisturbed(replays, clock_for("cuda"), effort)
    return {name: times[name].median_us / count for name, (_, count) in graphs.items()}


def kernels_of(call: Call) -> list[tuple[str, float]]:
    """The kernels of a call in the order of their begin, copies and fills among them: name and milliseconds."""
    call()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        call()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    return [(e.name, e.time_range.elapsed_us() / 1e3) for e in events]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The norm of the difference, relative to that of ``expected``."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def peak_of(call: Callable[[], T]) -> tuple[T, int]:
    """The result of a call, and the most bytes that were allocated on the GPU during it beyond those before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated() - before
