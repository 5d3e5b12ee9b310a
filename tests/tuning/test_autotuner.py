"""The search over a space (docs/semantics §3.4); the other files of this folder test the use of its results."""

import inspect
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import htree_ops
from htree_ops.errors import DeviceError, TuningFailedError
from htree_ops.tuning import (
    FP8_GEMM,
    GATED_MLP,
    RMSNORM_ROPE,
    SPACES,
    AutoTuner,
    CacheKey,
    TritonAutoTuner,
    config_search,
    tuner,
)

QUICK = {"warmup_runs": 1, "benchmark_runs": 5}


def sleeping(x: torch.Tensor, *, wait_ms: float, fail: bool = False) -> torch.Tensor:
    """Stands for a kernel whose speed its configuration decides."""
    if fail:
        raise NotImplementedError(f"no kernel for {wait_ms}")
    time.sleep(wait_ms / 1e3)
    return x


def rmsnorm_rope(x: torch.Tensor, **_: int) -> torch.Tensor:
    """A function of another package with the same name."""
    return x


# ---- spaces


def test_the_spaces_have_the_documented_values():
    assert dict(RMSNORM_ROPE) == {
        "BLOCK_SIZE": (64, 128, 256, 512, 1024),
        "num_warps": (2, 4, 8),
        "num_stages": (1, 2, 3),
    }
    assert dict(GATED_MLP) == {
        "BLOCK_M": (32, 64, 128),
        "BLOCK_N": (32, 64, 128),
        "BLOCK_K": (32, 64),
        "num_warps": (4, 8),
        "num_stages": (2, 3, 4),
    }
    assert dict(FP8_GEMM) == {
        "BLOCK_M": (64, 128, 256),
        "BLOCK_N": (64, 128, 256),
        "BLOCK_K": (32, 64),
        "GROUP_SIZE_M": (4, 8),
        "num_warps": (4, 8),
        "num_stages": (3, 4, 5),
    }
    assert [len(config_search(SPACES[name])) for name in ("rmsnorm_rope", "gated_mlp", "fp8_gemm")] == [
        45,
        108,
        216,
    ]


def test_the_product_goes_in_key_order():
    assert config_search({"a": (1, 2), "b": "xy"}) == [
        {"a": 1, "b": "x"},
        {"a": 1, "b": "y"},
        {"a": 2, "b": "x"},
        {"a": 2, "b": "y"},
    ]
    assert config_search({"a": (1, 2, 3)}, lambda config: config["a"] != 2) == [{"a": 1}, {"a": 3}]
    assert config_search({}) == [{}]
    with pytest.raises(ValueError, match="at least one value for every name, got none for 'b'"):
        config_search({"a": (1,), "b": ()})


# ---- the search


def test_defaults_of_a_search():
    parameters = inspect.signature(AutoTuner).parameters
    assert list(parameters)[:4] == ["kernel_fn", "config_space", "warmup_runs", "benchmark_runs"]
    assert [parameters[name].default for name in ("warmup_runs", "benchmark_runs")] == [10, 100]
    assert AutoTuner(sleeping, {"wait_ms": (0.0,)}).benchmark_runs == 100


