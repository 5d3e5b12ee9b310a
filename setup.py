"""Builds htree_ops: the op library ``_C`` (torch only, no CPython) and ``_host``, its configurations (pybind11).

CUDA is optional and needs no GPU at build time; ``detect_cuda`` decides and records why.
Switches: ``HTREE_CUDA=0|1`` forces the decision, ``TORCH_CUDA_ARCH_LIST`` and ``MAX_JOBS`` are torch's own.

A wheel for several versions of torch is built in parts (.ci/wheel.sh). ``python setup.py build_common`` compiles
what includes no torch: the kernels and the CPU loops. With ``HTREE_PREBUILT``, the folder that holds them, every other
command compiles only the thin layer between them and the torch at hand, without nvcc. ``HTREE_NAMESPACE`` names the
ops' namespace of a thin layer.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent
GENERATED = ROOT / "build" / "generated"
REPOSITORY = "https://github.com/htree-ops/htree_ops"
SOURCE_SUFFIXES = (".h", ".cpp", ".cuh", ".cu")
FAMILIES = (
    "causal_softmax",
    "compressed_kv",
    "fp8",
    "gated_mlp",
    "hadamard",
    "index_loss",
    "rmsnorm_rope",
    "selection",
    "sparse_attention",
    "tree",
    "tree_attention",
    "tree_cache",
)
# sm_90a machine code for Hopper, sm_80 machine code for Ampere and Ada, and compute_80 PTX, the highest
# architecture that every later GPU can compile from (compute_90a PTX runs on Hopper alone).
DEFAULT_ARCH_LIST = "8.0+PTX;9.0a"
GIB_PER_JOB = 3.0
#: Up to so many compilations at once, the instances of a kernel share a file, and so do the C++ files of a folder: most
#: of the work of a small file is its headers.
FEW_JOBS = 4
#: What the common libraries of a wheel are: beside them.
COMMON_INFO = "_common_info.json"
#: Symbols of a thin layer in the common libraries: every function of the kernels, the tables of the CPU loops.
EXPORTS = {
    "kernels": "_ZN5htree*; _ZNK5htree*;",
    "loops": "".join(
        f"_ZN5htree*{end};"
        for end in ("BaselineE", "Avx2E", "Avx512E", "KernelsDoubleE", "multiply_bf16_pairs*")
    ),
}
#: Part of every library of a wheel, so that it loads where the C library is older than here.
OLD_LIBC = "csrc/old_libc.cpp"
#: Commands for which setuptools before 70.1 needs the package wheel.
WHEEL_COMMANDS = {"bdist_wheel", "dist_info", "editable_wheel"}


@dataclass(frozen=True)
class CudaDecision:
    """Whether the CUDA kernels are built, with what, and the sentence that says why."""

    enabled: bool
    reason: str
    cuda_home: str | None = None
    nvcc_version: str | None = None
    arch_list: str | None = None


def nvcc_version_of(cuda_home: str | None) -> str | None:
    """Version such as "13.0" of the nvcc under ``cuda_home``, or None when there is none that answers."""
    nvcc = Path(cuda_home, "bin", "nvcc") if cuda_home else None
    if nvcc is None or not nvcc.is_file():
        return None
    try:
        text = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    found = re.search(r"release (\d+\.\d+)", text)
    return found.group(1) if found else None


def find_cuda_home(environ: dict[str, str]) -> str | None:
    """CUDA_HOME or CUDA_PATH, else the folder above ``nvcc`` on PATH, else /usr/local/cuda if it exists."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if environ.get(name):
            return environ[name]
    nvcc = shutil.which("nvcc", path=environ.get("PATH"))
    if nvcc:
        return str(Path(nvcc).resolve().parent.parent)
    return "/usr/local/cuda" if Path("/usr/local/cuda").is_dir() else None


