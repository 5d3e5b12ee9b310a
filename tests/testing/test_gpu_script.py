"""tests/gpu.sh without a GPU: what it prints of its parts, and that it ends with them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "gpu.sh"

#: In the place of python: ends with STATUS in the part that FAILS names; LACKED is a test that found no memory there.
#: It writes its arguments to ORDER when it begins and when it ends.
STUB = """#!/usr/bin/env bash
echo "begin $*" >>"$ORDER"
trap 'echo "end $*" >>"$ORDER"' EXIT
case "$* " in
  *"--shard $FAILS "*)
    [ "$STATUS" -ne 1 ] || echo "FAILED tests/of_this_run.py"
    [ -z "$LACKED" ] || echo "OUT OF MEMORY $LACKED"
    [ -z "$FAULTED" ] || echo "FAULTED $FAULTED"
    exit "$STATUS" ;;
  *"--shard 0/"*) exit 5 ;;
  *"$FAULTY ") exit 1 ;;
  *) echo "1 passed on $CUDA_VISIBLE_DEVICES [100%]" ;;
esac
"""


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    path = tmp_path / "python"
    path.write_text(STUB)
    path.chmod(0o755)
    return path


def run(out: Path, stub: Path, fails: str, **more: str) -> subprocess.CompletedProcess[str]:
    """From a folder of its own, so that a library in build/cuda of the checkout is not put in place."""
    script = stub.parent / "tests" / "gpu.sh"
    script.parent.mkdir(exist_ok=True)
    shutil.copy(SCRIPT, script)
    given = {"JOBS": "2", "FAILS": fails, "STATUS": "1", "FAULTED": "", "FAULTY": "none", "LACKED": ""}
    given |= {"ORDER": str(stub.parent / "order"), "CUDA_MPS_PIPE_DIRECTORY": "given"}
    environment = os.environ | given | more
    command = ["bash", str(script), "test", str(out), "60", str(stub), "tests/some.py"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_it_ends_with_its_parts_and_shows_their_failures_alone(tmp_path: Path, stub: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "test-gpu-3.log").write_text("FAILED tests/of_an_earlier_run.py\n")
    begin = time.monotonic()
    found = run(out, stub, "2/2")
    assert time.monotonic() - begin < 20  # not the half minute between two reports
    assert found.returncode == 1
    assert "FAILED tests/of_this_run.py" in found.stdout
    assert "of_an_earlier_run" not in found.stdout
    assert run(out, stub, "none").returncode == 0


def test_the_parts_begin_with_different_gpus(tmp_path: Path, stub: Path) -> None:
    out = tmp_path / "out"
    found = run(out, stub, "none", JOBS="4", CUDA_VISIBLE_DEVICES="0,2,5")
    assert found.returncode == 0
    seen = [(out / f"test-gpu-{part}.log").read_text().split()[3] for part in range(1, 5)]
    assert seen == ["0,2,5", "2,5,0", "5,0,2", "0,2,5"]


@pytest.mark.parametrize(
    ("faulty", "said"),
    [("none", "passes alone"), ("test_x.py::test[a b]", r"fails alone, see \S+/faulted-1.log")],
)
def test_a_test_that_saw_a_fault_runs_again_alone(tmp_path: Path, stub: Path, faulty: str, said: str) -> None:
    test = "tests/test_x.py::test[a b]"
    found = run(tmp_path / "out", stub, "2/2", FAULTED=test, FAULTY=faulty)
    assert found.returncode == 1
    assert re.search(f"^{said}: {re.escape(test)}$", found.stdout, re.M), found.stdout


@pytest.mark.parametrize(
    ("ended", "faulty", "status", "said"),
    [
        (20, "none", 0, "out of memory beside others, pass alone: 1 tests"),
        (20, "test_x.py::test[a b]", 1, r"out of memory beside others, and fail alone, see \S+/alone.log:"),
        (1, "none", 1, "FAILED tests/of_this_run.py"),  # something else failed too, or the part did not end
    ],
)
def test_a_test_that_lacked_memory_runs_again_alone_which_decides(
    tmp_path: Path, stub: Path, ended: int, faulty: str, status: int, said: str
) -> None:
    test = "tests/test_x.py::test[a b]"
    found = run(tmp_path / "out", stub, "2/2", STATUS=str(ended), LACKED=test, FAULTY=faulty)
    assert found.returncode == status, found.stdout
    assert re.search(f"^{said}$", found.stdout, re.M), found.stdout


@pytest.mark.parametrize(("part", "status"), [("0/2", 20), ("0/2", 1), ("1/2", 3), ("2/2", 124)])
def test_a_part_that_does_not_pass_decides(tmp_path: Path, stub: Path, part: str, status: int) -> None:
    assert run(tmp_path / "out", stub, part, STATUS=str(status), LACKED="tests/test_x.py").returncode == 1


def test_parts_may_be_empty_but_not_all(tmp_path: Path, stub: Path) -> None:
    assert run(tmp_path / "out", stub, "2/2", STATUS="5").returncode == 0
    stub.write_text("#!/usr/bin/env bash\nexit 5\n")
    found = run(tmp_path / "out", stub, "none")
    assert found.returncode == 1
    assert "no test ran" in found.stderr


def test_large_tensors_come_first_and_alone(tmp_path: Path, stub: Path) -> None:
    assert run(tmp_path / "out", stub, "none").returncode == 0
    order = (tmp_path / "order").read_text().splitlines()
    assert [line.split()[0] for line in order[:2]] == ["begin", "end"]
    assert all(line.endswith("--shard 0/2") for line in order[:2])
    assert sorted(line.split()[-1] for line in order[2:]) == ["1/2", "1/2", "2/2", "2/2"]
    (tmp_path / "order").unlink()
    assert run(tmp_path / "out", stub, "none", JOBS="1").returncode == 0
    assert "--shard" not in (tmp_path / "order").read_text()
