"""The table of host times: an op beside an ATen op of as many tensors."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import host_cost


@pytest.mark.parametrize(
    ("tensors", "name"), [(2, "neg"), (3, "add"), (4, "addcmul"), (5, "cat"), (11, "cat")]
)
def test_the_aten_op_has_as_many_tensors(tensors: int, name: str) -> None:
    found, call = host_cost.plain(tensors, "cpu")
    assert found == name
    assert host_cost.tensors_of(call) == tensors


def test_tensors_in_lists_and_keywords_count() -> None:
    call = partial(torch.cat, tensors=[torch.ones(2), torch.ones(3)])
    assert host_cost.tensors_of(call) == 3


def test_a_row_for_every_op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTREE_COMMIT", "abc123")
    assert host_cost.main(["--device", "cpu", "--bursts", "1", "--csv", str(tmp_path / "host.csv")]) == 0
    rows = list(csv.DictReader((tmp_path / "host.csv").open()))
    assert [row["op"] for row in rows] == [*host_cost.ops("cpu"), *host_cost.steps("cpu")]
    for row in rows:
        assert float(row["host_us"]) == float(row["own_us"]) > 0, "a CPU launches nothing"
        assert float(row["ratio"]) == pytest.approx(float(row["own_us"]) / float(row["aten_us"]), rel=0.02)
        assert row["commit"] == "abc123"


@pytest.mark.gpu
def test_kernels_are_counted_and_launches_cost_something() -> None:
    x = torch.ones(16, device="cuda")
    assert host_cost.count_kernels(partial(torch.neg, x), "cuda") == 1
    assert host_cost.count_kernels(lambda: torch.neg(torch.neg(x)), "cuda") == 2
    assert 0.3 < host_cost.launch_us("cuda", 5) < 100
