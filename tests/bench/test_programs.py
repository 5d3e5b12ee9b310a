"""The programs of benchmarks/ at tiny sizes: what they compare is the same, and every setting has its rows."""

import argparse
import csv
import functools
import importlib
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import (
    host_cost,
    models,
    selection_span,
    sparse_attention,
    tree_index,
    tree_index_decode,
    varlen_batches,
    vllm_steps,
)
from benchmarks.harness.plain_rows import parse_for_gpu
from tests.support.cases import normal

# ---- a GPU is asked for


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


#: Programs that measure a GPU alone, and those to which the CPU is the other choice.
OF_A_GPU = (
    "chunked_prompt",
    "fp8_gemm_error",
    "fp8_gemm_grid",
    "masked_tiles",
    "short_sequences",
    "tree_memory",
)
OF_BOTH = ("host_cost", "models", "selection_span", "varlen_batches", "vllm_steps")


@pytest.mark.parametrize("name", [*OF_A_GPU, *OF_BOTH])
def test_a_gpu_is_needed(name, no_gpu, capsys):
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{name}").main([])
    assert ended.value.code == 2
    said = (
        "torch sees no GPU: --device cpu measures this machine\n"
        if name in OF_BOTH
        else "error: torch sees no GPU\n"
    )
    assert capsys.readouterr().err.endswith(said)


