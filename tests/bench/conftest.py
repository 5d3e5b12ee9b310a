"""What the tests of benchmarks share: a commit for their rows, and a way to run a program for them."""

import csv

import pytest

from benchmarks.harness import timing


@pytest.fixture(autouse=True)
def commit(monkeypatch):
    monkeypatch.setenv("HTREE_COMMIT", "abc123")


@pytest.fixture
def brief(monkeypatch):
    """Every call runs a few times."""
    effort = timing.Effort(warm_up_ms=0.0, rounds=1, burst=1, turn_ms=1.0, candidate_ms=1.0, sustained_ms=1.0)
    monkeypatch.setattr(timing, "QUICK", effort)
    monkeypatch.setattr(timing, "Effort", lambda **_: effort)


@pytest.fixture
def rows_of(tmp_path):
    """Runs a program on the CPU, and reads the rows that it wrote; all have the commit."""

    def run(main, flags="", *more):
        path = tmp_path / "rows.csv"
        assert main(["--device", "cpu", *flags.split(), "--csv", str(path)], *more) == 0
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert {row["commit"] for row in rows} == {"abc123"}
        return rows

    return run
