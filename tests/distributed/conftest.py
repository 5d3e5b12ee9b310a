"""The ranks of tests. Those on GPUs begin once: each start makes a context on every GPU and NCCL's channels."""

from pathlib import Path

import pytest
import torch
from process_pool import Pool, started

_STARTED: list[Pool] = []


@pytest.fixture(scope="module")
def ranks():
    """Four processes on the CPU: groups of 4, 2 and 1."""
    yield from started(4)


@pytest.fixture(scope="module")
def pair():
    yield from started(2)


@pytest.fixture
def gpus():
    """A process for each of two GPUs; with one GPU a group of one."""
    if not _STARTED:
        _STARTED.append(Pool(min(2, torch.cuda.device_count()), "nccl"))
    return _STARTED[0]


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Ends them behind the last test of this folder, for what they hold of a GPU."""
    if _STARTED and (nextitem is None or nextitem.path.parent != Path(__file__).parent):
        _STARTED.pop().close()