def detect_cuda(torch_cuda: str | None, environ: dict[str, str], has_gpu: bool = False) -> CudaDecision:
    """Decides about CUDA from torch's own CUDA version, the environment and the toolkit found.

    Raises RuntimeError when ``HTREE_CUDA=1`` asks for CUDA and something is missing, ValueError for another value.
    """
    wish = environ.get("HTREE_CUDA", "")
    if wish not in ("", "0", "1"):
        raise ValueError(f"HTREE_CUDA must be 0, 1 or unset, got {wish!r}")
    if wish == "0":
        return CudaDecision(False, "HTREE_CUDA=0")

    home = find_cuda_home(environ)
    nvcc = nvcc_version_of(home)
    missing = None
    if torch_cuda is None:
        missing = "this torch is built without CUDA"
    elif home is None:
        missing = "no CUDA toolkit found (CUDA_HOME unset, no nvcc on PATH)"
    elif nvcc is None:
        missing = f"no working nvcc in {home}/bin"
    elif nvcc.split(".")[0] != torch_cuda.split(".")[0]:
        missing = f"torch is built for CUDA {torch_cuda} but nvcc is {nvcc}: the major versions must agree"
    if missing:
        if wish == "1":
            raise RuntimeError(f"HTREE_CUDA=1 asks for the CUDA kernels, but {missing}")
        return CudaDecision(False, missing, home, nvcc)

    arch_list = environ.get("TORCH_CUDA_ARCH_LIST") or ("native" if has_gpu else DEFAULT_ARCH_LIST)
    reason = "HTREE_CUDA=1" if wish == "1" else f"torch's CUDA {torch_cuda} and nvcc {nvcc} agree"
    return CudaDecision(True, reason, home, nvcc, arch_list)


def detect_layer_cuda(torch_cuda: str | None, environ: dict[str, str], kernels: str | None) -> CudaDecision:
    """The same for a thin layer over kernels that nvcc ``kernels`` compiled, None where there are none."""
    if environ.get("HTREE_CUDA", "") == "0":
        return CudaDecision(False, "HTREE_CUDA=0")
    missing = None
    if torch_cuda is None:
        missing = "this torch is built without CUDA"
    elif kernels is None:
        missing = "the prebuilt libraries hold no CUDA kernels"
    elif kernels.split(".")[0] != torch_cuda.split(".")[0]:
        missing = f"torch is built for CUDA {torch_cuda} but the prebuilt kernels for {kernels}"
    if missing and environ.get("HTREE_CUDA") == "1":
        raise RuntimeError(f"HTREE_CUDA=1 asks for the CUDA kernels, but {missing}")
    if missing:
        return CudaDecision(False, missing)
    return CudaDecision(True, f"prebuilt kernels of nvcc {kernels}", nvcc_version=kernels)


def native_arch_list(capabilities: list[tuple[int, int]]) -> str:
    """Architecture list for the GPUs at hand: Hopper as 9.0a, the others plainly, all with the PTX fallback."""
    names = {"9.0a" if cap == (9, 0) else f"{cap[0]}.{cap[1]}" for cap in capabilities}
    return ";".join(sorted(names | {"8.0+PTX"}))


