"""The decode kernel of the tree cache: which calls take it, and that nothing shows how many blocks share a row."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from htree_ops.ops.tree_cache.functions import cache_layers, tree_cache_attention
from tests.support.cases import case_id
from tests.support.devices import EVEN_CLUSTERS, H100_CLUSTERS
from tests.support.graphs import capture, kernels_of
from tests.support.tree_attention_checks import assert_epsilon_optimal, assert_lists
from tests.support.tree_cache_cases import DECODE_CASES, TreeCacheCase

try:
    from htree_ops import _host
except ImportError:  # built for one Python version; the package works without it
    _host = None

ops = torch.ops.htree
SHARED_BYTES = 227 * 1024
#: (a, b) of docs/semantics/tree_attention.md §1.11: |out - ref| <= a max|v| + b |ref|.
TOLERANCE = {torch.float16: (1e-3, 1e-3), torch.bfloat16: (8e-3, 8e-3)}
#: Scores err by 2^-16 of sum |q| |k|, which is up to some 20 here, and so do importances, relatively.
LIST_DELTA = 1e-3


@pytest.mark.skipif(_host is None, reason="_host is not built for this Python")
@pytest.mark.parametrize(
    ("rows", "options", "cluster"),
    [
        (4, {}, 16),
        (8, {}, 16),
        (8, {"clusters": H100_CLUSTERS}, 8),  # of 16 blocks seven clusters run at once
        (16, {"clusters": H100_CLUSTERS, "slots": 256}, 4),
        (16, {"slots": 256}, 8),
        (16, {}, 8),
        (32, {}, 8),
        (256, {}, 8),
        (256, {"slots": 128}, 2),
        (4, {"slots": 128}, 16),
        (256, {"slots": 64}, 2),  # the rings of twelve warps leave no space for all 16 shares in one block
        (256, {"slots": 64, "dim": 64}, 1),
        (1 << 20, {"slots": 512}, 8),
        (4, {"clusters": [*EVEN_CLUSTERS[:16], 0]}, 8),
        (256, {"wanted_cluster": 16}, 16),
        (256, {"spans": True}, 8),
        (256, {"group": 16}, 8),
        (4, {"slots": 513}, 16),
        (4, {"slots": 1024}, 16),
        (4, {"slots": 1025}, 0),
        (4, {"group": 17}, 0),
        (4, {"group": 9, "spans": True}, 0),
        (4, {"dim": 96}, 0),
        (0, {}, 0),
    ],
    ids=str,
)
def test_blocks_of_a_row(rows, options, cluster):
    sizes = {"group": 8, "dim": 128, "clusters": EVEN_CLUSTERS} | options
    found, stages, shared_bytes, *_ = _host.tree_decode_config(rows, **sizes)
    assert found == cluster
    assert stages == 0 or 2 <= stages <= 4
    assert shared_bytes <= SHARED_BYTES - 8 * 1024


@pytest.mark.skipif(_host is None, reason="_host is not built for this Python")
@pytest.mark.parametrize(
    ("rows", "options", "last", "cluster"),
    [
        (16, {}, 1, 16),  # after the fifteen clusters of eight that run at once
        (22, {}, 7, 16),
        (23, {}, 0, 0),  # more clusters of 16 than run at once
        (30, {}, 0, 0),  # as many as run twice
        (32, {}, 2, 16),
        (256, {}, 1, 16),
        (32, {"clusters": EVEN_CLUSTERS}, 0, 0),
        (15, {}, 0, 0),
        (32, {"slots": 256}, 2, 16),
        (45, {"slots": 256}, 15, 8),
        (132, {"slots": 8, "dim": 64}, 0, 0),
        (140, {"slots": 8, "dim": 64}, 8, 8),
        (140, {"slots": 8, "dim": 64, "clusters": [0] * 17}, 0, 0),
        (32, {"wanted_cluster": 8}, 0, 0),
        (128, {"clusters": [*H100_CLUSTERS[:8], 0, *H100_CLUSTERS[9:]]}, 0, 0),  # one is not known
        (32, {"slots": 1024}, 0, 0),  # all have 16
        (32, {"spans": True}, 2, 16),
    ],
    ids=str,
)
def test_last_rows_of_their_own(rows, options, last, cluster):
    sizes = {"group": 8, "dim": 128, "clusters": H100_CLUSTERS} | options
    assert tuple(_host.tree_decode_config(rows, **sizes)[3:]) == (last, cluster)


def named(name: str) -> TreeCacheCase:
    return next(case for case in DECODE_CASES if case.name == name)


def run(
    case: TreeCacheCase, choice: str, monkeypatch: pytest.MonkeyPatch, device: str = "cuda"
) -> tuple[torch.Tensor, ...]:
    """The same numbers on every device: a generator draws others on another."""
    monkeypatch.setenv("HTREE_TREE_DECODE", choice)
    inputs = (None if x is None else x.to(device) for x in case.make_inputs("cpu"))
    return tree_cache_attention(*inputs, **case.options())


@pytest.mark.gpu
@pytest.mark.parametrize("case", DECODE_CASES, ids=case_id)
def test_rows_near_those_of_the_cpu(case, monkeypatch):
    out, lse, lists, list_pos = run(case, "auto", monkeypatch)
    expected = run(case, "auto", monkeypatch, "cpu")
    a, b = TOLERANCE[case.dtype]
    torch.testing.assert_close(out.float().cpu(), expected[0].float(), atol=4 * a, rtol=b, equal_nan=True)
    torch.testing.assert_close(lse.cpu(), expected[1], atol=2e-4, rtol=1e-4, equal_nan=True)
    assert torch.equal(list_pos.cpu(), expected[3])
    assert_near_ties(case, lists.cpu(), list_pos.cpu())


def assert_near_ties(case: TreeCacheCase, lists: torch.Tensor, list_pos: torch.Tensor) -> None:
    """The stored lists of each leader open the most important nodes, but for ties within rounding (§1.11)."""
    q = case.last_queries("cpu")
    k, v = case.tokens("cpu")
    options = case.options()
    options["top_k_per_layer"] = options.pop("top_k")
    for name in ("page_size", "selection_stride"):
        del options[name]
    judged = 0
    for b, (length, count) in enumerate(zip(case.lengths, case.queries, strict=True)):
        first, row = sum(case.lengths[:b]), sum(case.queries[:b])
        for slot, t in enumerate(list_pos[b].tolist()):
            if t < length - count:  # none, or a leader whose query is not in this call
                continue
            depth = cache_layers(t + 1, case.compression_rate, case.max_top_nodes)
            sequences = (x[None, first : first + t + 1] for x in (k, v))
            query = q[row + t - (length - count)][None, None]
            parents = [lists[b, slot, layer][None, None] for layer in range(depth)]
            assert_lists(parents, 1, t + 1, options)
            assert_epsilon_optimal(query, *sequences, parents, options, LIST_DELTA)
            judged += 1
    assert judged or not lists.numel()


@pytest.mark.gpu
@pytest.mark.parametrize("case", DECODE_CASES, ids=case_id)
def test_the_number_of_blocks_does_not_show(case, monkeypatch):
    one = run(case, "1", monkeypatch)
    for choice in ("auto", "2", "4", "8", "16"):
        for ours, theirs in zip(run(case, choice, monkeypatch), one, strict=True):
            assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


@pytest.mark.gpu
@pytest.mark.parametrize("case", DECODE_CASES, ids=case_id)
def test_rows_near_those_of_the_general_kernels(case, monkeypatch):
    out, lse, *_ = run(case, "auto", monkeypatch)
    general = run(case, "general", monkeypatch)
    a, b = TOLERANCE[case.dtype]
    torch.testing.assert_close(out, general[0], atol=4 * a, rtol=b, equal_nan=True)
    torch.testing.assert_close(lse, general[1], atol=2e-4, rtol=1e-4, equal_nan=True)


@pytest.mark.gpu
def test_a_row_does_not_depend_on_the_others():
    """Nor on the capacity that its pages have, nor on how many rows there are."""
    case = replace(DECODE_CASES[0], lengths=(700, 45, 333), queries=(2, 1, 3))
    q, k_pool, v_pool, table, lengths, cu, *_ = case.make_inputs("cuda")
    together = tree_cache_attention(q, k_pool, v_pool, table, lengths, cu, **case.options())
    for sequence, (first, count) in enumerate(((0, 2), (2, 1), (3, 3))):
        here = slice(sequence, sequence + 1)
        rows = slice(first, first + count)
        alone = tree_cache_attention(
            q[rows],
            k_pool,
            v_pool,
            table[here],
            lengths[here],
            torch.tensor([0, count], dtype=torch.int32, device="cuda"),
            **case.options(),
        )
        assert torch.equal(alone[0], together[0][rows])
        assert torch.equal(alone[1], together[1][rows])


@pytest.mark.gpu
def test_values_of_opened_nodes_do_not_reach_a_row():
    """A NaN in the value of a node that is opened meets no weight, not even 0; its tokens' values are what counts."""
    case = DECODE_CASES[0]
    q, k_pool, v_pool, table, lengths, cu, *_ = case.make_inputs("cuda")
    _, _, lists, _ = tree_cache_attention(
        q, k_pool, v_pool, table, lengths, cu, *ring_of(case), **case.options()
    )
    plain, *_ = tree_cache_attention(q, k_pool, v_pool, table, lengths, cu, **case.options())
    opened = lists[0, 0, 0, 0]  # the parents at the tokens of the first sequence's last row
    for node in opened[opened >= 0].tolist():
        page = int(table[0, ((node + 1) * 16 - 1) // case.page_size])
        v_pool[page, 0, case.page_size + node % (case.page_size // 16)] = torch.nan
    again, *_ = tree_cache_attention(q, k_pool, v_pool, table, lengths, cu, **case.options())
    last = case.queries[0] - 1
    assert torch.equal(again[last], plain[last])


def ring_of(case: TreeCacheCase) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (len(case.lengths), 1)
    lists = torch.full((*shape, case.layers, case.kv_heads, case.top_k), -1, dtype=torch.int32, device="cuda")
    return lists, torch.full(shape, -1, dtype=torch.int32, device="cuda")


@pytest.mark.gpu
def test_a_switch_that_is_none(monkeypatch):
    with pytest.raises(ValueError, match="HTREE_TREE_DECODE is auto, general"):
        run(DECODE_CASES[0], "3", monkeypatch)


@pytest.mark.gpu
def test_last_rows_of_each_chunk(monkeypatch):
    """Span scores bound the rows of a chunk; each chunk has last rows, on 132 multiprocessors 4 and then 1."""
    case = replace(
        named("three layers, span 4"), lengths=(1200,), queries=(1100,), top_k=512, max_top_nodes=8192
    )
    for ours, theirs in zip(run(case, "auto", monkeypatch), run(case, "8", monkeypatch), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["many rows", "many rows, stride, span 2, 128"])
def test_last_rows_in_a_graph(name):
    """What comes next in the stream waits for both launches, in a graph as well. Rows without lists are NaN."""
    case = named(name)
    inputs = case.make_inputs("cuda")
    table = ops.rope_cache(case.top_k * 16, case.key_dim, 10000.0, device=torch.device("cuda"))
    expected, *_ = tree_cache_attention(*inputs, rope_table=table, **case.options())

    def step():
        out, *_ = tree_cache_attention(*inputs, rope_table=table, **case.options())
        result = out.clone()
        out.zero_()
        return result

    graph, results = capture(lambda: [step() for _ in range(10)])
    for _ in range(10):
        for result in results:
            result.zero_()
        graph.replay()
        assert all(torch.equal(result.nan_to_num(), expected.nan_to_num()) for result in results)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "launches"), [("three layers", 1), ("many rows", 2), ("many rows, k = 500", 2)]
)
def test_a_step_is_one_launch_on_hopper(name, launches):
    """And a second one for the last rows, where larger clusters take them at once, as on 132 multiprocessors."""
    case = named(name)
    table = ops.rope_cache(case.top_k * 16, case.key_dim, 10000.0, device=torch.device("cuda"))
    inputs = case.make_inputs("cuda")
    call = partial(tree_cache_attention, *inputs, rope_table=table, **case.options())
    call()
    torch.cuda.synchronize()
    names = [name for name in kernels_of(call) if "kernel" in name]
    hopper = torch.cuda.get_device_capability() == (9, 0)
    known = torch.cuda.get_device_properties().multi_processor_count == 132
    assert (len(names) in ({launches} if known else {1, launches})) == hopper
    assert any("cache_decode_kernel" in name for name in names) == hopper
