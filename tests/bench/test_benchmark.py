"""The benchmark machinery on a CPU: statistics, fairness of the loop, the gate, rows and their files."""

import csv
import dataclasses
import itertools
import subprocess
from collections import Counter
from dataclasses import dataclass

import pytest
import torch

from benchmarks import causal_softmax
from benchmarks.harness import results, suite, timing
from htree_ops import info
from htree_ops.cli import UsageError
from htree_ops.info import Environment, source_commit
from htree_ops.tuning.clock import CpuClock, CudaClock, clock_for, copy_bandwidth, percentile
from tests.support.cases import Case, normal
from tests.support.causal_softmax_cases import CausalSoftmaxBackwardCase, CausalSoftmaxCase
from tests.support.compare import assert_close_spec


class FakeCounter:
    """Seconds that pass only when a call says so."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def call(self, *microseconds: float):
        """A function whose calls take the given times one after another, and the last time ever after."""
        remaining = list(microseconds)

        def run() -> None:
            self.seconds += (remaining.pop(0) if len(remaining) > 1 else remaining[0]) * 1e-6

        return run


@dataclass(frozen=True, kw_only=True)
class SumCase(Case):
    """The sum of x [n]."""

    n: int

    def make_inputs(self, device, seed=0):
        return (normal((self.n,), self.dtype, device, seed),)

    def bytes(self) -> int:
        return self.n * self.dtype.itemsize

    def flops(self) -> int:
        return self.n


CASE = SumCase(name="small", dtype=torch.float32, n=1 << 20)
ENVIRONMENT = Environment(
    gpu="none",
    cpu="some CPU, 2 threads",
    torch="2.11",
    cuda="none",
    driver="none",
    commit="0123",
    ceiling_gb_per_s=20.0,
)
QUICK = timing.Effort(warm_up_ms=0.0, rounds=3, burst=2)


def check_sum(inputs, result) -> None:
    assert_close_spec(result, inputs[0].double().sum(), 1e-4, 1e-2)


def sum_benchmark(ours=torch.sum, baselines=None) -> suite.Benchmark:
    if baselines is None:
        baselines = [suite.Candidate("eager", lambda x: x.sum())]
    return suite.Benchmark("sum", CASE, suite.Candidate("htree_ops", ours), baselines, check_sum)


def test_percentiles_on_known_samples():
    samples = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(samples, p) for p in (0, 20, 50, 80, 90, 100)] == pytest.approx(
        [1, 1.8, 3, 4.2, 4.6, 5]
    )
    assert percentile([7.0], 80) == 7.0
    for samples, percent in (([], 50), ([1.0], 101), ([1.0], -1)):
        with pytest.raises(ValueError):
            percentile(samples, percent)
    assert timing.summarise(range(1, 102)) == timing.Timing(51.0, 21.0, 81.0, 101)


def test_measure_on_a_fake_clock():
    counter = FakeCounter()
    clock = CpuClock(counter)
    candidates = {
        "fast": [counter.call(10.0)],
        "slow": [counter.call(40.0)],
        "first": [counter.call(9e6, 5.0)],
    }
    measured = timing.measure(candidates, clock, timing.Effort(rounds=4, burst=5, warm_up_ms=1.0))
    for name, expected in (
        ("fast", 10.0),
        ("slow", 40.0),
        ("first", 5.0),
    ):  # the compiling call is not counted
        assert measured[name].median_us == pytest.approx(expected)
        assert measured[name].num_samples == 20


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
def test_each_candidate_follows_each_other_one_equally_often(count):
    followers = Counter()
    for turn in range(2 * count):
        order = timing.order_of_turn(count, turn)
        assert sorted(order) == list(range(count))
        followers.update(itertools.pairwise(order))
    assert followers == dict.fromkeys(itertools.permutations(range(count), 2), 2)


def test_a_disturbed_measurement_is_taken_again():
    effort = timing.Effort(rounds=4, burst=5, warm_up_ms=0.0)
    busy = [10.0, 10.0, *[80.0, 10.0] * 10]  # first call, warm-up, 20 samples; every other one waits

    def measured(*times):
        counter = FakeCounter()
        candidates = {"steady": [counter.call(20.0)], "ours": [counter.call(*times)]}
        return timing.measure_undisturbed(candidates, CpuClock(counter), effort), counter.seconds

    quiet, seconds = measured(10.0)
    found, twice = measured(*busy, 10.0)
    assert found["ours"].p80_us == pytest.approx(quiet["ours"].p80_us)
    assert twice > 2 * seconds
    worse = [10.0, 10.0, *[200.0, 10.0] * 10]
    found, _ = measured(*worse, *busy, *worse, 10.0)
    assert found["ours"].p80_us == pytest.approx(80.0), "the steadiest of three"
    assert found["steady"].median_us == pytest.approx(20.0)


def test_warm_up_lasts_as_long_as_asked_and_not_longer():
    counter = FakeCounter()
    calls = [counter.call(2000.0)]
    assert timing.warm_up(calls, CpuClock(counter), 25.0) == pytest.approx(2000.0)
    assert counter.seconds == pytest.approx(14 * 2e-3)  # the first call, then 13 to reach 25 ms


def test_long_calls_get_short_turns():
    counter = FakeCounter()
    effort = timing.Effort(rounds=2, burst=10, turn_ms=200.0)
    candidates = {
        "long": [counter.call(90e3)],
        "very long": [counter.call(3e6)],
        "short": [counter.call(10.0)],
    }
    measured = timing.measure(candidates, CpuClock(counter), effort)
    assert {name: t.num_samples for name, t in measured.items()} == {"long": 4, "very long": 2, "short": 20}


def test_candidates_alternate_and_inputs_rotate():
    log = []
    counter = FakeCounter()

    def call(name, index):
        def run():
            counter.seconds += 1e-6
            log.append((name, index))

        return run

    candidates = {name: [call(name, i) for i in range(3)] for name in ("a", "b")}
    effort = timing.Effort(rounds=3, burst=2, warm_up_ms=0.0)
    timing.measure(candidates, CpuClock(counter), effort)
    timed = log[4:]  # the first four are warm-up calls, two of each
    assert "".join(name for name, _ in timed) == "aabb" + "bbaa" + "aabb"
    for name in candidates:
        assert [index for called, index in timed if called == name] == [0, 1, 2, 0, 1, 2]


def test_sustained_counts_the_last_twenty_of_twenty_five():
    counter = FakeCounter()
    heating = counter.call(*[100.0] * 5, *[200.0] * 20)
    assert timing.sustained([heating], CpuClock(counter), call_us=150.0) == timing.Timing(
        *(pytest.approx(200.0) for _ in range(3)), num_samples=20
    )


@pytest.mark.parametrize(
    ("call_ms", "calls", "counted"), [(80, 25, 20), (100, 20, 16), (500, 4, 4), (5000, 2, 2)]
)
def test_sustained_load_has_an_end(call_ms, calls, counted):
    counter = FakeCounter()
    log = []
    heating = counter.call(*[call_ms * 1e3] * 25)
    measured = timing.sustained(
        [lambda: (log.append(1), heating())], CpuClock(counter), call_us=call_ms * 1e3
    )
    assert (len(log), measured.num_samples) == (calls, counted)


def test_long_calls_take_fewer_turns():
    counter = FakeCounter()
    effort = timing.Effort(rounds=10, warm_up_ms=0.0, candidate_ms=2000.0)
    calls = {
        "short": [counter.call(*[1e3] * 200)],
        "long": [counter.call(*[900e3] * 200)],
        "slow": [counter.call(*[5e6] * 9)],
    }
    measured = timing.measure(calls, CpuClock(counter), effort)
    assert {name: times.num_samples for name, times in measured.items()} == {
        "short": 100,
        "long": 2,
        "slow": 2,
    }


@pytest.mark.gpu
def test_cuda_outputs_rotate():
    seen = []

    def call():
        made = torch.empty(1 << 20, device="cuda")
        seen.append(made.data_ptr())
        return made

    CudaClock().time_calls([call] * 8, keep=4)
    assert len(set(seen[:4])) == 4


def test_enough_input_sets_to_leave_the_caches():
    assert timing.num_input_sets(268_000_000) == 2
    assert timing.num_input_sets(1_000_000) == 180
    assert timing.num_input_sets(7_000_000) * 7_000_000 >= timing.ROTATED_BYTES
    assert timing.num_input_sets(0) == timing.num_input_sets(8) == 4096
    assert timing.num_input_sets(timing.ALONE_BYTES - 1) == 2
    assert timing.num_input_sets(timing.ALONE_BYTES) == 1


def test_sustained_load_is_of_all_candidates_or_of_none():
    """A candidate just below the limit must be timed under the same load as the one above it."""
    counter = FakeCounter()
    clock, effort = CpuClock(counter), timing.Effort(sustained_from_us=1000.0)
    calls = {name: [counter.call(*[us] * 25)] for name, us in (("ours", 998.0), ("eager", 1002.0))}
    times = {name: timing.Timing(us, us, us, 1) for name, us in (("ours", 998.0), ("eager", 1002.0))}
    measured = suite.sustained_times(calls, times, clock, effort)
    assert measured == {"ours": pytest.approx(998.0), "eager": pytest.approx(1002.0)}
    assert suite.sustained_times({"ours": calls["ours"]}, {"ours": times["ours"]}, clock, effort) == {}


def test_candidates_of_one_maker_share_their_inputs():
    made = []

    def make(case, device, seed):
        made.append(seed)
        return (torch.full((4,), float(seed)),)

    candidates = [suite.Candidate(name, torch.neg, make) for name in ("one", "two")]
    benchmark = sum_benchmark(baselines=candidates)
    _, calls = suite.make_calls(benchmark, [benchmark.ours, *candidates], "cpu", num_sets=3)
    assert made == [0, 1, 2]
    assert [float(call()[0]) for call in calls["two"]] == [0.0, -1.0, -2.0]
    own = [suite.Candidate(name, torch.neg, lambda *a: make(*a)) for name in ("one", "two")]
    suite.make_calls(benchmark, own, "cpu", num_sets=1)
    assert made == [0, 1, 2, 0, 0]


def test_inputs_that_are_read_in_part_have_more_sets(monkeypatch):
    """What reads a twentieth of them takes as many as fit; a baseline that reads all of its own takes few."""

    class Partly(SumCase):
        reads_a_part = True

        def bytes(self):
            return super().bytes() // 20

    case = Partly(name="partly", dtype=torch.float32, n=1000)
    monkeypatch.setattr(timing, "num_input_sets", lambda size: 20 * 4000 // size)
    whole = suite.Candidate("whole", torch.neg, lambda case, device, seed: case.make_inputs(device, seed))
    benchmark = dataclasses.replace(sum_benchmark(), case=case)
    for most, expected in ((10**9, 400), (4000 * 50, 50)):
        monkeypatch.setitem(suite._MOST_BYTES, "cpu", most)
        _, calls = suite.make_calls(benchmark, [benchmark.ours, whole], "cpu")
        assert {name: len(some) for name, some in calls.items()} == {
            benchmark.ours.name: expected,
            "whole": 20,
        }


def test_copy_bandwidth_is_of_this_world(device):
    assert 0.5 < copy_bandwidth(device, 1 << 26) < 20_000


def test_clock_of_the_device_orders_short_and_long_work(device):
    sizes = {"short": 1 << 12, "long": 1 << 24}
    inputs = {name: torch.rand(n, device=device) for name, n in sizes.items()}
    candidates = {name: [lambda x=x: x.exp()] for name, x in inputs.items()}
    measured = timing.measure(candidates, clock_for(device), timing.Effort(rounds=3))
    assert 0 < measured["short"].median_us < measured["long"].median_us
    assert measured["long"].p20_us <= measured["long"].median_us <= measured["long"].p80_us


@pytest.mark.gpu
def test_cuda_graph_replay_runs_the_calls():
    x = torch.zeros(1, device="cuda")
    calls = [lambda: x.add_(1), lambda: x.add_(2), lambda: x.add_(3)]
    replay, count = timing.capture(calls)
    assert count == 12
    x.zero_()
    replay()
    assert x.item() == 4 * 6


def test_row_of_a_benchmark():
    rows = suite.run_benchmark(sum_benchmark(), "cpu", ENVIRONMENT, QUICK)
    assert len(rows) == 1
    row = rows[0]
    assert {field.name for field in dataclasses.fields(row)} >= {
        "gpu",
        "torch",
        "commit",
        "baseline",
        "shapes",
        "dtype",
    }
    assert (row.op, row.case, row.dtype, row.baseline) == ("sum", "small", "float32", "eager")
    assert (row.bytes, row.flops, row.commit, row.num_samples) == (4 << 20, 1 << 20, "0123", 6)
    assert row.p20_us <= row.median_us <= row.p80_us
    assert row.gb_per_s == pytest.approx(row.bytes / row.median_us / 1e3)
    assert row.tflops == pytest.approx(row.flops / row.median_us / 1e6)
    assert row.percent_of_ceiling == pytest.approx(100 * row.gb_per_s / 20.0)
    assert row.speedup == pytest.approx(row.baseline_median_us / row.median_us)
    assert (row.graph_us, row.baseline_graph_us) == (None, None)


def test_one_row_per_baseline_and_a_yardstick_is_marked():
    def yardstick(x):
        return x.max()

    baselines = [
        suite.Candidate("eager", torch.sum),
        suite.Candidate("maximum", yardstick, same_function=False),
        suite.Candidate(
            "own inputs", lambda x, y: x.sum() + y, lambda case, d, s: (*case.make_inputs(d, s), 0.0)
        ),
    ]
    rows = suite.run_benchmark(sum_benchmark(baselines=baselines), "cpu", ENVIRONMENT, QUICK)
    assert [(row.baseline, row.baseline_computes_the_same) for row in rows] == [
        ("eager", True),
        ("maximum", False),
        ("own inputs", True),
    ]
    assert "maximum (other function)" in results.format_table(rows)


@pytest.mark.parametrize("wrong", ["htree_ops", "eager"])
def test_the_gate_refuses_to_time_a_wrong_result(wrong):
    calls = []

    def wrong_sum(x):
        calls.append(x)
        return x[:-1000].sum() + 1

    benchmark = (
        sum_benchmark(ours=wrong_sum)
        if wrong == "htree_ops"
        else sum_benchmark(baselines=[suite.Candidate("eager", wrong_sum)])
    )
    with pytest.raises(suite.GateError, match=f"sum small-float32: {wrong} is wrong and is not timed"):
        suite.run_benchmark(benchmark, "cpu", ENVIRONMENT, QUICK)
    assert len(calls) == 1


def test_a_benchmark_needs_a_baseline_and_distinct_names():
    for baselines in ([], [suite.Candidate("htree_ops", torch.sum)]):
        with pytest.raises(ValueError, match="baselines and distinct names"):
            suite.run_benchmark(sum_benchmark(baselines=baselines), "cpu", ENVIRONMENT, QUICK)


def test_rows_come_back_from_a_file(tmp_path):
    row = suite.run_benchmark(sum_benchmark(), "cpu", ENVIRONMENT, QUICK)[0]
    rows = [
        row,
        dataclasses.replace(
            row, graph_us=1 / 3, baseline='a "quoted", name', baseline_computes_the_same=False
        ),
    ]
    results.write_rows(tmp_path / "new" / "rows.csv", rows)
    assert results.read_rows(tmp_path / "new" / "rows.csv") == rows
    with (tmp_path / "new" / "rows.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert lines == [
        {name: "" if x is None else str(x) for name, x in dataclasses.asdict(row).items()} for row in rows
    ]


def test_commit_of_the_source(tmp_path, monkeypatch):
    monkeypatch.setenv("HTREE_COMMIT", "abc123")
    assert source_commit(tmp_path) == "abc123"
    monkeypatch.delenv("HTREE_COMMIT")
    monkeypatch.setattr(info, "build_info", dict)
    with pytest.raises(UsageError, match="HTREE_COMMIT"):
        source_commit(tmp_path)
    monkeypatch.setattr(info, "build_info", lambda: {"commit": "built"})
    assert source_commit(tmp_path) == "built"
    monkeypatch.setattr(info, "build_info", lambda: {"commit": None, "version": "1.2"})
    assert source_commit(tmp_path) == "version 1.2", "built from a source distribution"

    def git(*arguments):
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        command = ["git", *identity, *arguments]
        return subprocess.run(
            command, cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-qm", "one")
    head = git("rev-parse", "HEAD")
    assert source_commit(tmp_path) == head
    (tmp_path / "file").write_text("two")
    assert source_commit(tmp_path) == f"{head}-dirty"


def test_causal_softmax_passes_its_own_gate(device):
    """Ours and the eager baselines, forward and backward, on a small problem, without torch.compile."""
    small = CausalSoftmaxCase(name="small", dtype=torch.bfloat16, shape=(2, 100, 300))
    cases = {
        "causal_softmax": small,
        "causal_softmax_backward": CausalSoftmaxBackwardCase(name="small", dtype=small.dtype, forward=small),
    }
    benchmarks = {b.op: b for b in causal_softmax.make_benchmarks(device)}
    assert set(benchmarks) == set(cases)
    for op, case in cases.items():
        benchmark = dataclasses.replace(benchmarks[op], case=case)
        baselines = [b for b in benchmark.baselines if b.same_function and "torch.compile" not in b.name]
        assert baselines
        candidates = [benchmark.ours, *baselines]
        inputs, calls = suite.make_calls(benchmark, candidates, device, num_sets=1)
        for candidate in candidates:
            suite.gate(benchmark, candidate, inputs, calls[candidate.name][0])
        with pytest.raises(suite.GateError):
            suite.gate(benchmark, benchmark.ours, inputs, lambda run=calls["htree_ops"][0]: run() * 1.02)
