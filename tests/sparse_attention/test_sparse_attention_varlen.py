"""sparse_attention over packed documents: a call per document, isolation and refusals (docs/semantics §8.2)."""

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from sparse_attention_helpers import GRADIENTS, OPS, TOLERANCES, assert_same_bits, widened
from torch import Tensor

from htree_ops.reference import sparse_attention as reference
from tests.support.cases import case_id
from tests.support.devices import poisoned_memory
from tests.support.documents import assert_others_keep_their_bits, one_by_one, with_gradients
from tests.support.sparse_attention_cases import VARLEN_CASES, SparseVarlenCase


def for_device(case: SparseVarlenCase, device: str) -> SparseVarlenCase:
    if device == "cpu":
        return case
    dtype = torch.float32 if case.dtype == torch.float64 else case.dtype
    return replace(case, dtype=dtype, block_size=max(16, case.block_size))


def packed(case: SparseVarlenCase, *inputs: Any) -> tuple[Tensor, Tensor]:
    return OPS.sparse_attention_varlen(*inputs, **case.options())


def alone(case: SparseVarlenCase, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, *rest: Any) -> Any:
    """A call per document."""

    def call(rows: slice, keys: slice) -> tuple[Tensor, Tensor]:
        lists = blocks[None, rows][:, :: case.selection_stride]
        return OPS.sparse_attention(
            q[None, rows], k[None, keys], v[None, keys], lists, rest[2], **case.options()
        )

    return one_by_one(case, q, call)


def assert_equal_documents(case: SparseVarlenCase, device: str, seed: int = 0) -> None:
    """Equal to a call per document: out, lse and dq bit for bit; on the CPU dk and dv too, of one chunk."""
    inputs = case.make_inputs(device, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HTREE_TREE_GATHER", "gathered")  # as documents do
        wanted = with_gradients(partial(alone, case), inputs)
    with poisoned_memory():
        found = with_gradients(partial(packed, case), inputs)
    exact = ("out", "lse", "dq", *(("dk", "dv") if device == "cpu" else ()))
    for name, ours, theirs in zip(GRADIENTS, found, wanted, strict=False):
        if name in exact:
            assert torch.equal(ours, theirs), name
        else:
            tolerance = TOLERANCES[case.dtype]
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * 10)


@pytest.mark.parametrize("case", VARLEN_CASES, ids=case_id)
def test_equal_to_a_call_per_document(case, device):
    assert_equal_documents(for_device(case, device), device)


@pytest.mark.parametrize("case", VARLEN_CASES, ids=case_id)
def test_equal_to_the_reference(case, device):
    case = for_device(case, device)
    inputs = case.make_inputs(device)
    q, k, v, blocks, cu_q, cu_k, sinks = widened(inputs[:7])
    wanted = reference.sparse_attention_varlen(q, k, v, blocks, cu_q, cu_k, sinks=sinks, **case.options())
    tolerance = TOLERANCES[case.dtype]
    for ours, theirs in zip(packed(case, *inputs), wanted, strict=True):
        torch.testing.assert_close(ours.double().cpu(), theirs, rtol=tolerance, atol=tolerance)


@st.composite
def batches(draw: Any, device: str) -> SparseVarlenCase:
    """Documents around the borders of blocks, some empty, some with a suffix of queries."""
    size = draw(st.sampled_from((1, 3, 4, 8) if device == "cpu" else (16, 24, 64)))
    stride = draw(st.sampled_from([s for s in (1, 2, 4) if size % s == 0]))
    lengths = tuple(draw(st.lists(st.integers(0, 4 * size), max_size=6)))
    queries = None
    if draw(st.booleans()):
        before = [draw(st.integers(0, n // stride)) * stride for n in lengths]
        queries = tuple(n - skipped for n, skipped in zip(lengths, before, strict=True))
    kv_heads = draw(st.integers(1, 2))
    return SparseVarlenCase(
        name="drawn",
        dtype=draw(st.sampled_from((torch.float32, torch.bfloat16))),
        lengths=lengths,
        queries=queries,
        spare=draw(st.integers(0, 4)),
        H=kv_heads * draw(st.integers(1, 3)),
        H_kv=kv_heads,
        H_i=draw(st.sampled_from((1, kv_heads))),
        K=draw(st.sampled_from((3, 8))),
        V=draw(st.integers(1, 5)),
        n=draw(st.integers(0, 5)),
        block_size=size,
        selection_stride=stride,
        has_sinks=draw(st.booleans()),
    )


@given(data=st.data(), seed=st.integers(0, 2**20))
def test_any_batch_equals_a_call_per_document(data, seed, device):
    assert_equal_documents(data.draw(batches(device)), device, seed)


@given(data=st.data(), seed=st.integers(0, 2**20))
def test_a_document_reaches_no_other(data, seed, device):
    """NaN in one document and behind all of them: every other row and gradient keeps its bits."""
    case = replace(data.draw(batches(device).filter(lambda case: any(case.queries_of))), has_sinks=False)
    broken = data.draw(st.sampled_from([i for i, n in enumerate(case.queries_of) if n]))
    inputs = case.make_inputs(device, seed)
    which = data.draw(st.sampled_from((0, 1, 2)))
    poison = data.draw(st.sampled_from((torch.nan, torch.inf)))
    assert_others_keep_their_bits(case, partial(packed, case), inputs, broken, which, poison)


def test_rows_of_followers_are_not_read(device):
    case = for_device(next(case for case in VARLEN_CASES if case.name == "stride"), device)
    inputs = case.make_inputs(device)
    wanted = with_gradients(partial(packed, case), inputs)
    cu_q = inputs[4].tolist()
    for first, last in itertools.pairwise(cu_q):
        for row in range(first, last):
            if (row - first) % case.selection_stride:
                inputs[3][row] = 0
    assert_same_bits(with_gradients(partial(packed, case), inputs), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("broken", ["descends", "leaves", "more queries", "max_q", "stride"])
def test_a_broken_document_is_nan_on_cuda(broken):
    case = SparseVarlenCase(
        name="broken",
        dtype=torch.float32,
        lengths=(40, 32, 48),
        K=16,
        V=16,
        block_size=16,
        selection_stride=4,
    )
    q, k, v, blocks, cu, _, sinks, max_q, max_k = case.make_inputs("cuda")
    clean_q, clean_k = cu.clone(), cu.clone()
    wanted = OPS.sparse_attention_varlen(
        q, k, v, blocks, clean_q, clean_k, sinks, max_q, max_k, **case.options()
    )
    cu_q, cu_k = cu.clone(), cu.clone()
    if broken == "descends":
        cu_q[2] = 30
    elif broken == "leaves":
        cu_q[3] = cu_k[3] = 500
    elif broken == "more queries":
        cu_k[2] = 60
    elif broken == "max_q":
        max_q = 45
    else:
        cu_q[3] = 119
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = OPS.sparse_attention_varlen(*leaves, blocks, cu_q, cu_k, sinks, max_q, max_k, **case.options())
    assert torch.equal(out[:40], wanted[0][:40])
    assert out[72 if broken != "more queries" else 40].isnan().all()
    dq, dk, dv = torch.autograd.grad((out, lse), leaves, (torch.ones_like(out), torch.ones_like(lse)))
    for gradient in (dq, dk, dv):
        assert gradient[:32].isfinite().all()
        assert gradient.isnan().any()
