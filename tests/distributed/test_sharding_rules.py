"""Every op on DTensors, against one process: the rules of htree_ops/distributed/sharding.py."""

import pytest
import rules_on_ranks
import torch
from torch.distributed.tensor import Shard

from htree_ops.distributed import sharding
from htree_ops.info import op_names
from tests.test_registration import MUTATING

#: Why an op has no sharding rule. An op that stands neither here nor in ``sharding.RULES`` fails a test.
WITHOUT_A_RULE: dict[str, tuple[str, ...]] = {
    "lists of tensors have no metadata in DTensor; Autograd calls _attention_rows and its backward": (
        "_attention_backward",
        "_attention_forward",
    ),
    "calls an op with packed options": (
        "attention",
        "attention_backward",
        "attention_forward",
        "tree_attention",
    ),
    "writes into an argument and returns nothing, which the interface for rules cannot say": MUTATING,
    "has no tensor that could be sharded": ("rope_cache", "top_parents", "_check_tree_options"),
    "raises": ("_refuse_backward",),
    "a stage of tree attention; a model calls the whole": (
        "accumulate_non_topk",
        "bottom_accumulate",
        "compute_and_select",
        "compute_next_parents",
        "compute_scores",
        "final_normalize",
        "recompute_selection",
        "select_accumulate",
        "select_topk",
        "span_means",
        "subtract_topk",
        "tree_build",
        "tree_build_backward",
    ),
    "measures a stage of tree attention and gives no result": (
        "io_accumulate_non_topk",
        "io_attention_forward",
        "io_compute_next_parents",
        "io_compute_scores",
        "io_select_topk",
    ),
    "reads a cache, which belongs to its rank": (
        "kv_compress",
        "kv_decode_attention",
        "kv_decompress",
        "kv_prune",
        "_tree_cache_attention",
        "_tree_cache_prompt",
        "_tree_cache_prompt_bytes",
    ),
}


BY_INDEX = [name + rules_on_ranks.INDEXED for name in sharding.RULES if name.startswith("_attention_varlen")]


@pytest.mark.parametrize("name", [*sharding.RULES, *BY_INDEX])
def test_every_way_of_a_rule_gives_the_result_without_a_message(name, ranks):
    for size in (4, 2):
        for ways in ranks.run(rules_on_ranks.follow_rules, size, name):
            assert len(ways) > 1, "a rule that only replicates"
            for found in ways:
                assert found["as said"], found
                assert found["messages"] == 0, found
                assert found["error"] < 2e-5, found


def test_every_op_has_a_rule_or_a_reason():
    """``torch.ops.htree`` as the dispatcher knows it."""
    reasons = [name for names in WITHOUT_A_RULE.values() for name in names]
    assert sorted([*sharding.RULES, *reasons]) == sorted(op_names())


def test_every_op_that_models_run_has_a_rule(ranks):
    for names in ranks.run(rules_on_ranks.ops_of_models):
        assert names - set(sharding.RULES) == set()
        # The others stand beside an op that a model runs, for whoever calls them by hand.
        others = {
            "fp8_gemm_exact",
            "gated_mlp_backward",
            "select_blocks",
            "select_blocks_varlen",
            "sparse_attention",
            "_sparse_attention_backward",
            "sparse_attention_varlen",
            "_sparse_attention_varlen_backward",
        }
        assert set(sharding.RULES) - names == others


@pytest.mark.parametrize("name", [name for name in [*sharding.RULES, *BY_INDEX] if "_backward" in name])
def test_gradients_that_are_not_wanted(name, ranks):
    """Each mask has a decision of its own in DTensor's memory."""
    schema = getattr(torch.ops.htree, name.removesuffix(rules_on_ranks.INDEXED)).default._schema
    if "output_mask" not in [argument.name for argument in schema.arguments]:
        return
    size = len(schema.returns)
    for mask in ((True,) * size, (False,) + (True,) * (size - 1), (True,) + (False,) * (size - 1)):
        for ways in ranks.run(rules_on_ranks.follow_rules, 4, name, mask):
            for found in ways:
                assert found["whole"], found
                assert found["as said"], found
                assert found["error"] < 2e-5, found


def test_pending_sums_are_added_and_heads_that_do_not_divide_are_gathered(ranks):
    for found in ranks.run(rules_on_ranks.pending_sums, 2):
        assert found["softmax"] < 1e-6, found
        assert found["placed"] != "S(2)", found
        assert found["attention"], found


@pytest.mark.parametrize("tokens", [24, 5])
def test_log_sums_of_heads_on_several_ranks(tokens, ranks):
    for found in ranks.run(rules_on_ranks.log_sums, 4, tokens):
        assert found["equal"] == [True] * 5
        assert found["placed"] == [(Shard(2),)] * 5


@pytest.mark.parametrize(("size", "H_i", "kv_heads"), [(4, 4, 4), (2, 4, 4), (4, 1, 4), (4, 2, 2)])
def test_functions_of_an_index_with_heads_on_several_ranks(size, H_i, kv_heads, ranks):
    for calls in ranks.run(rules_on_ranks.functions_of_an_index, size, H_i, kv_heads):
        for name, found in calls.items():
            if "loss" in name:  # a mean over the ranks
                assert found["error"] < 1e-6, (name, found)
            else:
                assert all(found["equal"]), (name, found)
            if H_i == kv_heads == 4 and "loss" not in name:
                assert all(place.startswith("S(") for place in found["placed"]), (name, found)


def test_batch_and_heads_on_a_mesh_of_two_dimensions(ranks):
    for found in ranks.run(rules_on_ranks.two_dimensions):
        assert found["error"] < 1e-4, found
        assert "Shard(dim=0), Shard(dim=2)" in found["placements"], found


@pytest.mark.gpu
def test_functions_of_an_index_on_gpus(gpus):
    """Two GPUs, or one with a group of one, on NCCL."""
    for H_i, kv_heads in ((4, 4), (1, 4)):
        for calls in gpus.run(
            rules_on_ranks.functions_of_an_index, len(gpus.processes), H_i, kv_heads, "cuda"
        ):
            for name, found in calls.items():
                assert found["error"] < 1e-4, (name, found)  # lists are equal
