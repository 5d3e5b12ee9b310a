"""The README and its pages are true: examples run, names and switches exist, figures are those of the files."""

from __future__ import annotations

import csv
import inspect
import json
import re
import runpy
from pathlib import Path

import pytest
import torch

import htree_ops
from htree_ops.bench import readme_table
from htree_ops.info import op_names

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def section(title: str, document: str = README) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", document, re.M | re.S)
    assert found, title
    return found.group(1)


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def test_the_example_runs_as_printed(capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
    assert blocks
    assert len(blocks[0].strip().splitlines()) <= 10
    for name in ("usage.md", "models.md"):
        blocks += re.findall(r"^```python\n(.*?)^```", page(name), re.M | re.S)
    for block in blocks:
        names: dict[str, object] = {}
        exec(compile(block, "README.md", "exec"), names)
    out = capsys.readouterr().out
    assert "torch.Size([1, 4096, 256])" in out


@pytest.mark.parametrize("script", ["draw_tree", "draw_results"])
def test_the_scripts_draw_the_pictures(tmp_path, script):
    """The pictures that a script draws exist and a page shows them; that of the tree has its own numbers."""
    pytest.importorskip("matplotlib")
    folder = ROOT / "docs" / "images"
    assert runpy.run_path(str(folder / f"{script}.py"))["main"](["--out", str(tmp_path)]) == 0
    shown = README + page("results.md")
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert len(drawn) in (2, 4)
    for name in drawn:
        assert (folder / name).is_file()
        assert f"images/{name}" in shown


def test_the_two_commands_are_targets():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:^    |`)make ([a-z][a-z-]*)", README, re.M)):
        assert re.search(rf"^{target}:.*## ", makefile, re.M), target
    assert {"demo", "test"} <= set(re.findall(r"^    make ([a-z-]+)", README, re.M))


def test_every_name_can_be_imported():
    """Names of the README's table, and every other word in code quotes that is no option, file, value or command."""
    table = re.findall(r"^\| `(\w+)` \|", section("Names"), re.M)
    assert 10 <= len(table) <= 15
    for name in table:
        assert name in htree_ops.__all__, name
    options = set(inspect.signature(htree_ops.tree_attention).parameters)
    others = {"htree_ops", "out", "info", "venv"}
    for name in set(re.findall(r"`([A-Za-z_]+)(?:=\d*)?`", README)) - others:
        assert name in options or hasattr(htree_ops, name) or name.startswith("HTREE_"), name


def test_the_page_of_ops_names_every_op():
    rows = re.findall(r"^\|(.*?)\|", page("ops.md"), re.M)
    named = set(re.findall(r"`(\w+)`", "".join(rows)))
    registered = {name.split(".")[0] for name in op_names()}
    modules = {
        name
        for name in htree_ops.__all__
        if isinstance(value := getattr(htree_ops, name), type) and issubclass(value, torch.nn.Module)
    }
    assert (registered | modules) - named == set(), "not in the table of docs/ops.md"
    assert named - registered - set(htree_ops.__all__) == set(), "in the table, but not in the package"


def test_the_table_names_every_switch():
    """Every HTREE_ variable that is read from an environment, and no other."""
    code = re.compile(r"(?:environ(?:\.get\(|\[)|env_or\(|getenv\()\s*\"(HTREE_\w+)\"")
    read: set[str] = set()
    for pattern in (
        "setup.py",
        "htree_ops/**/*.py",
        "tests/**/*.py",
        "csrc/**/*.h",
        "csrc/**/*.cpp",
        "csrc/**/*.cu",
    ):
        for path in ROOT.glob(pattern):
            read |= set(code.findall(path.read_text()))
    assert {"HTREE_CUDA", "HTREE_REQUIRE_CUDA", "HTREE_CPU_ISA"} <= read
    assert set(re.findall(r"^\| `(HTREE_\w+)", page("switches.md"), re.M)) == read


def test_the_figures_are_those_of_the_files():
    folder = ROOT / "benchmarks" / "results"
    files = readme_table.read_rows(folder)
    results = page("results.md")
    for text, name, written in (
        (README, "results", readme_table.render_summary(files)),
        (results, "headlines", readme_table.render_headlines(files, "benchmarks/results")),
        (results, "results", readme_table.render(files, "benchmarks/results")),
    ):
        assert readme_table.replace_section(text, written, name) == text, (
            "run python -m htree_ops.bench.readme_table"
        )


def test_the_errors_of_compression_are_those_of_the_file():
    with (ROOT / "benchmarks" / "results" / "compressed_kv_error_h200.csv").open(newline="") as file:
        measured = list(csv.DictReader(file))
    cells = re.findall(
        r"^\| (\d+) % \| (\d+) \| (yes|no) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$",
        page("usage.md"),
        re.M,
    )
    assert 2 * len(cells) == len(measured)
    for sparsity, bits, transformed, size, normal, outliers in cells:
        setting = (float(sparsity) / 100, bits, str(transformed == "yes"))
        rows = [r for r in measured if (float(r["sparsity"]), r["bits"], r["transformed"]) == setting]
        assert {r["keys"]: f"{float(r['output_error']):.4f}" for r in rows} == {
            "normal": normal,
            "outliers": outliers,
        }
        assert {f"{float(r['bytes_per_element']):.3f}" for r in rows} == {size}


ROW = {
    "gpu": "Some GPU",
    "cpu": "Some CPU, 2 threads",
    "torch": "2.11.0",
    "cuda": "13.0",
    "driver": "580",
    "commit": "0123456789abcdef-dirty",
    "op": "causal_softmax",
    "case": "square",
    "dtype": "bfloat16",
    "median_us": 130.0,
    "graph_us": 110.25,
    "percent_of_ceiling": 87.6,
    "baseline": "eager",
    "baseline_computes_the_same": True,
    "baseline_median_us": 4000.0,
    "baseline_graph_us": None,
    "speedup": 30.77,
}


def write(folder: Path, name: str, content: object) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(content))


