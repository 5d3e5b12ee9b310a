"""The report: a page that needs nothing from outside, pictures, and refusals in one line."""

import dataclasses
import re
import sys

import pytest
from test_bench_suite import row

from benchmarks.__main__ import PROGRAM as program
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


@pytest.fixture
def axes(monkeypatch):
    """Those of the figures that were drawn."""
    found = []
    monkeypatch.setattr(plots.load_matplotlib(), "close", lambda figure: found.append(figure.axes[0]))
    return found


def curves(axes):
    return {line.get_label(): list(line.get_ydata()) for line in axes.lines}


def test_a_page_and_pictures_per_machine(tmp_path, capsys):
    results.write_rows(tmp_path / "in" / "a.csv", ROWS)
    (tmp_path / "in" / "other.csv").write_text("keys,bits\nnormal,4\n")
    assert program.main(["report", str(tmp_path / "in"), "--out", str(tmp_path / "out")]) == 0
    written = capsys.readouterr().out.split()
    names = {name.rsplit("/", 1)[1] for name in written}
    assert names == {
        "report.html",
        "bars_some_gpu.png",
        "roofline_some_gpu.png",
        "bars_amd_epyc_tm_2_threads.png",
        "roofline_amd_epyc_tm_2_threads.png",
    }
    page = (tmp_path / "out" / "report.html").read_text()
    assert not re.findall(r'(?:src|href)="(?!data:image/png;base64,)', page)
    assert page.count("data:image/png;base64,") == 4
    assert "&lt;b&gt;cpu &amp; co&lt;/b&gt;" in page
    assert "<b>cpu" not in page
    assert page.count("<tr>") == len(ROWS) + 2
    for fact in ("Some GPU", "torch 2.11", "commit 0123456", "dense SDPA, cuDNN (other function)", "0.70×"):
        assert fact in page


def test_floor_of_rows_with_and_without_the_columns():
    old = row()
    assert results.with_floor(old) == (pytest.approx(80.0), "balanced")
    new = dataclasses.replace(old, percent_of_floor=93.0, verdict="IO-bound")
    assert results.with_floor(new) == (93.0, "IO-bound")
    assert results.with_floor(dataclasses.replace(old, bytes=0)) == (None, "-")


def test_a_bar_is_one_row_and_names_its_commit_and_machine(axes, tmp_path):
    rows = [
        row(speedup=2.0, baseline="fast"),
        row(speedup=3.0, baseline="slow"),
        row(speedup=5.0, commit="b" * 40),
        row(speedup=4.0, gpu="Other GPU", commit="c" * 40),
        row(speedup=1.5, shapes="another"),
    ]
    assert plots.bars(rows, tmp_path / "bars.png")
    labels = [label.get_text() for label in axes[0].get_yticklabels()]
    widths = [1 + bar.get_width() for bar in axes[0].patches]
    name = f"{rows[0].op}  {rows[0].case}  {rows[0].dtype}"
    assert list(zip(labels, widths, (text.get_text() for text in axes[0].texts), strict=False)) == [
        (f"{name}  Other GPU", 4.0, f"4.00×  vs {rows[3].baseline}, ccccccc"),
        (f"{name}  Some GPU", 2.0, "2.00×  vs fast, 0123456"),
        (f"{name}  Some GPU", 1.5, f"1.50×  vs {rows[4].baseline}, 0123456"),
    ]


def test_the_roofline_has_a_point_for_each_run_below_what_copies_and_products_reach(axes, tmp_path):
    product = row(op="fp8_gemm", dtype="bfloat16", flops=10**12, tflops=500.0, baseline_median_us=1000.0)
    facts = {"flops": 10**9, "bytes": 10**8}
    rows = [row(tflops=8.0, **facts), row(tflops=8.0, baseline="another", **facts)]
    rows += [row(tflops=4.0, commit="b" * 40, **facts)]
    assert plots.roofline(rows, tmp_path / "roofline.png")
    assert [tuple(p) for some in axes[0].collections for p in some.get_offsets()] == [
        (10.0, 8.0),
        (10.0, 4.0),
    ]
    assert plots.roofline([product, *TREE], tmp_path / "roofline.png")
    assert set(curves(axes[1])) == {"copy, 4.00 TB/s", "FP8 products of torch, 1000 TFLOP/s"}


def test_every_commit_is_named():
    rows = [row(commit=letter * 40) for letter in "fedcba"]
    assert plots.place(rows).endswith("commits aaaaaaa, bbbbbbb, ccccccc, ddddddd, eeeeeee, fffffff")


def test_machines_of_long_names_have_pictures_of_their_own(tmp_path):
    long = "A processor whose name is longer than forty letters,"
    rows = [row(gpu="none", cpu=f"{long} {threads} threads") for threads in (2, 32)]
    pages = report.write_report(rows, tmp_path)
    assert len(pages) == len(set(pages)) == 1 + 2 * 2


def test_pictures_without_anything_to_show(tmp_path):
    only_yardsticks = [row(baseline_computes_the_same=False, flops=0)]
    for draw in (plots.bars, plots.roofline):
        assert draw(only_yardsticks, tmp_path / "x.png") is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("ops", "words"), [(5, "the 7 slowest cases of"), (30, "the slowest case of")])
def test_many_bars_are_cut_to_a_legible_number(axes, tmp_path, ops, words):
    rows = [row(op=f"op{i % ops}", case=f"case{i}", speedup=1.0 + i) for i in range(200)]
    plots.bars(rows, tmp_path / "bars.png")
    assert len(axes[0].patches) <= plots.MAX_BARS
    assert axes[0].get_xlabel().endswith(f"shown: {words} each op, and every case below 1")


def test_without_matplotlib_one_line_says_so(tmp_path, monkeypatch, refusal_of):
    results.write_rows(tmp_path / "a.csv", ROWS)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert refusal_of(program.main, ["report", str(tmp_path / "a.csv"), "--out", str(tmp_path / "out")]) == (
        "report: the report draws with matplotlib, which is not installed: pip install matplotlib\n"
    )


def test_bad_input_is_one_line_and_status_two(tmp_path, refusal_of):
    (tmp_path / "foreign.csv").write_text("a,b\n1,2\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    results.write_rows(tmp_path / "good.csv", ROWS)
    for arguments, complaint in (
        ([str(tmp_path / "foreign.csv")], "not a results file: it lacks the columns baseline, "),
        ([str(tmp_path / "absent.csv")], "No such file"),
        ([str(tmp_path / "empty")], "no results in"),
        ([str(tmp_path / "good.csv"), "--out", str(tmp_path / "file")], "exists"),
    ):
        assert complaint in refusal_of(program.main, ["report", *arguments])
