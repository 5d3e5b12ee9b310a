"""The study of tokens in 8 and 4 bits (docs/quality.md (g))."""

from __future__ import annotations

import csv
import re
from itertools import islice
from pathlib import Path

import pytest
import torch

from benchmarks import tree_cache_leaves as leaves
from htree_ops import TreeKVCache

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "quality.md").read_text()


def rows_of(name: str) -> list[dict[str, str]]:
    with (ROOT / "benchmarks" / "results" / f"tree_cache_leaves_{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_errors_grow_as_bits_are_taken_away() -> None:
    rows = list(islice(leaves.errors(2048, "cpu"), len(leaves.SETTINGS)))
    error = {(row.bits, row.sparsity, row.transformed, row.dense_tokens): row.output_error for row in rows}
    assert error[16, 0.0, "no", 0] == 0
    assert 0 < error[8, 0.0, "no", 256] <= error[8, 0.0, "no", 0] < 0.02
    assert error[8, 0.0, "no", 0] < error[4, 0.0, "no", 0] < error[4, 0.5, "no", 0]


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_the_bytes_are_those_of_a_cache(bits: int) -> None:
    for span in (0, 4):
        row = leaves.memory_row(131_072, span, bits, 128)
        cache = TreeKVCache(
            1, 4, 128, 131_072, selection_span=span or None, num_pages=1, dtype=torch.bfloat16,
            leaf_bits=None if bits == 16 else bits,
        )  # fmt: skip
        cache.append(*torch.zeros(2, 1, 1, 4, 128).bfloat16())
        assert 256 * (row.leaf_bytes + row.node_bytes + row.mean_bytes) == cache.num_bytes().used


def test_what_the_study_puts_into_a_cache_is_what_leaf_bits_makes_of_it() -> None:
    k, v = torch.randn(2, 1, 600, 2, 64).half()
    q = torch.randn(1, 3, 4, 64).half()
    for bits in (8, 4):
        options = {"top_k": 8, "max_top_nodes": 64}
        cache = TreeKVCache(1, 2, 64, 600, leaf_bits=bits, dtype=torch.float16, **options)
        cache.append(k, v)
        assert torch.equal(leaves.attend(q, k, v, leaves.Leaves(bits=bits), **options), cache.attend(q))


def test_times_are_taken() -> None:
    rows = list(leaves.times(3000, "cpu", rounds=2))
    assert [row.bits for row in rows] == [16, 8, 4]
    assert all(row.microseconds > 0 for row in rows)


def test_the_program_prints_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert leaves.main(["memory"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 31


def test_the_tables_are_those_of_the_files() -> None:
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
    assert len(cells) == len(leaves.SETTINGS) - 1
    for bits, kept, transformed, dense, numbers in cells:
        found = [
            f"{float(r['output_error']):.3f}"
            for r in rows_of("errors_cpu")
            if (r["bits"], r["sparsity"], r["transformed"], r["dense_tokens"])
            == (bits, sparsity[kept], transformed, dense)
        ]
        assert numbers.split(" | ") == found
    cells = re.findall(r"^\| (\d+) \| (all|half) \| (no|keys|both) \| ([\d.]+ %.*) \|$", PAGE, re.M)
    assert len(cells) == len(leaves.SETTINGS) - 1  # 32 bits, and none with dense tokens
    for bits, kept, transformed, numbers in cells:
        rows = [
            r
            for r in rows_of("model_cpu")
            if (r["bits"], r["sparsity"], r["transformed"]) == (bits, sparsity[kept], transformed)
        ]
        copies = [f"{100 * float(r['copies_found']):.1f} %" for r in rows if r["model"] == "search"]
        assert numbers.split(" | ") == [*copies, f"{float(rows[-1]['bits_per_byte']):.4f}"]
