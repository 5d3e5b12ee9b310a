"""Measures what tree attention does to a language model, beside dense attention and a sliding window (docs/quality.md).

Run: ``python -m benchmarks.quality.run --out DIR``. ``--list`` shows the pieces and their minutes on one H200,
``--piece`` chooses, ``--quick`` takes less than 10 minutes in all, ``--limit-s`` ends a call in time and ``--resume``
goes on after it, within a training too. Rows go to DIR/rows.jsonl, one JSON object per evaluation;
``benchmarks/quality/report.py`` makes tables and pictures of them.
Exit status: 0 all done, 1 a run failed (its error is a row), 2 wrong use, 3 something is left for another call.
"""

from __future__ import annotations

import argparse
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.quality.study import corpus, pieces, record
from benchmarks.quality.study.session import WITHOUT_TEXT, Interrupted, NoTime, Progress, Session, Setup
from benchmarks.quality.study.settings import SCALES, dense
from htree_ops.cli import OneLineParser, UsageError, at_least, output_folder
from htree_ops.info import cuda_missing

FAILED, WRONG_USE, LEFT = 1, 2, 3
LEAST_S = 40.0  # seconds without which a run is not begun


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = OneLineParser(prog="run.py", description="what tree attention does to a language model")
    parser.add_argument("--out", type=output_folder, metavar="DIR", help="folder for rows and checkpoints")
    parser.add_argument("--list", action="store_true", help="show the pieces and end")
    parser.add_argument("--piece", action="append", metavar="NAME", help="only this one; may be repeated")
    scale = parser.add_mutually_exclusive_group()
    scale.add_argument(
        "--quick", action="store_const", const="quick", dest="scale", help="less of it, below 10 minutes"
    )
    scale.add_argument(
        "--tiny",
        action="store_const",
        const="tiny",
        dest="scale",
        help="sizes of the tests, seconds on a CPU",
    )
    parser.add_argument("--resume", action="store_true", help="go on in --out; what is done is not repeated")
    parser.add_argument("--previous", type=Path, metavar="DIR", help="read what an earlier call left there")
    parser.add_argument(
        "--state",
        type=output_folder,
        metavar="DIR",
        help="folder for the training under way (default: --out)",
    )
    parser.add_argument(
        "--max-part-mib",
        type=at_least(1),
        default=record.LARGEST_PART // 2**20,
        metavar="N",
        help="largest file of a checkpoint (default %(default)s)",
    )
    parser.add_argument("--limit-s", type=at_least(1), metavar="S", help="end within so many seconds")
    parser.add_argument("--device", default="auto", help="cuda, cpu or auto (default)")
    parser.add_argument(
        "--text",
        type=Path,
        action="append",
        metavar="DIR",
        help="folder with .py files (default: Python's own)",
    )
    parser.add_argument(
        "--no-compile", action="store_true", help="without torch.compile between the attentions"
    )
    parser.set_defaults(scale="full")
    return parser


def chosen(arguments: argparse.Namespace) -> list[pieces.Piece]:
    """The pieces asked for; all of the scale where none is named."""
    names = [piece.name for piece in pieces.PIECES]
    for name in arguments.piece or []:
        if name not in names:
            raise UsageError(f"--piece must be one of {', '.join(names)}, got {name}")
    if arguments.piece:
        return [piece for piece in pieces.PIECES if piece.name in arguments.piece]
    return [piece for piece in pieces.PIECES if arguments.scale != "quick" or piece.quick]


def device_of(name: str) -> str:
    """The device asked for, or the best there is."""
    missing = cuda_missing()
    if name == "auto":
        return "cpu" if missing else "cuda"
    if name not in ("cpu", "cuda"):
        raise UsageError(f"--device must be cpu, cuda or auto, got {name}")
    if name == "cuda" and missing:
        raise UsageError(f"--device cuda: {missing}")
    return name


def make_session(arguments: argparse.Namespace) -> Session:
    """The session for the flags."""
    if arguments.out is None:
        raise UsageError("--out is required")
    if not arguments.resume and record.read_rows(arguments.out):
        raise UsageError(f"--out: {arguments.out} has rows; give --resume to go on, or another folder")
    if arguments.previous is not None and not arguments.previous.is_dir():
        raise UsageError(f"--previous: {arguments.previous} is not a folder")
    record.mend(arguments.out)
    device = device_of(arguments.device)
    return Session(
        out=arguments.out,
        scale=SCALES[arguments.scale],
        device=device,
        text_folders=arguments.text or corpus.default_folders(),
        previous=arguments.previous,
        state=arguments.state,
        part_bytes=arguments.max_part_mib * 2**20,
        limit_s=arguments.limit_s,
        fused=device == "cuda" and not arguments.no_compile,
    )


def work(session: Session, todo: Sequence[pieces.Piece]) -> int:
    """Does what is not done yet; returns the exit status."""
    failed = left = False
    for piece in todo:
        session.experiment = piece.experiment
        for run in piece.runs(session.scale):
            if session.is_done(piece.experiment, run.name):
                continue
            if session.remaining() < LEAST_S:
                left = True
                continue
            try:
                run.work(session)
            except NoTime:
                left = True
                session.say(f"{piece.name}: {run.name}: left for another call, too little time")
            except Interrupted:
                session.say("stopped by a signal; --resume goes on")
                return LEFT
            except Exception as error:
                failed = True
                traceback.print_exc()
                note = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                setup = Setup(piece.experiment, run.name, dense(), session.scale.conversion, note=note)
                session.write(setup, "error", Progress())
            if session.device == "cuda":
                torch.cuda.empty_cache()
    session.say("done" if not left else "something is left for another call: --resume goes on")
    return FAILED if failed else LEFT if left else 0


def show_list(todo: Sequence[pieces.Piece]) -> None:
    """The pieces with their minutes."""
    for piece in todo:
        quick = ", also --quick" if piece.quick else ""
        print(f"{piece.name:16} {piece.minutes:4.1f} min  {piece.about}{quick}")
    print(f"{'all':16} {sum(piece.minutes for piece in todo):4.1f} min")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    arguments = make_parser().parse_args(argv)
    try:
        todo = chosen(arguments)
        if arguments.list:
            show_list(todo)
            return 0
        session = make_session(arguments)
    except (UsageError, ValueError) as error:
        print(f"run.py: {error}", file=sys.stderr)
        return WRONG_USE

    def stop(number: int, frame: object) -> None:
        session.stopped = True

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        session.say(f"{session.scale.name} on {session.facts['gpu']}, {session.facts['cpu']}")
        try:
            for piece in todo:
                session.experiment = piece.experiment
                if piece.experiment != WITHOUT_TEXT:
                    _ = session.corpus
        except ValueError as error:
            print(f"run.py: --text: {error}", file=sys.stderr)
            return WRONG_USE
        return work(session, todo)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