@pytest.mark.parametrize(("device", "there"), [("cpu", False), ("cuda", True), ("cuda:1", True)])
def test_other_runs_begin(device, there, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    assert parse_for_gpu(parser, ["--device", device]).device == device


# ---- packed documents, spans and open_next


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("quick", [False, True])
def test_rows_of_packed_documents(quick, bounded, rows_of, brief, monkeypatch):
    sizes = {"H": 2, "H_kv": 1, "K": 8, "V": 8, "top_k": 2, "M": 16}
    spread = replace(varlen_batches.BENCHMARK_CASES["cpu"][0], lengths=(40, 5, 17, 9, 40), **sizes)
    others = [
        replace(spread, name="equal", lengths=(24,) * 5),
        replace(spread, name="dense", lengths=(9, 16)),
    ]
    monkeypatch.setitem(varlen_batches.BENCHMARK_CASES, "cpu", [spread, *others])
    rows = rows_of(varlen_batches.main, "--quick " * quick + "--bounded" * bounded)
    assert {row["grouping"] for row in rows} == {"auto, as many offsets as tokens" if bounded else "auto"}
    batches = {"spread": "sum of full batches", "equal": "tree_attention", "dense": "SDPA by document"}
    assert [(row["batch"], row["direction"], row["yardstick"]) for row in rows] == [
        (name, direction, yardstick)
        for name, yardstick in batches.items()
        for direction in ("forward", "backward")
    ]
    assert [int(row["documents"]) for row in rows[::2]] == ([2, 2, 1] if quick else [5, 5, 2])
    for row in rows:
        assert float(row["multiple"]) == pytest.approx(float(row["median_ms"]) / float(row["yardstick_ms"]))


def test_what_packed_documents_are_compared_with_is_the_same():
    sizes = {"lengths": (12, 12), "H": 2, "H_kv": 1, "K": 8, "V": 8, "top_k": 2, "M": 16, "rope_base": None}
    case = replace(varlen_batches.BENCHMARK_CASES["cpu"][0], **sizes)
    inputs, cu = case.make_qkv("cpu"), case.make_offsets("cpu")[0]
    packed = varlen_batches.attend_packed(case, cu, max(case.lengths), "auto", *inputs)
    torch.testing.assert_close(varlen_batches.attend_batch(case, *inputs), packed, rtol=0, atol=1e-5)
    torch.testing.assert_close(varlen_batches.attend_densely(case, cu, *inputs), packed, rtol=0, atol=1e-5)


@pytest.fixture
def spans(monkeypatch):
    """Settings of the program of spans: lengths, strides, spans."""

    def use(*settings, **sizes):
        monkeypatch.setitem(selection_span.SETTINGS, "cpu", settings)
        for name, size in sizes.items():
            monkeypatch.setitem(selection_span.SIZES["cpu"], name, size)

    return use


@pytest.mark.parametrize("quick", [False, True])
def test_rows_of_spans(quick, rows_of, brief, spans):
    spans((64, 16, (4, 2), 1), (128, 4, (4,), 1), top_k=2, M=32)
    rows = rows_of(selection_span.main, "--quick" * quick)
    expected = [("64", ""), ("64", "4"), ("64", "2"), ("128", ""), ("128", "4")]
    assert [(row["T"], row["selection_span"]) for row in rows] == expected[: 3 if quick else 5]
    for row in rows:
        assert (float(row["multiple"]) == 1) == (row["selection_span"] == "")
        assert (row["gpu"], row["peak_bytes"]) == ("none", "")


def test_rows_of_open_next(rows_of, brief, spans):
    spans((256, 16, (4, 2), 1), (512, 4, (4,), 1), top_k=3, M=32)
    rows = rows_of(selection_span.main, "--quick --open-next")
    assert [(row["T"], row["selection_span"]) for row in rows] == [("256", ""), ("256", "2")]
    for row in rows:
        assert float(row["multiple"]) == pytest.approx(float(row["open_next_ms"]) / float(row["plain_ms"]))


# ---- times of the host


@pytest.mark.parametrize(
    ("tensors", "name"), [(2, "neg"), (3, "add"), (4, "addcmul"), (5, "cat"), (11, "cat")]
)
def test_the_aten_op_has_as_many_tensors(tensors, name):
    found, call = host_cost.plain(tensors, "cpu")
    assert found == name
    assert host_cost.tensors_of(call) == tensors


def test_tensors_in_lists_and_keywords_count():
    assert host_cost.tensors_of(partial(torch.cat, tensors=[torch.ones(2), torch.ones(3)])) == 3


def test_a_row_for_every_op(rows_of):
    rows = rows_of(host_cost.main, "--bursts 1")
    assert [row["op"] for row in rows] == [*host_cost.ops("cpu"), *host_cost.steps("cpu")]
    for row in rows:
        assert float(row["host_us"]) == float(row["own_us"]) > 0, "a CPU launches nothing"
        assert float(row["ratio"]) == pytest.approx(float(row["own_us"]) / float(row["aten_us"]), rel=0.02)


@pytest.mark.gpu
def test_kernels_are_counted_and_launches_cost_something():
    x = torch.ones(16, device="cuda")
    assert host_cost.count_kernels(partial(torch.neg, x), "cuda") == 1
    assert host_cost.count_kernels(lambda: torch.neg(torch.neg(x)), "cuda") == 2
    assert 0.3 < host_cost.launch_us("cuda", 5) < 100


# ---- whole models

TINY = models.Size(1, 32, 48, 4, 2, 61)
HERE = [way for way in models.WAYS if not way.liger]


@pytest.fixture
def uncompiled(monkeypatch):
    """torch.compile traces, and no compiler runs."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()


@pytest.mark.parametrize("checkpoint_from", [8, 100])
def test_every_way_trains_the_same_model(checkpoint_from, uncompiled, monkeypatch):
    monkeypatch.setattr(models, "CHECKPOINT_FROM", checkpoint_from)
    losses = {}
    for way in HERE:
        step = models.make_call(way, "train", TINY, 40, "cpu", torch.float32)
        losses[way.name] = [float(step()) for _ in range(3)]
    wanted = losses["eager + SDPA"]
    assert wanted[0] != wanted[2]
    for curve in losses.values():
        assert curve == pytest.approx(wanted, rel=1e-4)


def test_rows_of_models(rows_of, uncompiled, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    short = models.Way("ours, short", htree={"max_top_nodes": 16, "top_k": 2})
    rows = rows_of(models.main, "--tokens 24 --rounds 1", TINY, (models.WAYS[2], *HERE[:2], short))
    assert "Liger + SDPA: skipped, liger_kernel is not installed" in capsys.readouterr().err
    ways = ["eager + SDPA", "torch.compile + SDPA", "ours, short"]
    found = [(row["phase"], row["way"]) for row in rows]
    assert found == [(phase, way) for phase in ("prefill", "train") for way in ways]
    for row in rows:
        assert row["same_function"] == str(row["way"] != "ours, short")
        assert float(row["tokens_per_s"]) == pytest.approx(24e3 / float(row["median_ms"]))
        assert (row["checkpointed"], row["peak_bytes"]) == ("False", "")


def test_a_look_takes_one_length_and_compiles_nothing(tmp_path):
    path = tmp_path / "models.csv"
    call = ["--device", "cpu", "--tokens", "24", "48", "--phase", "prefill", "--quick", "--csv", str(path)]
    assert models.main([*call, "--way", "ours, stride (1|16)$|SDPA$"], TINY, HERE) == 0
    ways = ["eager + SDPA", "ours, stride 1", "ours, stride 16"]
    assert [(row["tokens"], row["way"]) for row in csv.DictReader(path.open())] == [
        ("24", way) for way in ways
    ]


def test_another_number_of_heads_as_wide(tmp_path):
    path = tmp_path / "models.csv"
    call = ["--device", "cpu", "--tokens", "24", "--phase", "train", "--quick", "--csv", str(path)]
    size = models.replace(TINY, hidden_size=64)
    assert models.main([*call, "--heads", "8", "1", "--way", "index, stride 1|eager"], size, HERE) == 0
    found = [(row["way"], row["heads"], row["kv_heads"]) for row in csv.DictReader(path.open())]
    assert found == [(way, "8", "1") for way in ("eager + SDPA", "ours, index, stride 1")]


@pytest.mark.gpu
def test_a_row_on_a_gpu(tmp_path):
    path = tmp_path / "models.csv"
    size = models.Size(1, 256, 512, 4, 2, 61)
    assert models.main(["--tokens", "256", "--rounds", "1", "--csv", str(path)], size, HERE[:4]) == 0
    rows = list(csv.DictReader(path.open()))
    assert len(rows) == 8
    assert all(float(row["median_ms"]) > 0 and int(row["peak_bytes"]) > 0 for row in rows)


# ---- attention over the lists of a file


@pytest.fixture
def lists(tmp_path, monkeypatch):
    """Those of two layers with one head: each query reads its own block and the first one, or the one before."""
    usual = sparse_attention.BENCHMARK_CASES["cpu"][0]
    small = replace(usual, T=512, H=2, H_kv=1, K=8, V=8)
    monkeypatch.setitem(sparse_attention.BENCHMARK_CASES, "cpu", [small])
    own = np.arange(256).reshape(1, 4, 64, 1, 1) // 16
    both = np.concatenate([np.concatenate((own, other), -1) for other in (0 * own, own - 1)])
    path = tmp_path / "lists.npz"
    np.savez(path, lists=both.astype(np.int16), starts=np.arange(0, 256, 64), context=256)
    return path


def test_rows_of_sparse_attention(lists, tmp_path, brief):
    path = tmp_path / "rows.csv"
    call = ["--device", "cpu", "--quick", "--lists", str(lists), "--case", "s=1 ", "--csv", str(path)]
    assert sparse_attention.main(call) == 0
    rows = list(csv.DictReader(path.open()))
    methods = ["dense", "sparse_attention", "tree_attention, without its choice"]
    assert [(row["case"].split()[-1], row["direction"], row["method"]) for row in rows] == [
        (kind, direction, method)
        for kind in ("trained", "random")
        for direction in ("forward", "backward")
        for method in methods
    ]
    unions = [float(x) for x in rows[0]["unions"].split()]
    assert len(unions) == 6
    assert unions == sorted(unions)


def test_the_lists_of_the_file_are_read(lists):
    """Sequences take turns; the tree opens the same blocks: with all of them open it is dense attention."""
    case = next(x for x in sparse_attention.cases_of_file(lists, "cpu") if x.selection_stride == 4)
    assert (case.B, case.T, case.n) == (2, 256, 2)
    blocks = sparse_attention.trained_blocks(case, lists, "cpu")
    assert blocks[:, -1, 0].tolist() == [[15, 0], [15, 14]]
    inputs = [normal((2, 64, heads, 8), torch.float32, "cpu", i) for i, heads in enumerate((2, 1, 1))]
    every = torch.arange(4, dtype=torch.int32).expand(2, 16, 1, 4)
    tree = sparse_attention.tree_over(replace(case, T=64, n=4), every, *inputs[:2])
    torch.testing.assert_close(tree(*inputs), sparse_attention.dense(*inputs), rtol=1e-4, atol=1e-5)


# ---- the index of a tree


def test_rows_of_an_index(rows_of):
    small = tree_index.Setting(300, 2, H=2, H_kv=1, D=8)
    both = (small, tree_index.Setting(300, 2, 4, H=2, H_kv=1, D=8, open_next=True, backward=False))
    rows = rows_of(tree_index.main, "--rounds 1", both)
    found = [(row["direction"], row["selection_stride"]) for row in rows]
    assert found == [("forward", "1"), ("backward", "1"), ("forward", "4")]
    for row in rows:
        assert float(row["of_dense"]) == pytest.approx(float(row["sustained_ms"]) / float(row["dense_ms"]))
        assert (row["top_k"], row["nsa_ms"]) == ("2", "")


def test_nsa_is_called_for_as_many_tokens(monkeypatch, capsys):
    setting = tree_index.Setting(8192, 64, H=64)
    monkeypatch.setitem(sys.modules, "fla.ops.nsa", None)
    assert tree_index.nsa_of(setting, "cuda") is None
    assert "NSA: skipped" in capsys.readouterr().err
    given = SimpleNamespace(parallel_nsa=lambda q, k, v, **options: options)
    for name in ("fla", "fla.ops", "fla.ops.nsa"):
        monkeypatch.setitem(sys.modules, name, given)
    found = tree_index.nsa_of(setting, "cuda")
    options = found(*tree_index.make_tensors(tree_index.Setting(8, 64, H=64), "cpu"))
    assert (options["block_counts"], options["block_size"]) == (16, 64)
    assert tree_index.nsa_of(tree_index.Setting(8192, 64), "cuda") is None


def test_bounds_of_an_index():
    """By hand: rows from 32 on gather up to four nodes of 16, of their own what is before; index keys of a step."""
    setting = tree_index.Setting(128, 4, H=8, H_kv=4, D=128, M=32)
    tokens = sum(min(t // 16, 3) * 16 + t % 16 + 1 for t in range(32, 128))
    gathered = 4 * 512 * tokens / 9.3e9
    assert tree_index.least_ms(setting, backward=False) == pytest.approx(gathered, rel=1e-6)
    assert tree_index.least_ms(setting, backward=True) == pytest.approx(gathered * (1 + 2 / 16), rel=1e-6)
    step = tree_index_decode.Setting(2, 131_072)
    bytes_of_step = 2 * 4 * (131_072 * 33 + (8192 + 2048) * 512)
    assert tree_index_decode.least_us(step) == pytest.approx(bytes_of_step / 4.3e6)


def test_dense_attention_is_what_a_tree_that_opens_all_computes():
    setting = tree_index.Setting(100, 8, H=2, H_kv=1, D=8)
    tensors = tree_index.make_tensors(setting, "cpu")
    wanted = tree_index.ours(setting)(*tensors)
    torch.testing.assert_close(tree_index.dense(*tensors), wanted, rtol=1e-4, atol=1e-5)


# ---- steps of vLLM

PAGES = {"T": 300, "page": 32, "H": 2, "H_kv": 1, "D": 16}


def test_rows_of_steps(rows_of):
    """A step and a prompt by each choice; the program compares their rows with those of the cache."""
    settings = [
        vllm_steps.Setting(choice=choice, B=B, **sizes, **PAGES)
        for choice in vllm_steps.CHOICES
        for B, sizes in ((2, {"rows": 3}), (1, {"chunk": 100}))
    ]
    rows = rows_of(vllm_steps.main, "--quick", settings)
    whats = [("step", "3"), ("prompt", "100"), ("prompt beside kept copies", "100")]
    assert [(row["what"], row["rows"]) for row in rows] == 2 * whats
    for row in rows:
        assert float(row["ratio"]) == pytest.approx(float(row["pages_us"]) / float(row["cache_us"]))


def test_other_rows_are_not_timed(monkeypatch):
    plain = vllm_steps.attend_step

    def wrong(*args):
        plain(*args)
        args[-2][-1, -1, -1] += 1e-3

    monkeypatch.setattr(vllm_steps, "attend_step", wrong)
    for sizes in ({"rows": 3}, {"chunk": 100}):
        setting = vllm_steps.Setting(choice="index", B=1, **PAGES, **sizes)
        with pytest.raises(RuntimeError, match="are not those of the cache"):
            list(vllm_steps.measure(setting, "cpu", vllm_steps.timing.QUICK))
