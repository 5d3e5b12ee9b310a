"""One benchmark: gate, interleaved timing against the baselines, rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.harness import io_floor, timing
from benchmarks.harness.results import Row
from htree_ops.bench import verdict
from htree_ops.info import Environment
from htree_ops.ops.arguments import dtype_name
from htree_ops.tuning.clock import Clock, clock_for
from tests.support.cases import Case

#: The inputs of a case that reads a part of them are repeated up to this size, by the type of the device.
_MOST_BYTES = {"cuda": 40_000_000_000, "cpu": 4_000_000_000}

Inputs = tuple[Any, ...]
MakeInputs = Callable[[Any, str, int], Inputs]


class GateError(RuntimeError):
    """A candidate gave a wrong result and was not timed."""


@dataclass(frozen=True)
class Candidate:
    """Something to time.

    Attributes:
        name: as it appears in the results, e.g. ``"torch.compile"``.
        run: called with one set of inputs.
        make_inputs: (case, device, seed) -> inputs, where they are not the case's own: a baseline that
            differentiates builds its graph here, untimed. Its result must still be that of the case's inputs.
        same_function: False for a yardstick that computes something else. It is not checked, and its rows say so.
        capturable: whether it can run inside a CUDA graph.
        check: replaces the benchmark's check, for a candidate that rounds an intermediate that the op does not round.
    """

    name: str
    run: Callable[..., Any]
    make_inputs: MakeInputs | None = None
    same_function: bool = True
    capturable: bool = True
    check: Callable[[Inputs, Any], object] | None = None


@dataclass(frozen=True)
class Benchmark:
    """One op on one case.

    Attributes:
        op: name of the op.
        case: the problem; it knows its inputs, bytes and flops.
        ours: the op of this package.
        baselines: what it is compared with; at least one.
        check: (inputs, result) raises AssertionError when the result is wrong.
    """

    op: str
    case: Case
    ours: Candidate
    baselines: Sequence[Candidate]
    check: Callable[[Inputs, Any], object]


def select(
    benchmarks: Sequence[Benchmark], pattern: str, dtypes: Sequence[str] = (), baselines: str = ""
) -> list[Benchmark]:
    """Those whose ``op/case-dtype`` matches the regular expression, with the baselines whose name does.

    Args:
        benchmarks: to choose from.
        pattern: regular expression for ``op/case-dtype``; empty for all.
        dtypes: names such as ``"bfloat16"``; empty for all.
        baselines: regular expression; a benchmark that has no such baseline is left out.
    """
    chosen = []
    for benchmark in benchmarks:
        if not re.search(pattern, f"{benchmark.op}/{benchmark.case.id}"):
            continue
        if dtypes and dtype_name(benchmark.case.dtype) not in dtypes:
            continue
        kept = [candidate for candidate in benchmark.baselines if re.search(baselines, candidate.name)]
        if kept:
            chosen.append(replace(benchmark, baselines=kept))
    return chosen


def _tensor_bytes(inputs: Inputs) -> int:
    return sum(value.numel() * value.element_size() for value in inputs if isinstance(value, torch.Tensor))


def make_calls(
    benchmark: Benchmark, candidates: Sequence[Candidate], device: str, num_sets: int | None = None
) -> tuple[Inputs, dict[str, list[Callable[[], Any]]]]:
    """The first inputs of the case, and for each candidate a list with one call per set of inputs.

    There are ``num_sets`` sets, by default enough to keep what is read out of the caches. Candidates share their sets
    unless they make inputs of their own. Where the case reads a part of its inputs, those are read whole, so that fewer
    sets are enough.
    """
    case = benchmark.case
    first = case.make_inputs(device, 0)
    if num_sets is None:
        held = _tensor_bytes(first)
        num_sets = timing.num_input_sets(held)
        if case.reads_a_part:  # as many as keep what is read out of the caches, within the device's memory
            most = _MOST_BYTES[torch.device(device).type] // held
            num_sets = max(num_sets, min(timing.num_input_sets(case.bytes()), most))
    shared = [first, *(case.make_inputs(device, seed) for seed in range(1, num_sets))]
    made: dict[MakeInputs | None, list[Inputs]] = {None: shared}
    calls: dict[str, list[Callable[[], Any]]] = {}
    for candidate in candidates:
        make = candidate.make_inputs
        if make is not None and make not in made:
            own = make(case, device, 0)
            count = timing.num_input_sets(_tensor_bytes(own)) if case.reads_a_part else num_sets
            made[make] = [own, *(make(case, device, seed) for seed in range(1, min(count, num_sets)))]
        calls[candidate.name] = [partial(candidate.run, *inputs) for inputs in made[make]]
    return first, calls


def sustained_times(
    calls: Mapping[str, Sequence[Callable[[], Any]]],
    times: Mapping[str, timing.Timing],
    clock: Clock,
    effort: timing.Effort,
) -> dict[str, float]:
    """Microseconds of every candidate under load; empty where every median stays below the effort's limit."""
    if all(measured.median_us < effort.sustained_from_us for measured in times.values()):
        return {}
    return {
        name: timing.sustained(calls[name], clock, measured.median_us, effort).median_us
        for name, measured in times.items()
    }


