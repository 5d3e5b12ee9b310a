"""The generated instances of tree attention's kernels, for tests that compile one of them."""

import importlib.util
import sys
from pathlib import Path

CSRC = Path(__file__).resolve().parents[2] / "csrc"


def write_instance(name: str, folder: Path) -> Path:
    """Writes ``name`` as setup.py would and returns its path; csrc/instances.py lists the names."""
    spec = importlib.util.spec_from_file_location("htree_instances", CSRC / "instances.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    path = folder / f"{name}.cu"
    path.write_text(module.texts()[f"tree_attention/{name}.cu"])
    return path
