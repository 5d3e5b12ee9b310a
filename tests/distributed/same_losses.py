"""Whether runs of examples/train_distributed.py have the losses of another one: same_losses.py ONE OTHER...

Each argument is the ``--out`` of a run. Prints the largest difference of the bits per byte of a step, and the median
time of a step. Status 1 where a run differs by more than ``MOST``, has other steps or settings, or has learned nothing.
The runs must have a low learning rate, as those of tests/two_gpus.sh: at the default one, forty steps let roundings
grow as far as mistakes (docs/distributed.md).
"""

import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: Bits per byte, in bf16 at a learning rate of 0.0003. Rounding alone gave up to 0.003 in forty steps of small models,
#: keys without the gradients of one rank's rows 0.02 and more (benchmarks/training_rounding.py, test_training.py).
MOST = 0.01


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
        same_run = len(losses) == len(expected) and other["settings"] == one["settings"]
        differences = [abs(a - b) for a, b in zip(losses, expected, strict=False)]
        most = math.nan if any(map(math.isnan, differences)) else max(differences)
        wrong = wrong or not same_run or not most <= MOST  # a loss that is no number is wrong too
        step = 1e3 * statistics.median(other["seconds_per_step"][1:] or other["seconds_per_step"])
        words = "" if other["settings"] == one["settings"] else ", OTHER SETTINGS"
        print(f"{folder}: largest difference {most:.5f}, {len(losses)} steps of {step:.1f} ms{words}")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
