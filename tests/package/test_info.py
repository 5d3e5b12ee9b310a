"""``python -m htree_ops info``: complete, true, and readable where parts are missing."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import htree_ops
from htree_ops import _load, info

BUILT = {
    "version": "0.1.0",
    "torch": "2.11.0+cpu",
    "cuda": None,
    "reason": "HTREE_CUDA=0",
    "arch_list": None,
    "compiler": "c++",
    "commit": "0123abcd",
}
KEYS = {
    "version",
    "python",
    "torch",
    "torch_cuda",
    "build",
    "gpus",
    "ops",
    "kernel_configurations",
    "host_error",
}


@pytest.mark.parametrize("arguments", [["--json"], []], ids=["json", "text"])
def test_command(arguments):
    package_parent = Path(info.__file__).resolve().parents[1]
    command = [sys.executable, "-m", "htree_ops", "info", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=package_parent, timeout=120)
    assert done.returncode == 0, done.stderr
    if arguments:
        facts = json.loads(done.stdout)
        assert set(facts) == KEYS
        assert facts["torch"] == torch.__version__
        assert facts["build"]["torch"] == torch.__version__
        assert len(facts["gpus"]) == torch.cuda.device_count()
        assert {"causal_softmax", "causal_softmax.out", "causal_softmax_"} <= set(facts["ops"])
    else:
        assert f"torch            {torch.__version__}" in done.stdout
        assert "\n  causal_softmax.out\n" in done.stdout


def test_ops_are_those_of_the_dispatcher():
    library = torch.library.Library("htree", "FRAGMENT")
    before = set(info.op_names())
    library.define("info_probe(Tensor x) -> Tensor")
    library.define("info_probe.out(Tensor x, *, Tensor(a!) out) -> ()")
    assert set(info.op_names()) - before == {"info_probe", "info_probe.out"}
    library._destroy()
    assert set(info.op_names()) == before


def test_cpu_build_says_why(monkeypatch):
    monkeypatch.setattr(info, "build_info", lambda: BUILT)
    text = info.format_text(info.collect())
    assert "CUDA kernels     none: HTREE_CUDA=0" in text
    assert "built against    torch 2.11.0+cpu with c++, commit 0123abcd" in text


def test_cuda_build_names_architectures_gpus_and_configurations(monkeypatch):
    host = SimpleNamespace(
        kernel_configurations=lambda: {"causal_softmax": ["128x8", "1024x8"], "rope": ["8"]}
    )
    built = {**BUILT, "cuda": "13.0", "reason": "toolkit and torch agree", "arch_list": "8.0+PTX;9.0a"}
    monkeypatch.setattr(info, "build_info", lambda: built)
    monkeypatch.setattr(info, "_host_module", lambda: (host, None))
    gpus = [{"name": "Some GPU", "capability": [9, 0], "multiprocessors": 132}]
    monkeypatch.setattr(info, "_gpus", lambda: gpus)
    facts = info.collect()
    assert json.loads(json.dumps(facts)) == facts
    text = info.format_text(facts)
    assert "CUDA kernels     CUDA 13.0, architectures 8.0+PTX;9.0a" in text
    assert "GPU              Some GPU (capability [9, 0], multiprocessors 132)" in text
    assert "configurations   3\n  causal_softmax\n    128x8\n    1024x8\n  rope\n    8" in text


def test_missing_parts_are_said_not_raised(monkeypatch):
    monkeypatch.setattr(info, "build_info", dict)
    monkeypatch.setattr(info, "_host_module", lambda: (None, "No module named 'htree_ops._host'"))
    text = info.format_text(info.collect())
    assert "none: the library says nothing about its build" in text
    assert "unknown: No module named 'htree_ops._host'" in text


@pytest.mark.parametrize(
    ("capability", "architectures", "code"),
    [
        ((9, 0), "8.0+PTX;9.0a", "sm_90a machine code, tuned and measured"),
        ((8, 0), "8.0+PTX;9.0a", "sm_80 machine code, compiled and not measured"),
        ((8, 6), "8.0+PTX;8.9;9.0a", "sm_80 machine code, compiled and not measured"),
        ((8, 9), "8.0+PTX;8.9;9.0a", "sm_89 machine code, compiled and not measured"),
        ((12, 1), "8.0+PTX 9.0a 12.0", "sm_120 machine code, compiled and not measured"),
        (
            (10, 0),
            "8.0+PTX;9.0a",
            "the PTX of 8.0 as the driver compiles it at first use, compiled and not measured",
        ),
        ((7, 5), "8.0+PTX;9.0a", "nothing: no architecture of the build fits it"),
        ((10, 3), "9.0a", "nothing: no architecture of the build fits it"),
    ],
)
def test_the_code_that_a_gpu_runs(capability, architectures, code):
    assert info.code_for(capability, architectures) == code


def test_text_says_what_a_gpu_runs():
    gpu = {"name": "NVIDIA A100", "capability": [8, 0]}
    built = {**BUILT, "cuda": "13.0", "arch_list": "8.0+PTX;9.0a"}
    text = info.format_text({**info.collect(), "build": built, "gpus": [gpu]})
    assert "\n  runs           sm_80 machine code, compiled and not measured\n" in text


def test_build_info_matches_the_library():
    built = _load.build_info()
    assert built["version"] == htree_ops.__version__
    assert set(built) == {
        "version",
        "torch",
        "cuda",
        "reason",
        "arch_list",
        "compiler",
        "commit",
        "source_hashes",
    }
