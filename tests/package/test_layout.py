"""Rules of the architecture that a machine can read: what includes what, which files belong together, what names what.

Each rule is a function from the tree to a list of complaints.
"""

import csv
import json
import re
import subprocess
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = {".py", ".cpp", ".cu", ".cuh", ".h"}
FOLDERS = "csrc|htree_ops|tests|benchmarks|examples|docs"
ROW_FACTS = ("gpu", "torch", "commit", "baseline")
# Reversed, so that this file does not contain them.
WORDS = [word[::-1] for word in ("ODOT", "EMXIF", "KCAH")]
UNFINISHED = re.compile(rf"\b(?:{'|'.join(WORDS)})\b")


class Tree:
    """The files of a checkout (what git knows or would add), or of an unpacked source distribution."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @cached_property
    def files(self) -> list[str]:
        """Paths relative to the root."""
        if (self.root / ".git").exists():
            command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
            listed = subprocess.run(command, cwd=self.root, capture_output=True, text=True, check=True).stdout
            names: Iterable[str] = listed.splitlines()
        else:
            names = (str(path.relative_to(self.root)) for path in self.root.rglob("*"))
            names = (name for name in names if not re.match(r"(\.venv|build|dist|[^/]*\.egg-info)/", name))
        return sorted(name for name in names if (self.root / name).is_file())

    def with_suffix(self, *suffixes: str) -> list[str]:
        return [name for name in self.files if Path(name).suffix in suffixes]

    def text(self, name: str) -> str:
        return (self.root / name).read_text(errors="replace")


def one_launcher_asks_for_shared_memory(tree: Tree) -> list[str]:
    text = "MaxDynamicSharedMemorySize"
    names = [
        name for name in tree.files if name.startswith("csrc/") for _ in range(tree.text(name).count(text))
    ]
    return [f"{text} stands in {', '.join(names)}"] if len(names) > 1 else []


def instances_are_generated(tree: Tree) -> list[str]:
    """Explicit instantiations are rows of the tables in csrc/instances.py, not macros or files."""
    macro = re.compile(r"^\s*#\s*define\s+(\w*_INSTANCES)\b", re.M)
    names = [name for name in tree.with_suffix(*SOURCE) if name.startswith("csrc/")]
    macros = [
        f"{name} defines {match.group(1)}" for name in names if (match := macro.search(tree.text(name)))
    ]
    folders = sorted({str(Path(name).parent) for name in names if "/instances/" in name})
    return macros + [f"{folder} holds instances, which csrc/instances.py should name" for folder in folders]


def nothing_is_left_unfinished(tree: Tree) -> list[str]:
    found = ((name, UNFINISHED.search(tree.text(name))) for name in tree.with_suffix(*SOURCE))
    return [f"{name}: {match.group(0)}" for name, match in found if match]


def no_exception_is_swallowed(tree: Tree) -> list[str]:
    swallowed = re.compile(r"except(?: (?:Base)?Exception)?:\s*\n\s*pass\b")
    return [name for name in tree.with_suffix(".py") if swallowed.search(tree.text(name))]


def the_package_stands_alone(tree: Tree) -> list[str]:
    """The tests and benchmarks import the package, never the reverse; nor do the tests' cases import benchmarks."""
    forbidden = {"htree_ops/": r"benchmarks|tests|examples", "tests/support/": r"benchmarks|examples"}
    return [
        f"{name} imports {match.group(1)}"
        for folder, others in forbidden.items()
        for name in tree.with_suffix(".py")
        if name.startswith(folder)
        and (match := re.search(rf"^\s*(?:from|import)\s+({others})\b", tree.text(name), re.M))
    ]


def kernels_know_no_torch(tree: Tree) -> list[str]:
    include = re.compile(r'#\s*include\s*[<"](torch|ATen|c10|pybind11)/')
    return [
        f"{name} includes {match.group(1)}"
        for name in tree.with_suffix(".cuh", ".cu")
        if (match := include.search(tree.text(name)))
    ]


def documents_name_existing_files(tree: Tree) -> list[str]:
    missing = []
    for document in tree.with_suffix(".md"):
        for name in sorted(set(re.findall(rf"[`(\"]((?:{FOLDERS})/[\w./-]+)[`)#\"]", tree.text(document)))):
            if not (tree.root / name).exists():
                missing.append(f"{document} names {name}, which does not exist")
    return missing


def maps_name_existing_files(tree: Tree) -> list[str]:
    """Files that a README of csrc names exist; it may name them with their last folders or alone."""
    missing = []
    for document in (name for name in tree.with_suffix(".md") if name.startswith("csrc/")):
        for name in sorted(set(re.findall(r"`([\w./-]+\.(?:cuh|cu|cpp|h|py))`", tree.text(document)))):
            if not any(f"/{file}".endswith(f"/{name}") for file in tree.files):
                missing.append(f"{document} names {name}, which does not exist")
    return missing


# Along the data: a family includes headers of those before it alone.
FAMILIES = ("tree", "selection", "index_loss", "sparse_attention", "tree_attention", "tree_cache")


def families_link_downward(tree: Tree) -> list[str]:
    complaints = []
    for name in tree.with_suffix(".h", ".cpp", ".cu", ".cuh"):
        family = name.split("/")[2] if name.startswith("csrc/ops/") else ""
        if family not in FAMILIES:
            continue
        for other, header in re.findall(r'#\s*include "ops/(\w+)/([^"]+)"', tree.text(name)):
            if other in FAMILIES and FAMILIES.index(other) > FAMILIES.index(family):
                complaints.append(f"{name} includes ops/{other}/{header}, of a family behind its own")
    return complaints


def results_say_where_they_come_from(tree: Tree) -> list[str]:
    """Rows of the harness, of the quality study and of IO-only runs; other programs choose their own columns."""
    complaints = []
    for name in tree.files:
        if re.fullmatch(r"benchmarks/results/.*\.json", name):
            content = json.loads(tree.text(name))
            rows = content.get("rows") if isinstance(content, dict) else content
        elif name == "benchmarks/results/quality/rows.jsonl":
            rows = [json.loads(line) for line in tree.text(name).splitlines()]
        elif re.fullmatch(
            r"benchmarks/results/[^/]*\.csv", name
        ) and "baseline_computes_the_same" in tree.text(name):
            rows = list(csv.DictReader(tree.text(name).splitlines()))
        else:
            continue
        if not rows or not all(isinstance(row, dict) for row in rows):
            complaints.append(f"{name}: no rows")
            continue
        for fact in ROW_FACTS:
            lacking = sum(not row.get(fact) for row in rows)
            if lacking:
                complaints.append(f"{name}: {lacking} of {len(rows)} rows without {fact}")
    return complaints


RULES: list[Callable[[Tree], list[str]]] = [
    one_launcher_asks_for_shared_memory,
    instances_are_generated,
    maps_name_existing_files,
    nothing_is_left_unfinished,
    no_exception_is_swallowed,
    the_package_stands_alone,
    kernels_know_no_torch,
    documents_name_existing_files,
    families_link_downward,
    results_say_where_they_come_from,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_this_repository(rule):
    assert rule(Tree(ROOT)) == []
