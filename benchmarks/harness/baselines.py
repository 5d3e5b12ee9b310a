"""Baselines that several families have, and what torch.compile needs to be one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
from torch import Tensor

from benchmarks.harness.suite import Candidate


def compile_every_case() -> None:
    """Allows one compilation per case: beyond its limit torch.compile would run a baseline eagerly."""
    dynamo_config.recompile_limit = max(64, dynamo_config.recompile_limit)


def copy_of(x: Tensor, *_: Any) -> Tensor:
    """A copy of the first input, the least that an op of one tensor moves."""
    return x.clone()


def copy_compiled_eager(function: Callable[..., Any]) -> tuple[Candidate, ...]:
    """A copy as the yardstick, and ``function``, which computes the op, compiled and eager."""
    return (
        Candidate("copy", copy_of, same_function=False),
        Candidate("torch.compile", torch.compile(function, dynamic=False)),
        Candidate("eager", function),
    )
