"""The computed table of docs/distributed.md is what its program prints, and its model agrees with what was measured."""

import itertools
from pathlib import Path

import pytest

from benchmarks import context_parallel
from benchmarks import context_parallel_cost as cost

ROOT = Path(__file__).resolve().parents[2]


def test_the_document_has_the_table(capsys):
    assert cost.main([]) == 0
    assert capsys.readouterr().out.strip() in (ROOT / "docs" / "distributed.md").read_text()


def test_the_fit_gives_back_the_measured_times():
    costs = cost.measured()
    for tokens, measured in ((131072, 53.526), (262144, 156.574), (524288, 348.270), (1048576, 782.176)):
        assert costs.forward(tokens) / 1e3 == pytest.approx(measured, rel=0.05)
    assert cost.work_of(131072) == (4096, 0, 1)
    assert cost.work_of(262144) == (512, 1, 1)


@pytest.mark.parametrize(("tokens", "computed"), [(131_072, "97.7 %"), (524_288, "98.6 %")])
def test_the_document_has_what_is_computed_for_two_gpus(tokens, computed):
    assert f"{100 * cost.cost(cost.measured(), 2, tokens).efficiency:.1f} %" == computed
    words = f"{computed} at {tokens:_} tokens".replace("_", " ")
    assert words in " ".join((ROOT / "docs" / "distributed.md").read_text().split())


def test_overlap_and_more_ranks_behave():
    assert cost.overlapped(1, 10, 4, 2) == 16  # one step: nothing is hidden
    assert cost.overlapped(4, 12, 4, 4) == 14  # work rules: a part in, a part out
    assert cost.overlapped(4, 4, 12, 4) == 17  # the link rules
    costs = cost.measured()
    rows = [cost.cost(costs, ranks, 1 << 20) for ranks in (2, 4, 8, 64)]
    for few, many in itertools.pairwise(rows):
        assert few.forward > many.forward
        assert few.efficiency > many.efficiency
    assert cost.cost(costs, 8, 1 << 20, 50e9).waiting > rows[2].waiting


@pytest.mark.parametrize(("best", "met"), [(0.97, True), (0.959, False)])
def test_a_bar_is_met_by_the_better_balance(best, met, capsys):
    rows = [
        {"T": 524_288, "what": "forward and backward", "balance": balance, "efficiency": share}
        for balance, share in (("zigzag", 0.9), ("contiguous", best))
    ]
    assert context_parallel.bars_met(rows, {524_288: 0.96}) is met
    assert ("MISSED" in capsys.readouterr().out) is not met
