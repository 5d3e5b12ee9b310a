"""The command line ``python -m htree_ops.bench``: times the benchmarks of rooms and writes the results."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

from htree_ops.bench import results, suite, timing


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
    parser = argparse.ArgumentParser(prog="python -m htree_ops.bench", description=__doc__)
    parser.add_argument("--room", action="append", required=True, help="room to time; may be given again")
    parser.add_argument("--device", default=None, help="cpu or cuda; default: cuda where there is a GPU")
    parser.add_argument("--case", default="", help="regular expression that op/case-dtype must match")
    parser.add_argument("--rounds", type=int, default=timing.Effort.rounds, help="turns of each candidate")
    parser.add_argument("--json", type=Path, help="write the rows to this JSON file")
    parser.add_argument("--csv", type=Path, help="write the rows to this CSV file")
    parser.add_argument(
        "--folder", type=Path, default=Path("benchmarks"), help="where the files bench_<room>.py lie"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmarks, prints a table, writes the files; status 1 for a wrong result, 2 for bad use."""
    arguments = make_parser().parse_args(argv)
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        modules = [load_room(arguments.folder, room) for room in arguments.room]
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    benchmarks = suite.select([b for m in modules for b in m.make_benchmarks(device)], arguments.case)
    if not benchmarks:
        print(f"no case matches {arguments.case!r}", file=sys.stderr)
        return 2

    environment = results.collect_environment(device, timing.copy_bandwidth(device))
    where = environment.cpu if environment.gpu == "none" else environment.gpu
    print(f"{where}, torch {environment.torch}, commit {environment.commit}")
    print(f"copy ceiling {environment.ceiling_gb_per_s:.0f} GB/s")
    rows: list[results.Row] = []
    wrong = 0
    for benchmark in benchmarks:
        try:
            rows += suite.run_benchmark(
                benchmark, device, environment, timing.Effort(rounds=arguments.rounds)
            )
        except suite.GateError as error:
            print(error, file=sys.stderr)
            wrong += 1
        if arguments.json:
            results.write_json(arguments.json, rows)  # whole after each, should the run be cut short
    print(results.format_table(rows))
    if arguments.csv:
        results.write_csv(arguments.csv, rows)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
