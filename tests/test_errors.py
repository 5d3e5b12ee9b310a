"""The exception classes: which builtins they are, what they carry (docs/semantics/conventions.md §0.4)."""

import copy
import pickle

import pytest
import torch

from htree_ops import errors

FACTS = [
    (errors.ShapeMismatchError, ValueError, {"expected": (2, 3), "actual": (3, 2), "tensor_name": "weight"}),
    (
        errors.UnsupportedDtypeError,
        TypeError,
        {"dtype": torch.int8, "supported_dtypes": (torch.float16, torch.float32), "tensor_name": "x"},
    ),
    (
        errors.DeviceError,
        RuntimeError,
        {"expected_device": "cuda", "actual_device": torch.device("cpu"), "tensor_name": "q"},
    ),
    (errors.NumericalOverflowError, ArithmeticError, {"max_value": 1e9, "scale": 0.5, "attempts": 4}),
    (
        errors.TuningFailedError,
        RuntimeError,
        {"problem_size": (1, 2048), "configs_tried": 45, "last_error": None},
    ),
    (errors.ArchitectureNotSupportedError, NotImplementedError, {}),
]
each_class = pytest.mark.parametrize(
    ("error", "builtin", "facts"), FACTS, ids=[error.__name__ for error, _, _ in FACTS]
)


@each_class
def test_class_is_also_the_builtin_and_carries_its_facts(error, builtin, facts):
    with pytest.raises(builtin, match="what was required") as caught:
        raise error("what was required and what came", **facts)
    assert isinstance(caught.value, errors.HTreeKernelError)
    assert str(caught.value) == "what was required and what came"
    assert {name: getattr(caught.value, name) for name in facts} == facts


@each_class
def test_facts_survive_pickle_and_copy(error, builtin, facts):
    raised = error("message", **facts)
    for other in (pickle.loads(pickle.dumps(raised)), copy.copy(raised)):
        assert type(other) is error
        assert other.args == ("message",)
        assert {name: getattr(other, name) for name in facts} == facts


def test_facts_are_keywords_and_optional():
    bare = errors.ShapeMismatchError("message")
    assert (bare.expected, bare.actual, bare.tensor_name) == (None, None, None)
    assert errors.NumericalOverflowError("message").attempts == 0
    assert errors.TuningFailedError("message").configs_tried == 0
    with pytest.raises(TypeError):
        errors.ShapeMismatchError("message", (1,), (2,))


def test_base_is_a_plain_exception_and_every_class_is_exported():
    assert errors.HTreeKernelError.__bases__ == (Exception,)
    defined_here = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert defined_here == set(errors.__all__)
