"""Which kernels a call of tree attention takes on a GPU: a function of problem and device, printed without one."""

from __future__ import annotations

import pytest

try:
    from htree_ops import _host as host
except ImportError:  # built for one Python version; the package works without it
    host = None

pytestmark = pytest.mark.skipif(host is None, reason="_host is not built for this Python")

MODEL = (1, 131_072, 131_072, 32, 4, 128, 128)  # B, T, T_q, H, H_kv, K, V


def path(sizes: tuple[int, ...] = MODEL, half: bool = True, **options: int) -> str:
    return host.tree_attention_config(sizes, half, **options).split()[0]


@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("group", [1, 2, 3, 8, 16])
def test_model_shapes_take_the_tensor_cores(width: int, group: int) -> None:
    assert path((2, 5000, 5000, 2 * group, 2, width, width)) == "tensor_core"


@pytest.mark.parametrize(
    ("sizes", "half", "options"),
    [
        (MODEL, False, {}),
        ((1, 5000, 5000, 8, 1, 96, 96), True, {}),
        ((1, 5000, 5000, 8, 1, 64, 128), True, {}),
        ((1, 5000, 5000, 34, 2, 64, 64), True, {}),
        (MODEL, True, {"compression_rate": 8, "max_top_nodes": 4096}),
        (MODEL, True, {"top_k": 1025}),
        (MODEL, True, {"major": 7}),
        (MODEL, True, {"major": 12, "shared_bytes": 101_376}),
    ],
    ids=["fp32", "width_96", "k_not_v", "group_17", "r_8", "long_lists", "volta", "little_shared_memory"],
)
def test_everything_else_takes_the_general_kernels(
    sizes: tuple[int, ...], half: bool, options: dict[str, int]
) -> None:
    assert path(sizes, half, **options) == "general"
    assert path(sizes, half, **options, backward=True) == "general"


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("stride", [1, 16])
@pytest.mark.parametrize("length", [32_768, 131_072, 1_048_576])
def test_chunks_bound_the_scratch(length: int, stride: int, backward: bool) -> None:
    sizes = (1, length, length, 32, 4, 128, 128)
    words = host.tree_attention_config(sizes, True, selection_stride=stride, backward=backward).split()
    chunks = dict(word.split("=") for word in words[1:])
    queries, lists = int(chunks["query_chunk"]), int(chunks["selection_chunk"])
    assert queries % stride == 0
    assert queries * 32 * 128 * 4 <= 2**30 * (3 if backward else 1)
    widest = min(8192, length // 16)  # candidates of a list above the bottom
    assert lists * 32 * widest * 4 <= 2**29


def gather(**options: int) -> str:
    words = host.tree_attention_config(MODEL, True, **options).split()
    return dict(word.split("=") for word in words[1:])["gather"]


def test_hopper_shares_gathers() -> None:
    assert gather() == "union"
    assert gather(selection_stride=4) == "union"
    assert gather(top_k=128, max_top_nodes=2048) == "union"


@pytest.mark.parametrize(
    "options",
    [{"major": 8}, {"hopper_kernels": False}, {"shared_bytes": 166_912}, {"major": 10}, {"top_k": 1025}],
    ids=["ampere", "built_without", "little_shared_memory", "blackwell", "general_path"],
)
def test_other_gpus_gather_for_each_query(options: dict[str, int]) -> None:
    assert gather(**options) == "private"
