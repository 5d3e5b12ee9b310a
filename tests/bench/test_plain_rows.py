"""Programs of benchmarks/ that measure a GPU say so where there is none."""

from __future__ import annotations

import argparse
import importlib

import pytest
import torch

from benchmarks.harness.plain_rows import parse_for_gpu


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(
    "name",
    ["chunked_prompt", "fp8_gemm_error", "fp8_gemm_grid", "masked_tiles", "short_sequences", "tree_memory"],
)
def test_a_gpu_is_needed(name, no_gpu, capsys):
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{name}").main([])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("error: torch sees no GPU\n")


@pytest.mark.parametrize("name", ["host_cost", "models", "selection_span", "varlen_batches", "vllm_steps"])
def test_the_cpu_is_the_other_choice(name, no_gpu, capsys):
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{name}").main([])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("torch sees no GPU: --device cpu measures this machine\n")


@pytest.mark.parametrize(("device", "there"), [("cpu", False), ("cuda", True), ("cuda:1", True)])
def test_other_runs_begin(device, there, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    assert parse_for_gpu(parser, ["--device", device]).device == device
