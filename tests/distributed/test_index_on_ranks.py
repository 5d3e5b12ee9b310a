"""An index that learns under DistributedDataParallel and FSDP2, and on ranks that share the tokens (§9.5, §9.6)."""

import index_on_ranks
import pytest


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("way", ["DDP", "FSDP2"])
def test_gradients_are_the_means_over_the_ranks(way, checkpoints, pair):
    for error, of_loss in pair.run(index_on_ranks.shared, way, checkpoints):
        assert error < 2e-6
        assert of_loss < 1e-6


@pytest.mark.parametrize("way", ["DDP", "FSDP2"])
def test_a_model_without_losses_trains_as_if_it_had_no_index(way, pair):
    assert pair.run(index_on_ranks.quiet, way) == [4, 4]  # the weights of two indexes


@pytest.mark.parametrize(("way", "name"), [("DDP", "DistributedDataParallel"), ("FSDP2", "fully_shard")])
def test_losses_that_come_late_say_so(way, name, pair):
    for message in pair.run(index_on_ranks.late, way):
        assert f"index_losses: the index must require grad before {name} has the model" in message


def test_sharded_weights_are_not_fitted(pair):
    for message in pair.run(index_on_ranks.fit_sharded):
        assert message == "fit_index: a model whose weights are sharded over ranks is not supported"


# ---- ranks that share the tokens


def assert_near(found: dict[str, float]) -> None:
    assert found["out"] < 1e-5, found
    assert found["losses"] < 1e-5, found
    assert found["gradients"] < 1e-4, found


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("balance", ["zigzag", "striped", "contiguous", "work"])
def test_shared_tokens_learn_as_one_process(balance, packed, ranks):
    """Seven positions on four ranks: shares of two sizes."""
    for found in ranks.run(index_on_ranks.shared_tokens, 4, balance, packed):
        assert_near(found)


@pytest.mark.parametrize(("size", "rows"), [(1, 5), (2, 500), (4, 2)])
def test_shares_of_any_number_of_positions(size, rows, ranks):
    """Many that are drawn several times, and fewer than ranks."""
    for found in ranks.run(index_on_ranks.shared_tokens, size, "zigzag", False, False, rows):
        assert_near(found)


@pytest.mark.parametrize("packed", [False, True])
def test_shared_tokens_learn_under_checkpoints(packed, ranks):
    for found in ranks.run(index_on_ranks.shared_tokens, 2, "zigzag", packed, True):
        assert_near(found)


def test_the_positions_of_the_first_rank_count(ranks):
    first, *others = ranks.run(index_on_ranks.other_seeds, 4)
    assert others == [first] * 3


@pytest.mark.parametrize("had", [False, True])
def test_an_index_is_fitted_on_shared_tokens(had, ranks):
    for found in ranks.run(index_on_ranks.shared_fit, 2, had):
        assert found["count"] == 4
        assert found["nats"] < 1e-5, found
        assert found["weights"] < 1e-4, found


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
def test_shared_tokens_learn_on_gpus(packed, gpus):
    """Two GPUs, or one with a group of one."""
    size = len(gpus.processes)
    for found in gpus.run(index_on_ranks.shared_tokens, size, "zigzag", packed, False, 7, "cuda"):
        assert found["out"] < 1e-3, found
        assert found["losses"] < 1e-3, found
        assert found["gradients"] < 1e-2, found


def test_shared_documents_without_positions_have_no_loss(ranks):
    assert ranks.run(index_on_ranks.nothing_to_learn, 2) == [[0.0, 0.0]] * 4


def test_compiled_code_has_the_losses_of_shared_tokens(ranks):
    for of_loss, of_gradients in ranks.run(index_on_ranks.compiled_losses, 4):
        assert of_loss < 1e-5
        assert of_gradients < 1e-4
