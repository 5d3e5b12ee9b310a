"""The IO-only variants against their formulas: integers exactly, scores to rounding (docs/semantics §2.2, §2.3)."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from tree_attention_helpers import on, place, refused, stages_of, stretch, wide

import htree_ops.reference.tree_attention as ref
from htree_ops import parallel_io_only as io
from htree_ops.errors import ShapeMismatchError, UnsupportedDtypeError
from tests.support.cases import case_id, normal
from tests.support.compare import assert_close_spec
from tests.support.tree_attention_cases import SHAPES, TreeAttentionCase
from tests.support.tree_attention_problem import LAYOUTS

ops = torch.ops.htree

FILLED = [
    shape.with_dtype(dtype)
    for shape in SHAPES
    if shape.T and shape.B
    for dtype in (torch.float32, torch.bfloat16, torch.float64)
]
by_case = pytest.mark.parametrize("case", FILLED, ids=case_id)


def test_the_module_comes_with_the_package():
    import htree_ops

    assert htree_ops.parallel_io_only.htree_forward_io_only is io.htree_forward_io_only


def test_the_generator_is_the_documented_one():
    assert [ref.lcg(x) for x in (0, 1, 2)] == [12345, 1103527590, 59559187]
    assert ref.lcg(2**32 + 5) == ref.lcg(5)
    x = torch.tensor([0, 7, 2**31 - 1, 2**32 - 1, 2**32 + 5])
    from htree_ops.reference.tree_attention.io_only import lcg_of

    assert lcg_of(x).tolist() == [ref.lcg(int(v)) for v in x]


@by_case
def test_scores(case, device):
    q, stages, (cos, sin) = stages_of(case)
    for stage in stages:
        parents = stretch(case, stage.parents)
        placed_q, layer_k, _ = place(case, device, stage.layer_k, stage.layer_v, stage.layer)
        inputs = (placed_q, layer_k, *on(device, parents, cos, sin))
        args = (stage.layer, case.r, case.scale, case.t0)
        if refused(case, device, lambda: ops.io_compute_scores(*inputs, *args)):  # noqa: B023
            return
        scores, num = io.io_compute_scores(*inputs, *args)
        full, full_num = ops.compute_scores(*inputs, *args)
        wanted, wanted_num = ref.io_compute_scores(*wide(q, stage.layer_k), parents, *wide(cos, sin), *args)
        assert torch.equal(num.cpu(), wanted_num)
        assert torch.equal(num, full_num)
        assert torch.equal((scores == -torch.inf).cpu(), wanted == -torch.inf)
        assert torch.equal(scores == -torch.inf, full == -torch.inf)
        # base is one rounding to fp32 of a number below 5; the sums add K and Q below a few hundred
        assert_close_spec(scores, wanted, rtol=1e-6, atol=2e-6, dtype=case.state_dtype, name="scores")


def positions_inputs(B, T, S, capacity, G, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(B, T, S, capacity, G, generator=generator)
    num = torch.randint(0, capacity + 1, (B, T, S), generator=generator, dtype=torch.int32)
    return on(device, scores, num)


@pytest.mark.parametrize("select", ["lcg", "stratified"])
@pytest.mark.parametrize(
    ("B", "T", "S", "capacity", "G", "top_k"),
    [
        (1, 5, 1, 8, 1, 2),
        (2, 7, 3, 60, 2, 16),
        (1, 4, 2, 700, 3, 64),
        (1, 3, 1, 8192, 8, 512),
        (2, 2, 1, 5, 16, 9),
    ],
)
def test_positions(select, B, T, S, capacity, G, top_k, device):
    scores, num = positions_inputs(B, T, S, capacity, G, device)
    for t0 in (0, 1_000_003):
        got = io.io_select_topk(scores, num, top_k, 1, select, t0)
        assert got.dtype == torch.int32
        assert torch.equal(got.cpu(), ref.io_select_topk(scores.cpu(), num.cpu(), top_k, 1, select, t0))
    assert (io.io_select_topk(scores, num, top_k, 0, select) == -1).all()


def test_positions_beyond_the_largest_token_are_refused(device):
    scores, num = positions_inputs(1, 3, 1, 8, 1, device)
    assert io.io_select_topk(scores, num, 2, 1, "lcg", 2**31 - 4).shape == (1, 3, 1, 2)
    for t0 in (2**31 - 3, 2**31, 2**63 - 1):
        for where in (device, "meta"):
            with pytest.raises(ValueError, match=r"io_select_topk: t0 \+ T_q must be below 2\^31, got t0 = "):
                ops.io_select_topk(scores.to(where), num.to(where), 2, 1, "lcg", t0)


@hypothesis.given(
    n=st.integers(1, 9000),
    top_k=st.integers(1, 600),
    batch=st.integers(0, 2),
    token=st.integers(0, 1 << 20),
    head=st.integers(0, 2),
)
def test_stratified_positions_are_distinct_and_ascend(n, top_k, batch, token, head):
    num = torch.full((batch + 1, 1, head + 1), n, dtype=torch.int32)
    scores = torch.zeros(batch + 1, 1, head + 1, n, 1)
    row = ops.io_select_topk(scores, num, top_k, 1, "stratified", token)[batch, 0, head]
    count = min(n, top_k)
    kept = row[:count].tolist()
    assert kept == sorted(set(kept))
    assert kept[0] >= 0
    assert kept[-1] == n - 1
    assert (row[count:] == -1).all()
    hashed = ops.io_select_topk(scores, num, top_k, 1, "lcg", token)[batch, 0, head].tolist()
    seed = 7 * token + 13 * head + 31 * batch
    assert hashed[: count - 1] == [ref.lcg(j + seed) % n for j in range(count - 1)]
    assert hashed[count - 1] == n - 1


def test_how_many_positions_are_distinct():
    """The counts that §2.3 states: hashed positions repeat where n is a little above k."""
    counts = {}
    for n in (8192, 7500, 513, 600):
        num = torch.full((1, 64, 1), n, dtype=torch.int32)
        rows = ops.io_select_topk(torch.zeros(1, 64, 1, n, 1), num, 512)
        counts[n] = {len(set(row.tolist())) for row in rows[0, :, 0]}
    assert counts[8192] == {512}
    assert counts[7500] == {512}
    assert min(counts[513]) >= 455
    assert max(counts[513]) <= 467
    assert min(counts[600]) >= 175
    assert max(counts[600]) <= 190


@pytest.mark.parametrize(("capacity", "G"), [(7, 1), (300, 2), (700, 5), (8192, 8)])
def test_every_score_is_read(capacity, G, device):
    """With the mask of all bits, a change of any single score changes the positions."""
    scores, num = positions_inputs(1, 1, 1, capacity, G, device)
    num.fill_(capacity)
    before = ops.io_select_topk(scores, num, 4, 1, "lcg", 0, -1)
    generator = torch.Generator().manual_seed(1)
    picks = {0, capacity * G - 1, *torch.randint(0, capacity * G, (20,), generator=generator).tolist()}
    for flat in picks:
        changed = scores.clone()
        bits = changed.view(torch.int32).view(-1)
        bits[flat] ^= 1 << 20
        assert not torch.equal(before, ops.io_select_topk(changed, num, 4, 1, "lcg", 0, -1)), flat


def test_next_parents(device):
    generator = torch.Generator().manual_seed(3)
    for width, top_k in ((3, 2), (20, 33), (512, 512)):
        parents = torch.randint(0, 50, (2, 3, 2, width), generator=generator).int().sort(-1).values
        positions = torch.randint(0, width * 4, (2, 3, 2, top_k), generator=generator).int()
        positions[..., top_k // 2 + 1 :] = -1
        placed = on(device, parents, positions)
        assert torch.equal(io.io_compute_next_parents(*placed, 4).cpu(), positions)
        mapped = io.io_compute_next_parents(*placed, 4, map_positions=True)
        assert torch.equal(mapped.cpu(), ref.compute_next_parents(parents, positions, 4))


def test_accumulate_is_the_full_op(device):
    case = next(shape for shape in SHAPES if shape.name == "group_of_3")
    q, stages, (cos, sin) = stages_of(case)
    stage = stages[-1]
    inputs = on(device, q, stage.layer_k, stage.parents, cos, sin)
    scores, num = ops.compute_scores(*inputs, stage.layer, case.r, case.scale, case.t0)
    args = (*on(device, stage.layer_v, stage.parents), scores, num, stage.layer, case.r, case.t0)
    for ours, theirs in zip(io.io_accumulate_non_topk(*args), ops.accumulate_non_topk(*args), strict=True):
        assert torch.equal(ours, theirs)


@by_case
@pytest.mark.parametrize(("select", "map_positions"), [("lcg", False), ("stratified", True)])
def test_the_whole_pipeline(case, select, map_positions, device):
    if case.dtype == torch.float64 and device == "cuda":
        return
    q, k, v = case.make_qkv("cpu")
    options = (case.r, case.M, case.top_k, case.scale, select, map_positions)
    got = io.htree_forward_io_only(*on(device, q, k, v), *options)
    wanted = ref.io_attention_forward(*wide(q, k, v), *options)
    assert got.shape == (case.B, case.T_q, case.H, case.V)
    assert got.dtype == case.dtype
    # The tree is rounded in the storage dtype, which shifts scores by 0.01 of the rounding of K.
    unit = max(torch.finfo(case.dtype).eps, 2.0**-20)
    if case.dtype != torch.bfloat16:
        assert_close_spec(got, wanted, rtol=1e-4, atol=64 * unit, name="out")
    assert got.isfinite().all()


def strided(x: torch.Tensor) -> torch.Tensor:
    """x as every other element of every other row of a larger tensor."""
    larger = x.new_zeros(*x.shape[:-2], 2 * x.shape[-2], 2 * x.shape[-1])
    larger[..., ::2, ::2] = x
    return larger[..., ::2, ::2]


@pytest.mark.parametrize("layout", ["contiguous", "head_major", "misaligned", "non_unit_last_stride"])
@pytest.mark.parametrize("select", ["lcg", "stratified"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_integers_agree_bit_for_bit(dtype, select, layout, device):
    """In each of three layers the CUDA kernels return what the CPU returns, and the CPU what the formulas say."""
    case = TreeAttentionCase(
        name="three_layers", dtype=dtype, B=2, T=1100, H=8, H_kv=2, K=32, V=16, r=16, top_k=4, M=32
    )
    q, k, v = case.make_qkv("cpu")
    table = case.make_table("cpu")
    layers = ref.build_layers(k, v, case.r, case.M)
    parents = ref.top_parents(case.B, case.T, 2, case.top_k, len(layers), case.r)
    for layer in reversed(range(len(layers))):
        keys, values = (x.to(dtype) for x in layers[layer][:2])
        found = {}
        for where in dict.fromkeys(("cpu", device)):
            placed_q, placed_k, placed_v = LAYOUTS[layout](*on(where, q, keys, values))
            lists, cos, sin = (strided(x) for x in on(where, parents, *table))
            scores, num = ops.io_compute_scores(placed_q, placed_k, lists, cos, sin, layer, case.r)
            positions = ops.io_select_topk(strided(scores), num, case.top_k, layer, select)
            mapped, copied = (
                ops.io_compute_next_parents(lists, strided(positions), case.r, mapped)
                for mapped in (True, False)
            )
            sums = ops.io_accumulate_non_topk(placed_v, lists, scores, num, layer, case.r)
            same = ops.accumulate_non_topk(placed_v, lists, scores, num, layer, case.r)
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(sums, same, strict=True))
            integers = (num, positions, mapped, copied, scores == -torch.inf)
            found[where] = [x.cpu() for x in integers], [x.cpu() for x in (scores, *sums)]
        wanted = ref.io_select_topk(found["cpu"][1][0], found["cpu"][0][0], case.top_k, layer, select)
        assert torch.equal(found["cpu"][0][1], wanted)
        for ours, theirs in zip(found[device][0], found["cpu"][0], strict=True):
            assert torch.equal(ours, theirs)
        for ours, theirs in zip(found[device][1], found["cpu"][1], strict=True):
            assert_close_spec(ours, theirs, rtol=1e-5, atol=2e-5)
        parents = found["cpu"][0][2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hashed_scores_agree_bit_for_bit(dtype, device):
    """With zeros everywhere a score is only the hash of node, head and token, so no rounding may differ."""
    lists = torch.arange(40, dtype=torch.int32).expand(2, 9, 3, 40)
    t0, r, width = (1 << 20) + 7, 8, 4
    q, keys = torch.zeros(2, 9, 3, width, dtype=dtype), torch.zeros(2, t0 + 9, 3, width, dtype=dtype)
    table = torch.zeros(lists.shape[-1] * r, width // 2)
    args = (0, r, None, t0)
    scores, num = ops.io_compute_scores(*on(device, q, keys, lists, table, table), *args)
    wanted, wanted_num = ref.io_compute_scores(q, keys, lists, table, table, *args)
    assert torch.equal(num.cpu(), wanted_num)
    assert torch.equal(scores.cpu().view(torch.int32), wanted.float().view(torch.int32))
    assert int(num.min()) > 300


def test_long_sequences_are_worked_on_in_pieces(device):
    """A piece, 1 GiB of scores, has 4096 queries here; the results show no seam."""
    q, k, v = (normal((1, 8200, h, 8), torch.float32, device, seed) for seed, h in enumerate((8, 1, 1)))
    options = (16, 512, 512)
    whole = ops.io_attention_forward(q, k, v, *options)
    tail = ops.io_attention_forward(q[:, -5:], k, v, *options)
    assert torch.equal(whole[:, -5:], tail)


def test_bad_input():
    q = torch.randn(1, 9, 2, 8)
    with pytest.raises(ShapeMismatchError):
        io.htree_forward_io_only(q, q[0], q)
    with pytest.raises(UnsupportedDtypeError):
        io.htree_forward_io_only(q.int(), q.int(), q.int())
    with pytest.raises(ValueError, match="select must be"):
        io.htree_forward_io_only(q, q, q, 4, 8, 2, None, "random")
    with pytest.raises(ValueError, match="max_top_nodes"):
        io.htree_forward_io_only(q, q, q, 4, 9, 2)
    scores, num = positions_inputs(1, 2, 1, 8, 1, "cpu")
    with pytest.raises(ValueError, match="layer must be at least 0"):
        io.io_select_topk(scores, num, 2, -1)
    with pytest.raises(ValueError, match="t0 must be at least 0"):
        io.io_select_topk(scores, num, 2, 1, "lcg", -3)
    with pytest.raises(ValueError, match="top_k"):
        io.io_select_topk(scores, num, 0)
    out = io.htree_forward_io_only(q.requires_grad_(), q, q, 4, 8, 2)
    with pytest.raises(RuntimeError, match="not implemented"):
        out.sum().backward()
