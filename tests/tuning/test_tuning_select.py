"""``HTREE_TUNE``: which configuration a call without one runs with (docs/semantics/python.md §3.4)."""

import json
import time

import pytest
import torch

from htree_ops.ops import gated_mlp, rmsnorm_rope
from htree_ops.ops.fp8 import FP8Linear
from htree_ops.ops.fp8 import gemm as fp8_gemm
from htree_ops.tuning import (
    RMSNORM_ROPE,
    SPACES,
    CacheKey,
    TuningCache,
    config_search,
    forget,
    problems,
    select,
    tuning_mode,
)
from htree_ops.tuning.cache import cache_dir
from tests.support.graphs import capture


def test_modes(monkeypatch):
    assert tuning_mode() == "read"
    for given, mode in (("", "read"), ("OFF", "off"), (" Tune ", "tune")):
        monkeypatch.setenv("HTREE_TUNE", given)
        assert tuning_mode() == mode
    monkeypatch.setenv("HTREE_TUNE", "always")
    with pytest.raises(ValueError, match="HTREE_TUNE must be off, read or tune, got 'always'"):
        tuning_mode()


LINEAR = FP8Linear(4, 4)
CALLS = {
    "gated_mlp": lambda x: gated_mlp.gated_mlp(x, x, x),
    "rmsnorm_rope": lambda x: rmsnorm_rope.rmsnorm_rope(x[None], x[0], x, x),
    "fp8_gemm": lambda x: fp8_gemm.fp8_gemm(x, x),
    "FP8Linear": LINEAR,
}


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_mode_is_refused_at_the_first_call_on_every_device(name, traced, monkeypatch):
    """As the library refuses a wrong HTREE_CPU_ISA; nothing else would say on a CPU that the variable has no effect."""
    torch._dynamo.reset()
    call = torch.compile(CALLS[name], fullgraph=True, backend="eager") if traced else CALLS[name]
    monkeypatch.setenv("HTREE_TUNE", "foo")
    x = torch.ones(4, 4)
    for _ in range(2):
        with pytest.raises(
            RuntimeError if traced else ValueError, match="HTREE_TUNE must be off, read or tune, got 'foo'"
        ):
            call(x)
    monkeypatch.setenv("HTREE_TUNE", "READ")
    assert call(x).shape[-2:] == (4, 4)


def pick(call=lambda config: None, problem=(1, 2, 3, 4)):
    return select.choose("rmsnorm_rope", problem, torch.bfloat16, "contiguous", torch.device("cpu"), call)


def test_nothing_is_searched_unasked_or_inside_a_compiler(monkeypatch):
    tried = []
    assert pick(tried.append) is None
    forget()
    monkeypatch.setenv("HTREE_TUNE", "tune")
    with monkeypatch.context() as tracing:
        tracing.setattr(torch.compiler, "is_compiling", lambda: True)
        assert pick(tried.append) is None
    assert tried == []
    pick(tried.append)
    assert tried


def test_tuning_at_the_first_call(monkeypatch):
    def call(config):
        tried.append(config)
        if config is not None and config != [128, 4, 2]:
            raise NotImplementedError
        time.sleep(2e-3 if config is None else 0)

    tried = []
    monkeypatch.setenv("HTREE_TUNE", "tune")
    assert pick(call) == [128, 4, 2]
    assert {tuple(config) for config in tried if config} == {
        tuple(config.values()) for config in config_search(RMSNORM_ROPE)
    }
    searched = len(tried)
    assert pick(call) == [128, 4, 2]
    forget()
    assert pick(call) == [128, 4, 2]
    monkeypatch.setenv("HTREE_TUNE", "read")
    forget()
    assert pick(call) == [128, 4, 2]
    assert pick(call, problem=(9, 9, 9, 9)) is None
    monkeypatch.setenv("HTREE_TUNE", "off")
    forget()
    assert pick(call) is None
    assert len(tried) == searched


def test_what_is_known_is_bounded_and_checked(monkeypatch):
    monkeypatch.setattr(select, "MAX_CHOSEN", 3)
    for i in range(10):
        assert pick(problem=(i,)) is None
        assert len(select._chosen) <= 3
    key = CacheKey.of("rmsnorm_rope", (7, 7), "bfloat16", "contiguous", "cpu")
    TuningCache().set(key, {"BLOCK_SIZE": 64, "num_warps": 2, "num_stages": 3})
    assert pick(problem=(7, 7)) == [64, 2, 3]
    TuningCache().set(key, {"BLOCK_SIZE": 64, "a_key_that_was_dropped": 1})
    forget()
    assert pick(problem=(7, 7)) is None


def test_the_kernels_own_choice_may_win(monkeypatch):
    monkeypatch.setenv("HTREE_TUNE", "tune")
    assert pick(lambda config: time.sleep(0 if config is None else 1e-3), problem=(5, 5, 5, 5)) is None

    def never(config):
        if config is not None:
            raise NotImplementedError
        counted.append(1)

    counted = []
    assert pick(never, problem=(6, 6, 6, 6)) is None
    before = len(counted)
    forget()
    assert pick(never, problem=(6, 6, 6, 6)) is None
    assert len(counted) == before


