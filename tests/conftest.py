"""Rules that hold for every test: devices, Hypothesis settings, fresh memory, and a line that says what ran.

* ``device`` is a parameter, ``"cpu"`` and ``"cuda"``. A CUDA test is one with that parameter, with any other
  parameter that names a CUDA device, or with the marker ``gpu``. Without a GPU it is skipped.
* ``HTREE_REQUIRE_CUDA=1`` turns every skip of a CUDA test, and of a whole module, into a failure.
* ``--shard I/N`` runs part I of the parts 0 to N, so that several processes share the suite. Part 0 has the tests of
  more than 2^31 elements, which need most of a GPU's memory, and the others leave them out. A line "OUT OF MEMORY"
  names each test that failed for want of memory, which other processes may have taken; the exit status is 20 where a
  part ran to its end and nothing else failed.
* A kernel that faults ends the run: every later call of this process on the GPU fails of it, and so do those of other
  processes that share the GPU through the multi-process service. A line "FAULTED" names the test that saw it.
"""

import os
from collections import Counter

import hypothesis
import pytest
import torch

from htree_ops.info import cuda_missing
from tests.support.devices import poisoned_memory, require_cuda

# deadline: the first call of an op compiles, loads or warms up. derandomize: a run in CI must be repeatable.
hypothesis.settings.register_profile("default", deadline=None, print_blob=True, max_examples=100)
hypothesis.settings.register_profile(
    "ci", hypothesis.settings.get_profile("default"), derandomize=True, database=None
)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")

MISSING = cuda_missing()
REQUIRED = require_cuda()


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def device(request):
    """Device type to run on. Of module scope, so that it can be used beside Hypothesis' ``@given``."""
    return str(request.param)


@pytest.fixture
def nan_memory():
    """Fresh tensors of the test start as NaN; inside ``@given`` use ``poisoned_memory()`` itself."""
    with poisoned_memory():
        yield


@pytest.fixture
def refusal_of(capsys):
    """Runs a program that must refuse its arguments by status 2 and a line, before any output; returns the line."""

    def run(main, arguments, silent=True):
        try:
            status = main(arguments)
        except SystemExit as stop:
            status = stop.code
        said = capsys.readouterr()
        assert (status, said.err.count("\n")) == (2, 1), said
        assert not (silent and said.out), said
        return said.err

    return run


def is_cuda(item: pytest.Item) -> bool:
    if item.get_closest_marker("gpu"):
        return True
    callspec = getattr(item, "callspec", None)
    values = callspec.params.values() if callspec else ()
    return any(isinstance(v, (str, torch.device)) and str(v).split(":")[0] == "cuda" for v in values)


def shard(text: str) -> tuple[int, int]:
    """``I/N`` with 0 <= I <= N and N >= 1, as two ints."""
    try:
        part, of = map(int, text.split("/"))
    except ValueError:
        part, of = 0, 0
    if not 0 <= part <= of or of == 0:
        raise pytest.UsageError(f"--shard: expected I/N with 0 <= I <= N and N >= 1, got {text}")
    return part, of


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shard",
        type=shard,
        metavar="I/N",
        help="run part I of the parts 0 to N of the tests; part 0 has the largest tensors",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (asked := config.getoption("shard")) is None:
        return
    part, of = asked
    large = [item for item in items if "more_than_2_31" in item.nodeid]
    ranks = [item for item in items if "gpus" in getattr(item, "fixturenames", ())]
    apart = {*large, *ranks}
    others = [item for item in items if item not in apart]
    chosen = set(large if part == 0 else others[part - 1 :: of] + (ranks if part == 1 else []))
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    torch.set_num_threads(1)  # tiny calls, beside another process; tests/test_threads.py has more threads
    torch.backends.cuda.matmul.allow_tf32 = False  # an fp32 reference on the GPU must be fp32
    torch.backends.cudnn.allow_tf32 = False


def pytest_itemcollected(item: pytest.Item) -> None:
    if is_cuda(item):
        item.extra_keyword_matches.add("cuda")  # `-k cuda` is every CUDA test, and nothing else


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if MISSING and is_cuda(item):
        pytest.skip(f"no CUDA: {MISSING}")


@pytest.hookimpl(trylast=True)  # after the fixtures, some of which patch torch.cuda
def pytest_runtest_teardown() -> None:
    """Frees what the caching allocator keeps, because several processes of one run share the GPU."""
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 1 << 30:
        torch.cuda.empty_cache()


def forbid_skip(report: pytest.TestReport | pytest.CollectReport, what: str) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
    report.outcome = "failed"
    report.longrepr = f"HTREE_REQUIRE_CUDA=1 allows no skip of {what}: {reason}"


def gpu_is_lost() -> bool:
    """Whether a kernel has faulted."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


FAULTED = pytest.StashKey[str]()
OUT_OF_MEMORY = pytest.StashKey[list[str]]()
ONLY_OUT_OF_MEMORY = 20  # exit status


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    report.device = "cuda" if is_cuda(item) else "cpu"
    if (
        report.failed
        and call.excinfo
        and "CUDA" in (text := str(call.excinfo.value))
        and "out of memory" in text
    ):
        item.config.stash.setdefault(OUT_OF_MEMORY, []).append(item.nodeid)
    if report.failed and gpu_is_lost():
        item.config.stash.setdefault(FAULTED, item.nodeid)
        item.session.shouldfail = "a kernel has faulted: later tests would fail of it"
    if REQUIRED and report.skipped and report.device == "cuda" and not hasattr(report, "wasxfail"):
        forbid_skip(report, "a CUDA test")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    report = yield
    if REQUIRED and report.skipped:
        forbid_skip(report, "a module, which may hold CUDA tests")
    return report


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if REQUIRED and MISSING and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    lacked = session.config.stash.get(OUT_OF_MEMORY, [])
    stopped = session.shouldfail or session.shouldstop
    if session.config.getoption("shard") and lacked and len(lacked) == session.testsfailed and not stopped:
        session.exitstatus = ONLY_OUT_OF_MEMORY


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts: Counter[tuple[str, str]] = Counter()
    for outcome in ("passed", "failed", "error", "xfailed", "xpassed", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            if hasattr(report, "device") and (
                report.when == "call" or outcome in ("error", "skipped", "failed")
            ):
                counts[report.device, "skipped" if outcome == "skipped" else "ran"] += 1
    parts = [
        f"{name}: {counts[name, 'ran']} ran, {counts[name, 'skipped']} skipped" for name in ("cpu", "cuda")
    ]
    why = f" (no CUDA: {MISSING})" if MISSING else f" ({torch.cuda.get_device_name()})"
    required = ", required by HTREE_REQUIRE_CUDA=1" if REQUIRED else ""
    terminalreporter.write_line(f"devices: {'; '.join(parts)}{why}{required}")
    for test in terminalreporter.config.stash.get(OUT_OF_MEMORY, []):
        terminalreporter.write_line(f"OUT OF MEMORY {test}")
    if faulted := terminalreporter.config.stash.get(FAULTED, None):
        terminalreporter.write_line(f"FAULTED {faulted}")
