"""select_blocks and select_blocks_varlen against the reference and their definition (docs/semantics/selection.md §9).

Values are mostly small whole numbers, whose products and sums are exact: then lists and scores must be equal, ties
included. On other values the scores are compared, and the lists must be right for the scores that the op computed.
"""

import itertools
import math
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

import htree_ops
from htree_ops.reference import selection as reference
from tests.support.compare import assert_close_spec
from tests.support.devices import poisoned_memory
from tests.support.instruction_sets import ISAS, run_with
from tests.support.layouts import LAYOUTS
from tests.support.select_blocks_cases import CASES, VARLEN_CASES, SelectBlocksCase, integers

select_blocks = htree_ops.select_blocks
select_blocks_varlen = htree_ops.select_blocks_varlen
INF = math.inf
WIDTHS = (16, 32, 48, 64, 80, 96, 112, 128)


def supported(case: Any, device: str) -> bool:
    return device == "cpu" or case.dtype != torch.float64


def on_devices(cases: list[Any]) -> Any:
    """Every case on every device that takes its dtype."""
    pairs = [(device, case) for device in ("cpu", "cuda") for case in cases if supported(case, device)]
    return pytest.mark.parametrize(
        ("device", "case"), pairs, ids=[f"{device}-{case.id}" for device, case in pairs]
    )


