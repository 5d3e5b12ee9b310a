"""Mutated calls of every op on the CPU: a documented error or a result, never a crash (docs/semantics §0.4, §1.3).

Each call starts valid and has one to three of its arguments spoilt: rank, sizes, dtype, layout, values out of range,
options out of range. A result must have the shape, strides and dtype that Meta promises for the same arguments, so a
kernel that accepts a call which Meta refuses fails too. The arguments lie in larger, poisoned buffers: a write
outside of an argument shows, and so does a change of one that the op does not declare.
"""

import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from htree_ops.info import op_names
from tests.support.layouts import in_larger
from tests.support.row_calls import row_calls
from tests.support.tree_attention_calls import Call, calls, facts, tensors_of, to_meta
from tests.support.tree_attention_cases import SHAPES

CALLS_PER_SEED = 300
SEEDS = range(8)  # 2400 calls
DOCUMENTED = (ValueError, TypeError, RuntimeError, IndexError)  # NotImplementedError is a RuntimeError
# A failed assertion of torch or of our own code is not a documented error, whatever its class.
INTERNAL = (
    "INTERNAL ASSERT",
    "Expected condition",
    "out of memory",
    "DefaultCPUAllocator",
    "std::",
    "vector::",
)
NAMES = (
    "ragged_everywhere",
    "batch",
    "stride4_suffix",
    "group_of_3",
    "importance_joint",
    "empty_sequence",
    "no_query",
    "one_layer_full",
    "only_the_rightmost",
)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.bool)
INTEGERS = (-(2**63), -(2**31), -17, -1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 16, 63, 2**31 - 1, 2**31, 2**62)
FLOATS = (math.nan, math.inf, -math.inf, 0.0, -1.0, 1e30, 1e-30, 1e300, 2.0)
INDICES = (-(2**31), -2, -1, 0, 1, 5, 10**6, 2**31 - 1)


def spoil_rank(x: Tensor, rng: random.Random) -> Tensor:
    choice = rng.randrange(3)
    if choice == 0:
        return x.unsqueeze(rng.randrange(x.dim() + 1))
    return x.flatten() if choice == 1 or not x.dim() or 0 in x.shape else x.select(rng.randrange(x.dim()), 0)


