"""What ``import htree_ops`` loads in every process, and what it leaves for those that ask."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import htree_ops
from htree_ops import compat
from htree_ops._load import build_tag
from htree_ops.ops.arguments import constant_in_traces

PARENT = Path(htree_ops.__file__).resolve().parents[1]
#: What a model has no use for. Dynamo takes a second and about 100 MB, triton a tenth of a second and 50 MB.
LEFT_OUT = ("torch._dynamo", "torch._inductor", "triton", "torch.utils.flop_counter", "benchmarks", "tests")
LEFT_OUT += tuple(
    f"htree_ops.{name}"
    for name in ["bench", "cli", "compat", "correctness", "distributed", "info", "integrations", "reference"]
)
LEFT_OUT += tuple(f"htree_ops.tuning.{name}" for name in ["clock", "command", "tuner", "verification"])


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PARENT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_by(statement: str) -> list[str]:
    """The modules of ``LEFT_OUT``, and those below them, that a statement loads in a new process, after torch."""
    code = f"import sys, torch; before = set(sys.modules); {statement}; print(*set(sys.modules) - before)"
    names = python(code).split()
    return sorted(name for name in names if name.startswith(LEFT_OUT))


def test_import_loads_no_dynamo_tuner_or_benchmark():
    assert loaded_by("import htree_ops") == []


COUNTED = """
{first}
{second}
from torch.utils.flop_counter import FlopCounterMode
import importlib, torch.utils.flop_counter
def count():
    x = torch.ones(4, 4)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        htree_ops.gated_mlp(x, x, x)
    return counter.get_total_flops()
print(count())
importlib.reload(torch.utils.flop_counter)
print(count())
"""


@pytest.mark.parametrize("order", [1, -1])
def test_the_counter_of_torch_has_the_formulas_whichever_comes_first(order):
    first, second = ["import htree_ops", "import torch.utils.flop_counter"][::order]
    counts = python(COUNTED.format(first=first, second=second)).split()
    assert counts[0] == str(2 * 2 * 4**3)
    assert order == -1 or counts[1] == counts[0]


def test_every_op_is_registered_at_once():
    code = "import torch, htree_ops; print(len([n for n in torch._C._dispatch_get_all_op_names() if 'htree::' in n]))"
    registered = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("htree::")]
    assert int(python(code)) == len(registered) > 30


@pytest.mark.parametrize("name", ["AutoTuner", "TritonAutoTuner", "benchmark"])
def test_the_tuner_is_loaded_where_it_is_asked_for(name):
    assert "htree_ops.tuning.tuner" in loaded_by(f"from htree_ops.tuning import {name}")
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        htree_ops.tuning.absent  # noqa: B018


def test_the_mark_is_that_of_torch():
    """Torch's own decorator loads Dynamo; what it leaves on a function is all that Dynamo looks for."""

    def ours(): ...

    def theirs(): ...

    assert constant_in_traces(ours) is ours
    assert vars(ours) == vars(torch.compiler.assume_constant_result(theirs))


COMPILED = """
import torch, htree_ops
call = lambda q: htree_ops.tree_attention(q, q, q, top_k=2, max_top_nodes=8, compression_rate=4)
compiled = torch.compile(call, fullgraph=True, backend="eager")
q = torch.randn(1, 40, 2, 8)
print(torch.equal(compiled(q), call(q)))
try:
    torch.compile(lambda q: htree_ops.causal_softmax(q, 0.5), fullgraph=True, backend="eager")(q[0])
except Exception as error:
    print("causal_softmax: block_size must be an int, got float" in str(error))
"""


def test_functions_compile_in_a_process_that_has_not_loaded_dynamo_before():
    assert python(COMPILED).split() == ["True", "True"]


def test_the_package_has_few_names_and_each_exists():
    assert len(htree_ops.__all__) <= 40
    assert all(hasattr(htree_ops, name) for name in htree_ops.__all__)
    for folder in sorted((PARENT / "htree_ops" / "ops").glob("*/__init__.py")):
        family = importlib.import_module(f"htree_ops.ops.{folder.parent.name}")
        assert all(hasattr(family, name) for name in family.__all__)


def test_names_of_the_design_documents():
    names = (
        "FP8Format FP8GEMMInput GatedMLPInput RMSNormRoPEInput TensorSpec apply_grouped_hadamard "
        "apply_rotary_pos_emb_k apply_rotary_pos_emb_q convert_key_batched_quant handle_fp8_overflow "
        "mustafar_attention validate_fp8_gemm_inputs validate_fp8_quantize_inputs validate_gated_mlp_inputs "
        "validate_rmsnorm_rope_inputs"
    )
    assert sorted(compat.__all__) == sorted(names.split())
    assert all(hasattr(compat, name) for name in names.split())
    for module, name in (
        ("htree_ops.bench", "verdict"),
        ("htree_ops.bench", "verify"),
        ("htree_ops.parallel_io_only", "htree_forward_io_only"),
        ("htree_ops.tuning", "KernelMetrics"),
        ("htree_ops.tuning", "TritonAutoTuner"),
        ("htree_ops.tuning", "TuningResult"),
        ("htree_ops.reference", "htree_forward_naive"),
    ):
        assert hasattr(importlib.import_module(module), name)


CACHED = """
import torch, htree_ops
from htree_ops import _load
from torch._dynamo.utils import counters
for build in ["one", "one", "another"]:
    _load.build_tag, torch.compiler.config.cache_key_tag = lambda: build, ""
    _load.tag_compiled_graphs()
    torch._dynamo.reset()
    torch.compile(htree_ops.causal_softmax, fullgraph=True)(torch.ones(4, 4))
    print(counters["aot_autograd"]["autograd_cache_miss"])
"""


def test_a_graph_that_another_build_compiled_is_not_taken_from_the_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert python(CACHED).split() == ["1", "1", "2"]


def test_the_tag_of_the_build_is_added_to_that_of_the_user(monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_CACHE_KEY_TAG", "mine")
    tag = python("import torch, htree_ops; print(torch.compiler.config.cache_key_tag)").strip()
    assert tag == f"mine,{build_tag()}"
