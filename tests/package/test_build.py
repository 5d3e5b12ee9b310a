"""The build's decisions about CUDA, and what a broken installation says. No compiler and no GPU needed."""

import email
import json
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections import Counter
from pathlib import Path

import pytest

import htree_ops
from htree_ops import _load

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").is_file(), reason="needs the source tree")


def fake_toolkit(folder: Path, version: str) -> str:
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f'#!/bin/sh\necho "Cuda compilation tools, release {version}, V{version}.1"\n')
    nvcc.chmod(0o755)
    return str(folder)


class TestDetectCuda:
    def test_no_nvcc_on_path(self, build, tmp_path, monkeypatch):
        monkeypatch.setattr(build, "find_cuda_home", lambda environ: None)
        decision = build.detect_cuda("13.0", {"PATH": str(tmp_path)})
        assert not decision.enabled
        assert "no CUDA toolkit found" in decision.reason

    def test_home_without_nvcc(self, build, tmp_path):
        decision = build.detect_cuda("13.0", {"CUDA_HOME": str(tmp_path), "PATH": ""})
        assert not decision.enabled
        assert decision.reason == f"no working nvcc in {tmp_path}/bin"

    def test_same_major_version(self, build, tmp_path):
        home = fake_toolkit(tmp_path, "13.2")
        decision = build.detect_cuda("13.0", {"CUDA_HOME": home, "PATH": ""})
        assert decision == build.CudaDecision(
            True, "torch's CUDA 13.0 and nvcc 13.2 agree", home, "13.2", build.DEFAULT_ARCH_LIST
        )

    def test_other_major_version(self, build, tmp_path):
        home = fake_toolkit(tmp_path, "12.8")
        decision = build.detect_cuda("13.0", {"CUDA_HOME": home, "PATH": ""})
        assert not decision.enabled
        assert "torch is built for CUDA 13.0 but nvcc is 12.8" in decision.reason

    def test_torch_without_cuda(self, build, tmp_path):
        decision = build.detect_cuda(None, {"CUDA_HOME": fake_toolkit(tmp_path, "13.0"), "PATH": ""})
        assert decision.reason == "this torch is built without CUDA"

    def test_switch_off_wins(self, build, tmp_path):
        environ = {"HTREE_CUDA": "0", "CUDA_HOME": fake_toolkit(tmp_path, "13.0"), "PATH": ""}
        assert build.detect_cuda("13.0", environ) == build.CudaDecision(False, "HTREE_CUDA=0")

    def test_switch_on_without_a_toolkit_says_what_is_missing(self, build, tmp_path):
        environ = {"HTREE_CUDA": "1", "CUDA_HOME": str(tmp_path), "PATH": ""}
        with pytest.raises(RuntimeError, match="HTREE_CUDA=1 asks for the CUDA kernels, but no working nvcc"):
            build.detect_cuda("13.0", environ)

    def test_other_values_are_refused(self, build):
        with pytest.raises(ValueError, match="HTREE_CUDA must be 0, 1 or unset, got 'yes'"):
            build.detect_cuda("13.0", {"HTREE_CUDA": "yes"})

    def test_arch_list(self, build, tmp_path):
        environ = {"CUDA_HOME": fake_toolkit(tmp_path, "13.0"), "PATH": ""}
        assert build.detect_cuda("13.0", environ, has_gpu=True).arch_list == "native"
        environ["TORCH_CUDA_ARCH_LIST"] = "9.0a"
        assert build.detect_cuda("13.0", environ).arch_list == "9.0a"
        assert build.native_arch_list([(9, 0), (8, 6), (9, 0)]) == "8.0+PTX;8.6;9.0a"


