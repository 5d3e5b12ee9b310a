"""The options of tree attention: their one owner in Python.

To add one, add it to :class:`TreeKeywords` and, with its default, to :class:`TreeOptions`; every function, module and
cache passes it on. What it means stands in :func:`htree_ops.tree_attention`. The ops' own list is the table in
csrc/ops/tree/options.h, from which the order of the packed form is read here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any, Literal, TypeAlias, TypedDict, get_args

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from htree_ops.ops.arguments import check_int, check_kind

#: In the order of kImportanceNames in csrc/ops/tree/options.h.
Importance = Literal["lse_causal", "lse", "exp_joint"]
Scope = Literal["kv_head", "q_head"]
#: inv_freq, as the functions take it.
Frequencies: TypeAlias = Sequence[float] | Tensor
#: Options that choose in a way of their own, and the value beside which an index chooses.
OTHER_CHOICES = {"selection_span": None, "importance": "lse_causal", "scope": "kv_head"}
#: max_top_nodes = None is this many nodes where an index chooses, else at most so many.
MOST_TOP_NODES = 8192

Goal = Literal["quality", "speed"]
Positions = Literal["own", "compact"]
#: What decides how well an index finds single tokens and what it costs; the other options keep their defaults.
RECOMMENDED: dict[Goal, dict[str, int]] = {
    "quality": {"top_k": 128, "max_top_nodes": MOST_TOP_NODES, "selection_stride": 1},
    "speed": {"top_k": 128, "max_top_nodes": MOST_TOP_NODES, "selection_stride": 4},
}
#: The same where there is no index.
WITHOUT_INDEX: dict[Goal, dict[str, int]] = {
    "quality": {"selection_span": 2, "selection_stride": 1},
    "speed": {"selection_span": 2, "selection_stride": 4},
}


class TreeKeywords(TypedDict, total=False):
    """The options as keywords, of :func:`htree_ops.tree_attention` and of all that passes them on."""

    compression_rate: int
    max_top_nodes: int | None
    top_k: int
    selection_stride: int
    scale: float | None
    rope_base: float | None
    importance: Importance
    scope: Scope
    store_parents: bool
    selection_span: int | None
    open_next: bool
    inv_freq: Frequencies | None


@dataclass(frozen=True)
class TreeOptions:
    """The keywords of :func:`htree_ops.tree_attention` that a model keeps, checked when they are set.

    ``tree_attention(q, k, v, options=options)`` uses them. ``dataclasses.replace`` makes a changed copy. ``to_dict()``
    holds ints, floats, strings, bools, None and a list of floats alone, so that it goes into JSON or a checkpoint, and
    ``from_dict()`` reads it. ``inv_freq`` is kept as a tuple of floats. The meaning of each option:
    :func:`htree_ops.tree_attention`.

    Raises:
        TypeError: an option of a wrong type.
        ValueError: an option is out of its range; the message names it.

    Example:
        >>> options = TreeOptions(top_k=128, selection_span=2)
        >>> options.top_nodes, TreeOptions.from_dict(options.to_dict()) == options
        (2048, True)
    """

    compression_rate: int = 16
    max_top_nodes: int | None = None
    top_k: int = 512
    selection_stride: int = 1
    scale: float | None = None
    rope_base: float | None = 10000.0
    importance: Importance = "lse_causal"
    scope: Scope = "kv_head"
    store_parents: bool = True
    selection_span: int | None = None
    open_next: bool = False
    inv_freq: Frequencies | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "inv_freq", frequencies("TreeOptions", self.inv_freq))
        check_kind("TreeOptions", "store_parents", self.store_parents, "bool")
        check_kind("TreeOptions", "scope", self.scope, "str")
        if self.scope not in get_args(Scope):
            raise ValueError(
                f"TreeOptions: scope must be one of {', '.join(get_args(Scope))}, got {self.scope!r}"
            )
        object.__setattr__(self, "_packed", pack(self))
        if not torch.compiler.is_compiling():  # else the op refuses them where it is traced
            with _disable_current_modes():  # a trace, a profile of calls or a count holds what computes
                torch.ops.htree._check_tree_options("TreeOptions", *self.packed())

    @property
    def top_nodes(self) -> int:
        """``max_top_nodes`` as a number; None is top_k * compression_rate, and at most 8192."""
        if self.max_top_nodes is not None:
            return self.max_top_nodes
        most = min(MOST_TOP_NODES, self.top_k * self.compression_rate)
        return max(1, most)  # the op refuses other options by their own names

    def beside_index(self) -> TreeOptions:
        """The same where an index chooses: there ``max_top_nodes=None`` is 8192."""
        if self.max_top_nodes is not None:
            return self
        if torch.compiler.is_compiling():
            return replace(self, max_top_nodes=MOST_TOP_NODES)
        return _replaced(self, max_top_nodes=MOST_TOP_NODES)

    def packed(self) -> tuple[list[int], list[float]]:
        """All options but ``scope`` and ``store_parents`` as the last two arguments of every op that takes them."""
        ints, floats = self._packed  # type: ignore[attr-defined]
        return list(ints), list(floats)

    @classmethod
    def from_packed(cls, ints: Sequence[int], floats: Sequence[float]) -> TreeOptions:
        """The options of an op that was called with them."""
        left, numbers = list(ints), list(floats)
        options: dict[str, Any] = {}
        for name, kind, optional in OP_KWARGS:
            if optional and not left.pop(0):
                options[name] = None
            elif kind == "List[float]":
                count = left.pop(0)
                options[name], numbers = tuple(numbers[:count]), numbers[count:]
            elif kind == "float":
                options[name] = numbers.pop(0)
            elif kind == "str":
                options[name] = WORDS[name][left.pop(0)]
            else:
                options[name] = bool(left.pop(0)) if kind == "bool" else left.pop(0)
        return cls(**options)

    def difference(self, other: TreeOptions) -> tuple[str, Any, Any]:
        """The first option of the ops that differs: its name, its value here and there."""
        ours, theirs = (vars(x) | {"max_top_nodes": x.top_nodes} for x in (self, other))
        name = next(name for name, _, _ in OP_KWARGS if ours[name] != theirs[name])
        return name, ours[name], theirs[name]

    def to_dict(self) -> dict[str, Any]:
        """Every option by its name."""
        options = asdict(self)
        if self.inv_freq is not None:
            options["inv_freq"] = list(self.inv_freq)  # as it comes back from JSON
        return options

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> TreeOptions:
        """The options that :meth:`to_dict` saved; options that ``saved`` lacks take their defaults.

        Raises:
            TypeError: it is no mapping. ValueError: a name is not that of an option.
        """
        if not isinstance(saved, Mapping):
            raise TypeError(f"TreeOptions: saved must be a dict of options, got {type(saved).__name__}")
        for name in saved:
            if name not in NAMES:
                raise ValueError(f"TreeOptions: options must be among {', '.join(NAMES)}, got {name!r}")
        return cls(**saved)


NAMES = tuple(field.name for field in fields(TreeOptions))


def _op_kwargs() -> tuple[tuple[str, str, bool], ...]:
    """Of each option of the ops, in the order of the packed form: its name, its kind, and whether it may be None."""
    found = []
    for argument in torch.ops.htree.attention.default._schema.arguments:
        name = "top_k" if argument.name == "top_k_per_layer" else argument.name
        if name in NAMES and name != "store_parents":
            kind = str(argument.type)
            found.append(
                (name, kind.removeprefix("Optional[").removesuffix("]"), kind.startswith("Optional["))
            )
    return tuple(found)


OP_KWARGS = _op_kwargs()
#: The words of the options that are words, in the order of the packed form.
WORDS: dict[str, tuple[str, ...]] = {"importance": get_args(Importance)}


def pack(options: TreeOptions) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The packed form of csrc/ops/tree_attention/packed_options.h."""
    values: dict[str, Any] = {name: getattr(options, name) for name, _, _ in OP_KWARGS}
    for name, kind, optional in OP_KWARGS:
        if kind != "List[float]" and not (values[name] is None and (optional or name == "max_top_nodes")):
            check_kind("TreeOptions", name, values[name], kind)
    if values["max_top_nodes"] is None:
        values["max_top_nodes"] = options.top_nodes
    ints: list[int] = []
    floats: list[float] = []
    for name, kind, optional in OP_KWARGS:
        value = values[name]
        if optional:
            ints.append(0 if value is None else 1)
            if value is None:
                continue
        if kind == "List[float]":
            ints.append(len(value))
            floats.extend(value)
        elif kind == "str":
            if value not in WORDS[name]:
                words = ", ".join(WORDS[name])
                raise ValueError(f"TreeOptions: {name} must be one of {words}, got {value!r}")
            ints.append(WORDS[name].index(value))
        elif kind == "float":
            floats.append(_as_float(name, value))
        else:
            ints.append(_as_int(name, value))
    return tuple(ints), tuple(floats)


