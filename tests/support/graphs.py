"""Calls on another stream, in CUDA graphs and under a profile."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

T = TypeVar("T")


def on_another_stream(call: Callable[[], T]) -> T:
    """The result of a call on a stream of its own, which is done."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = call()
    stream.synchronize()
    return result


def kernels_of(call: Callable[[], Any]) -> list[str]:
    """Names of the kernels that a call launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]


def capture(call: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of a call that ran before, and where its replays write the result."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def assert_stream_and_graph(call: Callable[[], Any], *inputs: Tensor) -> None:
    """A call has the same bits on another stream, and a captured one follows its inputs, which change their sign."""
    expected = [x.clone() for x in tree_leaves(call())]
    for a, b in zip(tree_leaves(on_another_stream(call)), expected, strict=True):
        assert torch.equal(a, b)
    graph, captured = capture(call)
    for x in inputs:
        x.neg_()
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(tree_leaves(captured), tree_leaves(call()), strict=True):
        assert torch.equal(a, b)