def test_a_folder_that_cannot_be_used_does_not_stop_a_call(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HTREE_CACHE_DIR", str(tmp_path / "file" / "below"))
    with pytest.warns(RuntimeWarning, match="cannot be read"):
        assert pick() is None
    forget()
    monkeypatch.setenv("HTREE_TUNE", "tune")
    unread = pytest.warns(RuntimeWarning, match="cannot be read")
    with unread, pytest.warns(RuntimeWarning, match="is not stored"):
        assert pick(lambda config: time.sleep(0 if config is None else 1e-3)) is None


def test_ops_take_configurations_as_lists(device):
    problem = problems.make_problem("rmsnorm_rope", (2, 3, 256, 64), torch.bfloat16, device)
    own = problem.call()
    for config in (
        {"BLOCK_SIZE": 64, "num_warps": 2, "num_stages": 1},
        {"BLOCK_SIZE": 128, "num_warps": 4, "num_stages": 2},
    ):
        assert torch.allclose(problem.call(**config).float(), own.float(), rtol=2.0**-7, atol=1e-6)
    with pytest.raises(ValueError, match="takes 4 sizes"):
        problems.make_problem("rmsnorm_rope", (2, 3), torch.bfloat16, device)
    with pytest.raises(ValueError, match="kernel must be one of"):
        problems.make_problem("softmax", (2, 3), torch.bfloat16, device)


X, TABLE = torch.zeros(1, 2, 8), torch.ones(2, 4)
CODES = torch.ones(2, 2).to(torch.float8_e4m3fn)
#: The compiled tuples that Python lists, and the op with a configuration.
COMPILED = {
    "rmsnorm_rope": (
        rmsnorm_rope.COMPILED_CONFIGS,
        lambda c: torch.ops.htree.rmsnorm_rope(X, torch.ones(8), TABLE, TABLE, 1e-6, None, c),
    ),
    "gated_mlp": (
        gated_mlp.COMPILED_CONFIGS,
        lambda c: torch.ops.htree.gated_mlp(X, torch.ones(3, 8), torch.ones(3, 8), "silu", "up", c),
    ),
    "fp8_gemm": (
        fp8_gemm.COMPILED_CONFIGS,
        lambda c: torch.ops.htree.fp8_gemm(
            CODES, CODES, torch.tensor(1.0), torch.tensor(1.0), torch.float16, c
        ),
    ),
}


@pytest.mark.parametrize("kernel", SPACES)
def test_functions_and_ops_know_the_same_configurations(kernel):
    compiled, call = COMPILED[kernel]
    accepted = []
    for config in config_search(SPACES[kernel]):
        try:
            call(list(config.values()))
        except NotImplementedError:
            continue
        accepted.append(tuple(config.values()))
    assert sorted(accepted) == sorted(compiled)


@pytest.mark.gpu
def test_a_tuned_call_on_the_gpu(monkeypatch):
    from htree_ops import rmsnorm_rope

    x = torch.randn(2, 64, 1024, device="cuda", dtype=torch.bfloat16)
    weight, table = torch.ones(1024, device="cuda"), torch.ones(64, 128, device="cuda")
    plain = torch.ops.htree.rmsnorm_rope(x, weight, table, table)
    monkeypatch.setenv("HTREE_TUNE", "tune")
    assert torch.allclose(rmsnorm_rope(x, weight, table, table).float(), plain.float(), rtol=2.0**-7)
    assert len(json.loads((cache_dir() / "tuning.json").read_text())["records"]) == 1
    other = torch.randn(3, 64, 1024, device="cuda", dtype=torch.bfloat16)
    graph, captured = capture(lambda: rmsnorm_rope(other, weight, table, table))
    graph.replay()
    assert len(json.loads((cache_dir() / "tuning.json").read_text())["records"]) == 1, "searched in a capture"
    compiled = torch.compile(rmsnorm_rope, fullgraph=True)
    wanted = torch.ops.htree.rmsnorm_rope(other, weight, table, table)
    assert torch.equal(compiled(other, weight, table, table), wanted)
    assert len(json.loads((cache_dir() / "tuning.json").read_text())["records"]) == 1, (
        "searched in a compiler"
    )
    assert torch.equal(captured, wanted)


def test_functions_ask_with_the_keys_of_the_command(monkeypatch, device):
    """What ``python -m htree_ops tune`` stores for a problem is what a call of that problem looks up."""
    import htree_ops
    from htree_ops.ops.fp8 import gemm, linear
    from htree_ops.ops.gated_mlp import function as gated_mlp
    from htree_ops.ops.rmsnorm_rope import function as rmsnorm_rope

    asked = []

    def record(kernel, problem, tensor, call, layout="contiguous"):
        asked.append((kernel, tuple(problem), str(tensor.dtype), layout))
        return None

    for module in (gemm, linear, gated_mlp, rmsnorm_rope):
        monkeypatch.setattr(module, "configured", record)
    sizes = {"rmsnorm_rope": (2, 3, 256, 64), "gated_mlp": (6, 64, 48), "fp8_gemm": (5, 32, 64)}
    for kernel, chosen in sizes.items():
        problem = problems.make_problem(kernel, chosen, torch.bfloat16, device)
        getattr(htree_ops, kernel)(*problem.arguments)
        assert asked.pop() == (kernel, chosen, str(problem.dtype), problem.layout)
    module = htree_ops.FP8Linear(64, 32, device=device)
    module(torch.randn(5, 64, device=device))
    assert asked.pop() == ("fp8_gemm", (5, 32, 64), "torch.float8_e4m3fn", "column-major b")
    assert not asked
