"""Modules with their heads and channels on several ranks, against one process."""

import re
from typing import Any

import pytest
import torch
import tp_on_ranks


def assert_trains(found: dict[str, Any], bound: float = 1e-5) -> None:
    first, *_, last = found["losses"][0]
    assert last < first, "a step has changed nothing"
    assert found["loss"] < bound * max(1, abs(last)), found
    assert found["parameters"] < 10 * bound, found


#: The documents end before the sequence does.
PADDING = {"key_padding_mask": torch.arange(80).repeat(2, 1) >= torch.tensor([[80], [61]])}
DOCUMENTS = {"cu_seqlens": torch.tensor([0, 41, 41, 76], dtype=torch.int32), "max_seqlen": 41}
#: The number of ranks, whether projections give what their rank has, and the other arguments.
ATTENTION: dict[str, tuple[int, bool, dict[str, Any]]] = {
    **{f"{size} ranks, {local}": (size, local, {}) for size in (2, 4) for local in (True, False)},
    # The key heads are on every rank, and so is the attention.
    "fewer key heads than ranks": (4, False, {"heads": (8, 2)}),
    # Nine query heads on four ranks: they are whole on every rank too.
    "heads that the ranks do not divide": (4, False, {"heads": (9, 3)}),
    "a selection per query head": (2, False, {"scope": "q_head"}),
    **{f"frequencies, {local}": (2, local, {"inv_freq": (0.7, 0.0)}) for local in (True, False)},
    **{
        f"documents, {scope}, {local}": (4, local, {"scope": scope, "keywords": DOCUMENTS})
        for scope in ("kv_head", "q_head")
        for local in (True, False)
    },
    **{
        f"padding, {local}, {result}": (4, local, {"keywords": PADDING, "local_result": result})
        for local in (True, False)
        for result in (True, False)
    },
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_trains(name, ranks):
    size, local, options = ATTENTION[name]
    for found in ranks.run(tp_on_ranks.attention, size, local, **options):
        assert_trains(found)


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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ((tp_on_ranks.one_sided, 4), "the projections must give 2 query heads per key head, got 2 and 4"),
        ((tp_on_ranks.split_heads, 4, True), "k_proj must give whole heads of 4 channels, got 2: heads that"),
        (
            (tp_on_ranks.split_heads, 4, False),
            "k_proj must give whole heads of 4 channels, got 8 on 4 ranks: heads that",
        ),
        (
            (tp_on_ranks.index_of_all_heads, 4),
            "q and k must have the 4 and 4 heads of the index, got 1 and 1: heads that are sharded",
        ),
        (
            (tp_on_ranks.projections_of_all_heads, 4),
            "the 1 and 1 heads of the index, got 4 and 4: heads that are sharded over .* "
            "need ColwiseParallel for the layer and for q_proj, k_proj and v_proj$",
        ),
        (
            (tp_on_ranks.index_of_two_heads,),
            "the index of HTreeAttention must have K/V heads that 4 ranks divide, got 2",
        ),
    ],
)
def test_heads_that_do_not_belong_together_are_refused(call, message, ranks):
    for kind, found in ranks.refusals(*call):
        assert kind == "ValueError"
        assert re.search(message, found), found


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
        for function in (tp_on_ranks.attention, tp_on_ranks.gated_mlp):
            for found in gpus.run(function, size, local, "cuda"):
                assert_trains(found, 1e-3)


@pytest.mark.gpu
def test_an_index_on_gpus(gpus):
    size = len(gpus.processes)
    for keywords in (None, PADDING, DOCUMENTS):
        for local, learns in ((True, True), (False, True), (True, False)):
            for found in gpus.run(tp_on_ranks.attention_with_index, size, local, learns, keywords, "cuda"):
                assert_trains(found, 1e-3)
                assert found["weights here"] == 8 // size
