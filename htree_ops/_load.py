"""Finds and loads the compiled op library, or says why it cannot be loaded and what to do."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import torch
from torch.compiler import config as compiler_config

from htree_ops.version import __version__

PACKAGE = Path(__file__).resolve().parent
#: Whoever reads a remedy has a torch, which stays: without --no-deps pip would put the newest torch, numpy and all that
#: they need in its place.
INSTALL = "pip install --no-build-isolation --no-deps"


def layers() -> dict[str, Path]:
    """The thin layers of a wheel by what they are for: ``t211_cu13`` for torch 2.11 with CUDA 13, ``t211_cpu``."""
    return {path.stem.removeprefix("_C_"): path for path in sorted(PACKAGE.glob("_C_t*.so"))}


def wanted_layers(torch_version: str, cuda_version: str | None) -> list[str]:
    """The layers that fit a torch, best first: without the kernels for its CUDA the ops still run on the CPU."""
    numbers = re.match(r"(\d+)\.(\d+)", torch_version)
    torch_name = "t{}{}".format(*numbers.groups()) if numbers else f"t{torch_version}"
    cuda = [f"{torch_name}_cu{cuda_version.split('.')[0]}"] if cuda_version else []
    return [*cuda, f"{torch_name}_cpu"]


def library_path() -> Path | None:
    """The compiled library beside this file: ``_C``, built from source for the torch at hand, else the thin layer of a
    wheel that fits this torch, else None."""
    whole = next(iter(sorted(PACKAGE.glob("_C.*so"))), None)
    found = layers()
    fitting = [found[name] for name in wanted_layers(torch.__version__, torch.version.cuda) if name in found]
    return whole or next(iter(fitting), None)


def build_info() -> dict[str, Any]:
    """What setup.py decided when it built the library that fits this torch; empty when the file is missing."""
    library = library_path()
    layer = library.stem.removeprefix("_C") if library and library in layers().values() else ""
    path = PACKAGE / f"_build_info{layer}.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def layer_missing(found: list[str]) -> str:
    """What to do where the layers ``found`` are for other versions of torch."""
    wanted = wanted_layers(torch.__version__, torch.version.cuda)
    return (
        f"htree_ops in {PACKAGE} has no layer for torch {torch.__version__} ({' or '.join(wanted)}), only "
        f"{', '.join(found)}: install one of these versions of torch, or compile a layer for this one, which needs g++ "
        f"and no nvcc: run 'HTREE_PREBUILT={PACKAGE} {INSTALL} --force-reinstall .' in the folder of the sources of "
        f"htree_ops {__version__}"
    )


def load_library() -> None:
    """Loads ``_C`` once; raises ImportError with the reason and the remedy when that fails."""
    path = library_path()
    if path is None and layers():
        raise ImportError(layer_missing(list(layers())))
    if path is None:
        where = (
            f"this is the source tree and it has not been built in place: run '{INSTALL} -e .' "
            "or 'make test', or import the installed package from another directory"
            if (PACKAGE.parent / "setup.py").is_file()
            else f"the installation is incomplete: run '{INSTALL} --force-reinstall .' in the folder of the sources"
        )
        raise ImportError(f"htree_ops has no compiled library in {PACKAGE}; {where}")
    if hasattr(torch.ops.htree, "causal_softmax"):
        already = [p for p in torch.ops.loaded_libraries if Path(p).name.startswith("_C")]
        if str(path) in already:
            return
        raise ImportError(
            f"torch.ops.htree is already registered by another copy of htree_ops ({', '.join(already) or 'unknown'}), "
            f"and {path} cannot be loaded beside it: remove one of the two installations"
        )
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        built = build_info().get("torch", "an unknown version")
        raise ImportError(
            f"htree_ops could not load {path}: {error}. It was built against torch {built} and this is torch "
            f"{torch.__version__}; rebuild it: run '{INSTALL} --force-reinstall .' in the folder of the sources"
        ) from error
    tag_compiled_graphs()


def tag_compiled_graphs() -> None:
    """Names this build in the keys of torch's caches of compiled graphs. They know an op by its name alone: without
    the tag a graph that another build compiled is taken from the disk, and calls private ops as they were then."""
    compiler_config.cache_key_tag = ",".join(filter(None, [compiler_config.cache_key_tag, build_tag()]))


def build_tag() -> str:
    """The same for every installation of one build, another for any other."""
    return "htree_ops-" + hashlib.sha256(json.dumps(build_info(), sort_keys=True).encode()).hexdigest()[:16]
