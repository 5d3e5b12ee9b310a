"""The command line ``python -m htree_ops``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from htree_ops import info
from htree_ops.command_line import OneLineParser
from htree_ops.tuning import command as tuning_command


def _run_info(arguments: argparse.Namespace) -> int:
    facts = info.collect()
    print(json.dumps(facts, indent=2) if arguments.json else info.format_text(facts))
    return 0


def make_parser() -> argparse.ArgumentParser:
    """One subparser per command; each sets ``run``: parsed arguments in, exit status out."""
    parser = OneLineParser(prog="python -m htree_ops", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    about = "versions, how the library was built, GPUs, ops and compiled kernel configurations"
    info_parser = commands.add_parser("info", help=about, description=f"Prints {about}.")
    info_parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    info_parser.set_defaults(run=_run_info)
    about = "search the fastest kernel configurations on this GPU and keep them in the cache"
    tuning_command.add_arguments(
        commands.add_parser("tune", help=about, description=f"The command to {about}.")
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status."""
    arguments = make_parser().parse_args(argv)
    status: int = arguments.run(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
