"""What is installed and where it runs: versions, how the library was built, GPUs, ops, compiled kernels."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from htree_ops._load import PACKAGE, build_info
from htree_ops.cli import Command, UsageError
from htree_ops.version import __version__

#: The checkout that this file belongs to; None where it is installed, even inside a checkout of something else.
CHECKOUT = PACKAGE.parent if (PACKAGE.parent / "setup.py").is_file() else None


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


def _gpus() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    gpus: list[Any] = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [
        {
            "name": gpu.name,
            "capability": (gpu.major, gpu.minor),
            "multiprocessors": gpu.multi_processor_count,
            "memory_bytes": gpu.total_memory,
            "l2_bytes": gpu.L2_cache_size,
            "shared_bytes_per_block": gpu.shared_memory_per_block_optin,
        }
        for gpu in gpus
    ]


def code_for(capability: tuple[int, int], arch_list: str) -> str:
    """What of the compiled architectures, such as ``8.0+PTX;9.0a``, a GPU of this compute capability runs."""
    native: list[tuple[int, bool, str]] = []
    ptx: list[tuple[int, int]] = []
    for arch in re.split(r"[; ]", arch_list):
        number, _, also = arch.partition("+")
        major, minor = int(number.split(".")[0]), int(number.split(".")[1].rstrip("af"))
        own = number.endswith("a")
        if (major, minor) == capability if own else major == capability[0] and minor <= capability[1]:
            native.append((minor, own, f"sm_{number.replace('.', '')} machine code"))
        if also == "PTX" and (major, minor) <= capability:
            ptx.append((major, minor))
    if native:
        code = max(native)[2]
    elif ptx:
        code = "the PTX of {}.{} as the driver compiles it at first use".format(*max(ptx))
    else:
        return "nothing: no architecture of the build fits it"
    return f"{code}, {'tuned and measured' if capability == (9, 0) else 'compiled and not measured'}"


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
        "gpus": _gpus(),
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
        if built.get("cuda"):
            lines.append(f"  runs           {code_for(tuple(gpu['capability']), built['arch_list'])}")
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


def cuda_missing() -> str | None:
    """Why the CUDA kernels cannot run here, or None when they can."""
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    built = build_info()
    if built and not built["cuda"]:
        return f"htree_ops is built without CUDA: {built['reason']}"
    return None


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Where a row was measured.

    Attributes:
        gpu: name of the GPU, ``"none"`` for a CPU run.
        cpu: name of the processor and the threads torch used.
        torch: version of torch.
        cuda: CUDA version of torch, ``"none"`` for a CPU run.
        driver: version of the GPU driver, ``"none"`` for a CPU run.
        commit: commit of the measured source, with ``-dirty`` where files were changed.
        ceiling_gb_per_s: copy bandwidth measured in the same run, GB/s of read plus write.
    """

    gpu: str
    cpu: str
    torch: str
    cuda: str
    driver: str
    commit: str
    ceiling_gb_per_s: float


def source_commit(folder: Path | None = None) -> str:
    """The commit that is measured: ``HTREE_COMMIT``, else the checkout's, else that of the library's build.

    A library that was built from a source distribution, which has no commit, is named by its version.

    Raises:
        UsageError: no commit is known, and a figure that does not say what was measured is not recorded.
    """
    if given := os.environ.get("HTREE_COMMIT"):
        return given
    where = folder or CHECKOUT
    head = _output_of(["git", "-C", str(where), "rev-parse", "HEAD"]) if where else None
    if head is not None:
        changed = _output_of(["git", "-C", str(where), "status", "--porcelain", "--untracked-files=no"])
        return f"{head}-dirty" if changed else head
    built = build_info()
    if not built:
        raise UsageError("the measured commit is unknown: run inside the git checkout or set HTREE_COMMIT")
    return str(built.get("commit") or f"version {built['version']}")


def _output_of(command: list[str]) -> str | None:
    """Standard output without its last newline, None where the program is absent or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()}, {torch.get_num_threads()} threads"


def collect_environment(device: str, ceiling_gb_per_s: float) -> Environment:
    """Facts about this run on ``device`` (``"cpu"`` or a CUDA device)."""
    on_gpu = torch.device(device).type == "cuda"
    driver = (
        _output_of(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]) if on_gpu else None
    )
    return Environment(
        gpu=torch.cuda.get_device_name(device) if on_gpu else "none",
        cpu=_cpu_name(),
        torch=torch.__version__,
        cuda=str(torch.version.cuda) if on_gpu else "none",
        driver=driver.splitlines()[0] if driver else "none",
        commit=source_commit(),
        ceiling_gb_per_s=ceiling_gb_per_s,
    )


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
    "Prints versions, how the library was built, the GPUs, the ops and the compiled kernel configurations.",
    add_arguments,
    run,
)