def assert_equal(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def choose(
    scores: dict[int, float], diagonal: int, count: int, local: int, first: int, open_next: bool
) -> list[int]:
    """The definition, in words: a list from the scores of the blocks that there are, the diagonal one among them."""
    forced = [b for b in scores if b > diagonal - local or b < first]
    by_score = sorted((b for b in scores if b not in forced), key=lambda b: (-scores[b], b))
    order = forced + by_score
    if open_next and len(scores) > count:
        best = order[: max(-(-count // 2), len(forced))]
        behind = [b + 1 for b in sorted(best) if b + 1 in scores and b + 1 not in best]
        order = best + behind + [b for b in order if b not in best and b not in behind]
    return sorted(order[:count])


# ---- values


@on_devices(CASES)
def test_equal_to_the_reference(case, device, nan_memory):
    index = case.make_index(device)
    found = select_blocks(*index, case.count, **case.keywords())
    assert_equal(found, reference.select_blocks(*index, case.count, **case.keywords()))
    assert all(x.is_contiguous() for x in found)
    assert found[0].shape == (case.B, len(case.leaders), case.H, case.count)
    assert_equal(found, torch.ops.htree.select_blocks(*case.make_inputs(device)))


@on_devices(VARLEN_CASES)
def test_documents_equal_calls_of_their_own(case, device, nan_memory):
    query, key = case.make_index(device)
    cu_q, cu_k = case.make_offsets(device)
    found = select_blocks_varlen(query, key, cu_q, cu_k, *case.bounds, case.count, **case.keywords())
    own = [torch.full_like(found[0], -1), torch.full_like(found[1], -INF)]
    for queries, keys in case.rows():
        lists = select_blocks(query[None, queries], key[None, keys], case.count, **case.keywords())
        for x, y in zip(own, lists, strict=True):
            x[queries][:: case.selection_stride] = y[0]
    assert_equal(found, tuple(own))
    if case.exact:
        assert_equal(
            found, reference.select_blocks_varlen(query, key, cu_q, cu_k, case.count, **case.keywords())
        )


@st.composite
def problems(draw: st.DrawFn) -> SelectBlocksCase:
    """Small problems of any size, with fewer blocks than entries and with more."""
    stride = draw(st.sampled_from((1, 1, 2, 4, 8, 16)))
    block_size = stride * draw(st.integers(1, 6))
    T = draw(st.integers(0, 150))
    suffix = draw(st.one_of(st.just(T), st.integers(0, T)))
    num_queries = T - (T - suffix) // stride * stride
    count = draw(st.integers(1, 20))
    local = draw(st.integers(1, count))
    return SelectBlocksCase(
        name="drawn",
        dtype=draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16))),
        T=T,
        num_queries=num_queries,
        B=draw(st.integers(1, 2)),
        H=draw(st.integers(1, 3)),
        d=draw(st.sampled_from(WIDTHS)),
        block_size=block_size,
        selection_stride=stride,
        count=count,
        local=local,
        first=draw(st.integers(0, count - local)),
        open_next=draw(st.booleans()),
    )


@given(case=problems(), seed=st.integers(0, 2**20))
def test_any_problem_equals_the_definition(case, seed, device):
    query, key = case.make_index(device, seed)
    with poisoned_memory():
        blocks, scores = select_blocks(query, key, case.count, **case.keywords())
    assert_equal((blocks, scores), reference.select_blocks(query, key, case.count, **case.keywords()))
    products = torch.einsum("bqhd,bkhd->bqhk", query.double(), key.double())
    for b, (row, t), h in itertools.product(range(case.B), enumerate(case.leaders), range(case.H)):
        diagonal = t // case.block_size
        of_query = products[b, row * case.selection_stride, h]
        ours = {
            c: float(of_query[c * case.block_size : (c + 1) * case.block_size].max()) for c in range(diagonal)
        } | {diagonal: INF}
        chosen = choose(ours, diagonal, case.count, case.local, case.first, case.open_next)
        padding = case.count - len(chosen)
        assert blocks[b, row, h].tolist() == chosen + [-1] * padding
        forced = [c > diagonal - case.local or c < case.first for c in chosen]
        shown = [INF if f else ours[c] for f, c in zip(forced, chosen, strict=True)]
        assert scores[b, row, h].tolist() == shown + [-INF] * padding


@pytest.mark.parametrize("d", [16, 32, 64, 128])
@pytest.mark.parametrize("block_size", [4, 16, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_lists_are_right_for_the_scores_of_the_op(dtype, block_size, d, device):
    """Normal values: a list that holds all blocks shows every score, and a short one has the best of these."""
    case = SelectBlocksCase(
        name="normal", dtype=dtype, T=500, count=200, block_size=block_size, d=d, exact=False
    )
    query, key = case.make_index(device)
    blocks, scores = select_blocks(query, key, case.count, block_size=block_size)
    expected = reference.block_scores(query.double(), key.double(), block_size)
    exact = expected.gather(-1, blocks.clamp(min=0, max=expected.shape[-1] - 1).long())
    by_score = (blocks >= 0) & scores.isfinite()
    # A sum of d products in fp32 errs by at most d roundings of the sum of their magnitudes.
    magnitude = reference.block_scores(query.double().abs(), key.double().abs(), block_size)
    bound = d * 2.0**-24 * magnitude.gather(-1, blocks.clamp(min=0, max=expected.shape[-1] - 1).long())
    error = (scores.double() - exact).abs()
    assert bool((error <= bound)[by_score].all())
    dense = torch.full((*blocks.shape[:3], expected.shape[-1] + 1), -INF, device=device)
    dense.scatter_(-1, torch.where(blocks >= 0, blocks, expected.shape[-1]).long(), scores)
    own = (torch.arange(500, device=device) // block_size)[:, None].expand(blocks.shape[:3])
    for count, open_next in ((1, False), (7, False), (8, True)):
        short = select_blocks(query, key, count, block_size=block_size, open_next=open_next)
        assert_equal(short, reference.choose_blocks(dense[..., :-1], own, count, open_next=open_next))


# ---- the theorem of the maximum


@st.composite
def trees(draw: st.DrawFn) -> tuple[int, list[float], int, dict[str, Any], int]:
    """(children of a node, scores of the blocks before the diagonal one, count, options, levels); many are equal."""
    rate = draw(st.sampled_from((2, 3, 4, 16)))
    values = st.sampled_from((-INF, -1.0, 0.0, 0.5, 1.0, 2.0, INF))
    scores = draw(st.lists(values, max_size=draw(st.sampled_from((12, 60, 200)))))
    count = draw(st.integers(1, 12))
    local = draw(st.integers(1, count))
    options = {"local": local, "first": draw(st.integers(0, count - local)), "open_next": draw(st.booleans())}
    return rate, scores, count, options, draw(st.integers(1, 4))


@given(tree=trees())
def test_a_tree_of_maxima_selects_what_a_flat_search_selects(tree):
    """A walk from the top, which sees the children of its list alone, ends with the list of a flat search."""
    rate, leaves, count, options, levels = tree
    layers = [dict(enumerate([*leaves, INF]))]  # the diagonal node is forced, so its score is never read
    for _ in range(levels - 1):
        below = layers[-1]
        nodes = {}
        for block, score in below.items():
            nodes[block // rate] = max(nodes.get(block // rate, -INF), score)
        layers.append(nodes)
    top = layers[-1]
    listed = choose(top, max(top), count, **options)
    for layer in reversed(layers[:-1]):
        candidates = {
            c: layer[c] for node in listed for c in range(node * rate, node * rate + rate) if c in layer
        }
        listed = choose(candidates, max(layer), count, **options)
    assert listed == choose(layers[0], len(leaves), count, **options)
    scores = torch.tensor([[*leaves, INF]], device="cpu")
    flat, _ = reference.choose_blocks(scores, torch.tensor([len(leaves)], device="cpu"), count, **options)
    assert listed + [-1] * (count - len(listed)) == flat[0].tolist()


@given(case=problems(), seed=st.integers(0, 2**20))
def test_listed_blocks_lie_in_listed_nodes(case, seed, device):
    """The op on blocks twice as large is the layer above: it lists the node of every block that is listed below."""
    query, key = case.make_index(device, seed)
    options = case.keywords()
    below, _ = select_blocks(query, key, case.count, **options)
    above, _ = select_blocks(query, key, case.count, **options | {"block_size": 2 * case.block_size})
    nodes = torch.where(below >= 0, below // 2, -1)
    assert bool(((nodes[..., None] == above[..., None, :]).any(-1) | (nodes < 0)).all())


# ---- what a list depends on


@given(case=problems(), seed=st.integers(0, 2**20), data=st.data())
def test_later_tokens_change_nothing(case, seed, data, device):
    case = replace(case, exact=False)
    query, key = case.make_index(device, seed)
    blocks, scores = select_blocks(query, key, case.count, **case.keywords())
    t = data.draw(st.integers(0, max(0, case.T - 1)))
    rows = max(0, (t - case.leaders.start) // case.selection_stride + 1)  # whose leaders stand at or before t
    key[:, t + 1 :] = data.draw(st.sampled_from((torch.nan, INF, 3.0)))
    query[:, max(0, t + 1 - case.leaders.start) :] = torch.nan
    changed = select_blocks(query, key, case.count, **case.keywords())
    assert_equal((blocks[:, :rows], scores[:, :rows]), (changed[0][:, :rows], changed[1][:, :rows]))
    # Keys of the diagonal block and queries that lead nothing are not read at all.
    query, key = case.make_index(device, seed)
    if case.T_q and len(case.leaders):
        key[:, case.leaders[-1] // case.block_size * case.block_size :] = torch.nan
    followers = [i for i in range(case.T_q) if i % case.selection_stride]
    query[:, followers] = torch.nan
    assert_equal((blocks, scores), select_blocks(query, key, case.count, **case.keywords()))


@given(case=problems(), seed=st.integers(0, 2**20), data=st.data())
def test_a_row_has_the_bits_of_a_call_of_its_own(case, seed, data, device):
    """Of one sequence, one head, one query, and no token behind it."""
    case = replace(case, exact=False)
    query, key = case.make_index(device, seed)
    blocks, scores = select_blocks(query, key, case.count, **case.keywords())
    if not blocks.numel():
        return
    b, row, h = (data.draw(st.integers(0, n - 1)) for n in blocks.shape[:3])
    t = case.leaders[row]
    i = row * case.selection_stride
    alone = select_blocks(
        query[b : b + 1, i : i + 1, h : h + 1],
        key[b : b + 1, : t + 1, h : h + 1],
        case.count,
        **case.keywords(),
    )
    assert_equal((blocks[b, row, h], scores[b, row, h]), (alone[0][0, 0, 0], alone[1][0, 0, 0]))


@given(case=problems(), seed=st.integers(0, 2**20))
def test_permutations(case, seed, device):
    """Heads and sequences in another order have their lists in that order; the order of a block's tokens is nothing."""
    case = replace(case, exact=False)
    query, key = case.make_index(device, seed)
    found = select_blocks(query, key, case.count, **case.keywords())
    heads = torch.randperm(case.H, device=device)
    turned = select_blocks(
        query[:, :, heads].flip(0), key[:, :, heads].flip(0), case.count, **case.keywords()
    )
    assert_equal(tuple(x[:, :, heads].flip(0) for x in found), turned)
    whole = case.T // case.block_size * case.block_size
    inside = key[:, :whole].unflatten(1, (-1, case.block_size))[
        :, :, torch.randperm(case.block_size, device=device)
    ]
    assert_equal(
        found,
        select_blocks(
            query, torch.cat([inside.flatten(1, 2), key[:, whole:]], 1), case.count, **case.keywords()
        ),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["plain", "stride4"])
def test_layouts(name, layout, device):
    case = next(case for case in CASES if case.name == name)
    query, key = replace(case, exact=False).make_index(device)
    found = select_blocks(query, key, case.count, **case.keywords())
    make = LAYOUTS[layout]
    assert_equal(found, select_blocks(make(query), make(key), case.count, **case.keywords()))
    heads_first = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key))
    assert_equal(found, select_blocks(*heads_first, case.count, **case.keywords()))
    expanded = select_blocks(
        query[:1].expand(3, -1, -1, -1), key[:1].expand(3, -1, -1, -1), case.count, **case.keywords()
    )
    for ours, theirs in zip(expanded, found, strict=True):
        assert torch.equal(ours, theirs[:1].expand_as(ours))


# ---- special values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", [4, 16])
def test_nan_counts_as_minus_infinity(block_size, dtype, device):
    T = 8 * block_size
    query = torch.ones(1, 1, 1, 16, dtype=dtype, device=device)
    key = torch.zeros(1, T, 1, 16, dtype=dtype, device=device)
    key[:, 0 * block_size : 1 * block_size] = torch.nan  # all of a block
    key[:, 1 * block_size : 2 * block_size] = torch.nan
    key[:, 2 * block_size] = torch.nan  # one token of a block, the others 0
    key[:, 3 * block_size + 1, :, 3] = -INF  # a product of -inf beside zeros
    key[:, 4 * block_size : 5 * block_size, :, 0] = -INF  # all of a block
    key[:, 5 * block_size + 2, :, 5] = INF
    key[:, 6 * block_size, :, 0], key[:, 6 * block_size, :, 1] = INF, -INF  # inf - inf is NaN
    expected = [-INF, -INF, 0.0, 0.0, -INF, INF, 0.0, INF]
    blocks, scores = select_blocks(query, key, 8, block_size=block_size)
    assert blocks.flatten().tolist() == list(range(8))
    assert scores.flatten().tolist() == expected
    for count, chosen in (
        (2, [5, 7]),
        (5, [2, 3, 5, 6, 7]),
        (6, [0, 2, 3, 5, 6, 7]),
        (7, [0, 1, 2, 3, 5, 6, 7]),
    ):
        assert select_blocks(query, key, count, block_size=block_size)[0].flatten().tolist() == chosen
    query[:] = torch.nan
    blocks, scores = select_blocks(query, key, 3, block_size=block_size)
    assert blocks.flatten().tolist() == [0, 1, 7]
    assert scores.flatten().tolist() == [-INF, -INF, INF]


def test_zeros_of_either_sign_are_equal(device):
    query = torch.full((1, 1, 1, 16), -1.0, device=device)
    key = torch.zeros(1, 20, 1, 16, device=device)
    key[:, 8:12] = -0.0
    blocks, scores = select_blocks(query, key, 3, block_size=4)
    assert blocks.flatten().tolist() == [0, 1, 4]
    assert not scores.signbit().any()


def test_equal_scores_go_to_the_lower_block(device):
    index = torch.ones(1, 400, 1, 16, device=device)
    blocks, scores = select_blocks(index[:, -1:], index, 6, block_size=2, local=2, first=1)
    assert blocks.flatten().tolist() == [0, 1, 2, 3, 198, 199]
    assert scores.flatten().tolist() == [INF, 16, 16, 16, INF, INF]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits_on_every_run(dtype, device):
    case = SelectBlocksCase(name="runs", dtype=dtype, T=3000, count=20, block_size=16, d=32, exact=False)
    index = case.make_index(device)
    assert_equal(select_blocks(*index, case.count), select_blocks(*index, case.count))


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set(isa):
    script = """
import torch
from htree_ops import select_blocks
from htree_ops.reference import selection as reference
from tests.support.select_blocks_cases import CASES
for case in CASES:
    index = case.make_index("cpu", 3)
    found = select_blocks(*index, case.count, **case.keywords())
    for a, b in zip(found, reference.select_blocks(*index, case.count, **case.keywords())):
        assert torch.equal(a, b), case.id
"""
    found = run_with(isa, script)
    assert found.returncode == 0, found.stderr


def test_gradients_are_refused(device):
    query, key = (x.requires_grad_() for x in CASES[0].make_index(device))
    blocks, scores = select_blocks(query, key, 4, block_size=4)
    assert not blocks.requires_grad
    assert scores.requires_grad
    with pytest.raises(RuntimeError, match="select_blocks is not implemented: the op has no gradient"):
        scores[:, -1].sum().backward()
    with torch.no_grad():
        assert not select_blocks(query, key, 4, block_size=4)[1].requires_grad


def test_scores_are_close_for_float64():
    case = SelectBlocksCase(name="double", dtype=torch.float64, T=300, count=100, d=48, exact=False)
    query, key = case.make_index("cpu")
    blocks, scores = select_blocks(query, key, case.count, block_size=4)
    expected = reference.select_blocks(query, key, case.count, block_size=4)
    assert torch.equal(blocks, expected[0])
    assert_close_spec(scores, expected[1], 0.0, 48 * 2.0**-53 * 200.0, dtype=torch.float64)


# ---- other scores, as inputs of the same op


def means_of_blocks(query: Tensor, key: Tensor, count: int, block_size: int) -> tuple[Tensor, Tensor]:
    """MoBA's gate: the product with the mean of a block's keys."""
    means = key.unflatten(1, (-1, block_size)).mean(2)
    return select_blocks(query, means.repeat_interleave(block_size, 1), count, block_size=block_size)


def bounds_of_blocks(query: Tensor, key: Tensor, count: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Quest's gate: the largest product that a key between the channel minima and maxima of a block could have."""
    blocks = key.unflatten(1, (-1, block_size))
    bounds = torch.cat([blocks.amax(2), blocks.amin(2)], -1).repeat_interleave(block_size, 1)
    signs = torch.cat([query.clamp(min=0), query.clamp(max=0)], -1)
    return select_blocks(signs, bounds, count, block_size=block_size)


@pytest.mark.parametrize("gate", [means_of_blocks, bounds_of_blocks], ids=lambda gate: gate.__name__)
def test_gates_of_other_methods(gate, device):
    query, key = (integers((2, 96, 2, 32), torch.float32, device, seed, largest=4) for seed in (1, 2))
    blocks, _ = gate(query, key, 4, 8)
    parts = key.unflatten(1, (-1, 8))
    if gate is means_of_blocks:
        scores = torch.einsum("bthd,bnhd->bthn", query, parts.mean(2))
    else:
        corners = torch.stack([parts.amax(2), parts.amin(2)])
        scores = (query[:, :, None] * corners[:, :, None]).amax(0).sum(-1).transpose(2, 3)
    diagonal = (torch.arange(96, device=device) // 8)[:, None].expand(scores.shape[:3])
    assert torch.equal(blocks, reference.choose_blocks(scores, diagonal, 4)[0])


def test_larger_integers_are_exact(device):
    """Sums of 128 products of values up to 8: beyond what an accumulation in 16 bits could hold."""
    query = integers((1, 400, 2, 128), torch.bfloat16, device, 1, largest=8)
    key = integers((1, 400, 2, 128), torch.bfloat16, device, 2, largest=8)
    assert_equal(select_blocks(query, key, 9), reference.select_blocks(query, key, 9))
