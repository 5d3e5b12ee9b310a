"""What only the functions know of their arguments: kinds of Python objects, and words for messages.

Every op checks its tensors and options itself (csrc/host/check.h). A function below :func:`validate_arguments` checks
the kinds of its arguments, as its annotations give them, and raises what the op refuses as the package's own class, in
the words of the function (docs/semantics/conventions.md §0.4). The other checks here are for modules and caches, whose
options no op sees.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor

from htree_ops.errors import DeviceError, ShapeMismatchError, UnsupportedDtypeError, in_words_of, refuse

#: dtypes of every op on every device.
FLOATING = (torch.float32, torch.float16, torch.bfloat16)
#: dtypes on the CPU, and of the ops that have double kernels on CUDA.
FLOATING_AND_DOUBLE = (*FLOATING, torch.float64)

# ---- functions around ops

P = ParamSpec("P")
R = TypeVar("R")

#: Kinds of annotations: the words of a message, the exact types that need no second look, and all types.
_KINDS: dict[str, tuple[str, tuple[type, ...], tuple[type, ...]]] = {
    "Tensor": ("a Tensor", (Tensor, torch.nn.Parameter), (Tensor,)),
    "int": ("an int", (int,), (int, torch.SymInt)),
    "float": ("a number", (float, int), (float, int, torch.SymInt, torch.SymFloat)),
    "bool": ("a bool", (bool,), (bool,)),
    **dict.fromkeys(
        ("str", "Activation", "Side", "Granularity"),
        ("a str", (str,), (str,)),
    ),  # the op checks the word itself
    "torch.dtype": ("a torch.dtype", (torch.dtype,), (torch.dtype,)),
    "list[Tensor]": ("a list of Tensors", (), (list, tuple)),
    "None": ("None", (type(None),), (type(None),)),
}


class _Kind:
    """What one argument may be."""

    def __init__(self, annotation: str) -> None:
        parts = [_KINDS[part] for part in annotation.split(" | ")]
        self.words = " or ".join(words for words, _, _ in parts if words != "None")
        self.exact = frozenset(kind for _, exact, _ in parts for kind in exact)
        self.all = tuple(kind for _, _, kinds in parts for kind in kinds)

    def refusal(self, function: str, name: str, came: type) -> str:
        """What is wrong with a value of that type, or nothing. To Python a bool is an int; here it is not."""
        if issubclass(came, self.all) and (not issubclass(came, bool) or bool in self.all):
            return ""
        known = (
            came.__name__ if came.__name__ not in self.words.split() else f"{came.__module__}.{came.__name__}"
        )
        return f"{function}: {name} must be {self.words}, got {known}"

    def check(self, function: str, name: str, value: object) -> None:
        """Raises TypeError."""
        if sentence := self.refusal(function, name, type(value)):
            raise TypeError(sentence)
        if isinstance(value, (list, tuple)):
            for place, x in enumerate(value):
                check_tensor(function, f"{name}[{place}]", x)


_SINGLE_KINDS = {annotation: _Kind(annotation) for annotation in _KINDS}

#: The functions below :func:`validate_arguments`: what messages call them, and the kinds of their arguments in order
#: and by name.
_FUNCTIONS: dict[str, tuple[str, list[tuple[str, _Kind] | None], dict[str, _Kind]]] = {}


def constant_in_traces(function: Callable[P, R]) -> Callable[P, R]:
    """What ``torch.compiler.assume_constant_result`` does: a trace keeps the result and looks no further.

    That decorator imports Dynamo, a second and about 100 MB in every process; Dynamo reads the mark alone.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_in_traces  # Dynamo knows the types, and needs no guard for the table
def _wrong_kind(function: str, *types: type, **types_by_name: type) -> str:
    """What is wrong with the kinds of the arguments of a call that is traced; empty where nothing is."""
    label, in_order, kinds = _FUNCTIONS[function]
    given = [(*argument, came) for argument, came in zip(in_order, types, strict=False) if argument]
    given += [(name, kinds[name], came) for name, came in types_by_name.items() if name in kinds]
    return next(filter(None, (kind.refusal(label, name, came) for name, kind, came in given)), "")


