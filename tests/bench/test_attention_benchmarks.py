"""benchmarks/varlen_batches.py and benchmarks/selection_span.py at tiny sizes: their rows, and fewer with --quick."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import selection_span, varlen_batches
from benchmarks.harness import timing


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call runs a few times."""
    brief = timing.Effort(warm_up_ms=0.0, rounds=1, burst=1, turn_ms=1.0, candidate_ms=1.0, sustained_ms=1.0)
    monkeypatch.setattr(timing, "QUICK", brief)
    monkeypatch.setattr(timing, "Effort", lambda rounds: brief)
    monkeypatch.setenv("HTREE_COMMIT", "abc123")


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("quick", [False, True])
def test_rows_of_packed_documents(
    quick: bool, bounded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"H": 2, "H_kv": 1, "K": 8, "V": 8, "top_k": 2, "M": 16}
    spread = replace(varlen_batches.BENCHMARK_CASES["cpu"][0], lengths=(40, 5, 17, 9, 40), **sizes)
    cases = [
        spread,
        replace(spread, name="equal", lengths=(24,) * 5),
        replace(spread, name="dense", lengths=(9, 16)),
    ]
    monkeypatch.setitem(varlen_batches.BENCHMARK_CASES, "cpu", cases)
    path = tmp_path / "rows.csv"
    options = [*(["--quick"] if quick else []), *(["--bounded"] if bounded else [])]
    assert varlen_batches.main(["--device", "cpu", "--csv", str(path), *options]) == 0
    rows = rows_of(path)
    assert {row["grouping"] for row in rows} == {"auto, as many offsets as tokens" if bounded else "auto"}
    batches = {"spread": "sum of full batches", "equal": "tree_attention", "dense": "SDPA by document"}
    assert [(row["batch"], row["direction"], row["yardstick"]) for row in rows] == [
        (name, direction, yardstick)
        for name, yardstick in batches.items()
        for direction in ("forward", "backward")
    ]
    counts = [2, 2, 1] if quick else [5, 5, 2]
    assert [int(row["documents"]) for row in rows[::2]] == counts
    for row in rows:
        assert float(row["multiple"]) == pytest.approx(float(row["median_ms"]) / float(row["yardstick_ms"]))
        assert row["commit"] == "abc123"


def test_what_packed_documents_are_compared_with_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(
        varlen_batches.BENCHMARK_CASES["cpu"][0],
        lengths=(12, 12),
        H=2,
        H_kv=1,
        K=8,
        V=8,
        top_k=2,
        M=16,
        rope_base=None,
    )
    inputs, cu = case.make_qkv("cpu"), case.make_offsets("cpu")[0]
    packed = varlen_batches.attend_packed(case, cu, max(case.lengths), "auto", *inputs)
    for other in (
        varlen_batches.attend_batch(case, *inputs),
        varlen_batches.attend_densely(case, cu, *inputs),
    ):
        assert (packed - other).abs().max() < 1e-5


@pytest.mark.parametrize("quick", [False, True])
def test_rows_of_spans(quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(selection_span.SETTINGS, "cpu", ((64, 16, (4, 2), 1), (128, 4, (4,), 1)))
    monkeypatch.setitem(selection_span.SIZES["cpu"], "top_k", 2)
    monkeypatch.setitem(selection_span.SIZES["cpu"], "M", 32)
    path = tmp_path / "rows.csv"
    assert selection_span.main(["--device", "cpu", "--csv", str(path), *(["--quick"] if quick else [])]) == 0
    rows = rows_of(path)
    expected = [("64", ""), ("64", "4"), ("64", "2"), ("128", ""), ("128", "4")]
    assert [(row["T"], row["selection_span"]) for row in rows] == expected[: 3 if quick else 5]
    for row in rows:
        assert (float(row["multiple"]) == 1) == (row["selection_span"] == "")
        assert (row["gpu"], row["peak_bytes"], row["commit"]) == ("none", "", "abc123")


def test_rows_of_open_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(selection_span.SETTINGS, "cpu", ((256, 16, (4, 2), 1), (512, 4, (4,), 1)))
    monkeypatch.setitem(selection_span.SIZES["cpu"], "top_k", 3)
    monkeypatch.setitem(selection_span.SIZES["cpu"], "M", 32)
    path = tmp_path / "rows.csv"
    assert selection_span.main(["--device", "cpu", "--csv", str(path), "--quick", "--open-next"]) == 0
    rows = rows_of(path)
    assert [(row["T"], row["selection_span"]) for row in rows] == [("256", ""), ("256", "2")]
    for row in rows:
        assert float(row["multiple"]) == pytest.approx(float(row["open_next_ms"]) / float(row["plain_ms"]))
