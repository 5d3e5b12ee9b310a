"""The rules of the house that a machine can read: sizes, names, what includes what, what a results file says.

Each rule is a function from the tree to a list of complaints. It runs on this repository, and on small wrong
trees to show that it complains.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES, MAX_README_LINES = 500, 250
MAX_TOP_TESTS = 15
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

    @cached_property
    def rooms(self) -> list[str]:
        """Names of the folders under csrc/ops."""
        return sorted({name.split("/")[2] for name in self.files if re.match(r"csrc/ops/[^/]+/", name)})


def files_are_short(tree: Tree) -> list[str]:
    limits = dict.fromkeys(tree.with_suffix(*SOURCE), MAX_LINES) | {"README.md": MAX_README_LINES}
    lengths = {name: tree.text(name).count("\n") for name in limits if name in tree.files}
    return [f"{name}: {n} lines, at most {limits[name]}" for name, n in lengths.items() if n > limits[name]]


def nothing_is_left_unfinished(tree: Tree) -> list[str]:
    found = ((name, UNFINISHED.search(tree.text(name))) for name in tree.with_suffix(*SOURCE))
    return [f"{name}: {match.group(0)}" for name, match in found if match]


def no_exception_is_swallowed(tree: Tree) -> list[str]:
    swallowed = re.compile(r"except(?: (?:Base)?Exception)?:\s*\n\s*pass\b")
    return [name for name in tree.with_suffix(".py") if swallowed.search(tree.text(name))]


def kernels_know_no_torch(tree: Tree) -> list[str]:
    include = re.compile(r'#\s*include\s*[<"](torch|ATen|c10|pybind11)/')
    kernels = [
        name for name in tree.with_suffix(".cuh", ".cu") if name.endswith(".cuh") or "/instances/" in name
    ]
    return [
        f"{name} includes {match.group(1)}" for name in kernels if (match := include.search(tree.text(name)))
    ]


def documents_name_existing_files(tree: Tree) -> list[str]:
    missing = []
    for document in tree.with_suffix(".md"):
        for name in sorted(set(re.findall(rf"[`(\"]((?:{FOLDERS})/[\w./-]+)[`)#\"]", tree.text(document)))):
            if not (tree.root / name).exists():
                missing.append(f"{document} names {name}, which does not exist")
    return missing


def rooms_are_complete(tree: Tree) -> list[str]:
    """Each room, or each stage of a room that is split into stages, has all of its files."""
    if not tree.rooms:
        return ["no room under csrc/ops"]
    missing = []
    for room in tree.rooms:
        inside = [
            name.removeprefix(f"csrc/ops/{room}/") for name in tree.files if f"csrc/ops/{room}/" in name
        ]
        stages = sorted({name.split("/")[0] for name in inside if "/" in name} - {"instances"})
        units = [f"csrc/ops/{room}/{stage}/{stage}" for stage in stages] or [f"csrc/ops/{room}/{room}"]
        missing += [unit + end for unit in units for end in (".h", ".cpp", "_cpu.cpp")]
        # a stage may have one launcher per direction: attention_forward_cuda.cu, attention_backward_cuda.cu
        launchers = {unit: re.compile(rf"{unit}(_\w+)?_cuda\.cu") for unit in units}
        missing += [f"{u}_cuda.cu" for u, p in launchers.items() if not any(map(p.fullmatch, tree.files))]
        missing.append(f"htree_ops/ops/{room}.py")
        reference = f"htree_ops/reference/{room}"
        missing.append(f"{reference}/__init__.py" if (tree.root / reference).is_dir() else f"{reference}.py")
        if not any(re.fullmatch(rf"tests/{room}/test_\w+\.py", name) for name in tree.files):
            missing.append(f"tests/{room}/test_{room}.py")
    return [f"{name} is missing" for name in missing if name not in tree.files]


def the_top_holds_few_tests(tree: Tree) -> list[str]:
    """Few files at the top; names that differ, because pytest imports the test files by their names alone."""
    inside = [name for name in tree.files if name.startswith("tests/")]
    top = sum(name.count("/") == 1 for name in inside)
    complaints = [f"tests/ holds {top} files, at most {MAX_TOP_TESTS}"] if top > MAX_TOP_TESTS else []
    names = Counter(Path(name).name for name in inside if name.endswith(".py"))
    return complaints + [
        f"tests/: {count} files are named {name}" for name, count in names.items() if count > 1
    ]


def results_say_where_they_come_from(tree: Tree) -> list[str]:
    """A results file is a list of rows, or an object whose ``rows`` are one."""
    complaints = []
    for name in tree.files:
        if not re.fullmatch(r"benchmarks/results/.*\.json", name):
            continue
        content = json.loads(tree.text(name))
        rows = content.get("rows") if isinstance(content, dict) else content
        if not rows or not all(isinstance(row, dict) for row in rows):
            complaints.append(f"{name}: no rows")
            continue
        for fact in ROW_FACTS:
            lacking = sum(not row.get(fact) for row in rows)
            if lacking:
                complaints.append(f"{name}: {lacking} of {len(rows)} rows without {fact}")
    return complaints


def ci_runs_the_test_command(tree: Tree) -> list[str]:
    name = ".ci/run"
    if name not in tree.files:
        return [f"{name} is missing"]
    return [] if re.search(r"^\s*make test\b", tree.text(name), re.M) else [f"{name} does not call make test"]


RULES: list[Callable[[Tree], list[str]]] = [
    files_are_short,
    nothing_is_left_unfinished,
    no_exception_is_swallowed,
    kernels_know_no_torch,
    documents_name_existing_files,
    rooms_are_complete,
    the_top_holds_few_tests,
    results_say_where_they_come_from,
    ci_runs_the_test_command,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_this_repository(rule):
    assert rule(Tree(ROOT)) == []


GOOD_ROW = {"gpu": "Some GPU", "torch": "2.11", "commit": "0123", "baseline": "eager"}
GOOD = {
    "README.md": "See `csrc/ops/room/room.h` and [the case](tests/room/test_room.py), not `docs/<name>.md`.\n",
    ".ci/run": "set -e\nmake test\n",
    "csrc/ops/room/room.h": "",
    "csrc/ops/room/room.cpp": "#include <torch/library.h>\n",
    "csrc/ops/room/room_cpu.cpp": "",
    "csrc/ops/room/room_cuda.cu": "#include <ATen/core/Tensor.h>\n",
    "csrc/ops/room/room.cuh": "#include <cuda_fp16.h>\n" * 500,
    "csrc/ops/room/instances/room_half.cu": '#include "ops/room/room.cuh"\n',
    "csrc/ops/staged/shared.h": "",
    **{f"csrc/ops/staged/build/build{end}": "" for end in (".h", ".cpp", "_cpu.cpp", "_cuda.cu")},
    "htree_ops/ops/room.py": "try:\n    x = 1\nexcept OSError:\n    raise\n",
    "htree_ops/ops/staged.py": "",
    "htree_ops/reference/room.py": "",
    "htree_ops/reference/staged/__init__.py": "",
    "tests/room/test_room.py": "",
    "tests/staged/test_staged_build.py": "",
    "benchmarks/results/rows.json": json.dumps([GOOD_ROW]),
    "benchmarks/results/more.json": json.dumps({"note": "", "rows": [GOOD_ROW]}),
}


def make_tree(folder: Path, change: dict[str, str | None]) -> Tree:
    for name, text in (GOOD | change).items():
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return Tree(folder)


def test_a_tree_that_keeps_the_rules(tmp_path):
    tree = make_tree(tmp_path, {})
    assert tree.rooms == ["room", "staged"]
    assert [complaint for rule in RULES for complaint in rule(tree)] == []


@pytest.mark.parametrize(
    ("rule", "change", "complaint"),
    [
        (files_are_short, {"csrc/ops/room/room.cuh": "\n" * 501}, "501 lines, at most 500"),
        (files_are_short, {"README.md": "\n" * 251}, "251 lines, at most 250"),
        (nothing_is_left_unfinished, {"csrc/ops/room/room.h": f"// {WORDS[0]}: strides\n"}, "room.h: "),
        (
            no_exception_is_swallowed,
            {"htree_ops/ops/room.py": "try:\n    x\nexcept:\n    pass\n"},
            "ops/room.py",
        ),
        (
            kernels_know_no_torch,
            {"csrc/ops/room/room.cuh": "# include <ATen/ATen.h>"},
            "room.cuh includes ATen",
        ),
        (
            kernels_know_no_torch,
            {"csrc/ops/room/instances/room_half.cu": "#include <c10/util/Half.h>"},
            "c10",
        ),
        (documents_name_existing_files, {"README.md": "`examples/absent.py`"}, "names examples/absent.py"),
        (documents_name_existing_files, {"docs/a.md": "[b](docs/b.md#part)"}, "docs/a.md names docs/b.md"),
        (documents_name_existing_files, {"README.md": '<img src="docs/a.png">'}, "names docs/a.png"),
        (rooms_are_complete, {"csrc/ops/room/room_cpu.cpp": None}, "room_cpu.cpp is missing"),
        (rooms_are_complete, {"csrc/ops/staged/build/build_cuda.cu": None}, "build/build_cuda.cu is missing"),
        (rooms_are_complete, {"htree_ops/reference/room.py": None}, "reference/room.py is missing"),
        (
            rooms_are_complete,
            {"tests/staged/test_staged_build.py": None},
            "tests/staged/test_staged.py is missing",
        ),
        (rooms_are_complete, dict.fromkeys(name for name in GOOD if "csrc/ops" in name), "no room"),
        (
            the_top_holds_few_tests,
            {f"tests/test_{i}.py": "" for i in range(16)},
            "tests/ holds 16 files, at most 15",
        ),
        (
            the_top_holds_few_tests,
            {"tests/room/test_staged_build.py": ""},
            "2 files are named test_staged_build.py",
        ),
        (
            results_say_where_they_come_from,
            {"benchmarks/results/rows.json": json.dumps([GOOD_ROW, GOOD_ROW | {"commit": ""}])},
            "1 of 2 rows without commit",
        ),
        (results_say_where_they_come_from, {"benchmarks/results/rows.json": "[]"}, "no rows"),
        (ci_runs_the_test_command, {".ci/run": "# make test\n"}, "does not call make test"),
        (ci_runs_the_test_command, {".ci/run": None}, "is missing"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_broken_rule_is_named(tmp_path, rule, change, complaint):
    complaints = rule(make_tree(tmp_path, change))
    assert any(complaint in line for line in complaints), complaints
