"""The configurations that an op can be asked for (docs/semantics/python.md §3.4).

A space maps each key to its values. A configuration is one value per key; ops take the values in key order as their
last argument ``config``, Python functions take the keys as keywords. Not every tuple is compiled: the others raise
NotImplementedError, and the tuner skips them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Config = dict[str, Any]
Space = Mapping[str, Sequence[Any]]

#: 45 configurations.
RMSNORM_ROPE: Space = {
    "BLOCK_SIZE": (64, 128, 256, 512, 1024),
    "num_warps": (2, 4, 8),
    "num_stages": (1, 2, 3),
}
#: 108 configurations.
GATED_MLP: Space = {
    "BLOCK_M": (32, 64, 128),
    "BLOCK_N": (32, 64, 128),
    "BLOCK_K": (32, 64),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4),
}
#: 216 configurations.
FP8_GEMM: Space = {
    "BLOCK_M": (64, 128, 256),
    "BLOCK_N": (64, 128, 256),
    "BLOCK_K": (32, 64),
    "GROUP_SIZE_M": (4, 8),
    "num_warps": (4, 8),
    "num_stages": (3, 4, 5),
}
#: The space of each op, by name.
SPACES: dict[str, Space] = {"rmsnorm_rope": RMSNORM_ROPE, "gated_mlp": GATED_MLP, "fp8_gemm": FP8_GEMM}


def config_search(space: Space, accept: Callable[[Config], bool] | None = None) -> list[Config]:
    """Every configuration that ``accept`` lets through: the product of the values, the last key fastest.

    Raises:
        TypeError: space does not map names to sequences. ValueError: a key has no values.
    """
    if not isinstance(space, Mapping):
        raise TypeError(f"config_search: space must map names to sequences, got {type(space).__name__}")
    for key, values in space.items():
        if not isinstance(key, str) or not isinstance(values, Sequence):
            raise TypeError(f"config_search: space must map names to sequences, got {key!r}: {values!r}")
        if not len(values):
            raise ValueError(
                f"config_search: space must have at least one value for every name, got none for {key!r}"
            )
    product = (dict(zip(space, values, strict=True)) for values in itertools.product(*space.values()))
    return [config for config in product if accept is None or accept(config)]


def same_config(a: Config, b: Config | None) -> bool:
    """Whether the configurations are equal, the types of their values too: 1, 1.0 and True differ."""

    def kinds(config: Config) -> dict[str, tuple[bool, bool]]:
        return {key: (isinstance(value, bool), isinstance(value, float)) for key, value in config.items()}

    return b is not None and a == b and kinds(a) == kinds(b)
