"""Tells which reports of racecheck are races, and which the tool can only make because it does not know better.

racecheck does not know that an mbarrier orders a raw bulk copy (``cp.async.bulk``) after what other warps read before:
in a ring of stages it reports every second round of a copy against the ordinary loads of the round before, whatever
barriers stand between. Copies by descriptors (``cp.async.bulk.tensor``) with the very same barriers are not reported;
FlashAttention found and isolated this (AI/RACECHECK_TMA_HAZARD.md in its repository). The kernels here copy rows that a
list names, which no descriptor describes.

So a report is set aside if one side of it is a raw bulk copy into shared memory and all others are loads from it, by
the instructions that the library has at the reported places. Everything else is a race. Such a ring is in order if its
readers wait for `full`, the lanes of a warp meet before one of them arrives at `empty`, and the copy waits for `empty`.

Run: ``python tests/racecheck_reports.py LIBRARY LOG...``; ``make sanitize`` does. Exit status 1: a race, a failed test,
or a log that does not hold what its summary counts.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

BULK_COPY, LOAD = "UBLKCP", "LDS"

FIRST = re.compile(
    r"^(?:\.|F|E|s|x)*=+ (?:Error|Warning): Race reported between (\w+) access at (.+?)\+0x([0-9a-f]+)"
)
OTHER = re.compile(r"^=+ +and (\w+) access at (.+?)\+0x([0-9a-f]+)")
SUMMARY = re.compile(r"^=+ RACECHECK SUMMARY: (\d+) hazards? displayed", re.MULTILINE)
RESULT = re.compile(r"^.*\b\d+ (?:passed|failed|errors?)\b.* in \d.*$", re.MULTILINE)  # of pytest


@dataclass(frozen=True)
class Access:
    """One side of a report."""

    kind: str
    kernel: str
    offset: int


Opcodes = Callable[[str], dict[int, str]]


def reports(log: str) -> list[list[Access]]:
    """The reports of a log; the first access of each is the one that the others are reported against."""
    found: list[list[Access]] = []
    for line in log.splitlines():
        if match := FIRST.match(line):
            found.append([])
        else:
            match = OTHER.match(line)
        if match and found:
            found[-1].append(Access(match[1], match[2], int(match[3], 16)))
    return found


def is_race(report: Sequence[Access], opcodes: Opcodes) -> bool:
    """False for a raw bulk copy against ordinary loads, see above."""
    names = [opcodes(access.kernel).get(access.offset, "unknown").split(".")[0] for access in report]
    sides = list(zip((access.kind for access in report), names, strict=True))
    copies = [kind == "Write" and name == BULK_COPY for kind, name in sides]
    loads = [kind == "Read" and name.startswith(LOAD) for kind, name in sides]
    ordered = (copies[0] and all(loads[1:])) or (loads[0] and all(copies[1:]))
    return len(report) < 2 or not ordered


def judge(log: str, opcodes: Opcodes) -> tuple[Counter[str], list[str]]:
    """How many reports of which kernel are set aside, and what is wrong with the log, a line each."""
    aside: Counter[str] = Counter()
    wrong = []
    found = reports(log)
    for report in found:
        first = report[0]
        if is_race(report, opcodes):
            wrong.append(f"race: {first.kind} in {first.kernel} at {first.offset:#x}")
        else:
            aside[first.kernel] += 1
    displayed = sum(int(count) for count in SUMMARY.findall(log))
    if displayed != len(found) or not SUMMARY.search(log):
        wrong.append(f"the summary counts {displayed} reports, the log holds {len(found)}")
    result = RESULT.findall(log)
    if not result or not all(
        "passed" in line and "failed" not in line and "error" not in line for line in result
    ):
        wrong.append("not every test passed")
    return aside, wrong


def plain(name: str) -> str:
    """A kernel's demangled name without what tools write in different ways: the types of template arguments, and the
    parameters, which may depend on those.
    """
    name = re.sub(r"\((?:int|bool|unsigned int|long)\)", "", name).replace("true", "1").replace("false", "0")
    if not name.endswith(")"):
        return name
    depth = 0
    for begin in range(len(name) - 1, -1, -1):
        depth += (name[begin] == ")") - (name[begin] == "(")
        if depth == 0:
            break
    return name[:begin]


def tool() -> str:
    """cuobjdump of the toolkit, or the one that comes with triton."""
    found = shutil.which("cuobjdump")
    triton = importlib.util.find_spec("triton")
    if found is None and triton is not None and triton.origin is not None:
        found = shutil.which("cuobjdump", path=str(Path(triton.origin).parent / "backends/nvidia/bin"))
    if found is None:
        raise FileNotFoundError("racecheck_reports.py needs cuobjdump, of the CUDA toolkit, in PATH")
    return found


def opcodes_of(library: Path) -> Opcodes:
    """kernel -> {offset: opcode} of the kernels in a library. Names are mangled or not."""

    def run(*arguments: str) -> str:
        return subprocess.run(
            [tool(), *arguments, str(library)], capture_output=True, text=True, check=False
        ).stdout

    @cache
    def symbols() -> dict[str, str]:
        mangled = sorted(set(re.findall(r"STO_ENTRY\s+(\S+)", run("-symbols"))))
        names = subprocess.run(
            ["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True
        ).stdout.splitlines()
        return {plain(name): symbol for name, symbol in zip(names, mangled, strict=True)}

    @cache
    def opcodes(kernel: str) -> dict[int, str]:
        name = kernel if kernel.startswith("_Z") else symbols().get(plain(kernel), kernel)
        lines = re.findall(
            r"/\*([0-9a-f]{4,})\*/\s+(?:@!?\S+\s+)?([A-Z][A-Z0-9_.]*)", run("-sass", "-fun", name)
        )
        return {int(offset, 16): opcode for offset, opcode in lines}

    return opcodes


def main(argv: Sequence[str]) -> int:
    """Judges the logs that were named."""
    if len(argv) < 2:
        print("usage: racecheck_reports.py LIBRARY LOG...", file=sys.stderr)
        return 2
    opcodes = opcodes_of(Path(argv[0]))
    status = 0
    for path in argv[1:]:
        aside, wrong = judge(Path(path).read_text(errors="replace"), opcodes)
        for kernel, count in sorted(aside.items()):
            print(f"{path}: {count} reports set aside, of bulk copies that barriers order: {kernel}")
        for line in wrong:
            print(f"{path}: {line}")
        print(f"{path}: {'not clean' if wrong else 'clean'}")
        status |= bool(wrong)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
