"""What the tests of examples/train_distributed.py run on every rank."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def train(flags: list[str]) -> dict[str, Any]:
    """The status of a run of the script, and what stands in its newest checkpoint."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    import train_distributed

    status = train_distributed.main(flags)
    folder = Path(flags[flags.index("--out") + 1])
    if status:
        return {"status": status}
    return {
        "status": 0,
        **json.loads((folder / (folder / "latest").read_text() / "progress.json").read_text()),
    }


def train_and_signal(flags: list[str], rank: int, step: int, number: int) -> dict[str, Any]:
    """The same; one rank gets a signal where a step begins."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    from lm import parallel

    class Signalled(parallel.Trainer):
        def step(self, stops: bool) -> None:
            if self.steps_done == step and dist.get_rank() == rank:
                os.kill(os.getpid(), number)
            super().step(stops)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "Trainer", Signalled)
        return train(flags)


def refused(flags: list[str]) -> dict[str, Any]:
    """The status of a run that ends at once, and what it says."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        found = train(flags)
    return {**found, "stderr": said.getvalue()}