def test_the_fastest_configuration_wins():
    assert TritonAutoTuner is AutoTuner
    space = {"wait_ms": (120.0, 0.0, 60.0), "fail": (False, True)}
    seen = []
    search = AutoTuner(sleeping, space, **QUICK, num_bytes=1e3, progress=lambda *state: seen.append(state))
    x = torch.zeros(4, 6, dtype=torch.float16)
    result = search.tune(x)
    assert result.best_config == {"wait_ms": 0.0, "fail": False}
    assert [config["wait_ms"] for config, _ in result.all_results] == [120.0, 0.0, 60.0]
    assert [config["wait_ms"] for config, _ in result.failures] == [120.0, 0.0, 60.0]
    assert all(isinstance(error, NotImplementedError) for _, error in result.failures)
    assert result.all_results[0][1].latency_ms >= 120.0
    assert result.metrics.bandwidth_gbps == pytest.approx(1e3 / (result.latency * 1e6))
    assert (result.problem_size, result.device) == ((4, 6), "cpu")
    assert seen == [(i, 6) for i in range(1, 7)]
    for again in (search, AutoTuner(sleeping, space), AutoTuner(sleeping, space, dtype=torch.float16)):
        assert again.get_cached_config((4, 6), "cpu") == result.best_config
    assert AutoTuner(sleeping, space, dtype=torch.float32).get_cached_config((4, 6), "cpu") is None
    assert search.get_cached_config((4, 7), "cpu") is None
    assert search.get_cached_config((4, 6), "NVIDIA H200") is None


@pytest.mark.parametrize("values", [[1, True], [True, 1], [1, 1.0], [0.0, False]], ids=repr)
@pytest.mark.parametrize("fastest", [0, 1])
def test_equal_values_of_different_kinds_are_kept_apart(values, fastest):
    def kernel(value):
        time.sleep(0.0 if type(value) is type(values[fastest]) else 0.02)

    for dtype in (torch.float32, None):  # of this dtype, and of any
        search = AutoTuner(kernel, {"value": values}, **QUICK, problem_size=(3,), dtype=torch.float32)
        best = search.tune().best_config["value"]
        assert type(best) is type(values[fastest])
        again = AutoTuner(kernel, {"value": values}, dtype=dtype).get_cached_config((3,), "cpu")
        assert type(again["value"]) is type(best)


def test_a_result_is_found_on_the_device_where_it_was_measured(monkeypatch):
    """The tuner was given no device and measured on a GPU; here the meta device stands for one."""
    monkeypatch.setattr(tuner, "benchmark", lambda *_: 1.0)
    monkeypatch.setattr(tuner, "check_runs_on", lambda *_: None)
    space = {"wait_ms": (0.0,)}
    search = AutoTuner(sleeping, space, problem_size=(3,))
    assert search.get_cached_config((3,)) is None
    search.tune(torch.zeros(2, device="meta"))
    assert search.get_cached_config((3,)) == {"wait_ms": 0.0}
    assert search.get_cached_config((3,), "cpu") is None
    told = AutoTuner(sleeping, space, device="cpu")
    assert told.get_cached_config((3,)) is None
    assert AutoTuner(sleeping, space).get_cached_config((3,)) is None, "a new tuner looks on the CPU"
    told.tune(torch.zeros(3))
    assert told.get_cached_config((3,)) == {"wait_ms": 0.0}


@pytest.mark.gpu
def test_a_result_of_a_gpu_is_found():
    search = AutoTuner(sleeping, {"wait_ms": (0.0,)}, **QUICK)
    result = search.tune(torch.zeros(5, device="cuda"))
    assert result.device == torch.cuda.get_device_name()
    assert search.get_cached_config((5,)) == {"wait_ms": 0.0}
    assert AutoTuner(sleeping, search.config_space).get_cached_config((5,), "cuda") == {"wait_ms": 0.0}
    assert AutoTuner(sleeping, search.config_space).get_cached_config((5,)) is None


def test_ties_go_to_the_first(monkeypatch):
    monkeypatch.setattr(tuner, "benchmark", lambda *_: 1.0)
    result = AutoTuner(lambda **_: None, {"a": (1, 2), "b": (3, 4)}).tune()
    assert result.best_config == {"a": 1, "b": 3}


def test_the_median_counts(monkeypatch):
    calls = []

    class Clock:
        def time_calls(self, calls_, keep):
            calls.extend(call() for call in calls_)
            return [100.0, 1.0, 5.0, 900.0, 4.0]

    monkeypatch.setattr(tuner, "clock_for", lambda device: Clock())
    assert tuner.benchmark(lambda: 7, "cpu", 3, 5) == 5.0 / 1e3
    assert calls == [7] * 5


