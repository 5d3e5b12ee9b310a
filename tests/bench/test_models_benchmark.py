"""benchmarks/models.py at a tiny size: every way computes the same while sequences are short, and has its rows."""

from __future__ import annotations

import csv
import functools
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import models

TINY = models.Size(1, 32, 48, 4, 2, 61)
HERE = [way for way in models.WAYS if not way.liger]


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile traces, and no compiler runs."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("checkpoint_from", [8, 100])
def test_every_way_trains_the_same_model(checkpoint_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "CHECKPOINT_FROM", checkpoint_from)
    losses = {}
    for way in HERE:
        step = models.make_call(way, "train", TINY, 40, "cpu", torch.float32)
        losses[way.name] = [float(step()) for _ in range(3)]
    wanted = losses["eager + SDPA"]
    assert wanted[0] != wanted[2]
    for curve in losses.values():
        assert curve == pytest.approx(wanted, rel=1e-4)


@pytest.mark.usefixtures("uncompiled")
def test_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HTREE_COMMIT", "abc123")
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    short = models.Way("ours, short", htree={"max_top_nodes": 16, "top_k": 2})
    path = tmp_path / "models.csv"
    call = ["--device", "cpu", "--tokens", "24", "--rounds", "1", "--csv", str(path)]
    assert models.main(call, TINY, (models.WAYS[2], *HERE[:2], short)) == 0
    assert "Liger + SDPA: skipped, liger_kernel is not installed" in capsys.readouterr().err
    rows = list(csv.DictReader(path.open()))
    ways = ["eager + SDPA", "torch.compile + SDPA", "ours, short"]
    assert [(row["phase"], row["way"]) for row in rows] == [
        (phase, way) for phase in ("prefill", "train") for way in ways
    ]
    for row in rows:
        assert row["same_function"] == str(row["way"] != "ours, short")
        assert float(row["tokens_per_s"]) == pytest.approx(24e3 / float(row["median_ms"]))
        assert (row["commit"], row["checkpointed"], row["peak_bytes"]) == ("abc123", "False", "")


def test_a_look_takes_one_length_and_compiles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTREE_COMMIT", "abc123")
    path = tmp_path / "models.csv"
    call = ["--device", "cpu", "--tokens", "24", "48", "--phase", "prefill", "--quick", "--csv", str(path)]
    assert models.main([*call, "--way", "ours, stride (1|16)$|SDPA$"], TINY, HERE) == 0
    rows = list(csv.DictReader(path.open()))
    ways = ["eager + SDPA", "ours, stride 1", "ours, stride 16"]
    assert [(row["tokens"], row["way"]) for row in rows] == [("24", way) for way in ways]


def test_another_number_of_heads_as_wide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTREE_COMMIT", "abc123")
    path = tmp_path / "models.csv"
    call = ["--device", "cpu", "--tokens", "24", "--phase", "train", "--quick", "--csv", str(path)]
    size = models.replace(TINY, hidden_size=64)
    assert models.main([*call, "--heads", "8", "1", "--way", "index, stride 1|eager"], size, HERE) == 0
    rows = list(csv.DictReader(path.open()))
    assert [(row["way"], row["heads"], row["kv_heads"]) for row in rows] == [
        (way, "8", "1") for way in ("eager + SDPA", "ours, index, stride 1")
    ]


@pytest.mark.gpu
def test_a_row_on_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "models.csv"
    size = models.Size(1, 256, 512, 4, 2, 61)
    assert models.main(["--tokens", "256", "--rounds", "1", "--csv", str(path)], size, HERE[:4]) == 0
    rows = list(csv.DictReader(path.open()))
    assert len(rows) == 8
    assert all(float(row["median_ms"]) > 0 and int(row["peak_bytes"]) > 0 for row in rows)
