"""Modules with their heads and channels on several ranks, against one process."""

from typing import Any

import pytest
import torch
import tp_on_ranks


def assert_trains(found: dict[str, Any], bound: float = 1e-5) -> None:
    first, *_, last = found["losses"][0]
    assert last < first, "a step has changed nothing"
    assert found["loss"] < bound * max(1, abs(last)), found
    assert found["parameters"] < 10 * bound, found


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("size", [2, 4])
def test_attention_trains(size, local, ranks):
    for found in ranks.run(tp_on_ranks.attention, size, local):
        assert_trains(found)


def test_attention_trains_with_fewer_key_heads_than_ranks(ranks):
    """The key heads are on every rank, and so is the attention."""
    for found in ranks.run(tp_on_ranks.attention, 4, False, 2):
        assert_trains(found)


def test_attention_trains_with_heads_that_the_ranks_do_not_divide(ranks):
    """Nine query heads on four ranks: they are whole on every rank too."""
    for found in ranks.run(tp_on_ranks.attention, 4, False, 3, "kv_head", "cpu", None, None, 9):
        assert_trains(found)


def test_attention_with_a_selection_per_query_head_trains(ranks):
    for found in ranks.run(tp_on_ranks.attention, 2, False, 4, "q_head"):
        assert_trains(found)


@pytest.mark.parametrize("local", [True, False])
def test_attention_with_frequencies_of_its_own_trains(local, ranks):
    for found in ranks.run(tp_on_ranks.attention, 2, local, 4, "kv_head", "cpu", (0.7, 0.0)):
        assert_trains(found)


@pytest.mark.parametrize("scope", ["kv_head", "q_head"])
@pytest.mark.parametrize("local", [True, False])
def test_attention_over_packed_documents_trains(local, scope, ranks):
    """Behind the last document there is padding."""
    documents = {"cu_seqlens": torch.tensor([0, 21, 21, 37], dtype=torch.int32), "max_seqlen": 21}
    for found in ranks.run(tp_on_ranks.attention, 4, local, 4, scope, "cpu", None, documents):
        assert_trains(found)


@pytest.mark.parametrize("local", [True, False])
def test_attention_with_padding_trains(local, ranks):
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
def test_attention_with_an_index_trains(local, learns, keywords, ranks):
    for size in (2, 4):
        for found in ranks.run(tp_on_ranks.attention_with_index, size, local, learns, keywords):
            assert_trains(found)
            assert found["weights here"] == 8 // size
            assert (found["moved"] > 1e-4) == learns


@pytest.mark.parametrize("learns", [False, True])
def test_an_index_of_fewer_key_heads_than_ranks_lies_on_every_rank(learns, ranks):
    for found in ranks.run(tp_on_ranks.attention_with_index, 4, False, learns, None, "cpu", 2):
        assert_trains(found)
        assert found["weights here"] == 8


@pytest.mark.parametrize("by_index", [False, True])
def test_attention_compiles(by_index, ranks):
    for local in (True, False):
        for found in ranks.run(tp_on_ranks.compiled, 2, local, by_index):
            assert found["out"] < 1e-5, found
            assert found["gradients"] < 1e-4, found


@pytest.mark.parametrize("local", [True, False])
def test_a_compiled_layer_has_the_same_losses(local, ranks):
    assert max(ranks.run(tp_on_ranks.compiled_losses, 2, local)) < 1e-6


@pytest.mark.parametrize("packed", [False, True])
def test_an_index_learns_from_shared_tokens_and_heads(packed, ranks):
    for found in ranks.run(tp_on_ranks.losses_of_tokens_and_heads, packed):
        assert found["loss"] < 1e-5, found
        assert found["gradients"] < 1e-4, found


def test_tokens_and_heads_on_a_mesh_of_two_dimensions(ranks):
    for by_index in (False, True):
        assert max(ranks.run(tp_on_ranks.tokens_and_heads, by_index)) < 1e-5
    for kind, message in ranks.refusals(tp_on_ranks.placed_beside_shared_tokens):
        assert kind == "TypeError"
        assert "tree_attention_cp: q must be what this rank holds, got a DTensor" in message


@pytest.mark.parametrize("way", ["kv_head", "q_head", "index"])
def test_caches_hold_the_heads_of_their_rank(way, ranks):
    for size in (2, 4):
        for found in ranks.run(tp_on_ranks.decode, size, way):
            assert max(found["errors"]) < 1e-5, found
            assert found["bytes"][0] == size * found["bytes"][1]


def test_a_cache_beside_dtensors_is_refused(ranks):
    for by_index in (False, True):
        for kind, message in ranks.refusals(tp_on_ranks.decode_on_dtensors, 2, by_index):
            assert kind == "NotImplementedError"
            assert "HTreeAttention: cache must be None where q_proj gives a DTensor" in message
            assert "by ColwiseParallel(use_local_output=True)" in message


def test_heads_that_do_not_belong_together_are_refused(ranks):
    for kind, message in ranks.refusals(tp_on_ranks.one_sided, 4):
        assert kind == "ValueError"
        assert "the projections must give 2 query heads per key head, got 2 and 4" in message
    for local, got in ((True, "2"), (False, "8 on 4 ranks")):
        for kind, message in ranks.refusals(tp_on_ranks.split_heads, 4, local):
            assert kind == "ValueError"
            assert f"k_proj must give whole heads of 4 channels, got {got}: heads that" in message


def test_an_index_that_does_not_lie_as_the_heads_is_refused(ranks):
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
def test_gated_mlp_trains(local, ranks):
    for size in (2, 4):
        for found in ranks.run(tp_on_ranks.gated_mlp, size, local):
            assert_trains(found)


def test_norm_trains(ranks):
    for size in (2, 4):
        for found in ranks.run(tp_on_ranks.norm, size):
            assert_trains(found)


@pytest.mark.parametrize("row", [False, True])
@pytest.mark.parametrize("static", [False, True])
def test_fp8_linear(row, static, ranks):
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        for found in ranks.run(tp_on_ranks.fp8, 4, row, static, dtype):
            assert found["error"] <= bound, found
            assert found["bytes"] == 128 * 32 // 4


def test_styles_refuse_what_they_cannot_share(ranks):
    for kind, _ in ranks.refusals(tp_on_ranks.refused_style, "rows"):
        assert kind == "NotImplementedError"
    for _, message in ranks.refusals(tp_on_ranks.refused_style, "fp8 columns"):
        assert "FP8Linear must have a column for each of 4 ranks, got 3" in message
    for _, message in ranks.refusals(tp_on_ranks.refused_style, "fp8 rows"):
        assert "in_features of FP8Linear must be a multiple of 16 for each rank = 64, got 80" in message


@pytest.mark.gpu
def test_modules_train_on_gpus(gpus):
    """Two GPUs, or one with a group of one, on NCCL. cuBLAS may take other kernels for other sizes."""
    size = len(gpus.processes)
    for local in (True, False):
        for call in (("attention", size, local, 4, "kv_head", "cuda"), ("gated_mlp", size, local, "cuda")):
            for found in gpus.run(getattr(tp_on_ranks, call[0]), *call[1:]):
                assert_trains(found, 1e-3)


@pytest.mark.gpu
def test_an_index_on_gpus(gpus):
    size = len(gpus.processes)
    for keywords in (None, PADDING, DOCUMENTS):
        for local, learns in ((True, True), (False, True), (True, False)):
            for found in gpus.run(tp_on_ranks.attention_with_index, size, local, learns, keywords, "cuda"):
                assert_trains(found, 1e-3)
                assert found["weights here"] == 8 // size
