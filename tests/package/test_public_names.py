"""Every import path of the first layout still works: modules, and the names that they defined."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import htree_ops
import htree_ops.seed_api
from htree_ops.ops import MOVED

#: Modules of the first layout and their public names, without the functions ``check_*`` that modules shared.
NAMES: dict[str, list[str]] = json.loads(Path(__file__).with_name("public_names.json").read_text())


@pytest.mark.parametrize("module", NAMES)
def test_names_can_be_imported_from_where_they_were(module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in NAMES[module] if not hasattr(found, name)] == []


def test_a_module_that_moved_is_the_same_under_both_names() -> None:
    """Runs in a process that has not imported the package before."""
    code = "\n".join(
        f"import htree_ops.ops.{old} as a; from htree_ops.ops import {old} as b\n"
        f"import {new} as c; assert a is b is c, {old!r}"
        for old, new in MOVED.items()
    )
    package = Path(htree_ops.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=package, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_names_of_the_design_documents_are_those_of_one_module() -> None:
    seed = htree_ops.seed_api
    places = [importlib.import_module(module) for module in NAMES]
    for name in seed.__all__:
        exported = [getattr(place, name) for place in places if hasattr(place, name)]
        assert exported, name
        assert all(value is getattr(seed, name) for value in exported), name
