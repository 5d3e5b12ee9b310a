"""Benchmarks: a module per op family with ``make_benchmarks(device)``, and programs for all else that was measured.

``python -m benchmarks run FAMILY`` times a family and ``python -m benchmarks.NAME`` runs a program, both from the root
of the repository, with the package installed or built in place. Models trained here are those of the examples.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
