"""Processes that wait for functions to run as the ranks of a group; started once per file of tests.

A forkserver imports the package once, so that each process starts in milliseconds. Every wait has an end: the group's
collectives give up after ``COLLECTIVE_SECONDS``, and a rank that has not answered after ``ANSWER_SECONDS`` fails the
test. The test in which a rank dies fails with the stacks of that rank, those of its C++ threads too. The processes of a
call that failed are not used again, because messages of it may be under way: the next call starts new ones.
"""

import faulthandler
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.gloo import use_one_worker

COLLECTIVE_SECONDS = 300
ANSWER_SECONDS = 600
#: What the other ranks have to notice that one has died.
NOTICE_SECONDS = 120
#: What a rank has to leave.
LEAVE_SECONDS = 240
#: The end of a rank's stderr that a failure shows: its stacks, and what was said before.
SAID_CHARACTERS = 20_000

#: Of a process: the groups that hold it, by their size.
GROUPS: dict[int, dist.ProcessGroup] = {}


def group_of(size: int) -> dist.ProcessGroup:
    """The group of ``size`` ranks that holds this process."""
    return GROUPS[size]


def _start(rank: int, size: int, backend: str, store: str, seconds: float) -> None:
    torch.set_num_threads(1)
    use_one_worker()
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
    )
    GROUPS[size] = dist.group.WORLD
    width = size // 2
    while width:  # halves, quarters, ...: each process is in one group of each size
        for first in range(0, size, width):
            group = dist.new_group(list(range(first, first + width)))
            if first <= rank < first + width:
                GROUPS[width] = group
        width //= 2


def _say_stacks(file: str) -> None:
    """Sends stderr of this process to ``file``, with the stacks of all threads where a signal ends it."""
    sys.stderr.flush()
    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    torch._C._set_print_stack_traces_on_fatal_signal(True)  # the C++ stacks, which faulthandler lacks
    faulthandler.enable(all_threads=True)  # the Python stacks; then it calls the handler before


def _serve(pipe: Connection, rank: int, size: int, backend: str, folder: str, seconds: float) -> None:
    _say_stacks(str(Path(folder, f"stderr{rank}")))
    _start(rank, size, backend, str(Path(folder, "store")), seconds)
    while True:
        try:
            module, name, args, keywords = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            pipe.send((True, getattr(importlib.import_module(module), name)(*args, **keywords)))
        except BaseException as error:
            pipe.send((False, (type(error).__name__, str(error))))


def _end_of(process: BaseProcess) -> str:
    """How a process has ended, in words."""
    process.join(5)
    code = process.exitcode
    if code is None:
        return "still runs"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"has ended with status {code}"


class RankError(AssertionError):
    """What one rank raised, or how it died."""


class Pool:
    """``size`` processes, ranks of one group and of its halves, quarters and so on."""

    def __init__(self, size: int, backend: str = "gloo", seconds: float = COLLECTIVE_SECONDS) -> None:
        self.size, self.backend, self.seconds = size, backend, seconds
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        self._begin()

    def _begin(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["htree_ops.distributed"])
        self.usable = True
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(there, rank, self.size, self.backend, self.folder.name, self.seconds),
                daemon=True,
            )
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def _said(self, rank: int) -> str:
        """The end of what a rank has written to stderr."""
        file = Path(self.folder.name, f"stderr{rank}")
        return file.read_text(errors="replace")[-SAID_CHARACTERS:] if file.exists() else ""

    def _answers(self) -> tuple[dict[int, tuple[bool, Any]], list[int]]:
        """The answers by rank, and the ranks that have died; the others have ``NOTICE_SECONDS`` from then."""
        answers: dict[int, tuple[bool, Any]] = {}
        dead: list[int] = []
        end = time.monotonic() + ANSWER_SECONDS
        left = dict(zip(self.pipes, range(self.size), strict=True))
        while left and (ready := wait(list(left), max(0.0, end - time.monotonic()))):
            for pipe in ready:
                rank = left.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, ConnectionError):
                    dead.append(rank)
                    end = min(end, time.monotonic() + NOTICE_SECONDS)
        return answers, dead

    def outcomes(
        self, function: Callable[..., Any], *args: Any, killed: tuple[int, ...] = (), **keywords: Any
    ) -> dict[int, tuple[bool, Any]]:
        """By rank whether the function returned, and what; of an error its type's name and its message.

        Ranks in ``killed`` must die of the call, and have no outcome.

        Raises:
            RankError: another rank has died, or one has not answered; with its stderr, where its stacks are.
        """
        if not self.usable:
            self.close()
            self._begin()
        self.usable = False
        for pipe in self.pipes:
            with suppress(ConnectionError):  # it has died since the last call: its pipe says so below
                pipe.send((function.__module__, function.__name__, args, keywords))
        answers, dead = self._answers()
        wrong = [rank for rank in range(self.size) if (rank in dead) != (rank in killed)]
        if not wrong and len(answers) + len(dead) == self.size:
            self.usable = not dead
            return answers
        silent = [rank for rank in range(self.size) if rank not in answers and rank not in dead]
        for rank in silent:  # so that it writes its stacks
            with suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, signal.SIGABRT)
        told = []
        for rank, process in enumerate(self.processes):
            if rank in answers:
                told.append(f"rank {rank} answered: {str(answers[rank])[:1000]}")
                continue
            which = "has not answered, and" if rank in silent else "died:"
            told.append(f"rank {rank} {which} {_end_of(process)}; it has said:\n{self._said(rank)}")
        raise RankError(f"{function.__name__}: not every rank has answered\n" + "\n".join(told))

    def run(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> list[Any]:
        """What the function returns on every rank."""
        outcomes = self.outcomes(function, *args, **keywords)
        for rank, (done, value) in sorted(outcomes.items()):
            if not done:
                self.usable = False
                raise RankError(f"rank {rank}: {value[0]}: {value[1]}")
        return [value for _, (_, value) in sorted(outcomes.items())]

    def refusals(self, function: Callable[..., Any], *args: Any) -> list[tuple[str, str]]:
        """The error of every rank, all of which must raise: its type's name and its message."""
        outcomes = self.outcomes(function, *args)
        self.usable = not any(done for done, _ in outcomes.values())
        assert self.usable, outcomes
        return [value for _, (_, value) in sorted(outcomes.items())]

    def close(self) -> None:
        """Ends the processes."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            # One that is killed while it leaves a GPU may take others along that share it through the multi-process
            # service, so it gets all the time that a busy machine may need.
            process.join(LEAVE_SECONDS)
            if process.is_alive():
                process.kill()
        with suppress(OSError):
            self.folder.cleanup()


def started(size: int) -> Iterator[Pool]:
    """A pool for as long as a fixture lives."""
    pool = Pool(size)
    yield pool
    pool.close()