def validate_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a function around an op check the kinds of its arguments and put the op's refusals into its own words.

    Annotations that are not in ``_KINDS`` are left to the function. While torch.compile traces, Dynamo shows what the
    op refuses in the op's own message, for no except clause sees it.
    """
    return validate_arguments_as()(function)


def validate_arguments_as(
    name: str | None = None, **renamed: str
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """:func:`validate_arguments` with another name in messages, and with words that replace words of the op."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        label = name or function.__name__
        signature = inspect.signature(function)
        kinds = {
            p.name: _Kind(p.annotation)
            for p in signature.parameters.values()
            if all(part in _KINDS for part in str(p.annotation).split(" | "))
        }
        in_order = [
            (p.name, kinds[p.name]) if p.name in kinds else None
            for p in signature.parameters.values()
            if p.kind is not inspect.Parameter.KEYWORD_ONLY
        ]
        key = f"{function.__module__}.{function.__qualname__}"
        _FUNCTIONS[key] = label, in_order, kinds
        is_compiling = torch.compiler.is_compiling

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if is_compiling():
                if sentence := _wrong_kind(key, *map(type, args), **{k: type(x) for k, x in kwargs.items()}):
                    raise TypeError(sentence)
                return function(*args, **kwargs)
            for value, argument in zip(args, in_order, strict=False):
                if argument is not None and type(value) not in argument[1].exact:
                    argument[1].check(label, argument[0], value)
            for name, value in kwargs.items():
                kind = kinds.get(name)
                if kind is not None and type(value) not in kind.exact:
                    kind.check(label, name, value)
            try:
                return function(*args, **kwargs)
            except (TypeError, ValueError, RuntimeError, IndexError) as error:
                try:
                    arguments = signature.bind(*args, **kwargs).arguments
                except TypeError:  # Python has refused the call
                    raise error from None
                _check_what_no_op_takes(label, arguments, kinds)
                refusal = in_words_of(label, arguments, error, renamed)
                if refusal is None:
                    raise
                raise refusal from None

        return call

    return decorate


def _check_what_no_op_takes(
    function: str, arguments: Mapping[str, object], kinds: Mapping[str, _Kind]
) -> None:
    """Names the argument where the dispatcher, and not the op, has refused a call."""
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            check_tensor(function, name, value)
        elif isinstance(value, list) and any(isinstance(x, Tensor) for x in value):
            for place, x in enumerate(value):
                check_tensor(function, f"{name}[{place}]", x)
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            if name not in kinds or float not in kinds[name].all:
                raise ValueError(f"{function}: {name} must be an int of 64 bits, got {value}")
            if abs(value) > torch.finfo(torch.float64).max:  # a smaller one reaches the op, as a double
                check_number(function, name, value)


@contextmanager
def reraise_as(name: str) -> Iterator[None]:
    """A refusal inside this context is about an option of ``name``, a module that is being made."""
    try:
        yield
    except (TypeError, ValueError) as error:
        _, _, sentence = str(error).partition(": ")
        error.args = (f"{name}: {sentence}",)
        raise


# ---- checks of modules and caches


def check_kind(op: str, name: str, value: object, annotation: str) -> None:
    """Raises TypeError unless ``value`` is what a function would take under that ``annotation``, such as ``"int"``."""
    _SINGLE_KINDS[annotation].check(op, name, value)


def check_tensor(op: str, name: str, tensor: Any) -> None:
    """Raises TypeError unless ``tensor`` is a dense tensor."""
    check_kind(op, name, tensor, "Tensor")
    if tensor.is_nested or tensor.layout != torch.strided:
        came = "a nested one" if tensor.is_nested else f"layout {tensor.layout}"
        raise TypeError(f"{op}: {name} must be a dense tensor, got {came}")


