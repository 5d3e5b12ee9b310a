"""The suite's choices, comparisons and command lines on a CPU (docs/semantics/python.md §3.4)."""

import csv
import dataclasses
import importlib
import io
import math
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from benchmarks import tree_stages
from benchmarks.__main__ import PROGRAM as program
from benchmarks.harness import compare, results, run, suite
from benchmarks.harness.plain_rows import print_rows
from htree_ops import bench
from htree_ops.cli import output_file
from tests.support.causal_softmax_cases import CausalSoftmaxCase, masked_softmax

ROOT = Path(__file__).resolve().parents[2]
ROW = results.Row(
    gpu="Some GPU",
    cpu="some CPU, 2 threads",
    torch="2.11",
    cuda="13.0",
    driver="580",
    commit="0123456789",
    ceiling_gb_per_s=4000.0,
    op="hadamard_transform",
    case="1024x128",
    shapes="1024x128",
    dtype="bfloat16",
    bytes=400_000_000,
    flops=1_000_000,
    median_us=125.0,
    p20_us=123.0,
    p80_us=128.0,
    num_samples=100,
    graph_us=None,
    sustained_us=None,
    gb_per_s=3200.0,
    tflops=0.008,
    percent_of_ceiling=80.0,
    baseline="eager",
    baseline_computes_the_same=True,
    baseline_median_us=250.0,
    baseline_p20_us=249.0,
    baseline_p80_us=251.0,
    baseline_graph_us=None,
    baseline_sustained_us=None,
    speedup=2.0,
)


def row(**changes):
    return dataclasses.replace(ROW, **changes)


# ---- choosing


def make(op, case_name, dtype, *baselines):
    case = CausalSoftmaxCase(name=case_name, dtype=dtype, shape=(4, 8, 8))
    candidates = [suite.Candidate(name, lambda x, block_size: x) for name in baselines]
    return suite.Benchmark(op, case, suite.Candidate("ours", lambda x, b: x), candidates, lambda i, r: None)


def test_selecting_by_case_dtype_and_baseline():
    every = [
        make("a", "one", torch.float32, "eager", "torch.compile"),
        make("a", "two", torch.bfloat16, "eager"),
        make("b", "one", torch.bfloat16, "torch.compile"),
    ]
    assert suite.select(every, "") == every
    assert [b.op for b in suite.select(every, "^b/")] == ["b"]
    assert [b.case.name for b in suite.select(every, "", ["bfloat16"])] == ["two", "one"]
    only = suite.select(every, "", (), "compile")
    assert [(b.op, [c.name for c in b.baselines]) for b in only] == [
        ("a", ["torch.compile"]),
        ("b", ["torch.compile"]),
    ]


def tiny(computed=masked_softmax):
    """Benchmarks of one small case in two dtypes; ``computed`` is the op."""

    def check(inputs, result):
        assert result.shape == inputs[0].shape
        assert result.isfinite().all()

    def eager(x, block_size):
        return masked_softmax(x)

    return [
        suite.Benchmark(
            "softmax",
            CausalSoftmaxCase(name="tiny", dtype=dtype, shape=(8, 16, 16)),
            suite.Candidate("ours", lambda x, block_size: computed(x)),
            [suite.Candidate("eager", eager), suite.Candidate("again", eager)],
            check,
        )
        for dtype in (torch.float32, torch.bfloat16)
    ]


@pytest.fixture
def families(monkeypatch):
    """Which benchmarks each family has."""
    found = {"hadamard": tiny()}
    monkeypatch.setattr(run, "copy_bandwidth", lambda device: 10.0)
    monkeypatch.setattr(run, "make_benchmarks", lambda family, device: found[family])
    return found


ON_THE_CPU = ["run", "hadamard", "--device", "cpu"]


def test_flags_of_the_command_line(families, tmp_path, capsys):
    out = tmp_path / "rows.csv"
    flags = ["--repeat", "1", "--dtype", "bfloat16", "--baseline", "^ag", "--csv", str(out)]
    assert program.main([*ON_THE_CPU, *flags]) == 0
    (got,) = results.read_rows(out)
    assert (got.dtype, got.baseline) == ("bfloat16", "again")
    assert got.floor_kind == "copy"
    assert got.floor_us == pytest.approx(got.bytes / 10.0 / 1e3)
    assert got.percent_of_floor == pytest.approx(100 * got.floor_us / got.median_us)
    assert got.verdict == bench.verdict(got.median_us, got.floor_us)
    shown = capsys.readouterr().out
    assert "% floor" in shown
    assert got.verdict in shown


