"""The report: a page that needs nothing from outside, pictures, and refusals in one line."""

from __future__ import annotations

import dataclasses
import json
import re
import sys

import pytest
from test_bench_suite import row

from benchmarks import __main__ as program
from benchmarks.harness import plots, report, results

pytest.importorskip("matplotlib")

SHAPES = "B=1 T={T} H=32/4 K=128 V=128 r=16 k=512 M=8192 s={s}"
TREE = [
    row(
        op="tree_attention",
        case=f"T{length}_s{stride}",
        shapes=SHAPES.format(T=length, s=stride),
        bytes=600_000_000,
        flops=4 * 10**12,
        tflops=64.0,
        median_us=length / 1000 * stride,
        baseline=baseline,
        baseline_computes_the_same=False,
        baseline_median_us=length / 4000,
    )
    for length in (32768, 65536)
    for stride in (1, 16)
    for baseline in ("dense SDPA, cuDNN", "dense SDPA, FlashAttention-2")
]
ROWS = [
    row(),
    row(baseline="torch.compile", speedup=1.5),
    row(op="causal_softmax", speedup=0.7, flops=10**9, tflops=8.0, graph_us=120.0, baseline_graph_us=84.0),
    *TREE,
    row(gpu="none", cpu="AMD EPYC(TM), 2 threads", case="<b>cpu & co</b>", ceiling_gb_per_s=20.0),
]


def png_size(data: bytes) -> tuple[int, int]:
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_a_page_and_pictures_per_machine(tmp_path, capsys):
    results.write_json(tmp_path / "in" / "a.json", ROWS)
    (tmp_path / "in" / "io.json").write_text(json.dumps({"kernels": [], "rows": []}))
    assert program.main(["report", str(tmp_path / "in"), "--out", str(tmp_path / "out")]) == 0
    written = capsys.readouterr().out.split()
    names = {name.rsplit("/", 1)[1] for name in written}
    assert names == {
        "report.html",
        "lengths_some_gpu.png",
        "bars_some_gpu.png",
        "roofline_some_gpu.png",
        "bars_amd_epyc_tm_2_threads.png",
        "roofline_amd_epyc_tm_2_threads.png",
    }
    for name in names - {"report.html"}:
        data = (tmp_path / "out" / name).read_bytes()
        width, height = png_size(data)
        assert 500 < width < 2500
        assert 150 < height < 2500
        assert len(data) < 400_000
    page = (tmp_path / "out" / "report.html").read_text()
    assert not re.findall(r'(?:src|href)="(?!data:image/png;base64,)', page)
    assert page.count("data:image/png;base64,") == 5
    assert "&lt;b&gt;cpu &amp; co&lt;/b&gt;" in page
    assert "<b>cpu" not in page
    assert page.count("<tr>") == len(ROWS) + 2
    for fact in ("Some GPU", "torch 2.11", "commit 0123456", "dense SDPA, cuDNN (other function)", "0.70×"):
        assert fact in page


def test_floor_of_rows_with_and_without_the_columns():
    old = row()
    assert report.with_floor(old) == (pytest.approx(80.0), "balanced")
    new = dataclasses.replace(old, percent_of_floor=93.0, verdict="IO-bound")
    assert report.with_floor(new) == (93.0, "IO-bound")
    assert report.with_floor(dataclasses.replace(old, bytes=0)) == (None, "-")


def test_pictures_without_anything_to_show(tmp_path):
    only_yardsticks = [row(baseline_computes_the_same=False, flops=0)]
    for draw in (plots.bars, plots.lengths, plots.roofline):
        assert draw(only_yardsticks, tmp_path / "x.png") is None
    assert not list(tmp_path.iterdir())


def test_many_bars_are_cut_to_a_legible_number(tmp_path):
    rows = [row(op=f"op{i % 5}", case=f"case{i}", speedup=1.0 + i) for i in range(200)]
    path = plots.bars(rows, tmp_path / "bars.png")
    assert png_size(path.read_bytes())[1] < 1300


def test_without_matplotlib_one_line_says_so(tmp_path, monkeypatch, capsys):
    results.write_json(tmp_path / "a.json", ROWS)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert program.main(["report", str(tmp_path / "a.json"), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == (
        "report: the report draws with matplotlib, which is not installed: "
        "pip install 'htree_ops[report]' or matplotlib\n"
    )


def test_bad_input_is_one_line_and_status_two(tmp_path, capsys):
    (tmp_path / "foreign.json").write_text('{"a": 1}')
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    results.write_json(tmp_path / "good.json", ROWS)
    for arguments, complaint in (
        ([str(tmp_path / "foreign.json")], "expected a list of rows"),
        ([str(tmp_path / "absent.json")], "No such file"),
        ([str(tmp_path / "empty")], "no results in"),
        ([str(tmp_path / "good.json"), "--out", str(tmp_path / "file")], "exists"),
    ):
        assert program.main(["report", *arguments]) == 2
        message = capsys.readouterr().err
        assert complaint in message
        assert message.count("\n") == 1
