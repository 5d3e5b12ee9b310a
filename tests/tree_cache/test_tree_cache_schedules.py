"""Whatever the schedule, the cache holds the bytes of a fresh build and gives the rows of the whole sequence.

``HTREE_SCHEDULES`` says how many schedules a device runs, 10 000 on the CPU by default.
"""

from collections.abc import Callable

import pytest
from tree_cache_schedules import Run, Shape, bitwise, schedules

SCHEDULES = schedules(10_000)
INDEXED = schedules(2_000)
OPEN = schedules(2_000)
PARTS = 10


def run_schedules(seeds: range, draw: Callable[[int], Shape]) -> None:
    for seed in seeds:
        shape = draw(seed)
        run = Run(shape, "cpu", bitwise)
        try:
            run.run(steps=4)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {shape}") from error
        assert run.different == 0, f"seed {seed}: {shape}"


@pytest.mark.parametrize("part", range(PARTS))
def test_any_schedule_gives_the_bits_of_the_whole_sequence(part):
    run_schedules(SCHEDULES[part::PARTS], Shape.draw)


@pytest.mark.parametrize("part", range(PARTS))
def test_any_schedule_with_an_index_gives_the_bits_of_the_whole_sequence(part):
    run_schedules(INDEXED[part::PARTS], Shape.draw_indexed)


@pytest.mark.parametrize("part", range(PARTS))
def test_any_schedule_with_an_open_top_gives_the_bits_of_the_whole_sequence(part):
    run_schedules(OPEN[part::PARTS], Shape.draw_open)
