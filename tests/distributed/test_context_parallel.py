"""Tree attention over tokens on several ranks, against one process (docs/semantics/tree_attention.md §1.11, §1.13)."""

import itertools
import re
from typing import Any

import cp_on_ranks
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from process_pool import Pool, started

import htree_ops
from htree_ops.distributed import tree_attention_cp
from htree_ops.distributed.collectives import parts_of, parts_per_rank, work_before
from htree_ops.distributed.context_parallel import choose_steps

BALANCES = ("zigzag", "striped", "contiguous", "work")


def tree(rate: int, top_nodes: int, top_k: int, **more: Any) -> dict[str, Any]:
    return {"compression_rate": rate, "max_top_nodes": top_nodes, "top_k": top_k, **more}


#: B, T, H, H_kv, K, V and the options; of an index the heads and the width.
CASES: dict[str, tuple[cp_on_ranks.Sizes, dict[str, Any]]] = {
    "three_layers": ((2, 256, 4, 2, 8, 6), tree(4, 16, 4)),
    "stride": ((1, 256, 4, 1, 8, 8), tree(8, 16, 3, selection_stride=4)),
    "lists_not_stored": ((1, 128, 2, 1, 4, 4), tree(4, 8, 2, store_parents=False)),
    "q_head": ((1, 128, 4, 2, 8, 6), tree(4, 8, 2, scope="q_head")),
    "free_top": ((2, 256, 4, 2, 8, 6), tree(4, 25, 4, selection_stride=2)),
    "one_layer": ((1, 64, 2, 2, 8, 8), tree(4, 64, 16)),
    "frequencies": ((1, 96, 3, 3, 4, 5), tree(2, 4, 2, inv_freq=[0.7, 0.0])),
    "open_next": ((1, 128, 2, 1, 8, 4), tree(4, 12, 4, open_next=True)),
    "no_rotation": ((1, 96, 3, 3, 2, 5), tree(2, 4, 2, rope_base=None, importance="exp_joint")),
    "index": ((2, 256, 4, 2, 8, 6), tree(4, 16, 4, index=(2, 16))),
    "index_free_top": ((1, 256, 4, 2, 8, 6), tree(4, 25, 3, selection_stride=2, index=(1, 32))),
    "index_open_next": (
        (1, 256, 4, 4, 8, 8),
        tree(8, 16, 4, selection_stride=8, open_next=True, store_parents=False, index=(4, 16)),
    ),
}
#: The options of calls on three ranks, of 288 tokens.
ON_THREE: dict[str, dict[str, Any]] = {
    "index": {"max_top_nodes": 12, "index": (2, 16)},
    "index_of_all_heads": {"max_top_nodes": 8, "selection_stride": 4, "index": (1, 16)},
    "index_free_top": {"max_top_nodes": 40, "selection_stride": 2, "index": (2, 32), "rope_base": None},
    "index_open_next": {"max_top_nodes": 21, "open_next": True, "index": (1, 16)},
}


@pytest.fixture(scope="module")
def three():
    """Three processes on the CPU."""
    yield from started(3)


def assert_matches(found: dict[str, Any], dtype: torch.dtype) -> None:
    """Forward and dq bit for bit; dk and dv up to the order of sums."""
    assert found["repeats"]
    assert all(found["in steps"].values()), found
    assert found["equal"]["out"], found
    assert found["equal"]["lse"], found
    assert found["equal"]["dq"], found
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 6e-2}[dtype]
    assert max(found["error"]["dk"], found["error"]["dv"]) < tolerance, found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name, dtype, ranks):
    sizes, options = CASES[name]
    balances = BALANCES if dtype == torch.float32 else BALANCES[:1]
    for balance in balances:
        for size in (2, 4) if dtype == torch.float32 else (4,):
            if sizes[1] % (size * options["compression_rate"] * parts_per_rank(balance)):
                continue
            for found in ranks.run(cp_on_ranks.compare, size, balance, sizes, dtype, options):
                assert_matches(found, dtype)


