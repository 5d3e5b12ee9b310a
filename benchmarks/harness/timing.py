"""Measuring loops: rotated inputs, interleaved candidates, event and graph-replay times.

A candidate is a list of calls without arguments, one per set of inputs. Going round the list keeps the inputs
out of the caches once the sets together exceed :data:`ROTATED_BYTES`. All times are microseconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from htree_ops.tuning.clock import Call, Clock, percentile

#: Inputs are rotated over at least this many bytes: three times the largest L2 in use (60 MB).
ROTATED_BYTES = 180_000_000
#: Inputs of this size leave the caches by themselves: the L2 keeps less than 1 % of them.
ALONE_BYTES = 10_000_000_000
_MAX_INPUT_SETS = 4096
#: Where p80 exceeds p20 by more than this factor, something disturbed the measurement. It is then repeated; at most
#: three attempts are made.
DISTURBED_SPREAD = 1.5
_MAX_ATTEMPTS = 3
_GRAPH_CALLS = 10


@dataclass(frozen=True)
class Timing:
    """Distribution of the time of one call, in microseconds."""

    median_us: float
    p20_us: float
    p80_us: float
    num_samples: int

    def scaled(self, factor: float) -> Timing:
        """All times multiplied by ``factor``."""
        return Timing(self.median_us * factor, self.p20_us * factor, self.p80_us * factor, self.num_samples)


def summarise(samples_us: Sequence[float]) -> Timing:
    """Median, 20th and 80th percentile of the samples."""
    return Timing(
        median_us=percentile(samples_us, 50),
        p20_us=percentile(samples_us, 20),
        p80_us=percentile(samples_us, 80),
        num_samples=len(samples_us),
    )


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        warm_up_ms: every candidate runs at least this long first, not counting its first call.
        rounds: turns that each candidate takes.
        burst: calls per turn, fewer when a turn would exceed ``turn_ms``.
        turn_ms: upper limit of a turn.
        candidate_ms: upper limit of all turns of a candidate together; long calls take fewer turns, at least two.
        sustained_from_us: where a call takes this long, all candidates are also timed under sustained load.
        sustained_ms: the load lasts 25 calls or this long, whichever is shorter, and at least two calls.
    """

    warm_up_ms: float = 25.0
    rounds: int = 10
    burst: int = 10
    turn_ms: float = 200.0
    candidate_ms: float = 2000.0
    sustained_from_us: float = 1000.0
    sustained_ms: float = 2000.0


#: Enough to see that a program works and about what it gives; not for figures.
QUICK = Effort(warm_up_ms=5.0, rounds=3, burst=5, turn_ms=50.0, candidate_ms=150.0, sustained_ms=200.0)


def num_input_sets(input_bytes: int, rotated_bytes: int = ROTATED_BYTES) -> int:
    """How many sets of inputs to rotate: together beyond ``rotated_bytes``, at least two, at most 4096.

    It is one from :data:`ALONE_BYTES` on, where a second set would only take memory.
    """
    least = 1 if input_bytes >= ALONE_BYTES else 2
    return min(_MAX_INPUT_SETS, max(least, math.ceil(rotated_bytes / max(1, input_bytes))))


def _round_robin(calls: Sequence[Call], count: int, start: int) -> list[Call]:
    return [calls[(start + i) % len(calls)] for i in range(count)]


def warm_up(calls: Sequence[Call], clock: Clock, milliseconds: float) -> float:
    """Runs the calls in turn for at least ``milliseconds``; returns the microseconds per call."""
    calls[0]()
    begin = clock.now()
    count = 0
    while count == 0 or (clock.now() - begin) * 1e3 < milliseconds:
        calls[count % len(calls)]()
        count += 1
    return (clock.now() - begin) * 1e6 / count


def order_of_turn(count: int, turn: int) -> list[int]:
    """The order in which ``count`` candidates run in round ``turn``.

    Over ``count`` rounds, or twice as many where ``count`` is odd, every candidate runs equally often right after every
    other one (Williams, Australian Journal of Scientific Research A 2, 1949). This matters under a power limit, where
    the candidate before sets the clock rate.
    """
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(count)]  # 0 1 -1 2 -2 ...
    order = [(place + turn) % count for place in zigzag]
    return order[::-1] if count % 2 and turn // count % 2 else order


def measure(candidates: Mapping[str, Sequence[Call]], clock: Clock, effort: Effort) -> dict[str, Timing]:
    """Times the candidates in turns within one loop, so that a change of clock rate meets all of them.

    The order of a turn is :func:`order_of_turn`'s.
    """
    bursts, turns = {}, {}
    for name, calls in candidates.items():
        call_us = max(warm_up(calls, clock, effort.warm_up_ms), 1e-3)
        bursts[name] = min(effort.burst, max(1, int(effort.turn_ms * 1e3 / call_us)))
        turns[name] = min(effort.rounds, max(2, int(effort.candidate_ms * 1e3 / (bursts[name] * call_us))))
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(effort.rounds):
        names = [name for name in candidates if turn < turns[name]]
        for name in (names[i] for i in order_of_turn(len(names), turn)):
            calls = _round_robin(candidates[name], bursts[name], len(samples[name]))
            samples[name] += clock.time_calls(calls, keep=len(candidates[name]))
    return {name: summarise(times) for name, times in samples.items()}


def measure_undisturbed(
    candidates: Mapping[str, Sequence[Call]], clock: Clock, effort: Effort
) -> dict[str, Timing]:
    """:func:`measure`, repeated where something else kept the machine busy; of three attempts the steadiest counts.

    All times come from one attempt, so that the candidates are compared within the same minutes.
    """

    def spread(times: Mapping[str, Timing]) -> float:
        return max(time.p80_us / max(time.p20_us, 1e-3) for time in times.values())

    best = measure(candidates, clock, effort)
    for _ in range(_MAX_ATTEMPTS - 1):
        if spread(best) <= DISTURBED_SPREAD:
            break
        best = min(best, measure(candidates, clock, effort), key=spread)
    return best


def sustained(calls: Sequence[Call], clock: Clock, call_us: float, effort: Effort | None = None) -> Timing:
    """Times calls without a pause between them, of which the last four fifths count: power limits show here.

    It runs 25 calls, or fewer where calls of ``call_us`` microseconds would take longer than ``effort.sustained_ms``.
    """
    limit_ms = (effort or Effort()).sustained_ms
    repeats = min(25, max(2, math.ceil(limit_ms * 1e3 / max(call_us, 1e-3))))
    counted = math.ceil(0.8 * repeats)
    return summarise(clock.time_calls(_round_robin(calls, repeats, 0), keep=len(calls))[-counted:])


def capture(calls: Sequence[Call]) -> tuple[Call, int]:
    """One CUDA graph with every call at least once and ten calls or more: (replay, number of calls).

    The calls must have run before (compilation) and must be capturable. As many outputs as there are input
    sets stay alive during the capture, so that replays rotate outputs as well.
    """
    count = len(calls) * math.ceil(_GRAPH_CALLS / len(calls))
    alive: deque[Any] = deque(maxlen=len(calls))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for call in _round_robin(calls, count, 0):
            alive.append(call())
    return graph.replay, count