def _as_float(name: str, value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"TreeOptions: {name} must be finite in float32, got an int beyond it") from None


def _as_int(name: str, value: int) -> int:
    if not torch.compiler.is_compiling() and not -(2**63) <= value < 2**63:
        raise ValueError(f"TreeOptions: {name} must be an int of 64 bits, got {value}")
    return int(value)


def frequencies(function: str, inv_freq: Frequencies | None) -> tuple[float, ...] | None:
    """``inv_freq`` as the floats that an op takes; their number and their values are left to the op."""
    if inv_freq is None:
        return None
    if isinstance(inv_freq, (tuple, list)):
        for place, x in enumerate(inv_freq):
            if type(x) is not float:
                check_kind(function, f"inv_freq[{place}]", x, "float")
        try:
            return tuple(float(x) for x in inv_freq)
        except OverflowError:
            raise ValueError(
                f"{function}: inv_freq must be finite in float32, got an int beyond it"
            ) from None
    if isinstance(inv_freq, Tensor):
        if torch.compiler.is_compiling():
            raise TypeError(f"{function}: inv_freq must be a tuple of floats in compiled code, got a Tensor")
        if inv_freq.layout is not torch.strided or inv_freq.is_nested:
            kind = "nested" if inv_freq.is_nested else str(inv_freq.layout)
            raise TypeError(
                f"{function}: inv_freq must be a strided tensor [K/2], got a tensor that is {kind}"
            )
        if inv_freq.dim() != 1 or not inv_freq.is_floating_point() or inv_freq.device.type != "cpu":
            raise TypeError(
                f"{function}: inv_freq must be floats or a floating tensor [K/2] on the CPU, got {inv_freq.dtype} "
                f"{tuple(inv_freq.shape)} on {inv_freq.device}"
            )
        return tuple(inv_freq.tolist())
    if isinstance(inv_freq, Sequence) and not isinstance(inv_freq, (str, bytes)):
        return frequencies(function, tuple(inv_freq))
    raise TypeError(
        f"{function}: inv_freq must be floats or a floating tensor [K/2] on the CPU, got {type(inv_freq).__name__}"
    )


