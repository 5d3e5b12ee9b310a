"""The study of tokens in 8 and 4 bits (docs/quality.md (g))."""

import csv
import re
from itertools import islice
from pathlib import Path

from benchmarks import tree_cache_leaves as leaves

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "quality.md").read_text()


def rows_of(name: str) -> list[dict[str, str]]:
    with (ROOT / "benchmarks" / "results" / f"tree_cache_leaves_{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_errors_grow_as_bits_are_taken_away():
    error = {row["bits"]: row["output_error"] for row in islice(leaves.errors(2048, "cpu"), len(leaves.BITS))}
    assert error[16] == 0
    assert 0 < error[8] < 0.02
    assert error[8] < error[4]


def test_times_are_taken():
    rows = list(leaves.times(3000, "cpu", rounds=2))
    assert [row["bits"] for row in rows] == [16, 8, 4]
    assert all(row["microseconds"] > 0 for row in rows)


def test_the_tables_are_those_of_the_files():
    """Every row of the three tables in docs/quality.md is in the files, to its digits."""
    memory = {(r["tokens"], r["span"], r["bits"], r["format"]): r for r in rows_of("memory")}
    cells = re.findall(r"^\| ([\d ]+) \| (none|4) \| (\d+) \| (\d+) \| (.*) \|$", PAGE, re.M)
    assert len(cells) == 8
    for tokens, span, bits, kept, numbers in cells:
        setting = (tokens.replace(" ", ""), span.replace("none", "0"), bits)
        row = memory[(*setting, "rows" if kept == "128" else "pruned rows")]
        others = float(row["node_bytes"]) + float(row["mean_bytes"])
        assert numbers == " | ".join(
            (
                f"{float(row['leaf_bytes']):.0f}",
                f"{others:.0f}",
                f"{float(row['gib']):.2f}",
                f"{float(row['share']):.3f}",
                f"{float(row['step_share']):.3f}",
            )
        )
    sparsity = {"all": "0.0", "half": "0.5"}
    cells = re.findall(r"^\| (\d+) \| (all|half) \| (no|keys|both) \| (\d+) \| (0\.\d.*) \|$", PAGE, re.M)
    assert len(cells) == 11
    for bits, kept, transformed, dense, numbers in cells:
        found = [
            f"{float(r['output_error']):.3f}"
            for r in rows_of("errors_cpu")
            if (r["bits"], r["sparsity"], r["transformed"], r["dense_tokens"])
            == (bits, sparsity[kept], transformed, dense)
        ]
        assert numbers.split(" | ") == found
    cells = re.findall(r"^\| (\d+) \| (all|half) \| (no|keys|both) \| ([\d.]+ %.*) \|$", PAGE, re.M)
    assert len(cells) == 11
    for bits, kept, transformed, numbers in cells:
        rows = [
            r
            for r in rows_of("model_cpu")
            if (r["bits"], r["sparsity"], r["transformed"]) == (bits, sparsity[kept], transformed)
        ]
        copies = [f"{100 * float(r['copies_found']):.1f} %" for r in rows if r["model"] == "search"]
        assert numbers.split(" | ") == [*copies, f"{float(rows[-1]['bits_per_byte']):.4f}"]
