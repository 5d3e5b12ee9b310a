"""Ops and modules on DTensors, against one process; the rules of htree_ops/distributed/sharding.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import tp_on_ranks
from process_pool import Pool, started
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


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pool]:
    """Four processes on the CPU: groups of 4, 2 and 1."""
    yield from started(4)


# ---- the rules


BY_INDEX = [name + tp_on_ranks.INDEXED for name in sharding.RULES if name.startswith("_attention_varlen")]


@pytest.mark.parametrize("name", [*sharding.RULES, *BY_INDEX])
def test_every_way_of_a_rule_gives_the_result_without_a_message(name: str, ranks: Pool) -> None:
    for size in (4, 2):
        for ways in ranks.run(tp_on_ranks.follow_rules, size, name):
            assert len(ways) > 1, "a rule that only replicates"
            for found in ways:
                assert found["as said"], found
                assert found["messages"] == 0, found
                assert found["error"] < 2e-5, found


def test_every_op_has_a_rule_or_a_reason() -> None:
    """``torch.ops.htree`` as the dispatcher knows it."""
    reasons = [name for names in WITHOUT_A_RULE.values() for name in names]
    assert sorted([*sharding.RULES, *reasons]) == sorted(op_names())


def test_every_op_that_models_run_has_a_rule(ranks: Pool) -> None:
    for names in ranks.run(tp_on_ranks.ops_of_models):
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
def test_gradients_that_are_not_wanted(name: str, ranks: Pool) -> None:
    """Each mask has a decision of its own in DTensor's memory."""
    schema = getattr(torch.ops.htree, name.removesuffix(tp_on_ranks.INDEXED)).default._schema
    if "output_mask" not in [argument.name for argument in schema.arguments]:
        return
    size = len(schema.returns)
    for mask in ((True,) * size, (False,) + (True,) * (size - 1), (True,) + (False,) * (size - 1)):
        for ways in ranks.run(tp_on_ranks.follow_rules, 4, name, mask):
            for found in ways:
                assert found["whole"], found
                assert found["as said"], found
                assert found["error"] < 2e-5, found


def test_pending_sums_are_added_and_heads_that_do_not_divide_are_gathered(ranks: Pool) -> None:
    for found in ranks.run(tp_on_ranks.pending_sums, 2):
        assert found["softmax"] < 1e-6, found
        assert found["placed"] != "S(2)", found
        assert found["attention"], found


@pytest.mark.parametrize("tokens", [24, 5])
def test_log_sums_of_heads_on_several_ranks(tokens: int, ranks: Pool) -> None:
    for found in ranks.run(tp_on_ranks.log_sums, 4, tokens):
        assert found["equal"] == [True] * 5
        assert found["placed"] == [(Shard(2),)] * 5


@pytest.mark.parametrize(("size", "H_i", "kv_heads"), [(4, 4, 4), (2, 4, 4), (4, 1, 4), (4, 2, 2)])
def test_functions_of_an_index_with_heads_on_several_ranks(
    size: int, H_i: int, kv_heads: int, ranks: Pool
) -> None:
    for calls in ranks.run(tp_on_ranks.functions_of_an_index, size, H_i, kv_heads):
        for name, found in calls.items():
            if "loss" in name:  # a mean over the ranks
                assert found["error"] < 1e-6, (name, found)
            else:
                assert all(found["equal"]), (name, found)
            if H_i == kv_heads == 4 and "loss" not in name:
                assert all(place.startswith("S(") for place in found["placed"]), (name, found)


def test_batch_and_heads_on_a_mesh_of_two_dimensions(ranks: Pool) -> None:
    for found in ranks.run(tp_on_ranks.two_dimensions):
        assert found["error"] < 1e-4, found
        assert "Shard(dim=0), Shard(dim=2)" in found["placements"], found


# ---- modules


def assert_trains(found: dict[str, Any], bound: float = 1e-5) -> None:
    first, *_, last = found["losses"][0]
    assert last < first, "a step has changed nothing"
    assert found["loss"] < bound * max(1, abs(last)), found
    assert found["parameters"] < 10 * bound, found


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("size", [2, 4])
def test_attention_trains(size: int, local: bool, ranks: Pool) -> None:
    for found in ranks.run(tp_on_ranks.attention, size, local):
        assert_trains(found)


def test_attention_trains_with_fewer_key_heads_than_ranks(ranks: Pool) -> None:
    """The key heads are on every rank, and so is the attention."""
    for found in ranks.run(tp_on_ranks.attention, 4, False, 2):
        assert_trains(found)


