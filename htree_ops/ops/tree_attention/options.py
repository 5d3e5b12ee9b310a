"""The options of tree attention in one place: their order, their defaults, saving and loading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import torch

from htree_ops.ops.tree_attention.attention import (
    Frequencies,
    Importance,
    Scope,
    frequencies,
    top_nodes,
    tree_attention,
)

__all__ = ["RECOMMENDED", "Goal", "TreeOptions", "check_frequencies"]

Goal = Literal["quality", "speed"]
#: What decides how well a selection finds single tokens and what it costs; the other options keep their defaults.
RECOMMENDED: dict[Goal, dict[str, int]] = {
    "quality": {"selection_span": 2, "selection_stride": 1},
    "speed": {"selection_span": 2, "selection_stride": 4},
}

#: The options but ``scope``, which the heads of keys and values say, and ``store_parents``, which is about a backward.
OF_OPS = (
    "compression_rate",
    "max_top_nodes",
    "top_k",
    "selection_stride",
    "scale",
    "rope_base",
    "importance",
    "selection_span",
    "inv_freq",
    "open_next",
)


@dataclass(frozen=True)
class TreeOptions:
    """The keywords of :func:`htree_ops.tree_attention` that a model keeps, checked when they are set.

    ``tree_attention(q, k, v, **options.to_dict())`` uses them. ``to_dict()`` holds ints, floats, strings, bools,
    None and a list of floats alone, so that it goes into JSON or a checkpoint, and ``from_dict()`` reads it.
    ``dataclasses.replace`` makes a changed copy. ``inv_freq`` is kept as a tuple of floats. The meaning of each option:
    :func:`htree_ops.tree_attention`.

    Raises:
        TypeError: an option of a wrong type.
        ValueError: an option is out of its range; the message names it.
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
    inv_freq: Frequencies | None = None
    open_next: bool = False

    def __post_init__(self) -> None:
        given = frequencies("tree_attention", self.inv_freq)
        if given == ():  # the op would name the width of the keys that stand for any
            raise ValueError("tree_attention: inv_freq must have K/2 numbers, got 0")
        object.__setattr__(self, "inv_freq", given)
        width = 2 * max(1, len(given or ()))
        # In a call without tokens the op checks the options alone.
        empty = torch.empty(0, 0, 1, width, device="meta")
        tree_attention(empty, empty, empty, **self.to_dict())

    @property
    def top_nodes(self) -> int:
        """``max_top_nodes`` as a number."""
        return top_nodes(self.max_top_nodes, self.top_k, self.compression_rate)

    def to_dict(self) -> dict[str, Any]:
        """Every option by its name."""
        options = asdict(self)
        if self.inv_freq is not None:
            options["inv_freq"] = list(self.inv_freq)  # as it comes back from JSON
        return options

    def of_ops(self) -> dict[str, Any]:
        """What every op over a whole tree takes, and a cache keeps, by name; ``max_top_nodes`` as a number."""
        return {name: getattr(self, name) for name in OF_OPS} | {"max_top_nodes": self.top_nodes}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> TreeOptions:
        """The options that :meth:`to_dict` saved; options that ``saved`` lacks take their defaults.

        Raises:
            ValueError: a name is not that of an option.
        """
        known = [field.name for field in fields(cls)]
        for name in saved:
            if name not in known:
                raise ValueError(f"TreeOptions: options must be among {', '.join(known)}, got {name!r}")
        return cls(**saved)


def check_frequencies(function: str, options: TreeOptions, head_dim: int) -> None:
    """Raises ValueError unless ``inv_freq`` has a number for every pair of ``head_dim``."""
    given = options.inv_freq
    if given is not None and len(given) != head_dim // 2:
        raise ValueError(
            f"{function}: inv_freq must have head_dim / 2 = {head_dim // 2} numbers, got {len(given)}"
        )
