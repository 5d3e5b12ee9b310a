"""select_blocks under torch's machinery, over packed documents, and what it refuses (docs/semantics §9)."""

import re
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

import htree_ops
from htree_ops.errors import DeviceError, ShapeMismatchError, UnsupportedDtypeError
from tests.support.cases import normal
from tests.support.compilers import BACKENDS
from tests.support.documents import offsets
from tests.support.opcheck import opcheck
from tests.support.select_blocks_cases import CASES, VARLEN_CASES, SelectBlocksCase, SelectBlocksVarlenCase

OPS = torch.ops.htree
INF = float("inf")


def named(name: str) -> SelectBlocksCase:
    return next(case for case in CASES if case.name == name)


# ---- torch's machinery


#: opcheck's own backward adds the outputs up in place, the integers first, and so fails in front of the op.
WITHOUT_BACKWARD = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.mark.parametrize("name", ["plain", "stride4", "suffix_stride", "open_next_odd", "no_query"])
def test_opcheck(name, device):
    inputs = named(name).make_inputs(device)
    opcheck(OPS.select_blocks.default, inputs)
    index = [x.detach().requires_grad_() for x in inputs[:2]]
    opcheck(OPS.select_blocks.default, (*index, *inputs[2:]), test_utils=WITHOUT_BACKWARD)


@pytest.mark.parametrize("name", ["ragged", "stride", "no_document"])
def test_opcheck_of_documents(name, device):
    inputs = next(case for case in VARLEN_CASES if case.name == name).make_inputs(device)
    opcheck(OPS.select_blocks_varlen.default, inputs)


@pytest.mark.parametrize(("dynamic", "backend"), BACKENDS)
def test_compile_of_views(dynamic, backend, device):
    def views(x, w, cu):
        query, key = (x @ w).split(32, dim=-1)
        query, key = (y.unflatten(-1, (2, 16)) for y in (query, key))
        batched = htree_ops.select_blocks(query[:, 4:], key, 5, block_size=4, selection_stride=4, first=1)
        packed = htree_ops.select_blocks_varlen(
            query[0], key[0], cu, cu, x.shape[1], x.shape[1], 4, block_size=2, open_next=True
        )
        return *(y.clone() for y in batched), *packed

    torch._dynamo.reset()
    compiled = torch.compile(views, backend=backend, fullgraph=True, dynamic=dynamic)
    for T in (60, 84):
        x, w = (
            torch.randint(-2, 3, size, device=device).float().requires_grad_()
            for size in ((2, T, 3), (3, 64))
        )
        cu = offsets((17, T - 20), device)
        for ours, theirs in zip(compiled(x, w, cu), views(x, w, cu), strict=True):
            assert torch.equal(ours, theirs)


def test_export_keeps_one_node():
    class Model(torch.nn.Module):
        def forward(self, query, key):
            return htree_ops.select_blocks(query, key, 3, block_size=4)

    length = torch.export.Dim("length", min=3, max=100)
    shapes = {"query": {1: length}, "key": {1: length}}
    index = named("plain").make_index("cpu")
    program = torch.export.export(Model(), index, dynamic_shapes=shapes)
    calls = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert OPS.select_blocks.default in calls
    other = tuple(x[:, :40] for x in index)
    for ours, theirs in zip(program.module()(*other), Model()(*other), strict=True):
        assert torch.equal(ours, theirs)


def test_meta_tensors_have_the_shapes_of_the_kernels(device):
    for case in CASES:
        if device == "cuda" and case.dtype == torch.float64:
            continue
        inputs = case.make_inputs(device)
        found = OPS.select_blocks(*inputs)
        shapes = OPS.select_blocks(*(x.to("meta") for x in inputs[:2]), *inputs[2:])
        for ours, theirs in zip(found, shapes, strict=True):
            assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())


def test_flops_are_those_of_the_products():
    from torch.utils.flop_counter import FlopCounterMode

    for name in ("plain", "stride4", "suffix_stride", "no_query", "one_token"):
        case = named(name)
        with FlopCounterMode(display=False) as counter:
            OPS.select_blocks(*case.make_inputs("meta" if name == "plain" else "cpu"))
        assert counter.get_total_flops() == case.flops()
    case = SelectBlocksVarlenCase(name="equal", dtype=torch.float32, lengths=(40, 40), count=3)
    with FlopCounterMode(display=False) as counter:
        OPS.select_blocks_varlen(*case.make_inputs("cpu"))
    assert counter.get_total_flops() == case.flops()


# ---- packed documents