@pytest.mark.parametrize("name", ON_THREE)
def test_an_index_on_three_ranks(name, three):
    options = {"compression_rate": 4, "top_k": 3} | ON_THREE[name]
    for balance in ("zigzag", "contiguous", "striped"):
        call = (3, balance, (1, 288, 4, 2, 8, 6), torch.float32, options)
        for found in three.run(cp_on_ranks.compare, *call):
            assert_matches(found, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("balance", BALANCES)
def test_gradients_are_added_before_they_are_rounded(balance, dtype, ranks):
    sizes, options = CASES["three_layers"]
    for size in (2, 4):
        for found in ranks.run(cp_on_ranks.sums_of_ranks, size, balance, sizes, dtype, options):
            assert found == {"dk": True, "dv": True}


@st.composite
def problems(draw: st.DrawFn) -> tuple[int, str, cp_on_ranks.Sizes, dict[str, Any]]:
    """Any sizes and options that a group can take."""
    size = draw(st.sampled_from((1, 2, 4)))
    balance = draw(st.sampled_from(BALANCES))
    rate = draw(st.sampled_from((2, 3, 4, 8)))
    top_k = draw(st.integers(1, 4))
    step = size * rate * parts_per_rank(balance)
    heads = draw(st.integers(1, 2))
    sizes = (
        draw(st.integers(1, 2)),
        step * draw(st.integers(1, max(1, 128 // step))),
        heads * draw(st.integers(1, 3)),
        heads,
        2 * draw(st.integers(1, 3)),
        draw(st.integers(1, 5)),
    )
    strides = [s for s in (1, 2, 4, 8) if rate % s == 0]
    options = {
        "compression_rate": rate,
        "max_top_nodes": draw(st.integers(1, 3 * top_k * rate)),
        "top_k": top_k,
        "selection_stride": draw(st.sampled_from(strides)),
        "scope": draw(st.sampled_from(("kv_head", "q_head"))),
        "store_parents": draw(st.booleans()),
    }
    if options["scope"] == "kv_head" and draw(st.booleans()):
        options["index"] = (draw(st.sampled_from((1, heads))), 16)
        options["open_next"] = draw(st.booleans())
    return size, balance, sizes, options


@settings(max_examples=100)
@given(problem=problems())
def test_equals_one_process_for_any_problem(problem, ranks):
    size, balance, sizes, options = problem
    for found in ranks.run(cp_on_ranks.compare, size, balance, sizes, torch.float64, options):
        assert_matches(found, torch.float64)


@pytest.mark.gpu
def test_equals_one_gpu(gpus):
    """Two GPUs, or one with a group of one; the tensor-core kernels and the general ones."""
    size = len(gpus.processes)
    for dtype, width, stride, index in (
        (torch.bfloat16, 128, 16, {}),
        (torch.bfloat16, 64, 1, {}),
        (torch.float32, 8, 4, {}),
        (torch.bfloat16, 128, 4, {"max_top_nodes": 2048}),
        (torch.bfloat16, 128, 16, {"index": (2, 32), "open_next": True}),
        (torch.bfloat16, 128, 4, {"index": (2, 32), "max_top_nodes": 2048}),
        (torch.float32, 8, 1, {"index": (1, 16)}),
        (torch.float32, 8, 2, {"index": (2, 16), "max_top_nodes": 2048}),
    ):
        sizes = (1, 16384, 8, 2, width, width)
        options = {"top_k": 64, "max_top_nodes": 512, "selection_stride": stride} | index
        for balance in BALANCES:
            for found in gpus.run(cp_on_ranks.compare, size, balance, sizes, dtype, options, "cuda"):
                assert found["repeats"]
                assert found["in steps"]["out"], found
                assert found["in steps"]["lse"], found
                assert found["equal"]["out"], found
                assert found["equal"]["lse"], found
                assert max(found["error"].values()) < (0.25 if dtype == torch.bfloat16 else 1e-3), found


@pytest.mark.gpu
@pytest.mark.parametrize("balance", BALANCES)
def test_gradients_are_added_before_they_are_rounded_on_gpus(balance, gpus):
    sizes, options = CASES["three_layers"]
    for dtype in (torch.bfloat16, torch.float32):
        call = (len(gpus.processes), balance, sizes, dtype, options, "cuda")
        for found in gpus.run(cp_on_ranks.sums_of_ranks, *call):
            assert found == {"dk": True, "dv": True}


@pytest.mark.gpu
@pytest.mark.parametrize("balance", BALANCES)
def test_slices_and_layers_on_gpus(balance, gpus):
    """NCCL has other streams than the work: a result that is read too early is wrong here."""
    size = len(gpus.processes)
    for found in gpus.run(cp_on_ranks.round_trip, size, balance, (2, 4096, 3), 1, "cuda"):
        assert found["whole"]
        assert found["gradient"] < 1e-12
    for by_index in (False, True):
        for found in gpus.run(cp_on_ranks.layer, size, balance, "cuda", by_index):
            assert found["out"] < 1e-4, found  # cuBLAS may take other kernels for a part
            assert found["gradients"] < 1e-3, found


@pytest.mark.gpu
@pytest.mark.parametrize("by_index", [False, True])
def test_compiled_code_on_gpus(by_index, gpus):
    for found in gpus.run(cp_on_ranks.compiled, len(gpus.processes), "zigzag", "cuda", by_index):
        assert max(found["errors"]) < 1e-4, found


@pytest.mark.gpu
def test_autocast_on_gpus(gpus):
    size = len(gpus.processes)
    expected = {"dtype": "torch.bfloat16", "equal": True}
    assert gpus.run(cp_on_ranks.autocast, size, "cuda") == [expected] * size


@pytest.mark.gpu
def test_a_fault_raises_on_every_gpu(gpus):
    """The ranks compare their calls through NCCL here, for the group has no backend for the CPU."""
    size = len(gpus.processes)
    faults = {"unknown balance": "balance must be one of"}
    if size > 1:
        faults |= {
            "uneven": "the next length that works is",
            "other batch": "the batch of q must be the same on every rank",
            "other call": "another rank of the group makes another call",
            "bad rank": "rank 1 of the group has refused its arguments|size 3 of k must be K of q",
        }
    for what, message in faults.items():
        for _, found in gpus.refusals(cp_on_ranks.fault, what, size, "cuda"):
            assert re.search(message, found), found


# ---- the slices


@pytest.mark.parametrize("balance", BALANCES)
def test_shards_come_back(balance, ranks):
    for size, shape, dim in ((4, (2, 64, 3), 1), (2, (32, 5), 0), (4, (3, 2, 192), -1), (1, (2, 7), 1)):
        results = ranks.run(cp_on_ranks.round_trip, size, balance, shape, dim)
        assert all(found["whole"] for found in results)
        assert max(found["gradient"] for found in results) < 1e-12
        assert results[0]["part"].shape[dim] * size == shape[dim]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bool, torch.int64, torch.complex64], ids=str)
def test_shards_of_any_dtype_come_back(dtype, ranks):
    for size in (2, 4):
        assert ranks.run(cp_on_ranks.any_dtype, size, dtype) == [True] * 4


def test_who_has_which_tokens(ranks):
    assert ranks.run(cp_on_ranks.share, 4, "contiguous", 8) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert ranks.run(cp_on_ranks.share, 4, "zigzag", 8) == [[0, 7], [1, 6], [2, 5], [3, 4]]
    stripes = [[0, 3, 4, 7, 8, 11, 12, 15], [1, 2, 5, 6, 9, 10, 13, 14]]
    assert ranks.run(cp_on_ranks.share, 2, "striped", 16) == stripes * 2
    short = [[*range(8), *range(24, 32)], [*range(8, 24)]]  # all rows are dense
    assert ranks.run(cp_on_ranks.share, 2, "work", 32) == short * 2


@pytest.mark.parametrize("size", [2, 3, 4, 8, 64])
@pytest.mark.parametrize("tokens", [49_152, 131_072, 524_288, 1_048_576, 6_291_456])
def test_work_is_shared_evenly(size, tokens):
    """Each rank has a head and a tail of what is left, every part is taken once, and no rank has much more than others.

    What a part costs is the finest that can be moved; where ranks have few tokens each, that is what they differ by.
    """
    layers = 1
    while tokens > 8192 * 16 ** (layers - 1):
        layers += 1
    count = 16 * size
    border = [work_before(tokens * i // count, layers) for i in range(count + 1)]
    work = [end - begin for begin, end in itertools.pairwise(border)]
    assert work == sorted(work), "later rows are more work"
    shares = [parts_of(rank, size, "work", tokens) for rank in range(size)]
    assert sorted(itertools.chain(*shares)) == list(range(count))
    assert all(len(parts) == 16 and list(parts) == sorted(parts) for parts in shares)
    for parts in shares:
        assert sum(after - part > 1 for part, after in itertools.pairwise(parts)) <= 1, "a head and a tail"

    def unevenness(balance):
        per_rank = parts_per_rank(balance)
        share = [
            sum(
                work_before(tokens * (part + 1) // (size * per_rank), layers)
                - work_before(tokens * part // (size * per_rank), layers)
                for part in parts_of(rank, size, balance, tokens)
            )
            for rank in range(size)
        ]
        return max(share) * size / border[-1] - 1

    assert unevenness("work") <= 0.035
    assert unevenness("work") <= min(map(unevenness, ("zigzag", "contiguous"))) + 0.002


def test_a_text_that_is_shared_unevenly_equals_one_process(ranks):
    """Rank 0 has more of the tail than of the head, so its two stretches of rows have different lengths."""
    sizes = (1, 16_384, 1, 1, 2, 2)
    options = {"compression_rate": 4, "max_top_nodes": 8, "top_k": 2}
    assert parts_of(0, 2, "work", sizes[1]) == (*range(6), *range(22, 32))
    for found in ranks.run(cp_on_ranks.compare, 2, "work", sizes, torch.float64, options):
        assert_matches(found, torch.float64)


# ---- overlap


def test_what_is_sent_is_under_way_before_it_is_waited_for(ranks):
    """All keys before the first wait; gradients leave after their step and are waited for at the end."""
    for forward, backward in ranks.run(cp_on_ranks.order, 4, 2):
        assert forward == ["gather", *["wait", "attend"] * 2]
        assert backward == ["gather", *["wait", "attend", "exchange"] * 2, "wait"]
    for forward, backward in ranks.run(cp_on_ranks.order, 4, 2, True):
        assert forward == ["gather", "wait", "choose", *["wait", "attend"] * 2]
        assert backward == ["gather", *["wait", "attend", "exchange"] * 2, "wait"]
    for rank, (forward, backward) in enumerate(ranks.run(cp_on_ranks.order, 2, None)):
        inside = ["inside"] if rank % 2 == 0 else []  # the document [0, 9)
        assert forward == ["gather", *inside, "wait", "attend"]
        assert backward == ["gather", *inside, "wait", "attend", "exchange", "wait"]


# ---- the module, the compiler, autocast


@pytest.mark.parametrize("by_index", [False, True])
@pytest.mark.parametrize("balance", BALANCES)
def test_the_module_equals_one_rank(balance, by_index, ranks):
    for found in ranks.run(cp_on_ranks.layer, 4, balance, "cpu", by_index):
        assert found["out"] < 1e-5, found
        assert found["gradients"] < 1e-4, found


@pytest.mark.parametrize(("balance", "by_index"), [("zigzag", False), ("work", False), ("zigzag", True)])
def test_compiles_whole(balance, by_index, ranks):
    for found in ranks.run(cp_on_ranks.compiled, 2, balance, "cpu", by_index):
        assert max(found["errors"]) < 1e-4, found


@pytest.mark.parametrize("index", [{}, {"index": (2, 16)}], ids=["means", "index"])
def test_the_ranks_count_the_products_of_one_process(index, ranks):
    options = {"compression_rate": 4, "max_top_nodes": 20, "top_k": 3, **index}
    for one, many, of_no_document in ranks.run(cp_on_ranks.counted, 4, options):
        assert one == many
        assert of_no_document == 0


def test_autocast(ranks):
    assert ranks.run(cp_on_ranks.autocast, 2) == [{"dtype": "torch.bfloat16", "equal": True}] * 4


# ---- faults


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "other length",
            r"tree_attention_cp: T/n must be the same on every rank, got \[32, 32, 24, 32\] by rank",
        ),
        ("other batch", r"the batch of q must be the same on every rank, got \[1, 2, 1, 1\] by rank"),
        (
            "other options",
            "top_k must be the same on every rank, got (2 on this one and another on rank 3|4 on)",
        ),
        (
            "other balance",
            "balance must be the same on every rank, got '(zigzag' on this|contiguous' on this)",
        ),
        ("other dtype", r"dtype must be the same on every rank, got torch\.float(32|16) on this one"),
        ("other device", "the type of device must be the same on every rank, got '(cpu|meta)' on this one"),
        ("other gradients", r"whether k needs a gradient must be the same on every rank, got \[1, 0, 0, 0\]"),
        (
            "other index",
            r"\(H_i, d, dtype\) of index must be the same on every rank, got (\(1, 16, torch|None on this one)",
        ),
        (
            "other index width",
            r"of index must be the same on every rank, got \(1, (16|32), torch.float32\) on",
        ),
        (
            "uneven",
            r"must be a multiple of 2 \* n \* r = 32, got 4 \* 30 = 120; the next length that works is 128",
        ),
        ("unknown balance", "balance must be one of zigzag, striped, contiguous, work, got 'diagonal'"),
        ("unshard", r"size 1 of x must be the same on every rank, got \[32, 30, 28, 26\] by rank"),
        ("unshard another device", "unshard_sequence: the type of device must be the same on every rank"),
        (
            "shard",
            "must be a multiple of 8 for 4 ranks and balance='zigzag', got 27; the next length that works is 32",
        ),
        ("other call", "another rank of the group makes another call"),
        ("no group", "group must be a ProcessGroup that holds this process, got str"),
    ],
)
def test_a_fault_raises_on_every_rank(what, message, ranks):
    for _, found in ranks.refusals(cp_on_ranks.fault, what):
        assert re.search(message, found), found


@pytest.mark.parametrize(
    ("what", "kind", "message"),
    [
        ("bad rank", "ShapeMismatchError", "tree_attention_cp: size 3 of k must be K of q"),
        ("bad option", "ValueError", "tree_attention_cp: compression_rate must be between 2 and"),
        ("bad steps", "ValueError", "gather_steps must be a divisor of H_kv = 1, got 2"),
        ("no tensor", "TypeError", "q must be a Tensor"),
        (
            "short index key",
            "ShapeMismatchError",
            "size 1 of index_key must be T of q = 32, got (1, 8, 1, 16)",
        ),
        (
            "odd index",
            "ValueError",
            "tree_attention_cp: d, the last size of index_query, must be a multiple of 16 up to 128, got 10",
        ),
        (
            "no pair of index",
            "TypeError",
            "tree_attention_cp: index must be (index_query, index_key), got Tensor",
        ),
        ("index and span", "ValueError", "tree_attention_cp: selection_span must be None beside an index"),
        ("index and scope", "ValueError", "tree_attention_cp: scope must be kv_head beside an index"),
    ],
)
def test_the_mistake_of_one_rank_stops_all(what, kind, message, ranks):
    found = ranks.refusals(cp_on_ranks.fault, what)
    assert found[1][0] == kind
    assert message in found[1][1]
    for rank in (0, 2, 3):
        assert found[rank] == (
            "RuntimeError",
            "tree_attention_cp: rank 1 of the group has refused its arguments; see its error",
        )


def test_a_rank_that_raises_leaves_no_hang():
    """The others get the error of their backend when the time of the group is over."""
    pool = Pool(2, seconds=3)
    try:
        kinds = [kind for kind, _ in pool.refusals(cp_on_ranks.leaves, 0)]
        assert kinds[1] == "ValueError"
        assert kinds[0] != "ValueError"
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("heads", "megabytes", "steps"),
    [(4, 1024, 4), (8, 1024, 4), (6, 1024, 3), (4, 64, 2), (4, 63, 1), (5, 1024, 1), (1, 1024, 1)],
)
def test_steps_divide_the_heads_and_are_large(heads, megabytes, steps):
    assert choose_steps(heads, megabytes << 20, 4) == steps
    assert choose_steps(heads, megabytes << 20, 2) == 1


def test_a_mesh_must_hold_the_process(ranks):
    found = ranks.run(cp_on_ranks.outside, 2)
    assert found[:2] == ["(1, 8, 2)"] * 2
    for said in found[2:]:
        assert "shard_sequence: group must be a mesh that holds this process, got DeviceMesh" in said


def test_a_copy_of_a_layer_has_the_same_ranks(ranks):
    assert ranks.run(cp_on_ranks.copied, 2) == [True] * 4


def test_a_group_is_needed():
    q = torch.zeros(1, 8, 1, 2)
    with pytest.raises(RuntimeError, match="must be initialised"):
        tree_attention_cp(q, q, q, None)
    layer = htree_ops.HTreeAttention(8, 2, cp_group=torch.distributed.ProcessGroup(0, 1))
    with pytest.raises(NotImplementedError, match="a cache is not supported beside cp_group"):
        layer(torch.zeros(1, 4, 8), cache=layer.make_cache(1, 16))
    with pytest.raises(
        ValueError, match="cp_balance must be one of zigzag, striped, contiguous, work, got 'middle'"
    ):
        htree_ops.HTreeAttention(8, 2, cp_balance="middle")
