"""The number of threads changes no bit: every CPU kernel that splits its work, on problems that it does split.

The other tests run with one thread (``conftest.py``).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import htree_ops
from htree_ops import TreeOptions
from tests.support.fp8_gemm_cases import FP8GemmCase
from tests.support.gated_mlp_cases import GatedMLPCase
from tests.support.select_blocks_cases import SelectBlocksCase
from tests.support.tree_attention_cases import CASES, SPAN_SHAPES, TreeAttentionCase

ops = torch.ops.htree
TREE = {"compression_rate": 16, "top_k": 4, "max_top_nodes": 64}


@pytest.fixture(autouse=True)
def threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def normal(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(len(size))).to(dtype)


def rows() -> tuple[Tensor, ...]:
    x, weight = normal(3, 67, 1024), normal(1024)
    cos, sin = normal(67, 128), normal(67, 128)
    return x, weight, cos, sin


def tree_rows() -> tuple[Tensor, ...]:
    return normal(2, 1500, 4, 32), normal(2, 1500, 2, 32), normal(2, 1500, 2, 32)


def compressed() -> list[Tensor]:
    return [x for x in htree_ops.kv_compress(normal(2, 4, 700, 128), 64) if isinstance(x, Tensor)]


def decoded() -> Tensor:
    parts = compressed()
    window = normal(2, 4, 32, 128)
    return htree_ops.kv_decode_attention(
        normal(2, 8, 1, 128), *parts, *parts, window, window, k_keep=64, v_keep=64
    )


def cached() -> list[Tensor]:
    q, k, v = tree_rows()
    cache = htree_ops.TreeKVCache(2, 2, 32, 1500, **TREE, dtype=torch.float32)
    parts = []
    for first, last in ((0, 1100), (1100, 1101), (1101, 1500)):
        cache.append(k[:, first:last], v[:, first:last])
        parts.append(cache.attend(q[:, first:last]))
    return parts


def tree_backward() -> tuple[Tensor, ...]:
    q, k, v = tree_rows()
    packed = TreeOptions(**TREE, selection_span=2).packed()
    out, gmax, gsum, lists = ops._attention_rows(q, k, v, [0], True, *packed)
    given = (q, k, v, out, gmax, gsum, lists)
    return ops._attention_rows_backward(*given, q + 1, gmax, [0], [True] * 3, *packed)


def whole_tree(case: TreeAttentionCase) -> list[Any]:
    """Output, states, lists and gradients."""
    q, k, v = case.make_qkv("cpu")
    results = ops.attention_forward(q, k, v, **case.reference_options())
    dout = normal(*results[0].shape, dtype=case.dtype)
    return [*results, *ops.attention_backward(dout, q, k, v, *results, **case.reference_options())]


FLOATS = (torch.float32, torch.float16, torch.bfloat16)
TREES = ("long_prefill", "long_suffix_stride", "head_128", "group_of_3", "one_token")
SPANNED = [replace(shape, T=1000) for shape in SPAN_SHAPES if shape.name.startswith("three_layers_r16")]
#: Kernels that split in another way for few rows and for many, and in each dtype.
SIZES: dict[str, Callable[[], Any]] = {
    **{
        f"gated_mlp of {rows}, {dtype}": lambda dtype=dtype, rows=rows: ops.gated_mlp(
            *GatedMLPCase(name="threads", dtype=dtype, rows=(rows,), inner=700, hidden=530).make_inputs("cpu")
        )
        for rows in (1, 5, 128)
        for dtype in FLOATS
    },
    **{
        f"fp8_gemm of {m}": lambda m=m, n=n, k=k: ops.fp8_gemm(
            *FP8GemmCase(name="threads", dtype=torch.float32, m=m, n=n, k=k, layout="row").make_inputs("cpu")
        )
        for m, n, k in ((1, 333, 2000), (4, 333, 2000), (5, 333, 2000), (130, 333, 2000), (33, 65, 4000))
    },
    **{
        f"select_blocks, {dtype}": lambda dtype=dtype: htree_ops.select_blocks(
            *SelectBlocksCase(
                name="threads", dtype=dtype, T=3000, count=20, block_size=16, d=32, exact=False
            ).make_index("cpu"),
            20,
        )
        for dtype in (torch.float32, torch.bfloat16)
    },
    **{
        f"tree {case.id}": partial(whole_tree, case)
        for case in (
            *(case for case in CASES if case.name in TREES and case.dtype in (torch.float32, torch.bfloat16)),
            *(replace(case, dtype=dtype) for case in SPANNED for dtype in (torch.float32, torch.bfloat16)),
        )
    },
}
CALLS: dict[str, Callable[[], Any]] = {
    **SIZES,
    "causal_softmax": lambda: ops.causal_softmax(normal(3, 300, 300)),
    "causal_softmax_backward": lambda: ops.causal_softmax_backward(
        normal(3, 300, 300), ops.causal_softmax(normal(3, 300, 300))
    ),
    "rmsnorm_rope": lambda: ops.rmsnorm_rope(*rows()),
    "rmsnorm_rope_backward": lambda: ops.rmsnorm_rope_backward(rows()[0] + 1, *rows()),
    "head_rmsnorm_rope": lambda: ops.head_rmsnorm_rope(
        normal(3, 67, 8, 128), normal(128), normal(67, 128), normal(67, 128)
    ),
    "gated_mlp": lambda: ops.gated_mlp(normal(70, 256), normal(300, 256), normal(300, 256)),
    "hadamard_transform": lambda: ops.hadamard_transform(normal(300, 512)),
    "grouped_hadamard": lambda: ops.grouped_hadamard(normal(2, 300, 8, 64), 4),
    "fp8_quantize": lambda: [
        ops.fp8_quantize(normal(300, 512), None, g) for g in ("tensor", "channel", "block")
    ],
    "fp8_dequantize": lambda: ops.fp8_dequantize(
        normal(300, 512).to(torch.float8_e4m3fn), torch.tensor(3.0), torch.float32
    ),
    "fp8_fake_quant": lambda: ops.fp8_fake_quant(normal(300, 512)),
    "fp8_gemm": lambda: ops.fp8_gemm(
        *(normal(130, 130).to(torch.float8_e4m3fn) for _ in "ab"), torch.tensor(1.0), torch.tensor(1.0)
    ),
    "kv_compress": compressed,
    "kv_decode_attention": decoded,
    "tree_build": lambda: ops.tree_build(*tree_rows()[1:]),
    "rope": lambda: ops.rope(tree_rows()[0], *ops.rope_cache(1500, 32), torch.arange(1500)),
    "tree_attention": lambda: ops._attention_rows(*tree_rows(), [0], True, *TreeOptions(**TREE).packed()),
    "tree_attention_backward": tree_backward,
    "tree_cache": cached,
}


@pytest.mark.parametrize("name", CALLS)
def test_the_number_of_threads_changes_no_bit(name):
    torch.set_num_threads(1)
    alone = CALLS[name]()
    for threads in (2, 3, 8):
        torch.set_num_threads(threads)
        torch.testing.assert_close(CALLS[name](), alone, rtol=0, atol=0, equal_nan=True)
