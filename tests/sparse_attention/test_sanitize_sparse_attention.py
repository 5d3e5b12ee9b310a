"""Every CUDA kernel of sparse_attention at a small size, for compute-sanitizer; the results are checked as well."""

from dataclasses import replace

import pytest
import torch
from sparse_attention_helpers import OPS, assert_equal_to_reference

from tests.support.cases import case_id
from tests.support.sparse_attention_cases import FAST_CASES, SparseCase, SparseVarlenCase

pytestmark = pytest.mark.gpu

_SMALL = SparseCase(
    name="small", dtype=torch.float32, B=2, T=90, H=4, H_kv=2, K=24, V=20, n=9, block_size=16, lists="wild"
)
CASES = [
    _SMALL,
    replace(_SMALL, name="bfloat16", dtype=torch.bfloat16, K=32, V=32, has_sinks=True),
    replace(_SMALL, name="float16", dtype=torch.float16, H=9, H_kv=1, block_size=24, n=2),
    replace(_SMALL, name="shared", H_i=1, selection_stride=4, T_q=26, block_size=32),
    replace(_SMALL, name="odd", K=5, V=3, T_q=1),
    replace(_SMALL, name="no_entry", n=0),
    replace(_SMALL, name="windows", B=1, T=16 * 33_000, T_q=2, H=2, K=2, V=2, n=40),
    *[replace(case, T=150, T_q=min(case.T_q, 132)) for case in FAST_CASES if case.T_q != 132],
]
#: Two queries share a tile of the backward. Their number is no multiple of 4.
PAIRED = [
    replace(_SMALL, name="stride_1", dtype=torch.bfloat16, T=91, T_q=75, H=8, K=128, V=128),
    replace(_SMALL, name="stride_2", dtype=torch.float16, T=83, H=8, K=64, V=64, selection_stride=2),
    replace(_SMALL, name="stride_8", dtype=torch.bfloat16, T=83, T_q=67, H=8, K=32, V=32, selection_stride=8),
]


@pytest.mark.parametrize("gather", ["gathered", "per_query"])
@pytest.mark.parametrize("case", PAIRED, ids=case_id)
def test_paired_queries(case, gather, monkeypatch):
    monkeypatch.setenv("HTREE_TREE_GATHER", gather)
    assert_equal_to_reference(case, "cuda")


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_sparse_attention(case):
    if case.name != "windows":
        assert_equal_to_reference(case, "cuda")
        return
    # The reference would hold every pair of tokens: here each row reads its own.
    query, key, value, blocks, _ = case.make_inputs("cuda")
    blocks[..., 0], blocks[..., 1] = 32_999, 40  # of the last window of lists, and of the first
    out, lse = OPS.sparse_attention(query, key, value, blocks, None, **case.options())
    for i in range(case.num_queries):
        for h in range(case.H):
            held = blocks[0, i, h].unique()
            tokens = (
                held[(held >= 0) & (held < 33_000), None] * 16 + torch.arange(16, device="cuda")
            ).flatten()
            tokens = tokens[tokens <= case.T - case.num_queries + i].long()
            scores = key[0, tokens, h] @ query[0, i, h] * case.K**-0.5
            torch.testing.assert_close(lse[0, i, h], scores.logsumexp(0), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(
                out[0, i, h], scores.softmax(0) @ value[0, tokens, h], rtol=1e-5, atol=1e-5
            )


def test_documents():
    case = SparseVarlenCase(
        name="documents",
        dtype=torch.float32,
        lengths=(33, 0, 17, 60),
        spare=3,
        K=16,
        V=16,
        block_size=16,
        n=4,
    )
    leaves = [x.requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
              for x in case.make_inputs("cuda")]  # fmt: skip
    out, _ = OPS.sparse_attention_varlen(*leaves, **case.options())
    out.square().sum().backward()
    assert out[-3:].eq(0).all()
    assert all(x.grad.isfinite().all() for x in leaves[:3])
