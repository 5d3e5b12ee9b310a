"""Verdicts, floors, the byte model and the command line of the IO-only comparison (docs/semantics §2.4, §2.5)."""

import argparse
import dataclasses
import json
import re

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from benchmarks.harness import io_floor, timing
from htree_ops import bench
from htree_ops.__main__ import PROGRAM as program
from htree_ops.bench import io_only
from htree_ops.bench.io_model import PipelineProblem, Traffic, candidate_sums, layer_sizes, traffic
from htree_ops.bench.io_pipeline import SELECTIONS, Pipeline, Recorder, make_inputs
from htree_ops.tuning.metrics import peak_of
from tests.support.cases import Case, normal
from tests.support.compare import assert_close_spec
from tests.support.tree_attention_calls import calls
from tests.support.tree_attention_cases import SHAPES

SMALL = PipelineProblem(
    seq_len=700, hq=4, h_kv=2, k_dim=8, v_dim=12, compression_rate=4, max_top_nodes=32, top_k=8
)
QUICK = timing.Effort(warm_up_ms=0.0, rounds=1, burst=1)


# ---- verdict


@pytest.mark.parametrize(
    ("full", "io", "expected"),
    [
        (100.0, 100.1, "inconclusive"),
        (100.0, 100.0, "IO-bound"),
        (100.0, 80.1, "IO-bound"),
        (100.0, 80.0, "balanced"),
        (100.0, 50.0, "balanced"),
        (100.0, 49.9, "compute-bound"),
        (1234.56, 987.65, "IO-bound"),  # 19.99984 %, printed as 20.0
    ],
)
def test_verdict_decides_on_the_unrounded_value(full, io, expected):
    assert bench.verdict(full, io) == expected


def test_the_example_of_the_document():
    text = io_only.format_summary(1234.56, 987.65)
    assert text.splitlines() == [
        "Results (avg ms / iter):",
        "  Full Computation: 1234.56 ms",
        "  IO-Only        : 987.65 ms",
        "",
        "Analysis:",
        "  Speedup (Full/IO): 1.25x",
        "  Computation overhead: 20.0% of total time",
        "  IO time (approx): 987.65 ms (80.0% of total)",
        "  Verdict: IO-bound",
    ]


@hypothesis.given(full=st.floats(1e-3, 1e6), io=st.floats(1e-3, 1e6))
def test_verdict_follows_the_overhead(full, io):
    overhead = 100 * (full - io) / full
    names = {
        "inconclusive": (-1e12, 0),
        "IO-bound": (0, 20),
        "balanced": (20, 50),
        "compute-bound": (50, 101),
    }
    low, high = names[bench.verdict(full, io)]
    assert low <= overhead <= high


IMPOSSIBLE = [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0), (float("nan"), 1.0), (1.0, float("inf"))]


@pytest.mark.parametrize(("full", "io"), IMPOSSIBLE)
def test_verdict_refuses_impossible_times(full, io):
    with pytest.raises(ValueError, match="positive and finite"):
        bench.verdict(full, io)


def test_peaks_by_name():
    assert peak_of("NVIDIA H200") == 4800.0
    assert peak_of("NVIDIA H100 PCIe") == 2039.0
    assert peak_of("NVIDIA H100 80GB HBM3") == 3352.0
    assert peak_of("Some GPU") is None


# ---- floors


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoresCase(Case):
    """A case whose inputs are the arguments of select_topk."""

    def make_inputs(self, device, seed=0):
        scores = normal((1, 64, 1, 256, 2), self.dtype, device, seed)
        return scores, torch.full((1, 64, 1), 256, dtype=torch.int32, device=device), 16

    def bytes(self) -> int:
        return 64 * 256 * 2 * 4

    def flops(self) -> int:
        return 64 * 256


def test_floor_of_bytes_and_of_an_io_only_variant(monkeypatch):
    case = ScoresCase(name="rows", dtype=torch.float32)
    assert io_floor.floor("softmax", case, "cpu", 10.0) == io_floor.Floor(case.bytes() / 10.0 / 1e3, "copy")
    monkeypatch.setattr(io_floor, "copy_bandwidth", lambda device: 20.0)
    assert io_floor.floor("softmax", case) == io_floor.Floor(case.bytes() / 20.0 / 1e3, "copy")
    io_only = io_floor.floor("select_topk", case, "cpu", 10.0, QUICK)
    assert io_only.kind == "io_only"
    assert io_only.us > 0
    with pytest.raises(ValueError, match="bandwidth"):
        io_floor.floor("softmax", case, "cpu", 0.0)


