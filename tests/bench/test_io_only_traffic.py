"""The table of a profile of the IO-only variants: units, pairs, percentages and refusals."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import io_only_traffic


def profile(path, launches, unit="Mbyte"):
    """A raw page of ncu: noise, a header, units, one line per launch with its metrics."""
    metrics = [metric for metric, _ in io_only_traffic.METRICS.values()]
    units = ["sector", "sector", unit, unit, unit]
    lines = [["ID", io_only_traffic.NAME, "Kernel Name", *metrics], ["", "", "", *units]]
    lines += [[str(i), "Some GPU", "some_kernel(int, char)", *values] for i, values in enumerate(launches)]
    text = "\n".join(",".join(f'"{cell}"' for cell in line) for line in lines)
    path.write_text(f"==PROF== Connected to process 1\n{text}\n")
    return path


PAIRS = io_only_traffic.PAIRS
COUNT = 2 * len(PAIRS)


def test_the_pairs_of_a_profile(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HTREE_COMMIT", "abc123")
    launches = [["1,000,000", "0", "4", "2", "0"], ["1,000,000", "7", "3", "2.02", "0"]] * len(PAIRS)
    path = profile(tmp_path / "traffic.csv", launches)
    assert io_only_traffic.main(["--parse", str(path), "--json", str(tmp_path / "traffic.json")]) == 0
    gpu, pairs = io_only_traffic.parse(path)
    assert gpu == "Some GPU"
    assert [pair.kernel for pair in pairs] == list(PAIRS)
    first = pairs[0]
    assert first.full == {"asked": 32e6, "found in L1": 0.0, "L2": 4e6, "DRAM read": 2e6, "DRAM written": 0.0}
    assert [first.percent(c) for c in first.full] == [0.0, 0.0, -25.0, pytest.approx(1.0), 0.0]
    table = capsys.readouterr().out
    assert "32.00     32.00   +0.00 %" in table
    assert "4.00      3.00  -25.00 %" in table
    written = json.loads((tmp_path / "traffic.json").read_text())
    place = {"gpu": "Some GPU", "torch": torch.__version__, "commit": "abc123", "baseline": "full kernel"}
    assert written[0] == place | {"kernel": "compute_scores", "full": first.full, "io_only": first.io_only}


@pytest.mark.parametrize(
    ("launches", "unit", "complaint"),
    [
        ([], "byte", "expected the CSV of ncu"),
        ([["1"] * 5], "byte", f"expected {COUNT} launches, found 1"),
        ([["1"] * 5] * COUNT, "furlong", "unknown unit furlong"),
    ],
)
def test_a_foreign_profile_is_one_line_and_status_two(tmp_path, capsys, launches, unit, complaint):
    path = profile(tmp_path / "traffic.csv", launches, unit)
    assert io_only_traffic.main(["--parse", str(path)]) == 2
    message = capsys.readouterr().err
    assert complaint in message
    assert message.count("\n") == 1


def test_the_metrics_for_the_profiler(capsys):
    assert io_only_traffic.main(["--metrics"]) == 0
    assert capsys.readouterr().out.strip().split(",") == [
        metric for metric, _ in io_only_traffic.METRICS.values()
    ]