def check_data(op: str, name: str, tensor: Any) -> None:
    """Raises TypeError or DeviceError unless ``tensor`` is dense and has numbers, as those on meta have not."""
    check_tensor(op, name, tensor)
    if tensor.is_meta:
        refuse(
            DeviceError,
            f"{op}: {name} must be on a device that holds numbers, got meta",
            expected_device="cpu",
            actual_device="meta",
            tensor_name=name,
        )


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of autocast on this device, None where it is off."""
    if device.type not in ("cpu", "cuda") or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def check_devices(op: str, tensors: Mapping[str, Tensor]) -> None:
    """Raises TypeError or DeviceError unless all are dense tensors on the device of the first."""
    first: tuple[str, Tensor] | None = None
    for name, tensor in tensors.items():
        check_tensor(op, name, tensor)
        if first is None:
            first = (name, tensor)
        elif tensor.device != first[1].device:
            refuse(
                DeviceError,
                f"{op}: {name} must be on the device of {first[0]} ({first[1].device}), got {tensor.device}",
                expected_device=first[1].device,
                actual_device=tensor.device,
                tensor_name=name,
            )


def check_tensors(op: str, **arguments: tuple[Tensor, str]) -> None:
    """Raises TypeError, ShapeMismatchError or DeviceError unless tensors of a call fit each other.

    Args:
        arguments: per argument the tensor and its shape in words, such as ``"B T H K"``. A word that occurs
            twice must have one size. All tensors must be on the device of the first.
    """
    sizes: dict[str, tuple[str, int]] = {}
    for name, (tensor, words) in arguments.items():
        check_tensor(op, name, tensor)
        dims = words.split()
        if tensor.dim() != len(dims):
            refuse(
                ShapeMismatchError,
                f"{op}: {name} must be {len(dims)}-D [{', '.join(dims)}], "
                f"got {tensor.dim()}-D {tuple(tensor.shape)}",
                expected=len(dims),
                actual=tensor.dim(),
                tensor_name=name,
            )
        for dim, (word, size) in enumerate(zip(dims, tensor.shape, strict=True)):
            owner, wanted = sizes.setdefault(word, (name, size))
            if size != wanted:
                refuse(
                    ShapeMismatchError,
                    f"{op}: size {dim} of {name} must be {word} of {owner} = {wanted}, "
                    f"got {tuple(tensor.shape)}",
                    expected=wanted,
                    actual=size,
                    tensor_name=name,
                )
    check_devices(op, {name: tensor for name, (tensor, _) in arguments.items()})


def refuse_shape(op: str, name: str, x: Tensor, words: str, expected: object) -> NoReturn:
    """Raises ShapeMismatchError for x, which must be what ``words`` spell in the message."""
    came = tuple(x.shape)
    message = f"{op}: {name} must be {words}, got {came}"
    refuse(ShapeMismatchError, message, expected=expected, actual=came, tensor_name=name)


def check_shape(op: str, name: str, x: Tensor, wanted: tuple[int, ...], words: str = "") -> None:
    """Raises ShapeMismatchError unless x has the shape ``wanted``, which ``words`` spells in the message."""
    if x.shape != wanted:
        refuse_shape(op, name, x, words or str(list(wanted)), wanted)


def check_dtype(op: str, supported: Sequence[torch.dtype], **tensors: Tensor) -> None:
    """Raises UnsupportedDtypeError unless all tensors have the same one of the ``supported`` dtypes."""
    wanted: tuple[torch.dtype, ...] = tuple(supported)
    for name, tensor in tensors.items():
        if tensor.dtype not in wanted:
            refuse(
                UnsupportedDtypeError,
                f"{op}: {name} must have dtype {' or '.join(str(d) for d in wanted)}, got {tensor.dtype}",
                dtype=tensor.dtype,
                supported_dtypes=wanted,
                tensor_name=name,
            )
        wanted = (tensor.dtype,)


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def check_option_dtype(
    op: str, dtype: object, supported: Sequence[torch.dtype], *, name: str = "dtype"
) -> None:
    """Raises UnsupportedDtypeError unless the option ``dtype``, called ``name``, is one of the ``supported``."""
    if dtype not in supported:
        refuse(
            UnsupportedDtypeError,
            f"{op}: {name} must be {' or '.join(map(str, supported))}, got {dtype}",
            dtype=dtype if isinstance(dtype, torch.dtype) else None,
            supported_dtypes=supported,
        )


def option_device(op: str, device: object) -> torch.device:
    """The device that an option ``device`` names, with its index; None is torch's default."""
    if device is None:
        return torch.empty(0, device=None).device
    if isinstance(device, bool) or not isinstance(device, (torch.device, str, int)):
        raise TypeError(f"{op}: device must be a torch.device, a str or an int, got {type(device).__name__}")
    try:
        named = torch.device(device)
    except RuntimeError:
        refuse(
            DeviceError,
            f'{op}: device must be a device of torch, such as "cpu" or "cuda:0", got {device!r}',
            actual_device=str(device),
        )
    return torch.empty(0, device=named).device


def check_int(op: str, name: str, value: Any, least: int, most: int = 2**31 - 1) -> None:
    """Raises TypeError unless ``value`` is an integer, ValueError unless it lies in [least, most]."""
    check_kind(op, name, value, "int")
    if not least <= value <= most:
        raise ValueError(f"{op}: {name} must be between {least} and {most}, got {value}")


def check_integers(op: str, name: str, values: Any) -> None:
    """Checks a tensor or a list whose numbers are read as ints; the entries of a list are left to the caller."""
    if isinstance(values, Tensor):
        check_data(op, name, values)
        if values.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{op}: {name} must have dtype torch.int32 or torch.int64, got {values.dtype}")
        if values.dim() != 1:
            raise ValueError(f"{op}: {name} must be 1-D, got {values.dim()}-D {tuple(values.shape)}")
    elif not isinstance(values, Sequence):
        raise TypeError(f"{op}: {name} must be a list of ints or a Tensor, got {type(values).__name__}")


def check_number(
    op: str, name: str, value: Any, *, positive: bool = False, dtype: torch.dtype = torch.float32
) -> None:
    """Raises TypeError unless ``value`` is a real number, ValueError unless it is finite in ``dtype``."""
    check_kind(op, name, value, "float")
    largest = torch.finfo(dtype).max
    if not -largest <= value <= largest or (positive and not value > 0):
        wanted = "positive and finite" if positive else "finite"
        raise ValueError(f"{op}: {name} must be {wanted} in {dtype_name(dtype)}, got {value}")


def tuning_config(op: str, compiled: Sequence[tuple[int, ...]], **keys: int | None) -> list[int] | None:
    """The values of an op's tuning keys in their order; None where none is given.

    The op checks that they are ``compiled``. While torch.compile traces, so does this: Dynamo takes the op's
    NotImplementedError for a missing Meta kernel and drops its message.
    """
    given = [value for value in keys.values() if value is not None]
    if given and len(given) != len(keys):
        raise ValueError(f"{op}: give all of {', '.join(keys)} or none, got {keys}")
    if given and torch.compiler.is_compiling() and tuple(given) not in compiled:
        raise ValueError(f"{op}: no kernel is compiled for {keys}; compiled: {', '.join(map(str, compiled))}")
    return given or None
