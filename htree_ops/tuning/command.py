"""``python -m htree_ops tune``: searches the problems of the ops on the GPU and fills the cache."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch

from htree_ops._load import build_info
from htree_ops.cli import (
    Command,
    UsageError,
    at_least,
    counted,
    free_memory,
    output_file,
    output_folder,
    show_progress,
)
from htree_ops.tuning import problems
from htree_ops.tuning.cache import TuningCache, cache_dir
from htree_ops.tuning.space import SPACES
from htree_ops.tuning.tuner import AutoTuner, search


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    kernels = sorted(SPACES)
    parser.add_argument(
        "--kernel",
        action="append",
        choices=kernels,
        metavar="OP",
        help=f"op to search, {', '.join(kernels[:-1])} or {kernels[-1]}; may be given again; default: all",
    )
    parser.add_argument(
        "--sizes",
        type=at_least(1),
        nargs="+",
        metavar="N",
        help="sizes of one problem instead of the usual ones: B S hidden head_dim of rmsnorm_rope, "
        "rows hidden inner of gated_mlp, M N K of fp8_gemm",
    )
    parser.add_argument(
        "--device", type=device, default=torch.device("cuda"), help="GPU to tune for, cuda or cuda:N"
    )
    parser.add_argument(
        "--cache-dir",
        type=output_folder,
        metavar="FOLDER",
        help="where results are kept; default: HTREE_CACHE_DIR, else htree_ops in the user's cache folder",
    )
    parser.add_argument(
        "--warmup", type=at_least(0), default=5, metavar="N", help="untimed calls of each configuration"
    )
    parser.add_argument(
        "--runs", type=at_least(1), default=30, metavar="N", help="timed calls of each configuration"
    )
    parser.add_argument(
        "--export",
        type=output_file,
        metavar="FILE",
        help="also write all configurations that were found to this file, in the form in which the package carries "
        "its own",
    )


def device(text: str) -> torch.device:
    """A device that kernels run on. A CPU passes, because :func:`nothing_to_tune` says more about it."""
    try:
        place = torch.device(text)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"must be cuda or cuda:N, got {text!r}") from error
    if place.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"must be cuda or cuda:N, got {text!r}")
    return place


def _tune(problem: problems.Problem, arguments: argparse.Namespace, folder: Path, count: str) -> str:
    """Searches one problem; returns what was found, in words. ``count`` stands before the progress."""
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
        progress=partial(show_progress, f"configurations of {label} ({count})"),
    )
    best, result, own = search(tuner)
    ran = counted(len(result.all_results) if result else 0, "configuration")
    if best and result:
        return (
            f"{label}: {best}, {result.latency * 1e3:.1f} us against {own * 1e3:.1f} us of the kernel's own choice; "
            f"{ran} ran"
        )
    return f"{label}: the kernel's own choice, {own * 1e3:.1f} us; {ran} ran, none faster by 2 %"


def nothing_to_tune(place: torch.device) -> str | None:
    """Why a search on this device would store only noise; None where it has kernels to choose from."""
    if place.type != "cuda":
        return f"--device {place}: configurations choose among GPU kernels, and the CPU ignores them"
    if not torch.cuda.is_available():
        return "configurations choose among GPU kernels, and torch sees no GPU"
    if not build_info().get("cuda"):
        return f"this library has no GPU kernels ({build_info().get('reason', 'its build is not recorded')})"
    return None


def _check(arguments: argparse.Namespace, kernels: list[str], folder: Path) -> None:
    """Raises UsageError for what can be known before the search, with a line that names what to change."""
    place = arguments.device
    if reason := nothing_to_tune(place):
        raise UsageError(f"there is nothing to tune: {reason}; nothing is stored")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"--device {place}: torch sees {counted(torch.cuda.device_count(), 'GPU')}")
    if missing := sorted(set(kernels) - set(problems.tunable_kernels())):
        raise UsageError(f"this library has no {', '.join(missing)}")
    for kernel in kernels if arguments.sizes else ():
        sizes = tuple(arguments.sizes)
        try:
            problems.check_sizes(kernel, sizes)
        except ValueError as error:
            choose = "" if arguments.kernel else "; --kernel chooses an op"
            raise UsageError(f"--sizes: {str(error).removeprefix('make_problem: ')}{choose}") from error
        needed, free = problems.input_bytes(kernel, sizes), free_memory(place)
        if needed > free:
            size = f"{needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
            raise UsageError(f"--sizes: not enough memory: the inputs of {kernel} take {size}")
    try:
        TuningCache(folder).check_writable()
    except OSError as error:
        name = "--cache-dir" if arguments.cache_dir else "the cache folder (HTREE_CACHE_DIR)"
        raise UsageError(f"{name}: nothing can be stored in {folder}: {error.strerror or error}") from error


def run(arguments: argparse.Namespace) -> int:
    """Searches and prints what was found; status 0."""
    kernels = arguments.kernel or problems.tunable_kernels()
    folder = arguments.cache_dir or cache_dir()
    sizes = tuple(arguments.sizes) if arguments.sizes else None
    _check(arguments, kernels, folder)
    total = sum(
        len(problems.DTYPES[kernel]) * (1 if sizes else len(problems.PROBLEMS[kernel])) for kernel in kernels
    )
    try:
        for number, problem in enumerate(problems.all_problems(kernels, arguments.device, sizes), start=1):
            print(_tune(problem, arguments, folder, f"{number}/{total}"), flush=True)
        if arguments.export:
            count = TuningCache(folder).export(arguments.export)
            print(f"{counted(count, 'configuration')} written to {arguments.export}")
    except (ValueError, OSError, NotImplementedError) as error:
        raise UsageError(str(error)) from error
    return 0


COMMAND = Command(
    "tune",
    """Times every kernel configuration of rmsnorm_rope, gated_mlp and fp8_gemm on common sizes, and stores the fastest
of each size in the cache, which later calls on this GPU read.""",
    add_arguments,
    run,
)
