"""The processes that the tests of this folder run on: a rank that is lost is shown, and costs one test."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator

import process_pool
import pytest
import torch
import torch.distributed as dist
from process_pool import Pool, RankError, started


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    yield from started(2)


# ---- on the ranks


def total() -> tuple[int, float]:
    """The process, and a sum over the ranks that needs all of them."""
    x = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(x)
    return os.getpid(), float(x)


def read_nothing(rank: int) -> None:
    """One rank reads the address 1 in a thread beside the one that waits for the other rank."""
    if dist.get_rank() == rank:
        thread = threading.Thread(target=ctypes.string_at, args=(1,))
        thread.start()
        thread.join()
    total()


def leave(status: int) -> None:
    os._exit(status)


def sleep_long(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


def raise_on(ranks: tuple[int, ...]) -> None:
    if dist.get_rank() in ranks:
        raise ValueError("not this one")


# ---- in the test


def pids(pool: Pool) -> list[int]:
    """The processes, which can work together."""
    answers = pool.run(total)
    assert [x for _, x in answers] == [3.0, 3.0]
    return [pid for pid, _ in answers]


def test_a_rank_that_dies_is_shown_with_its_stacks_and_the_next_call_has_new_ranks(pair: Pool) -> None:
    before = pids(pair)
    with pytest.raises(RankError) as caught:
        pair.run(read_nothing, 1)
    said = str(caught.value)
    assert "read_nothing: not every rank has answered" in said
    assert "rank 1 died: was ended by SIGSEGV" in said
    assert "in string_at" in said  # the thread that died
    assert "in read_nothing" in said  # the one that waited for it
    assert "frame #" in said  # and the threads of C++
    assert "rank 0 answered: (False, ('RuntimeError'" in said
    assert not set(pids(pair)) & set(before)


def test_a_rank_that_ends_is_shown_with_its_status(pair: Pool) -> None:
    with pytest.raises(RankError, match=r"rank 0 died: has ended with status 5(.|\n)*rank 1 died: has ended"):
        pair.run(leave, 5)
    pids(pair)


def test_a_rank_that_died_between_two_calls_is_shown(pair: Pool) -> None:
    pids(pair)
    pair.processes[0].kill()
    pair.processes[0].join()
    with pytest.raises(RankError, match="rank 0 died: was ended by SIGKILL"):
        pair.run(total)
    pids(pair)


def test_a_rank_that_does_not_answer_is_shown_with_its_stacks(
    pair: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids(pair)
    with monkeypatch.context() as patch:
        patch.setattr(process_pool, "ANSWER_SECONDS", 5)
        with pytest.raises(RankError) as caught:
            pair.run(sleep_long, 0)
    said = str(caught.value)
    assert "rank 0 has not answered, and was ended by SIGABRT" in said
    assert "in sleep_long" in said
    assert "rank 1 answered: (True, None)" in said
    pids(pair)


def test_ranks_of_a_call_that_failed_are_not_used_again(pair: Pool) -> None:
    before = pids(pair)
    assert pids(pair) == before
    with pytest.raises(RankError, match="rank 1: ValueError: not this one"):
        pair.run(raise_on, (1,))
    assert not set(pids(pair)) & set(before)


def test_a_rank_that_should_raise_and_does_not_is_a_failure(pair: Pool) -> None:
    before = pids(pair)
    with pytest.raises(AssertionError, match="not this one"):
        pair.refusals(raise_on, (1,))
    assert not set(pids(pair)) & set(before)


def test_refusals_of_every_rank_keep_the_ranks(pair: Pool) -> None:
    before = pids(pair)
    assert pair.refusals(raise_on, (0, 1)) == [("ValueError", "not this one")] * 2
    assert pids(pair) == before
