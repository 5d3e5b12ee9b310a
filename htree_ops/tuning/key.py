"""The key of a tuning result: everything that a configuration's speed depends on (docs/semantics §3.4)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

import torch

from htree_ops._load import build_info
from htree_ops.version import __version__

#: The folder of csrc/ops whose kernels an op runs, where it is not named like the op.
FAMILY_OF = {"fp8_gemm": "fp8"}


def source_hash(kernel: str) -> str:
    """Hash of the sources from which the kernels of an op were built; "unknown" for a function of another library."""
    hashes = build_info().get("source_hashes", {})
    return str(hashes.get(FAMILY_OF.get(kernel, kernel), "unknown"))


def device_facts(device: torch.device | str) -> tuple[str, str]:
    """(name, compute capability) of a device: ("NVIDIA H200", "9.0"); ("cpu", "") for a CPU.

    Where ``device`` is not a device of torch, such as the name of a GPU elsewhere, that is the name.
    """
    try:
        place = torch.device(device)
    except RuntimeError:
        return str(device), ""
    if place.type == "cuda" and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability(place)
        return torch.cuda.get_device_name(place), f"{major}.{minor}"
    return place.type, ""


@dataclass(frozen=True)
class CacheKey:
    """Everything that a configuration's speed depends on.

    Attributes:
        kernel: name of the op.
        problem: sizes.
        dtype: dtype of the first floating argument, such as "bfloat16".
        layout: how the operands lie, such as "contiguous".
        device: name of the device.
        capability: compute capability, "" for a CPU.
        version: version of the library.
        source: hash of the kernels' sources.
    """

    kernel: str
    problem: tuple[int, ...]
    dtype: str
    layout: str
    device: str
    capability: str
    version: str = __version__
    source: str = ""

    @classmethod
    def of(
        cls,
        kernel: str,
        problem: tuple[int, ...],
        dtype: str,
        layout: str,
        device: torch.device | str,
        source: str | None = None,
    ) -> CacheKey:
        """The key on this installation; where ``source`` is not given, it is that of the op's kernels."""
        name, capability = device_facts(device)
        return cls(
            kernel, problem, dtype, layout, name, capability, __version__, source or source_hash(kernel)
        )

    def text(self) -> str:
        """The key as one line; different keys have different lines."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> CacheKey:
        """The inverse of :meth:`text`."""
        facts = json.loads(text)
        return cls(**{**facts, "problem": tuple(facts["problem"])})

    def of_any_build(self) -> CacheKey:
        """The key without version and source."""
        return replace(self, version="", source="")
