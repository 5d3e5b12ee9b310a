"""Which kernels a call of sparse_attention takes on a GPU, and in how much memory; no GPU is needed."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from tests.support.sparse_attention_cases import SparseCase

host = pytest.importorskip("htree_ops._host", reason="_host is built per Python version")

MODEL = SparseCase(
    name="model", dtype=torch.bfloat16, T=131_072, H=32, H_kv=4, K=128, V=128, n=128, block_size=16
)
#: csrc/ops/sparse_attention/plan/sparse.h, and some MB of rounding and of numbers of each block
MOST_FORWARD, MOST_BACKWARD = 520 << 20, (1584 + 768 + 64) << 20


def plan(case: SparseCase, **device: int | bool) -> tuple[str, str, str, int, int]:
    sizes = (case.B, case.T, case.num_queries, case.H, case.H_kv, case.K, case.V)
    half = case.dtype in (torch.float16, torch.bfloat16)
    return host.sparse_attention_plan(
        (*sizes, case.n, case.block_size, case.selection_stride), half, **device
    )


@pytest.mark.parametrize(
    ("stride", "heads", "kernels"),
    [
        (1, 32, ("shared_gather", "shared_gather", "parent_gradient")),
        (2, 8, ("shared_gather", "shared_gather", "key_gradient")),
        (1, 64, ("shared_gather", "per_query", "key_gradient")),
        (4, 32, ("per_list", "shared_gather", "parent_gradient")),
        (8, 32, ("per_list", "per_list", "per_list")),
        (16, 4, ("per_list", "shared_gather", "key_gradient")),
        (16, 64, ("per_list", "per_list", "per_list")),
    ],
)
def test_kernels_on_hopper(stride, heads, kernels):
    assert plan(replace(MODEL, selection_stride=stride, H=heads))[:3] == kernels


def test_kernels_of_other_gpus():
    for major in (8, 10, 12):
        assert plan(MODEL, major=major)[:3] == ("per_query", "per_query", "parent_gradient")
    assert plan(MODEL, hopper_kernels=False)[0] == "per_query"
    assert plan(MODEL, major=7)[0] == "general"


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.float32},
        {"K": 96, "V": 96},
        {"V": 64},
        {"H": 68},
        {"block_size": 24},
        {"n": 0},
        {"n": 1025},
        {"block_size": 128, "n": 129},
        {"block_size": 32, "selection_stride": 32},
        {"T": 2**31 - 15},
    ],
    ids=str,
)
def test_what_takes_the_general_kernels(changes):
    assert plan(replace(MODEL, **changes))[0] == "general"


@given(
    B=st.integers(1, 70_000),
    T=st.integers(1, 2**31 - 16),  # an address holds no more blocks of sixteen
    share=st.floats(0, 1),
    parts=st.sampled_from((1, 2, 4, 8)),
    stride=st.sampled_from((1, 2, 4, 8, 16)),
    n=st.integers(1, 128),
    group=st.integers(1, 16),
    kv_heads=st.integers(1, 64),
    width=st.sampled_from((32, 64, 128)),
)
def test_kernels_do_not_follow_from_lengths_and_memory_is_bounded(
    B, T, share, parts, stride, n, group, kv_heads, width
):
    before = int(share * (T - 1)) // stride * stride
    case = replace(
        MODEL, B=B, T=T, T_q=T - before, H=group * kv_heads, H_kv=kv_heads, K=width, V=width, n=n,
        block_size=16 * parts, selection_stride=stride,
    )  # fmt: skip
    found = plan(case)
    assert found[:3] == plan(replace(case, B=1, T=stride, T_q=1))[:3]
    assert found[3] <= MOST_FORWARD + 4 * kv_heads * (16 * n + 2)
    # Numbers of each block that do not depend on the chunk: two bounds of a token, offsets and counts of the lists.
    blocks = -(-T // 16)
    own = B * kv_heads * blocks * 34 + kv_heads * blocks * 8 * (1 + B)
    list_bytes = kv_heads * (16 * n * 8 + 64) + stride * kv_heads * (16 * 4 * width + 256)
    sums = 8 * n * parts * 64 * width * 16
    assert found[4] <= MOST_BACKWARD + own + 64 * list_bytes + sums