@pytest.mark.parametrize(
    ("torch_version", "setuptools_version", "has_wheel", "command", "sentence"),
    [
        ("2.11.0+cu130", "65.5.0", True, "dist_info", None),
        ("2.15.0a0", "84.2.1", False, "bdist_wheel", None),
        ("2.11.0", "65.5.0", False, "build_ext", None),
        (
            "2.11.0",
            "70.0",
            False,
            "bdist_wheel",
            "setuptools 70.0 needs the package wheel, which is not installed",
        ),
        ("2.11.0", "65.5.0", False, "dist_info", "setuptools 65.5.0 needs the package wheel"),
        (
            "2.11.0",
            "59.6.0",
            True,
            "dist_info",
            "needs setuptools 65 or newer, and this is setuptools 59.6.0",
        ),
        ("2.9.1", "81", True, "dist_info", "needs torch 2.11 or newer, and this is torch 2.9.1"),
    ],
)
def test_what_the_build_lacks(build, torch_version, setuptools_version, has_wheel, command, sentence):
    said = build.lacking(torch_version, setuptools_version, has_wheel, ["-q", command])
    if sentence is None:
        assert said is None
    else:
        assert sentence in said
        assert ": pip install " in said


def test_the_commit_is_that_of_this_checkout(build, tmp_path, monkeypatch):
    found = build.commit()
    assert found is None or len(found) == 40
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    subprocess.run(
        ["git", "-C", str(tmp_path), *identity, "commit", "-q", "--allow-empty", "-m", "other"], check=True
    )
    (tmp_path / "unpacked").mkdir()
    monkeypatch.setattr(build, "ROOT", tmp_path / "unpacked")
    assert build.commit() is None, "a source distribution in somebody's checkout"
    monkeypatch.setattr(build, "ROOT", tmp_path)
    assert len(build.commit()) == 40


def test_every_source_is_built_and_shipped(build, monkeypatch):
    monkeypatch.setattr(build, "GENERATED", ROOT / "build" / "listed_only")
    listed = set(build.sources(cuda=True))
    instances = {f for f in listed if f.startswith("build/listed_only/tree_attention/")}
    assert instances
    assert not (ROOT / "build" / "listed_only").exists(), "a list writes nothing"
    found = {str(f.relative_to(ROOT)) for f in (ROOT / "csrc").rglob("*") if f.suffix in (".cpp", ".cu")}
    assert found - listed == {"csrc/bindings.cpp", build.OLD_LIBC}
    assert "graft csrc" in (ROOT / "MANIFEST.in").read_text()


def test_what_needs_cuda_is_left_out_without_it(build):
    include = re.compile(r'#include [<"](?:cuda|cublas|ATen/cuda/|c10/cuda/|host/cuda/)')
    every, without = (set(build.sources(cuda)) for cuda in (True, False))
    assert without < every
    assert {Path(name).suffix for name in without} == {".cpp"}
    own = [name for name in without if name.startswith("csrc/")]
    assert [name for name in own if include.search((ROOT / name).read_text())] == []
    left_out = {name for name in every - without if name.endswith(".cpp")}
    assert {"csrc/ops/hadamard/hadamard_cuda.cpp", "csrc/ops/tree_attention/cuda/forward.cpp"} <= left_out
    assert [name for name in left_out if "host/cpu/" in (ROOT / name).read_text()] == []


def test_instances_share_a_file_where_few_are_compiled_at_once(build):
    """The two lists instantiate the same, each once, and no table row is split among several files."""
    apart, merged = (build.instances().texts(merged=flag) for flag in (False, True))

    def lines(texts):
        """What files instantiate, by the header that defines it."""
        found = Counter[tuple[str, str]]()
        for text in texts.values():
            header = next(line for line in text.splitlines() if line.startswith("#include"))
            found.update((header, line) for line in text.splitlines() if line.startswith("template "))
        return found

    assert lines(merged) == lines(apart)
    assert set(lines(apart).values()) == {1}
    kernels = {name for name in merged if name.endswith(".cu")}
    assert len(kernels) < len([name for name in apart if name.endswith(".cu")]) / 3
    assert {name: text for name, text in apart.items() if name.endswith(".cpp")} == {
        name: text for name, text in merged.items() if name.endswith(".cpp")
    }


