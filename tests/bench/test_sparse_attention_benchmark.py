"""benchmarks/sparse_attention.py over a small file of lists."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import sparse_attention
from benchmarks.harness import timing
from tests.support.cases import normal


@pytest.fixture
def lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Those of two layers with one head: each query reads its own block and the first one, or the one before."""
    monkeypatch.setenv("HTREE_COMMIT", "abc123")
    usual = sparse_attention.BENCHMARK_CASES["cpu"][0]
    small = replace(usual, T=512, H=2, H_kv=1, K=8, V=8)
    monkeypatch.setitem(sparse_attention.BENCHMARK_CASES, "cpu", [small])
    own = np.arange(256).reshape(1, 4, 64, 1, 1) // 16
    both = np.concatenate([np.concatenate((own, other), -1) for other in (0 * own, own - 1)])
    path = tmp_path / "lists.npz"
    np.savez(path, lists=both.astype(np.int16), starts=np.arange(0, 256, 64), context=256)
    return path


def test_rows(lists: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    brief = timing.Effort(warm_up_ms=0.0, rounds=1, burst=1, turn_ms=1.0, candidate_ms=1.0, sustained_ms=1.0)
    monkeypatch.setattr(timing, "QUICK", brief)
    path = tmp_path / "rows.csv"
    call = ["--device", "cpu", "--quick", "--lists", str(lists), "--case", "s=1 ", "--csv", str(path)]
    assert sparse_attention.main(call) == 0
    rows = list(csv.DictReader(path.open()))
    methods = ["dense", "sparse_attention", "tree_attention, without its choice"]
    assert [(row["case"].split()[-1], row["direction"], row["method"]) for row in rows] == [
        (kind, direction, method)
        for kind in ("trained", "random")
        for direction in ("forward", "backward")
        for method in methods
    ]
    unions = [float(x) for x in rows[0]["unions"].split()]
    assert len(unions) == 6
    assert unions == sorted(unions)


def test_the_lists_of_the_file_are_read(lists: Path) -> None:
    """Sequences take turns; the tree opens the same blocks: with all of them open it is dense attention."""
    case = next(x for x in sparse_attention.cases_of_file(lists, "cpu") if x.selection_stride == 4)
    assert (case.B, case.T, case.n) == (2, 256, 2)
    blocks = sparse_attention.trained_blocks(case, lists, "cpu")
    assert blocks[:, -1, 0].tolist() == [[15, 0], [15, 14]]
    inputs = [normal((2, 64, heads, 8), torch.float32, "cpu", i) for i, heads in enumerate((2, 1, 1))]
    every = torch.arange(4, dtype=torch.int32).expand(2, 16, 1, 4)
    tree = sparse_attention.tree_over(replace(case, T=64, n=4), every, *inputs[:2])
    torch.testing.assert_close(tree(*inputs), sparse_attention.dense(*inputs), rtol=1e-4, atol=1e-5)
