"""Registers, stack and shared memory of every kernel for each architecture, read from machine code without a GPU.

``python -m tests.support.gpu_resources FILES`` reads libraries, objects and fatbins. With ``--compile 80,90a,120`` it
first compiles the .cu files of the build for these architectures into build/resources, optimised as in a build; FILES
are then words of their names. Kernels that an architecture lacks beside the first one, and kernels that keep more on
the stack than for the first one, are listed, and the exit status is 1.
"""

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "resources"
ARCHITECTURE = re.compile(r"^arch = (sm_\w+)", re.M)
USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True)
class Usage:
    """Of one kernel: registers of a thread, bytes of its stack with what is spilled, static shared bytes of a block."""

    registers: int
    stack: int
    shared: int


#: Architecture to kernel to usage.
Table = dict[str, dict[str, Usage]]


def cuobjdump() -> str:
    """The program: of the toolkit, or of the package triton, which brings one."""
    found = shutil.which("cuobjdump") or next(
        iter(map(str, Path("/usr/local/cuda/bin").glob("cuobjdump"))), None
    )
    if found is None and (triton := importlib.util.find_spec("triton")) and triton.origin:
        found = next(map(str, Path(triton.origin).parent.glob("backends/nvidia/bin/cuobjdump")), None)
    if found is None:
        raise SystemExit("cuobjdump is missing: it comes with the CUDA toolkit and with the package triton")
    return found


def parse(text: str) -> Table:
    """What ``cuobjdump --dump-resource-usage`` prints."""
    table: Table = defaultdict(dict)
    parts = ARCHITECTURE.split(text)[1:]
    for architecture, part in zip(parts[::2], parts[1::2], strict=True):
        for name, registers, stack, shared, local in USAGE.findall(part):
            table[architecture][name] = Usage(int(registers), int(stack) + int(local), int(shared))
    return dict(table)


def read(files: Iterable[Path]) -> Table:
    """The kernels of all files together."""
    table: Table = defaultdict(dict)
    for file in files:
        command = [cuobjdump(), "--dump-resource-usage", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        for architecture, kernels in parse(done.stdout + done.stderr).items():
            table[architecture].update(kernels)
    return dict(table)


def complaints(table: Table, reference: str) -> list[str]:
    """Kernels that another architecture lacks, or for which it spills more than ``reference``."""
    found = []
    for architecture in sorted(table):
        for name, usage in sorted(table[reference].items()):
            there = table[architecture].get(name)
            if there is None:
                found.append(f"{architecture} lacks {name}")
            elif there.stack > usage.stack:
                found.append(
                    f"{architecture} keeps {there.stack} bytes on the stack, {reference} {usage.stack}: {name}"
                )
    return found


def lines(table: Table, reference: str) -> list[str]:
    """The table for people, in Markdown."""
    text = [
        "| architecture | kernels | most registers | with a stack | its most bytes | more than on the first |"
    ]
    text.append("|---|---|---|---|---|---|")
    for architecture, kernels in sorted(table.items(), key=lambda item: (len(item[0]), item[0])):
        stacks = [usage.stack for usage in kernels.values() if usage.stack]
        known = table[reference]
        more = sum(1 for name, usage in kernels.items() if name in known and usage.stack > known[name].stack)
        most = max(usage.registers for usage in kernels.values())
        text.append(
            f"| {architecture} | {len(kernels)} | {most} | {len(stacks)} | {max(stacks, default=0)} | {more} |"
        )
    return text


def compile_kernels(architectures: list[str], wanted: list[str]) -> list[Path]:
    """Fatbins of the .cu files of a build, of those whose name contains a word of ``wanted``. What stands
    there already stays: a long run may be stopped and begun again. MAX_JOBS are compiled at once, as in a build."""
    spec = importlib.util.spec_from_file_location("htree_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    setup: Any = importlib.util.module_from_spec(spec)
    sys.modules["htree_setup"] = setup
    spec.loader.exec_module(setup)
    setup.GENERATED = OUT / "generated"  # beside a build that may be under way
    setup.instances().write(setup.GENERATED, setup.generated(True, True))
    units = [Path(unit) for unit in setup.sources(True, True) if unit.endswith(".cu")]
    units = [unit for unit in units if not wanted or any(word in unit.stem for word in wanted)]
    codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in architectures]
    folder = OUT / "_".join(architectures)
    folder.mkdir(parents=True, exist_ok=True)

    def compiled(unit: Path) -> Path:
        target = folder / f"{unit.stem}.fatbin"
        if target.is_file():
            return target
        started = time.monotonic()
        partial = target.with_suffix(".part")
        flags = [*setup.nvcc_flags(), "-std=c++17", "-I", "csrc", *codes]
        subprocess.run(["nvcc", "-fatbin", *flags, str(unit), "-o", str(partial)], cwd=ROOT, check=True)
        partial.rename(target)
        print(f"{time.monotonic() - started:7.1f} s  {unit.stem}", file=sys.stderr, flush=True)
        return target

    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", setup.default_jobs()))) as workers:
        return list(workers.map(compiled, units))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "files", nargs="*", help="libraries, objects or fatbins; with --compile parts of names"
    )
    parser.add_argument("--compile", metavar="ARCHS", help="such as 80,89,90a,100,120")
    arguments = parser.parse_args()
    if not arguments.compile and not arguments.files:
        parser.error("name files, or architectures with --compile")
    if arguments.compile:
        files = compile_kernels(arguments.compile.split(","), arguments.files)
    else:
        files = [Path(file) for file in arguments.files]
    table = read(files)
    reference = min(table, key=lambda name: (len(name), name))
    print(*lines(table, reference), sep="\n")
    wrong = complaints(table, reference)
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