@given(data=st.data(), seed=st.integers(0, 2**20))
def test_a_broken_document_reaches_no_other(data, seed, device):
    stride = data.draw(st.sampled_from((1, 2, 4)))
    lengths = tuple(data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=5)))
    queries = tuple(n - data.draw(st.integers(0, n // stride)) * stride for n in lengths)
    case = SelectBlocksVarlenCase(
        name="drawn", dtype=torch.float32, lengths=lengths, queries=queries, spare=3, count=4, selection_stride=stride
    )  # fmt: skip
    inputs = case.make_inputs(device, seed)
    clean = OPS.select_blocks_varlen(*inputs)
    *_, last = places = case.rows()
    broken = data.draw(st.sampled_from(places))
    for x, own, end in zip(inputs, broken, last, strict=False):
        x[own], x[end.stop :] = torch.nan, torch.nan
    found = OPS.select_blocks_varlen(*inputs)
    for ours, theirs in zip(found, clean, strict=True):
        kept = torch.ones(len(ours), dtype=torch.bool)
        kept[broken[0]] = False
        assert torch.equal(ours[kept], theirs[kept])
    assert bool((found[0][last[0].stop :] == -1).all())
    assert bool((found[1][last[0].stop :] == -INF).all())


BROKEN: dict[str, tuple[dict[str, Any], int, str]] = {
    "descends": ({"q": [0, 20, 10]}, 1, "cu_seq_q must not descend, got 10 behind 20 at document 1"),
    "first": ({"k": [1, 15, 40]}, 0, "cu_seq_k must begin with 0, got 1"),
    "behind": ({"q": [0, 10, 33]}, 1, r"cu_seq_q must end at or before the last row of index_query \(32\), got 33"),
    "keys_behind": ({"k": [0, 15, 41]}, 1, r"cu_seq_k must end at or before the last row of index_key \(40\), got 41"),
    "max_q": ({"max_q": 19}, 1, "max_q must be at least the length of every document, got 19 and 20 rows"),
    "max_k": ({"max_k": 24}, 1, "max_k must be at least the length of every document, got 24 and 25 rows"),
    "queries": ({"k": [0, 5, 40], "max_k": 40}, 0, "cu_seq_q must give no document more queries than cu_seq_k"),
    "stride": ({"q": [0, 9, 30], "stride": 4}, 0, "differ by a multiple of selection_stride = 4"),
}  # fmt: skip


def broken_call(change: dict[str, Any], device: str) -> tuple[Tensor, Tensor]:
    values = {"q": [0, 10, 30], "k": [0, 15, 40], "max_q": 25, "max_k": 25, "stride": 1} | change
    query, key = (normal((rows, 2, 16), torch.float32, device, rows) for rows in (32, 40))
    cu = [torch.tensor(values[name], dtype=torch.int32, device=device) for name in "qk"]
    return htree_ops.select_blocks_varlen(
        query, key, *cu, values["max_q"], values["max_k"], 3, block_size=4, selection_stride=values["stride"]
    )


@pytest.mark.parametrize("name", BROKEN)
def test_a_document_that_breaks_the_rules_is_an_error(name):
    change, _, message = BROKEN[name]
    with pytest.raises(ValueError, match=f"select_blocks_varlen: .*{message}"):
        broken_call(change, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", BROKEN)
def test_a_document_that_breaks_the_rules_is_nan_on_cuda(name):
    change, document, _ = BROKEN[name]
    blocks, scores = broken_call(change, "cuda")
    fine_blocks, fine_scores = broken_call({}, "cuda")
    if name not in ("descends", "first"):  # those have no rows of their own, or other ones
        rows = slice(*change.get("q", [0, 10, 30])[document : document + 2])
        assert bool(scores[rows].isnan().any())
        assert bool((blocks[rows] == -1).all())
    if not {"q", "k"} & change.keys():
        other = slice(0, 10) if document == 1 else slice(10, 30)
        assert torch.equal(blocks[other], fine_blocks[other])
        assert torch.equal(scores[other], fine_scores[other])


# ---- bad input

QUERY, KEY = torch.zeros(2, 24, 2, 16), torch.zeros(2, 40, 2, 16)
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"index_query": torch.zeros(24, 2, 16)}, ShapeMismatchError, "index_query must be 4-D [B, T_q, H_i, d], got 3-D"),
    ({"index_key": torch.zeros(40, 2, 16)}, ShapeMismatchError, "index_key must be 4-D [B, T, H_i, d], got 3-D"),
    ({"index_key": KEY[:1]}, ShapeMismatchError, "size 0 of index_key must be 2 (B of index_query), got 1"),
    ({"index_key": KEY[:, :, :1]}, ShapeMismatchError, "size 2 of index_key must be 2 (H_i of index_query), got 1"),
    ({"index_key": torch.zeros(2, 40, 2, 32)}, ShapeMismatchError, "size 3 of index_key must be 16 (d of index_query)"),
    ({"index_query": QUERY[..., :8], "index_key": KEY[..., :8]}, ShapeMismatchError,
     "d, the last size of index_query, must be a multiple of 16 up to 128, got 8"),
    ({"index_query": torch.zeros(2, 24, 2, 144), "index_key": torch.zeros(2, 40, 2, 144)}, ShapeMismatchError,
     "must be a multiple of 16 up to 128, got 144"),
    ({"index_query": torch.zeros(2, 24, 2, 24), "index_key": torch.zeros(2, 40, 2, 24)}, ShapeMismatchError,
     "must be a multiple of 16 up to 128, got 24"),
    ({"index_query": torch.zeros(2, 41, 2, 16)}, ShapeMismatchError,
     "T_q of index_query must be at most T of index_key (40), got 41"),
    ({"index_query": QUERY[:, :23], "selection_stride": 2}, ValueError,
     "T - T_q must be a multiple of selection_stride = 2, got T = 40 and T_q = 23"),
    ({"index_query": QUERY.int()}, UnsupportedDtypeError, "index_query must have dtype torch.float32 or torch.float16"),
    ({"index_query": QUERY.to(torch.float8_e4m3fn)}, UnsupportedDtypeError, "index_query must have dtype"),
    ({"index_key": KEY.half()}, UnsupportedDtypeError,
     "index_key must have the dtype of index_query (torch.float32), got torch.float16"),
    ({"index_key": KEY.to("meta")}, DeviceError, "index_key must be on the device of index_query (cpu), got meta"),
    ({"count": 0}, ValueError, "count must be between 1 and 2147483647, got 0"),
    ({"count": 2**31}, ValueError, "count must be between 1 and"),
    ({"count": 2**70}, ValueError, "count must be an int of 64 bits"),
    ({"count": 4.0}, TypeError, "count must be an int, got float"),
    ({"count": True}, TypeError, "count must be an int, got bool"),
    ({"block_size": 0}, ValueError, "block_size must be between 1 and 2147483647, got 0"),
    ({"selection_stride": 0}, ValueError, "selection_stride must be between 1 and"),
    ({"selection_stride": 3}, ValueError, "selection_stride must be a power of two that divides block_size = 4, got 3"),
    ({"selection_stride": 8}, ValueError, "selection_stride must be a power of two that divides block_size = 4, got 8"),
    ({"block_size": 6, "selection_stride": 4}, ValueError,
     "selection_stride must be a power of two that divides block_size = 6, got 4"),
    ({"local": 0}, ValueError, "local must be between 1 and 2147483647, got 0"),
    ({"first": -1}, ValueError, "first must be at least 0, got -1"),
    ({"local": 6}, ValueError, "local and first must leave local + first <= count = 5, got local = 6 and first = 0"),
    ({"local": 3, "first": 3}, ValueError,
     "local and first must leave local + first <= count = 5, got local = 3 and first = 3"),
    ({"first": 2**62}, ValueError, "local and first must leave"),
    ({"open_next": 1}, TypeError, "open_next must be a bool, got int"),
    ({"index_query": None}, TypeError, "index_query must be a Tensor, got NoneType"),
    ({"index_query": QUERY.to_sparse()}, TypeError, "index_query must be a dense tensor"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "kind", "message"), REFUSED, ids=[message[:40] for _, _, message in REFUSED]
)
def test_bad_input_is_named(change, kind, message):
    call = {"index_query": QUERY, "index_key": KEY, "count": 5, "block_size": 4} | change
    with pytest.raises(kind, match=f"^select_blocks: .*{re.escape(message)}"):
        htree_ops.select_blocks(**call)


VARLEN_REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"index_query": QUERY}, ShapeMismatchError, "index_query must be 3-D [N_q, H_i, d], got 4-D"),
    ({"index_key": KEY[0, :, :1]}, ShapeMismatchError, "size 1 of index_key must be 2 (H_i of index_query), got 1"),
    ({"cu_seq_q": offsets((24,), "cpu").long()}, UnsupportedDtypeError,
     "cu_seq_q must have dtype torch.int32, got torch.int64"),
    ({"cu_seq_k": offsets((20, 20), "cpu")}, ShapeMismatchError,
     "size 0 of cu_seq_k must be 2 (documents + 1 of cu_seq_q), got 3"),
    ({"cu_seq_q": torch.zeros(0, dtype=torch.int32)}, ShapeMismatchError, "cu_seq_q must have at least one element"),
    ({"max_q": -1}, ValueError, "max_q must be at least 0, got -1"),
    ({"max_k": 40.0}, TypeError, "max_k must be an int, got float"),
    ({"count": 0}, ValueError, "count must be between 1 and"),
    ({"local": 9}, ValueError, "local and first must leave local + first <= count = 5"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "kind", "message"), VARLEN_REFUSED, ids=[message[:40] for _, _, message in VARLEN_REFUSED]
)
def test_bad_input_of_documents_is_named(change, kind, message):
    call = {"index_query": QUERY[0], "index_key": KEY[0], "count": 5, "max_q": 24, "max_k": 40}
    call |= {"cu_seq_q": offsets((24,), "cpu"), "cu_seq_k": offsets((40,), "cpu")}
    with pytest.raises(kind, match=f"^select_blocks_varlen: .*{re.escape(message)}"):
        htree_ops.select_blocks_varlen(**call | change)


@pytest.mark.gpu
def test_float64_is_refused_on_cuda():
    index = torch.zeros(1, 8, 1, 16, dtype=torch.float64, device="cuda")
    with pytest.raises(
        UnsupportedDtypeError, match=r"index_query must have dtype .* on CUDA, got torch\.float64"
    ):
        htree_ops.select_blocks(index, index, 2)
