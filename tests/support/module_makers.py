"""Modules of the package, found by walking it, and small ones of each class."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable

import torch
from torch import nn

import htree_ops
from htree_ops import (
    FP8Linear,
    FusedGatedMLP,
    FusedRMSNormRoPE,
    HadamardTransform,
    HTreeAttention,
    MustafarAttention,
)

Make = Callable[[str], nn.Module]

#: Small modules of every class, on a device.
MAKERS: dict[type[nn.Module], dict[str, Make]] = {
    FP8Linear: {
        "dynamic": lambda device: FP8Linear(32, 8, device=device),
        "static": lambda device: FP8Linear(32, 8, static_activation=True, device=device),
        "no bias, bfloat16": lambda device: FP8Linear(32, 8, False, dtype=torch.bfloat16, device=device),
        "no inputs": lambda device: FP8Linear(0, 8, device=device),
    },
    FusedGatedMLP: {"": lambda device: FusedGatedMLP(16, 24, device=device)},
    FusedRMSNormRoPE: {
        "": lambda device: FusedRMSNormRoPE(16, 4, device=device),
        "bfloat16": lambda device: FusedRMSNormRoPE(16, 4, dtype=torch.bfloat16, device=device),
    },
    HadamardTransform: {"": lambda device: HadamardTransform()},
    HTreeAttention: {
        "": lambda device: HTreeAttention(32, 4, 2, bias=True, top_k=4, max_top_nodes=16, device=device)
    },
    MustafarAttention: {
        "": lambda device: MustafarAttention(4, 2, 64, max_positions=64, device=device),
        "rotated": lambda device: MustafarAttention(4, 2, 64, rope_base=None, device=device),
    },
}
#: Every one of them with its name.
NAMED = {
    f"{kind.__name__} {name}".strip(): make for kind, makes in MAKERS.items() for name, make in makes.items()
}


def is_ours(kind: type) -> bool:
    """Whether a class is made of classes of the package and of torch alone.

    Others, such as a patched norm of a model, hold and initialise what the model's own class does.
    """
    return {base.__module__.split(".")[0] for base in kind.mro()} <= {"htree_ops", "torch", "builtins"}


def public_modules() -> set[type[nn.Module]]:
    """The public subclasses of ``nn.Module`` that the package defines, in whichever of its files."""
    found: set[type[nn.Module]] = set()
    for info in pkgutil.walk_packages(htree_ops.__path__, "htree_ops."):
        if info.name.endswith(".__main__"):
            continue
        try:
            module = importlib.import_module(info.name)
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("htree_ops"):
                raise
            continue  # a part for a library that is not here, such as transformers
        found |= {
            value
            for name, value in vars(module).items()
            if inspect.isclass(value)
            and issubclass(value, nn.Module)
            and value.__module__ == info.name
            and not name.startswith("_")
            and is_ours(value)
        }
    return found
