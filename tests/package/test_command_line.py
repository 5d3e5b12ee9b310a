"""The commands of the package: their help, one-line errors, and what an installed package does elsewhere."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import htree_ops
from benchmarks import __main__ as benchmarks
from htree_ops import __main__ as program
from htree_ops._load import PACKAGE
from htree_ops.cli import Command, UsageError

ROOT = Path(__file__).resolve().parents[2]
in_checkout = pytest.mark.skipif(not (ROOT / "setup.py").is_file(), reason="needs the source tree")
TREE = ["--seq-len=300", "--hq=2", "--k-dim=8", "--v-dim=8", "--compression-rate=4", "--max-top-nodes=16"]


def help_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        program.main([*words, "--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_help_lists_every_command_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    lines = help_of([], capsys).splitlines()
    for known in program.COMMANDS:
        assert f"  {known.name:<13}{known.about}" in lines
        assert len(known.about) < 70
    assert [known.name for known in program.COMMANDS] == ["info", "tune", "io-only", "correctness"]


@pytest.mark.parametrize("known", [*program.COMMANDS, *benchmarks.COMMANDS], ids=lambda known: known.name)
def test_help_of_a_command_is_complete(known: Command, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    known.fill(parser)
    text = parser.format_help()
    assert known.description in text
    for action in parser._actions:
        assert action.help, action.dest
        assert all(option in text for option in action.option_strings)
        number = isinstance(action.default, (int, float)) and not isinstance(action.default, bool)
        if number and not isinstance(action, argparse._HelpAction):
            assert f"(default {action.default})" in " ".join(text.split()), action.dest


def test_wrong_use_and_a_lack_of_memory_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def run(arguments: argparse.Namespace) -> int:
        raise arguments.error

    failing = Command("name", "about", "description", lambda parser: None, run)
    for error, message in (
        (UsageError("too long"), "name: too long\n"),
        (MemoryError("1 TB"), "name: out of memory: 1 TB\n"),
    ):
        assert failing.execute(argparse.Namespace(error=error)) == 2
        assert capsys.readouterr().err == message
    with pytest.raises(RuntimeError, match="a bug"):
        failing.execute(argparse.Namespace(error=RuntimeError("a bug")))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
def test_an_installed_package_away_from_the_checkout(
    installed: Path, tmp_path: Path, words: list[str], status: int, said: str
) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed), "HTREE_COMMIT": ""}
    script = [sys.executable, "-m", "htree_ops", *words]
    done = subprocess.run(script, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stderr
    assert said in done.stdout + done.stderr
    assert not list(tmp_path.iterdir()), "nothing is written that was not asked for"
