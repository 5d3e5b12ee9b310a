"""``python -m htree_ops tune``: searches the problems of the ops on the GPU and fills the cache."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

import torch

from htree_ops.errors import TuningFailedError
from htree_ops.tuning import problems
from htree_ops.tuning.cache import TuningCache, cache_dir
from htree_ops.tuning.metrics import compute_metrics
from htree_ops.tuning.space import SPACES
from htree_ops.tuning.tuner import PEAK_GBPS, WORTHWHILE, AutoTuner, benchmark

__all__ = ["add_arguments", "progress_bar", "run"]

WIDTH = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument(
        "--kernel",
        action="append",
        choices=sorted(SPACES),
        help="op to search; may be given again; default: all",
    )
    parser.add_argument("--sizes", type=int, nargs="+", help="sizes of one problem instead of the usual ones")
    parser.add_argument(
        "--device", default=None, help="cuda (default) or cpu, where configurations have no effect"
    )
    parser.add_argument(
        "--cache-dir", type=Path, default=None, help="folder of the cache; default: HTREE_CACHE_DIR"
    )
    parser.add_argument("--warmup", type=int, default=5, help="untimed calls of each configuration")
    parser.add_argument("--runs", type=int, default=30, help="timed calls of each configuration")
    parser.add_argument(
        "--export", type=Path, help="also write all results to this file, as the package bundles them"
    )
    parser.set_defaults(run=run)


def progress_bar(label: str, stream: TextIO) -> Callable[[int, int], None]:
    """Draws ``label [####....] done/all`` over itself on a terminal, and the last state alone elsewhere."""

    def show(done: int, total: int) -> None:
        if not stream.isatty() and done < total:
            return
        filled = WIDTH * done // max(1, total)
        stream.write(
            f"{chr(13) if stream.isatty() else ''}{label} [{'#' * filled}{'.' * (WIDTH - filled)}] {done}/{total}"
        )
        stream.write("\n" if done == total else "")
        stream.flush()

    return show


def _tune(problem: problems.Problem, arguments: argparse.Namespace, folder: Path) -> str:
    """Searches one problem; returns what was found, in words."""
    label = (
        f"{problem.kernel} {'x'.join(map(str, problem.sizes))} {str(problem.dtype).removeprefix('torch.')}"
    )
    tuner = AutoTuner(
        problem.call,
        SPACES[problem.kernel],
        arguments.warmup,
        arguments.runs,
        cache_dir=folder,
        problem_size=problem.sizes,
        device=problem.device,
        kernel_type=problem.kernel,
        dtype=problem.dtype,
        layout=problem.layout,
        flops=problem.flops,
        num_bytes=problem.num_bytes,
        progress=progress_bar(label, sys.stderr),
    )
    own = benchmark(problem.call, problem.device, arguments.warmup, arguments.runs)
    try:
        result = tuner.tune()
    except TuningFailedError:
        result = None
    if result is not None and result.latency < WORTHWHILE * own:
        return (
            f"{label}: {result.best_config}, {result.latency * 1e3:.1f} us against {own * 1e3:.1f} us of the "
            f"kernel's own choice; {len(result.all_results)} configurations ran"
        )
    key = tuner.key()
    metrics = compute_metrics(own, problem.flops, problem.num_bytes, PEAK_GBPS.get(key.device, 0.0))
    tuner.cache.set(key, {}, asdict(metrics))
    ran = len(result.all_results) if result else 0
    return (
        f"{label}: the kernel's own choice, {own * 1e3:.1f} us; {ran} configurations ran, none faster by 2 %"
    )


def run(arguments: argparse.Namespace) -> int:
    """The command; status 2 where there is nothing to tune."""
    device = arguments.device or "cuda"
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        print("there is no GPU to tune for; --device cpu runs the search without effect", file=sys.stderr)
        return 2
    kernels = arguments.kernel or problems.tunable_kernels()
    missing = sorted(set(kernels) - set(problems.tunable_kernels()))
    if missing:
        print(f"this library has no {', '.join(missing)}", file=sys.stderr)
        return 2
    folder = arguments.cache_dir or cache_dir()
    sizes = tuple(arguments.sizes) if arguments.sizes else None
    try:
        for problem in problems.all_problems(kernels, device, sizes):
            print(_tune(problem, arguments, folder), flush=True)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.export:
        count = TuningCache(folder).export(arguments.export)
        print(f"{count} results written to {arguments.export}")
    return 0