@pytest.mark.parametrize("cuda", [False, True])
def test_files_of_a_folder_share_one_where_few_are_compiled_at_once(build, cuda):
    """What is compiled is the same, each file once; none that chooses an instruction set is among others."""
    apart, merged = (build.sources(cuda, flag) for flag in (False, True))
    shared = {
        name: text for name, text in build.generated(cuda, merged=True).items() if name.startswith("csrc/")
    }
    inside = [f"csrc/{name}" for text in shared.values() for name in re.findall(r'#include "(.*)"', text)]
    written = [name for name in apart if name.startswith("csrc/")]
    assert sorted([*inside, *(name for name in merged if name.startswith("csrc/"))]) == written
    assert {f"build/generated/{name}" for name in shared} <= set(merged)
    assert len(inside) > 2 * len(shared)
    assert not [name for name in inside if "#define HTREE_" in (ROOT / name).read_text()]


def test_import_runs_no_instruction_that_the_cpu_may_lack(build):
    """What is compiled for AVX2 or AVX-512 and runs before the CPU was asked would end the process on other CPUs."""
    texts = {name: text for name, text in build.instances().texts().items() if "_avx" in name}
    assert len(texts) >= 20
    for name, text in texts.items():
        lines = [
            line
            for line in text.splitlines()
            if line.startswith(("const ", "constexpr ", "static ")) or " = " in line
        ]
        assert lines, name
        assert all(line.startswith("constexpr ") for line in lines), name


def remedy(text: str) -> str:
    """The command that a message tells to run."""
    (command,) = re.findall(r"run '([^']+)'", text)
    return str(command)


FORCED = "pip install --no-build-isolation --no-deps --force-reinstall ."


@pytest.mark.parametrize(
    ("files", "said", "told"),
    [
        (
            {"../setup.py": ""},
            ["has not been built in place"],
            "pip install --no-build-isolation --no-deps -e .",
        ),
        ({}, ["the installation is incomplete"], FORCED),
        (
            {"_C.abi3.so": "not a library", "_build_info.json": json.dumps({"torch": "0.0.1"})},
            ["could not load", "built against torch 0.0.1"],
            FORCED,
        ),
    ],
    ids=["not built", "incomplete", "unloadable"],
)
def test_an_import_without_a_library_says_what_to_do(files, said, told, package, refused_import):
    for name, content in files.items():
        (package / name).write_text(content)
    message = refused_import()
    assert all(words in message for words in said)
    assert remedy(message) == told


