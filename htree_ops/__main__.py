"""The command line ``python -m htree_ops``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from htree_ops import correctness, info
from htree_ops.bench import io_only
from htree_ops.cli import Command, OneLineParser
from htree_ops.tuning import command as tune

COMMANDS: tuple[Command, ...] = (
    info.COMMAND,
    tune.COMMAND,
    io_only.COMMAND,
    correctness.COMMAND,
)


def make_parser() -> argparse.ArgumentParser:
    """One subparser per command."""
    listed = "\n".join(f"  {command.name:<13}{command.about}" for command in COMMANDS)
    parser = OneLineParser(
        prog="python -m htree_ops",
        description=f"Describes, tunes, measures and checks this installation of htree_ops.\n\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    about = "one of these; COMMAND --help lists its flags"
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", help=about)
    for command in COMMANDS:
        command.fill(commands.add_parser(command.name))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    arguments = make_parser().parse_args(argv)
    chosen = vars(arguments).pop("command")  # what remains are the command's own flags
    (command,) = (command for command in COMMANDS if command.name == chosen)
    return command.execute(arguments)


if __name__ == "__main__":
    sys.exit(main())