def test_a_table_is_made_from_rows(tmp_path):
    fast = ROW | {"baseline": "torch.compile", "baseline_graph_us": 384.0, "speedup": 384.0 / 110.25}
    other = ROW | {"baseline": "without mask", "baseline_computes_the_same": False, "speedup": 1.1}
    write(tmp_path / "results", "softmax.json", [ROW, fast, other])
    on_cpu = ROW | {"gpu": "none", "graph_us": None, "speedup": 30.77}
    write(tmp_path / "results", "wrapped.json", {"note": "", "rows": [on_cpu]})
    text = readme_table.render(readme_table.read_rows(tmp_path / "results"), "r")
    assert (
        "Some GPU, CUDA 13.0, driver 580, torch 2.11.0, commit 0123456789ab-dirty (`r/softmax.json`):" in text
    )
    assert (
        "| `causal_softmax` | square | bfloat16 | 110 µs | 88 | torch.compile | 384 µs | 3.48 |" in text
    )  # graph times
    assert "Some CPU, 2 threads, torch 2.11.0" in text
    assert (
        "| `causal_softmax` | square | bfloat16 | 130 µs | 88 | eager | 4.0 ms | 30.77 |" in text
    )  # medians
    assert "without mask" not in text


@pytest.mark.parametrize(("least", "cases"), [(1.0, "5678"), (0.955, "45678")])
def test_the_cases_of_the_lowest_factors_are_shown_and_all_that_lose(tmp_path, least, cases):
    rows = [ROW | {"case": f"case {i}", "speedup": least + 0.01 * (8 - i)} for i in range(9)]
    write(tmp_path, "a.json", rows)
    shown = re.findall(r"case (\d)", readme_table.render(readme_table.read_rows(tmp_path), "r"))
    assert shown == list(cases)


def test_headlines_are_the_first_cases_on_a_gpu(tmp_path):
    rows = [ROW | {"case": f"case {i}", "median_us": 10.0 + i} for i in range(3)]
    write(tmp_path, "a.json", [ROW | {"gpu": "none", "case": "on a CPU"}, *rows])
    text = readme_table.render_headlines(readme_table.read_rows(tmp_path), "r")
    assert re.findall(r"case \d|on a CPU", text) == ["case 0"]
    assert (
        "Measured on Some GPU, CUDA 13.0, driver 580, torch 2.11.0: `r/a.json` (commit 0123456789ab-dirty)."
        in text
    )


