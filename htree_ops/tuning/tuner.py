"""The search over a space of configurations (docs/semantics/python.md §3.4)."""

from __future__ import annotations

import functools
import hashlib
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from htree_ops.errors import DeviceError, TuningFailedError
from htree_ops.ops.arguments import check_int, dtype_name
from htree_ops.tuning.cache import TuningCache
from htree_ops.tuning.clock import clock_for, percentile
from htree_ops.tuning.key import CacheKey, source_hash
from htree_ops.tuning.metrics import KernelMetrics, TuningResult, compute_metrics, gemm_flops, peak_of
from htree_ops.tuning.space import SPACES, Config, Space, config_search, same_config

#: A configuration replaces the kernel's own choice where its time is below this share of it; less is noise.
WORTHWHILE = 0.98


def may_tune() -> str | None:
    """Why nothing may be timed right now, or None: a compiler is tracing, or a CUDA graph is being captured."""
    if torch.compiler.is_compiling():
        return "torch.compile is tracing"
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    return None


def benchmark(
    call: Callable[[], Any], device: torch.device | str, warmup_runs: int = 10, benchmark_runs: int = 100
) -> float:
    """Median milliseconds of ``call``: between CUDA events on a GPU, of the host clock elsewhere.

    Raises:
        TypeError, ValueError: warmup_runs is not an int >= 0, benchmark_runs not an int >= 1, or device not a device.
        DeviceError: a GPU that torch does not see, or the meta device, on which nothing runs.
    """
    check_int("benchmark", "warmup_runs", warmup_runs, 0)
    check_int("benchmark", "benchmark_runs", benchmark_runs, 1)
    check_runs_on("benchmark", device)
    for _ in range(warmup_runs):
        call()
    return percentile(clock_for(device).time_calls([call] * benchmark_runs, keep=1), 50) / 1e3


def check_runs_on(op: str, device: torch.device | str) -> None:
    """Raises DeviceError unless something can be timed on ``device``, and ValueError where that is not a device."""
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"{op}: device must be a device of torch such as 'cuda', got {device!r}") from error
    if place.type == "meta":
        problem = "nothing runs on the meta device"
    elif place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        problem = f"torch sees {torch.cuda.device_count() or 'no'} GPU"
    else:
        return
    raise DeviceError(
        f"{op}: device must be one that can be timed, got {place}: {problem}", actual_device=place
    )


def _sizes(values: object) -> tuple[int, ...]:
    """``values`` as sizes."""
    try:
        sizes = tuple(operator.index(value) for value in values)  # type: ignore[attr-defined]
    except TypeError as error:
        raise TypeError(f"AutoTuner: problem_size must be a sequence of ints, got {values!r}") from error
    if any(size < 0 for size in sizes):
        raise ValueError(f"AutoTuner: problem_size must have sizes of at least 0, got {values!r}")
    return sizes


def _facts(code: CodeType) -> list[Any]:
    """What a function does, as values whose text is the same in every process."""
    constants = [
        _facts(value)
        if isinstance(value, CodeType)
        else sorted(map(repr, value))
        if isinstance(value, frozenset)
        else repr(value)
        for value in code.co_consts
    ]
    return [code.co_code.hex(), code.co_names, code.co_varnames, constants]


def _fingerprint(kernel_fn: Callable[..., Any], space: Mapping[str, list[Any]], is_named: bool) -> str:
    """Hash of the space and, unless the caller gave the kernel a name, of the function's place and code."""
    facts: list[Any] = [list(space.items())]
    if not is_named:
        plain = inspect.unwrap(kernel_fn.func if isinstance(kernel_fn, functools.partial) else kernel_fn)
        owner = plain if hasattr(plain, "__qualname__") else type(plain)
        code = getattr(plain, "__code__", None) or getattr(type(plain).__call__, "__code__", None)
        facts += [owner.__module__, owner.__qualname__, _facts(code) if code else []]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    return [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]


