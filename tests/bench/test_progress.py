"""The progress line on a terminal and elsewhere, and that of a build."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from htree_ops.bench import progress as module
from htree_ops.bench.progress import Progress, progress, progress_bar, watch


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_items_on_a_terminal() -> None:
    terminal = Terminal()
    assert list(progress(["x", "y"], str, terminal)) == ["x", "y"]
    assert "0/2 x" in terminal.getvalue()
    assert "1/2 y" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\033[K"), "nothing is left of it"


def test_short_work_is_silent_where_there_is_no_terminal() -> None:
    plain = io.StringIO()
    assert list(progress([1, 2, 3], str, plain)) == [1, 2, 3]
    assert plain.getvalue() == ""


def test_long_work_writes_a_line_now_and_then() -> None:
    plain, clock = io.StringIO(), Clock()
    bar = Progress(10, plain, clock)
    for _ in range(10):
        clock.now += module.EVERY / 4
        bar.advance("step")
    bar.clear()
    assert plain.getvalue() == "4/10 step, 30 s left\n8/10 step, 10 s left\n"


def test_a_total_that_is_not_known() -> None:
    terminal, clock = Terminal(), Clock()
    bar = Progress(0, terminal, clock)
    clock.now = 7.0
    bar.show("linking")
    assert terminal.getvalue().endswith("] linking, 7 s")


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_the_bar_of_a_search(stream: type[io.StringIO]) -> None:
    target = stream()
    show = progress_bar("label", target)
    show(1, 2)
    show(2, 2)
    last = "label [########################] 2/2\n"
    first = "\rlabel [############............] 1/2\r" if target.isatty() else ""
    assert target.getvalue() == first + last


NINJA = "print('[{done}/3] g++ -MMD -c -c /src/{name} -o /tmp/{name}.o -O3', flush=True)"


def build(*lines: str) -> list[str]:
    return [sys.executable, "-c", "\n".join(lines)]


def test_a_build_names_the_file_that_is_done(tmp_path: Path) -> None:
    terminal, log = Terminal(), tmp_path / "new" / "build.log"
    lines = [
        NINJA.format(done=1, name="a.cpp"),
        NINJA.format(done=2, name="b.cu"),
        "print('[3/3] g++ b.o -o x.so')",
    ]
    assert watch(log, build(*lines), terminal) == 0
    shown = terminal.getvalue().split("\r\033[K")
    assert "1/3 /src/a.cpp" in shown[1]
    assert "2/3 /src/b.cu" in shown[2]
    assert "3/3 " in shown[3], "linking"
    assert shown[-1] == "", "nothing is left of it"
    assert log.read_text().count("\n") == 3


def test_a_quick_build_is_silent_elsewhere_and_a_failed_one_is_not(tmp_path: Path) -> None:
    plain, log = io.StringIO(), tmp_path / "build.log"
    assert watch(log, build("print('fine')"), plain) == 0
    assert plain.getvalue() == ""
    lines = [
        "print('htree_ops: CUDA kernels off')",
        "print('a.cpp:3: error: no such type')",
        "for i in range(100): print('line', i)",
        "raise SystemExit(3)",
    ]
    assert watch(log, build(*lines), plain) == 3
    shown = plain.getvalue()
    assert shown.startswith("htree_ops: CUDA kernels off\n"), "what setup.py decided is always shown"
    assert "a.cpp:3: error: no such type\n" in shown
    assert "line 99\n" in shown
    assert "line 10\n" not in shown
    assert f"failed with status 3, all of it is in {log}: " in shown
    assert "line 10\n" in log.read_text()


def test_it_runs_by_its_path_without_the_package(tmp_path: Path) -> None:
    """The Makefile calls it before anything is built, so it imports neither the package nor torch."""
    command = [
        sys.executable,
        "-S",
        str(module.__file__),
        str(tmp_path / "log"),
        sys.executable,
        "-c",
        "print(7)",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "log").read_text() == "7\n"
