"""Loads and stores of the IO-only variants in the compiled code: they read what the full kernel reads (§2.2).

Needs nvcc and no GPU. The kernels are compiled to PTX without loop transformations, which would copy loads and count
them twice; dead loads are removed all the same, as a variant with a broken fold shows.
"""

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from functools import lru_cache
from pathlib import Path

import pytest
from tree_attention_instances import CSRC, write_instance

NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
needs_nvcc = pytest.mark.skipif(NVCC is None or not CSRC.is_dir(), reason="no nvcc, or no source tree")

#: Which memory each of a kernel's instructions touches; shared, local and parameter space do not count.
ACCESS = re.compile(r"\b(ld|st)((?:\.(?!shared|param|local)\w+)*)\s")


def compile_to_ptx(source: Path, include: Path = CSRC) -> str:
    command = [
        NVCC,
        "-std=c++17",
        "-O3",
        "-ptx",
        "-arch=compute_90",
        "-Xcicc",
        "-O1",
        "--expt-relaxed-constexpr",
    ]
    done = subprocess.run(
        [*command, f"-I{include}", str(source), "-o", "-"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@lru_cache
def accesses(name: str) -> dict[str, Counter[str]]:
    """Per kernel of an instance: how often each kind of load and store occurs."""
    with tempfile.TemporaryDirectory() as folder:
        return accesses_of(compile_to_ptx(write_instance(name, Path(folder))))


def accesses_of(ptx: str) -> dict[str, Counter[str]]:
    kernels = {}
    for match in re.finditer(r"\.entry (\w+)\((.*?)\n\}", ptx, re.S):
        found: Counter[str] = Counter()
        for kind, rest in ACCESS.findall(match.group(2)):
            words = [word for word in rest.split(".") if word]
            vector = next((word for word in words if re.fullmatch(r"v\d", word)), "")
            width = re.sub(r"\D", "", words[-1])
            # the compiler knows the space of some pointers and takes others as generic
            space = "global" if "global" in words else "generic"
            found[f"{kind} {space} {vector}{width}"] += 1
        kernels[match.group(1)] = found
    return kernels


def variants(full: str, io: str) -> list[tuple[Counter[str], Counter[str]]]:
    """Pairs of the same kernel under both policies."""
    return pairs_of(accesses(full), accesses(io))


def pairs_of(
    full: dict[str, Counter[str]], io: dict[str, Counter[str]]
) -> list[tuple[Counter[str], Counter[str]]]:
    pairs = [
        (counts, io[name.replace("8FullWork", "6IoOnly")])
        for name, counts in full.items()
        if "8FullWork" in name
    ]
    assert pairs
    return pairs


def changed_tree(folder: Path, header: str, kept: str, put: str) -> Path:
    """A copy of the sources with one place of a stage's header changed."""
    tree = folder / "csrc"
    shutil.copytree(CSRC, tree, ignore=shutil.ignore_patterns("*.cpp"))
    changed = tree / "ops" / "selection" / "cuda" / "any" / header
    text = changed.read_text()
    assert kept in text
    changed.write_text(text.replace(kept, put))
    return tree


@needs_nvcc
@pytest.mark.parametrize("dtype", ["float", "half", "bfloat16"])
def test_scores_read_and_write_the_same(dtype):
    pairs = variants(f"full_compute_scores_{dtype}", f"io_compute_scores_{dtype}")
    assert len(pairs) == 8  # 1, 2, 4, 8 heads; packs and single elements
    for full, io in pairs:
        assert full == io
        loads = sum(count for kind, count in full.items() if kind.startswith("ld"))
        assert loads == 10  # list twice, K twice, its cos and sin, q twice, its cos and sin
        assert any(kind.startswith("st") for kind in full)


@needs_nvcc
def test_selection_reads_the_same_scores(tmp_path):
    """The full kernel's other accesses are generic: keys and sort buffer, in shared memory where they fit.

    The parameters are marked as constant here. Without that the compiler takes all pointers as generic at this level of
    optimisation; at the library's own it knows those of the scores.
    """
    given = "const SelectParams params, const SelectPlan plan)"
    marked = given.replace("const SelectParams", "const __grid_constant__ SelectParams")
    tree = changed_tree(tmp_path, "select_topk.cuh", given, marked)
    full, io = (
        accesses_of(compile_to_ptx(write_instance(name, tmp_path), tree))
        for name in ("full_select_topk", "io_select_topk")
    )
    pairs = pairs_of(full, io)
    assert len(pairs) == 4
    for full, io in pairs:
        loads = {kind: count for kind, count in full.items() if kind.startswith("ld global")}
        assert sum(loads.values()) >= 4  # count, two passes, the joint maximum
        assert {kind: count for kind, count in io.items() if kind.startswith("ld")} == loads
        assert sum(count for kind, count in io.items() if kind.startswith("st")) == 1


@needs_nvcc
def test_next_parents_are_copied():
    ((full, io),) = variants("next_parents", "next_parents")
    assert sorted(kind.split()[0] for kind in io.elements()) == ["ld", "st"]
    assert sum(count for kind, count in full.items() if kind.startswith("ld")) > 1  # the list as well


@needs_nvcc
@pytest.mark.parametrize(
    ("header", "kept", "dropped", "instance"),
    [
        ("compute_scores.cuh", "sum += low[e] + high[e];", "sum += low[e];", "io_compute_scores_float"),
        ("compute_scores.cuh", "angles += cos[e] + sin[e];", "angles += cos[e];", "io_compute_scores_float"),
        ("select_topk.cuh", "fold_bits(values, fold);\n      } else {", "      } else {", "io_select_topk"),
    ],
)
def test_a_load_that_feeds_nothing_is_missed(tmp_path, header, kept, dropped, instance):
    """A variant that drops a value loses its load, and the count shows that."""
    tree = changed_tree(tmp_path, header, kept, dropped)
    broken = accesses_of(compile_to_ptx(write_instance(instance, tmp_path), tree))
    whole = accesses(instance)
    assert set(broken) == set(whole)
    for name, counts in broken.items():
        assert sum(counts.values()) < sum(whole[name].values())