def test_attention_trains_with_heads_that_the_ranks_do_not_divide(ranks: Pool) -> None:
    """Nine query heads on four ranks: they are whole on every rank too."""
    for found in ranks.run(tp_on_ranks.attention, 4, False, 3, "kv_head", "cpu", None, None, 9):
        assert_trains(found)


def test_attention_with_a_selection_per_query_head_trains(ranks: Pool) -> None:
    for found in ranks.run(tp_on_ranks.attention, 2, False, 4, "q_head"):
        assert_trains(found)


@pytest.mark.parametrize("local", [True, False])
def test_attention_with_frequencies_of_its_own_trains(local: bool, ranks: Pool) -> None:
    for found in ranks.run(tp_on_ranks.attention, 2, local, 4, "kv_head", "cpu", (0.7, 0.0)):
        assert_trains(found)


@pytest.mark.parametrize("scope", ["kv_head", "q_head"])
@pytest.mark.parametrize("local", [True, False])
def test_attention_over_packed_documents_trains(local: bool, scope: str, ranks: Pool) -> None:
    """Behind the last document there is padding."""
    documents = {"cu_seqlens": torch.tensor([0, 21, 21, 37], dtype=torch.int32), "max_seqlen": 21}
    for found in ranks.run(tp_on_ranks.attention, 4, local, 4, scope, "cpu", None, documents):
        assert_trains(found)


@pytest.mark.parametrize("local", [True, False])
def test_attention_with_padding_trains(local: bool, ranks: Pool) -> None:
    padding = {"key_padding_mask": torch.arange(40).repeat(2, 1) >= torch.tensor([[40], [31]])}
    for local_result in (True, False):
        call = (4, local, 4, "kv_head", "cpu", None, padding, 8, local_result)
        for found in ranks.run(tp_on_ranks.attention, *call):
            assert_trains(found)


PADDING = {"key_padding_mask": torch.arange(80).repeat(2, 1) >= torch.tensor([[80], [61]])}
DOCUMENTS = {"cu_seqlens": torch.tensor([0, 41, 41, 76], dtype=torch.int32), "max_seqlen": 41}


@pytest.mark.parametrize("keywords", [None, PADDING, DOCUMENTS], ids=["sequences", "padding", "documents"])
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("local", [True, False])
def test_attention_with_an_index_trains(
    local: bool, learns: bool, keywords: dict[str, Any] | None, ranks: Pool
) -> None:
    for size in (2, 4):
        for found in ranks.run(tp_on_ranks.attention_with_index, size, local, learns, keywords):
            assert_trains(found)
            assert found["weights here"] == 8 // size
            assert (found["moved"] > 1e-4) == learns


@pytest.mark.parametrize("learns", [False, True])
def test_an_index_of_fewer_key_heads_than_ranks_lies_on_every_rank(learns: bool, ranks: Pool) -> None:
    for found in ranks.run(tp_on_ranks.attention_with_index, 4, False, learns, None, "cpu", 2):
        assert_trains(found)
        assert found["weights here"] == 8


@pytest.mark.parametrize("by_index", [False, True])
def test_attention_compiles(by_index: bool, ranks: Pool) -> None:
    for local in (True, False):
        for found in ranks.run(tp_on_ranks.compiled, 2, local, by_index):
            assert found["out"] < 1e-5, found
            assert found["gradients"] < 1e-4, found


@pytest.mark.parametrize("local", [True, False])
def test_a_compiled_layer_has_the_same_losses(local: bool, ranks: Pool) -> None:
    assert max(ranks.run(tp_on_ranks.compiled_losses, 2, local)) < 1e-6


@pytest.mark.parametrize("packed", [False, True])
def test_an_index_learns_from_shared_tokens_and_heads(packed: bool, ranks: Pool) -> None:
    for found in ranks.run(tp_on_ranks.losses_of_tokens_and_heads, packed):
        assert found["loss"] < 1e-5, found
        assert found["gradients"] < 1e-4, found


def test_tokens_and_heads_on_a_mesh_of_two_dimensions(ranks: Pool) -> None:
    for by_index in (False, True):
        assert max(ranks.run(tp_on_ranks.tokens_and_heads, by_index)) < 1e-5
    for kind, message in ranks.refusals(tp_on_ranks.placed_beside_shared_tokens):
        assert kind == "TypeError"
        assert "tree_attention_cp: q must be what this rank holds, got a DTensor" in message


@pytest.mark.parametrize("way", ["kv_head", "q_head", "index"])
def test_caches_hold_the_heads_of_their_rank(way: str, ranks: Pool) -> None:
    for size in (2, 4):
        for found in ranks.run(tp_on_ranks.decode, size, way):
            assert max(found["errors"]) < 1e-5, found
            assert found["bytes"][0] == size * found["bytes"][1]