def test_nothing_runs():
    search = AutoTuner(sleeping, {"wait_ms": (1.0, 2.0), "fail": (True,)}, problem_size=(3, 5))
    with pytest.raises(TuningFailedError, match="none of 2 configurations of sleeping") as error:
        search.tune(torch.zeros(2))
    assert isinstance(error.value, RuntimeError)
    assert error.value.configs_tried == 2
    assert tuple(error.value.problem_size) == (3, 5)
    assert str(error.value.last_error) == "no kernel for 2.0"
    assert search.get_cached_config((3, 5), "cpu") is None


def test_only_exceptions_are_skipped():
    def interrupted(**_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        AutoTuner(interrupted, {"a": (1,)}).tune()


@pytest.mark.parametrize(
    ("wrong", "kind", "complaint"),
    [
        ({"warmup_runs": -1}, ValueError, "warmup_runs must be between 0"),
        ({"warmup_runs": 1.5}, TypeError, "warmup_runs must be an int, got float"),
        ({"benchmark_runs": 0}, ValueError, "benchmark_runs must be between 1"),
        ({"benchmark_runs": "3"}, TypeError, "benchmark_runs must be an int, got str"),
        ({"config_space": None}, TypeError, "space must map names to sequences, got NoneType"),
        ({"config_space": {"A": 3}}, TypeError, "space must map names to sequences, got 'A': 3"),
        ({"config_space": {1: (2,)}}, TypeError, r"space must map names to sequences, got 1: \(2,\)"),
        ({"kernel_fn": 3}, TypeError, "kernel_fn must be callable, got int"),
        ({"problem_size": 3}, TypeError, "problem_size must be a sequence of ints, got 3"),
        ({"problem_size": "12"}, TypeError, "problem_size must be a sequence of ints, got '12'"),
        ({"problem_size": (1.9, 2)}, TypeError, r"problem_size must be a sequence of ints, got \(1\.9, 2\)"),
        ({"problem_size": (-1, 2)}, ValueError, "problem_size must have sizes of at least 0"),
    ],
)
def test_wrong_arguments_are_named(wrong, kind, complaint):
    with pytest.raises(kind, match=complaint):
        AutoTuner(**{"kernel_fn": sleeping, "config_space": {"a": (1,)}, **wrong})


@pytest.mark.parametrize("name", ["meta", "absent GPU"])
def test_a_device_that_cannot_be_timed_is_refused_at_once(name):
    device = f"cuda:{torch.cuda.device_count()}" if name == "absent GPU" else name
    called = []
    search = AutoTuner(lambda a: called.append(a), {"a": (1,)}, device=device)
    for call in (search.tune, lambda: tuner.benchmark(called.clear, device)):
        with pytest.raises(DeviceError, match=f"device must be one that can be timed, got {device}: "):
            call()
    with pytest.raises(
        ValueError, match="device must be a device of torch such as 'cuda', got 'NVIDIA H200'"
    ):
        AutoTuner(sleeping, {"a": (1,)}, device="NVIDIA H200").tune()
    assert called == []


def test_a_result_that_cannot_be_stored_is_returned(tmp_path):
    (tmp_path / "file").write_text("")
    search = AutoTuner(lambda a: None, {"a": (1, 2)}, **QUICK, cache_dir=tmp_path / "file")
    with pytest.warns(RuntimeWarning, match="of <lambda> is not stored"):
        assert len(search.tune().all_results) == 2
    search = AutoTuner(lambda a: None, {"a": [torch.float16]}, **QUICK)
    with pytest.warns(
        RuntimeWarning, match="is not stored: TuningCache: config must map names to JSON scalars"
    ):
        assert search.tune().best_config == {"a": torch.float16}
    assert search.get_cached_config((), "cpu") is None


def test_functions_of_one_name_do_not_share_results():
    first = AutoTuner(lambda x, A: 1, {"A": [1]}, **QUICK)
    first.tune(torch.zeros(3))
    assert first.get_cached_config((3,)) == {"A": 1}
    for fn, space in (
        (lambda x, B: 1, {"B": [5]}),
        (lambda x, A: 2, {"A": [1]}),
        (first.kernel_fn, {"A": [1, 2]}),
        (first.kernel_fn, {"A": [1], "B": [1]}),
    ):
        assert AutoTuner(fn, space).get_cached_config((3,)) is None
    named = {"kernel_type": "mine", "problem_size": (3,), "dtype": torch.float32, **QUICK}
    AutoTuner(lambda A: 1, {"A": [1]}, **named).tune()
    assert AutoTuner(lambda A: 2, {"A": [1]}, **named).get_cached_config((3,)) == {"A": 1}
    assert AutoTuner(lambda A: 2, {"A": [2]}, **named).get_cached_config((3,)) is None


def test_a_functions_key_is_the_same_in_another_process():
    code = (
        "from htree_ops.tuning import AutoTuner\n"
        "def fn(x, a):\n    return [v in {'p', 'q', 'r', a} for v in x if v in {'s', 't', 'u'}]\n"
        "print(AutoTuner(fn, {'a': [1]}).key().source)\n"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, check=True,
                       capture_output=True, text=True, cwd=Path(__file__).parents[2]).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert runs[0] == runs[1] != ""


def test_the_librarys_keys_are_those_of_its_calls_and_the_order_is_the_spaces():
    search = AutoTuner(sleeping, RMSNORM_ROPE, kernel_type="rmsnorm_rope", dtype=torch.bfloat16)
    key = CacheKey.of("rmsnorm_rope", (1, 2), "bfloat16", "contiguous", "cpu")
    config = {"num_warps": 2, "num_stages": 3, "BLOCK_SIZE": 64}
    search.cache.set(key, config)
    found = search.get_cached_config((1, 2), "cpu")
    assert found == config
    assert list(found) == list(RMSNORM_ROPE)
    narrow = AutoTuner(
        sleeping, {**RMSNORM_ROPE, "num_warps": (4,)}, kernel_type="rmsnorm_rope", dtype="bfloat16"
    )
    assert narrow.get_cached_config((1, 2), "cpu") is None, "not one of its own"
    search.cache.set(key, {})
    assert search.get_cached_config((1, 2), "cpu") == {}
    assert search._key((1, 2), "cpu", "bfloat16") == key
    stranger = AutoTuner(rmsnorm_rope, RMSNORM_ROPE, dtype=torch.bfloat16)
    assert stranger.kernel_type == "rmsnorm_rope"
    assert stranger.get_cached_config((1, 2), "cpu") is None, "of one name with an op"
    assert (
        AutoTuner(htree_ops.rmsnorm_rope, RMSNORM_ROPE, dtype="bfloat16").get_cached_config((1, 2), "cpu")
        == {}
    )
    for wrong in (3, "12", (1.9, 2)):
        with pytest.raises(TypeError, match="problem_size must be a sequence of ints"):
            search.get_cached_config(wrong)


def test_no_search_inside_a_compiler(monkeypatch):
    search = AutoTuner(sleeping, {"wait_ms": (0.0,)}, **QUICK)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(RuntimeError, match=r"cannot tune while torch\.compile is tracing"):
        search.tune(torch.zeros(2))


@pytest.mark.gpu
def test_no_search_inside_a_capture():
    search = AutoTuner(sleeping, {"wait_ms": (0.0,)}, **QUICK)
    graph = torch.cuda.CUDAGraph()
    x = torch.zeros(2, device="cuda")
    with torch.cuda.graph(graph):
        x.add_(1)
        with pytest.raises(RuntimeError, match="cannot tune while a CUDA graph is being captured"):
            search.tune(x)
