"""An index that learns under DistributedDataParallel and FSDP2 (docs/semantics/index_loss.md §9.5)."""

from __future__ import annotations

from collections.abc import Iterator

import index_on_ranks
import pytest
from process_pool import Pool, started


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    yield from started(2)


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("way", ["DDP", "FSDP2"])
def test_gradients_are_the_means_over_the_ranks(way: str, checkpoints: bool, pair: Pool) -> None:
    for error, of_loss in pair.run(index_on_ranks.shared, way, checkpoints):
        assert error < 2e-6
        assert of_loss < 1e-6


@pytest.mark.parametrize("way", ["DDP", "FSDP2"])
def test_a_model_without_losses_trains_as_if_it_had_no_index(way: str, pair: Pool) -> None:
    assert pair.run(index_on_ranks.quiet, way) == [4, 4]  # the weights of two indexes


@pytest.mark.parametrize(("way", "name"), [("DDP", "DistributedDataParallel"), ("FSDP2", "fully_shard")])
def test_losses_that_come_late_say_so(way: str, name: str, pair: Pool) -> None:
    for message in pair.run(index_on_ranks.late, way):
        assert f"index_losses: the index must require grad before {name} has the model" in message


def test_sharded_weights_are_not_fitted(pair: Pool) -> None:
    for message in pair.run(index_on_ranks.fit_sharded):
        assert message == "fit_index: a model whose weights are sharded over ranks is not supported"
