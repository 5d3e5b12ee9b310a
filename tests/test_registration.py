"""Schema, kernels per dispatch key and tags of every op (docs/semantics §0.3-0.5, §1.8)."""

import os

import pytest
import torch

from htree_ops._load import build_info
from htree_ops.info import op_names

OPS = op_names()

#: The options of tree attention, each by its name, and packed.
DOCUMENTED = (
    "int compression_rate=16, int max_top_nodes=8192, int top_k_per_layer=512, float? scale=None, "
    'float? rope_base=10000., str importance="lse_causal", int selection_stride=1'
)
NEW_OPTIONS = "int? selection_span=None, float[]? inv_freq=None, bool open_next=False"
PACKED = "int[] option_ints, float[] option_floats"
DOCUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? index_query, Tensor? index_key, Tensor cu_seq_q, "
    "Tensor cu_seq_k, SymInt max_q, SymInt max_k"
)
SPARSE = "int block_size=16, int selection_stride=1, float? scale=None"
SPARSE_RESULTS = "Tensor out, Tensor lse, Tensor? sinks, Tensor? dout, Tensor? dlse"
SPARSE_GRADIENTS = (
    "bool[4] output_mask=[True, True, True, True]) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)"
)
#: Of ops that docs/semantics gives none in full, as torch prints them, without the namespace.
SCHEMAS = {
    "_gated_mlp_saved_backward": (
        "(Tensor dy, Tensor gate, Tensor up, Tensor x, Tensor gate_weight, Tensor up_weight, "
        'str activation="silu", str act_on="up", bool[3] output_mask=[True, True, True]) '
        "-> (Tensor dx, Tensor dgate_weight, Tensor dup_weight)"
    ),
    "hadamard_transform_": "(Tensor(a!) x, float? scale=None) -> ()",
    **dict.fromkeys(
        ("attention", "tree_attention"),
        f"(Tensor q, Tensor k, Tensor v, {DOCUMENTED}, bool store_parents=True, {NEW_OPTIONS}) -> Tensor",
    ),
    "attention_backward": (
        "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor gmax, Tensor gsum, Tensor[] parents, "
        f"{DOCUMENTED}, bool[3] output_mask=[True, True, True], {NEW_OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv)"
    ),
    "_check_tree_options": f"(str function, {PACKED}) -> ()",
    "_attention": f"(Tensor q, Tensor k, Tensor v, bool store_parents, {PACKED}) -> Tensor",
    "_index_lists": (
        f"(Tensor q, Tensor k, Tensor index_query, Tensor index_key, SymInt[] starts, {PACKED}) -> Tensor"
    ),
    "_listed_attention_rows": (
        f"(Tensor q, Tensor k, Tensor v, Tensor lists, SymInt[] starts, {PACKED}) "
        "-> (Tensor out, Tensor gmax, Tensor gsum)"
    ),
    "_listed_attention": (
        f"(Tensor q, Tensor k, Tensor v, Tensor lists, {PACKED}) -> (Tensor out, Tensor lse)"
    ),
    "_attention_rows_backward_sums": (
        "(Tensor q, Tensor k, Tensor v, Tensor out, Tensor gmax, Tensor gsum, Tensor lists, Tensor? dout, "
        f"Tensor? dlse, SymInt[] starts, bool[3] output_mask, {PACKED}) -> (Tensor dq, Tensor dk, Tensor dv)"
    ),
    "io_accumulate_non_topk": (
        "(Tensor layer_v, Tensor parents, Tensor scores, Tensor num_candidates, int layer, "
        "int compression_rate=16, SymInt t0=0) -> (Tensor lmax, Tensor lsum, Tensor lout)"
    ),
    "_attention_varlen_forward": (
        f"({DOCUMENTS}, str grouping, {PACKED}) -> (Tensor out, Tensor gmax, Tensor gsum)"
    ),
    "_attention_varlen_backward": (
        f"({DOCUMENTS}, Tensor out, Tensor gmax, Tensor gsum, Tensor? dout, Tensor? dlse, str grouping, "
        f"bool[3] output_mask, {PACKED}) -> (Tensor dq, Tensor dk, Tensor dv)"
    ),
    "sparse_attention": (
        f"(Tensor query, Tensor key, Tensor value, Tensor blocks, Tensor? sinks=None, *, {SPARSE}) "
        "-> (Tensor out, Tensor lse)"
    ),
    "_sparse_attention_backward": (
        f"(Tensor query, Tensor key, Tensor value, Tensor blocks, {SPARSE_RESULTS}, {SPARSE}, {SPARSE_GRADIENTS}"
    ),
    "sparse_attention_varlen": (
        "(Tensor query, Tensor key, Tensor value, Tensor blocks, Tensor cu_seq_q, Tensor cu_seq_k, Tensor? sinks, "
        f"SymInt max_q, SymInt max_k, *, {SPARSE}) -> (Tensor out, Tensor lse)"
    ),
    "_sparse_attention_varlen_backward": (
        "(Tensor query, Tensor key, Tensor value, Tensor blocks, Tensor cu_seq_q, Tensor cu_seq_k, "
        f"{SPARSE_RESULTS}, SymInt max_q, SymInt max_k, {SPARSE}, {SPARSE_GRADIENTS}"
    ),
    "_index_loss_forward": (
        "(Tensor query, Tensor key, Tensor index_query, Tensor index_key, Tensor positions, Tensor? cu_seqlens=None, "
        "*, float? scale=None, int block_size=16) -> (Tensor loss, Tensor lse, Tensor index_lse)"
    ),
}
#: Ops without a tensor that could tell the device.
WITHOUT_DEVICE = {"rope_cache", "top_parents", "_check_tree_options"}
#: Ops that call one with packed options, where autograd and autocast see them.
BY_NAME = {"attention", "tree_attention", "attention_forward", "attention_backward"}
AUTOCAST = {
    "_attention",
    "_attention_forward",
    "_attention_lse",
    "_attention_rows",
    "_attention_varlen",
    "_attention_varlen_forward",
    "_listed_attention",
    "gated_mlp",
    "_gated_mlp_forward",
    "index_loss",
    "sparse_attention",
    "sparse_attention_varlen",
}
DEVICE_KEYS = ("CPU", "Meta", *(("CUDA",) if build_info().get("cuda") else ()))


