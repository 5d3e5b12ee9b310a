"""Writes a variant that HF ``kernels`` loads from a folder: the package and its libraries for one torch.

``get_local_kernel(Path(FOLDER))``, or ``LOCAL_KERNELS=org/htree-ops=FOLDER`` and ``get_kernel("org/htree-ops",
version=1)``. A loaded kernel shares its process with others, an installed htree_ops among them: its ops have a
namespace of their own, and its modules import each other by relative names. ``make kernels-folder`` compiles such a
thin layer and calls this.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import platform
import re
import shutil
from pathlib import Path

import torch

PACKAGE = Path(__file__).resolve().parents[1] / "htree_ops"
#: What a user of the kernel imports; these files and all that they import are a variant.
ENTRANCES = ("htree_ops", "htree_ops.compat", "htree_ops.distributed", "htree_ops.integrations.transformers")
#: Of the interface of a kernel: raised when a call that worked no longer does.
INTERFACE = 1


def namespace_of(common_hash: str) -> str:
    """The ops' namespace of a folder: the same for every torch and device, another for other sources."""
    return f"htree_ops_{common_hash[:8]}"


def hash_in(library: Path) -> str:
    """The hash in the name of a common library."""
    return library.stem.rpartition("-")[2]


def relative_text(text: str, depth: int, namespace: str) -> str:
    """A module's text, ``depth`` packages below the top, that neither imports htree_ops by its name nor calls the ops
    of an installed one."""
    dots = "." * (depth + 1)
    text = re.sub(r"^(\s*)from htree_ops\.([\w.]+) import", rf"\1from {dots}\2 import", text, flags=re.M)
    text = re.sub(r"^(\s*)from htree_ops import", rf"\1from {dots} import", text, flags=re.M)
    text = re.sub(r"\btorch\.ops\.htree\b", f"torch.ops.{namespace}", text)
    return re.sub(r'(["\'])htree::', rf"\1{namespace}::", text)


def imports(text: str) -> list[str]:
    """The modules of htree_ops that a text may import by their absolute names, and the packages around them."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    parts = [name.split(".") for name in found]
    return [".".join(p[:end]) for p in parts if p[0] == "htree_ops" for end in range(1, len(p) + 1)]


def file_of(module: str) -> Path | None:
    """The file of a module, from the package on; None for a name within a module."""
    path = "/".join(module.split(".")[1:])
    return next(
        (Path(f) for f in (f"{path}.py", f"{path}/__init__.py".lstrip("/")) if (PACKAGE / f).is_file()), None
    )


def modules() -> list[Path]:
    """The files of the package that a variant holds, from the package on."""
    found: set[Path] = set()
    waiting = list(ENTRANCES)
    while waiting:
        path = file_of(waiting.pop())
        if path is not None and path not in found:
            found.add(path)
            waiting += imports((PACKAGE / path).read_text())
    return sorted(found)


def variant_name(torch_version: str, cuda: str | None) -> str:
    """``torch211-cxx11-cu130-x86_64-linux``."""
    major, minor = torch_version.split(".")[:2]
    device = f"cu{cuda.replace('.', '')}" if cuda else "cpu"
    return f"torch{major}{minor}-cxx11-{device}-{platform.machine()}-linux"


def write_variant(libraries: Path, folder: Path) -> Path:
    """The variant for this torch under ``folder``/build, with the one thin layer and the common libraries that
    ``libraries`` holds."""
    (layer,) = libraries.glob("_C_t*.so")
    info = json.loads((libraries / f"_build_info{layer.stem.removeprefix('_C')}.json").read_text())
    common = sorted(libraries.glob("libhtree_*.so"))
    # a layer without CUDA needs no kernels
    common = [path for path in common if info["cuda"] or "kernels" not in path.name]
    namespace = namespace_of(hash_in(common[0]))
    if namespace.encode() not in layer.read_bytes():
        raise SystemExit(f"{layer} was not compiled with HTREE_NAMESPACE={namespace}")
    cuda = torch.version.cuda if info["cuda"] else None
    target = folder / "build" / variant_name(torch.__version__, cuda)
    shutil.rmtree(target, ignore_errors=True)
    for path in modules():
        text = relative_text((PACKAGE / path).read_text(), len(path.parts) - 1, namespace)
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_text(text)
    for path in common:
        shutil.copy(path, target)
    shutil.copy(layer, target / "_C.abi3.so")
    shutil.copytree(PACKAGE / "tuning" / "results", target / "tuning" / "results")
    (target / "_build_info.json").write_text(json.dumps(info, indent=2) + "\n")
    backend: dict[str, object] = {"type": "cuda" if cuda else "cpu"}
    if cuda:
        backend["archs"] = re.split(r"[; ]", info["arch_list"])
    content = hashlib.sha256(layer.read_bytes()).hexdigest()[:8]
    metadata = {
        "id": f"_htree_ops_{'cuda' if cuda else 'cpu'}_{content}",
        "name": "htree-ops",
        "version": INTERFACE,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": backend,
    }
    (target / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return target


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("libraries", type=Path, help="folder with a thin layer and the common libraries")
    parser.add_argument(
        "folder", type=Path, nargs="?", help="what get_local_kernel is given; absent: print a namespace"
    )
    arguments = parser.parse_args()
    if arguments.folder is None:
        (loops,) = arguments.libraries.glob("libhtree_loops-*.so")
        print(namespace_of(hash_in(loops)))
    else:
        print(write_variant(arguments.libraries, arguments.folder))


if __name__ == "__main__":
    main()