class AutoTuner:
    """Times ``kernel_fn`` with every configuration of a space and remembers the fastest, on disk too.

    ``kernel_fn`` is called as ``kernel_fn(*args, **config, **kwargs)``. A configuration that raises an Exception is
    recorded and skipped: a space may hold configurations that are not compiled.

    Args:
        kernel_fn: what to time.
        config_space: values by key; the product is searched in key order.
        warmup_runs: untimed calls of each configuration.
        benchmark_runs: timed calls, of which the median counts.
        cache_dir: folder of the cache; :func:`htree_ops.tuning.cache_dir` by default.
        problem_size: sizes for the key; by default those of the tensor arguments, one after another.
        device: where it runs; by default the device of the first tensor argument.
        kernel_type: name for the key; other functions searched under this name find the results too. By default the
            function's own name, and then its module and code are part of the key.
        dtype: dtype for the key; by default that of the first floating tensor argument.
        layout: layout of the operands, for the key.
        accept: leaves out the configurations for which it returns False.
        flops, num_bytes: work of one call, for the metrics; fp8_gemm's flops follow from (M, N, K).
        progress: called with (configurations done, all of them).

    Raises:
        TypeError: kernel_fn cannot be called, config_space does not map names to sequences, runs or sizes are not ints.
        ValueError: warmup_runs below 0, benchmark_runs below 1, a size below 0, or a key without values.
    """

    def __init__(
        self,
        kernel_fn: Callable[..., Any],
        config_space: Space,
        warmup_runs: int = 10,
        benchmark_runs: int = 100,
        *,
        cache_dir: Path | str | None = None,
        problem_size: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        kernel_type: str | None = None,
        dtype: torch.dtype | str | None = None,
        layout: str = "contiguous",
        accept: Callable[[Config], bool] | None = None,
        flops: float = 0.0,
        num_bytes: float = 0.0,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        if not callable(kernel_fn):
            raise TypeError(f"AutoTuner: kernel_fn must be callable, got {type(kernel_fn).__name__}")
        check_int("AutoTuner", "warmup_runs", warmup_runs, 0)
        check_int("AutoTuner", "benchmark_runs", benchmark_runs, 1)
        self.kernel_fn = kernel_fn
        self.configs = config_search(config_space, accept)
        self.config_space = {key: list(values) for key, values in config_space.items()}
        self.warmup_runs = warmup_runs
        self.benchmark_runs = benchmark_runs
        self.cache = TuningCache(cache_dir)
        self.problem_size = None if problem_size is None else _sizes(problem_size)
        self.device = device
        self._last_device: torch.device | str | None = None
        self.kernel_type = str(kernel_type or getattr(kernel_fn, "__name__", type(kernel_fn).__name__))
        ours = f"{__name__.partition('.')[0]}."
        is_ours = kernel_type or str(getattr(kernel_fn, "__module__", "")).startswith(ours)
        self._source = (
            source_hash(self.kernel_type)
            if is_ours and self.kernel_type in SPACES
            else _fingerprint(kernel_fn, self.config_space, is_named=bool(kernel_type))
        )
        self.dtype: str | None = dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype
        self.layout = layout
        self.flops = flops
        self.num_bytes = num_bytes
        self.progress = progress

    def tune(self, *args: Any, **kwargs: Any) -> TuningResult:
        """Times every configuration on these arguments and stores the fastest; of equal ones the first.

        Where that cannot be stored (the folder cannot be written, a value is not a JSON scalar) the result is
        returned with a warning.

        Raises:
            DeviceError: a GPU that torch does not see, or the meta device.
            TuningFailedError: no configuration ran; with their number and the last error.
            RuntimeError: torch.compile is tracing or a CUDA graph is being captured.
        """
        if reason := may_tune():
            raise RuntimeError(f"AutoTuner: cannot tune while {reason}")
        tensors = _tensors(args, kwargs)
        device = self.device or (tensors[0].device if tensors else "cpu")
        check_runs_on("AutoTuner", device)
        self._last_device = device
        problem = self.problem_size or tuple(size for tensor in tensors for size in tensor.shape)
        floating = [tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point]
        key = self._key(problem, device, self.dtype or (dtype_name(floating[0]) if floating else ""))
        results: list[tuple[Config, KernelMetrics]] = []
        failures: list[tuple[Config, Exception]] = []
        for done, config in enumerate(self.configs):
            try:
                latency = benchmark(
                    lambda config=config: self.kernel_fn(*args, **config, **kwargs),  # type: ignore[misc]
                    device,
                    self.warmup_runs,
                    self.benchmark_runs,
                )
            except Exception as error:
                failures.append((dict(config), error))
            else:
                results.append((dict(config), self._metrics(latency, problem, key)))
            if self.progress:
                self.progress(done + 1, len(self.configs))
        if not results:
            last = failures[-1][1] if failures else None
            raise TuningFailedError(
                f"AutoTuner: none of {len(self.configs)} configurations of {self.kernel_type} ran on "
                f"{problem}; the last error: {last}",
                problem_size=problem,
                configs_tried=len(self.configs),
                last_error=last,
            )
        best, metrics = min(results, key=lambda result: result[1].latency_ms)
        self.cache.try_set(key, best, asdict(metrics))
        return TuningResult(dict(best), metrics, results, problem, key.device, failures)

    def get_cached_config(
        self, problem_size: Sequence[int], device: torch.device | str | None = None
    ) -> Config | None:
        """The configuration that an earlier search found for ``problem_size`` on ``device``, as a copy, or None.

        The device is by default that of the tuner, else that of its last :meth:`tune`, else the CPU. The keys of the
        result have the order of the space, and {} stands for the kernel's own choice. A configuration that is not in
        this tuner's space counts as not found. A tuner that was told no dtype takes the result of any dtype, and None
        where the results of several dtypes differ.

        Raises:
            TypeError, ValueError: problem_size is not a sequence of ints >= 0.
        """
        place = device or self.device or self._last_device or "cpu"
        key = self._key(_sizes(problem_size), place, self.dtype or "")
        found = self.cache.get(key) if self.dtype else self.cache.get_any_dtype(key)
        return next(
            (dict(own) for own in self.configs if same_config(own, found)), {} if found == {} else None
        )

    def key(self) -> CacheKey:
        """The key of the cache, for a tuner that was given problem_size, device and dtype."""
        return self._key(self.problem_size or (), self.device or "cpu", self.dtype or "")

    def _key(self, problem: tuple[int, ...], device: torch.device | str, dtype: str) -> CacheKey:
        return CacheKey.of(self.kernel_type, problem, dtype, self.layout, device, self._source)

    def _metrics(self, latency_ms: float, problem: tuple[int, ...], key: CacheKey) -> KernelMetrics:
        flops = self.flops
        if not flops and self.kernel_type == "fp8_gemm" and len(problem) == 3:
            flops = gemm_flops(*problem)
        return compute_metrics(latency_ms, flops, self.num_bytes, peak_of(key.device) or 0.0)


def search(tuner: AutoTuner) -> tuple[Config, TuningResult | None, float]:
    """Searches for one problem, whose size and device the tuner was told, and compares with the kernel's own choice.

    That is what its function does without a configuration. Where none is clearly faster, {} is stored.

    Returns:
        The configuration to take, {} for the own choice; the result, None where no configuration ran; and the
        milliseconds of the own choice.
    """
    assert tuner.device is not None
    own = benchmark(tuner.kernel_fn, tuner.device, tuner.warmup_runs, tuner.benchmark_runs)
    try:
        result = tuner.tune()
    except TuningFailedError:
        result = None
    if result is not None and result.latency < WORTHWHILE * own:
        return result.best_config, result, own
    key = tuner.key()
    tuner.cache.try_set(key, {}, asdict(tuner._metrics(own, key.problem, key)))
    return {}, result, own


#: The name that the design document uses.
TritonAutoTuner = AutoTuner
