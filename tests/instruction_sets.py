"""Runs statements with the CPU kernels of one instruction set, which a process chooses once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ISAS = ("baseline", "avx2", "avx512")


def run_with(isa: str, script: str) -> subprocess.CompletedProcess[str]:
    """Run ``script`` in a process of its own, where the tests' modules can be imported.

    A set that the CPU lacks is replaced by the best it has.
    """
    environment = os.environ | {"HTREE_CPU_ISA": isa}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    )
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