def test_a_case_that_does_not_fit_is_named_and_the_others_are_timed(families, tmp_path, capsys):
    def large(x):
        return torch.empty(2**60) if x.dtype == torch.float32 else masked_softmax(x)

    families["hadamard"] = tiny(large)
    out = tmp_path / "rows.csv"
    assert program.main([*ON_THE_CPU, "--repeat", "1", "--csv", str(out)]) == 1
    assert {row.dtype for row in results.read_rows(out)} == {"bfloat16"}
    captured = capsys.readouterr()
    assert "softmax tiny-float32: out of memory, not timed: " in captured.err
    assert "0 cases wrong, not timed; 1 case out of memory, not timed" in captured.out

    def broken(x):
        raise RuntimeError("no")

    families["hadamard"] = tiny(broken)
    with pytest.raises(RuntimeError, match="no"):
        program.main(ON_THE_CPU)


def test_a_wrong_result_is_not_timed(families, tmp_path, capsys):
    families["hadamard"] = tiny(lambda x: x[:4])
    out = tmp_path / "rows.csv"
    assert program.main([*ON_THE_CPU, "--csv", str(out)]) == 1
    assert "softmax tiny-float32: ours is wrong" in capsys.readouterr().err
    families["hadamard"] = tiny()
    assert program.main([*ON_THE_CPU, "--repeat", "1", "--csv", str(out)]) == 0
    rows = results.read_rows(out)
    assert {(row.case, row.commit, row.ceiling_gb_per_s) for row in rows} == {("tiny", "abc123", 10.0)}
    assert "copy ceiling 10 GB/s" in capsys.readouterr().out


def test_every_family_can_be_loaded():
    for family in run.FAMILIES:
        assert callable(importlib.import_module(f"benchmarks.{family}").make_benchmarks)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--case", "nothing"], "there are softmax/tiny-float32"),
        (["--case", "["], "not a regular expression"),
        (["--dtype", "int4"], "there are bfloat16, float32"),
        (["--baseline", "cuBLAS"], "there are again, eager"),
        (["--repeat", "0"], "must be at least 1"),
        (
            ["--csv", "/dev/null/x"],
            "argument --csv: /dev/null/x cannot be written: a folder above it is a file",
        ),
        (["--csv", "/dev"], "argument --csv: /dev cannot be written: Is a directory"),
        (["--family", "absent"], "unrecognized arguments"),
        (["--device", "tpu"], "invalid choice"),
        (["--nonsense"], "unrecognized arguments"),
    ],
)
def test_bad_flags_are_one_line_and_status_two(families, refusal_of, flags, complaint):
    assert complaint in refusal_of(program.main, [*ON_THE_CPU, *flags])


