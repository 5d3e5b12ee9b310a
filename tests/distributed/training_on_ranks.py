"""What the tests of examples/train_distributed.py run on every rank."""

import contextlib
import functools
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import Tensor

from htree_ops.distributed import context_parallel
from htree_ops.distributed.collectives import added, waited

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


def _train_with(flags: list[str], act: Callable[[int], None]) -> dict[str, Any]:
    """The same; ``act`` gets the steps done where a step begins."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    from lm import parallel

    class Disturbed(parallel.Trainer):
        def step(self, stops: bool) -> None:
            act(self.steps_done)
            super().step(stops)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "Trainer", Disturbed)
        return train(flags)


def train_and_signal(flags: list[str], rank: int, step: int, number: int) -> dict[str, Any]:
    """One rank gets a signal where a step begins."""

    def act(done: int) -> None:
        if done == step and dist.get_rank() == rank:
            os.kill(os.getpid(), number)

    return _train_with(flags, act)


def train_and_raise(flags: list[str], rank: int, step: int) -> dict[str, Any]:
    """One rank raises where a step begins."""

    def act(done: int) -> None:
        if done == step and dist.get_rank() == rank:
            raise ValueError("this rank gives up")

    return _train_with(flags, act)


def train_in_bf16(flags: list[str], broken: bool) -> dict[str, Any]:
    """As on GPUs; where it is broken, the gradients of keys and values lack what the rows of rank 0 give."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    from lm import parallel

    def some(received: Tensor, dim: int) -> Tensor:
        return added(waited(received)[1:], dim)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "Trainer", functools.partial(parallel.Trainer, bf16=True))
        if broken:
            patch.setattr(context_parallel, "added", some)
        return train(flags)


def train_and_fail_to_save(flags: list[str]) -> dict[str, Any]:
    """A checkpoint is written in part."""

    def fails(state: Any, checkpoint_id: Path) -> None:
        checkpoint_id.mkdir(exist_ok=True)
        (checkpoint_id / "__0_0.distcp").write_bytes(b"")
        raise OSError("the disk is full")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed.checkpoint, "save", fails)
        return train(flags)


def refused(flags: list[str]) -> dict[str, Any]:
    """The status of a run that ends at once, and what it says."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        found = train(flags)
    return {**found, "stderr": said.getvalue()}
