"""What ``import htree_ops`` gives and what it does not load."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import htree_ops
from htree_ops import compat

PACKAGE_PARENT = Path(htree_ops.__file__).resolve().parents[1]


def test_the_import_registers_the_ops_and_loads_no_tools():
    code = "import sys, torch, htree_ops; torch.ops.htree.attention; print(*sorted(sys.modules), sep='\\n')"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=PACKAGE_PARENT, capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    tuner = ("tuning.tuner", "tuning.clock", "tuning.verification", "tuning.command")
    tools = (
        *tuner,
        "bench",
        "compat",
        "correctness",
        "cli",
        "info",
        "integrations",
        "distributed",
        "reference",
    )
    forbidden = tuple(f"htree_ops.{tool}" for tool in tools)
    assert [name for name in loaded if name.startswith((*forbidden, "benchmarks", "tests"))] == []


def test_the_package_has_few_names_and_each_exists():
    assert len(htree_ops.__all__) <= 40
    assert all(hasattr(htree_ops, name) for name in htree_ops.__all__)
    for folder in sorted((PACKAGE_PARENT / "htree_ops" / "ops").glob("*/__init__.py")):
        family = importlib.import_module(f"htree_ops.ops.{folder.parent.name}")
        assert all(hasattr(family, name) for name in family.__all__)


def test_names_of_the_design_documents():
    names = (
        "FP8GEMMInput GatedMLPInput RMSNormRoPEInput TensorSpec TritonAutoTuner apply_grouped_hadamard "
        "apply_rotary_pos_emb_k apply_rotary_pos_emb_q convert_key_batched_quant mustafar_attention "
        "validate_fp8_gemm_inputs validate_fp8_quantize_inputs validate_gated_mlp_inputs validate_rmsnorm_rope_inputs"
    )
    assert sorted(compat.__all__) == sorted(names.split())
    assert all(hasattr(compat, name) for name in names.split())
    for module, name in (
        ("htree_ops.bench", "verdict"),
        ("htree_ops.bench", "verify"),
        ("htree_ops.parallel_io_only", "htree_forward_io_only"),
        ("htree_ops.tuning", "KernelMetrics"),
        ("htree_ops.tuning", "TuningResult"),
        ("htree_ops.reference", "htree_forward_naive"),
    ):
        assert hasattr(importlib.import_module(module), name)
