"""A wheel for several versions of torch: which layer is loaded, what is compiled, and a folder for HF ``kernels``."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from htree_ops import _load
from tests.support import gpu_resources

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").is_file(), reason="needs the source tree")
HERE = f"t{''.join(torch.__version__.split('.')[:2])}"


class TestChoiceOfALayer:
    @pytest.mark.parametrize(
        ("torch_version", "cuda", "layer"),
        [
            ("2.11.0+cu130", "13.0", "t211_cu13"),
            ("2.11.0+cpu", None, "t211_cpu"),
            ("2.15.0.dev20261101", "13.2", "t215_cu13"),
            ("2.15.0", "12.9", "t215_cpu"),
            ("2.16.0", "13.2", None),
            ("2.1.1", None, None),
        ],
    )
    def test_the_installation_decides_by_the_versions_of_torch(
        self, monkeypatch, tmp_path, torch_version, cuda, layer
    ):
        for name in ("t211_cpu", "t211_cu13", "t215_cpu", "t215_cu13"):
            (tmp_path / f"_C_{name}.so").touch()
            (tmp_path / f"_build_info_{name}.json").write_text(json.dumps({"reason": name}))
        monkeypatch.setattr(_load, "PACKAGE", tmp_path)
        monkeypatch.setattr(torch, "__version__", torch_version)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        found = _load.library_path()
        assert (found.name if found else None) == (f"_C_{layer}.so" if layer else None)
        assert _load.build_info() == ({"reason": layer} if layer else {})

    def test_the_build_names_a_layer_as_the_loader_looks_for_it(self, build):
        for version, cuda in [("2.11.0+cu130", "13.0"), ("2.15.1", None), ("2.9.0a0", "12.8")]:
            assert build.layer_name(version, cuda) == _load.wanted_layers(version, cuda)[0]

    def test_a_library_that_was_built_from_source_comes_first(self, monkeypatch, tmp_path):
        monkeypatch.setattr(_load, "PACKAGE", tmp_path)
        (tmp_path / f"_C_{HERE}_cpu.so").touch()
        (tmp_path / "_C.abi3.so").touch()
        (tmp_path / "_build_info.json").write_text('{"reason": "source"}')
        assert _load.library_path() == tmp_path / "_C.abi3.so"
        assert _load.build_info() == {"reason": "source"}

    def test_another_torch_is_told_how_to_compile_a_layer(self, package, refused_import):
        for name in ("t210_cpu", "t210_cu13"):
            (package / f"_C_{name}.so").touch()
        said = refused_import()
        assert f"has no layer for torch {torch.__version__}" in said
        assert f"{HERE}_cpu" in said
        assert "only t210_cpu, t210_cu13" in said
        command = f"HTREE_PREBUILT={package} pip install --no-build-isolation --no-deps --force-reinstall ."
        assert f"run '{command}'" in said


@pytest.fixture
def common(build, tmp_path):
    """A folder that holds common libraries by their names, of CUDA 13."""
    for name in ("loops", "kernels"):
        (tmp_path / build.common_library(name)).touch()
    (tmp_path / build.COMMON_INFO).write_text(json.dumps({"cuda": "13.0", "arch_list": "9.0a"}))
    return tmp_path


class TestPrebuilt:
    def test_without_a_folder_all_is_compiled(self, build):
        assert build.prebuilt_common({}) is None

    def test_a_folder_is_found_as_a_package_or_as_what_holds_it(self, build, common):
        folder, info = build.prebuilt_common({"HTREE_PREBUILT": str(common)})
        assert folder == common
        assert info["arch_list"] == "9.0a"
        (common / "above").mkdir()
        (common / "above" / "htree_ops").symlink_to(common)
        folder, _ = build.prebuilt_common({"HTREE_PREBUILT": str(common / "above")})
        assert folder.resolve() == common

    def test_other_sources_are_refused(self, build, common):
        name = build.common_library("kernels")
        (common / name).rename(common / "libhtree_kernels-0123456789ab.so")
        with pytest.raises(RuntimeError, match=f"of other sources than these, which need {name}"):
            build.prebuilt_common({"HTREE_PREBUILT": str(common)})

    def test_a_folder_with_nothing_is_refused(self, build, tmp_path):
        with pytest.raises(RuntimeError, match=f"HTREE_PREBUILT={tmp_path}: no _common_info.json there"):
            build.prebuilt_common({"HTREE_PREBUILT": str(tmp_path)})

    @pytest.mark.parametrize("cuda", [False, True])
    def test_a_layer_and_the_common_libraries_are_the_whole(self, build, cuda):
        """Each unit of a build is in one of them; a layer needs no nvcc, and no kernel or loop includes torch."""
        units = build.sources(cuda, merged=True)
        layer = [unit for unit in units if build.has_torch(unit)]
        rest = [unit for unit in units if not build.has_torch(unit)]
        assert {Path(unit).suffix for unit in layer} == {".cpp"}
        assert "csrc/library.cpp" in layer
        assert len([unit for unit in rest if unit.endswith(".cpp")]) >= 30
        assert any(unit.endswith(".cu") for unit in rest) == cuda
        texts = dict(build.instances().texts())
        missing = {unit.removeprefix("csrc/") for unit in rest if unit.startswith("csrc/")}
        while missing:
            texts |= {name: (ROOT / "csrc" / name).read_text() for name in missing}
            missing = build.included(texts) - texts.keys()
        torches = re.compile(r"#include [<\"](torch|ATen|c10)/")
        assert len(texts) > 200
        assert [name for name, text in texts.items() if torches.search(text)] == []

    def test_only_the_layer_is_compiled(self, build, common, source):
        """What ``build_ext`` would compile beside prebuilt libraries, and what it would without."""
        script = (
            "import os, runpy, sys\n"
            "from torch.utils.cpp_extension import BuildExtension\n"
            "def listed(self):\n"
            "    for ext in self.extensions:\n"
            "        print(ext.name, self.get_ext_filename(ext.name), *ext.libraries)\n"
            "        print(*ext.sources, sep='\\n')\n"
            "    os._exit(sys.stdout.flush() or 0)\n"
            "BuildExtension.run = listed\n"
            "sys.argv[1:] = ['-q', 'build_ext']\n"
            "runpy.run_path('setup.py', run_name='__main__')\n"
        )
        environ = {**os.environ, "HTREE_CUDA": "0", "MAX_JOBS": "2", "HTREE_PREBUILT": str(common)}
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=source, capture_output=True, text=True, env=environ
        )
        assert done.returncode == 0, done.stderr
        loops = build.common_library("loops")
        assert f"htree_ops._C htree_ops/_C_{HERE}_cpu.so :{loops} " in done.stdout
        compiled = [line for line in done.stdout.splitlines() if line.endswith((".cpp", ".cu"))]
        assert "csrc/library.cpp" in compiled
        assert build.OLD_LIBC in compiled
        assert not [unit for unit in compiled if unit.endswith(".cu") or "_avx" in unit]

    def test_cuda_of_a_layer(self, build):
        decide = build.detect_layer_cuda
        assert decide("13.2", {}, "13.0").enabled
        assert (
            decide("12.8", {}, "13.0").reason
            == "torch is built for CUDA 12.8 but the prebuilt kernels for 13.0"
        )
        assert decide("13.0", {}, None).reason == "the prebuilt libraries hold no CUDA kernels"
        assert decide(None, {}, "13.0").reason == "this torch is built without CUDA"
        assert decide("13.0", {"HTREE_CUDA": "0"}, "13.0").reason == "HTREE_CUDA=0"
        with pytest.raises(RuntimeError, match="HTREE_CUDA=1 asks for the CUDA kernels, but this torch"):
            decide(None, {"HTREE_CUDA": "1"}, "13.0")


class TestNamespace:
    def test_every_registration_takes_the_namespace_of_the_build(self):
        """A literal would put ops of a loaded kernel among those of an installed package."""
        texts = {path: path.read_text() for path in (ROOT / "csrc").rglob("*.[ch]*")}
        calls = [call for text in texts.values() for call in re.findall(r"TORCH_LIBRARY\w*\((\w+)", text)]
        assert len(calls) > 20
        assert set(calls) == {"HTREE_NAMESPACE"}
        finders = [p for p, text in texts.items() for line in text.splitlines() if "findSchema" in line]
        allowed = {ROOT / "csrc/host/op_handle.h", ROOT / "csrc/ops/tree_attention/packed_options.cpp"}
        assert set(finders) == allowed, "the others ask op_handle, which knows the namespace"

    def test_modules_of_a_folder_use_only_each_other(self, folder_writer):
        """No module imports htree_ops by name or calls its ops, and each that is imported is there."""
        paths = folder_writer.modules()
        assert {Path("__init__.py"), Path("_load.py"), Path("ops/tree_attention/module.py")} <= set(paths)
        for path in paths:
            text = (ROOT / "htree_ops" / path).read_text()
            written = folder_writer.relative_text(text, len(path.parts) - 1, "a_namespace")
            assert folder_writer.imports(written) == [], path
            assert "torch.ops.htree" not in written, path
            assert not re.search(r"[\"']htree::", written), path
            compile(written, str(path), "exec")

    def test_names_are_relative_to_the_depth_of_a_module(self, folder_writer):
        text = (
            'from htree_ops.ops.a import b\n    from htree_ops import _load\ntorch.ops.htree.x("htree::x")\n'
        )
        wanted = 'from ..ops.a import b\n    from .. import _load\ntorch.ops.n.x("n::x")\n'
        assert folder_writer.relative_text(text, 1, "n") == wanted

    def test_the_name_of_a_variant(self, folder_writer):
        assert folder_writer.variant_name("2.11.0+cu130", "13.0").startswith("torch211-cxx11-cu130-")
        assert folder_writer.variant_name("2.15.0", None).startswith("torch215-cxx11-cpu-")

    def test_a_layer_of_another_namespace_is_refused(self, folder_writer, tmp_path):
        (tmp_path / f"_C_{HERE}_cpu.so").write_bytes(b"htree::")
        (tmp_path / f"_build_info_{HERE}_cpu.json").write_text('{"cuda": null}')
        (tmp_path / "libhtree_loops-0123456789ab.so").touch()
        with pytest.raises(SystemExit, match="was not compiled with HTREE_NAMESPACE=htree_ops_01234567"):
            folder_writer.write_variant(tmp_path, tmp_path / "out")
        assert not (tmp_path / "out").exists()


RESOURCES = """
Fatbin elf code:
arch = sm_80
Resource usage:
 Function one:
  REG:40 STACK:0 SHARED:16 LOCAL:0 CONSTANT[0]:400 TEXTURE:0
 Function two:
  REG:255 STACK:8 SHARED:0 LOCAL:0 CONSTANT[0]:400
Fatbin elf code:
arch = sm_120
 Function one:
  REG:64 STACK:24 SHARED:16 LOCAL:0 CONSTANT[0]:400
"""


def test_spills_and_missing_kernels_of_an_architecture_are_named():
    table = gpu_resources.parse(RESOURCES)
    assert table["sm_80"]["one"] == gpu_resources.Usage(40, 0, 16)
    assert gpu_resources.complaints(table, "sm_80") == [
        "sm_120 keeps 24 bytes on the stack, sm_80 0: one",
        "sm_120 lacks two",
    ]
    assert gpu_resources.lines(table, "sm_80")[2:] == [
        "| sm_80 | 2 | 255 | 1 | 8 | 0 |",
        "| sm_120 | 1 | 64 | 1 | 24 | 1 |",
    ]
