"""The command line ``python -m benchmarks``: times op families, compares two runs, draws a report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.harness import compare, report, run
from htree_ops.cli import Command, OneLineParser

COMMANDS: tuple[Command, ...] = (run.COMMAND, compare.COMMAND, report.COMMAND)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    parser = OneLineParser(
        prog="python -m benchmarks",
        description="Times the ops of htree_ops beside baselines.\n\n"
        + "\n".join(f"  {command.name:<13}{command.about}" for command in COMMANDS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    about = "one of these; COMMAND --help lists its flags"
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", help=about)
    for command in COMMANDS:
        command.fill(commands.add_parser(command.name))
    arguments = parser.parse_args(argv)
    chosen = vars(arguments).pop("command")
    return next(command for command in COMMANDS if command.name == chosen).execute(arguments)


if __name__ == "__main__":
    sys.exit(main())
