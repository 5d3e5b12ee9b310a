"""Tree attention against its IO-only variant: ``python -m htree_ops io-only`` (docs/semantics §2.4, §2.5)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from functools import partial
from typing import Any

import torch

from htree_ops.bench.io_model import PipelineProblem, overhead_percent, traffic, verdict
from htree_ops.bench.io_pipeline import SELECTIONS, Pipeline, Recorder, make_inputs, milliseconds
from htree_ops.cli import (
    SEED,
    Command,
    UsageError,
    add_sizes,
    at_least,
    bandwidth,
    columns,
    counted,
    free_memory,
    output_file,
    show_progress,
)
from htree_ops.info import Environment, collect_environment
from htree_ops.tuning.clock import copy_bandwidth
from htree_ops.tuning.metrics import peak_of

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
LIMITS = (
    "Limits: hashing is not free; hashed positions are not the clustered ones of a real selection;",
    "        results of the IO-only pipeline are unusable for correctness.",
)
#: Part of the free memory that may be used, and what a CUDA context and its library workspaces may still take.
USABLE, RESERVE = 0.92, 512 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags and defaults of §2.4."""
    add_sizes(parser, PipelineProblem)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32", help="of q, k and v")
    parser.add_argument(
        "--warmup", type=at_least(0), default=3, metavar="N", help="calls before the timed ones"
    )
    parser.add_argument("--iters", type=at_least(1), default=10, metavar="N", help="timed calls")
    parser.add_argument(
        "--gpu", type=int, default=None, metavar="N", help="index of the GPU (default 0); -1 is the CPU"
    )
    parser.add_argument("--seed", type=SEED, default=42, metavar="N", help="seed of the inputs")
    parser.add_argument(
        "--select",
        choices=SELECTIONS,
        default="lcg",
        help="how the IO-only variant picks positions, whatever the scores are",
    )
    parser.add_argument(
        "--map-positions", action="store_true", help="the IO-only variant looks up the nodes of its positions"
    )
    parser.add_argument("--per-kernel", action="store_true", help="print a table of kernels and their bytes")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write everything to this file")
    parser.add_argument(
        "--peak-gbps",
        type=bandwidth,
        default=None,
        metavar="GB/S",
        help="memory bandwidth for the table; default: that of the GPU's data sheet, else a measured copy",
    )


def choose_device(gpu: int | None) -> torch.device:
    """The GPU that was asked for; the CPU for -1, or where none was asked for and none exists."""
    if gpu == -1 or (gpu is None and not torch.cuda.is_available()):
        return torch.device("cpu")
    index = gpu or 0
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not 0 <= index < count:
        raise UsageError(f"--gpu {index}: torch sees {counted(count, 'GPU')} (--gpu -1 runs on the CPU)")
    return torch.device("cuda", index)


def choose_rows(problem: PipelineProblem, free_bytes: int) -> int:
    """Queries per piece: all of them where the score buffer fits in memory beside the inputs, else as many as fit."""
    left = int(USABLE * free_bytes) - RESERVE - problem.input_bytes
    rows = left // (problem.score_bytes_per_query + problem.row_bytes_per_query)
    if rows < 1:
        raise UsageError(
            f"not enough memory: inputs take {problem.input_bytes / 1e9:.1f} GB and one query row "
            f"{problem.score_bytes_per_query / 1e9:.3f} GB of scores, {free_bytes / 1e9:.1f} GB are free"
        )
    return min(int(rows), problem.seq_len)


def format_summary(full_ms: float, io_ms: float) -> str:
    """Results and analysis in the wording of §2.4."""
    overhead = overhead_percent(full_ms, io_ms)
    return "\n".join(
        [
            "Results (avg ms / iter):",
            f"  Full Computation: {full_ms:.2f} ms",
            f"  IO-Only        : {io_ms:.2f} ms",
            "",
            "Analysis:",
            f"  Speedup (Full/IO): {full_ms / io_ms:.2f}x",
            f"  Computation overhead: {overhead:.1f}% of total time",
            f"  IO time (approx): {io_ms:.2f} ms ({100 - overhead:.1f}% of total)",
            f"  Verdict: {verdict(full_ms, io_ms)}",
        ]
    )


def kernel_rows(
    problem: PipelineProblem,
    full: dict[tuple[int, str], float],
    io: dict[tuple[int, str], float],
    peak: float,
) -> list[dict[str, Any]]:
    """One entry per layer and kernel; bandwidths are those of the full kernel (GB = 10^9 bytes)."""
    rows = []
    for (layer, kernel), moved in traffic(problem).items():
        ms = full[layer, kernel]
        unique, requested = (bytes_ / (ms * 1e6) for bytes_ in (moved.unique, moved.requested))
        rows.append(
            {
                "layer": layer,
                "kernel": kernel,
                "full_ms": ms,
                "io_ms": io[layer, kernel],
                "unique_bytes": moved.unique,
                "requested_bytes": moved.requested,
                "unique_gb_per_s": unique,
                "requested_gb_per_s": requested,
                "percent_of_peak": 100 * unique / peak,
                "percent_of_peak_requested": 100 * requested / peak,
            }
        )
    return rows