def full_name(name: str) -> str:
    return f"htree::{name}"


def kernel_keys(name: str) -> set[str]:
    """Keys and alias keys that the library registers a kernel at."""
    lines = torch._C._dispatch_dump(full_name(name)).splitlines()
    keys = [line.partition(": registered at ")[0] for line in lines if ": registered at " in line]
    return {key.removesuffix("[alias]") for key in keys} - {"debug"}


def overload(name: str) -> torch._ops.OpOverload:
    packet, _, variant = name.partition(".")
    return getattr(getattr(torch.ops.htree, packet), variant or "default")


def test_a_cuda_build_was_found_where_one_is_expected():
    """Continuous integration compiles the CUDA kernels without a GPU and says so; then they must be there."""
    if os.environ.get("HTREE_EXPECT_CUDA_BUILD") == "1":
        assert build_info()["cuda"]
        assert "CUDA" in kernel_keys("tree_build")


@pytest.mark.parametrize("name", SCHEMAS)
def test_schema(name):
    wanted = torch._C.parse_schema(full_name(name) + SCHEMAS[name])
    assert overload(name)._schema == wanted, f"{overload(name)._schema} is not {wanted}"


@pytest.mark.parametrize("name", OPS)
def test_kernels(name):
    if name in WITHOUT_DEVICE:
        wanted = {"CompositeExplicitAutograd"}
    elif name in BY_NAME:
        wanted = {"CompositeImplicitAutograd"}
    else:
        wanted = {*DEVICE_KEYS, "Autograd"}
    wanted |= {"FuncTorchBatched"}  # refuses vmap
    if overload(name)._schema.is_mutable:
        wanted |= {"ADInplaceOrView", "Negative", "Conjugate"}
    if name in AUTOCAST:
        wanted |= {"AutocastCPU", "AutocastCUDA"}
    assert kernel_keys(name) == wanted


#: They write into arguments.
MUTATING = (
    "causal_softmax.out",
    "causal_softmax_",
    "hadamard_transform_",
    "mask_topk_scores_",
    "merge_to_global_",
    "_tree_cache_append_",
    "tree_cache_copy_",
    "_tree_cache_pack_prompt_",
    "_tree_cache_step_",
    "_tree_cache_truncate_",
)


def test_mutating_ops_return_nothing_but_fresh_tensors():
    mutating = {name for name in OPS if overload(name)._schema.is_mutable}
    assert mutating == set(MUTATING)
    returns = {name: overload(name)._schema.returns for name in mutating if overload(name)._schema.returns}
    assert set(returns) == {"_tree_cache_step_"}
    assert all(x.alias_info is None for x in returns["_tree_cache_step_"])


@pytest.mark.parametrize("name", OPS)
def test_tags(name):
    tags = overload(name).tags
    assert torch.Tag.pt2_compliant_tag in tags
    assert torch.Tag.needs_exact_strides in tags


@pytest.mark.parametrize("name", OPS)
def test_no_output_aliases_an_input(name):
    assert all(result.alias_info is None for result in overload(name)._schema.returns)