def test_the_remedy_replaces_nothing_but_this_package(source):
    """What pip would install, asked without an index: it finds no other torch, and does not look for one."""
    words = f"{_load.INSTALL} --force-reinstall --dry-run --no-index .".split()
    done = subprocess.run([sys.executable, "-m", *words], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (planned,) = re.findall(r"^Would install (.*)$", done.stdout, re.M)
    assert planned.split() == [f"htree_ops-{htree_ops.__version__}"]


def test_no_remedy_replaces_torch():
    """Whoever installs this package from a message has a torch already."""
    files = [ROOT / "setup.py", *(f for d in ("htree_ops", "examples") for f in (ROOT / d).rglob("*.py"))]
    ours = [
        line.strip()
        for file in files
        for line in file.read_text().splitlines()
        if re.search(r"pip install [^'\"]*( \.|--force-reinstall|htree_ops)", line)
    ]
    first = "Install torch >= 2.11 first, then: pip install --no-build-isolation ."
    assert len(ours) >= 2
    assert [line for line in ours if "--no-deps" not in line and first not in line] == []


def test_a_second_copy_is_refused(tmp_path):
    """A second installation would register every op again and abort; the message names both."""
    package = Path(htree_ops.__file__).parent
    shutil.copytree(package, tmp_path / "htree_ops", ignore=shutil.ignore_patterns("__pycache__"))
    first = _load.library_path()
    script = f"import torch; torch.ops.load_library({str(first)!r}); import htree_ops"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "already registered by another copy" in done.stderr
    assert str(first) in done.stderr


def test_the_page_of_an_index_finds_pictures_and_links(build):
    """Every relative target of the README is a file, and becomes its address at the tag of this version."""
    readme, page = (ROOT / "README.md").read_text(), build.long_description()
    pattern = r'(?:\b(?:src|srcset|href)="|\]\()([^")\s]+)'
    targets, addresses = re.findall(pattern, readme), re.findall(pattern, page)
    assert len(targets) == len(addresses) >= 16
    base = rf"{re.escape(build.REPOSITORY)}/(raw|blob)/v{re.escape(htree_ops.__version__)}/(.+)"
    for target, address in zip(targets, addresses, strict=True):
        found = re.fullmatch(base, address)
        assert found, address
        assert found[2] == target
        assert (ROOT / target).is_file()
        assert (found[1] == "raw") == target.endswith(".png")
    assert re.sub(pattern, "", page) == re.sub(pattern, "", readme)


def test_other_links_stay(build, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build, "version", lambda: "9")
    (tmp_path / "a.md").touch()
    text = "[x](a.md#part) [y](https://example.org/a.md) [z](#part) `f[0](absent.md)`"
    (tmp_path / "README.md").write_text(text)
    assert build.long_description() == text.replace("(a.md", f"({build.REPOSITORY}/blob/v9/a.md")


def test_the_metadata_say_who_and_where(source):
    subprocess.run(
        [sys.executable, "setup.py", "-q", "dist_info"], cwd=source, check=True, capture_output=True
    )
    (folder,) = source.glob("*.dist-info")
    metadata = email.message_from_string((folder / "METADATA").read_text())
    assert metadata["Author"] == "htree_ops developers"
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL"))
    assert set(urls) == {"Homepage", "Documentation", "Changelog", "Issues"}
    assert all(url.startswith("https://github.com/htree-ops/htree_ops") for url in urls.values())
    assert {"Operating System :: POSIX :: Linux", "Typing :: Typed"} <= set(metadata.get_all("Classifier"))
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata["Version"] == htree_ops.__version__
    assert "/raw/v" not in metadata.get_payload(), "this copy has no pictures"
    assert "tree_attention" in metadata.get_payload()


WITHOUT_COMPILING = """
import runpy, sys
from torch.utils.cpp_extension import BuildExtension
BuildExtension.run = lambda self: None
sys.argv[1:] = ["-q", "editable_wheel", "--dist-dir", "dist"]
runpy.run_path("setup.py", run_name="__main__")
"""
TYPED = """
from htree_ops import TreeKVCache, tree_attention
from htree_ops.integrations import patch_model_
reveal_type(patch_model_)
reveal_type(tree_attention)
reveal_type(TreeKVCache.num_bytes)
tree_attention(1, 2, 3, importance="lsd")
"""


def test_type_checkers_see_an_editable_installation(source, tmp_path):
    """What ``pip install -e .`` unpacks into site-packages, without the libraries; mypy in another folder."""
    subprocess.run([sys.executable, "-c", WITHOUT_COMPILING], cwd=source, check=True, capture_output=True)
    venv.create(tmp_path / "venv", symlinks=True)
    (site,) = (tmp_path / "venv" / "lib").glob("*/site-packages")
    (wheel,) = (source / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(site)
    user = tmp_path / "user"
    user.mkdir()
    (user / "code.py").write_text(TYPED)
    python = f"--python-executable={tmp_path / 'venv' / 'bin' / 'python'}"
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--ignore-missing-imports", python, "code.py"],
        cwd=user,
        capture_output=True,
        text=True,
    )
    assert "Overload(def (q: Any" in done.stdout, done.stdout + done.stderr
    assert "attention: bool =" in done.stdout
    assert "TreeCacheBytes" in done.stdout
    assert "No overload variant" in done.stdout
