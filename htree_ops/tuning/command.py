"""``python -m htree_ops tune``: searches the problems of the ops on the GPU and fills the cache."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from htree_ops.bench.progress import progress_bar
from htree_ops.command_line import at_least, free_memory, is_out_of_memory, output_file, output_folder
from htree_ops.errors import TuningFailedError
from htree_ops.tuning import problems
from htree_ops.tuning.cache import TuningCache, cache_dir
from htree_ops.tuning.metrics import compute_metrics
from htree_ops.tuning.space import SPACES
from htree_ops.tuning.tuner import PEAK_GBPS, WORTHWHILE, AutoTuner, benchmark

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument(
        "--kernel",
        action="append",
        choices=sorted(SPACES),
        help="op to search; may be given again; default: all",
    )
    parser.add_argument(
        "--sizes", type=at_least(1), nargs="+", help="sizes of one problem instead of the usual ones"
    )
    parser.add_argument(
        "--device",
        type=device,
        default=None,
        help="cuda (default) or cpu, where configurations have no effect",
    )
    parser.add_argument(
        "--cache-dir", type=output_folder, default=None, help="folder of the cache; default: HTREE_CACHE_DIR"
    )
    parser.add_argument("--warmup", type=at_least(0), default=5, help="untimed calls of each configuration")
    parser.add_argument("--runs", type=at_least(1), default=30, help="timed calls of each configuration")
    parser.add_argument(
        "--export", type=output_file, help="also write all results to this file, as the package bundles them"
    )
    parser.set_defaults(run=run)


def device(text: str) -> torch.device:
    """A device that kernels run on."""
    try:
        place = torch.device(text)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"must be cuda, cuda:N or cpu, got {text!r}") from error
    if place.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"must be cuda, cuda:N or cpu, got {text!r}")
    return place


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
    tuner.cache.try_set(key, {}, asdict(metrics))
    ran = len(result.all_results) if result else 0
    return (
        f"{label}: the kernel's own choice, {own * 1e3:.1f} us; {ran} configurations ran, none faster by 2 %"
    )


def _check(arguments: argparse.Namespace, kernels: list[str], place: torch.device, folder: Path) -> None:
    """Everything that can be known before the search.

    Raises:
        ValueError, OSError: one line that names what to change.
    """
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no GPU to tune for; --device cpu runs the search without effect")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {place}: torch sees {torch.cuda.device_count()} GPUs")
    if missing := sorted(set(kernels) - set(problems.tunable_kernels())):
        raise ValueError(f"this library has no {', '.join(missing)}")
    for kernel in kernels if arguments.sizes else ():
        sizes = tuple(arguments.sizes)
        try:
            problems.check_sizes(kernel, sizes)
        except ValueError as error:
            choose = "" if arguments.kernel else "; --kernel chooses an op"
            raise ValueError(f"--sizes: {str(error).removeprefix('make_problem: ')}{choose}") from error
        needed, free = problems.input_bytes(kernel, sizes), free_memory(place)
        if needed > free:
            size = f"{needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
            raise ValueError(f"--sizes: not enough memory: the inputs of {kernel} take {size}")
    try:
        TuningCache(folder).check_writable()
    except OSError as error:
        name = "--cache-dir" if arguments.cache_dir else "the cache folder (HTREE_CACHE_DIR)"
        raise OSError(f"{name}: nothing can be stored in {folder}: {error.strerror or error}") from error


def run(arguments: argparse.Namespace) -> int:
    """The command; status 2 where there is nothing to tune or nothing could be stored."""
    place = arguments.device or torch.device("cuda")
    kernels = arguments.kernel or problems.tunable_kernels()
    folder = arguments.cache_dir or cache_dir()
    sizes = tuple(arguments.sizes) if arguments.sizes else None
    try:
        _check(arguments, kernels, place, folder)
        for problem in problems.all_problems(kernels, place, sizes):
            print(_tune(problem, arguments, folder), flush=True)
        if arguments.export:
            count = TuningCache(folder).export(arguments.export)
            print(f"{count} results written to {arguments.export}")
    except (ValueError, OSError, NotImplementedError) as error:
        print(f"tune: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        print(f"tune: out of memory: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    return 0