def instances() -> ModuleType:
    """The module csrc/instances.py: a build without isolation has no path to it."""
    spec = importlib.util.spec_from_file_location("htree_instances", ROOT / "csrc" / "instances.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def needs_cuda(path: Path) -> bool:
    """Whether a source, given from ROOT on, is compiled only with CUDA: kernels, and the C++ that calls them."""
    return path.suffix == ".cu" or path.stem.endswith("_cuda") or "cuda" in path.parts[:-1]


def written_sources(cuda: bool) -> list[Path]:
    """Every file of the op library in csrc that is compiled with CUDA or without: library.cpp, host and the listed
    families; from ROOT on."""
    found = [ROOT / "csrc" / "library.cpp", *(ROOT / "csrc" / "host").rglob("*")]
    for family in FAMILIES:
        found += (ROOT / "csrc" / "ops" / family).rglob("*")
    units = sorted(f.relative_to(ROOT) for f in found if f.suffix in (".cpp", ".cu"))
    return [unit for unit in units if cuda or not needs_cuda(unit)]


def merged_hosts(cuda: bool) -> dict[str, list[Path]]:
    """The C++ files of csrc that share a file of GENERATED, by its name: those of a folder, with CUDA and without.

    A file of one instruction set stays alone.
    """
    groups: dict[str, list[Path]] = {}
    for unit in written_sources(cuda):
        if unit.suffix == ".cpp" and "#define HTREE_" not in (ROOT / unit).read_text():
            name = "_".join((*unit.parent.parts[1:], "all", *(["cuda"] if needs_cuda(unit) else [])))
            groups.setdefault(f"csrc/{name}.cpp", []).append(unit)
    return {name: units for name, units in groups.items() if len(units) > 1}


def generated(cuda: bool, merged: bool) -> dict[str, str]:
    """Every file of GENERATED by its name, with its text: the instances; ``merged``: the shared C++ files too."""
    texts: dict[str, str] = instances().texts(merged)
    for name, units in merged_hosts(cuda).items() if merged else ():
        texts[name] = "".join(f'#include "{unit.relative_to("csrc")}"\n' for unit in units)
    return texts


def sources(cuda: bool, merged: bool = False) -> list[str]:
    """Every file that is compiled with CUDA or without, from ROOT on; main() writes those of GENERATED."""
    shared = {unit for units in merged_hosts(cuda).values() for unit in units} if merged else set()
    made = [(GENERATED / name).relative_to(ROOT) for name in generated(cuda, merged)]
    units = [unit for unit in written_sources(cuda) if unit not in shared]
    units += [unit for unit in made if cuda or not needs_cuda(unit)]
    return sorted(map(str, units))


def has_torch(unit: str) -> bool:
    """Whether a source, given from ROOT on, belongs to the thin layer: neither kernels nor CPU loops include torch."""
    path = ROOT / unit
    if path.suffix == ".cpp" and GENERATED in path.parents:
        return GENERATED / "csrc" in path.parents
    return path.suffix == ".cpp" and "#define HTREE_" not in path.read_text()


def common_hash() -> str:
    """Of the sources of the common libraries with all that they include: a thin layer fits libraries of the same hash.
    They carry it in their names, so that neither is loaded with another's."""
    texts = dict(instances().texts())
    missing = {
        str(unit.relative_to("csrc")) for unit in written_sources(cuda=True) if not has_torch(str(unit))
    }
    while missing:
        texts |= {name: (ROOT / "csrc" / name).read_text() for name in missing}
        missing = included(texts) - texts.keys()
    digest = hashlib.sha256()
    for name, text in sorted(texts.items()):
        digest.update(name.encode() + b"\0" + text.encode() + b"\0")
    return digest.hexdigest()[:12]


def included(texts: dict[str, str]) -> set[str]:
    """The files of csrc that texts include."""
    return {name for text in texts.values() for name in re.findall(r'^#include "([^"]+)"', text, re.M)}


def common_library(name: str) -> str:
    """File and soname of the library ``kernels`` or ``loops``."""
    return f"libhtree_{name}-{common_hash()}.so"


def prebuilt_common(environ: dict[str, str]) -> tuple[Path, dict[str, Any]] | None:
    """The folder of ``HTREE_PREBUILT`` that holds the common libraries, with what ``build_common`` wrote about them.

    Raises RuntimeError where they are absent or of other sources.
    """
    if not environ.get("HTREE_PREBUILT"):
        return None
    given = Path(environ["HTREE_PREBUILT"]).resolve()
    folder = next((f for f in (given, given / "htree_ops") if (f / COMMON_INFO).is_file()), None)
    if folder is None:
        raise RuntimeError(f"HTREE_PREBUILT={given}: no {COMMON_INFO} there, which says what is prebuilt")
    info = json.loads((folder / COMMON_INFO).read_text())
    names = ["loops", *(["kernels"] if info["cuda"] else [])]
    if missing := [name for name in map(common_library, names) if not (folder / name).is_file()]:
        raise RuntimeError(
            f"HTREE_PREBUILT={given}: its libraries are of other sources than these, which need {', '.join(missing)}"
        )
    return folder, info


def layer_name(torch_version: str, cuda: str | None) -> str:
    """``t211_cu13`` is the thin layer for torch 2.11 with CUDA 13; without CUDA it is ``t211_cpu``."""
    major, minor = numbers(torch_version)
    return f"t{major}{minor}_" + (f"cu{cuda.split('.')[0]}" if cuda else "cpu")


def source_hashes() -> dict[str, str]:
    """For each family the hash of its sources, of its instances and of the device headers that families share: tuning
    results keep it."""
    hashes = {}
    generated = instances().texts()
    for family in FAMILIES:
        digest = hashlib.sha256()
        for name, text in sorted(generated.items()):
            if name.startswith(f"{family}/"):
                digest.update(name.encode() + b"\0" + text.encode() + b"\0")
        for folder in (ROOT / "csrc" / "device", ROOT / "csrc" / "ops" / family):
            for path in sorted(file for file in folder.rglob("*") if file.suffix in SOURCE_SUFFIXES):
                digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
        hashes[family] = digest.hexdigest()[:16]
    return hashes


def default_jobs() -> int:
    """Parallel compilations that fit: one per core, and one per GIB_PER_JOB of memory that can be had.

    That is Linux's MemAvailable; its free pages leave out what the file cache would give back.
    """
    cores = os.cpu_count() or 1
    try:
        entries = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available_gib = int(entries["MemAvailable"].split()[0]) / 2**20
    except (OSError, KeyError, ValueError):
        return cores
    return max(1, min(cores, int(available_gib / GIB_PER_JOB)))


def record_compilation(build_temp: Path, folder: Path) -> None:
    """Where ninja built: compile_times.txt, seconds and object of each compiled unit, slowest first, and
    compile_commands.json, the compile database that editors and clang tools read."""
    log = build_temp / ".ninja_log"
    if not log.is_file():
        return
    folder.mkdir(exist_ok=True)
    rows = [line.split("\t") for line in log.read_text().splitlines() if not line.startswith("#")]
    seconds = {Path(row[3]).name: (int(row[1]) - int(row[0])) / 1000 for row in rows}
    lines = [f"{time:7.1f} s  {unit}" for unit, time in sorted(seconds.items(), key=lambda item: -item[1])]
    (folder / "compile_times.txt").write_text("\n".join(lines) + "\n")
    if shutil.which("ninja"):
        commands = subprocess.run(["ninja", "-t", "compdb"], cwd=build_temp, capture_output=True, check=True)
        (folder / "compile_commands.json").write_bytes(commands.stdout)


def version() -> str:
    text = (ROOT / "htree_ops" / "version.py").read_text()
    found = re.search(r'__version__ = "([^"]+)"', text)
    if not found:
        raise RuntimeError("htree_ops/version.py defines no __version__")
    return found.group(1)


def long_description() -> str:
    """The README for the page of an index, which has no files beside it: pictures and links that name a file of this
    folder point to it in the repository, at the tag of this version."""

    def absolute(found: re.Match[str]) -> str:
        before, target = found.groups()
        if not (ROOT / target.partition("#")[0]).is_file():
            return found[0]
        kind = "raw" if Path(target).suffix == ".png" else "blob"
        return f"{before}{REPOSITORY}/{kind}/v{version()}/{target}"

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r'((?:src|srcset|href)="|\]\()([^")\s]+)', absolute, readme)


