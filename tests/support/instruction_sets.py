"""Runs statements with the CPU kernels of one instruction set; a process chooses its set only once."""

import os
import subprocess
import sys

ISAS = ("baseline", "avx2", "avx512")


def run_with(isa: str, script: str) -> subprocess.CompletedProcess[str]:
    """Run ``script`` in a process of its own, which can import what this one can.

    A set that the CPU lacks is replaced by the best it has.
    """
    environment = os.environ | {"HTREE_CPU_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