def test_stages_are_no_headlines(tmp_path):
    write(tmp_path, "a.json", [ROW])
    write(tmp_path, "stages.json", [ROW | {"op": op} for op in sorted(readme_table.STAGES)])
    files = readme_table.read_rows(tmp_path)
    headlines = readme_table.render_headlines(files, "r")
    assert "`causal_softmax`" in headlines
    assert "stages.json" not in headlines
    for op in readme_table.STAGES:
        assert f"`{op}`" not in headlines
        assert f"`{op}`" in readme_table.render(files, "r")


@pytest.mark.parametrize("render", [readme_table.render, readme_table.render_headlines])
def test_other_functions_stand_side_by_side(tmp_path, render):
    """Where no baseline computes the same, each yardstick has a column; a row's times are of one kind."""
    one = ROW | {"baseline": "dense", "baseline_computes_the_same": False, "median_us": 2000.0}
    two = one | {"baseline": "dense, old", "sustained_us": None, "baseline_sustained_us": 9000.0}
    graphs = {"graph_us": 1900.0, "baseline_graph_us": 3000.0}
    no_graph = two | {"baseline_sustained_us": None, "case": "no graph"}
    rows = [one, two, one | {"case": "tall"}, one | {"case": "graphs", **graphs}]
    rows += [two | {"case": "graphs", "baseline_sustained_us": None, **graphs, "baseline_graph_us": 8000.0}]
    rows += [one | {"case": "no graph", **graphs}, no_graph]
    rows += [one | {"case": "loaded", **graphs, "sustained_us": 2100.0}]
    write(tmp_path, "a.json", rows)
    lines = render(readme_table.read_rows(tmp_path), "r").splitlines()
    assert "| op | case | dtype | htree_ops | dense | dense, old |" in lines
    for line in (
        "square | bfloat16 | 2.0 ms | 4.0 ms | 9.0 ms |",  # one side has a sustained time
        "tall | bfloat16 | 2.0 ms | 4.0 ms |  |",  # no graph of the baseline
        "graphs | bfloat16 | 1.9 ms | 3.0 ms | 8.0 ms |",
        "no graph | bfloat16 | 2.0 ms | 4.0 ms | 4.0 ms |",  # a graph of only one of two baselines
        "loaded | bfloat16 | 2.1 ms | 4.0 ms |  |",
    ):
        assert f"| `causal_softmax` | {line}" in lines


def tree_row(length, stride, ours_ms, dense_ms, **others):
    row = ROW | {
        "op": "tree_attention",
        "case": f"T{length}_s{stride}",
        "baseline": readme_table.DENSE,
        "baseline_computes_the_same": False,
        "median_us": ours_ms * 1e3,
        "baseline_median_us": dense_ms * 1e3,
    }
    return row | others


def test_the_length_from_which_the_tree_is_faster(tmp_path):
    rows = [tree_row(64_000, 1, 10, 40), tree_row(16_000, 1, 10, 2.5)]
    rows += [tree_row(8000, 16, 8, 2), tree_row(16_000, 16, 8, 8), tree_row(8192, 1, 10, 1)]
    rows += [tree_row(8000, 4, 1, 2), tree_row(16_000, 4, 1, 4)]  # faster from the start
    rows += [tree_row(8000, 8, 2, 1), tree_row(16_000, 8, 2, 1)]  # never
    write(tmp_path, "a.json", rows)
    text = readme_table.render_summary(readme_table.read_rows(tmp_path))
    assert (
        "Tree attention is faster than dense attention by cuDNN from about 32 thousand tokens on with "
        "`selection_stride=1` and at every length measured with `selection_stride=4` and from about 16 thousand tokens "
        "on with `selection_stride=16`." in text
    )


