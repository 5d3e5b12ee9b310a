"""What is installed: versions, how the library was built, the GPUs, the ops and their compiled kernels."""

from __future__ import annotations

import importlib
import json
import platform
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

__all__ = ["build_info", "collect", "format_text", "op_names"]

_BUILD_INFO = Path(__file__).with_name("_build_info.json")


def build_info(path: Path = _BUILD_INFO) -> dict[str, Any] | None:
    """What ``setup.py`` wrote beside the library, or None where nothing was built.

    Keys: version, torch (the one compiled against), cuda (toolkit version or None), reason (why CUDA is in or
    not), arch_list, compiler, commit.
    """
    if not path.is_file():
        return None
    facts = json.loads(path.read_text())
    if not isinstance(facts, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(facts).__name__}")
    return facts


def op_names() -> list[str]:
    """Registered ops and overloads without the namespace: ``causal_softmax``, ``causal_softmax.out``."""
    registered = torch._C._dispatch_get_all_op_names()
    return sorted(name.removeprefix("htree::") for name in registered if name.startswith("htree::"))


def _import_library() -> str | None:
    """Loads the op library through the package; the reason when it cannot be loaded."""
    try:
        importlib.import_module("htree_ops")
    except ImportError as error:
        return str(error)
    return None if op_names() else "the package holds no compiled library"


def _host_module() -> tuple[ModuleType | None, str | None]:
    """The pybind11 module ``_host``, which the package works without, or why it is absent."""
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
                "compute_capability": f"{properties.major}.{properties.minor}",
                "num_sms": properties.multi_processor_count,
                "memory_bytes": properties.total_memory,
            }
        )
    return facts


def collect() -> dict[str, Any]:
    """All facts as one JSON-ready dict; what could not be found out stands as None beside its reason."""
    built = build_info()
    library_error = _import_library()
    host, host_error = _host_module()
    return {
        "version": _version(built),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "build": built,
        "library_error": library_error,
        "cuda": built["cuda"] if built else None,
        "cuda_reason": built["reason"] if built else "nothing is built here",
        "gpus": host.device_facts() if host is not None else _gpus_from_torch(),
        "ops": op_names(),
        "kernel_configurations": host.kernel_configurations() if host is not None else None,
        "host_error": host_error,
    }


def _version(built: dict[str, Any] | None) -> str | None:
    try:
        return str(importlib.import_module("htree_ops.version").__version__)
    except ImportError:
        return built["version"] if built else None


def format_text(facts: dict[str, Any]) -> str:
    """The facts of :func:`collect` as lines for a reader."""
    built = facts["build"] or {}
    lines = [
        f"htree_ops        {facts['version'] or 'unknown'}",
        f"python           {facts['python']}",
        f"torch            {facts['torch']} (CUDA {facts['torch_cuda'] or 'none'})",
    ]
    if built:
        lines.append(
            f"built against    torch {built['torch']}, {built['compiler']}, commit {built['commit']}"
        )
    if facts["cuda"]:
        lines.append(f"CUDA kernels     CUDA {facts['cuda']}, architectures {built.get('arch_list')}")
    else:
        lines.append(f"CUDA kernels     none: {facts['cuda_reason']}")
    for gpu in facts["gpus"]:
        details = ", ".join(f"{key} {value}" for key, value in gpu.items() if key != "name")
        lines.append(f"GPU              {gpu.get('name', 'unnamed')} ({details})")
    if not facts["gpus"]:
        lines.append("GPU              none visible")
    if facts["library_error"]:
        lines.append(f"library          not loaded: {facts['library_error']}")
    lines.append(f"ops              {len(facts['ops'])}")
    lines += [f"  {name}" for name in facts["ops"]]
    if facts["kernel_configurations"] is None:
        lines.append(f"configurations   unknown: {facts['host_error']}")
    else:
        lines.append("configurations")
        for kernel, names in sorted(facts["kernel_configurations"].items()):
            lines.append(f"  {kernel}: {' '.join(names)}")
    return "\n".join(lines)
