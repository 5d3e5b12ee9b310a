"""Times the benchmarks of rooms and writes the results; other commands: ``io-only``, ``compare``, ``report``."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

from htree_ops.bench import results, suite, timing
from htree_ops.bench.progress import progress
from htree_ops.command_line import OneLineParser, at_least, is_out_of_memory, output_file, regular_expression
from htree_ops.ops.arguments import dtype_name

#: Other commands, each a module with ``main(argv)``.
COMMANDS = {
    "io-only": "htree_ops.bench.io_only",
    "compare": "htree_ops.bench.compare",
    "report": "htree_ops.bench.report",
}


def load_room(folder: Path, room: str) -> ModuleType:
    """Module ``bench_<room>.py`` of ``folder``; it defines ``make_benchmarks(device) -> list[Benchmark]``.

    Raises:
        FileNotFoundError: there is no such file; the message names the rooms there are.
    """
    path = folder / f"bench_{room}.py"
    if not path.is_file():
        known = sorted(file.stem.removeprefix("bench_") for file in folder.glob("bench_*.py"))
        raise FileNotFoundError(f"no benchmark {path}; rooms in {folder}: {' '.join(known) or 'none'}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded as a module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_parser() -> argparse.ArgumentParser:
    """Arguments of the command line."""
    parser = OneLineParser(
        prog="python -m htree_ops.bench",
        description=__doc__,
        epilog="python -m htree_ops.bench {io-only,compare,report} --help describes the other commands",
    )
    parser.add_argument("--room", action="append", required=True, help="room to time; may be given again")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    parser.add_argument(
        "--case",
        type=regular_expression,
        default="",
        help="regular expression that op/case-dtype must match",
    )
    parser.add_argument("--dtype", action="append", default=[], help="such as bfloat16; may be given again")
    parser.add_argument(
        "--baseline",
        type=regular_expression,
        default="",
        help="regular expression that a baseline's name must match",
    )
    parser.add_argument(
        "--repeat",
        "--rounds",
        dest="rounds",
        type=at_least(1),
        default=timing.Effort.rounds,
        help="turns of each candidate (default %(default)s)",
    )
    parser.add_argument("--json", type=output_file, help="write the rows to this JSON file")
    parser.add_argument("--csv", type=output_file, help="write the rows to this CSV file")
    parser.add_argument(
        "--folder", type=Path, default=Path("benchmarks"), help="where the files bench_<room>.py lie"
    )
    return parser


def _fail(message: object) -> int:
    print(message, file=sys.stderr)
    return 2


def choose(arguments: argparse.Namespace, device: str) -> list[suite.Benchmark]:
    """The benchmarks asked for.

    Raises:
        FileNotFoundError: there is no such room.
        ValueError: nothing is left; the message says which flag chose nothing and what there is.
    """
    modules = [load_room(arguments.folder, room) for room in arguments.room]
    every = [benchmark for module in modules for benchmark in module.make_benchmarks(device)]
    chosen = suite.select(every, arguments.case)
    if not chosen:
        names = ", ".join(f"{b.op}/{b.case.id}" for b in every)
        raise ValueError(f"no case matches {arguments.case!r}; there are {names}")
    dtypes = sorted({dtype_name(b.case.dtype) for b in chosen})
    chosen = suite.select(chosen, "", arguments.dtype)
    if not chosen:
        raise ValueError(f"no case has dtype {' or '.join(arguments.dtype)}; there are {', '.join(dtypes)}")
    baselines = sorted({candidate.name for b in chosen for candidate in b.baselines})
    chosen = suite.select(chosen, "", (), arguments.baseline)
    if not chosen:
        raise ValueError(f"no baseline matches {arguments.baseline!r}; there are {', '.join(baselines)}")
    return chosen


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmarks, prints a table, writes the files.

    Status 1 where a case was wrong or did not fit into memory, 2 for bad use.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in COMMANDS:
        status: int = importlib.import_module(COMMANDS[words[0]]).main(words[1:])
        return status
    arguments = make_parser().parse_args(words)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        return _fail("--device cuda: torch sees no GPU")
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        benchmarks = choose(arguments, device)
    except (FileNotFoundError, ValueError) as error:
        return _fail(error)

    environment = results.collect_environment(device, timing.copy_bandwidth(device))
    where = environment.cpu if environment.gpu == "none" else environment.gpu
    print(f"{where}, torch {environment.torch}, commit {environment.commit}")
    print(f"copy ceiling {environment.ceiling_gb_per_s:.0f} GB/s")
    rows: list[results.Row] = []
    wrong, too_large = 0, 0
    effort = timing.Effort(rounds=arguments.rounds)
    for benchmark in progress(benchmarks, lambda b: f"{b.op} {b.case.id}"):
        try:
            rows += suite.run_benchmark(benchmark, device, environment, effort)
        except suite.GateError as error:
            print(error, file=sys.stderr)
            wrong += 1
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error).splitlines()[0]
            print(f"{benchmark.op} {benchmark.case.id}: out of memory, not timed: {reason}", file=sys.stderr)
            too_large += 1
        if arguments.json:
            results.write_json(arguments.json, rows)  # whole after each, should the run be cut short
    print(results.format_table(rows))
    print(
        f"the op and the baselines that compute it were checked before timing: {wrong} cases wrong, not timed"
        + (f"; {too_large} cases out of memory, not timed" if too_large else "")
    )
    if arguments.csv:
        results.write_csv(arguments.csv, rows)
    return 1 if wrong or too_large else 0


if __name__ == "__main__":
    sys.exit(main())