def test_the_summary_compares_whole_calls(tmp_path):
    """The fastest of a row is bold, and a time of dense attention on one head stands for all heads."""
    one_head = {"baseline": f"{readme_table.DENSE}, 1 of 32 heads"}
    rows = [tree_row(8192, 1, 4, 1), tree_row(8192, 16, 2, 1), tree_row(1 << 20, 16, 750, 500, **one_head)]
    rows += [tree_row(8192, 1, 9, 8, op="tree_attention_backward"), tree_row(9000, 1, 1, 1)]
    rows += [tree_row(8192, 1, 9, 1, baseline="another"), ROW]
    write(tmp_path, "a.json", rows)
    lines = readme_table.render_summary(readme_table.read_rows(tmp_path)).splitlines()
    assert lines[0] == f"| tokens | call | stride 1 | stride 16 | {readme_table.DENSE} |"
    assert lines[2:5] == [
        "| 8 192 | forward | 4.0 ms | 2.0 ms | **1.0 ms** |",
        "| 1 048 576 | forward |  | **750 ms** | 16000 ms (32 × one head) |",
        "| 8 192 | backward | 9.0 ms |  | **8.0 ms** |",
    ]
    assert "Measured on Some GPU" in lines[-1]


def test_the_command_writes_and_checks(tmp_path, capsys):
    readme, document, folder = tmp_path / "README.md", tmp_path / "results.md", tmp_path / "results"
    old = {name: "\nold\n".join(readme_table.markers(name)) for name in ("headlines", "results")}
    readme.write_text(f"before\n{old['results']}\nafter\n")
    document.write_text(f"before\n{old['headlines']}\nbetween\n{old['results']}\nafter\n")
    flags = ["--readme", str(readme), "--document", str(document), "--results", str(folder)]
    assert readme_table.main([*flags, "--check"]) == 1
    assert "differs" in capsys.readouterr().err
    assert readme_table.main(flags) == 0  # no results at all
    assert readme_table.NOTHING in readme.read_text()
    assert document.read_text().count(readme_table.NOTHING) == 2
    assert readme.read_text().startswith("before\n")
    assert readme.read_text().endswith("\nafter\n")
    assert readme_table.main([*flags, "--check"]) == 0
    write(folder, "a.json", [ROW, tree_row(8192, 1, 4, 1)])
    assert readme_table.main([*flags, "--check"]) == 1
    assert readme_table.main(flags) == 0
    assert readme_table.NOTHING not in readme.read_text() + document.read_text()
    assert "`causal_softmax`" in document.read_text()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ([ROW | {"commit": None}], "row 0 lacks commit"),
        ({"rows": 3}, "expected a list of rows"),
        ([1], "expected a list of rows"),
    ],
)
def test_unusable_files_are_named(tmp_path, capsys, content, complaint):
    document = tmp_path / "README.md"
    document.write_text("".join(readme_table.markers("headlines") + readme_table.markers("results")))
    write(tmp_path / "results", "bad.json", content)
    flags = ["--readme", str(document), "--document", str(document), "--results", str(tmp_path / "results")]
    status = readme_table.main(flags)
    assert status == 2
    assert "bad.json" in (err := capsys.readouterr().err)
    assert complaint in err


BEGIN, END = readme_table.markers("results")


@pytest.mark.parametrize("text", ["", END + BEGIN, BEGIN * 2])
def test_a_document_without_the_markers_is_refused(text):
    with pytest.raises(ValueError, match="must hold"):
        readme_table.replace_section(text, "")


def test_what_the_limits_say_is_refused():
    """What docs/limits.md says is refused is refused, for the sentences that a few lines can check."""
    layer = htree_ops.HTreeAttention(16, 2)
    x = torch.randn(1, 8, 16)
    with pytest.raises(NotImplementedError, match="attn_mask"):
        layer(x, attn_mask=torch.ones(8, 8))
    q = torch.randn(1, 8, 2, 8, requires_grad=True)
    (dq,) = torch.autograd.grad(htree_ops.tree_attention(q, q, q).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        dq.sum().backward()
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(lambda x: htree_ops.tree_attention(x, x, x).sum())(q.detach())
