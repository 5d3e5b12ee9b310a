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
MAX_LINES, LINES_WITHOUT_A_REASON, MAX_FUNCTION_LINES = 1000, 700, 100
MAX_LINES_OF_PAGES = {"README.md": 150, "csrc/README.md": 60}
MAX_FILES_OF_A_FOLDER, MAX_FILES_OF_CSRC = 16, 389
# A file with more than LINES_WITHOUT_A_REASON lines says this in a comment or docstring in its first lines.
REASON = re.compile(r"[Ll]onger than 700 lines because")
MAX_TOP_TESTS = 15
SOURCE = {".py", ".cpp", ".cu", ".cuh", ".h"}
FOLDERS = "csrc|htree_ops|tests|benchmarks|examples|docs"
# Beside hidden files; a source distribution adds the last two.
TOP = {
    *FOLDERS.split("|"),
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "MANIFEST.in",
    "Makefile",
    "README.md",
}
TOP |= {"pyproject.toml", "setup.py", "PKG-INFO", "setup.cfg"}
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
    complaints = []
    for name in sorted({*tree.with_suffix(*SOURCE), *(set(MAX_LINES_OF_PAGES) & set(tree.files))}):
        limit, text = MAX_LINES_OF_PAGES.get(name, MAX_LINES), tree.text(name)
        lines = text.count("\n")
        if lines > limit:
            complaints.append(f"{name}: {lines} lines, at most {limit}")
        elif lines > LINES_WITHOUT_A_REASON and not REASON.search("\n".join(text.splitlines()[:20])):
            complaints.append(f"{name}: {lines} lines, and its first lines do not say why")
    return complaints


# Comments, literals and directives: braces and semicolons in them do not count.
NO_CODE = re.compile(
    r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])'|^[ \t]*\#(?:\\\n|[^\n])*""",
    re.DOTALL | re.MULTILINE,
)
# What stands before the brace of a function: its parameters, then qualifiers, a result or what a constructor sets.
FUNCTION = re.compile(r"\)\s*(?:const|noexcept|override|->[^{;]*|:[^:{;][^{;]*|\s)*$")


def cpp_functions(text: str) -> list[tuple[int, int]]:
    """First line and number of lines of each C++ function that is not inside another one."""
    text = NO_CODE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    found = []
    depth, header_at, function = 0, 0, None
    for match in re.finditer(r"[{};]", text):
        header = text[header_at : match.start()]
        if match[0] == "{":
            if function is None and FUNCTION.search(header):
                begin = match.start() - len(header.lstrip())
                function = (depth, text.count("\n", 0, begin) + 1)
            depth += 1
        elif match[0] == "}":
            depth -= 1
            if function is not None and depth == function[0]:
                found.append((function[1], text.count("\n", 0, match.start()) + 2 - function[1]))
                function = None
        header_at = match.end()
    return found


def functions_are_short(tree: Tree) -> list[str]:
    return [
        f"{name}:{line}: a function of {length} lines, at most {MAX_FUNCTION_LINES}"
        for name in tree.with_suffix(".h", ".cpp", ".cu", ".cuh")
        for line, length in cpp_functions(tree.text(name))
        if length > MAX_FUNCTION_LINES
    ]


def folders_of_csrc_are_small(tree: Tree) -> list[str]:
    counts = Counter(str(Path(name).parent) for name in tree.files if name.startswith("csrc/"))
    return [
        f"{folder}: {n} files, at most {MAX_FILES_OF_A_FOLDER}"
        for folder, n in sorted(counts.items())
        if n > MAX_FILES_OF_A_FOLDER
    ]


def csrc_has_few_files(tree: Tree) -> list[str]:
    count = sum(name.startswith("csrc/") for name in tree.files)
    return [f"csrc: {count} files, at most {MAX_FILES_OF_CSRC}"] if count > MAX_FILES_OF_CSRC else []


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


def rooms_are_complete(tree: Tree) -> list[str]:
    """Each room, or each stage of a room that is split into stages, has all of its files."""
    if not tree.rooms:
        return ["no room under csrc/ops"]
    missing = []
    for room in tree.rooms:
        inside = [
            name.removeprefix(f"csrc/ops/{room}/") for name in tree.files if f"csrc/ops/{room}/" in name
        ]
        split = sorted({name.split("/")[1] for name in inside if re.match(r"stages/\w+/", name)})
        if split:  # a room by direction and method: its operator, and the stages with the CPU's in a folder
            units = [f"csrc/ops/{room}/stages/{stage}/{stage}" for stage in split]
            missing += [unit + end for unit in units for end in (".cpp", "_cuda.cpp")]
            missing += [f"csrc/ops/{room}/cpu/stages/{stage}_cpu.cpp" for stage in split]
        else:
            # other folders hold kernels
            stages = sorted({name.split("/")[0] for name in inside if re.match(r"(\w+)/\1\.(h|cpp)$", name)})
            units = [f"csrc/ops/{room}/{stage}/{stage}" for stage in stages] or [f"csrc/ops/{room}/{room}"]
            missing += [unit + end for unit in units for end in (".h", ".cpp", "_cpu.cpp", "_cuda.cpp")]
        missing.append(f"htree_ops/ops/{room}/__init__.py")
        reference = f"htree_ops/reference/{room}"
        missing.append(f"{reference}/__init__.py" if (tree.root / reference).is_dir() else f"{reference}.py")
        if not any(re.fullmatch(rf"tests/{room}/test_\w+\.py", name) for name in tree.files):
            missing.append(f"tests/{room}/test_{room}.py")
    return [f"{name} is missing" for name in missing if name not in tree.files]


