"""The list of problems of tree attention: every edge of docs/semantics/tree_attention.md §1.9, once.

One list feeds the tests, the gradient checks, opcheck and the benchmarks.
"""

import dataclasses
from typing import Any

import torch

from tests.support.tree_attention_problem import TreeAttentionBackwardCase, TreeAttentionCase

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def _shape(name: str, **sizes: Any) -> TreeAttentionCase:
    return TreeAttentionCase(name=name, dtype=torch.float32, **sizes)


#: Every edge of §1.9, once, in float32; ``with_dtype`` gives the other dtypes.
SHAPES: tuple[TreeAttentionCase, ...] = (
    # lengths around the boundaries of layers: M = 8, r = 4
    _shape("empty_sequence", T=0),
    _shape("empty_batch", B=0, T=9),
    _shape("one_token", T=1),
    _shape("two_tokens", T=2),
    _shape("below_r", T=3),
    _shape("one_layer_full", T=8),
    _shape("two_layers_first", T=9),
    _shape("two_layers_full", T=32),
    _shape("three_layers_first", T=33),
    _shape("three_layers_full", T=128),
    _shape("four_layers_first", T=129),
    _shape("ragged_everywhere", T=107, r=3, top_k=3, M=5),
    # branching and list width
    _shape("binary", T=61, r=2, top_k=3, M=5),
    _shape("binary_deep", T=200, r=2, top_k=2, M=2),
    _shape("r16", T=300, r=16, top_k=2, M=20),
    _shape("r5", T=77, r=5, top_k=2, M=10),
    _shape("only_the_rightmost", T=70, r=4, top_k=1, M=4),
    _shape("single_top_node", T=40, r=3, top_k=2, M=1),
    _shape("narrow_top", T=90, r=4, top_k=4, M=3),
    _shape("wide_lists", T=150, r=4, top_k=16, M=64),
    _shape("everything_selected", T=100, r=3, top_k=40, M=9),
    _shape("uneven_k", T=190, r=4, top_k=7, M=28),
    # lists of hundreds of candidates, more nodes than a block of any kernel
    _shape("long_suffix", T=2100, num_queries=40, H=4, H_kv=2, K=16, V=24, r=4, top_k=128, M=512),
    _shape(
        "long_suffix_stride",
        T=2112,
        num_queries=48,
        H=8,
        H_kv=2,
        K=16,
        V=8,
        r=16,
        top_k=32,
        M=128,
        selection_stride=16,
    ),
    _shape("long_prefill", T=400, H=4, H_kv=2, K=32, V=32, r=8, top_k=16, M=128),
    # heads and widths
    _shape("batch", B=3, T=50, H=4, H_kv=2),
    _shape("multi_head", T=45, H=3, H_kv=3),
    _shape("group_of_8", T=70, H=8, H_kv=1),
    _shape("group_of_3", B=2, T=40, H=6, H_kv=2),
    _shape("group_of_16", T=66, H=16, H_kv=1, K=16, V=16),
    _shape("narrow_key", T=60, K=2, V=4),
    _shape("odd_value", T=60, K=4, V=5),
    _shape("one_value", T=60, K=6, V=1),
    _shape("wide_value", T=40, K=4, V=70),
    _shape("key_18", T=50, K=18, V=18),
    _shape("head_64", T=80, H=4, H_kv=2, K=64, V=64, r=4, top_k=4, M=16),
    _shape("head_128", T=70, H=8, H_kv=2, K=128, V=128, r=16, top_k=4, M=16),
    # suffixes of the keys, strides of the selection
    _shape("decode", T=107, num_queries=1),
    _shape("chunk", B=2, T=107, num_queries=19),
    _shape("no_query", T=20, num_queries=0),
    _shape("stride2", T=107, r=4, selection_stride=2),
    _shape("stride4", B=2, T=130, H=4, H_kv=2, r=4, top_k=3, M=12, selection_stride=4),
    _shape("stride16", T=301, r=16, top_k=2, M=16, selection_stride=16),
    _shape("ragged_suffix", T=108, num_queries=27, r=3, top_k=3),
    _shape("stride4_suffix", T=125, num_queries=37, r=4, top_k=3, selection_stride=4),
    # options
    _shape("importance_lse", B=2, T=100, H=6, H_kv=2, importance="lse"),
    _shape("importance_joint", B=2, T=100, H=6, H_kv=2, importance="exp_joint"),
    _shape("no_rotation", T=100, rope_base=None),
    _shape("other_base", T=100, rope_base=500.0),
    _shape("other_scale", T=100, scale=0.7),
    _shape("peaked", T=107, H=4, H_kv=2, spread=8.0),
    # layouts
    _shape("fused_projection", B=2, T=60, H=4, H_kv=2, K=8, V=6, layout="fused_projection"),
    _shape("fused_suffix", B=2, T=60, num_queries=11, H=4, H_kv=2, layout="fused_projection"),
    _shape("head_major", B=2, T=60, H=4, H_kv=2, layout="head_major"),
    _shape("in_larger", B=2, T=60, H=4, H_kv=2, layout="in_larger"),
    _shape("misaligned", B=2, T=60, H=4, H_kv=2, layout="misaligned"),
    _shape("copied_last_stride", B=2, T=60, H=4, H_kv=2, layout="non_unit_last_stride"),
    _shape("copied_transposed", B=2, T=60, H=4, H_kv=2, layout="transposed"),
)

