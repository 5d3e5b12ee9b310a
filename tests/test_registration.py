"""Schema, kernels per dispatch key and tags of every op (docs/semantics §0.3-0.5, §1.8)."""

import os

import pytest
import torch

import htree_ops  # noqa: F401  (registers torch.ops.htree)
from htree_ops._load import build_info

#: The options of tree attention, each by its name, and packed.
DOCUMENTED = (
    "int compression_rate=16, int max_top_nodes=8192, int top_k_per_layer=512, float? scale=None, "
    'float? rope_base=10000., str importance="lse_causal", int selection_stride=1'
)
NEW_OPTIONS = "int? selection_span=None, float[]? inv_freq=None, bool open_next=False"
PACKED = "int[] option_ints, float[] option_floats"
BLOCKS = (
    "int count, int block_size=16, int selection_stride=1, int local=1, int first=0, bool open_next=False) "
    "-> (Tensor blocks, Tensor scores)"
)
DOCUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? index_query, Tensor? index_key, Tensor cu_seq_q, "
    "Tensor cu_seq_k, SymInt max_q, SymInt max_k"
)
SPARSE = "int block_size=16, int selection_stride=1, float? scale=None"
SPARSE_RESULTS = "Tensor out, Tensor lse, Tensor? sinks, Tensor? dout, Tensor? dlse"
SPARSE_GRADIENTS = (
    "bool[4] output_mask=[True, True, True, True]) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)"
)
INDEX = "(Tensor query, Tensor key, Tensor index_query, Tensor index_key, Tensor positions"
INDEX_OPTIONS = "Tensor? cu_seqlens=None, *, float? scale=None, int block_size=16"
# Schema text as torch prints it, without the namespace.
SCHEMAS = {
    "causal_softmax": "(Tensor x, int block_size=0) -> Tensor",
    "causal_softmax.out": "(Tensor x, int block_size=0, *, Tensor(a!) out) -> ()",
    "causal_softmax_": "(Tensor(a!) x, int block_size=0) -> ()",
    "causal_softmax_backward": "(Tensor dy, Tensor y) -> Tensor",
    "rmsnorm_rope": (
        "(Tensor x, Tensor weight, Tensor cos, Tensor sin, float eps=1e-06, int? num_heads=None, "
        "int[]? config=None) -> Tensor"
    ),
    "rmsnorm_rope_backward": (
        "(Tensor dy, Tensor x, Tensor weight, Tensor cos, Tensor sin, float eps=1e-06, int? num_heads=None, "
        "bool[2] output_mask=[True, True]) -> (Tensor dx, Tensor dweight)"
    ),
    "head_rmsnorm_rope": "(Tensor x, Tensor weight, Tensor cos, Tensor sin, float eps=1e-06) -> Tensor",
    "head_rmsnorm_rope_backward": (
        "(Tensor dy, Tensor x, Tensor weight, Tensor cos, Tensor sin, float eps=1e-06, "
        "bool[2] output_mask=[True, True]) -> (Tensor dx, Tensor dweight)"
    ),
    "fp8_gemm": (
        "(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, ScalarType output_dtype=half, "
        "int[]? config=None) -> Tensor"
    ),
    "fp8_gemm_exact": (
        "(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, ScalarType output_dtype=half) -> Tensor"
    ),
    "gated_mlp": (
        '(Tensor x, Tensor gate_weight, Tensor up_weight, str activation="silu", str act_on="up", '
        "int[]? config=None) -> Tensor"
    ),
    "_gated_mlp_forward": (
        '(Tensor x, Tensor gate_weight, Tensor up_weight, str activation="silu", str act_on="up") '
        "-> (Tensor out, Tensor gate, Tensor up)"
    ),
    "gated_mlp_backward": (
        '(Tensor dy, Tensor x, Tensor gate_weight, Tensor up_weight, str activation="silu", '
        'str act_on="up", bool[3] output_mask=[True, True, True]) '
        "-> (Tensor dx, Tensor dgate_weight, Tensor dup_weight)"
    ),
    "_gated_mlp_saved_backward": (
        "(Tensor dy, Tensor gate, Tensor up, Tensor x, Tensor gate_weight, Tensor up_weight, "
        'str activation="silu", str act_on="up", bool[3] output_mask=[True, True, True]) '
        "-> (Tensor dx, Tensor dgate_weight, Tensor dup_weight)"
    ),
    "hadamard_transform": "(Tensor x, float? scale=None) -> Tensor",
    "hadamard_transform_": "(Tensor(a!) x, float? scale=None) -> ()",
    "grouped_hadamard": "(Tensor x, int group, float? scale=None) -> Tensor",
    "kv_prune": "(Tensor x, int keep, Tensor? weight=None) -> (Tensor pruned, Tensor bitmap)",
    "kv_compress": (
        "(Tensor x, int keep, int bits=8, Tensor? weight=None) -> (Tensor bitmap, Tensor values, Tensor scales)"
    ),
    "kv_decompress": (
        "(Tensor bitmap, Tensor values, Tensor scales, SymInt D, int keep, int bits, ScalarType dtype=half) -> Tensor"
    ),
    "kv_decode_attention": (
        "(Tensor q, Tensor k_bitmap, Tensor k_values, Tensor k_scales, Tensor v_bitmap, Tensor v_values, "
        "Tensor v_scales, Tensor k_win, Tensor v_win, Tensor? comp_len=None, Tensor? win_len=None, "
        "float? scale=None, Tensor? block_table=None, *, int k_keep, int v_keep, int k_bits=8, int v_bits=8, "
        "int hadamard_group=0, int split_size=0) -> (Tensor out, Tensor lse)"
    ),
    "fp8_compute_scale": '(Tensor x, str granularity="tensor", int dim=-1, int block=128) -> Tensor',
    "fp8_quantize": (
        '(Tensor x, Tensor? scale=None, str granularity="tensor", int dim=-1, int block=128) '
        "-> (Tensor q, Tensor scale, Tensor n_overflow)"
    ),
    "fp8_dequantize": "(Tensor q, Tensor scale, ScalarType dtype=half, int block=128) -> Tensor",
    "fp8_fake_quant": (
        '(Tensor x, Tensor? scale=None, str granularity="tensor", int dim=-1, int block=128) -> Tensor'
    ),
    "_fp8_fake_quant_backward": (
        '(Tensor dy, Tensor x, Tensor scale, str granularity="tensor", int dim=-1, int block=128) -> Tensor'
    ),
    "tree_build": "(Tensor k, Tensor v, int compression_rate=16) -> (Tensor pk, Tensor pv)",
    "tree_build_backward": (
        "(Tensor dpk, Tensor dpv, SymInt n_child, int compression_rate=16) -> (Tensor, Tensor)"
    ),
    "rope_cache": (
        "(SymInt size, int dim, float base=10000., *, ScalarType dtype=float, Device? device=None, "
        "float[]? inv_freq=None) -> Tensor"
    ),
    "rope": "(Tensor x, Tensor cos, Tensor sin, Tensor positions, bool inverse=False) -> Tensor",
    "top_parents": (
        "(SymInt B, SymInt T, SymInt heads, int top_k, int num_layers, int compression_rate=16, SymInt t0=0, "
        "int selection_stride=1, *, Device? device=None) -> Tensor"
    ),
    "span_means": "(Tensor k, int span) -> Tensor",
    "compute_scores": (
        "(Tensor q, Tensor layer_k, Tensor parents, Tensor cos, Tensor sin, int layer, "
        "int compression_rate=16, float? scale=None, SymInt t0=0) -> (Tensor scores, Tensor num_candidates)"
    ),
    "select_topk": (
        '(Tensor scores, Tensor num_candidates, int top_k, str importance="lse_causal", '
        "bool open_next=False) -> Tensor topk_positions"
    ),
    "mask_topk_scores_": "(Tensor(a!) scores, Tensor topk_positions) -> ()",
    "compute_next_parents": "(Tensor parents, Tensor topk_positions, int compression_rate=16) -> Tensor",
    "accumulate_non_topk": (
        "(Tensor layer_v, Tensor parents, Tensor scores, Tensor num_candidates, int layer, "
        "int compression_rate=16, SymInt t0=0) -> (Tensor lmax, Tensor lsum, Tensor lout)"
    ),
    "compute_and_select": (
        "(Tensor q, Tensor layer_k, Tensor layer_v, Tensor parents, Tensor cos, Tensor sin, int layer, "
        "int compression_rate=16, int top_k=512, float? scale=None, SymInt t0=0) "
        "-> (Tensor lmax, Tensor lsum, Tensor lout, Tensor topk_indices, Tensor topk_scores)"
    ),
    "subtract_topk": (
        "(Tensor layer_v, Tensor topk_indices, Tensor topk_scores, Tensor lmax, Tensor lsum, Tensor lout) "
        "-> (Tensor lmax, Tensor lsum, Tensor lout, Tensor selected_indices)"
    ),
    "select_accumulate": (
        "(Tensor q, Tensor layer_k, Tensor layer_v, Tensor parents, Tensor cos, Tensor sin, int layer, "
        'int compression_rate=16, int top_k=512, float? scale=None, str importance="lse_causal", '
        "SymInt t0=0, int selection_stride=1, Tensor? span_k=None, int? selection_span=None, "
        "bool open_next=False) "
        "-> (Tensor lmax, Tensor lsum, Tensor lout, Tensor next_parents)"
    ),
    "bottom_accumulate": (
        "(Tensor q, Tensor layer_k, Tensor layer_v, Tensor parents, Tensor cos, Tensor sin, "
        "int compression_rate=16, float? scale=None, SymInt t0=0, int selection_stride=1) "
        "-> (Tensor lmax, Tensor lsum, Tensor lout)"
    ),
    "recompute_selection": (
        "(Tensor q, Tensor layer_k, Tensor parents, Tensor cos, Tensor sin, int layer, "
        'int compression_rate=16, int top_k=512, float? scale=None, str importance="lse_causal", '
        "SymInt t0=0, int selection_stride=1, Tensor? span_k=None, int? selection_span=None, "
        "bool open_next=False) "
        "-> Tensor next_parents"
    ),
    "merge_to_global_": (
        "(Tensor(a!) gmax, Tensor(b!) gsum, Tensor(c!) gout, Tensor lmax, Tensor lsum, Tensor lout) -> ()"
    ),
    "final_normalize": "(Tensor gout, Tensor gsum, ScalarType? dtype=None) -> Tensor",
    "attention_forward": (
        f"(Tensor q, Tensor k, Tensor v, {DOCUMENTED}, bool store_parents=True, {NEW_OPTIONS}) "
        "-> (Tensor out, Tensor gmax, Tensor gsum, Tensor[] parents)"
    ),
    **dict.fromkeys(
        ("attention", "tree_attention"),
        f"(Tensor q, Tensor k, Tensor v, {DOCUMENTED}, bool store_parents=True, {NEW_OPTIONS}) -> Tensor",
    ),
    "attention_backward": (
        "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor gmax, Tensor gsum, Tensor[] parents, "
        f"{DOCUMENTED}, bool[3] output_mask=[True, True, True], {NEW_OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv)"
    ),
    "_check_tree_options": f"(str function, {PACKED}) -> ()",
    "_attention_forward": (
        f"(Tensor q, Tensor k, Tensor v, bool store_parents, {PACKED}) "
        "-> (Tensor out, Tensor gmax, Tensor gsum, Tensor[] parents)"
    ),
    "_attention": f"(Tensor q, Tensor k, Tensor v, bool store_parents, {PACKED}) -> Tensor",
    "_attention_lse": (
        f"(Tensor q, Tensor k, Tensor v, bool store_parents, {PACKED}) -> (Tensor out, Tensor lse)"
    ),
    "_attention_rows": (
        f"(Tensor q, Tensor k, Tensor v, SymInt[] starts, bool store_parents, {PACKED}) "
        "-> (Tensor out, Tensor gmax, Tensor gsum, Tensor lists)"
    ),
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
    "_attention_backward": (
        "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor gmax, Tensor gsum, Tensor[] parents, "
        f"bool[3] output_mask, {PACKED}) -> (Tensor dq, Tensor dk, Tensor dv)"
    ),
    **dict.fromkeys(
        ("_attention_rows_backward", "_attention_rows_backward_sums"),
        "(Tensor q, Tensor k, Tensor v, Tensor out, Tensor gmax, Tensor gsum, Tensor lists, Tensor? dout, "
        f"Tensor? dlse, SymInt[] starts, bool[3] output_mask, {PACKED}) -> (Tensor dq, Tensor dk, Tensor dv)",
    ),
    "io_compute_scores": (
        "(Tensor q, Tensor layer_k, Tensor parents, Tensor cos, Tensor sin, int layer, "
        "int compression_rate=16, float? scale=None, SymInt t0=0) -> (Tensor scores, Tensor num_candidates)"
    ),
    "io_select_topk": (
        "(Tensor scores, Tensor num_candidates, int top_k, int layer=1, "
        'str select="lcg", SymInt t0=0, int fold_mask=0) -> Tensor'
    ),
    "io_accumulate_non_topk": (
        "(Tensor layer_v, Tensor parents, Tensor scores, Tensor num_candidates, int layer, "
        "int compression_rate=16, SymInt t0=0) -> (Tensor lmax, Tensor lsum, Tensor lout)"
    ),
    "io_compute_next_parents": (
        "(Tensor parents, Tensor topk_positions, int compression_rate=16, bool map_positions=False) -> Tensor"
    ),
    "io_attention_forward": (
        "(Tensor q, Tensor k, Tensor v, int compression_rate=16, int max_top_nodes=8192, "
        'int top_k_per_layer=512, float? scale=None, str select="lcg", bool map_positions=False) -> Tensor'
    ),
    "_attention_varlen": f"({DOCUMENTS}, str grouping, {PACKED}) -> (Tensor out, Tensor lse)",
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
    "_tree_cache_append_": (
        "(Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor(c!)[] leaves, Tensor k, Tensor v, Tensor block_table, "
        f"Tensor lengths, Tensor cu_new, Tensor? new_lengths, SymInt? max_new, int page_size, {PACKED}) -> ()"
    ),
    "_tree_cache_attention": (
        "(Tensor q, Tensor k_pool, Tensor v_pool, Tensor block_table, Tensor lengths, Tensor cu_q, "
        "Tensor? lists, Tensor? list_pos, Tensor? q_lengths, Tensor? rope_table, Tensor? k_codes, "
        "Tensor? k_scales, Tensor? v_codes, Tensor? v_scales, Tensor? index_query, Tensor? index_pool, "
        "Tensor? index_scales, "
        f"int page_size, {PACKED}) -> (Tensor out, Tensor lse, Tensor lists, Tensor list_pos)"
    ),
    "_tree_cache_step_": (
        "(Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor(c!)[] leaves, Tensor(d!)[] index_pool, "
        "Tensor(e!)[] state, Tensor block_table, Tensor? q, Tensor? k, Tensor? v, Tensor? index_query, "
        "Tensor? index_key, Tensor counts, bool ragged, Tensor cu_rows, Tensor? rope_table, "
        f"int capacity, int page_size, {PACKED}) -> (Tensor out, Tensor lse)"
    ),
    "_tree_cache_truncate_": (
        "(Tensor(a!)[] leaves, Tensor(b!)[] state, Tensor block_table, Tensor counts, Tensor own_from, "
        f"int page_size, {PACKED}) -> ()"
    ),
    "tree_cache_copy_": "(Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor pages) -> ()",
    "_tree_cache_prompt_bytes": (
        f"(Tensor k_pool, Tensor v_pool, int num_sequences, int num_heads, int capacity, {PACKED}) -> int"
    ),
    "_tree_cache_pack_prompt_": (
        "(Tensor(a!) copies, Tensor k_pool, Tensor v_pool, Tensor block_table, int num_heads, int begin, int end, "
        f"int capacity, int page_size, {PACKED}) -> ()"
    ),
    "_tree_cache_prompt": (
        "(Tensor q, Tensor k_pool, Tensor v_pool, Tensor block_table, int length, Tensor? copies, "
        f"int capacity, bool store_lists, int page_size, {PACKED}) "
        "-> (Tensor out, Tensor gmax, Tensor gsum, Tensor lists)"
    ),
    "select_blocks": f"(Tensor index_query, Tensor index_key, {BLOCKS}",
    "select_blocks_varlen": (
        "(Tensor index_query, Tensor index_key, Tensor cu_seq_q, Tensor cu_seq_k, SymInt max_q, SymInt max_k, "
        f"{BLOCKS}"
    ),
    "index_loss": f"{INDEX}, {INDEX_OPTIONS}) -> Tensor",
    "_index_loss_forward": f"{INDEX}, {INDEX_OPTIONS}) -> (Tensor loss, Tensor lse, Tensor index_lse)",
    "_index_loss_backward": (
        f"{INDEX}, Tensor lse, Tensor index_lse, Tensor dloss, {INDEX_OPTIONS.replace('*, ', '')}, "
        "bool[2] output_mask=[True, True]) -> (Tensor d_index_query, Tensor d_index_key)"
    ),
    "_refuse_backward": "(Tensor gradient, str message, SymInt[] size) -> Tensor",
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


def test_the_table_names_every_op():
    registered = {s.split("::")[1] for s in torch._C._dispatch_get_all_op_names() if s.startswith("htree::")}
    assert registered == set(SCHEMAS)


@pytest.mark.parametrize("name", SCHEMAS)
def test_schema(name):
    wanted = torch._C.parse_schema(full_name(name) + SCHEMAS[name])
    assert overload(name)._schema == wanted, f"{overload(name)._schema} is not {wanted}"


@pytest.mark.parametrize("name", SCHEMAS)
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
    mutating = {name for name in SCHEMAS if overload(name)._schema.is_mutable}
    assert mutating == set(MUTATING)
    returns = {name: overload(name)._schema.returns for name in mutating if overload(name)._schema.returns}
    assert set(returns) == {"_tree_cache_step_"}
    assert all(x.alias_info is None for x in returns["_tree_cache_step_"])


@pytest.mark.parametrize("name", SCHEMAS)
def test_tags(name):
    tags = overload(name).tags
    assert torch.Tag.pt2_compliant_tag in tags
    assert torch.Tag.needs_exact_strides in tags


@pytest.mark.parametrize("name", SCHEMAS)
def test_no_output_aliases_an_input(name):
    assert all(result.alias_info is None for result in overload(name)._schema.returns)
