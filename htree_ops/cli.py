"""What command lines share: how commands are built, one-line errors, progress, and checked values."""

from __future__ import annotations

import argparse
import importlib
import math
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line on the error stream, with exit status 2."""

    def error(self, message: str) -> NoReturn:
        """Prints the message without the usage."""
        print(f"{self.prog}: {message}", file=sys.stderr)
        sys.exit(2)


class _Help(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of the description and names the default of each flag that has one."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        has_default = action.option_strings and action.default not in (None, False, "", [], argparse.SUPPRESS)
        return f"{text} (default %(default)s)" if has_default and "default" not in text else text


class UsageError(ValueError):
    """Something that the user must change: the command prints one line and ends with status 2."""


@dataclass(frozen=True)
class Command:
    """One command of a program.

    Attributes:
        name: what the user types.
        description: what ``--help`` says above the flags; its line breaks are kept.
        add_arguments: adds the flags to a parser.
        run: does the work; parsed arguments in, exit status out.
        program: what is typed before the name.
    """

    name: str
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    program: str = "python -m htree_ops"

    def make_parser(self) -> argparse.ArgumentParser:
        """The command's own parser, which takes the words after its name."""
        parser = OneLineParser(prog=f"{self.program} {self.name}")
        self.fill(parser)
        return parser

    def fill(self, parser: argparse.ArgumentParser) -> None:
        """Gives ``parser`` the description and the flags of the command."""
        parser.description = self.description
        parser.formatter_class = _Help
        self.add_arguments(parser)

    def execute(self, arguments: argparse.Namespace) -> int:
        """Runs the command. Wrong use and a lack of memory give one line and status 2."""
        try:
            return self.run(arguments)
        except UsageError as error:
            message = str(error)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            message = f"out of memory: {str(error).splitlines()[0]}"
        print(f"{self.name}: {message}", file=sys.stderr)
        return 2

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Parses ``argv``, by default the words of the command line, runs the command and returns its status."""
        return self.execute(self.make_parser().parse_args(argv))


class _Parser(OneLineParser):
    """Puts the list of commands below what is wrong."""

    listed = ""

    def error(self, message: str) -> NoReturn:
        super().error(f"{message}; the commands are\n{self.listed}")


@dataclass(frozen=True)
class Program:
    """Several commands under one name. The module of a command is loaded where it runs: help, version and a typo wait
    for none.

    Attributes:
        name: what the user types, such as ``python -m htree_ops``.
        description: one line above the list of commands.
        commands: of each command the module that defines it, as ``COMMAND``, and one line for the list.
        version: what ``--version`` prints.
    """

    name: str
    description: str
    commands: Mapping[str, tuple[str, str]]
    version: str

    def make_parser(self) -> argparse.ArgumentParser:
        """The parser of what is no command: help and version."""
        listed = "\n".join(f"  {name:<13}{about}" for name, (_, about) in self.commands.items())
        parser = _Parser(
            prog=self.name,
            usage="%(prog)s [-h] [--version] COMMAND ...",
            description=f"{self.description}\n\n{listed}",
            epilog="COMMAND --help lists the flags of a command.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.listed = listed
        parser.add_argument("--version", action="version", version=self.version)
        return parser

    def load(self, name: str) -> Command:
        """The command of that name."""
        command: Command = importlib.import_module(self.commands[name][0]).COMMAND
        return command

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Runs one command and returns its exit status."""
        words = list(sys.argv[1:] if argv is None else argv)
        if words and words[0] in self.commands:
            return self.load(words[0]).main(words[1:])
        parser = self.make_parser()
        parser.parse_known_args(words)  # ends the program where help or the version is asked for
        parser.error(f"there is no command {words[0]!r}" if words else "a command is missing")


def run_program(main: Callable[[], int | str | None]) -> NoReturn:
    """Ends the process with the status of ``main``; in silence where the reader of its output has left."""
    try:
        try:
            status = main()
        except SystemExit as stop:  # a help was printed, or what is wrong
            status = stop.code
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more as it ends
        status = 128 + signal.SIGPIPE  # what a shell says of a program that this signal ended
    sys.exit(status)


class at_least:
    """An integer of at least ``least`` and, by default, of at most 32 bits, as sizes are."""

    def __init__(self, least: int, most: int = 2**31 - 1) -> None:
        self.least = least
        self.most = most
        self.__name__ = "integer"  # argparse names the type in its message

    def __call__(self, text: str) -> int:
        value = int(text)
        if value < self.least:
            raise argparse.ArgumentTypeError(f"must be at least {self.least}, got {value}")
        if value > self.most:
            raise argparse.ArgumentTypeError(f"must be at most {self.most}, got {value}")
        return value


#: The flags that give the sizes of a problem of tree attention, with the letters of the documents.
SIZES = {
    "batch": "sequences, B",
    "seq-len": "tokens of each, T",
    "hq": "query heads, H",
    "h-kv": "key and value heads, H_kv",
    "k-dim": "width of a key, K",
    "v-dim": "width of a value, V",
    "compression-rate": "children of a node, r",
    "max-top-nodes": "nodes of the top layer at most, M",
    "top-k": "nodes of a layer whose children are read, k",
    "top-k-per-layer": "nodes of a layer whose children are read, k",
}


def add_sizes(parser: argparse.ArgumentParser, problem: type) -> None:
    """Adds flags for the sizes that ``problem`` has as attributes; the attributes hold the defaults."""
    for flag, about in SIZES.items():
        default = getattr(problem, flag.replace("-", "_"), None)
        if default is not None:
            parser.add_argument(f"--{flag}", type=at_least(1), default=default, metavar="N", help=about)


#: What ``torch.manual_seed`` takes.
SEED = at_least(-(2**63), 2**64 - 1)


def bandwidth(text: str) -> float:
    """A positive, finite number of GB/s."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be positive and finite, got {text}")
    return value


def regular_expression(text: str) -> str:
    """A text that compiles as a regular expression."""
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from error
    return text


def _refusal(path: Path, error: OSError) -> argparse.ArgumentTypeError:
    reason = "a folder above it is a file" if isinstance(error, FileExistsError) else error.strerror or error
    return argparse.ArgumentTypeError(f"{path} cannot be written: {reason}")


def output_file(text: str) -> Path:
    """A path that can be written. That is tried before the work whose result goes there; the folder is made."""
    path = Path(text)
    existed = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise _refusal(path, error) from error
    if not existed:
        path.unlink()
    return path


def output_folder(text: str) -> Path:
    """A folder that files can be written into, made where it is missing and tried as in :func:`output_file`."""
    if not text:
        raise argparse.ArgumentTypeError("must be a folder, got an empty text")
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise _refusal(path, error) from error
    return path


def show_progress(label: str, done: int, total: int) -> None:
    """Draws ``done/total label`` over itself on a terminal's error stream, and removes it where all is done."""
    if sys.stderr.isatty():
        line = f"{done}/{total} {label}" if done < total else ""
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def counted(number: int, noun: str) -> str:
    """``1 case``, ``2 cases``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def columns(lines: Sequence[Sequence[str]], right: bool = False) -> str:
    """Cells below each other, two spaces apart."""
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    place = str.rjust if right else str.ljust
    return "\n".join("  ".join(map(place, line, widths)).rstrip() for line in lines)


def free_memory(device: torch.device | str) -> int:
    """Bytes that can be allocated on the device, as the device reports."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation of torch failed, on a GPU or on the CPU, where the error has no class of its own."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)
