"""Small calls of every CUDA kernel of tree attention, for compute-sanitizer (`make sanitize`)."""

from dataclasses import replace

import pytest
import torch
from tree_attention_helpers import wild_lists

import htree_ops  # noqa: F401
from tests.support.cases import case_id
from tests.support.tree_attention_calls import calls
from tests.support.tree_attention_cases import SHAPES, TreeAttentionCase, frequencies

pytestmark = pytest.mark.gpu

NAMES = ("r16", "wide_lists", "group_of_3", "odd_value", "wide_value", "stride4_suffix", "ragged_everywhere")
GENERAL = [shape for shape in SHAPES if shape.name in NAMES]


def tensor_core(name: str, dtype: torch.dtype, **sizes: object) -> TreeAttentionCase:
    defaults: dict[str, object] = {"T": 300, "H": 8, "H_kv": 1, "r": 16, "top_k": 4, "M": 32}
    return TreeAttentionCase(name=name, dtype=dtype, **{**defaults, **sizes})


TENSOR_CORE = [
    tensor_core("d32", torch.bfloat16, K=32, V=32),
    tensor_core("d64", torch.float16, K=64, V=64),
    tensor_core("d128", torch.bfloat16, K=128, V=128),
    tensor_core("group1", torch.bfloat16, H=1, K=128, V=128),
    tensor_core("group2", torch.float16, H=2, K=64, V=64),
    tensor_core("group3", torch.bfloat16, H=3, K=64, V=64),
    tensor_core("group16", torch.bfloat16, H=16, K=128, V=128),
    tensor_core("stride16", torch.bfloat16, K=128, V=128, selection_stride=16),
    tensor_core("stride4", torch.float16, K=64, V=64, selection_stride=4),
    tensor_core("stride4_unrotated", torch.float16, rope_base=None, K=64, V=64, selection_stride=4),
    tensor_core("stride16_unrotated", torch.bfloat16, rope_base=None, K=128, V=128, selection_stride=16),
    tensor_core("stride8", torch.bfloat16, K=32, V=32, selection_stride=8),
    tensor_core("group2_stride16", torch.bfloat16, H=2, K=64, V=64, selection_stride=16),
    tensor_core("ragged_suffix", torch.bfloat16, T=297, num_queries=37, K=64, V=64, selection_stride=4),
    tensor_core("group4_stride2", torch.bfloat16, H=4, K=128, V=128, selection_stride=2),
    tensor_core("group4_unrotated", torch.bfloat16, rope_base=None, T=1100, H=4, top_k=2, K=128, V=128),
    tensor_core(
        "group4_stride2_unrotated", torch.float16, rope_base=None, T=297, H=4, K=64, V=64, selection_stride=2
    ),
    tensor_core(
        "group4_stride8_unrotated", torch.bfloat16, rope_base=None, H=4, K=32, V=32, selection_stride=8
    ),
    tensor_core("dense_rows", torch.bfloat16, M=256, top_k=16, K=128, V=128),
    tensor_core("dense_rows_group3", torch.float16, H=3, M=256, top_k=16, K=64, V=64, selection_stride=16),
    tensor_core("masked_rows", torch.bfloat16, rope_base=None, T=600, top_k=8, M=64, K=128, V=128),
    tensor_core("masked_rows_group3", torch.float16, rope_base=None, H=3, K=64, V=64, selection_stride=2),
    tensor_core("masked_rows_group1", torch.bfloat16, rope_base=None, H=1, K=128, V=128, num_queries=130),
    tensor_core("masked_rows_group16", torch.bfloat16, rope_base=None, H=16, T=297, K=32, V=32),
    tensor_core("three_layers", torch.bfloat16, T=1100, top_k=2, K=64, V=64),
    tensor_core("stride16_three_layers", torch.bfloat16, T=1100, top_k=2, K=128, V=128, selection_stride=16),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", GENERAL, ids=lambda c: c.name)
def test_every_op(case, dtype):
    for call in calls(case.with_dtype(dtype), "cuda"):
        result = call()
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                assert not tensor.isnan().any(), call.op


@pytest.mark.parametrize("gather", ["auto", "private"])
@pytest.mark.parametrize("case", TENSOR_CORE, ids=case_id)
def test_attention_and_its_gradient(case, gather, monkeypatch):
    monkeypatch.setenv("HTREE_TREE_GATHER", gather)
    q, k, v = (x.requires_grad_() for x in case.make_qkv("cuda"))
    for store_parents in (True, False):
        results = torch.ops.htree._attention_lse(q, k, v, store_parents, *case.packed())
        for gradient in torch.autograd.grad(results, (q, k, v), [torch.randn_like(x) for x in results]):
            assert gradient.isfinite().all()


SPANS = [
    *(tensor_core(f"means_{16 // span}", torch.bfloat16, K=128, V=128, selection_span=span) for span in (1, 2, 4, 8)),
    tensor_core("three_layers", torch.float16, T=1100, top_k=2, K=64, V=64, selection_span=4),
    tensor_core("joint", torch.bfloat16, K=32, V=32, selection_span=2, importance="exp_joint", selection_stride=4),
    tensor_core("group1", torch.bfloat16, H=1, K=64, V=64, selection_span=4),
    tensor_core("group3", torch.bfloat16, H=3, K=128, V=128, selection_span=2),
    tensor_core("group16_suffix", torch.float16, T=297, num_queries=37, H=16, K=64, V=64, selection_span=2),
    tensor_core("group16_three_layers", torch.bfloat16, T=1100, H=16, top_k=2, K=128, V=128, selection_span=8),
    tensor_core("general", torch.float32, K=64, V=64, selection_span=4, selection_stride=2),
]  # fmt: skip


NEXT = [
    tensor_core("next", torch.bfloat16, K=64, V=64, top_k=4, open_next=True),
    tensor_core(
        "next_s16_c2", torch.float16, K=128, V=128, top_k=5, selection_stride=16, selection_span=2, open_next=True
    ),
    tensor_core("next_three_layers", torch.bfloat16, T=1100, top_k=3, K=64, V=64, open_next=True),
    tensor_core("next_general", torch.float32, K=64, V=64, top_k=4, open_next=True),
]  # fmt: skip


@pytest.mark.parametrize("case", [*SPANS, *NEXT], ids=case_id)
def test_selection_by_span_means(case):
    q, k, v = (x.requires_grad_() for x in case.make_qkv("cuda"))
    later = {"selection_span": case.selection_span, "open_next": case.open_next}
    for store_parents in (True, False):
        out = torch.ops.htree.attention(q, k, v, *case.op_options(), store_parents, **later)
        for gradient in torch.autograd.grad(out, (q, k, v), torch.randn_like(out)):
            assert gradient.isfinite().all()


FREQUENCIES = [
    *(tensor_core(f"stride{s}", torch.bfloat16, K=64, V=64, selection_stride=s) for s in (1, 16)),
    tensor_core("general", torch.float32, K=64, V=64),
]


@pytest.mark.parametrize("case", FREQUENCIES, ids=case_id)
def test_frequencies_of_the_caller(case):
    q, k, v = (x.requires_grad_() for x in case.make_qkv("cuda"))
    for store_parents in (True, False):
        out = torch.ops.htree.attention(
            q, k, v, *case.op_options(), store_parents, inv_freq=frequencies(case.K)
        )
        for gradient in torch.autograd.grad(out, (q, k, v), torch.randn_like(out)):
            assert gradient.isfinite().all()


@pytest.mark.parametrize(("stride", "rope_base"), [(1, 10000.0), (16, 10000.0), (1, None)])
def test_backward_under_lists_that_break_the_rules(stride, rope_base):
    case = tensor_core("wild", torch.bfloat16, K=64, V=64, selection_stride=stride, rope_base=rope_base)
    q, k, v = case.make_qkv("cuda")
    out, gmax, gsum, parents = torch.ops.htree.attention_forward(q, k, v, *case.op_options())
    generator = torch.Generator().manual_seed(stride)
    for extreme in (False, True):
        wild = [
            wild_lists(generator, tuple(x.shape), size, extreme).to(x.device)
            for x, size in zip(parents, case.sizes, strict=True)
        ]
        got = torch.ops.htree.attention_backward(
            torch.randn_like(out), q, k, v, out, gmax, gsum, wild, *case.op_options()
        )
        assert [x.shape for x in got] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("span", [None, 2])
def test_rows_before_the_first_selection_of_a_long_sequence(span):
    """The tables of such a call end before the nodes of the top do."""
    case = tensor_core("rows", torch.bfloat16, T=4000, H=4, M=256, top_k=16, K=128, V=128)
    q, k, v = case.make_qkv("cuda")
    packed = replace(case, selection_span=span).packed()
    for starts, length in (([0], 64), ([0, 100], 96)):
        rows = torch.cat([q[:, start : start + length] for start in starts], 1)
        for store_parents in (True, False):
            *results, lists = torch.ops.htree._attention_rows(rows, k, v, starts, store_parents, *packed)
            assert results[0].isfinite().all()
            gradients = torch.ops.htree._attention_rows_backward(
                *(rows, k, v, *results, lists, torch.randn_like(rows), torch.randn_like(results[2])),
                *(starts, [True] * 3, *packed),
            )
            assert all(x.isfinite().all() for x in gradients)
