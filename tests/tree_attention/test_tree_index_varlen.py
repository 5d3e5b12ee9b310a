"""Tree attention over packed documents whose nodes an index chooses (docs/semantics/tree_attention.md §1.17)."""

from dataclasses import dataclass, replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

from htree_ops import tree_attention, tree_attention_varlen
from tests.support.cases import normal
from tests.support.compilers import BACKENDS
from tests.support.devices import poisoned_memory
from tests.support.documents import one_by_one, with_gradients
from tests.support.tree_attention_varlen_cases import VarlenCase

OPS = torch.ops.htree
GROUPINGS = ("document", "length", "rank", "auto")


@dataclass(frozen=True, kw_only=True)
class Documents(VarlenCase):
    """Packed documents with an index."""

    name: str = "documents"
    dtype: torch.dtype = torch.float32
    lengths: tuple[int, ...] = (60, 7, 0, 41)
    spare: int = 3
    H_i: int = 2
    d: int = 16

    def tensors(self, device: str, seed: int = 0) -> tuple[Tensor, ...]:
        """query, key, value, index_query and index_key."""
        qkv = self.make_qkv(device, seed)
        shapes = [(len(x), self.H_i, self.d) for x in qkv[:2]]
        index = (normal(shape, self.dtype, device, 5 * seed + 1003 + i) for i, shape in enumerate(shapes))
        return (*qkv, *index)


