"""Tree attention whose nodes an index chooses (docs/semantics/tree_attention.md §1.17)."""

from dataclasses import dataclass, replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.library import opcheck

import htree_ops
from htree_ops import tree_attention
from htree_ops.errors import ShapeMismatchError, UnsupportedDtypeError
from htree_ops.reference import tree_attention as reference
from tests.support.cases import normal
from tests.support.compilers import BACKENDS
from tests.support.devices import poisoned_memory
from tests.support.tree_attention_cases import TreeAttentionCase

OPS = torch.ops.htree
GRADIENTS = ("out", "lse", "dq", "dk", "dv")
TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
seeds = st.integers(0, 2**20)


@dataclass(frozen=True, kw_only=True)
class IndexCase(TreeAttentionCase):
    """A call of tree_attention with an index; ``levels``: its numbers are whole and small, so that scores tie."""

    name: str = "index"
    dtype: torch.dtype = torch.float32
    T: int = 60
    H: int = 4
    H_kv: int = 2
    V: int = 6
    M: int = 8
    H_i: int = 2
    d: int = 16
    levels: int = 0

    def make_index(self, device: str, seed: int = 0) -> tuple[Tensor, Tensor]:
        shapes = ((self.B, rows, self.H_i, self.d) for rows in (self.T_q, self.T))
        index = [normal(shape, self.dtype, device, 7 * seed + 1003 + i) for i, shape in enumerate(shapes)]
        if self.levels:
            index = [(x * self.levels).round().clamp(-self.levels, self.levels) for x in index]
        return index[0], index[1]

    def reference_lists(self, index: tuple[Tensor, Tensor]) -> list[Tensor]:
        return reference.index_parents(
            *index,
            self.H_kv,
            compression_rate=self.r,
            max_top_nodes=self.M,
            top_k_per_layer=self.top_k,
            selection_stride=self.selection_stride,
            open_next=self.open_next,
        )


CASES = {
    "plain": IndexCase(),
    "deep": IndexCase(T=200, r=2, M=4, top_k=3),
    "suffix": IndexCase(num_queries=17, B=2),
    "stride": IndexCase(T=150, r=16, M=32, top_k=3, selection_stride=4, num_queries=70),
    "one_head": IndexCase(H_i=1, H=6, H_kv=3),
    "open_next": IndexCase(T=400, r=4, M=16, top_k=5, open_next=True),
    "no_rotation": IndexCase(rope_base=None, B=2),
    "dense": IndexCase(T=8),
    "one_token": IndexCase(T=1),
    "free": IndexCase(T=333, M=20, B=2),
    "free_deep": IndexCase(T=200, r=2, M=9, top_k=2, num_queries=190),
    "free_stride": IndexCase(T=301, r=16, M=70, top_k=2, selection_stride=4, num_queries=277),
    "free_dense_followers": IndexCase(T=11, M=10, selection_stride=4),
    "free_open_next": IndexCase(T=333, M=50, top_k=5, open_next=True, H_i=1, selection_stride=2),
    "bfloat16": IndexCase(dtype=torch.bfloat16, T=900, K=64, V=64, r=16, M=64, top_k=4, H=8, d=32),
    "free_bfloat16": IndexCase(dtype=torch.bfloat16, T=1700, K=64, V=64, r=16, M=200, top_k=4, H=8, d=32),
    "free_bfloat16_three_layers": IndexCase(
        dtype=torch.bfloat16,
        T=2000,
        K=128,
        V=128,
        r=16,
        M=100,
        top_k=4,
        selection_stride=4,
        H=8,
        d=32,
        rope_base=None,
    ),
    "float16": IndexCase(
        dtype=torch.float16, T=700, K=32, V=32, r=16, M=32, top_k=3, H=4, H_kv=1, H_i=1, selection_stride=16
    ),
}


