"""What time is measured with: CUDA events on a GPU, the host's clock elsewhere. Times are microseconds."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

Call = Callable[[], Any]


def percentile(samples: Sequence[float], percent: float) -> float:
    """Value below which ``percent`` % of the samples lie, linear between the two nearest."""
    if not samples or not 0 <= percent <= 100:
        raise ValueError(f"need samples and 0 <= percent <= 100, got {len(samples)} samples, {percent} %")
    ordered = sorted(samples)
    position = percent / 100 * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


class Clock(Protocol):
    """Times calls on one device."""

    def now(self) -> float:
        """Host time in seconds, after everything that was launched has finished."""

    def time_calls(self, calls: Sequence[Call], keep: int) -> list[float]:
        """Microseconds of each call, back to back. On a GPU the last ``keep`` results stay alive: outputs rotate."""


class CpuClock:
    """Wall time of synchronous calls; ``counter`` returns seconds.

    Results are freed at once. If they were kept, each call would fault in fresh pages, and that would be what is timed.
    """

    def __init__(self, counter: Callable[[], float] = time.perf_counter) -> None:
        self._counter = counter

    def now(self) -> float:
        """See :class:`Clock`."""
        return self._counter()

    def time_calls(self, calls: Sequence[Call], keep: int) -> list[float]:
        """See :class:`Clock`; ``keep`` is not used."""
        samples = []
        for call in calls:
            start = self._counter()
            result = call()
            samples.append((self._counter() - start) * 1e6)
            del result
        return samples


class CudaClock:
    """Device time between CUDA events on the current stream of ``device``.

    The stream first waits ``lead_in_cycles`` (about a millisecond), so that the host has queued the calls
    before the first one starts: otherwise short kernels are timed with the gaps of their launches.
    """

    def __init__(self, device: torch.device | str = "cuda", lead_in_cycles: int = 2_000_000) -> None:
        self._device = torch.device(device)
        self._lead_in_cycles = lead_in_cycles

    def now(self) -> float:
        """See :class:`Clock`."""
        torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def time_calls(self, calls: Sequence[Call], keep: int) -> list[float]:
        """See :class:`Clock`."""
        alive: deque[Any] = deque(maxlen=keep)
        marks = []
        with torch.cuda.device(self._device):
            torch.cuda._sleep(self._lead_in_cycles)
            for call in calls:
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                alive.append(call())
                stop.record()
                marks.append((start, stop))
            torch.cuda.synchronize()
        return [start.elapsed_time(stop) * 1e3 for start, stop in marks]


def clock_for(device: torch.device | str) -> Clock:
    """Events for a CUDA device, wall time otherwise."""
    return CudaClock(device) if torch.device(device).type == "cuda" else CpuClock()


def copy_bandwidth(device: torch.device | str, num_bytes: int | None = None) -> float:
    """Measured GB/s (10^9, read plus write) of a copy within the memory of ``device``: the ceiling of a run.

    ``num_bytes`` is the size of the source: by default 1 GiB on a GPU and 256 MiB on a CPU.
    """
    size = num_bytes or (2**30 if torch.device(device).type == "cuda" else 2**28)
    source, target = torch.rand(2, size // 4, dtype=torch.float32, device=device).unbind()
    clock, calls = clock_for(device), [lambda: target.copy_(source)] * 20
    clock.time_calls(calls[:5], keep=1)  # the first calls find pages that were never touched
    return 2 * size / percentile(clock.time_calls(calls, keep=1), 50) / 1e3
