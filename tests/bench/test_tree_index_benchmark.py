"""benchmarks/tree_index.py on small settings of the CPU."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import tree_index, tree_index_decode


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
        assert (row["commit"], row["top_k"], row["nsa_ms"]) == ("abc123", "2", "")
    call = ["--device", "cpu", "--rounds", "1", "--case", "stride 4", "--csv", str(path)]
    assert tree_index.main(call, both) == 0
    assert [row["selection_stride"] for row in csv.DictReader(path.open())] == ["4"]


def test_nsa_is_called_for_as_many_tokens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    setting = tree_index.Setting(8192, 64, H=64)
    monkeypatch.setitem(sys.modules, "fla.ops.nsa", None)
    assert tree_index.nsa_of(setting, "cuda") is None
    assert "NSA: skipped" in capsys.readouterr().err
    given = SimpleNamespace(parallel_nsa=lambda q, k, v, **options: options)
    for name in ("fla", "fla.ops", "fla.ops.nsa"):
        monkeypatch.setitem(sys.modules, name, given)
    found = tree_index.nsa_of(setting, "cuda")
    assert found is not None
    options: dict[str, object] = found(*tree_index.make_tensors(tree_index.Setting(8, 64, H=64), "cpu"))  # type: ignore[assignment]
    assert (options["block_counts"], options["block_size"]) == (16, 64)
    assert tree_index.nsa_of(tree_index.Setting(8192, 64), "cuda") is None


def test_bounds() -> None:
    """By hand: rows from 32 on gather up to four nodes of 16, of their own what is before; index keys of a step."""
    setting = tree_index.Setting(128, 4, H=8, H_kv=4, D=128, M=32)
    tokens = sum(min(t // 16, 3) * 16 + t % 16 + 1 for t in range(32, 128))
    gathered = 4 * 512 * tokens
    assert tree_index.least_ms(setting, backward=False) == pytest.approx(gathered / 9.3e9, rel=1e-6)
    assert tree_index.least_ms(setting, backward=True) == pytest.approx(
        gathered * (1 + 2 / 16) / 9.3e9, rel=1e-6
    )
    step = tree_index_decode.Setting(2, 131_072)
    bytes_of_step = 2 * 4 * (131_072 * 33 + (8192 + 2048) * 512)
    assert tree_index_decode.least_us(step) == pytest.approx(bytes_of_step / 4.3e6)


def test_dense_attention_is_what_a_tree_that_opens_all_computes() -> None:
    setting = tree_index.Setting(100, 8, H=2, H_kv=1, D=8)
    tensors = tree_index.make_tensors(setting, "cpu")
    wanted = tree_index.ours(setting)(*tensors)
    torch.testing.assert_close(tree_index.dense(*tensors), wanted, rtol=1e-4, atol=1e-5)
