"""benchmarks/tree_index.py on small settings of the CPU."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from benchmarks import tree_index


def test_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTREE_COMMIT", "abc123")
    path = tmp_path / "rows.csv"
    small = tree_index.Setting(300, 2, H=2, H_kv=1, D=8)
    both = (small, tree_index.Setting(300, 2, 4, H=2, H_kv=1, D=8, open_next=True, backward=False))
    assert tree_index.main(["--device", "cpu", "--rounds", "1", "--csv", str(path)], both) == 0
    rows = list(csv.DictReader(path.open()))
    assert [(row["direction"], row["selection_stride"]) for row in rows] == [
        ("forward", "1"),
        ("backward", "1"),
        ("forward", "4"),
    ]
    for row in rows:
        assert float(row["of_dense"]) == pytest.approx(float(row["sustained_ms"]) / float(row["dense_ms"]))
        assert (row["commit"], row["top_k"]) == ("abc123", "2")


def test_dense_attention_is_what_a_tree_that_opens_all_computes() -> None:
    setting = tree_index.Setting(100, 8, H=2, H_kv=1, D=8)
    tensors = tree_index.make_tensors(setting, "cpu")
    wanted = tree_index.ours(setting)(*tensors)
    torch.testing.assert_close(tree_index.dense(*tensors), wanted, rtol=1e-4, atol=1e-5)