def test_a_cache_beside_dtensors_is_refused(ranks: Pool) -> None:
    for by_index in (False, True):
        for kind, message in ranks.refusals(tp_on_ranks.decode_on_dtensors, 2, by_index):
            assert kind == "NotImplementedError"
            assert "HTreeAttention: cache must be None where q_proj gives a DTensor" in message
            assert "by ColwiseParallel(use_local_output=True)" in message


def test_heads_that_do_not_belong_together_are_refused(ranks: Pool) -> None:
    for kind, message in ranks.refusals(tp_on_ranks.one_sided, 4):
        assert kind == "ValueError"
        assert "the projections must give 2 query heads per key head, got 2 and 4" in message
    for local, got in ((True, "2"), (False, "8 on 4 ranks")):
        for kind, message in ranks.refusals(tp_on_ranks.split_heads, 4, local):
            assert kind == "ValueError"
            assert f"k_proj must give whole heads of 4 channels, got {got}: heads that" in message


def test_an_index_that_does_not_lie_as_the_heads_is_refused(ranks: Pool) -> None:
    for kind, message in ranks.refusals(tp_on_ranks.index_of_all_heads, 4):
        assert kind == "ValueError"
        assert (
            "q and k must have the 4 and 4 heads of the index, got 1 and 1: heads that are sharded" in message
        )
    for kind, message in ranks.refusals(tp_on_ranks.projections_of_all_heads, 4):
        assert kind == "ValueError"
        assert "the 1 and 1 heads of the index, got 4 and 4: heads that are sharded over" in message
        assert message.endswith("need ColwiseParallel for the layer and for q_proj, k_proj and v_proj")
    for kind, message in ranks.refusals(tp_on_ranks.index_of_two_heads):
        assert kind == "ValueError"
        assert "the index of HTreeAttention must have K/V heads that 4 ranks divide, got 2" in message


@pytest.mark.parametrize("local", [True, False])
def test_gated_mlp_trains(local: bool, ranks: Pool) -> None:
    for size in (2, 4):
        for found in ranks.run(tp_on_ranks.gated_mlp, size, local):
            assert_trains(found)


def test_norm_trains(ranks: Pool) -> None:
    for size in (2, 4):
        for found in ranks.run(tp_on_ranks.norm, size):
            assert_trains(found)


@pytest.mark.parametrize("row", [False, True])
@pytest.mark.parametrize("static", [False, True])
def test_fp8_linear(row: bool, static: bool, ranks: Pool) -> None:
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        for found in ranks.run(tp_on_ranks.fp8, 4, row, static, dtype):
            assert found["error"] <= bound, found
            assert found["bytes"] == 128 * 32 // 4


def test_styles_refuse_what_they_cannot_share(ranks: Pool) -> None:
    for kind, _ in ranks.refusals(tp_on_ranks.refused_style, "rows"):
        assert kind == "NotImplementedError"
    for _, message in ranks.refusals(tp_on_ranks.refused_style, "fp8 columns"):
        assert "FP8Linear must have a column for each of 4 ranks, got 3" in message
    for _, message in ranks.refusals(tp_on_ranks.refused_style, "fp8 rows"):
        assert "in_features of FP8Linear must be a multiple of 16 for each rank = 64, got 80" in message


@pytest.mark.gpu
def test_modules_train_on_gpus(gpus: Pool) -> None:
    """Two GPUs, or one with a group of one, on NCCL. cuBLAS may take other kernels for other sizes."""
    size = len(gpus.processes)
    for local in (True, False):
        for call in (("attention", size, local, 4, "kv_head", "cuda"), ("gated_mlp", size, local, "cuda")):
            for found in gpus.run(getattr(tp_on_ranks, call[0]), *call[1:]):
                assert_trains(found, 1e-3)


@pytest.mark.gpu
def test_an_index_on_gpus(gpus: Pool) -> None:
    size = len(gpus.processes)
    for keywords in (None, PADDING, DOCUMENTS):
        for local, learns in ((True, True), (False, True), (True, False)):
            for found in gpus.run(tp_on_ranks.attention_with_index, size, local, learns, keywords, "cuda"):
                assert_trains(found, 1e-3)
                assert found["weights here"] == 8 // size
    for H_i, kv_heads in ((4, 4), (1, 4)):
        for calls in gpus.run(tp_on_ranks.functions_of_an_index, size, H_i, kv_heads, "cuda"):
            for name, found in calls.items():
                assert found["error"] < 1e-4, (name, found)  # lists are equal