def test_every_io_only_variant_takes_the_arguments_of_its_op():
    case = next(shape for shape in SHAPES if shape.name == "long_prefill")
    tested = {call.op: call for call in calls(case, "cpu") if call.op in io_floor.IO_ONLY}
    assert set(tested) == set(io_floor.IO_ONLY)
    for op, call in tested.items():
        ours, theirs = io_floor.IO_ONLY[op](*call.args), call()
        for got, wanted in zip(*(x if isinstance(x, tuple) else (x,) for x in (ours, theirs)), strict=True):
            assert got.shape == wanted.shape
            assert got.dtype == wanted.dtype


# ---- pipelines


@pytest.mark.parametrize("rows", [700, 333])
def test_the_full_pipeline_is_tree_attention(rows, device):
    q, k, v = make_inputs(SMALL, device, 1)
    recorder = Recorder(device)
    out = Pipeline(SMALL, rows)(q, k, v, recorder)
    options = (SMALL.compression_rate, SMALL.max_top_nodes, SMALL.top_k)
    assert_close_spec(out, torch.ops.htree.attention(q, k, v, *options).cpu(), rtol=1e-4, atol=1e-4)
    assert set(recorder.milliseconds()) == set(traffic(SMALL))
    assert all(ms >= 0 for ms in recorder.milliseconds().values())


@pytest.mark.parametrize("map_positions", [False, True])
@pytest.mark.parametrize("select", SELECTIONS)
def test_the_io_only_pipeline_in_every_mode(select, map_positions, device):
    q, k, v = make_inputs(SMALL, device, 1)
    out = Pipeline(SMALL, 333, True, select, map_positions)(q, k, v)
    assert out.shape == (1, 700, 4, 12)
    assert out.isfinite().all()
    if select in ("lcg", "stratified"):
        options = (SMALL.compression_rate, SMALL.max_top_nodes, SMALL.top_k, None, select, map_positions)
        assert_close_spec(
            out, torch.ops.htree.io_attention_forward(q, k, v, *options).cpu(), rtol=1e-5, atol=1e-6
        )


# ---- bytes


@hypothesis.given(
    seq_len=st.integers(1, 900), rate=st.integers(2, 6), top_k=st.integers(1, 9), nodes=st.integers(1, 40)
)
def test_candidate_sums_are_those_of_the_ops(seq_len, rate, top_k, nodes):
    problem = PipelineProblem(
        seq_len=seq_len,
        hq=1,
        k_dim=2,
        v_dim=1,
        compression_rate=rate,
        top_k=top_k,
        max_top_nodes=min(nodes, top_k * rate),
    )
    q, k, _ = make_inputs(problem, "cpu", 0)
    ops, num_layers = torch.ops.htree, len(layer_sizes(problem))
    lists = ops.top_parents(1, seq_len, 1, top_k, num_layers, rate)
    cos, sin = ops.rope_cache(problem.capacity, 2, device="cpu").unbind()
    layers = [k]
    while len(layers) < num_layers:
        layers.append(ops.tree_build(layers[-1], layers[-1], rate)[0])
    sums = candidate_sums(problem)
    for layer in reversed(range(num_layers)):
        scores, num = ops.compute_scores(q, layers[layer], lists, cos, sin, layer, rate)
        assert sums[layer] == (int(num.sum()), int(num.clamp(max=top_k).sum()))
        lists = ops.compute_next_parents(lists, ops.select_topk(scores, num, top_k), rate)


def test_the_documented_sizes():
    """The byte counts are those of §2.5 for the default flags."""
    problem = PipelineProblem()
    assert layer_sizes(problem) == [120_000, 7500]
    assert problem.score_bytes == 62_914_560_000
    sums = candidate_sums(problem)
    written = [64 * n for n, _ in sums]
    assert written[0] / 1e9 == pytest.approx(60.7, abs=0.05)
    assert written[1] / 1e9 == pytest.approx(28.8, abs=0.05)
    moved = traffic(problem)
    build = 1 * 1 * 32 * 4 * (120_000 + 7500)
    assert moved[1, "tree_build"] == Traffic(build, build)
    small = 4 * 120_000 * 513
    assert moved[1, "select_topk"] == Traffic(written[1] + small, 2 * written[1] + small)
    assert moved[-1, "final_normalize"].unique == 120_000 * 16 * (4 + 64 + 64)
    assert moved[0, "merge_to_global_"].unique == 120_000 * 16 * 3 * 72
    assert all(0 < t.unique <= t.requested for t in moved.values())
    assert (0, "select_topk") not in moved


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"seq_len": 0}, "seq_len must be at least 1"),
        ({"compression_rate": 1}, "compression_rate must be at least 2"),
        ({"hq": 3, "h_kv": 2}, "multiple of h_kv"),
        ({"k_dim": 7}, "k_dim must be even"),
        ({"max_top_nodes": 8193}, "at most top_k"),
    ],
)
def test_impossible_problems(change, complaint):
    with pytest.raises(ValueError, match=complaint):
        PipelineProblem(**change)


