"""Whether runs of examples/train_distributed.py have the losses of another one: same_losses.py ONE OTHER...

Each argument is the ``--out`` of a run. Prints the largest difference of the bits per byte of a step, and the median
time of a step. Status 1 where a run differs by more than ``MOST``, has other steps, or has learned nothing.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: Bits per byte. Sums have other orders and bf16 products other sizes; a wrong gradient is off by much more.
MOST = 0.05


def history(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "history.json").read_text())


def main(folders: Sequence[str]) -> int:
    if len(folders) < 2:
        print("same_losses.py: the folders of two runs or more are required", file=sys.stderr)
        return 2
    one, *others = (history(Path(folder)) for folder in folders)
    expected = one["train_bits_per_byte"]
    wrong = expected[-1] >= expected[0]
    print(f"{folders[0]}: {expected[0]:.4f} to {expected[-1]:.4f} bits per byte in {len(expected)} steps")
    for folder, other in zip(folders, (one, *others), strict=True):
        losses = other["train_bits_per_byte"]
        same_steps = len(losses) == len(expected)
        differences = [abs(a - b) for a, b in zip(losses, expected, strict=False)]
        most = math.nan if any(map(math.isnan, differences)) else max(differences)
        wrong = wrong or not same_steps or not most <= MOST  # a loss that is no number is wrong too
        step = 1e3 * statistics.median(other["seconds_per_step"][1:] or other["seconds_per_step"])
        print(f"{folder}: largest difference {most:.5f}, {len(losses)} steps of {step:.1f} ms")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
