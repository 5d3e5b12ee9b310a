"""What the tests of the build share: setup.py as a module, and copies of the sources."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLAIN = shutil.ignore_patterns("*.so", "__pycache__")


def module_at(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def build():
    """setup.py as a module; importing it builds nothing."""
    return module_at(ROOT / "setup.py", "htree_setup")


@pytest.fixture(scope="module")
def folder_writer():
    return module_at(ROOT / ".ci" / "kernels_folder.py", "kernels_folder")


@pytest.fixture
def source(tmp_path):
    """What a build needs of this checkout, elsewhere."""
    folder = tmp_path / "source"
    for name in ("htree_ops", "csrc"):
        shutil.copytree(ROOT / name, folder / name, ignore=PLAIN)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture
def package(tmp_path):
    """The package without its libraries, elsewhere."""
    shutil.copytree(ROOT / "htree_ops", tmp_path / "htree_ops", ignore=PLAIN)
    return tmp_path / "htree_ops"


@pytest.fixture
def refused_import(tmp_path):
    """What an import of that package says when it fails."""

    def run():
        command = [sys.executable, "-c", "import htree_ops"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={"PATH": ""})
        assert done.returncode == 1
        return done.stderr

    return run