def format_kernels(rows: Sequence[dict[str, Any]], peak: float, peak_source: str) -> str:
    """The table of ``--per-kernel``."""
    header = ("layer", "kernel", "full ms", "io ms", "unique GB", "requested GB", *("GB/s", "% peak") * 2)
    table = [("", "", "", "", "", "", "unique", "", "requested", ""), header]
    for row in rows:
        table.append(
            (
                "-" if row["layer"] < 0 else str(row["layer"]),
                row["kernel"],
                f"{row['full_ms']:.3f}",
                f"{row['io_ms']:.3f}",
                f"{row['unique_bytes'] / 1e9:.4f}",
                f"{row['requested_bytes'] / 1e9:.4f}",
                f"{row['unique_gb_per_s']:.0f}",
                f"{row['percent_of_peak']:.1f}",
                f"{row['requested_gb_per_s']:.0f}",
                f"{row['percent_of_peak_requested']:.1f}",
            )
        )
    note = "Requested bytes beyond 100 % of peak are served by caches."
    return f"Per kernel (peak {peak:.0f} GB/s, {peak_source}):\n{columns(table, right=True)}\n{note}"


def to_json(
    arguments: argparse.Namespace,
    problem: PipelineProblem,
    environment: Environment,
    times: dict[str, float],
    kernels: list[dict[str, Any]],
    rows: int,
) -> dict[str, Any]:
    """What ``--json`` writes; ``rows`` has the form of the other results files."""
    full_us = times["full_ms"] * 1e3
    unique = sum(moved.unique for moved in traffic(problem).values())
    gb_per_s = unique / full_us / 1e3
    flags = {name: value for name, value in vars(arguments).items() if name != "json"}
    p = problem
    row = {
        **asdict(environment),
        "op": "staged pipeline",
        "case": f"T{p.seq_len}_{arguments.select}",
        "shapes": f"B={p.batch} T={p.seq_len} H={p.hq}/{p.h_kv} K={p.k_dim} V={p.v_dim} "
        f"r={p.compression_rate} k={p.top_k} M={p.max_top_nodes}",
        "dtype": arguments.dtype,
        "bytes": unique,
        "median_us": full_us,
        "gb_per_s": gb_per_s,
        "percent_of_ceiling": 100 * gb_per_s / environment.ceiling_gb_per_s,
        "baseline": "IO-only variant",
        "baseline_computes_the_same": False,
        "baseline_median_us": times["io_ms"] * 1e3,
        "speedup": times["io_ms"] / times["full_ms"],
    }
    both = times["full_ms"], times["io_ms"]
    summary = {**times, "overhead_percent": overhead_percent(*both), "verdict": verdict(*both)}
    return {"flags": flags, "rows_per_piece": rows, "summary": summary, "kernels": kernels, "rows": [row]}


def run(arguments: argparse.Namespace) -> int:
    """Measures and prints; status 0."""
    try:
        sizes = {f.name: getattr(arguments, f.name) for f in fields(PipelineProblem) if f.name != "dtype"}
        problem = PipelineProblem(**sizes, dtype=DTYPES[arguments.dtype])
    except ValueError as error:
        raise UsageError(str(error)) from error
    device = choose_device(arguments.gpu)
    free = free_memory(device)
    rows = choose_rows(problem, free)
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else "CPU"
    print(f"Staged pipeline on {name}: {problem}")
    print(f"Score buffer: {problem.score_bytes / 1e9:.1f} GB, {free / 1e9:.1f} GB free", end="")
    print("" if rows == problem.seq_len else f"; working in pieces of {rows} queries", flush=True)
    if on_gpu:
        torch.cuda.set_device(device)
    with torch.no_grad():
        measure(arguments, problem, device, rows)
    return 0


def measure(arguments: argparse.Namespace, problem: PipelineProblem, device: torch.device, rows: int) -> None:
    """Times both pipelines and the fused one on one set of inputs; prints, and writes the JSON file."""
    names = {"full_ms": "full pipeline", "io_ms": "IO-only variant", "fused_ms": "fused pipeline"}
    each = arguments.warmup + arguments.iters
    q, k, v = make_inputs(problem, device, arguments.seed)
    pipelines = {
        "full_ms": Pipeline(problem, rows),
        "io_ms": Pipeline(problem, rows, True, arguments.select, arguments.map_positions),
    }
    options = (problem.compression_rate, problem.max_top_nodes, problem.top_k)
    calls = {name: partial(pipeline, q, k, v) for name, pipeline in pipelines.items()}
    calls["fused_ms"] = partial(torch.ops.htree.attention, q, k, v, *options)
    times = {}
    for name, call in calls.items():
        done = partial(show_progress, f"calls of the {names[name]}", total=each)
        times[name] = milliseconds(call, device, arguments.warmup, arguments.iters, done)
    print(format_summary(times["full_ms"], times["io_ms"]))
    print(f"\nFused pipeline (informational): {times['fused_ms']:.2f} ms")
    print("\n".join(LIMITS))

    kernels: list[dict[str, Any]] = []
    if arguments.per_kernel or arguments.json:
        ceiling = copy_bandwidth(device)
        known = peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        source = "given" if arguments.peak_gbps else "data sheet" if known else "measured copy"
        peak = arguments.peak_gbps or known or ceiling
        recorded = []
        for pipeline in pipelines.values():
            recorder = Recorder(device)
            pipeline(q, k, v, recorder)
            recorded.append(recorder.milliseconds())
        kernels = kernel_rows(problem, recorded[0], recorded[1], peak)
        if arguments.per_kernel:
            print("\n" + format_kernels(kernels, peak, source))
        if arguments.json:
            environment = collect_environment(str(device), ceiling)
            content = to_json(arguments, problem, environment, times, kernels, rows)
            arguments.json.write_text(json.dumps(content, indent=1) + "\n")


COMMAND = Command(
    "io-only",
    """Times the staged kernels of tree attention and their IO-only variants: the same launches, loads and stores
without the arithmetic. What it leaves out is about what arithmetic costs.""",
    add_arguments,
    run,
)
