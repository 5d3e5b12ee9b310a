"""The command line that judges tree attention: its reference in pieces, its statuses, its refusals."""

import argparse

import pytest
import torch

import htree_ops.reference.tree_attention as ref
from htree_ops import correctness
from htree_ops.__main__ import PROGRAM as program

SIZES = {
    "batch": 2, "seq-len": 150, "hq": 4, "h-kv": 2, "k-dim": 4, "v-dim": 6,
    "compression-rate": 4, "top-k-per-layer": 4, "max-top-nodes": 12,
}  # fmt: skip
FLAGS = [f"--{name}={value}" for name, value in SIZES.items()]
PROBLEM = correctness.Problem(**{name.replace("-", "_"): value for name, value in SIZES.items()})


def run(flags):
    return program.main(["correctness", *flags])


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(correctness, "PIECE_ELEMENTS", 1 << 14)


@pytest.mark.parametrize("top_nodes", [12, 30])
@pytest.mark.parametrize("span", [None, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pieces_give_the_reference(dtype, span, top_nodes):
    changes = {"dtype": dtype, "selection_span": span, "max_top_nodes": top_nodes}
    problem = correctness.Problem(**{**vars(PROBLEM), **changes})
    q, k, v, dout = problem.make(3, "cpu")
    whole = ref.htree_forward_naive(q, k, v, **problem.options, compute_dtype=torch.float64)
    free = correctness.reference_results(q, k, v, dout, problem, None)
    forced = correctness.reference_results(q, k, v, dout, problem, whole.parents)
    gradients = ref.htree_backward_naive(dout, q, whole, compression_rate=problem.compression_rate)
    for found in (free, forced):
        torch.testing.assert_close(found["out"], whole.out, rtol=1e-5, atol=1e-6)
        for name, wanted in zip(("dq", "dk", "dv"), gradients, strict=True):
            torch.testing.assert_close(found[name], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("span", [[], ["--selection-span=2"], ["--max-top-nodes=30"]], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_pass(device, dtype, span, capsys):
    flags = [*FLAGS, f"--device={device}", "--seeds", "1", "2", f"--dtype={dtype}", *span]
    assert run(flags) == 0
    *cases, first, second, last = capsys.readouterr().out.splitlines()
    assert len(cases) == 10
    assert all(line.endswith(": PASS") for line in cases)
    assert [line.split()[:3] for line in (first, second)] == [["seed", "1:", "PASS"], ["seed", "2:", "PASS"]]
    assert "p99 out" in first
    assert last == f"PASS (2 seeds, {dtype}, {device})"


def test_alarm_passes_unless_told_otherwise(capsys):
    strict = [*FLAGS, "--device=cpu", "--out-p99-atol=0"]
    assert run(strict) == 0
    assert "PASS_WITH_ALARM (1 seed" in capsys.readouterr().out
    assert run([*strict, "--fail-on-alarm"]) == 1
    assert "out, free selection: 99th percentile" in capsys.readouterr().out
    assert run([*FLAGS, "--device=cpu", "--grad-p99-atol=0", "--fail-on-alarm"]) == 1


def test_fail(monkeypatch, capsys):
    assert run([*FLAGS, "--device=cpu", "--final-atol=0", "--final-rtol=0"]) == 1
    assert "FAIL (1 seed" in capsys.readouterr().out
    true = correctness.reference_results

    def shifted(*arguments):
        found = true(*arguments)
        found["dk"][0, 7, 1, 2] += 1.0
        return found

    monkeypatch.setattr(correctness, "reference_results", shifted)
    assert run([*FLAGS, "--device=cpu"]) == 1
    assert "dk, forced lists: 1 of" in capsys.readouterr().out


def test_lists_out_of_shape_fail(monkeypatch, capsys):
    monkeypatch.setattr(correctness, "fault_of_lists", lambda *_: "layer 0: not ascending")
    assert run([*FLAGS, "--device=cpu"]) == 1
    assert "lists: layer 0: not ascending" in capsys.readouterr().out


@pytest.mark.parametrize("name", list(correctness.make_cases(torch.float32, "cpu")))
def test_a_wrong_op_of_another_family_fails(name, monkeypatch, capsys):
    right = correctness.make_cases(torch.float32, "cpu")[name]

    def wrong():
        actual, expected = right()
        actual.view(-1)[-1] += 0.01 * float(expected.abs().max())
        return actual, expected

    monkeypatch.setattr(correctness, "make_cases", lambda *_: {name: wrong})
    assert run([*FLAGS, "--device=cpu"]) == 1
    shown = capsys.readouterr().out
    assert f"{name}: FAIL  1 of" in shown
    assert "FAIL (1 seed" in shown


def test_defaults():
    parser = argparse.ArgumentParser()
    correctness.COMMAND.fill(parser)
    flags = vars(parser.parse_args([]))
    documented = {
        "seed": 42, "seq_len": 12_000, "hq": 16, "h_kv": 4, "k_dim": 32, "v_dim": 32, "final_atol": 3e-2,
        "final_rtol": 3e-2, "out_p99_atol": 5e-3, "grad_p99_atol": 1e-2, "fail_on_alarm": False,
    }  # fmt: skip
    assert {name: flags[name] for name in documented} == documented


@pytest.mark.parametrize("seed", [-(2**63), 2**64 - 1])
def test_every_seed_of_torch_is_one(seed):
    assert run([*FLAGS, "--device=cpu", f"--seed={seed}"]) == 0


def test_memory_that_runs_out_is_one_line(monkeypatch, refusal_of):
    monkeypatch.setattr(correctness, "judge", lambda *_: torch.empty(1 << 60, dtype=torch.uint8))
    assert refusal_of(run, [*FLAGS, "--device=cpu"], silent=False).startswith("correctness: out of memory")


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--hq=3"], "H_kv"),
        (["--k-dim=5"], "even"),
        (["--max-top-nodes=0"], "at least 1"),
        (["--compression-rate=1"], "compression_rate"),
        (["--rope-base=-1"], "rope_base"),
        (["--selection-span=3"], "selection_span"),
        (["--final-atol=-1"], "tolerances"),
        (["--final-atol=nan"], "tolerances"),
        (["--seq-len=0"], "at least 1"),
        (["--dtype=int8"], "invalid choice"),
        (
            ["--compression-rate=99999999999999999999"],
            "argument --compression-rate: must be at most 2147483647",
        ),
        (["--top-k-per-layer=99999999999999999999"], "argument --top-k-per-layer: must be at most"),
        (["--max-top-nodes=99999999999999999999"], "argument --max-top-nodes: must be at most"),
        (["--batch=99999999999999999999"], "argument --batch: must be at most"),
        (["--seed=99999999999999999999"], "argument --seed: must be at most 18446744073709551615"),
        (["--seeds", "1", "-9223372036854775809"], "argument --seeds: must be at least -9223372036854775808"),
        (["--batch=1000000", "--seq-len=1000000"], "not enough memory: the inputs of --batch and --seq-len"),
    ],
)
def test_bad_use_is_one_line_and_status_two(refusal_of, flags, complaint):
    assert complaint in refusal_of(run, [*FLAGS, "--device=cpu", *flags], silent=False)
