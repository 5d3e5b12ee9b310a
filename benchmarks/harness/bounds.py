"""The least time of some work on an H200, by ceilings that were measured on one; tables say what part of a time it is.

Products of the tensor cores in bf16, keys and values of listed nodes that come from the L2 for each list by itself, and
bytes of the DRAM: the longest of the three. Neighbours that share what they gather can take less than the second.
"""

from __future__ import annotations

FLOPS, GATHERED_BYTES, DRAM_BYTES = 781e12, 9.3e12, 4.3e12  # a second


def least_ms(flops: float = 0.0, gathered: float = 0.0, moved: float = 0.0) -> float:
    """Milliseconds of so many operations, bytes from the L2 and bytes from the DRAM."""
    return 1e3 * max(flops / FLOPS, gathered / GATHERED_BYTES, moved / DRAM_BYTES)


def part_of(least: float, time: float) -> str:
    """As tables show it."""
    return f"{least / time:.0%}".replace("%", " %")
