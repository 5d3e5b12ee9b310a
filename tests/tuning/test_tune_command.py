"""``python -m htree_ops tune``: what it searches and stores, and every refusal."""

import json

import pytest
import torch

from htree_ops.__main__ import PROGRAM
from htree_ops.tuning import SPACES, command, problems
from htree_ops.tuning.cache import FILE_NAME, cache_dir


@pytest.fixture
def cpu_stands_for_a_gpu(monkeypatch):
    """Turns off the command's refusal of a CPU, so that it searches without a GPU."""
    monkeypatch.setattr(command, "nothing_to_tune", lambda place: None)


def test_a_search_of_the_command(cpu_stands_for_a_gpu, capsys, tmp_path):
    target = tmp_path / "out.json"
    arguments = ["tune", "--kernel", "rmsnorm_rope", "--sizes", "1", "2", "64", "32", "--device", "cpu"]
    status = PROGRAM.main([*arguments, "--runs", "2", "--warmup", "0", "--export", str(target)])
    assert status == 0
    captured = capsys.readouterr()
    assert captured.out.count("rmsnorm_rope 1x2x64x32") == 2
    assert captured.err == "", "progress is for terminals"
    records = json.loads((cache_dir() / FILE_NAME).read_text())["records"]
    assert {record["key"]["dtype"] for record in records.values()} == {"bfloat16", "float16"}
    assert all(record["metrics"]["latency_ms"] > 0 for record in records.values())
    exported = json.loads(target.read_text())["records"]
    assert exported == {text: record for text, record in records.items() if record["config"]}
    assert f"{len(exported)} configurations written to {target}" in captured.out
    assert PROGRAM.main(["tune", "--kernel", "rmsnorm_rope", "--sizes", "1", "--device", "cpu"]) == 2


@pytest.mark.parametrize(
    ("flags", "facts", "complaint"),
    [
        ([], {"gpu": False}, "torch sees no GPU"),
        (
            ["--device", "cpu"],
            {},
            "--device cpu: configurations choose among GPU kernels, and the CPU ignores",
        ),
        ([], {"gpu": True, "reason": "HTREE_CUDA=0"}, "this library has no GPU kernels (HTREE_CUDA=0)"),
    ],
    ids=["no gpu", "cpu", "cpu build"],
)
def test_where_there_is_nothing_to_tune_nothing_is_stored(
    flags, facts, complaint, refusal_of, tmp_path, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: facts.get("gpu", True))
    monkeypatch.setattr(command, "build_info", lambda: {"cuda": None, "reason": facts.get("reason")})
    monkeypatch.setattr(command, "AutoTuner", lambda *_, **__: pytest.fail("searched"))
    said = refusal_of(PROGRAM.main, ["tune", *flags, "--cache-dir", str(tmp_path)])
    assert said.startswith("tune: there is nothing to tune: ")
    assert complaint in said
    assert list(tmp_path.iterdir()) == []


ONE = ["--device", "cpu", "--kernel", "gated_mlp", "--sizes", "4", "64", "64"]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--device", "x"], "argument --device: must be cuda or cuda:N, got 'x'"),
        (["--device", "mps"], "argument --device: must be"),
        (["--device", "meta"], "argument --device: must be"),
        (["--device", "cuda:77"], "GPU"),
        (["--kernel", "softmax"], "argument --kernel: invalid choice"),
        (["--sizes", "-4", "64", "64"], "argument --sizes: must be at least 1, got -4"),
        (["--sizes", "0", "0", "0"], "argument --sizes: must be at least 1, got 0"),
        (["--sizes", "99999999999999999999", "64", "64"], "argument --sizes: must be at most 2147483647"),
        (["--sizes", "999999999", "64000", "64"], "--sizes: not enough memory: the inputs of gated_mlp take"),
        (["--sizes", "1", "1", "64", "64"], "--sizes: gated_mlp takes 3 sizes"),
        (["--runs", "0"], "argument --runs: must be at least 1"),
        (["--warmup", "-1"], "argument --warmup: must be at least 0"),
        (["--cache-dir", "/dev/null/x"], "argument --cache-dir: /dev/null/x cannot be written"),
        (["--cache-dir", "/proc/x"], "argument --cache-dir: /proc/x cannot be written"),
        (["--cache-dir", ""], "argument --cache-dir: must be a folder"),
        (["--export", "/dev/null/x"], "argument --export: /dev/null/x cannot be written"),
        (["--export", "/dev"], "argument --export: /dev cannot be written: Is a directory"),
    ],
)
def test_bad_use_is_one_line_and_status_two_before_the_search(
    flags, complaint, cpu_stands_for_a_gpu, refusal_of, monkeypatch
):
    monkeypatch.setattr(command, "AutoTuner", lambda *_, **__: pytest.fail("searched"))
    assert complaint in refusal_of(PROGRAM.main, ["tune", *ONE, *flags])


def test_sizes_are_checked_for_every_op_before_the_first_search(cpu_stands_for_a_gpu, refusal_of):
    said = refusal_of(PROGRAM.main, ["tune", "--device", "cpu", "--sizes", "1", "1", "64", "64"])
    assert said.endswith("takes 3 sizes, got (1, 1, 64, 64); --kernel chooses an op\n")


def test_a_cache_that_cannot_be_written_is_found_before_the_search(
    cpu_stands_for_a_gpu, refusal_of, tmp_path, monkeypatch
):
    newer = tmp_path / "tuning.json"
    newer.write_text('{"format": 2}')
    said = refusal_of(PROGRAM.main, ["tune", *ONE, "--cache-dir", str(tmp_path)])
    assert said.startswith(f"tune: --cache-dir: nothing can be stored in {tmp_path}: ")
    assert newer.read_text() == '{"format": 2}'
    monkeypatch.setenv("HTREE_CACHE_DIR", str(newer / "below"))
    said = refusal_of(PROGRAM.main, ["tune", *ONE])
    assert said.startswith("tune: the cache folder (HTREE_CACHE_DIR): nothing can be stored in ")


@pytest.mark.parametrize("kernel", sorted(SPACES))
def test_the_bytes_of_the_inputs(kernel):
    sizes = (2, 3, 256, 64) if kernel == "rmsnorm_rope" else (5, 64, 48)
    problem = problems.make_problem(kernel, sizes, torch.bfloat16, "cpu")
    inputs = {id(t): t for t in problem.arguments if isinstance(t, torch.Tensor) and t.dtype != torch.float32}
    elements = sum(t.numel() for t in inputs.values()) + problem.call().numel()
    assert problems.input_bytes(kernel, sizes) == 6 * elements, "all but the scales"
