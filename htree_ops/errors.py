"""Exception classes of the package (docs/semantics/conventions.md §0.4).

Each class is an :class:`HTreeKernelError` and the builtin that C++ raises for the same mistake, so that both
``except ShapeMismatchError`` and ``except ValueError`` catch it. Every constructor takes the message and, as
keywords, the facts behind it; a fact that is not given is ``None`` (``attempts`` and ``configs_tried``: 0).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

__all__ = [
    "ArchitectureNotSupportedError",
    "DeviceError",
    "HTreeKernelError",
    "NumericalOverflowError",
    "OutOfPagesError",
    "ShapeMismatchError",
    "TuningFailedError",
    "UnsupportedDtypeError",
]


class HTreeKernelError(Exception):
    """Base of every error that this package raises itself."""

    def __init__(self, message: str = "", **facts: Any) -> None:
        super().__init__(message)
        for name, fact in facts.items():
            if not hasattr(type(self), name):
                raise TypeError(f"{type(self).__name__}: keywords must be facts of the class, got {name!r}")
            setattr(self, name, fact)


class ShapeMismatchError(HTreeKernelError, ValueError):
    """A tensor has the wrong rank or sizes.

    Attributes:
        expected: the required shape or rank, as a tuple, an int or words.
        actual: what came instead.
        tensor_name: name of the argument.
    """

    expected: Any = None
    actual: Any = None
    tensor_name: str | None = None


class UnsupportedDtypeError(HTreeKernelError, TypeError):
    """A tensor has a dtype that the op does not compute.

    Attributes:
        dtype: the dtype that came.
        supported_dtypes: the dtypes the op computes.
        tensor_name: name of the argument.
    """

    dtype: torch.dtype | None = None
    supported_dtypes: Sequence[torch.dtype] | None = None
    tensor_name: str | None = None


class DeviceError(HTreeKernelError, RuntimeError):
    """A tensor is on the wrong device, or tensors are on different devices.

    Attributes:
        expected_device: where it must be.
        actual_device: where it is.
        tensor_name: name of the argument.
    """

    expected_device: torch.device | str | None = None
    actual_device: torch.device | str | None = None
    tensor_name: str | None = None


class NumericalOverflowError(HTreeKernelError, ArithmeticError):
    """Values stay outside the range of the target format after every permitted rescaling.

    Attributes:
        max_value: largest magnitude seen, in units of the unscaled input.
        scale: last scale tried (it multiplies the input).
        attempts: number of scales tried.
    """

    max_value: float | None = None
    scale: float | None = None
    attempts: int = 0


class OutOfPagesError(HTreeKernelError, ValueError):
    """A cache needs more pages than its pool has.

    Attributes:
        pages: how many are lacking.
    """

    pages: int = 0


class TuningFailedError(HTreeKernelError, RuntimeError):
    """No configuration of a search space ran.

    Attributes:
        problem_size: the sizes that were tuned for.
        configs_tried: number of configurations called.
        last_error: exception of the last one.
    """

    problem_size: Sequence[int] | None = None
    configs_tried: int = 0
    last_error: BaseException | None = None


class ArchitectureNotSupportedError(HTreeKernelError, NotImplementedError):
    """The device, or the compiled set of kernels, cannot run the op as asked."""


# ---- from the message of an op to the class with its attributes


def refuse(kind: type[HTreeKernelError], message: str, **facts: Any) -> NoReturn:
    """Raises ``kind``. While torch.compile traces, raises its builtin base, whose message Dynamo can show."""
    if torch.compiler.is_compiling():
        raise kind.__mro__[2](message)
    raise kind(message, **facts)


#: Every message of an op begins with its name, followed by a sentence.
_MESSAGE = re.compile(r"(?!htree:)(?P<op>[a-z]\w*)(?:\.out)?: (?P<sentence>.*)", re.S)
_RANK = re.compile(r"must be (\d)-D")
_SIZE = re.compile(r"size (\d) of \S+ must be (\d+) \(")
_SHAPE = re.compile(r"must have shape \[([\d, ]*)\]")
_DEVICE = re.compile(r"must be on the device of .+ \(([\w:]+)\), got ([\w:]+)")
#: The words between "must" and what came.
_RULE = re.compile(r"must (?:be |have )?(.*?),? got ", re.S)


def in_words_of(
    function: str, arguments: Mapping[str, Any], error: Exception, renamed: Mapping[str, str]
) -> Exception | None:
    """The error of ``function`` for the ``error`` of an op that it calls; None where that stays as it is.

    Args:
        function: name of the function that the user has called.
        arguments: by name, as given.
        error: the op's error, with a message ``op: argument must ..., got ...`` (csrc/host/check.h).
        renamed: words of the op for which the function has another word.
    """
    found = _MESSAGE.fullmatch(str(error))
    if found is None or isinstance(error, HTreeKernelError):
        return None
    sentence = found["sentence"]
    if isinstance(index := arguments.get("index"), (tuple, list)) and len(index) == 2:  # ops take its parts
        arguments = {**arguments, "index_query": index[0], "index_key": index[1]}
    name, value = _subject(sentence, arguments, renamed)
    for theirs, ours in renamed.items():  # after a number it is a count, not an argument
        sentence = re.sub(rf"(?<![\w.])(?<!\d ){theirs}\b", ours, sentence)
    message = f"{function}: {sentence}"
    if isinstance(error, TypeError) and "dtype" in sentence:
        rule, came = _RULE.search(sentence), getattr(value, "dtype", value)
        return UnsupportedDtypeError(
            message,
            dtype=came if isinstance(came, torch.dtype) else None,
            supported_dtypes=tuple(
                getattr(torch, word) for word in re.findall(r"torch\.(\w+)", rule[1] if rule else "")
            ),
            tensor_name=name if isinstance(value, Tensor) else None,
        )
    if device := _DEVICE.search(sentence):
        expected, actual = map(torch.device, device.groups())
        return DeviceError(message, expected_device=expected, actual_device=actual, tensor_name=name)
    if isinstance(error, NotImplementedError) and re.search(r"no kernel|block_size must", sentence):
        return ArchitectureNotSupportedError(message)
    shows_sizes = (
        re.search(r", got .*\[", sentence) and "must lie between" not in sentence
    )  # otherwise the message shows values
    if isinstance(error, ValueError) and isinstance(value, Tensor) and shows_sizes:
        expected, actual = _sizes(sentence, value)
        return ShapeMismatchError(message, expected=expected, actual=actual, tensor_name=name)
    return None if message == str(error) else type(error)(message)


def _subject(
    sentence: str, arguments: Mapping[str, Any], renamed: Mapping[str, str]
) -> tuple[str | None, Any]:
    """The first argument that an op's sentence names, such as ``q`` or ``parents[1]``, in our words, and its value."""
    for theirs, place in re.findall(r"(?<![\w.])([A-Za-z_]\w*)(\[\d+\])?", sentence):
        ours = renamed.get(theirs, theirs)
        name = ours if ours in arguments else theirs  # a word for messages alone leaves the argument its name
        if name in arguments:
            value = arguments[name]
            return ours + place, value[int(place[1:-1])] if place else value
    return None, None


def _sizes(sentence: str, tensor: Tensor) -> tuple[Any, Any]:
    """(expected, actual) of a sentence about the sizes of ``tensor``."""
    if rank := _RANK.search(sentence):
        return int(rank[1]), tensor.dim()
    if size := _SIZE.search(sentence):
        return int(size[2]), tensor.shape[int(size[1])]
    if shape := _SHAPE.search(sentence):
        return tuple(map(int, re.findall(r"\d+", shape[1]))), tuple(tensor.shape)
    rule = _RULE.search(sentence)
    return rule[1] if rule else None, tuple(tensor.shape)