# ---- command line


def test_rows_that_fit():
    problem = PipelineProblem()
    assert io_only.choose_rows(problem, 140 * 10**9) == 120_000
    some = io_only.choose_rows(problem, 32 * 10**9)
    assert 40_000 < some < 60_000
    with pytest.raises(io_only.UsageError, match="not enough memory"):
        io_only.choose_rows(problem, 600 << 20)


def test_defaults_of_the_flags():
    parser = argparse.ArgumentParser()
    io_only.COMMAND.fill(parser)
    flags = vars(parser.parse_args([]))
    assert flags == {
        "batch": 1, "seq_len": 120_000, "hq": 16, "h_kv": 1, "k_dim": 16, "v_dim": 16, "compression_rate": 16,
        "max_top_nodes": 8192, "top_k": 512, "warmup": 3, "iters": 10, "dtype": "float32", "gpu": None, "seed": 42,
        "select": "lcg", "map_positions": False, "per_kernel": False, "json": None, "peak_gbps": None,
    }  # fmt: skip


SIZES = "--seq-len=300 --hq=2 --k-dim=8 --v-dim=8 --compression-rate=4 --max-top-nodes=16 --top-k=4"
TINY = f"io-only {SIZES} --warmup=0 --iters=1 --gpu=-1".split()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_run_on_the_cpu(tmp_path, monkeypatch, capsys, dtype):
    monkeypatch.setattr(io_only, "copy_bandwidth", lambda device: 10.0)
    path = tmp_path / "new" / "io.json"
    flags = f"--dtype {dtype} --per-kernel --json {path} --select stratified --map-positions"
    assert program.main([*TINY, *flags.split()]) == 0
    text = capsys.readouterr().out
    pattern = (
        r"Results \(avg ms / iter\):\n  Full Computation: [\d.]+ ms\n  IO-Only        : [\d.]+ ms\n\nAnalysis:\n"
        r"  Speedup \(Full/IO\): [\d.]+x\n  Computation overhead: -?[\d.]+% of total time\n"
        r"  IO time \(approx\): [\d.]+ ms \([\d.]+% of total\)\n"
        r"  Verdict: (inconclusive|IO-bound|balanced|compute-bound)\n"
    )
    assert re.search(pattern, text)
    assert "Fused pipeline (informational):" in text
    assert "unusable for correctness" in text
    assert "Per kernel (peak 10 GB/s, measured copy)" in text
    content = json.loads(path.read_text())
    assert content["flags"]["select"] == "stratified"
    assert content["summary"]["verdict"] in text
    assert {(k["layer"], k["kernel"]) for k in content["kernels"]} >= {
        (0, "compute_scores"),
        (1, "select_topk"),
    }
    (row,) = content["rows"]
    assert (row["gpu"], row["commit"], row["baseline"]) == ("none", "abc123", "IO-only variant")


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--hq", "3", "--h-kv", "2"], "multiple of h_kv"),
        (["--k-dim", "7"], "must be even"),
        (["--max-top-nodes", "100"], "at most top_k"),
        (["--compression-rate", "1"], "at least 2"),
        (["--iters", "0"], "at least 1"),
        (["--iters", "many"], "invalid integer value: 'many'"),
        (["--warmup", "-1"], "at least 0"),
        (["--dtype", "int8"], "invalid choice"),
        (["--select", "random"], "invalid choice"),
        (["--peak-gbps", "0"], "positive and finite"),
        (["--gpu", "99"], "--gpu 99: torch sees"),
        (["--gpu", "-2"], "--gpu -2: torch sees"),
        (["--seed", "99999999999999999999"], "argument --seed: must be at most"),
        (["--batch", "99999999999999999999"], "argument --batch: must be at most"),
        (["--json", "/proc/x.json"], "argument --json: /proc/x.json cannot be written"),
    ],
)
def test_bad_use_is_one_line_and_status_two(refusal_of, flags, complaint):
    assert complaint in refusal_of(program.main, [*TINY, *flags])