@st.composite
def cases(draw: Any, device: str) -> IndexCase:
    fast = device == "cuda" and draw(st.booleans())
    r = 16 if fast else draw(st.sampled_from((2, 3, 4, 8, 16)))
    k = draw(st.integers(1, 6))
    s = draw(st.sampled_from([s for s in (1, 2, 4, 8, 16) if r % s == 0]))
    T = draw(st.integers(1, 700 if device == "cuda" else 130))
    before = draw(st.integers(0, (T - 1) // s)) * s
    kv_heads = draw(st.integers(1, 3))
    width = draw(st.sampled_from((32, 64, 128))) if fast else 2 * draw(st.integers(1, 5))
    wide = (torch.float32,) if device == "cuda" else (torch.float32, torch.float64)
    return IndexCase(
        dtype=draw(st.sampled_from((torch.bfloat16, torch.float16) if fast else wide)),
        B=draw(st.integers(1, 2)),
        T=T,
        num_queries=T - before,
        H=kv_heads * draw(st.integers(1, 4)),
        H_kv=kv_heads,
        H_i=draw(st.sampled_from((1, kv_heads))),
        K=width,
        V=width if fast else draw(st.integers(1, 6)),
        d=draw(st.sampled_from((16, 32))),
        r=r,
        M=draw(st.integers(1, 3 * k * r)),
        top_k=k,
        selection_stride=s,
        open_next=draw(st.booleans()),
        rope_base=draw(st.sampled_from((None, 10000.0))),
        levels=draw(st.sampled_from((0, 1, 2))),
    )


def lists_of(case: IndexCase, q: Tensor, k: Tensor, index: tuple[Tensor, Tensor]) -> list[Tensor]:
    """The lists of each layer, as the op gives them."""
    lists = OPS._index_lists(q, k, *index, [case.T - case.T_q], *case.packed())
    rows = -(-case.T_q // case.selection_stride)
    return list(lists.split(rows, 1)) if rows else []


def with_gradients(call: Any, leaves: tuple[Tensor, ...], seed: int) -> tuple[Tensor, ...]:
    leaves = tuple(x.detach().requires_grad_() for x in leaves)
    out, lse = call(*leaves)
    like = [normal(tuple(x.shape), torch.float32, "cpu", seed + i) for i, x in enumerate((out, lse))]
    given = [x.to(y) for x, y in zip(like, (out, lse), strict=True)]
    return (out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, given))


def attend(case: IndexCase, index: tuple[Tensor, Tensor]) -> Any:
    return lambda q, k, v: tree_attention(q, k, v, index=index, return_lse=True, **case.keywords())


def assert_equal_to_reference(case: IndexCase, device: str, seed: int = 0) -> None:
    qkv, index = case.make_qkv(device, seed), case.make_index(device, seed)
    found = with_gradients(attend(case, index), qkv, seed)
    lists = [x.cpu() for x in lists_of(case, *qkv[:2], index)][: len(case.reference_lists(index))]

    def forced(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        result = reference.htree_forward_naive(q, k, v, **case.reference_options(), parents=lists)
        return result.out, result.lse

    wanted = with_gradients(forced, tuple(x.double().cpu() for x in qkv), seed)
    tolerance = TOLERANCES[case.dtype] * (3 if case.dtype.itemsize == 2 else 1)  # of means that were rounded
    for name, ours, theirs in zip(GRADIENTS, found, wanted, strict=True):
        scale = max(1.0, theirs.abs().max().item())
        torch.testing.assert_close(
            ours.double().cpu(),
            theirs,
            rtol=tolerance,
            atol=tolerance * scale,
            msg=lambda m, n=name: f"{n}: {m}",
        )


# ---- lists


@given(data=st.data(), seed=seeds)
def test_a_flat_choice_is_that_of_the_walk(data, seed, device):
    """The theorem of the maximum over whole trees: ties, the diagonal node and open_next included."""
    case = data.draw(cases(device))
    q, k, _ = case.make_qkv(device, seed)
    index = case.make_index(device, seed)
    if not case.levels:  # sums of products that round differently may order differently
        index = tuple((4 * x).round() / 4 for x in index)
    found = lists_of(case, q, k, index)
    for layer, wanted in enumerate(case.reference_lists(index)):
        assert torch.equal(found[layer], wanted), layer


@pytest.mark.parametrize("name", CASES)
def test_the_lists_above_the_tokens_are_those_of_select_blocks(name, device):
    case = CASES[name]
    q, k, _ = case.make_qkv(device)
    index = case.make_index(device)
    wanted, _ = htree_ops.select_blocks(
        *index,
        case.top_k,
        block_size=case.r,
        selection_stride=case.selection_stride,
        open_next=case.open_next,
    )
    if case.T > case.M:
        leaders = torch.arange(case.T - case.T_q, case.T, case.selection_stride, device=device)
        implied = (leaders < case.M) & (
            case.top_k * case.r < case.M
        )  # a dense row, whose list follows from its place
        wanted = wanted.masked_fill(implied.view(1, -1, 1, 1), -1)
        assert torch.equal(lists_of(case, q, k, index)[0], wanted.expand(-1, -1, case.H_kv, -1))


# ---- values and gradients


@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_reference(name, device):
    assert_equal_to_reference(CASES[name], device)


@given(data=st.data(), seed=seeds)
def test_any_call_equals_the_reference(data, seed, device):
    with poisoned_memory():
        assert_equal_to_reference(data.draw(cases(device)), device, seed)


@given(
    seed=seeds, k=st.integers(1, 4), M=st.integers(4, 60), T=st.integers(5, 130), H_i=st.sampled_from((1, 2)),
    s=st.sampled_from((1, 2, 4)),
)  # fmt: skip
def test_listed_tokens_merged_with_the_means_of_what_stays_closed(seed, k, M, T, H_i, s, device):
    """By structure: sparse_attention over the lists and plain attention over the closed nodes, joined by their lse."""
    r = 16 if device == "cuda" else 4
    case = IndexCase(T=T * r // 4, r=r, top_k=k, M=M, selection_stride=s, H_i=H_i, rope_base=None, B=2)
    qkv, index = case.make_qkv(device, seed), case.make_index(device, seed)
    out, lse = attend(case, index)(*qkv)
    q, keys, values = (x.double().cpu() for x in qkv)
    lists = [x.cpu().long() for x in lists_of(case, *qkv[:2], index)]
    t = torch.arange(case.T)
    leaders = t - t % s
    depth = 1
    while -(-case.T // r ** (depth - 1)) > case.M:
        depth += 1
    is_free = k * r < case.M  # then a query has the layers of its leader's prefix, and no list of its top
    tops = (
        sum((leaders >= M * r**i).long() for i in range(depth)) if is_free else torch.full_like(t, depth - 1)
    )
    blocks = torch.arange(-(-case.T // r)).expand(*lists[0].shape[:3], -1)
    some = torch.nn.functional.pad(lists[0], (0, max(0, blocks.shape[-1] - k)), value=-1)
    blocks = torch.nn.functional.pad(blocks, (0, some.shape[-1] - blocks.shape[-1]), value=-1)
    is_dense = is_free & (tops[::s] == 0)
    blocks = torch.where(is_dense.view(1, -1, 1, 1), blocks, some).int().to(device)
    parts = [htree_ops.sparse_attention(*qkv, blocks, block_size=r, selection_stride=s, return_lse=True)]
    parts = [tuple(x.double().cpu() for x in part) for part in parts]
    of_rows = [x.repeat_interleave(s, 1)[:, : case.T] for x in lists]
    scores_of, values_of = [], []
    for layer in range(1, depth):
        count = -(-case.T // r**layer)
        spans = torch.arange(case.T) // r**layer
        ones = torch.nn.functional.one_hot(spans, count).double()
        mean = ones / ones.sum(0)
        node_k, node_v = (torch.einsum("tn,bthd->bnhd", mean, x) for x in (keys, values))
        nodes = torch.arange(count)
        opened = (of_rows[layer - 1][..., None] == nodes).any(-2)
        above = (of_rows[layer][..., None] == nodes // r).any(-2)
        if is_free:
            top = tops.view(1, -1, 1, 1)
            above = torch.where(top == layer, True, above & (top > layer))
        closed = above & ~opened & (nodes <= t[:, None, None] // r**layer)  # [B, T, H_kv, nodes]
        scores = torch.einsum("bthgd,bnhd->bthgn", q.unflatten(2, (case.H_kv, -1)), node_k) * case.K**-0.5
        scores_of.append(scores.masked_fill(~closed.unsqueeze(3), -torch.inf).flatten(2, 3))
        values_of.append(node_v.repeat_interleave(case.H // case.H_kv, 2))
    for scores, node_v in zip(scores_of, values_of, strict=True):
        weights = scores.softmax(-1).nan_to_num(0.0)
        parts.append((torch.einsum("bthn,bnhd->bthd", weights, node_v), scores.logsumexp(-1)))
    total = torch.stack([part[1] for part in parts]).logsumexp(0)
    joined = sum((part[1] - total).exp().unsqueeze(-1) * part[0] for part in parts)
    torch.testing.assert_close(lse.double().cpu(), total, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(out.double().cpu(), joined, rtol=2e-5, atol=2e-5)


def test_a_short_sequence_is_dense_attention_whatever_the_index(device):
    case = CASES["dense"]
    qkv = case.make_qkv(device)
    index = tuple(torch.full_like(x, torch.nan) for x in case.make_index(device))
    assert torch.equal(attend(case, index)(*qkv)[0], tree_attention(*qkv, **case.keywords()))


@pytest.mark.parametrize(
    "name", ["plain", "stride", "bfloat16", "open_next", "free", "free_stride", "free_bfloat16"]
)
def test_rows_do_not_depend_on_the_batch_nor_on_the_suffix(name, device):
    case = replace(CASES[name], num_queries=None, B=2)
    qkv, index = case.make_qkv(device), case.make_index(device)
    out, lse = attend(case, index)(*qkv)
    begin = 5 * case.selection_stride
    q, k, v = qkv[0][1:, begin:], qkv[1][1:], qkv[2][1:]
    part = attend(case, (index[0][1:, begin:], index[1][1:]))(q, k, v)
    assert torch.equal(part[0], out[1:, begin:])
    assert torch.equal(part[1], lse[1:, begin:])


@pytest.mark.parametrize("name", ["plain", "deep", "one_head", "stride", "free", "free_deep"])
def test_gradcheck(name):
    case = replace(CASES[name], dtype=torch.float64, T=min(CASES[name].T, 40), num_queries=None)
    leaves = tuple(x.requires_grad_() for x in case.make_qkv("cpu"))
    assert torch.autograd.gradcheck(attend(case, case.make_index("cpu")), leaves)


@pytest.mark.parametrize("name", ["free", "free_stride", "free_open_next"])
def test_a_row_keeps_its_bits_when_the_sequence_grows(name):
    """M > k*r: its tree is that of its own prefix. On a GPU kernels may round elsewhere (§1.14)."""
    case = replace(CASES[name], num_queries=None)
    qkv, index = case.make_qkv("cpu"), case.make_index("cpu")
    out, lse = attend(case, index)(*qkv)
    for T in (1, case.M, case.M + 1, case.T // 2, case.M * case.r, case.T - 1):
        short = attend(case, (index[0][:, :T], index[1][:, :T]))(*(x[:, :T] for x in qkv))
        assert torch.equal(short[0], out[:, :T])
        assert torch.equal(short[1], lse[:, :T])


def test_the_index_has_no_gradient(device):
    case = CASES["plain"]
    q, k, v = (x.requires_grad_() for x in case.make_qkv(device))
    index = tuple(x.requires_grad_() for x in case.make_index(device))
    tree_attention(q, k, v, index=index, **case.keywords()).sum().backward()
    assert all(x.grad is None for x in index)
    assert all(x.grad is not None for x in (q, k, v))


def test_pieces_of_queries(device):
    """Queries that stand anywhere have the lists and rows of the whole call: what ranks of a sequence compute."""
    case = CASES["stride"]
    case = replace(case, T=160, num_queries=None)
    (q, k, v), index = case.make_qkv(device), case.make_index(device)
    packed = case.packed()
    whole = OPS._index_lists(q, k, *index, [0], *packed)
    rows = [*range(32, 64), *range(96, 128)]
    lists = OPS._index_lists(q[:, rows], k, index[0][:, rows], index[1], [32, 96], *packed)
    of_rows = [i // case.selection_stride for i in rows[:: case.selection_stride]]
    depth = whole.shape[1] // (case.T // case.selection_stride)
    wanted = whole.unflatten(1, (depth, -1))[:, :, of_rows].flatten(1, 2)
    assert torch.equal(lists, wanted)
    results = OPS._listed_attention_rows(q, k, v, whole, [0], *packed)
    part = OPS._listed_attention_rows(q[:, rows], k, v, lists, [32, 96], *packed)
    for ours, theirs in zip(part, results, strict=True):
        assert torch.equal(ours, theirs[:, rows])


def test_empty(device):
    for sizes in ({"T": 0}, {"B": 0}, {"num_queries": 0}):
        case = replace(IndexCase(), **sizes)
        qkv, index = case.make_qkv(device), case.make_index(device)
        found = with_gradients(attend(case, index), qkv, 0)
        assert all((x == 0).all() for x in found[2:])
        assert found[0].shape == (*qkv[0].shape[:3], case.V)


# ---- registration


@pytest.mark.parametrize("name", ["plain", "stride", "one_head", "bfloat16", "free", "free_stride"])
def test_opcheck(name, device):
    case = replace(CASES[name], T=90 if CASES[name].r == 4 else 300, num_queries=None)
    (q, k, v), index = case.make_qkv(device), case.make_index(device)
    packed = case.packed()
    lists = OPS._index_lists(q, k, *index, [0], *packed)
    opcheck(OPS._index_lists.default, (q, k, *index, [0], *packed))
    opcheck(OPS._listed_attention_rows.default, (q, k, v, lists, [0], *packed))
    leaves = tuple(x.requires_grad_() for x in (q, k, v))
    opcheck(OPS._listed_attention.default, (*leaves, lists, *packed))


@pytest.mark.parametrize("M", [8, 20])
@pytest.mark.parametrize(("dynamic", "backend"), BACKENDS)
def test_compiled_with_views(dynamic, backend, M, device):
    case = replace(CASES["plain"], T=60, M=M)

    def call(qkv, index):
        q, k, v = qkv[..., :4, :], qkv[..., 4:6, :], qkv[..., 6:, :]
        return tree_attention(
            q, k, v, index=(index[..., :16], index[..., 16:]), return_lse=True, **case.keywords()
        )

    qkv = normal((2, case.T, 8, case.K), torch.float32, device, 1).requires_grad_()
    index = normal((2, case.T, 2, 32), torch.float32, device, 2)
    wanted = call(qkv, index)
    found = torch.compile(call, backend=backend, fullgraph=True, dynamic=dynamic)(qkv, index)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)
    gradients = [torch.autograd.grad(x[0].square().sum() + x[1].sum(), qkv)[0] for x in (found, wanted)]
    torch.testing.assert_close(*gradients)


class Layer(torch.nn.Module):
    """The attention alone, for export."""

    def __init__(self, case: IndexCase) -> None:
        super().__init__()
        self.options = case.keywords()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, index_query: Tensor, index_key: Tensor) -> Tensor:
        return tree_attention(q, k, v, index=(index_query, index_key), **self.options)


@pytest.mark.parametrize("name", ["plain", "free"])
def test_export_takes_lengths_of_every_depth(name, device):
    case = replace(CASES[name], T=60)
    T = torch.export.Dim("T", min=2, max=600)
    layer = Layer(case)
    leaves = tuple(x.requires_grad_() for x in case.make_qkv(device))
    program = torch.export.export(layer, (*leaves, *case.make_index(device)), dynamic_shapes=({1: T},) * 5)
    names = [str(node.target) for node in program.graph.nodes if "htree" in str(node.target)]
    assert names == ["htree._index_lists.default", "htree._listed_attention.default"]
    exported = program.module()
    for length in (40, 5, 129, 600):
        case = replace(case, T=length)
        leaves, index = tuple(x.requires_grad_() for x in case.make_qkv(device)), case.make_index(device)
        results = []
        for call in (exported, layer):
            out = call(*leaves, *index)
            results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours, theirs)


def test_aot_inductor(device, tmp_path):
    case = CASES["free"]
    layer, tensors = Layer(case), (*case.make_qkv(device), *case.make_index(device))
    path = torch._inductor.aoti_compile_and_package(
        torch.export.export(layer, tensors), package_path=str(tmp_path / "layer.pt2")
    )
    torch.testing.assert_close(torch._inductor.aoti_load_package(path)(*tensors), layer(*tensors))


# ---- bad input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scope": "q_head"}, "scope must be kv_head beside an index"),
        ({"selection_span": 2}, "selection_span must be None beside an index"),
        ({"importance": "exp_joint"}, "importance must be lse_causal beside an index"),
    ],
)
def test_options_that_an_index_excludes(changes, message, device):
    case = CASES["plain"]
    with pytest.raises(ValueError, match=message):
        tree_attention(*case.make_qkv(device), index=case.make_index(device), **(case.keywords() | changes))


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda q, k: q, TypeError, "index must be"),
        (lambda q, k: (q[0], k), ShapeMismatchError, "index_query must be 4-D"),
        (
            lambda q, k: (q[:, 1:], k),
            ShapeMismatchError,
            r"size 1 of index_query must be 60 \(T_q of q\), got 59",
        ),
        (
            lambda q, k: (q, k[:, 1:]),
            ShapeMismatchError,
            r"size 1 of index_key must be 60 \(T of k\), got 59",
        ),
        (
            lambda q, k: (q[..., :8], k[..., :8]),
            ShapeMismatchError,
            "d, .* of index_query, must be a multiple of 16",
        ),
        (lambda q, k: (q, k.half()), UnsupportedDtypeError, "index_key must have the dtype of index_query"),
        (
            lambda *x: [torch.cat([y, y[:, :, :1]], 2) for y in x],
            ShapeMismatchError,
            "must have 1 or H_kv = 2",
        ),
        (lambda q, k: (q, k[:, :, :1]), ShapeMismatchError, "index_key"),
    ],
)
def test_an_index_that_does_not_fit(change, kind, message, device):
    case = CASES["plain"]
    with pytest.raises(kind, match=message):
        tree_attention(*case.make_qkv(device), index=change(*case.make_index(device)), **case.keywords())


@pytest.mark.parametrize(
    ("rows", "stride", "message"),
    [
        (6, 1, "q must have at most as many rows as k"),
        (4, 2, "T - T_q must be a multiple of selection_stride"),
    ],
)
def test_queries_that_are_no_suffix_are_refused_as_without_an_index(rows, stride, message, device):
    q, index_query = torch.randn(1, rows, 2, 16, device=device), torch.randn(1, rows, 2, 16, device=device)
    k, index_key = torch.randn(1, 5, 2, 16, device=device), torch.randn(1, 5, 2, 16, device=device)
    with pytest.raises(ValueError, match=message) as without_an_index:
        tree_attention(q, k, k, selection_stride=stride)
    with pytest.raises(ValueError, match=message) as refused:
        tree_attention(q, k, k, index=(index_query, index_key), selection_stride=stride)
    assert type(refused.value) is type(without_an_index.value)
