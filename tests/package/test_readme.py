"""The README and its pages are true: examples run, names and switches exist, figures are those of the files."""

from __future__ import annotations

import csv
import inspect
import re
import runpy
from importlib import import_module
from pathlib import Path

import pytest
import torch

import htree_ops
from benchmarks.harness import readme_table
from htree_ops.info import op_names
from htree_ops.ops.tree_attention.options import TreeKeywords

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
FAMILIES = [
    path.name for path in sorted((ROOT / "htree_ops" / "ops").iterdir()) if (path / "__init__.py").is_file()
]


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
    options = {*inspect.signature(htree_ops.tree_attention).parameters, *TreeKeywords.__annotations__}
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
    functions = {name for family in FAMILIES for name in import_module(f"htree_ops.ops.{family}").__all__}
    assert named - registered - functions - set(htree_ops.__all__) == set(), (
        "in the table, but not in the package"
    )


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
            "run python -m benchmarks.harness.readme_table"
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
