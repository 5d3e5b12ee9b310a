"""The rules of conftest.py, seen from outside: a run of pytest on a small test file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import htree_ops.testing
from htree_ops.testing.devices import cuda_missing, poisoned_memory, require_cuda

PACKAGE_PARENT = Path(htree_ops.testing.__file__).resolve().parents[2]
CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"

SAMPLE = """
import pytest
import torch
from hypothesis import given, settings, strategies as st

def test_device(device):
    assert torch.ones(2, device=device).sum() == 2

@pytest.mark.gpu
def test_marked():
    assert torch.cuda.is_available()

@pytest.mark.parametrize("place", ["cpu", "cuda:0"])
def test_own_parameter(place):
    assert torch.ones(2, device=place).sum() == 2

def test_plain_skip():
    pytest.skip("for a reason of its own")

@given(n=st.integers(0, 10))
def test_hypothesis_with_device(device, n):
    assert torch.zeros(n, device=device).numel() == n

def test_settings():
    chosen = settings()
    assert (chosen.deadline, chosen.print_blob, chosen.max_examples >= 100) == (None, True, True)
    assert chosen.derandomize

def test_fresh_memory(nan_memory):
    assert torch.empty(100).isnan().all()
"""


def run_pytest(folder: Path, source: str, *flags: str, **environ: str) -> tuple[int, str]:
    """Exit status and output of pytest on ``source`` with our conftest.py and no visible GPU."""
    (folder / "conftest.py").write_text(CONFTEST.read_text())
    (folder / "test_sample.py").write_text(source)
    (folder / "pytest.ini").write_text("[pytest]\n")
    inherited = {key: value for key, value in os.environ.items() if key != "HTREE_REQUIRE_CUDA"}
    path = os.pathsep.join(filter(None, [str(PACKAGE_PARENT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", *flags, "test_sample.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env={**inherited, "CUDA_VISIBLE_DEVICES": "", "CI": "1", "PYTHONPATH": path, **environ},
    )
    return done.returncode, done.stdout + done.stderr


def test_without_a_gpu_cuda_tests_are_skipped_and_counted(tmp_path):
    status, output = run_pytest(tmp_path, SAMPLE)
    assert status == 0, output
    assert "5 passed, 5 skipped" in output
    assert "devices: cpu: 5 ran, 1 skipped; cuda: 0 ran, 4 skipped (no CUDA: " in output


def test_required_cuda_fails_where_it_was_skipped(tmp_path):
    status, output = run_pytest(tmp_path, SAMPLE, HTREE_REQUIRE_CUDA="1")
    assert status == 1, output
    assert "5 passed, 1 skipped, 4 errors" in output
    assert output.count("HTREE_REQUIRE_CUDA=1 allows no skip of a CUDA test: Skipped: no CUDA") >= 4
    assert "required by HTREE_REQUIRE_CUDA=1" in output


@pytest.mark.parametrize(
    "source",
    ["import pytest\npytest.importorskip('no_such_module')\n", "def test_cpu_alone():\n    assert True\n"],
    ids=["skipped_module", "no_cuda_test"],
)
def test_required_cuda_fails_a_run_that_shows_nothing(tmp_path, source):
    status, output = run_pytest(tmp_path, source, HTREE_REQUIRE_CUDA="1")
    assert status != 0, output
    assert run_pytest(tmp_path, source)[0] in (0, 5)


def test_shards_share_out_the_tests(tmp_path):
    source = """
import pytest
@pytest.mark.parametrize("i", range(7))
def test_part(i):
    pass
def test_more_than_2_31_elements():
    pass
"""
    ran = []
    for part in range(4):
        status, output = run_pytest(tmp_path, source, "--shard", f"{part}/3")
        assert status == 0, output
        ran.append(set(re.findall(r"PASSED test_sample.py::(\S+)", output)))
    assert ran[0] == {"test_more_than_2_31_elements"}
    assert sorted(map(len, ran[1:])) == [2, 2, 3]
    assert len(set.union(*ran)) == 8
    status, output = run_pytest(tmp_path, source)
    assert "8 passed" in output
    status, output = run_pytest(tmp_path, source, "--shard", "4/3")
    assert status != 0
    assert "expected I/N with 0 <= I <= N and N >= 1, got 4/3" in output


NO_MEMORY = """
import torch
def test_lacks():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
def test_passes():
    pass
"""


@pytest.mark.parametrize(
    ("more", "options", "status"),
    [
        ("", ("--shard", "1/1"), 20),
        ("", (), pytest.ExitCode.TESTS_FAILED),
        ("", ("--shard", "1/1", "-x"), pytest.ExitCode.TESTS_FAILED),
        ("def test_fails():\n    assert False\n", ("--shard", "1/1"), pytest.ExitCode.TESTS_FAILED),
    ],
    ids=["of_a_part", "of_all", "stopped", "another_fails"],
)
def test_a_test_that_found_no_memory_is_named(tmp_path, more, options, status):
    ended, output = run_pytest(tmp_path, NO_MEMORY + more, *options)
    assert ended == status, output
    assert re.findall(r"^OUT OF MEMORY .*$", output, re.M) == ["OUT OF MEMORY test_sample.py::test_lacks"]


FAULT = """
import torch

def fault():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def test_fails():
    assert False

def test_before():
    pass

def test_a_kernel_faults():
    torch.cuda.is_initialized = lambda: True
    torch.cuda.memory_reserved = lambda: 0
    torch.cuda.synchronize = fault
    fault()

def test_after():
    fault()
"""


def test_a_fault_of_the_gpu_ends_the_run_and_no_other_failure_does(tmp_path):
    status, text = run_pytest(tmp_path, FAULT)
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "2 failed, 1 passed" in text
    assert re.findall(r"^FAULTED .*$", text, re.M) == ["FAULTED test_sample.py::test_a_kernel_faults"], text


def test_the_switch_is_checked(monkeypatch):
    for value, meaning in (("", False), ("0", False), ("1", True)):
        monkeypatch.setenv("HTREE_REQUIRE_CUDA", value)
        assert require_cuda() is meaning
    monkeypatch.setenv("HTREE_REQUIRE_CUDA", "yes")
    with pytest.raises(ValueError, match="yes"):
        require_cuda()


def test_a_cpu_build_on_a_gpu_machine_has_no_cuda(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        "htree_ops.testing.devices.build_info", lambda: {"cuda": None, "reason": "HTREE_CUDA=0"}
    )
    assert cuda_missing() == "htree_ops is built without CUDA: HTREE_CUDA=0"
    monkeypatch.setattr(
        "htree_ops.testing.devices.build_info", lambda: {"cuda": "13.0", "reason": "both agree"}
    )
    assert cuda_missing() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cuda_missing() == "torch sees no GPU"
    monkeypatch.setattr(torch.version, "cuda", None)
    assert cuda_missing() == "this torch is built without CUDA"


def test_poisoned_memory_ends_with_its_block():
    def settings() -> tuple[bool, bool, bool]:
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        )

    before = settings()
    with poisoned_memory():
        assert torch.empty(3, 4).isnan().all()
        assert torch.empty_like(torch.ones(5, dtype=torch.bfloat16)).isnan().all()
        assert (torch.empty(4, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()
    assert settings() == before
    with pytest.raises(RuntimeError, match="from inside"), poisoned_memory():
        raise RuntimeError("from inside")
    assert settings() == before
