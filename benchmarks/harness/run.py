"""``python -m benchmarks run``: times the benchmarks of families beside their baselines and writes the results."""

from __future__ import annotations

import argparse
import importlib
import sys

import torch

from benchmarks.harness import results, suite, timing
from benchmarks.harness.progress import Progress
from htree_ops.cli import (
    Command,
    UsageError,
    at_least,
    counted,
    is_out_of_memory,
    output_file,
    regular_expression,
)
from htree_ops.info import collect_environment
from htree_ops.ops.arguments import dtype_name
from htree_ops.tuning.clock import copy_bandwidth

#: Families with benchmarks, each a module of :mod:`benchmarks` that defines ``make_benchmarks(device)``. Those of
#: tree attention's stages and of the FP8 product are apart from the rest of their family.
FAMILIES = (
    "causal_softmax",
    "compressed_kv",
    "fp8",
    "fp8_gemm",
    "gated_mlp",
    "hadamard",
    "index_loss",
    "rmsnorm_rope",
    "select_blocks",
    "tree_attention",
    "tree_cache",
    "tree_stages",
)


def make_benchmarks(family: str, device: str) -> list[suite.Benchmark]:
    """The benchmarks of a family on ``device``."""
    made: list[suite.Benchmark] = importlib.import_module(f"benchmarks.{family}").make_benchmarks(device)
    return made


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument(
        "families", nargs="+", choices=FAMILIES, metavar="FAMILY", help=f"what to time: {', '.join(FAMILIES)}"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="where to time; default: cuda where there is a GPU"
    )
    parser.add_argument(
        "--case",
        type=regular_expression,
        default="",
        metavar="REGEX",
        help="only cases whose op/case-dtype matches",
    )
    parser.add_argument(
        "--dtype", action="append", default=[], help="only this one, such as bfloat16; may be given again"
    )
    parser.add_argument(
        "--baseline",
        type=regular_expression,
        default="",
        metavar="REGEX",
        help="only baselines whose name matches",
    )
    parser.add_argument(
        "--repeat",
        "--rounds",
        dest="rounds",
        type=at_least(1),
        default=timing.Effort.rounds,
        metavar="N",
        help="rounds in which the op and its baselines are timed",
    )
    parser.add_argument("--csv", type=output_file, metavar="FILE", help="write the rows to this CSV file")


def choose(arguments: argparse.Namespace, device: str) -> list[suite.Benchmark]:
    """The benchmarks asked for.

    Raises:
        UsageError: the flags leave nothing. The message says which flag chose nothing and
            what exists.
    """
    every = [benchmark for family in arguments.families for benchmark in make_benchmarks(family, device)]
    chosen = suite.select(every, arguments.case)
    if not chosen:
        names = ", ".join(f"{b.op}/{b.case.id}" for b in every)
        raise UsageError(f"no case matches {arguments.case!r}; there are {names}")
    dtypes = sorted({dtype_name(b.case.dtype) for b in chosen})
    chosen = suite.select(chosen, "", arguments.dtype)
    if not chosen:
        raise UsageError(f"no case has dtype {' or '.join(arguments.dtype)}; there are {', '.join(dtypes)}")
    baselines = sorted({candidate.name for b in chosen for candidate in b.baselines})
    chosen = suite.select(chosen, "", (), arguments.baseline)
    if not chosen:
        raise UsageError(f"no baseline matches {arguments.baseline!r}; there are {', '.join(baselines)}")
    return chosen


def run(arguments: argparse.Namespace) -> int:
    """Runs the benchmarks, prints a table, writes the files.

    Returns:
        1 where a case was wrong or did not fit into memory, else 0.

    Raises:
        UsageError: see :func:`choose`. Also where the GPU does not exist or the measured commit is not known.
    """
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU")
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    benchmarks = choose(arguments, device)
    environment = collect_environment(device, copy_bandwidth(device))
    print(f"{results.machine(environment)}, torch {environment.torch}, commit {environment.commit}")
    print(f"copy ceiling {environment.ceiling_gb_per_s:.0f} GB/s", flush=True)
    rows: list[results.Row] = []
    wrong, too_large = 0, 0
    effort = timing.Effort(rounds=arguments.rounds)
    bar = Progress(len(benchmarks))
    for benchmark in benchmarks:
        name = f"{benchmark.op} {benchmark.case.id}"
        bar.show(name)
        try:
            rows += suite.run_benchmark(benchmark, device, environment, effort)
        except suite.GateError as error:
            bar.clear()
            print(error, file=sys.stderr)
            wrong += 1
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            bar.clear()
            reason = str(error).splitlines()[0]
            print(f"{name}: out of memory, not timed: {reason}", file=sys.stderr)
            too_large += 1
        bar.done += 1
        if arguments.csv:  # after each benchmark, in case the run is cut short
            results.write_rows(arguments.csv, rows)
    bar.clear()
    print(results.format_table(rows))
    print(
        "the op and the baselines that compute it were checked before timing: "
        f"{counted(wrong, 'case')} wrong, not timed"
        + (f"; {counted(too_large, 'case')} out of memory, not timed" if too_large else "")
    )
    return 1 if wrong or too_large else 0


COMMAND = Command(
    "run",
    """Checks each op and its baselines on each case, times them in turns, and prints a table.

With --csv the rows go to a file after each case; report draws such files and compare compares two of them.
Status 1 where a result was wrong or a case did not fit into memory.""",
    add_arguments,
    run,
    "python -m benchmarks",
)
