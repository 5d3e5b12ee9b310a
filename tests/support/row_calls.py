"""A small call of every op but those of tree attention over whole sequences (tree_attention_calls.py has those)."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from htree_ops.ops.tree_attention.options import TreeOptions
from tests.support.cases import normal
from tests.support.compressed_kv_cases import DecodeCase
from tests.support.documents import offsets
from tests.support.index_loss_cases import CASES as INDEX_CASES
from tests.support.select_blocks_cases import CASES as SELECT_CASES
from tests.support.select_blocks_cases import VARLEN_CASES as SELECT_VARLEN_CASES
from tests.support.sparse_attention_cases import CASES as SPARSE_CASES
from tests.support.sparse_attention_cases import VARLEN_CASES as SPARSE_VARLEN_CASES
from tests.support.sparse_attention_cases import SparseBackwardCase
from tests.support.tree_attention_calls import Call
from tests.support.tree_attention_varlen_cases import CASES as VARLEN_CASES
from tests.support.tree_attention_varlen_cases import VarlenBackwardCase, without_index
from tests.support.tree_cache_cases import op_calls, op_options, packed_append_call


def row_calls(device: str) -> list[Call]:
    """Calls of every op that is not one of tree attention over whole sequences, most of them in float32."""
    x = normal((2, 5, 9), torch.float32, device, 0)
    y = torch.ops.htree.causal_softmax(x)
    wide, weight = normal((2, 3, 16), torch.float32, device, 1), normal((16,), torch.float32, device, 2)
    table = normal((3, 8), torch.float32, device, 3)
    heads = normal((2, 3, 4, 8), torch.float32, device, 4)
    packed = packed_append_call(device)
    return [
        Call("causal_softmax", (x, 0)),
        Call("causal_softmax_", (x.clone(), 0)),
        Call("causal_softmax_backward", (x, y)),
        Call("rmsnorm_rope", (wide, weight, table, table)),
        Call("rmsnorm_rope_backward", (wide, wide, weight, table, table)),
        Call("head_rmsnorm_rope", (heads, weight[:8], table, table)),
        Call("head_rmsnorm_rope_backward", (heads, heads, weight[:8], table, table)),
        Call("hadamard_transform", (wide,)),
        Call("hadamard_transform_", (wide.clone(),)),
        Call("grouped_hadamard", (heads.transpose(1, 2).contiguous(), 2)),
        *compressed_calls(device),
        *fp8_calls(wide.float()),
        *matrix_calls(device),
        *varlen_calls(device),
        *select_calls(device),
        *index_loss_calls(device),
        *listed_calls(device),
        *sparse_calls(device),
        *(Call(op, arguments, op_options(options)) for op, (arguments, options) in op_calls(device).items()),
        Call("_tree_cache_append_", packed[0], op_options(packed[1])),
    ]


def compressed_calls(device: str) -> list[Call]:
    """Compression, and decoding with and without pages and transformed keys."""
    x, weight = (
        normal((1, 2, 3, 64), torch.float16, device, 5),
        normal((1, 2, 64), torch.float32, device, 6).abs(),
    )
    rows = torch.ops.htree.kv_compress(x, 7, 4, weight)
    decoding: tuple[DecodeCase, ...] = (
        DecodeCase(name="fuzz", dtype=torch.float16, D=64, k_keep=9, v_keep=30, S=5, W=3, comp_len=(5, 2)),
    )
    decoding += (
        replace(decoding[0], page=2, win_len=(3, 0), k_bits=4),
        replace(decoding[0], hadamard_group=2, v_bits=16, split_size=3),
    )
    return [
        Call("kv_prune", (x, 7, weight)),
        Call("kv_compress", (x, 7, 4, weight)),
        Call("kv_decompress", (*rows, 64, 7, 4, torch.float16)),
        *(Call("kv_decode_attention", case.make_inputs(device), case.options()) for case in decoding),
    ]


def fp8_calls(x: Tensor) -> list[Call]:
    q, scale, _ = torch.ops.htree.fp8_quantize(x, None, "channel")
    return [
        Call("fp8_compute_scale", (x, "block", -1, 3)),
        Call("fp8_quantize", (x, scale, "channel", -1, 128)),
        Call("fp8_quantize", (x, None, "block", 1, 2)),
        Call("fp8_dequantize", (q, scale, torch.float32, 4)),
        Call("fp8_fake_quant", (x, scale, "channel", 2, 128)),
        Call("_fp8_fake_quant_backward", (x, x, scale, "channel", -1, 128)),
    ]


def matrix_calls(device: str) -> list[Call]:
    x, dy = normal((2, 3, 8), torch.float32, device, 5), normal((2, 3, 6), torch.float32, device, 6)
    gate, up = normal((6, 8), torch.float32, device, 7), normal((6, 8), torch.float32, device, 8)
    a, b = (normal((4, 16), torch.float32, device, seed).to(torch.float8_e4m3fn) for seed in (9, 10))
    rows, columns = torch.full((4, 1), 0.5, device=device), torch.full((1, 4), 2.0, device=device)
    return [
        Call("gated_mlp", (x, gate, up, "silu", "up")),
        Call("_gated_mlp_forward", (x, gate, up, "gelu", "gate")),
        Call("gated_mlp_backward", (dy, x, gate, up, "silu", "gate")),
        Call("_gated_mlp_saved_backward", (dy, dy, dy, x, gate, up, "gelu", "up")),
        Call("fp8_gemm", (a, b.t(), rows, columns, torch.float32)),
        Call("fp8_gemm_exact", (a, b.t(), rows, columns, torch.bfloat16)),
    ]


def select_calls(device: str) -> list[Call]:
    """Lists of queries that share them, and of packed documents."""
    case = next(case for case in SELECT_CASES if case.name == "suffix_stride")
    documents = next(case for case in SELECT_VARLEN_CASES if case.name == "suffix")
    return [
        Call("select_blocks", case.make_inputs(device)),
        Call("select_blocks_varlen", documents.make_inputs(device)),
    ]


def listed_calls(device: str) -> list[Call]:
    """The lists that an index chooses for tree attention, and the attention over them."""
    q, k, v = (normal((1, 60, heads, 8), torch.float32, device, 13 + i) for i, heads in enumerate((4, 2, 2)))
    index = [normal((1, 60, 2, 16), torch.float32, device, seed) for seed in (16, 17)]
    packed = TreeOptions(compression_rate=4, top_k=2, max_top_nodes=8).packed()
    lists = torch.ops.htree._index_lists(q, k, *index, [0], *packed)
    return [
        Call("_index_lists", (q, k, *index, [0], *packed)),
        Call("_listed_attention", (q, k, v, lists, *packed), differentiable=(0, 1, 2)),
        Call("_listed_attention_rows", (q, k, v, lists, [0], *packed)),
        *_indexed_documents(q, k, v, index, packed),
    ]


def _indexed_documents(q: Tensor, k: Tensor, v: Tensor, index: list[Tensor], packed: Any) -> list[Call]:
    """The same tensors as two packed documents."""
    ends = offsets((37, 23), q.device)
    given = (*(x[0] for x in (q, k, v, *index)), ends, ends, 37, 37)
    state = torch.ops.htree._attention_varlen_forward(*given, "auto", *packed)
    gradient = (state[0], None, "auto", [True] * 3)
    return [
        Call("_attention_varlen", (*given, "auto", *packed), differentiable=(0, 1, 2)),
        Call("_attention_varlen_forward", (*given, "auto", *packed)),
        Call("_attention_varlen_backward", (*given, *state, *gradient, *packed)),
    ]


def index_loss_calls(device: str) -> list[Call]:
    """The loss of an index at positions of its own for each sequence and of packed documents, and its gradients."""
    found = []
    for name in ("plain", "ragged"):
        case = next(case for case in INDEX_CASES if case.name == name)
        *inputs, cu = case.make_inputs(device)
        loss, lse, index_lse = torch.ops.htree._index_loss_forward(*inputs, cu, **case.options())
        found += [
            Call("index_loss", (*inputs, cu), case.options()),
            Call("_index_loss_forward", (*inputs, cu), case.options()),
            Call("_index_loss_backward", (*inputs, lse, index_lse, loss, cu), case.options()),
        ]
    return found


def sparse_calls(device: str) -> list[Call]:
    """Attention over lists that hold anything, with sinks, and its gradients; in batches and packed documents."""
    case, documents = (
        replace(next(case for case in cases if case.name == name), block_size=16)
        for cases, name in ((SPARSE_CASES, "sinks"), (SPARSE_VARLEN_CASES, "stride"))
    )
    backward = SparseBackwardCase(name=case.name, dtype=case.dtype, forward=case, of_lse=True)
    inputs = query, key, value, blocks, cu_q, cu_k, sinks, *bounds = documents.make_inputs(device)
    out, lse = torch.ops.htree.sparse_attention_varlen(*inputs, **documents.options())
    given = (query, key, value, blocks, cu_q, cu_k, out, lse, sinks, out, None, *bounds)
    return [
        Call("sparse_attention", case.make_inputs(device), case.options()),
        Call("_sparse_attention_backward", (*backward.make_inputs(device), *case.options().values())),
        Call("sparse_attention_varlen", inputs, documents.options()),
        Call("_sparse_attention_varlen_backward", (*given, *documents.options().values())),
    ]


def varlen_calls(device: str) -> list[Call]:
    """Packed documents, empty ones and some with fewer queries than keys among them."""
    case = next(case for case in VARLEN_CASES if case.name == "suffix")
    backward = VarlenBackwardCase(name=case.name, dtype=case.dtype, forward=case)
    inputs, packed = without_index(case.make_inputs(device)), case.packed()
    return [
        Call("_attention_varlen", (*inputs, "auto", *packed)),
        Call("_attention_varlen_forward", (*inputs, "auto", *packed)),
        Call("_attention_varlen_backward", (*backward.make_inputs(device), "auto", [True] * 3, *packed)),
        Call("_check_tree_options", ("tree_attention", *packed)),
    ]
