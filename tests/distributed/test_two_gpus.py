"""tests/two_gpus.sh without a GPU: its arguments, which steps run, and what becomes of one that fails or hangs."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
import same_losses

SCRIPT = Path(__file__).resolve().parents[1] / "two_gpus.sh"
#: In place of Python: says what it is called with; a word of SLEEPS makes it hang, and one of FAILS end with status 3.
STUB = """#!/usr/bin/env bash
echo "process $$ called: $*"
for word in $SLEEPS; do [[ "$*" != *"$word"* ]] || sleep 60; done
for word in $FAILS; do [[ "$*" != *"$word"* ]] || exit 3; done
"""


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    path = tmp_path / "python"
    path.write_text(STUB)
    path.chmod(0o755)
    return path


def run(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"DEVICE": "cpu", "SLEEPS": "", "FAILS": ""} | variables
    return subprocess.run(
        ["bash", str(SCRIPT), *map(str, arguments)], env=env, capture_output=True, text=True, timeout=60
    )


def summary(out: Path) -> dict[str, str]:
    """What became of each step."""
    lines = (line.split(": ", 1) for line in (out / "summary.txt").read_text().splitlines())
    return {name: outcome.rsplit(",", 1)[0] for name, outcome in lines}


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (["out"], {}, "two or three arguments are required, got 1"),
        (["out", "1", "python", "more"], {}, "two or three arguments are required, got 4"),
        (["out", "soon"], {}, "LIMIT must be a number of seconds, got 'soon'"),
        (["out", "0"], {}, "LIMIT must be a number of seconds, got '0'"),
        (["/dev/null/out", "1"], {}, "OUT cannot be made: '/dev/null/out'"),
        (["out", "1"], {"DEVICE": "tpu"}, "DEVICE must be cuda or cpu, got 'tpu'"),
        (
            ["out", "1"],
            {"STEPS": "bars noise"},
            "STEPS may hold devices, ranks, bars and training, got 'noise'",
        ),
    ],
)
def test_wrong_arguments_end_in_one_line(
    arguments: list[str], variables: dict[str, str], message: str, tmp_path: Path
) -> None:
    arguments = [str(tmp_path / x) if x == "out" else x for x in arguments]
    found = run(*arguments, **variables)
    assert found.returncode == 2
    assert f"two_gpus.sh: {message}; usage: two_gpus.sh OUT LIMIT [PYTHON]" in found.stderr


def test_fewer_than_two_gpus_are_refused_before_anything_runs(tmp_path: Path, stub: Path) -> None:
    stub.write_text("#!/usr/bin/env bash\necho 1\n")
    found = run(tmp_path / "out", "5", stub, DEVICE="cuda")
    assert found.returncode == 1
    assert "two GPUs are required, torch sees 1" in found.stderr
    assert not (tmp_path / "out" / "summary.txt").exists()


def test_every_step_runs_on_two_ranks(tmp_path: Path, stub: Path) -> None:
    out = tmp_path / "out"
    found = run(out, "20", stub)
    assert found.returncode == 0, found.stderr
    names = ["bars", *(f"training-{name}" for name in ("one", "data", "context", "tensor", "losses"))]
    assert summary(out) == dict.fromkeys(names, "passed")
    ranks = " called: -m torch.distributed.run --standalone --nproc-per-node"
    assert f"{ranks} 2 benchmarks/context_parallel.py --csv {out}/" in (out / "bars.log").read_text()
    assert f"{ranks} 1 examples/train_distributed.py" in (out / "training-one.log").read_text()
    tensor = (out / "training-tensor.log").read_text()
    assert "--learning-rate 0.0003 " in tensor
    assert "--tensor-parallel 2" in tensor


def test_a_step_that_fails_or_hangs_leaves_the_others(tmp_path: Path, stub: Path) -> None:
    out = tmp_path / "out"
    found = run(out, "1", stub, SLEEPS="context_parallel.py", FAILS="data-parallel")
    assert found.returncode == 1
    assert summary(out)["bars"] == "STOPPED after LIMIT=1 seconds"
    assert summary(out)["training-data"] == "FAILED with status 3"
    assert summary(out)["training-losses"] == "passed"
    losses = (out / "training-losses.log").read_text()
    assert f"{out}/one {out}/context {out}/tensor" in losses, losses


def test_a_signal_ends_the_step_too(tmp_path: Path, stub: Path) -> None:
    env = os.environ | {"DEVICE": "cpu", "STEPS": "bars", "SLEEPS": "context_parallel.py", "FAILS": ""}
    script = subprocess.Popen(["bash", str(SCRIPT), str(tmp_path), "50", str(stub)], env=env)
    log = tmp_path / "bars.log"
    end = time.monotonic() + 20
    while not (log.exists() and "process" in log.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    script.terminate()
    assert script.wait(20) == 130
    step = int(log.read_text().split()[1])
    while Path(f"/proc/{step}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{step}").exists()


def test_runs_are_compared_with_a_run_that_exists(tmp_path: Path, stub: Path) -> None:
    found = run(tmp_path, "20", stub, STEPS="training", FAILS="--nproc-per-node")
    assert found.returncode == 1
    assert summary(tmp_path) == {"training-one": "FAILED with status 3"}


@pytest.mark.parametrize(
    ("other", "rate", "status"),
    [
        ([8.0, 7.0, 6.004], 0.0003, 0),
        ([8.0, 7.0, 6.02], 0.0003, 1),
        ([8.0, 7.02, 6.0], 0.0003, 1),
        ([8.0, 7.0], 0.0003, 1),
        ([8.0, float("nan"), 6.0], 0.0003, 1),
        ([8.0, 7.0, 6.0], 0.003, 1),
    ],
)
def test_losses_of_another_run(
    other: list[float], rate: float, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder, losses, used in zip(folders, ([8.0, 7.0, 6.0], other), (0.0003, rate), strict=True):
        folder.mkdir()
        content = {
            "settings": {"learning_rate": used},
            "train_bits_per_byte": losses,
            "seconds_per_step": [1.0, 0.25, 0.25],
        }
        (folder / "history.json").write_text(json.dumps(content))
    assert same_losses.main([str(x) for x in folders]) == status
    assert "steps of 250.0 ms" in capsys.readouterr().out


def test_a_run_that_learned_nothing_is_no_measure(tmp_path: Path) -> None:
    content = {"settings": {}, "train_bits_per_byte": [8.0, 8.0], "seconds_per_step": [1.0, 1.0]}
    (tmp_path / "history.json").write_text(json.dumps(content))
    assert same_losses.main([str(tmp_path)] * 2) == 1
    assert same_losses.main([str(tmp_path)]) == 2
