"""What is installed: versions, how the library was built, the GPUs, the ops and their compiled kernels."""

from __future__ import annotations

import argparse
import importlib
import json
import platform
from types import ModuleType
from typing import Any

import torch

from htree_ops._load import build_info
from htree_ops.command_line import Command
from htree_ops.version import __version__

__all__ = ["COMMAND", "collect", "format_text", "op_names"]


def op_names() -> list[str]:
    """Registered ops and overloads without the namespace: ``causal_softmax``, ``causal_softmax.out``."""
    registered = torch._C._dispatch_get_all_op_names()
    return sorted(name.removeprefix("htree::") for name in registered if name.startswith("htree::"))


def _host_module() -> tuple[ModuleType | None, str | None]:
    """The pybind11 module ``_host``, without which the package works too, or why it is absent."""
    try:
        return importlib.import_module("htree_ops._host"), None
    except ImportError as error:
        return None, str(error)


def _gpus_from_torch() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    facts = []
    for device_idx in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(device_idx)
        facts.append(
            {
                "name": properties.name,
                "capability": (properties.major, properties.minor),
                "multiprocessors": properties.multi_processor_count,
                "memory_bytes": properties.total_memory,
            }
        )
    return facts


def collect() -> dict[str, Any]:
    """All facts as one JSON-ready dict.

    Keys: version, python, torch, torch_cuda (CUDA version of torch or None), build (what setup.py decided:
    version, torch, cuda, reason, arch_list, compiler, commit, source_hashes; empty if unknown), gpus (one dict
    each), ops, kernel_configurations (variants by kernel name), or None and host_error, which says why.
    """
    built = build_info()
    host, host_error = _host_module()
    configurations = getattr(host, "kernel_configurations", None)
    if host is not None and configurations is None:
        host_error = "_host lists none"
    return {
        "version": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "build": built,
        # A library without CUDA does not see GPUs. Torch may see one all the same, and the reader should know.
        "gpus": host.device_facts() if host is not None and built.get("cuda") else _gpus_from_torch(),
        "ops": op_names(),
        "kernel_configurations": configurations() if configurations else None,
        "host_error": host_error,
    }


def format_text(facts: dict[str, Any]) -> str:
    """The facts of :func:`collect` as lines for a reader."""
    built = facts["build"]
    lines = [
        f"htree_ops        {facts['version']}",
        f"python           {facts['python']}",
        f"torch            {facts['torch']} (CUDA {facts['torch_cuda'] or 'none'})",
    ]
    if built:
        lines.append(
            f"built against    torch {built['torch']} with {built['compiler']}, commit {built['commit']}"
        )
    if built.get("cuda"):
        lines.append(f"CUDA kernels     CUDA {built['cuda']}, architectures {built['arch_list']}")
    else:
        lines.append(
            f"CUDA kernels     none: {built.get('reason', 'the library says nothing about its build')}"
        )
    for gpu in facts["gpus"]:
        details = ", ".join(f"{key} {value}" for key, value in gpu.items() if key != "name")
        lines.append(f"GPU              {gpu['name']} ({details})")
    if not facts["gpus"]:
        lines.append("GPU              none visible")
    lines.append(f"ops              {len(facts['ops'])}")
    lines += [f"  {name}" for name in facts["ops"]]
    if facts["kernel_configurations"] is None:
        lines.append(f"configurations   unknown: {facts['host_error']}")
    else:
        lines.append(f"configurations   {sum(map(len, facts['kernel_configurations'].values()))}")
        for kernel, variants in sorted(facts["kernel_configurations"].items()):
            lines += [f"  {kernel}", *(f"    {variant}" for variant in variants)]
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Prints the facts; status 0."""
    facts = collect()
    print(json.dumps(facts, indent=2) if arguments.json else format_text(facts))
    return 0


COMMAND = Command(
    "info",
    "print versions, GPUs, ops and how the library was built",
    "Prints versions, how the library was built, the GPUs, the ops and the compiled kernel configurations.",
    add_arguments,
    run,
)