def recommended_options(
    function: str, goal: Goal, keywords: Mapping[str, Any], by_index: bool
) -> TreeOptions:
    """The recommended options with ``keywords`` in place of some.

    Without an index that are spans of 2. They divide an even compression_rate alone and score for "lse_causal" alone:
    beside others there are none.
    """
    if goal not in RECOMMENDED:
        raise ValueError(f"{function}: goal must be one of {', '.join(RECOMMENDED)}, got {goal!r}")
    if by_index:
        return tree_options(function, None, {**RECOMMENDED[goal], **keywords})
    asked = tree_options(function, None, keywords)
    chosen = WITHOUT_INDEX[goal]
    if asked.importance != "lse_causal" or asked.compression_rate % chosen["selection_span"]:
        chosen = {name: value for name, value in chosen.items() if name != "selection_span"}
    return tree_options(function, None, {**chosen, **keywords})


def check_frequencies(function: str, options: TreeOptions, head_dim: int) -> None:
    """Raises ValueError unless ``inv_freq`` has a number for every pair of ``head_dim``."""
    given = options.inv_freq
    if given is not None and len(given) != head_dim // 2:
        raise ValueError(
            f"{function}: inv_freq must have head_dim / 2 = {head_dim // 2} numbers, got {len(given)}"
        )


def other_choices(options: TreeOptions) -> list[str]:
    """The options by which nodes are chosen in another way than by an index."""
    return [name for name, default in OTHER_CHOICES.items() if getattr(options, name) != default]


def check_index_dim(function: str, index_dim: int, options: TreeOptions, head_dim: int | None = None) -> None:
    """Raises TypeError or ValueError unless an index may have this width, 0 for none, beside the options."""
    check_int(function, "index_dim", index_dim, 0)
    most, also = (128, "") if head_dim is None else (min(128, head_dim), f" and up to head_dim = {head_dim}")
    if index_dim % 16 or index_dim > most:
        raise ValueError(f"{function}: index_dim must be a multiple of 16 up to 128{also}, got {index_dim}")
    if index_dim and (others := other_choices(options)):
        name = others[0]
        raise ValueError(
            f"{function}: index_dim must be 0 beside {name} = {getattr(options, name)!r}, got {index_dim}"
        )


# ---- from the arguments of a function


def tree_options(function: str, options: TreeOptions | None, keywords: Mapping[str, Any]) -> TreeOptions:
    """What a function was given: ``options``, those of the defaults if None, with ``keywords`` in place of some.

    Raises:
        TypeError: a keyword that is no option, an option of a wrong type, or ``options`` that are no TreeOptions.
        ValueError: an option is out of its range. The message names the ``function``.
    """
    for name in keywords:
        if name not in NAMES:
            raise TypeError(
                f"{function}: keywords must be those of its signature or among {', '.join(NAMES)}, got {name!r}"
            )
    if options is None:
        options = DEFAULTS
    elif not isinstance(options, TreeOptions):
        raise TypeError(f"{function}: options must be TreeOptions or None, got {type(options).__name__}")
    if not keywords:
        return options
    try:
        if torch.compiler.is_compiling():
            return replace(options, **keywords)
        # What may change between two calls, such as a tensor of frequencies, must not be remembered.
        if all(type(value) in _CONSTANT for value in keywords.values()):
            return _replaced(options, **keywords)
        return replace(options, **keywords)
    except (TypeError, ValueError) as error:
        _, _, sentence = str(error).partition(": ")
        raise type(error)(f"{function}: {sentence}") from None


DEFAULTS = TreeOptions()
_CONSTANT = (int, float, bool, str, tuple, type(None))


@lru_cache(maxsize=256, typed=True)
def _replaced(options: TreeOptions, **keywords: Any) -> TreeOptions:
    """``dataclasses.replace``, whose checks run once for the options of many calls."""
    return replace(options, **keywords)
