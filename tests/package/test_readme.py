"""The README and the pages of docs are true: examples run, names exist, figures are those of the files; and plain."""

import csv
import inspect
import re
import runpy
import socket
import sys
from importlib import import_module

import pytest
import torch
import torch.distributed as dist

import htree_ops
from benchmarks.harness import readme_table
from htree_ops.info import op_names
from htree_ops.ops.tree_attention.options import WITHOUT_INDEX, TreeKeywords
from tests.support.pages import PAGES, ROOT, blocks_of

README = PAGES["README.md"]
FAMILIES = [
    path.name for path in sorted((ROOT / "htree_ops" / "ops").iterdir()) if (path / "__init__.py").is_file()
]


def section(title: str, document: str = README) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", document, re.M | re.S)
    assert found, title
    return found.group(1)


def page(name: str) -> str:
    return PAGES[f"docs/{name}"]


@pytest.fixture
def as_under_torchrun(monkeypatch):
    """The environment of one rank alone, on the CPU; groups that an example made are gone afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for key, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": str(torch.get_num_threads()),  # accelerate sets one of its own where there is none
    }.items():
        monkeypatch.setenv(key, value)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    if states := sys.modules.get("accelerate.state"):  # of a Trainer, which else goes on with that group
        states.AcceleratorState._reset_state(reset_partial_state=True)


EXAMPLES = [
    pytest.param(name, block, id=f"{name}-{number}")
    for name in PAGES
    for number, block in enumerate(blocks_of(name, "python"))
]


@pytest.mark.parametrize(("name", "block"), EXAMPLES)
def test_an_example_runs(name, block, as_under_torchrun, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # a rank of gloo on every machine
    exec(compile(block, name, "exec"), {"__name__": name})


def test_the_readme_prints_what_it_says(capsys):
    first = blocks_of("README.md", "python")[0]
    assert len(first.strip().splitlines()) <= 10
    exec(compile(first, "README.md", "exec"), {})
    assert "torch.Size([1, 4096, 256])" in capsys.readouterr().out


def test_every_code_block_is_one_that_a_test_reads():
    """Python runs; a line of a shell names a target, a module or a file that exists, and flags that its source has."""
    for name, text in PAGES.items():
        languages = set(re.findall(r"^```(\S*)\n.*?^```", text, re.M | re.S)) - {"{toctree}"}
        languages |= set(re.findall(r"^\.\. code-block:: (\w+)", text, re.M))
        assert languages <= {"python", "sh"}, name
        outside = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
        assert not re.search(r"\n\n    \S", outside), f"{name}: an indented block"
        for line in "".join(blocks_of(name, "sh")).splitlines():
            command = line.partition("#")[0]
            check_command(name, command)


def check_command(page: str, command: str) -> None:
    """Fails where a line of a shell block names what does not exist."""
    if target := re.match(r"make ([a-z-]+)", command):
        assert re.search(rf"^{target[1]}:.*## ", (ROOT / "Makefile").read_text(), re.M), f"{page}: {command}"
        return
    called = re.search(
        r"(?:python -m ([\w.]+)(?: ([a-z-]+))?|(?:python|torchrun .*) (examples/\w+\.py))", command
    )
    if command.startswith("vllm serve "):
        return  # tests/vllm/test_plugin.py gives it to vLLM
    if called is None:
        assert re.match(r"(python3\.11 -m venv|pip install|cd ~) ", command), f"{page}: {command}"
        return
    module, word, script = called.groups()
    path = ROOT / (script or module.replace(".", "/"))
    sources = [path] if path.is_file() else [*path.parent.glob(f"{path.name}.py"), *path.glob("**/*.py")]
    if script:
        sources += (ROOT / "examples" / "lm").glob("*.py")
    elif not path.is_dir():
        sources += (ROOT / module.split(".")[0]).glob("**/*.py")
    text = "".join(source.read_text() for source in sources)
    assert text, f"{page}: {command}"
    if word and (path / "__main__.py").is_file():
        assert f'"{word}"' in text, f"{page}: {command} has no {word}"
    for flag in re.findall(r"--([a-z][a-z-]+)", command[called.end(1 if module else 3) :]):
        assert any(x in text for x in (f"--{flag}", flag.replace("-", "_"))), (
            f"{page}: {command} has no --{flag}"
        )


def prose(name: str) -> list[str]:
    """The sentences of a page: no headings, tables, code, directives or generated sections; code is one word."""
    text = re.sub(r"^```.*?^```", "\n", PAGES[name], flags=re.M | re.S)
    text = re.sub(r"^\.\. .*\n(?:\n|   .*\n)*", "\n", text, flags=re.M)
    text = re.sub(r"^<!-- (\S+) -->.*?^<!-- /\1 -->", "\n", text, flags=re.M | re.S)
    text = re.sub(r"^(?:[#|<(]|  <|=+$).*$", "", text, flags=re.M)
    text = re.sub(r"`[^`]+`", "CODE", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = re.sub(r"[*\[\]]|__", "", re.sub(r"^- |^\d\. ", "\n\n", text, flags=re.M))
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return [s for part in paragraphs for s in re.split(r"(?<=[.!?:])\s+(?=[A-Z0-9\"])", part) if s]


NAMED_BY_NUMBER = r"(?:[Tt]orch|Python|transformers|RTX|OLMo|Gemma|GPUs?|\()\s[\d., ()and]*\d"


def numbers(sentence: str) -> list[str]:
    """The numbers of a sentence: not those of names and versions, nor parts of words."""
    sentence = re.sub(r"(?<=\d) (?=\d{3}\b)", "", sentence)
    sentence = re.sub(NAMED_BY_NUMBER, "", sentence)
    return re.findall(r"(?<![\w.:§^-])\d+(?:\.\d+)?(?:e-\d+)?(?:k|M)?(?![\w.]*\d|-\w)", sentence)


@pytest.mark.parametrize("name", PAGES)
def test_sentences_are_short(name):
    """At most thirty words and three numbers."""
    too_long = [
        sentence
        for sentence in prose(name)
        if len([word for word in sentence.split() if re.search(r"\w", word)]) > 30
        or len(numbers(sentence)) > 3
    ]
    assert not too_long, "\n".join(too_long)


def test_numbers_are_counted():
    sentence = (
        "At 131 072 tokens it takes 4.5 ms, 1.2 times 128k, in fp16 on an H200 with torch 2.11, an RTX 4090."
    )
    assert numbers(sentence) == ["131072", "4.5", "1.2", "128k"]


@pytest.mark.parametrize("name", PAGES)
def test_words_are_those_of_the_trade(name):
    sentences = " ".join(prose(name))
    for word in (r"texts?", "rooms?", "twins?", "aims?", "drafts", "documents' default"):
        assert not re.search(rf"\b{word}\b", sentences), f"{word}: see the words in CONTRIBUTING.md"


def test_the_readme_has_its_order_and_size():
    assert len(README.splitlines()) <= 150
    titles = re.findall(r"^## (.*)", README, re.M)
    order = [
        "Beside dense attention",
        "Install",
        "Quick start",
        "Use it in your model",
        "What runs where",
        "Names",
        "Pages",
        "Licence and citation",
    ]
    assert titles == order


def test_limits_stay_short():
    assert len(page("limits.md").split()) <= 700


def test_the_api_has_every_public_name():
    pages = "".join(text for name, text in PAGES.items() if name.startswith("docs/api/"))
    whole = set(re.findall(r"automodule:: (\S+)\n(?!   :no-members:)", pages))
    for name in set(htree_ops.__all__) - {"__version__"}:
        module = getattr(htree_ops, name).__module__
        assert re.search(rf":: htree_ops\.{name}$", pages, re.M) or module in whole, name


def test_every_page_is_in_the_contents():
    """Links between pages lead somewhere, and the index reaches every page."""
    contents = {}
    for name, text in PAGES.items():
        here = (ROOT / name).parent
        for target in re.findall(r"\]\(([\w./-]+\.(?:md|rst))(?:#[\w-]+)?\)", text):
            assert (here / target).is_file(), f"{name}: {target}"
        entries = "\n".join(re.findall(r"^```{toctree}\n(.*?)^```", text, re.M | re.S))
        contents[name] = {
            str((here / line).relative_to(ROOT)) for line in re.findall(r"^[\w/]+$", entries, re.M)
        }
    reached = set().union(*contents.values())
    for name in PAGES:
        assert name in ("README.md", "docs/index.md") or name.rpartition(".")[0] in reached, name


@pytest.mark.parametrize("script", ["draw_tree", "draw_results"])
def test_the_scripts_draw_the_pictures(tmp_path, script):
    """The pictures that a script draws exist and a page shows them; that of the tree has its own numbers."""
    pytest.importorskip("matplotlib")
    folder = ROOT / "docs" / "images"
    assert runpy.run_path(str(folder / f"{script}.py"))["main"](["--out", str(tmp_path)]) == 0
    shown = "".join(PAGES.values())
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert len(drawn) in (2, 4)
    for name in drawn:
        assert (folder / name).is_file()
        assert f"images/{name}" in shown


def test_the_two_commands_are_those_of_the_quick_start():
    """That they are targets, and those of other pages too, is checked with every block."""
    assert set(re.findall(r"^make ([a-z-]+)", section("Quick start"), re.M)) == {"demo", "test"}
    for name, text in PAGES.items():
        for target in set(re.findall(r"`make ([a-z][a-z-]*)", text)):
            check_command(name, f"make {target}")


def test_every_name_can_be_imported():
    """Names of the README's table, and every other word in code quotes that is no option, file, value or command."""
    table = re.findall(r"^\| `(\w+)` \|", section("Names"), re.M)
    assert 10 <= len(table) <= 15
    for name in table:
        assert name in htree_ops.__all__, name
    options = {*inspect.signature(htree_ops.tree_attention).parameters, *TreeKeywords.__annotations__}
    others = {"htree_ops"}
    for name in set(re.findall(r"`([A-Za-z_]+)(?:=\d*)?`", README)) - others:
        assert name in options or hasattr(htree_ops, name) or name.startswith("HTREE_"), name


