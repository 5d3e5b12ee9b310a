"""Processes that wait for functions to run as the ranks of a group; started once per file of tests.

A forkserver imports the package once, so that each process starts in milliseconds. Every wait has an end: the group's
collectives give up after ``COLLECTIVE_SECONDS``, and a rank that has not answered after ``ANSWER_SECONDS`` fails the
test and ends the pool.
"""

from __future__ import annotations

import importlib
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

COLLECTIVE_SECONDS = 300
ANSWER_SECONDS = 600

#: Of a process: the groups that hold it, by their size.
GROUPS: dict[int, dist.ProcessGroup] = {}


def group_of(size: int) -> dist.ProcessGroup:
    """The group of ``size`` ranks that holds this process."""
    return GROUPS[size]


def _start(rank: int, size: int, backend: str, store: str, seconds: float) -> None:
    torch.set_num_threads(1)
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


def _serve(pipe: Connection, rank: int, size: int, backend: str, store: str, seconds: float) -> None:
    _start(rank, size, backend, store, seconds)
    while True:
        try:
            module, name, args = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            pipe.send((True, getattr(importlib.import_module(module), name)(*args)))
        except BaseException as error:
            pipe.send((False, (type(error).__name__, str(error))))


class RankError(AssertionError):
    """What one rank raised."""


class Pool:
    """``size`` processes, ranks of one group and of its halves, quarters and so on."""

    def __init__(self, size: int, backend: str = "gloo", seconds: float = COLLECTIVE_SECONDS) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["htree_ops.distributed"])
        self.folder = tempfile.TemporaryDirectory()
        store = str(Path(self.folder.name, "store"))
        self.pipes, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(there, rank, size, backend, store, seconds), daemon=True
            )
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def outcomes(self, function: Callable[..., Any], *args: Any) -> list[tuple[bool, Any]]:
        """Per rank whether ``function(*args)`` returned, and what; of an error its type's name and its message."""
        for pipe in self.pipes:
            pipe.send((function.__module__, function.__name__, args))
        found = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(ANSWER_SECONDS):
                self.close()
                raise RankError(
                    f"rank {rank} has not answered within {ANSWER_SECONDS} s: {function.__name__}"
                )
            try:
                found.append(pipe.recv())
            except EOFError:
                found.append((False, ("EOFError", "the process has ended")))
        return found

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What ``function(*args)`` returns on every rank."""
        outcomes = self.outcomes(function, *args)
        for rank, (done, value) in enumerate(outcomes):
            if not done:
                raise RankError(f"rank {rank}: {value[0]}: {value[1]}")
        return [value for _, value in outcomes]

    def refusals(self, function: Callable[..., Any], *args: Any) -> list[tuple[str, str]]:
        """The error of every rank, all of which must raise: its type's name and its message."""
        outcomes = self.outcomes(function, *args)
        assert not any(done for done, _ in outcomes), outcomes
        return [value for _, value in outcomes]

    def close(self) -> None:
        """Ends the processes."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
        with suppress(OSError):
            self.folder.cleanup()


def started(size: int, backend: str = "gloo") -> Iterator[Pool]:
    """A pool for as long as a fixture lives."""
    pool = Pool(size, backend)
    yield pool
    pool.close()
