"""Every op on the last GPU while the first is the current one, and as the first op of a thread (docs/semantics §0.1).

With a single GPU both are the same card, and the test only checks that a call repeats its bits.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.support.cases import normal
from tests.support.row_calls import row_calls
from tests.support.tree_attention_calls import Call, calls, tensors_of
from tests.support.tree_attention_cases import SHAPES

#: The general kernels, and in bf16 those of tensor cores with and without shared lists.
TREES = {"ragged_everywhere": torch.float32, "head_128": torch.bfloat16, "stride16": torch.bfloat16}


def tensor_core_calls() -> list[Call]:
    """Calls whose tiles are copied by TMA and multiplied on tensor cores."""
    x, gate, up = (normal((128, 256), torch.bfloat16, "cpu", seed) for seed in range(3))
    a, b = (normal((128, 256), torch.float32, "cpu", seed).to(torch.float8_e4m3fn) for seed in (3, 4))
    rows, columns = torch.full((128, 1), 0.5), torch.full((1, 128), 2.0)
    return [
        Call("gated_mlp", (x[None], gate, up, "silu", "up")),
        Call("fp8_gemm", (a, b.t(), rows, columns, torch.bfloat16)),
        Call("causal_softmax", (normal((2, 512, 512), torch.bfloat16, "cpu", 5), 0)),
        Call("hadamard_transform", (normal((300, 1024), torch.bfloat16, "cpu", 6),)),
    ]


CALLS = [
    *(call for call in row_calls("cpu") if tensors_of(call.args)),
    *tensor_core_calls(),
    *(
        call
        for case in SHAPES
        if case.name in TREES
        for call in calls(case.with_dtype(TREES[case.name]), "cpu")
    ),
]


def placed(value: Any, device: torch.device) -> Any:
    """A copy of an argument with its tensors on ``device``, in the same layout."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device).copy_(value)
    if isinstance(value, torch.device):
        return device
    return [placed(x, device) for x in value] if isinstance(value, list) else value


@pytest.mark.gpu
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.op)
def test_the_device_of_the_arguments_is_the_one_that_works(call):
    first, last = torch.device("cuda", 0), torch.device("cuda", torch.cuda.device_count() - 1)
    results = []
    for device in (first, last):
        arguments = [placed(x, device) for x in call.args]
        keywords = {name: placed(x, device) for name, x in call.kwargs.items()}
        with torch.cuda.device(first):
            result = call.overload(*arguments, **keywords)
            assert torch.cuda.current_device() == 0
        found = [*tensors_of(result), *tensors_of(arguments)]
        assert {x.device for x in found if x.is_cuda} == {device}
        results.append([x.cpu().contiguous().view(torch.uint8) for x in found if x.dim()])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.op)
def test_a_thread_may_begin_with_any_op(call):
    """A new thread has no CUDA context, and memory from the allocator's cache does not give it one."""
    device = torch.device("cuda", torch.cuda.current_device())

    def work(arguments, keywords):
        return [x for x in tensors_of(call.overload(*arguments, **keywords)) if x.dim()]

    results = []
    for in_thread in (False, True):
        arguments = [placed(x, device) for x in call.args]
        keywords = {name: placed(x, device) for name, x in call.kwargs.items()}
        if in_thread:
            with ThreadPoolExecutor(1) as thread:
                found = thread.submit(work, arguments, keywords).result()
        else:
            found = work(arguments, keywords)
        results.append([x.cpu().contiguous().view(torch.uint8) for x in found])
        del found
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