def gate(benchmark: Benchmark, candidate: Candidate, inputs: Inputs, call: Callable[[], Any]) -> None:
    """Runs ``call`` once and checks its result against ``inputs``.

    Raises:
        GateError: the result is wrong.
    """
    try:
        (candidate.check or benchmark.check)(inputs, call())
    except AssertionError as error:
        raise GateError(
            f"{benchmark.op} {benchmark.case.id}: {candidate.name} is wrong and is not timed: {error}"
        ) from error


def run_benchmark(
    benchmark: Benchmark,
    device: str,
    environment: Environment,
    effort: timing.Effort | None = None,
    clock: Clock | None = None,
) -> list[Row]:
    """Checks every candidate, then times them together; one row per baseline.

    Raises:
        GateError: a candidate that should compute the op does not.
        ValueError: no baseline, or two candidates of one name.
    """
    candidates = [benchmark.ours, *benchmark.baselines]
    if len(candidates) < 2 or len({c.name for c in candidates}) != len(candidates):
        raise ValueError(
            f"{benchmark.op}: need baselines and distinct names, got {[c.name for c in candidates]}"
        )
    effort = effort or timing.Effort()
    clock = clock or clock_for(device)

    inputs, calls = make_calls(benchmark, candidates, device)
    for candidate in candidates:
        if candidate.same_function:
            gate(benchmark, candidate, inputs, calls[candidate.name][0])
    times = timing.measure_undisturbed(calls, clock, effort)
    sustained: dict[str, float] = {}
    graph: dict[str, float] = {}
    if torch.device(device).type == "cuda":  # only GPUs have power limits and graphs
        sustained = sustained_times(calls, times, clock, effort)
        captured = {c.name: timing.capture(calls[c.name]) for c in candidates if c.capturable}
        replayed = timing.measure({name: [replay] for name, (replay, _) in captured.items()}, clock, effort)
        graph = {name: replayed[name].median_us / count for name, (_, count) in captured.items()}
    least = io_floor.floor(benchmark.op, benchmark.case, device, environment.ceiling_gb_per_s, effort)
    return [
        _make_row(benchmark, environment, baseline, times, graph, sustained, least)
        for baseline in benchmark.baselines
    ]


def _make_row(
    benchmark: Benchmark,
    environment: Environment,
    baseline: Candidate,
    times: dict[str, timing.Timing],
    graph: dict[str, float],
    sustained: dict[str, float],
    least: io_floor.Floor,
) -> Row:
    case, name = benchmark.case, benchmark.ours.name
    ours, theirs = times[name], times[baseline.name]
    device_us = graph.get(name, ours.median_us)
    both_graphs = name in graph and baseline.name in graph
    gb_per_s = case.bytes() / device_us / 1e3
    return Row(
        **asdict(environment),
        op=benchmark.op,
        case=case.name,
        shapes=case.shapes,
        dtype=dtype_name(case.dtype),
        bytes=case.bytes(),
        flops=case.flops(),
        median_us=ours.median_us,
        p20_us=ours.p20_us,
        p80_us=ours.p80_us,
        num_samples=ours.num_samples,
        graph_us=graph.get(name),
        sustained_us=sustained.get(name),
        gb_per_s=gb_per_s,
        tflops=case.flops() / device_us / 1e6,
        percent_of_ceiling=100 * gb_per_s / environment.ceiling_gb_per_s,
        baseline=baseline.name,
        baseline_computes_the_same=baseline.same_function,
        baseline_median_us=theirs.median_us,
        baseline_p20_us=theirs.p20_us,
        baseline_p80_us=theirs.p80_us,
        baseline_graph_us=graph.get(baseline.name),
        baseline_sustained_us=sustained.get(baseline.name),
        speedup=(graph[baseline.name] / graph[name] if both_graphs else theirs.median_us / ours.median_us),
        floor_us=least.us,
        floor_kind=least.kind,
        percent_of_floor=100 * least.us / device_us,
        verdict=verdict(device_us, least.us) if least.us > 0 else None,
    )
