"""benchmarks/vllm_steps.py on small settings of the CPU."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from benchmarks import vllm_steps


def test_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step and a prompt by each choice; the program compares their rows with those of the cache."""
    monkeypatch.setenv("HTREE_COMMIT", "abc123")
    path = tmp_path / "rows.csv"
    small = {"T": 300, "page": 32, "H": 2, "H_kv": 1, "D": 16}
    settings = [
        vllm_steps.Setting(choice=choice, B=B, **sizes, **small)
        for choice in vllm_steps.CHOICES
        for B, sizes in ((2, {"rows": 3}), (1, {"chunk": 100}))
    ]
    assert vllm_steps.main(["--device", "cpu", "--quick", "--csv", str(path)], settings) == 0
    rows = list(csv.DictReader(path.open()))
    whats = [("step", "3"), ("prompt", "100"), ("prompt beside kept copies", "100")]
    assert [(row["what"], row["rows"]) for row in rows] == 2 * whats
    for row in rows:
        assert float(row["ratio"]) == pytest.approx(float(row["pages_us"]) / float(row["cache_us"]))


def test_other_rows_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = vllm_steps.attend_step

    def wrong(*args: Any) -> None:
        plain(*args)
        args[-2][-1, -1, -1] += 1e-3

    monkeypatch.setattr(vllm_steps, "attend_step", wrong)
    for sizes in ({"rows": 3}, {"chunk": 100}):
        setting = vllm_steps.Setting(choice="index", B=1, T=300, page=32, H=2, H_kv=1, D=16, **sizes)
        with pytest.raises(RuntimeError, match="are not those of the cache"):
            list(vllm_steps.measure(setting, "cpu", vllm_steps.timing.QUICK))