def test_the_families_of_models_are_those_of_the_tests():
    """The README's number of families beside the first three is that of the table, and each has a test."""
    first, *rows = re.findall(r"^\| ([A-Z][^|]*) \| (?:in every|training)", page("models.md"), re.M)
    others = [name for row in rows for name in row.split(", ")]
    words = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
    assert (
        f"{first.rpartition(', ')[0]}, {first.rpartition(', ')[2]} and {words.split()[len(others)]} other"
        in README
    )
    folder = ROOT / "tests" / "integrations"
    tested = "".join(
        (folder / name).read_text() for name in ("test_peers.py", "test_other_models.py")
    ).lower()
    for name in others:
        assert re.search(rf'"{name.lower().replace("-", "")}(text)?(config)?"', tested), name


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
    read = set()
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
    results = readme_table.read_results(ROOT / "benchmarks" / "results")
    changed = readme_table.write_sections(ROOT, results)
    assert not changed, f"{[str(path) for path in changed]}: run python -m benchmarks.harness.readme_table"


def test_settings_beside_dense_attention_come_first():
    """Rows of a setting with a span beside dense attention replace those of the program of spans alone."""
    before = readme_table.read_results(ROOT / "benchmarks" / "results")
    plain = before.files["tree_attention_h200.csv"]
    rows = [
        {**row, "case": row["case"].replace("_s1", f"_c2_s{stride}"), "commit": "c" * 40, "sustained_us": 5e3}
        for row in plain
        for stride in (1, 4)
        if re.fullmatch(r"T\d+_s1", row["case"])
    ]
    files = {**before.files, "tree_attention_h200.csv": [*plain, *rows]}
    after = readme_table.Results(files, before.tables, before.quality)
    for op, lengths in (("tree_attention", 8), ("tree_attention_backward", 2)):
        times = readme_table.attention_times(after, op)
        assert len(times) == lengths
        for cells in times.values():
            for setting in readme_table.SETTINGS[:2]:
                assert cells[setting.title] == (5e3, "5.0 ms", "c" * 40)
    table = readme_table.render_summary(after)
    assert "–" not in table
    assert "forward with a span ccccccc" in table
    assert "91a6d02" not in table
    one = [{**row, "commit": "c" * 40} for row in files["tree_attention_h200.csv"]]
    files = {**files, "tree_attention_h200.csv": one}
    alone = readme_table.render_summary(readme_table.Results(files, before.tables, before.quality))
    assert alone.endswith("commit ccccccc.")


def test_settings_are_the_recommended_ones():
    """The first columns of the tables are what is recommended without an index."""
    for setting, goal in zip(readme_table.SETTINGS, WITHOUT_INDEX.values(), strict=False):
        assert {"selection_span": setting.span, "selection_stride": setting.stride} == goal
    assert htree_ops.TreeOptions().top_nodes == readme_table.DENSE_TO


def test_the_errors_of_compression_are_those_of_the_file():
    with (ROOT / "benchmarks" / "results" / "compressed_kv_error_h200.csv").open(newline="") as file:
        measured = list(csv.DictReader(file))
    cells = re.findall(
        r"^\| (\d+) % \| (\d+) \| (yes|no) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$",
        page("performance.md"),
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