def test_a_gpu_that_is_not_there(families, refusal_of, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "sees no GPU" in refusal_of(program.main, ["run", "hadamard", "--device", "cuda"])


def test_trying_a_file_leaves_nothing_behind(tmp_path):
    path = tmp_path / "new" / "rows.csv"
    assert output_file(str(path)) == path
    assert not path.exists()
    path.write_text("old")
    assert output_file(str(path)).read_text() == "old"


# ---- comparing


def write(path: Path, *rows: results.Row) -> str:
    results.write_rows(path, rows)
    return str(path)


def test_compare_flags_what_exceeds_tolerance_and_noise(tmp_path, capsys):
    old = write(tmp_path / "old.csv", row(), row(case="b"), row(case="c"), row(case="gone"))
    quiet = {"p20_us": 149.0, "p80_us": 151.0}
    new = write(
        tmp_path / "new.csv",
        row(median_us=127.0, p20_us=126.0, p80_us=128.0),  # within the tolerance
        row(case="b", median_us=150.0, p20_us=100.0, p80_us=160.0),  # within the noise
        row(case="c", median_us=150.0, **quiet),
        row(case="new"),
    )
    assert program.main(["compare", old, new]) == 1
    shown = capsys.readouterr().out
    assert "3 cases compared, 1 slower" in shown
    assert [line.split()[1] for line in shown.splitlines() if line.endswith("  slower")] == ["c"]
    assert program.main(["compare", old, new, "--tolerance", "25"]) == 0
    assert program.main(["compare", new, old]) == 0
    assert "faster" in capsys.readouterr().out
    assert program.main(["compare", old, old]) == 0


def test_compare_uses_graph_times_where_both_have_them():
    (change,) = compare.compare([row(graph_us=100.0)], [row(graph_us=110.0)])
    assert (change.old_us, change.new_us, change.verdict) == (100.0, 110.0, "slower")
    (change,) = compare.compare([row()], [row(graph_us=110.0)])
    assert (change.old_us, change.new_us, change.verdict) == (125.0, 125.0, "same")


@hypothesis.given(
    old=st.floats(1, 1e6), factor=st.floats(0.2, 5), spread=st.floats(0, 0.5), tolerance=st.floats(0, 50)
)
def test_compare_is_antisymmetric_and_quiet_on_equal_runs(old, factor, spread, tolerance):
    def timed(time):
        return row(median_us=time, p20_us=time * (1 - spread), p80_us=time * (1 + spread))

    (forward,) = compare.compare([timed(old)], [timed(old * factor)], tolerance)
    (back,) = compare.compare([timed(old * factor)], [timed(old)], tolerance)
    opposite = {"slower": "faster", "faster": "slower", "same": "same"}
    bound = 1 + max(forward.tolerance, forward.noise)
    if abs(math.log(max(factor, 1 / factor)) - math.log(bound)) > 1e-9:
        assert back.verdict == opposite[forward.verdict]
    (equal,) = compare.compare([timed(old)], [timed(old)], tolerance)
    assert equal.verdict == "same"


def test_compare_refuses_what_cannot_be_compared(tmp_path, refusal_of):
    good = write(tmp_path / "good.csv", row())
    files = {
        "other machine": (write(tmp_path / "gpu.csv", row(gpu="Other GPU")), "different machines"),
        "other cases": (write(tmp_path / "case.csv", row(case="x")), "no case in common"),
        "absent": (str(tmp_path / "absent.csv"), "No such file"),
        "a folder": (str(tmp_path), "directory"),
    }
    header, cells = Path(good).read_text().splitlines()

    def edited(**values):
        changed = dict(zip(header.split(","), next(csv.reader([cells])), strict=True)) | values
        text = io.StringIO()
        csv.writer(text).writerows([changed.keys(), changed.values()])
        return text.getvalue()

    for name, content, complaint in (
        ("text", "hello", "not a results file: it lacks the columns baseline, "),
        ("empty", "", "not a results file: it lacks the columns baseline, "),
        ("more", edited(colour=1), "it has the columns colour"),
        ("type", edited(median_us="fast"), "median_us must be a number, got 'fast'"),
        ("zero", edited(median_us=0.0), "median_us must be above 0, got '0.0'"),
        ("no time", edited(graph_us=math.nan), "graph_us must be a number, got 'nan'"),
        ("answer", edited(baseline_computes_the_same="yes"), "must be True or False, got 'yes'"),
        ("short", f"{header}\na,b\n", "row 0: torch must be there, got None"),
        ("long", f"{header}\n{cells},1\n", "row 0 has more cells than the header"),
        ("binary", "\udcff", "not CSV"),
    ):
        path = tmp_path / f"bad_{name}.csv"
        path.write_bytes(content.encode(errors="surrogateescape"))
        files[name] = (str(path), complaint)
    for name, (path, complaint) in files.items():
        assert complaint in refusal_of(program.main, ["compare", good, path]), name
    assert program.main(["compare", good, good, "--tolerance", "-1"]) == 2


def test_the_folder_runs_as_a_program():
    command = [sys.executable, "-m", "benchmarks", "compare", "absent.csv", "absent.csv"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.startswith("compare: absent.csv")


# ---- the stages of tree attention


def test_the_stages_pass_their_own_gate_and_a_wrong_result_does_not(device):
    for benchmark in tree_stages.make_benchmarks(device):
        sizes = {"queries": 20, "width": 8, "top_k": 16, "rate": 4, "group": 2}
        small = dataclasses.replace(benchmark, case=dataclasses.replace(benchmark.case, **sizes))
        candidates = [small.ours, *small.baselines]
        inputs, calls = suite.make_calls(small, candidates, device, num_sets=1)
        for candidate in candidates:
            suite.gate(small, candidate, inputs, calls[candidate.name][0])

        def wrong(call=calls["htree_ops"][0]):
            result = call()
            first = result[0] if isinstance(result, tuple) else result
            first[0, 3] += 1
            return result

        with pytest.raises(suite.GateError, match="is wrong and is not timed"):
            suite.gate(small, small.ours, inputs, wrong)
        assert small.case.bytes() > 0
        assert small.case.flops() > 0


def test_plain_rows_are_written_whole(tmp_path, capsys):
    rows = [{"name": "a", "error": 1 / 3}, {"name": "b, c", "error": 2.0}]
    print_rows(rows, tmp_path / "rows.csv")
    assert capsys.readouterr().out == 'name,error,commit\na,0.333,abc123\n"b, c",2,abc123\n'
    with (tmp_path / "rows.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [{"name": row["name"], "error": float(row["error"])} for row in read] == rows
    print_rows([{"commit": "its own", "error": 2.0}])
    assert capsys.readouterr().out == "commit,error\nits own,2\n"


def test_plain_rows_need_a_row():
    with pytest.raises(ValueError, match="rows: at least one is required, got none"):
        print_rows([])


def test_plain_rows_are_written_as_they_come(tmp_path):
    path, first = tmp_path / "new" / "rows.csv", "name,error,commit\na,0.5,abc123\n"

    def measured():
        yield {"name": "a", "error": 0.5}
        assert path.read_text() == first
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        print_rows(measured(), path)
    assert path.read_text() == first
    assert print_rows(iter([{"name": "b", "error": 1.0}])) == [{"name": "b", "error": 1.0}]