def commit() -> str | None:
    """The commit of this checkout; None for a source distribution, also inside a checkout of something else."""
    ask = ["git", "rev-parse", "--show-toplevel", "HEAD"]
    try:
        done = subprocess.run(ask, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    folder, head = done.stdout.split("\n")[:2]
    return head if Path(folder).resolve() == ROOT else None


def lacking(torch_version: str, setuptools_version: str, has_wheel: bool, commands: list[str]) -> str | None:
    """The sentence that says what to install before the build can start; None where all is there."""
    need = None
    if numbers(torch_version) < (2, 11):
        return f"htree_ops needs torch 2.11 or newer, and this is torch {torch_version}: pip install 'torch>=2.11'"
    if numbers(setuptools_version) < (65, 0):
        need = f"htree_ops needs setuptools 65 or newer, and this is setuptools {setuptools_version}"
    elif numbers(setuptools_version) < (70, 1) and not has_wheel and not WHEEL_COMMANDS.isdisjoint(commands):
        need = f"setuptools {setuptools_version} needs the package wheel, which is not installed"
    return f"{need}: pip install 'setuptools>=77,<82' wheel ninja" if need else None


def numbers(text: str) -> tuple[int, int]:
    """The first two numbers of a version."""
    major, minor = [*re.findall(r"\d+", text), "0", "0"][:2]
    return int(major), int(minor)


def cxx_flags(cuda: bool, hidden: bool = True) -> list[str]:
    """Of every C++ file. at::parallel_for is a template: without -fopenmp it runs on one thread. torch itself loads the
    OpenMP runtime. -g0: the library is stripped, and the -g that most Pythons add takes two thirds of the time of a
    unit."""
    visibility = ["-fvisibility=hidden"] if hidden else []
    define = ["-DHTREE_WITH_CUDA"] if cuda else []
    return ["-O3", "-g0", "-fopenmp", *visibility, "-Wno-psabi", *define]


def nvcc_flags(hidden: bool = True) -> list[str]:
    """Of every .cu file."""
    return [
        "-O3",
        "-DHTREE_WITH_CUDA",
        "--expt-relaxed-constexpr",
        *(["-Xcompiler=-fvisibility=hidden"] if hidden else []),
        "-Xfatbin=-compress-all",
        # torch switches these operators off; the kernels use them
        "-U__CUDA_NO_HALF_OPERATORS__",
        "-U__CUDA_NO_HALF_CONVERSIONS__",
        "-U__CUDA_NO_HALF2_OPERATORS__",
        "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
    ]


def host_extension(cuda: bool, beside: tuple[str, ...] = ()) -> Any:
    """``_host``, for one version of Python, with the sources ``beside`` its own."""
    from torch.utils.cpp_extension import CppExtension

    return CppExtension(
        "htree_ops._host",
        ["csrc/bindings.cpp", *beside],
        include_dirs=[str(ROOT / "csrc")],
        extra_compile_args={"cxx": [*cxx_flags(cuda), "-O1"]},
        extra_link_args=["-s"],
    )


def common_extensions(cuda: CudaDecision, units: list[str], files: dict[str, str]) -> list[Any]:
    """The libraries without torch. Only what a thin layer names leaves them, so that two copies stay apart."""
    from setuptools import Extension

    groups = {"loops": [unit for unit in units if unit.endswith(".cpp") and not has_torch(unit)]}
    if cuda.enabled:
        groups["kernels"] = [unit for unit in units if unit.endswith(".cu")]
    made = []
    for name, group in groups.items():
        files[f"htree_ops.{name}"] = common_library(name)
        exports = ROOT / "build" / f"{name}.exports"
        exports.write_text(f"{{ global: {EXPORTS[name]} local: *; }};\n")
        toolkit = Path(cuda.cuda_home or "", "lib64")
        made.append(
            Extension(
                f"htree_ops.{name}",
                [*group, OLD_LIBC],
                include_dirs=[str(ROOT / "csrc")],
                libraries=["cudart"] if name == "kernels" else [],
                library_dirs=[str(toolkit)] if name == "kernels" else [],
                language="c++",
                extra_compile_args={
                    "cxx": cxx_flags(cuda.enabled, hidden=False),
                    "nvcc": nvcc_flags(hidden=False),
                },
                extra_link_args=[
                    "-s",
                    "-Wl,-z,defs",
                    f"-Wl,-soname,{common_library(name)},--version-script={exports}",
                ],
            )
        )
    return made


def layer_extension(cuda: bool, units: list[str], folder: Path) -> Any:
    """What lies between the torch at hand and the common libraries in ``folder``; free of CPython and nvcc."""
    import torch
    from torch.utils.cpp_extension import CppExtension

    names = ["loops", *(["kernels"] if cuda else [])]
    # torch's packages bring the headers of its CUDA; a toolkit is not needed
    packages = Path(torch.__file__).parents[1] / "nvidia" / f"cu{(torch.version.cuda or '').split('.')[0]}"
    headers = packages / "include"
    if not (headers / "cuda_runtime.h").is_file():
        headers = Path(find_cuda_home(dict(os.environ)) or "/usr/local/cuda", "include")
    namespace = os.environ.get("HTREE_NAMESPACE")
    define = ["-DHTREE_THIN_LAYER", *([f"-DHTREE_NAMESPACE={namespace}"] if namespace else [])]
    return CppExtension(
        "htree_ops._C",
        [*(unit for unit in units if has_torch(unit)), OLD_LIBC],
        include_dirs=[str(ROOT / "csrc"), *([str(headers)] if cuda else [])],
        library_dirs=[str(folder)],
        libraries=[
            *(f":{common_library(name)}" for name in names),
            *(["c10_cuda", "torch_cuda"] if cuda else []),
        ],
        extra_compile_args={"cxx": [*cxx_flags(cuda), *define]},
        extra_link_args=["-s", "-Wl,-rpath,$ORIGIN"],
        py_limited_api=True,
    )


def main() -> None:
    try:
        import torch
    except ImportError as error:
        sys.exit(
            f"htree_ops builds against the torch it will run with, and importing torch failed: {error}\n"
            "Install torch >= 2.11 first, then: pip install --no-build-isolation ."
        )
    import setuptools

    has_wheel = importlib.util.find_spec("wheel") is not None
    if need := lacking(torch.__version__, setuptools.__version__, has_wheel, sys.argv[1:]):
        sys.exit(need)
    from setuptools import find_packages, setup
    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

    environ = dict(os.environ)
    makes_common = "build_common" in sys.argv[1:]
    prebuilt = None if makes_common else prebuilt_common(environ)
    if prebuilt:
        cuda = detect_layer_cuda(torch.version.cuda, environ, prebuilt[1]["cuda"])
        arch_list = prebuilt[1]["arch_list"] if cuda.enabled else None
    else:
        cuda = detect_cuda(torch.version.cuda, environ, torch.cuda.is_available())
        arch_list = cuda.arch_list
    if arch_list == "native":
        arch_list = native_arch_list(
            [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
        )
    if cuda.enabled and arch_list:
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", arch_list)
    os.environ.setdefault("MAX_JOBS", str(default_jobs()))
    print(f"htree_ops: CUDA kernels {'on' if cuda.enabled else 'off'} ({cuda.reason})", file=sys.stderr)
    if importlib.util.find_spec("ninja") is None and shutil.which("ninja") is None:
        print("htree_ops: without ninja one file is compiled at a time: pip install ninja", file=sys.stderr)

    jobs = os.environ["MAX_JOBS"]
    merged = jobs.isdecimal() and int(jobs) <= FEW_JOBS
    instances().write(GENERATED, generated(cuda.enabled, merged))
    units = sources(cuda.enabled, merged)
    # Of extensions whose file is not named by their place in the package and the Python.
    files: dict[str, str] = {}
    if makes_common:
        extensions = common_extensions(cuda, units, files)
    elif prebuilt:
        files["htree_ops._C"] = f"_C_{layer_name(torch.__version__, cuda.nvcc_version)}.so"
        has_kernels = bool(prebuilt[1]["cuda"])
        layer = layer_extension(cuda.enabled, units, prebuilt[0])
        extensions = [layer, host_extension(has_kernels, (OLD_LIBC,))]
    else:
        op_extension = CUDAExtension if cuda.enabled else CppExtension
        whole = op_extension(
            "htree_ops._C",
            units,
            include_dirs=[str(ROOT / "csrc")],
            extra_compile_args={"cxx": cxx_flags(cuda.enabled), "nvcc": nvcc_flags()},
            # -s: without symbols the library is a third of the size; its exports stay
            extra_link_args=["-s"],
            py_limited_api=True,
        )
        extensions = [whole, host_extension(cuda.enabled)]

    class Build(BuildExtension):
        """BuildExtension that leaves ``_build_info.json`` beside the library and build/compile_times.txt."""

        def get_ext_filename(self, name: str) -> str:
            folder, _, last = name.rpartition(
                "."
            )  # with its package, or without where that is added afterwards
            file = files.get(f"htree_ops.{last}")
            return os.path.join(folder, file) if file else str(super().get_ext_filename(name))

        def run(self) -> None:
            super().run()
            record_compilation(Path(self.build_temp), ROOT / "build")
            target = (ROOT if self.inplace else Path(self.build_lib)) / "htree_ops"
            info = {
                "version": version(),
                "torch": torch.__version__,
                "cuda": cuda.nvcc_version if cuda.enabled else None,
                "reason": cuda.reason,
                "arch_list": arch_list if cuda.enabled else None,
                "compiler": os.environ.get("CXX", "c++"),
                "commit": commit(),
                "source_hashes": source_hashes(),
            }
            name = "_build_info.json"
            if makes_common:
                name = COMMON_INFO
            elif prebuilt:
                name = f"_build_info_{files['htree_ops._C'][3:-3]}.json"
                for file in (COMMON_INFO, *map(common_library, ("loops", "kernels"))):
                    if (prebuilt[0] / file).is_file() and prebuilt[0] != target:
                        shutil.copy2(prebuilt[0] / file, target)
            (target / name).write_text(json.dumps(info, indent=2) + "\n")

    class BuildCommon(Build):
        description = "compile what includes no torch, for HTREE_PREBUILT"

    # Not in pyproject.toml: setuptools before 77 refuses the form that later ones ask for.
    license_key = "license_expression" if numbers(setuptools.__version__) >= (77, 0) else "license"
    setup(
        version=version(),
        long_description=long_description(),
        long_description_content_type="text/markdown",
        **{license_key: "Apache-2.0"},
        # Said although it is the default: an editable installation is then a plain path, which type checkers follow.
        package_dir={"": "."},
        packages=find_packages(include=["htree_ops", "htree_ops.*"]),
        package_data={
            # beside a layer stands what was decided for it, and no word of another build
            "htree_ops": ["py.typed", "tuning/results/*.json", *([] if prebuilt else ["_build_info.json"])]
        },
        ext_modules=extensions,
        cmdclass={"build_ext": Build, "build_common": BuildCommon},
    )


if __name__ == "__main__":
    main()
