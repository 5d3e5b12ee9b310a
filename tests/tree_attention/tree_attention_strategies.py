"""Hypothesis strategies for problems of tree attention, small enough for hundreds of examples."""

import torch
from hypothesis import strategies as st

from tests.support.tree_attention_cases import TreeAttentionCase
from tests.support.tree_attention_problem import SWITCHES

CPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CUDA_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # §0.1
CAUSAL = ("lse_causal", "exp_joint")
EVERY_IMPORTANCE = (*CAUSAL, "lse")


def dtypes_of(device):
    return CPU_DTYPES if device == "cpu" else CUDA_DTYPES


def spans_of(rate):
    """None as often as a divisor of the rate."""
    return st.one_of(st.none(), st.sampled_from([span for span in range(1, rate + 1) if rate % span == 0]))


switches = st.fixed_dictionaries({name: st.booleans() for name in SWITCHES})


def frequencies_of(width):
    """None as often as K/2 frequencies of any sign, zeros among them."""
    some = st.sampled_from((0.0, 1.0, -0.5, 0.1, 1e-3, 2.5))
    numbers = st.lists(st.one_of(some, st.floats(-4, 4, width=32)), min_size=width // 2, max_size=width // 2)
    return st.one_of(st.none(), numbers.map(tuple))


@st.composite
def problems(
    draw,
    dtypes,
    *,
    importances=("lse_causal",),
    layers=None,
    max_length=90,
    spreads=(1.0, 0.2, 4.0),
    most_top=1,
):
    """A case with lengths around those that add a layer; shrinks towards one short sequence and few heads.

    layers: least number of layers, which the length reaches by being above M * r^(layers - 2).
    most_top: how often k*r goes into the largest M.
    """
    r = draw(st.sampled_from((2, 3, 4, 5, 8)))
    top_k = draw(st.integers(1, 6))
    top_nodes = draw(st.integers(1, most_top * top_k * r))
    shortest = 1
    if layers is not None:
        top_nodes = min(top_nodes, max(1, max_length // r ** (layers - 2) - 1))
        shortest = top_nodes * r ** (layers - 2) + 1
    edges = [n for n in (top_nodes, top_nodes + 1, top_nodes * r, top_nodes * r + 1) if n >= shortest]
    lengths = st.integers(shortest, max(shortest, max_length))
    length = draw(st.one_of(lengths, st.sampled_from(edges).filter(lambda n: n <= 120)) if edges else lengths)
    stride = draw(st.sampled_from([s for s in (1, 2, 4, 8) if r % s == 0]))
    num_queries = None
    if draw(st.booleans()):
        num_queries = length - draw(st.integers(0, (length - 1) // stride)) * stride
    heads_kv = draw(st.integers(1, 3))
    importance = draw(st.sampled_from(importances))
    width = draw(st.sampled_from((2, 4, 6, 16)))
    return TreeAttentionCase(
        name="drawn",
        dtype=draw(st.sampled_from(dtypes)),
        B=draw(st.integers(1, 2)),
        T=length,
        num_queries=num_queries,
        H=heads_kv * draw(st.integers(1, 4)),
        H_kv=heads_kv,
        K=width,
        V=draw(st.integers(1, 5)),
        r=r,
        top_k=top_k,
        M=top_nodes,
        selection_stride=stride,
        selection_span=None if importance == "lse" else draw(spans_of(r)),
        **draw(switches),
        importance=importance,
        inv_freq=draw(frequencies_of(width)),
        spread=draw(st.sampled_from(spreads)),
        layout=draw(st.sampled_from(("contiguous", "fused_projection", "head_major", "misaligned"))),
    )


seeds = st.integers(0, 2**31 - 1)