def nothing_strays_at_the_top(tree: Tree) -> list[str]:
    found = {name.split("/")[0] for name in tree.files}
    return [f"{name} stands at the top" for name in sorted(found - TOP) if not name.startswith(".")]


def the_top_holds_few_tests(tree: Tree) -> list[str]:
    """Few files at the top, and no name twice, because pytest imports test files by their names alone."""
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
    functions_are_short,
    csrc_has_few_files,
    folders_of_csrc_are_small,
    one_launcher_asks_for_shared_memory,
    instances_are_generated,
    maps_name_existing_files,
    nothing_is_left_unfinished,
    no_exception_is_swallowed,
    kernels_know_no_torch,
    documents_name_existing_files,
    rooms_are_complete,
    nothing_strays_at_the_top,
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
    "csrc/ops/room/room_cuda.cpp": "#include <ATen/core/Tensor.h>\n",
    "csrc/ops/room/room.cuh": "// Longer than 700 lines because it is one idea.\n"
    + "#include <cuda_fp16.h>\n" * 999,
    "csrc/host/launch.h": "cudaFuncAttributeMaxDynamicSharedMemorySize",
    "csrc/ops/room/room_sum.cu": '#include "ops/room/room.cuh"\n',
    "csrc/ops/staged/shared.h": "",
    **{f"csrc/ops/staged/build/build{end}": "" for end in (".h", ".cpp", "_cpu.cpp", "_cuda.cpp")},
    "htree_ops/ops/room/__init__.py": "try:\n    x = 1\nexcept OSError:\n    raise\n",
    "htree_ops/ops/staged/__init__.py": "",
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
        (files_are_short, {"csrc/ops/room/room.cuh": "\n" * 1001}, "1001 lines, at most 1000"),
        (
            files_are_short,
            {"csrc/ops/room/room.cuh": "\n" * 701},
            "701 lines, and its first lines do not say why",
        ),
        (files_are_short, {"README.md": "\n" * 151}, "151 lines, at most 150"),
        (files_are_short, {"csrc/README.md": "\n" * 61}, "61 lines, at most 60"),
        (
            functions_are_short,
            {"csrc/ops/room/room.h": "struct S {\n  int f(int i) const {" + "\n" * 100 + "  }\n};\n"},
            "room.h:2: a function of 101 lines",
        ),
        (
            functions_are_short,
            {"csrc/ops/room/room.cpp": "S::S(int i) : i_(i), j_(0) { // }" + "\n" * 100 + "}\n"},
            "room.cpp:1: a function of 101 lines",
        ),
        (
            folders_of_csrc_are_small,
            {f"csrc/device/{i}.h": "" for i in range(17)},
            "csrc/device: 17 files, at most 16",
        ),
        (
            csrc_has_few_files,
            {f"csrc/{i}/{j}.h": "" for i in range(40) for j in range(10)},
            "files, at most 389",
        ),
        (
            one_launcher_asks_for_shared_memory,
            {"csrc/host/b.h": "cudaFuncAttributeMaxDynamicSharedMemorySize"},
            "stands in csrc/host/b.h, csrc/host/launch.h",
        ),
        (
            instances_are_generated,
            {"csrc/ops/room/room.h": "# define ROOM_INSTANCES(T) f<T>\n"},
            "room.h defines ROOM_INSTANCES",
        ),
        (
            instances_are_generated,
            {"csrc/ops/room/instances/half.cu": ""},
            "csrc/ops/room/instances holds instances",
        ),
        (nothing_is_left_unfinished, {"csrc/ops/room/room.h": f"// {WORDS[0]}: strides\n"}, "room.h: "),
        (
            no_exception_is_swallowed,
            {"htree_ops/ops/room/__init__.py": "try:\n    x\nexcept:\n    pass\n"},
            "room/__init__.py",
        ),
        (
            kernels_know_no_torch,
            {"csrc/ops/room/room.cuh": "# include <ATen/ATen.h>"},
            "room.cuh includes ATen",
        ),
        (
            kernels_know_no_torch,
            {"csrc/ops/room/room_sum.cu": "#include <c10/util/Half.h>"},
            "c10",
        ),
        (documents_name_existing_files, {"README.md": "`examples/absent.py`"}, "names examples/absent.py"),
        (documents_name_existing_files, {"docs/a.md": "[b](docs/b.md#part)"}, "docs/a.md names docs/b.md"),
        (documents_name_existing_files, {"README.md": '<img src="docs/a.png">'}, "names docs/a.png"),
        (
            maps_name_existing_files,
            {"csrc/README.md": "`room/room.h` `oom.h`"},
            "names oom.h, which does not exist",
        ),
        (rooms_are_complete, {"csrc/ops/room/room_cpu.cpp": None}, "room_cpu.cpp is missing"),
        (
            rooms_are_complete,
            {"csrc/ops/staged/build/build_cuda.cpp": None},
            "build/build_cuda.cpp is missing",
        ),
        (rooms_are_complete, {"htree_ops/reference/room.py": None}, "reference/room.py is missing"),
        (
            rooms_are_complete,
            {"tests/staged/test_staged_build.py": None},
            "tests/staged/test_staged.py is missing",
        ),
        (rooms_are_complete, dict.fromkeys(name for name in GOOD if "csrc/ops" in name), "no room"),
        (nothing_strays_at_the_top, {"--help/room/sum.cu": ""}, "--help stands at the top"),
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