#: Every shape in every dtype.
CASES = [shape.with_dtype(dtype) for shape in SHAPES for dtype in DTYPES]


def frequencies(width: int) -> tuple[float, ...]:
    """width / 2 numbers: falling ones, the slower half scaled, one negative, the last quarter without rotation."""
    pairs = width // 2
    scaled = [(1.0 if i < pairs // 2 else 0.125) * 500_000.0 ** (-i / pairs) for i in range(pairs)]
    return tuple(0.0 if 4 * i >= 3 * pairs else -x if i == 1 else x for i, x in enumerate(scaled))


#: Shapes with frequencies of their own (§1.4).
FREQUENCY_SHAPES: tuple[TreeAttentionCase, ...] = tuple(
    dataclasses.replace(shape, name=f"{shape.name}_inv_freq", inv_freq=frequencies(shape.K))
    for shape in (
        _shape("ragged", T=107),
        _shape("batch", B=3, T=50, H=4, H_kv=2),
        _shape("narrow_key", T=60, K=2, V=4),
        _shape("key_18", T=50, K=18, V=18),
        _shape("key_600", T=40, K=600, V=3),  # more pairs than one launch carries
        _shape("head_64", T=80, H=4, H_kv=2, K=64, V=64, r=4, top_k=4, M=16),
        _shape("r16", T=300, r=16, top_k=2, M=20, H=4, H_kv=2),
        _shape("stride4_suffix", T=125, num_queries=37, r=4, top_k=3, selection_stride=4),
        _shape("span", T=107, r=4, top_k=2, M=8, selection_span=2),
        _shape("joint", B=2, T=100, H=6, H_kv=2, importance="exp_joint"),
        _shape("one_layer", T=20, M=20, top_k=5, r=4),
    )
)
FREQUENCY_CASES = [shape.with_dtype(dtype) for shape in FREQUENCY_SHAPES for dtype in DTYPES]


def _with_spans(shapes: tuple[TreeAttentionCase, ...]) -> tuple[TreeAttentionCase, ...]:
    """Each shape with one selection_span, so that all divisors of its r come up (§1.15)."""
    found = []
    for i, shape in enumerate(shape for shape in shapes if shape.importance != "lse"):
        spans = [span for span in range(1, shape.r + 1) if shape.r % span == 0]
        span = spans[i % len(spans)]
        found.append(dataclasses.replace(shape, name=f"{shape.name}_c{span}", selection_span=span))
    return tuple(found)


#: The same edges with a selection_span, those of fewer tokens than a span among them.
SPAN_SHAPES: tuple[TreeAttentionCase, ...] = (
    *_with_spans(SHAPES),
    _shape("one_token_below_c", T=1, M=1, top_k=2, selection_span=4),
    _shape("two_tokens_below_c", T=2, M=1, top_k=2, selection_span=4),
    _shape("ragged_mean", T=107, r=4, top_k=2, M=8, selection_span=4),
    _shape("three_layers_r16", T=700, r=16, top_k=3, M=8, selection_span=4, H=4, H_kv=2),
    _shape("three_layers_suffix", T=600, num_queries=40, r=16, top_k=3, M=8, selection_span=1),
    _shape("rate_above_length", T=9, r=64, top_k=2, M=3, selection_span=16),
)
#: Each of them in float32 and in one other dtype.
SPAN_CASES = [
    shape.with_dtype(dtype)
    for i, shape in enumerate(SPAN_SHAPES)
    for dtype in (DTYPES[0], DTYPES[1 + i % (len(DTYPES) - 1)])
]

#: Some of the edges with open_next (§1.6), and lists of hundreds.
NEXT_SHAPES: tuple[TreeAttentionCase, ...] = tuple(
    dataclasses.replace(shape, name=f"{shape.name}_next", open_next=True)
    for shape in (
        *(
            shape
            for shape in (*SHAPES, *SPAN_SHAPES)
            if shape.top_k > 2 and not shape.name.startswith(("fused", "copied", "everything"))
        ),
        _shape("three_layers", T=150, r=4, top_k=4, M=12, H=4, H_kv=2),
        _shape("four_layers_c1", T=400, r=4, top_k=5, M=9, H=4, H_kv=2, selection_span=1),
        _shape("k3", T=130, r=4, top_k=3, M=12, H=3, H_kv=3),
        _shape("stride16_c2", T=560, r=16, top_k=6, M=40, H=4, H_kv=2, selection_stride=16, selection_span=2),
        _shape("joint", T=150, r=4, top_k=6, M=20, H=6, H_kv=2, importance="exp_joint"),
        _shape("lse", T=150, r=4, top_k=6, M=20, H=6, H_kv=2, importance="lse"),
        _shape("pairs", T=90, r=4, top_k=2, M=8),
        _shape("misaligned", B=2, T=90, top_k=4, M=12, H=4, H_kv=2, layout="misaligned"),
    )
)
NEXT_CASES = [
    shape.with_dtype(dtype)
    for i, shape in enumerate(NEXT_SHAPES)
    for dtype in (DTYPES[0], DTYPES[1 + i % (len(DTYPES) - 1)])
]

#: M above k*r (§1.3): each row walks the tree of its own prefix. Three layers begin at M * r tokens.
FREE_SHAPES: tuple[TreeAttentionCase, ...] = tuple(
    dataclasses.replace(shape, name=f"{shape.name}_free")
    for shape in (
        # lengths around the boundaries of layers, ragged
        _shape("empty_sequence", T=0, M=20),
        _shape("one_token", T=1, M=20),
        _shape("one_layer_full", T=20, M=20),
        _shape("two_layers_first", T=21, M=20),
        _shape("two_layers_full", T=80, M=20),
        _shape("three_layers_first", T=81, M=20),
        _shape("three_layers", T=333, M=20, H=4, H_kv=2),
        _shape("one_above_kr", T=107, M=9),
        _shape("far_above_kr", T=107, M=100),
        _shape("ragged_everywhere", T=107, r=3, top_k=2, M=10),
        _shape("binary", T=101, r=2, top_k=1, M=7),
        _shape("only_the_rightmost", T=150, top_k=1, M=9),
        _shape("r16", T=700, r=16, top_k=2, M=40),
        # heads
        _shape("group_of_1", T=120, M=20, H=2, H_kv=2),
        _shape("group_of_3", B=2, T=120, M=20, H=6, H_kv=2),
        _shape("group_of_4", T=120, M=20, H=8, H_kv=2),
        _shape("odd_value", T=100, M=20, K=4, V=5),
        # suffixes of the keys, strides of the selection; M need not be a multiple of s
        _shape("decode", T=107, num_queries=1, M=20),
        _shape("decode_dense", T=17, num_queries=1, M=20),
        _shape("chunk", B=2, T=107, num_queries=93, M=20),
        _shape("no_query", T=40, num_queries=0, M=20),
        _shape("stride2", T=107, M=11, selection_stride=2),
        _shape("stride4", B=2, T=130, H=4, H_kv=2, M=10, selection_stride=4),
        _shape("stride4_dense_followers", T=11, M=10, selection_stride=4),
        _shape("stride4_suffix", T=125, num_queries=117, M=10, selection_stride=4),
        _shape("stride16", T=901, r=16, M=40, selection_stride=16),
        # options
        _shape("span1", T=150, M=20, selection_span=1),
        _shape("span2", T=333, M=20, H=4, H_kv=2, selection_span=2),
        _shape("span4_stride2", T=150, M=19, selection_span=4, selection_stride=2),
        _shape("next", T=333, top_k=4, M=30, open_next=True),
        _shape(
            "next_stride4_span2", T=150, top_k=5, M=30, open_next=True, selection_stride=4, selection_span=2
        ),
        _shape("joint", B=2, T=100, M=20, H=6, H_kv=2, importance="exp_joint"),
        _shape("lse", B=2, T=100, M=20, H=6, H_kv=2, importance="lse"),
        _shape("no_rotation", T=107, M=20, rope_base=None),
        _shape("inv_freq", T=107, M=20, inv_freq=frequencies(8)),
        _shape("peaked", T=107, M=20, H=4, H_kv=2, scale=0.7, spread=8.0),
        # layouts
        _shape("fused_suffix", B=2, T=60, num_queries=51, M=20, H=4, H_kv=2, layout="fused_projection"),
        _shape("misaligned", B=2, T=90, M=20, H=4, H_kv=2, layout="misaligned"),
        _shape("copied_last_stride", B=2, T=60, M=20, H=4, H_kv=2, layout="non_unit_last_stride"),
    )
)
FREE_CASES = [shape.with_dtype(dtype) for shape in FREE_SHAPES for dtype in DTYPES]

#: The cases of every option.
EVERY_CASE = [*CASES, *FREQUENCY_CASES, *SPAN_CASES, *NEXT_CASES, *FREE_CASES]

#: Small problems in float64 for gradcheck and gradient comparisons: several layers, all options.
GRADIENT_SHAPES: tuple[TreeAttentionCase, ...] = tuple(
    shape.with_dtype(torch.float64)
    for shape in (
        _shape("two_layers", T=9, H=2, H_kv=1, K=4, V=3, r=2, top_k=2, M=4),
        _shape("three_layers_ragged", T=31, H=2, H_kv=1, K=2, V=2, r=3, top_k=2, M=4),
        _shape("grouped", T=13, H=4, H_kv=2, K=2, V=1, r=2, top_k=2, M=3),
        _shape("only_the_rightmost", T=17, H=2, H_kv=1, K=2, V=2, r=3, top_k=1, M=3),
        _shape("exact_regime", T=12, H=2, H_kv=2, K=4, V=2, r=2, top_k=12, M=4),
        _shape("one_layer", T=6, H=1, H_kv=1, K=2, V=3, r=2, top_k=4, M=8),
        _shape("suffix", T=21, num_queries=6, H=2, H_kv=1, K=2, V=2, r=3, top_k=2, M=4),
        _shape("decode", T=21, num_queries=1, H=2, H_kv=1, K=2, V=2, r=3, top_k=2, M=4),
        _shape("stride", T=22, H=2, H_kv=1, K=2, V=2, r=4, top_k=2, M=4, selection_stride=2),
        _shape("no_rotation", T=15, H=2, H_kv=1, K=2, V=2, r=2, top_k=2, M=3, rope_base=None),
        _shape("free_top", T=31, H=2, H_kv=1, K=2, V=2, r=2, top_k=2, M=6),
        _shape("free_top_stride", T=40, num_queries=34, H=2, H_kv=1, K=2, V=2, M=9, selection_stride=2),
        _shape(
            "fused_projection", B=2, T=11, H=2, H_kv=1, K=2, V=2, r=2, top_k=2, M=3, layout="fused_projection"
        ),
    )
)


def _model(T: int, dtype: torch.dtype, shape: str = "", **sizes: Any) -> TreeAttentionCase:
    defaults = {"H": 32, "H_kv": 4, "K": 128, "V": 128, "r": 16, "top_k": 512, "M": 8192}
    stride = sizes.get("selection_stride", 1)
    return TreeAttentionCase(name=f"T{T}{shape}_s{stride}", T=T, dtype=dtype, **{**defaults, **sizes})


#: Sizes of the results tables by device type.
BENCHMARK_CASES: dict[str, list[TreeAttentionCase]] = {
    "cuda": [
        *(
            _model(T, torch.bfloat16, selection_stride=stride)
            for T in (32_768, 131_072, 1_048_576, 8192, 16_384, 65_536, 262_144, 524_288)
            for stride in (1, 16)
        ),
        *(  # the settings for quality and for speed
            _model(T, torch.bfloat16, "_c2", selection_span=2, selection_stride=stride)
            for T in (8192, 16_384, 32_768, 65_536, 131_072, 262_144, 524_288, 1_048_576)
            for stride in (1, 4)
        ),
        *(
            _model(T, torch.bfloat16, shape, selection_stride=stride, **sizes)
            for T, shape, sizes in (
                (131_072, "_ar1", {"correlation": 0.95}),
                (131_072, "_h64", {"H": 64}),
                (131_072, "_d64", {"K": 64, "V": 64}),
                (120_000, "_h64_d32", {"H": 64, "K": 32, "V": 32}),  # the public Triton version's benchmark
            )
            for stride in (1, 16)
        ),
        *(
            _model(131_072, torch.bfloat16, "_ar1", correlation=0.95, selection_stride=stride)
            for stride in (2, 4, 8)
        ),
    ],
    "cpu": [
        *(
            _model(T, torch.float32, H=4, H_kv=1, K=64, V=64, top_k=64, M=1024, selection_stride=stride)
            for T in (32_768, 65_536)
            for stride in (1, 16)
        ),
        _model(
            32_768,
            torch.float32,
            "_c4",
            H=4,
            H_kv=1,
            K=64,
            V=64,
            top_k=64,
            M=1024,
            selection_stride=16,
            selection_span=4,
        ),
    ],
}

BENCHMARK_BACKWARD_CASES: dict[str, list[TreeAttentionBackwardCase]] = {
    device: [
        TreeAttentionBackwardCase(name=case.name, dtype=case.dtype, forward=case)
        for case in cases
        if case.name in {f"T{T}_{way}" for T in (32_768, 131_072) for way in ("s1", "s16", "c2_s1", "c2_s4")}
    ]
    for device, cases in BENCHMARK_CASES.items()
}
