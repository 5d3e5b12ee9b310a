"""The commands of the package: their help, one-line errors, and what an installed package does elsewhere."""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import htree_ops
from benchmarks.__main__ import PROGRAM as BENCHMARKS
from htree_ops.__main__ import PROGRAM
from htree_ops._load import PACKAGE
from htree_ops.cli import Command, UsageError, counted

ROOT = Path(__file__).resolve().parents[2]
in_checkout = pytest.mark.skipif(not (ROOT / "setup.py").is_file(), reason="needs the source tree")
TREE = ["--seq-len=300", "--hq=2", "--k-dim=8", "--v-dim=8", "--compression-rate=4", "--max-top-nodes=16"]


def help_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        PROGRAM.main([*words, "--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_help_lists_every_command_in_one_line(capsys):
    lines = help_of([], capsys).splitlines()
    for name, (_, about) in PROGRAM.commands.items():
        assert f"  {name:<13}{about}" in lines
        assert len(about) < 70
    assert list(PROGRAM.commands) == ["info", "tune", "io-only", "correctness"]


@pytest.mark.parametrize("words", [[], ["inof"], ["--json"], ["inof", "--json"]])
def test_without_a_command_the_list_is_shown(words, capsys):
    with pytest.raises(SystemExit) as stop:
        PROGRAM.main(words)
    assert stop.value.code == 2
    first, *rest = capsys.readouterr().err.splitlines()
    wrong = f"there is no command {words[0]!r}" if words else "a command is missing"
    assert first == f"python -m htree_ops: {wrong}; the commands are"
    assert [line.split()[0] for line in rest] == list(PROGRAM.commands)


@pytest.mark.parametrize(("words", "status"), [(["--version"], 0), (["--help"], 0), (["inof"], 2), ([], 2)])
def test_what_runs_no_command_loads_none(words, status):
    script = [sys.executable, "-X", "importtime", "-m", "htree_ops", *words]
    done = subprocess.run(script, capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == status
    loaded = re.findall(r"^import time:[^|]*\|[^|]*\| *(\S+)$", done.stderr, re.M)
    assert {"torch", "htree_ops", "htree_ops.cli"} <= set(loaded)
    tools = r"bench|correctness|reference|info|tuning\.(tuner|command|problems)"
    others = rf"torch\._(dynamo|inductor)|htree_ops\.({tools})\b"
    assert [name for name in loaded if re.match(others, name)] == []
    if words == ["--version"]:
        assert done.stdout == f"htree_ops {htree_ops.__version__}\n"


@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [("htree_ops info", ""), ("htree_ops info", "1"), ("htree_ops --help", ""), ("benchmarks --help", "")],
)
def test_a_reader_that_leaves_is_no_error(words, unbuffered):
    """The pipe is closed before the program starts, so that every write fails, at once or at the end."""
    reader, writer = os.pipe()
    os.close(reader)
    script = [sys.executable, "-m", *words.split()]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(
        script, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=PACKAGE.parent, env=environment
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, ""), done.stderr


def test_one_is_singular():
    assert [counted(number, "case") for number in (0, 1, 2)] == ["0 cases", "1 case", "2 cases"]


@pytest.mark.parametrize(
    ("of", "name"), [(of, name) for of in (PROGRAM, BENCHMARKS) for name in of.commands], ids=str
)
def test_help_of_a_command_is_complete(of, name):
    known = of.load(name)
    assert (known.name, known.program) == (name, of.name)
    parser = known.make_parser()
    text = parser.format_help()
    assert known.description in text
    for action in parser._actions:
        assert action.help, action.dest
        assert all(option in text for option in action.option_strings)
        number = isinstance(action.default, (int, float)) and not isinstance(action.default, bool)
        if number and not isinstance(action, argparse._HelpAction):
            assert f"(default {action.default})" in " ".join(text.split()), action.dest


def test_wrong_use_and_a_lack_of_memory_are_one_line(capsys):
    def run(arguments):
        raise arguments.error

    failing = Command("name", "description", lambda parser: None, run)
    for error, message in (
        (UsageError("too long"), "name: too long\n"),
        (MemoryError("1 TB"), "name: out of memory: 1 TB\n"),
    ):
        assert failing.execute(argparse.Namespace(error=error)) == 2
        assert capsys.readouterr().err == message
    with pytest.raises(RuntimeError, match="a bug"):
        failing.execute(argparse.Namespace(error=RuntimeError("a bug")))


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """What an installation puts into site-packages: the files that setup.py lists, and the libraries in use."""
    site = tmp_path_factory.mktemp("site")
    build = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(site)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=300)
    for path in (*PACKAGE.glob("*.so"), PACKAGE / "_build_info.json"):
        shutil.copy2(path, site / "htree_ops" / path.name)
    return site


@in_checkout
@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["info"], 0, f"htree_ops        {htree_ops.__version__}"),
        (
            ["io-only", *TREE, "--top-k=4", "--gpu=-1", "--warmup=0", "--iters=1"],
            0,
            "Results (avg ms / iter)",
        ),
        (["correctness", *TREE, "--top-k-per-layer=4", "--h-kv=1", "--device=cpu"], 0, "PASS"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_an_installed_package_away_from_the_checkout(installed, tmp_path, words, status, said):
    environment = {**os.environ, "PYTHONPATH": str(installed), "HTREE_COMMIT": ""}
    script = [sys.executable, "-m", "htree_ops", *words]
    done = subprocess.run(script, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stderr
    assert said in done.stdout + done.stderr
    assert not list(tmp_path.iterdir()), "nothing is written that was not asked for"
