"""Loads the programs of the folder benchmarks, which is no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["FOLDER", "program"]

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def program(name: str) -> ModuleType:
    """The file of that name as a module."""
    spec = importlib.util.spec_from_file_location(f"{name}_program", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