CASES: dict[str, Documents] = {
    "plain": Documents(),
    "suffix": Documents(lengths=(40, 25, 33), queries=(9, 25, 0)),
    "stride": Documents(lengths=(44, 26, 9), queries=(12, 26, 5), selection_stride=4),
    "one_index_head": Documents(H_i=1, H=6, H_kv=3),
    "open_next": Documents(lengths=(130, 64), top_k=5, M=16, open_next=True),
    "no_rotation": Documents(rope_base=None),
    "short": Documents(lengths=(5, 8, 1)),
    "equal": Documents(lengths=(50, 50, 50), spare=0),
    "none": Documents(lengths=(), spare=2),
    "bfloat16": Documents(
        lengths=(300, 700, 120), dtype=torch.bfloat16, H=8, K=64, V=64, d=32, r=16, M=64, top_k=4
    ),
    "float16": Documents(
        lengths=(500, 33),
        dtype=torch.float16,
        H_kv=1,
        H_i=1,
        K=32,
        V=32,
        r=16,
        M=32,
        top_k=3,
        selection_stride=16,
    ),
}
TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@st.composite
def problems(draw: Any, device: str) -> Documents:
    r = draw(st.sampled_from((2, 4, 8)))
    k, kv_heads = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    s = draw(st.sampled_from([s for s in (1, 2, 4) if r % s == 0]))
    lengths = tuple(draw(st.lists(st.integers(0, 70), min_size=0, max_size=5)))
    queries = None
    if draw(st.booleans()):
        queries = tuple(n - draw(st.integers(0, n // s)) * s for n in lengths)
    return Documents(
        lengths=lengths,
        queries=queries,
        spare=draw(st.integers(0, 3)),
        dtype=torch.float32 if device == "cuda" else draw(st.sampled_from((torch.float32, torch.float64))),
        H=kv_heads * draw(st.integers(1, 3)),
        H_kv=kv_heads,
        H_i=draw(st.sampled_from((1, kv_heads))),
        K=2 * draw(st.integers(1, 4)),
        V=draw(st.integers(1, 5)),
        r=r,
        M=draw(st.integers(1, 3 * k * r)),
        top_k=k,
        selection_stride=s,
        open_next=draw(st.booleans()),
        rope_base=draw(st.sampled_from((None, 10000.0))),
    )


def attend(case: Documents, tensors: tuple[Tensor, ...], grouping: str = "auto") -> tuple[Tensor, Tensor]:
    bounds = case.places(tensors[0].device.type)
    return OPS._attention_varlen(*tensors, *bounds, grouping, *case.packed())


def alone(case: Documents, tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Each document in a call of its own."""
    q, k, v, index_query, index_key = tensors

    def call(rows: slice, keys: slice) -> Any:
        document = q[None, rows], k[None, keys], v[None, keys]
        index = index_query[None, rows], index_key[None, keys]
        return tree_attention(*document, index=index, return_lse=True, **case.options())

    return one_by_one(case, q, call)


def gradients(call: Any, tensors: tuple[Tensor, ...], seed: int = 0) -> tuple[Tensor, ...]:
    """With the gradients of query, key and value: an index has none."""
    return with_gradients(lambda *x: call((*x, *tensors[3:])), tensors[:3], seed)


def assert_close(
    case: Documents, ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...], grouping: str, device: str
) -> None:
    """Bit for bit on the CPU, but for dk and dv of several documents at once, whose sums are cut elsewhere."""
    tolerance = TOLERANCES[case.dtype]
    exact = 0 if device == "cuda" else 3 if grouping in ("length", "rank") else 5
    for place, (x, y) in enumerate(zip(ours, theirs, strict=True)):
        if place < exact:
            assert torch.equal(x, y)
        scale = max(1.0, y[y.isfinite()].abs().max().item()) if y.isfinite().any() else 1.0
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("name", CASES)
def test_documents_are_calls_of_their_own(name, grouping, device):
    case = CASES[name]
    tensors = case.tensors(device)
    with poisoned_memory():
        found = gradients(lambda x: attend(case, x, grouping), tensors)
    wanted = gradients(lambda x: alone(case, x), tensors)
    assert_close(case, found, wanted, grouping, device)


@given(data=st.data(), seed=st.integers(0, 2**20), grouping=st.sampled_from(GROUPINGS))
def test_any_documents_are_calls_of_their_own(data, seed, grouping, device):
    case = data.draw(problems(device))
    tensors = case.tensors(device, seed)
    with poisoned_memory():
        found = gradients(lambda x: attend(case, x, grouping), tensors, seed)
    wanted = gradients(lambda x: alone(case, x), tensors, seed)
    assert_close(case, found, wanted, grouping, device)


def test_nothing_of_a_document_reaches_another(device):
    case = CASES["plain"]
    tensors = case.tensors(device)
    before = gradients(lambda x: attend(case, x), tensors)
    changed = tuple(x.clone() for x in tensors)
    for x in changed:
        x[:60] = torch.nan  # the first document
        x[108:] = torch.nan  # rows behind the last one
    out, lse = attend(case, changed)
    assert torch.equal(out[60:], before[0][60:])
    assert torch.equal(lse[60:], before[1][60:])


def test_the_function_and_the_index_that_has_no_gradient(device):
    case = CASES["stride"]
    tensors = tuple(x.requires_grad_() for x in case.tensors(device))
    call = {"index": tensors[3:], **case.options()}
    out, lse = tree_attention_varlen(*tensors[:3], *case.places(device), return_lse=True, **call)
    wanted = attend(case, tensors)
    assert torch.equal(out, wanted[0])
    assert torch.equal(lse, wanted[1])
    assert torch.equal(tree_attention_varlen(*tensors[:3], *case.places(device), **call), out)
    out.sum().backward()
    assert all(x.grad is not None for x in tensors[:3])
    assert all(x.grad is None for x in tensors[3:])


@pytest.mark.parametrize("name", ["plain", "stride", "one_index_head"])
def test_gradcheck(name):
    case = replace(CASES[name], dtype=torch.float64, lengths=(13, 5), queries=None)
    *leaves, index_query, index_key = case.tensors("cpu")
    leaves = [x.requires_grad_() for x in leaves]

    def call(*qkv):
        out, lse = attend(case, (*qkv, index_query, index_key))
        return out, lse[:18]

    assert torch.autograd.gradcheck(call, leaves)


@pytest.mark.parametrize("name", ["plain", "suffix", "bfloat16"])
def test_opcheck(name, device):
    case = CASES[name]
    tensors = case.tensors(device)
    rest = (*case.places(device), "auto", *case.packed())
    leaves = tuple(x.requires_grad_() for x in tensors[:3])
    opcheck(OPS._attention_varlen.default, (*leaves, *tensors[3:], *rest))
    with torch.no_grad():
        out, gmax, gsum = OPS._attention_varlen_forward(*tensors, *rest)
    backward = (
        *tensors,
        *case.places(device),
        out,
        gmax,
        gsum,
        out,
        torch.ones_like(gmax),
        "auto",
        [True] * 3,
        *case.packed(),
    )
    opcheck(OPS._attention_varlen_backward.default, tuple(
        x.detach() if isinstance(x, Tensor) else x for x in backward
    ))  # fmt: skip


@pytest.mark.parametrize(("dynamic", "backend"), BACKENDS)
def test_compiled(dynamic, backend, device):
    case = CASES["plain"]
    tensors = case.tensors(device)
    bounds = case.places(device)

    def call(q, k, v, *index):
        return tree_attention_varlen(q * 2, k, v, *bounds, index=index, **case.options())

    leaves = tuple(x.requires_grad_() for x in tensors[:3])
    found = torch.compile(call, backend=backend, fullgraph=True, dynamic=dynamic)(*leaves, *tensors[3:])
    wanted = call(*leaves, *tensors[3:])
    torch.testing.assert_close(found, wanted)
    gradients = [torch.autograd.grad(x.square().sum(), leaves) for x in (found, wanted)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_autocast_and_the_count_of_work(device):
    case = CASES["plain"]
    tensors = case.tensors(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        out, _ = attend(case, tensors)
    assert out.dtype == torch.bfloat16
    with FlopCounterMode(display=False) as counter:
        attend(case, tensors)
    assert counter.get_total_flops() > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index": lambda q, k: (q[:, None], k)}, "index_query must be 3-D"),
        ({"index": lambda q, k: (q[1:], k)}, r"size 0 of index_query must be 111 \(N of query\), got 110"),
        ({"index": lambda q, k: (q, k[1:])}, r"size 0 of index_key must be 111 \(N_k of key\), got 110"),
        (
            {"index": lambda q, k: (q[..., :8], k[..., :8])},
            "d, the last size of index_query, must be a multiple of 16",
        ),
        ({"index": lambda q, k: (q, k.half())}, "index_key must have the dtype of index_query"),
        ({"index": lambda q, k: q}, r"index"),
        ({"scope": "q_head"}, "scope must be kv_head beside an index"),
        ({"selection_span": 2}, "selection_span must be None beside an index"),
        ({"importance": "exp_joint"}, "importance must be lse_causal beside an index"),
    ],
)
def test_bad_input(change, message, device):
    case = CASES["plain"]
    q, k, v, *index = case.tensors(device)
    options = case.options() | change
    options["index"] = change.get("index", lambda *pair: pair)(*index)
    with pytest.raises((TypeError, ValueError), match=f"tree_attention_varlen: .*{message}"):
        tree_attention_varlen(q, k, v, *case.places(device), **options)


def test_a_broken_document(device):
    """An error on the CPU; NaN rows on CUDA, and the other documents keep theirs."""
    case = replace(CASES["suffix"], lengths=(40, 25, 33), queries=(41, 25, 0))
    tensors = case.tensors(device)
    if device == "cpu":
        with pytest.raises(ValueError, match="tree_attention_varlen"):
            attend(case, tensors)
        return
    out, _ = attend(case, tensors)
    assert out[:41].isnan().all()
    assert out[41:66].isfinite().all()


def test_half_an_index_is_refused(device):
    case = CASES["plain"]
    *qkv, index_query, _ = case.tensors(device)
    with pytest.raises(ValueError, match="index_query and index_key must be given together"):
        OPS._attention_varlen(*qkv, index_query, None, *case.places(device), "auto", *case.packed())
