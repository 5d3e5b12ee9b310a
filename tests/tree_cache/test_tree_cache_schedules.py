"""Whatever the schedule, the cache holds the bytes of a fresh build and gives the rows of the whole sequence.

``HTREE_SCHEDULES`` says how many schedules a device runs, 10 000 on the CPU by default.
"""

from __future__ import annotations

import pytest
from tree_cache_schedules import Run, Shape, bitwise, schedules

SCHEDULES = schedules(10_000)
PARTS = 10


@pytest.mark.parametrize("part", range(PARTS))
def test_any_schedule_gives_the_bits_of_the_whole_sequence(part: int) -> None:
    for seed in SCHEDULES[part::PARTS]:
        run = Run(Shape.draw(seed), "cpu", bitwise)
        try:
            run.run(steps=4)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {Shape.draw(seed)}") from error
        assert run.different == 0, f"seed {seed}: {Shape.draw(seed)}"