def spoil_size(x: Tensor, rng: random.Random) -> Tensor:
    if not x.dim():
        return x
    dim = rng.randrange(x.dim())
    size = x.shape[dim]
    wanted = rng.choice([0, 1, size - 1, size + 1, 2 * size, size // 2])
    index = torch.arange(max(wanted, 0)) % max(size, 1)
    return (
        x.index_select(dim, index)
        if size
        else x.new_zeros([max(wanted, 0) if d == dim else n for d, n in enumerate(x.shape)])
    )


def spoil_dtype(x: Tensor, rng: random.Random) -> Tensor:
    return x.to(rng.choice(DTYPES))


def spoil_layout(x: Tensor, rng: random.Random) -> Tensor:
    """x with other strides and the same values, with repeated rows, or with permuted dims."""
    choice = rng.randrange(4)
    if choice == 0 and x.dim() > 1:
        return x.transpose(-1, rng.randrange(x.dim()))
    if choice == 1 and x.dim() and 0 not in x.shape:
        return x.narrow(rng.randrange(x.dim()), 0, 1).expand_as(x)
    if choice == 2 and x.dim() and 0 not in x.shape:
        return x.repeat_interleave(2, -1)[..., ::2]
    return in_larger(x)


def spoil_values(x: Tensor, rng: random.Random) -> Tensor:
    spoilt = x.clone()
    for _ in range(rng.choice((1, 3, spoilt.numel()))):
        if spoilt.numel():
            place = rng.randrange(spoilt.numel())
            value = rng.choice(FLOATS) if x.is_floating_point() else rng.choice(INDICES)
            spoilt.view(-1)[place] = torch.tensor(value).to(x.dtype)
    return spoilt


TENSOR_SPOILERS: tuple[Callable[[Tensor, random.Random], Tensor], ...] = (
    spoil_rank,
    spoil_size,
    spoil_size,
    spoil_dtype,
    spoil_layout,
    spoil_values,
    spoil_values,
)


def spoil(value: Any, rng: random.Random) -> Any:
    """A replacement for ``value``, wrong or merely unusual."""
    if rng.random() < 0.03:
        return rng.choice((None, "nonsense", 1.5, [], torch.ones(2)))
    if isinstance(value, Tensor):
        spoiler = rng.choice(TENSOR_SPOILERS)
        return spoil_values(value.contiguous(), rng) if spoiler is spoil_values else spoiler(value, rng)
    if isinstance(value, list):
        choice = rng.randrange(3) if value else 1
        if choice == 0:
            return value[1:]
        if choice == 1:
            return [*value, torch.zeros(1, dtype=torch.int32)]
        place = rng.randrange(len(value))
        return [spoil(x, rng) if i == place and isinstance(x, Tensor) else x for i, x in enumerate(value)]
    if isinstance(value, str):
        return rng.choice(("lse", "exp_joint", "", "LSE_CAUSAL"))
    if isinstance(value, torch.dtype):
        return rng.choice(DTYPES)
    if isinstance(value, float) or value is None:
        return rng.choice(FLOATS)
    return rng.choice(INTEGERS)


def too_large(args: list[Any]) -> bool:
    """Whether a call may allocate more than this machine should: list widths and factory sizes multiply."""
    sizes = [abs(x) for x in args if isinstance(x, int) and not isinstance(x, bool)]
    return any(10_000 < size < 2**62 for size in sizes)


def placed(x: Any) -> Any:
    """A copy of x, so that calls do not share memory."""
    if isinstance(x, list):
        return [placed(y) for y in x]
    if not isinstance(x, Tensor) or 0 in x.stride() or not x.numel():
        return x
    return in_larger(x) if x.dim() and x.is_contiguous() and x.dtype != torch.bool else x.clone()


def storage_bytes(x: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).clone()


def argument_on_meta(x: Any, argument: torch.Argument) -> Any:
    # For a number torch takes a tensor of one element, which a tensor on meta does not have.
    if "Tensor" in str(argument.type):
        return to_meta(x)
    return tree_map(lambda y: y.item() if isinstance(y, Tensor) else to_meta(y), x)


def attempt(call: Call, args: list[Any]) -> tuple[Any, Exception | None]:
    try:
        return call.overload(*args, **call.kwargs), None
    except Exception as error:
        return None, error


def check_call(call: Call, args: list[Any], outcomes: Counter[str]) -> None:
    written = [
        i for i, a in enumerate(call.overload._schema.arguments) if a.alias_info and a.alias_info.is_write
    ]
    before = [(i, x, storage_bytes(x)) for i, arg in enumerate(args) for x in tensors_of(arg)]
    result, error = attempt(call, args)
    if error is None:
        # A call may leave out the last arguments.
        on_meta = map(argument_on_meta, args, call.overload._schema.arguments[: len(args)])
        meta = call.overload(*on_meta, **to_meta(call.kwargs))
        assert facts(result) == facts(meta), call.op
    else:
        text = str(error)
        assert isinstance(error, DOCUMENTED), f"{call.op} raised {type(error)}: {text}"
        assert len(text) > 10, f"{call.op} does not say what is wrong: {text}"
        assert not any(word in text for word in INTERNAL), f"{call.op}: {text}"
    outcomes["ran" if error is None else "refused"] += 1
    for position, tensor, bytes_before in before:
        if position in written:
            continue
        assert torch.equal(storage_bytes(tensor), bytes_before), f"{call.op} changed argument {position}"
    for position in written:
        check_margin(args[position], before)


def check_margin(tensor: Any, before: list[tuple[int, Tensor, Tensor]]) -> None:
    """Asserts that nothing has changed in the buffer outside of a written argument."""
    if not isinstance(tensor, Tensor) or not tensor.numel() or 0 in tensor.stride():
        return
    old = next(copy for _, x, copy in before if x is tensor)
    inside = torch.zeros(tensor.untyped_storage().nbytes() // tensor.itemsize, dtype=torch.bool)
    inside.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(True)
    same = (storage_bytes(tensor) == old).view(-1, tensor.itemsize).all(-1)
    assert bool((same | inside).all()), "a write outside of the argument"


CASES = [case for case in SHAPES if case.name in NAMES]


def test_the_fuzzer_reaches_every_op():
    reached = {call.op for case in CASES for call in calls(case, "cpu")} | {c.op for c in row_calls("cpu")}
    # _refuse_backward raises, whoever calls it
    assert reached | {"causal_softmax.out", "_refuse_backward"} == set(op_names())
    assert {case.name for case in CASES} == set(NAMES)
    assert CALLS_PER_SEED * len(SEEDS) >= 2000


@pytest.mark.parametrize("seed", SEEDS)
def test_mutated_calls(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    valid = [call for case in CASES for call in calls(case, "cpu", seed)] + row_calls("cpu") * 3
    outcomes = Counter()
    done = 0
    while done < CALLS_PER_SEED:
        call = rng.choice(valid)
        args = list(call.args)
        for _ in range(rng.choice((1, 1, 2, 3))):
            position = rng.randrange(len(args))
            args[position] = spoil(args[position], rng)
        if too_large(args):
            continue
        check_call(call, [placed(x) for x in args], outcomes)
        done += 1
    assert outcomes["refused"] > CALLS_PER_SEED // 5
    assert outcomes["ran"] > CALLS_PER_SEED // 10
