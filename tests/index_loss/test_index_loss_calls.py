"""index_loss under torch's machinery, and what it refuses (docs/semantics/index_loss.md §9.3)."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import htree_ops
from htree_ops.errors import DeviceError, ShapeMismatchError, UnsupportedDtypeError
from tests.support.compilers import BACKENDS
from tests.support.documents import offsets
from tests.support.graphs import assert_stream_and_graph
from tests.support.index_loss_cases import CASES, IndexLossCase

OPS = torch.ops.htree


def named(name: str) -> IndexLossCase:
    return next(case for case in CASES if case.name == name)


# ---- torch's machinery


@pytest.mark.parametrize("name", ["plain", "shared", "one_index_head", "ragged"])
def test_opcheck(name, device):
    case = named(name)
    inputs = case.make_inputs(device)
    torch.library.opcheck(OPS.index_loss.default, inputs, case.options())
    torch.library.opcheck(OPS._index_loss_forward.default, inputs, case.options())
    index = [x.detach().requires_grad_() for x in inputs[2:4]]
    torch.library.opcheck(OPS.index_loss.default, (*inputs[:2], *index, *inputs[4:]), case.options())
    # Only one side of the index learns.
    half = (*inputs[:2], index[0], inputs[3], *inputs[4:])
    torch.library.opcheck(OPS.index_loss.default, half, case.options())


@pytest.mark.parametrize("name", ["plain", "ragged"])
@pytest.mark.parametrize("mask", [[True, True], [True, False], [False, True]])
def test_opcheck_of_the_backward(name, mask, device):
    case = named(name)
    *inputs, cu = case.make_inputs(device)
    loss, lse, index_lse = OPS._index_loss_forward(*inputs, cu, **case.options())
    arguments = (*inputs, lse, index_lse, loss, cu)
    torch.library.opcheck(OPS._index_loss_backward.default, arguments, case.options() | {"output_mask": mask})
    found = OPS._index_loss_backward(*arguments, **case.options(), output_mask=mask)
    every = OPS._index_loss_backward(*arguments, **case.options())
    for ours, theirs, wanted in zip(found, every, mask, strict=True):
        assert torch.equal(ours, theirs) if wanted else ours is None or not ours.numel()


@pytest.mark.parametrize("name", ["plain", "ragged"])
def test_empty_calls_pass_opcheck(name, device):
    case = replace(named(name), rows=0)
    inputs = case.make_inputs(device)
    index = [x.detach().requires_grad_() for x in inputs[2:4]]
    torch.library.opcheck(OPS.index_loss.default, (*inputs[:2], *index, *inputs[4:]), case.options())


def test_query_and_key_are_constants(device):
    case = named("plain")
    leaves = [x.requires_grad_() for x in case.make_tensors(device)]
    positions = case.make_positions(device)
    loss = OPS.index_loss(*leaves, positions, block_size=4)
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    assert [g is None for g in gradients] == [True, True, False, False]
    frozen = [x.detach() for x in leaves[2:]]
    assert not OPS.index_loss(*leaves[:2], *frozen, positions, block_size=4).requires_grad


def test_gradients_of_gradients_are_refused(device):
    case = named("plain")
    inputs = case.make_inputs(device)
    index = [x.requires_grad_() for x in inputs[2:4]]
    loss = OPS.index_loss(*inputs[:2], *index, *inputs[4:], block_size=4)
    gradients = torch.autograd.grad(loss, index, create_graph=True)
    with pytest.raises(RuntimeError, match="index_loss: double backward is not supported"):
        gradients[0].sum().backward()


def test_other_transforms_are_refused(device):
    query, key, index_query, index_key, positions, _ = named("plain").make_inputs(device)

    def loss(index):
        return OPS.index_loss(query, key, index, index_key, positions, block_size=4)

    with pytest.raises(NotImplementedError, match=r"torch\.func\.grad"):
        torch.func.grad(loss)(index_query)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(loss, (index_query,), (index_query,))
    with pytest.raises(NotImplementedError, match=r"index_loss: torch\.func\.vmap"):
        torch.func.vmap(loss)(index_query[None])


@pytest.mark.parametrize(("dynamic", "backend"), BACKENDS)
def test_compile_of_views(dynamic, backend, device):
    """The function in a graph of its own: views of one product, given positions, and documents."""

    def losses(x, w, positions, cu):
        query, key, index_query, index_key = (x @ w).unflatten(-1, (-1, 16)).split((4, 2, 2, 2), dim=-2)
        one = htree_ops.index_loss(query, key, index_query, index_key, positions=positions, block_size=4)
        packed = (y[0] for y in (query, key, index_query, index_key))
        two = htree_ops.index_loss(*packed, positions=positions, block_size=4, cu_seqlens=cu, scale=0.2)
        return one, two

    torch._dynamo.reset()
    compiled = torch.compile(losses, backend=backend, fullgraph=True, dynamic=dynamic)
    for T in (60, 84):
        x, w = (
            torch.randn(
                size, device=device, generator=torch.Generator(device).manual_seed(T)
            ).requires_grad_()
            for size in ((2, T, 5), (5, 160))
        )
        positions, cu = torch.tensor([5, 17, T - 1, 9], device=device), offsets((16, T - 20), device)
        positions[2] = T - 6
        positions[1] = 30
        ours, theirs = compiled(x, w, positions, cu), losses(x, w, positions, cu)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        for a, b in zip(
            torch.autograd.grad(sum(ours), (x, w)), torch.autograd.grad(sum(theirs), (x, w)), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_compiled_call_draws_anew(device):
    tensors = named("plain").make_tensors(device)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *x: htree_ops.index_loss(*x, rows=8, block_size=4), fullgraph=True, backend="aot_eager"
    )
    assert len({compiled(*tensors).item() for _ in range(4)}) > 1


def test_export_keeps_one_node():
    class Model(torch.nn.Module):
        def forward(self, *x):
            return htree_ops.index_loss(*x[:4], positions=x[4], block_size=4)

    *tensors, positions, _ = named("plain").make_inputs("cpu")
    program = torch.export.export(Model(), (*tensors, positions))
    calls = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert calls.count(OPS.index_loss.default) == 1
    assert torch.equal(program.module()(*tensors, positions), Model()(*tensors, positions))


def test_meta_tensors_have_the_shapes_of_the_kernels(device):
    for case in CASES:
        if device == "cuda" and case.dtype == torch.float64:
            continue
        inputs = case.make_inputs(device)
        found = OPS._index_loss_forward(*inputs, **case.options())
        shapes = OPS._index_loss_forward(
            *(x if x is None else x.to("meta") for x in inputs), **case.options()
        )
        for ours, theirs in zip(found, shapes, strict=True):
            assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())


def test_log_sum_exps_are_those_of_ascending_positions(device):
    case = replace(named("plain"), H_i=1)
    query, key, index_query, index_key, positions, _ = case.make_inputs(device)
    _, lse, index_lse = OPS._index_loss_forward(query, key, index_query, index_key, positions, block_size=4)
    for b, row in enumerate(positions.sort(-1).values.tolist()):
        for i, token in enumerate(row):
            before = token // 4 * 4
            keys = key[b, :before].repeat_interleave(2, dim=1)
            scores = torch.einsum("hk,thk->ht", query[b, token], keys) * 16**-0.5
            torch.testing.assert_close(lse[b, i], scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
            blocks = (index_key[b, :before, 0] @ index_query[b, token, 0]).unflatten(0, (-1, 4)).amax(-1)
            torch.testing.assert_close(index_lse[b, i, 0], blocks.logsumexp(0), rtol=1e-5, atol=1e-5)


def test_autocast_makes_the_dtypes_agree(device):
    query, key, index_query, index_key, positions, _ = named("block16").make_inputs(device)
    half = [x.bfloat16() for x in (query, key, index_query, index_key)]
    with torch.autocast(device, dtype=torch.bfloat16):
        ours = htree_ops.index_loss(query, key, half[2], half[3], positions=positions)
    assert torch.equal(ours, htree_ops.index_loss(*half, positions=positions))


def test_flops_are_those_of_the_products():
    from torch.utils.flop_counter import FlopCounterMode

    for name in ("plain", "one_index_head", "ragged"):
        case = named(name)
        inputs = case.make_inputs("cpu")
        index = [x.requires_grad_() for x in inputs[2:4]]
        once = 2 * case.B * case.rows * case.tokens * (case.H * case.K + case.H_i * case.d)
        with FlopCounterMode(display=False) as counter:
            loss = OPS.index_loss(*inputs[:2], *index, *inputs[4:], **case.options())
        assert counter.get_total_flops() == once
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        assert counter.get_total_flops() == once


@pytest.mark.gpu
def test_a_call_is_recorded_in_a_graph():
    """Nothing is read on the host, with documents either."""
    for case in (named("plain"), named("ragged")):
        *tensors, positions, cu = replace(case, block_size=16, T=200).make_inputs("cuda")
        index = [x.requires_grad_() for x in tensors[2:]]

        def call(tensors=tensors, index=index, positions=positions, cu=cu):
            loss = OPS.index_loss(*tensors[:2], *index, positions, cu)
            return loss.detach(), *torch.autograd.grad(loss, index)

        assert_stream_and_graph(call, tensors[0])


# ---- bad input

QUERY, KEY, INDEX = torch.zeros(2, 24, 4, 6), torch.zeros(2, 24, 2, 6), torch.zeros(2, 24, 2, 16)
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"query": QUERY[0]}, ShapeMismatchError, "query must be 4-D [B, T, H, K], got 3-D"),
    ({"key": KEY[:1]}, ShapeMismatchError, "size 0 of key must be 2 (B of query), got 1"),
    ({"key": KEY[:, :23]}, ShapeMismatchError, "size 1 of key must be 24 (T of query), got 23"),
    ({"key": torch.zeros(2, 24, 2, 8)}, ShapeMismatchError, "size 3 of key must be 6 (K of query), got 8"),
    ({"key": torch.zeros(2, 24, 3, 6)}, ShapeMismatchError, "H of query must be a positive multiple of H_kv of key"),
    ({"query": torch.zeros(2, 24, 4, 1025), "key": torch.zeros(2, 24, 2, 1025)}, ShapeMismatchError,
     "K, the last size of query, must be between 1 and 1024, got 1025"),
    ({"index_query": torch.zeros(2, 24, 3, 16)}, ShapeMismatchError,
     "size 2 of index_query must be 1 or 2 (H_kv of key), got 3"),
    ({"index_key": INDEX[:, :, :1]}, ShapeMismatchError, "size 2 of index_key must be 2 (H_i of index_query), got 1"),
    ({"index_key": torch.zeros(2, 24, 2, 32)}, ShapeMismatchError, "size 3 of index_key must be 16 (d of index_query)"),
    ({"index_query": torch.zeros(2, 24, 2, 24), "index_key": torch.zeros(2, 24, 2, 24)}, ShapeMismatchError,
     "d, the last size of index_query, must be a multiple of 16 up to 128, got 24"),
    ({"index_query": INDEX[..., :8]}, ShapeMismatchError,
     "d, the last size of index_query, must be a multiple of 16 up to 128, got 8"),
    ({"query": QUERY[..., :0]}, ShapeMismatchError, "K, the last size of query, must be between 1 and 1024, got 0"),
    ({"query": QUERY[:, :0], "key": KEY[:, :0], "index_query": INDEX[:, :0], "index_key": INDEX[:, :0],
      "positions": torch.tensor([8])}, ValueError, "positions must be tokens of query, from 0 to -1, got 8"),
    ({"query": QUERY.int()}, UnsupportedDtypeError, "query must have dtype torch.float32 or torch.float16"),
    ({"index_key": INDEX.half()}, UnsupportedDtypeError,
     "index_key must have the dtype of query (torch.float32), got torch.float16"),
    ({"index_key": INDEX.to("meta")}, DeviceError, "index_key must be on the device of query (cpu), got meta"),
    ({"positions": torch.zeros(3, dtype=torch.int32)}, UnsupportedDtypeError,
     "positions must have dtype torch.int64, got torch.int32"),
    ({"positions": torch.zeros(3, 4, dtype=torch.int64)}, ShapeMismatchError,
     "size 0 of positions must be 2 (B of query), got 3"),
    ({"positions": torch.zeros(1, 1, 1, dtype=torch.int64)}, ShapeMismatchError,
     "positions must be 1-D [rows] or 2-D [B, rows], got 3-D"),
    ({"positions": torch.tensor([7, 3])}, ValueError,
     "positions must have a whole block of 4 tokens before their own block, got 3"),
    ({"positions": torch.tensor([24])}, ValueError, "positions must be tokens of query, from 0 to 23, got 24"),
    ({"block_size": 0}, ValueError, "block_size must be between 1 and 2147483647, got 0"),
    ({"block_size": 24}, ShapeMismatchError, "key must have more than block_size = 24 tokens, got 24"),
    ({"block_size": 4.0}, TypeError, "block_size must be an int, got float"),
    ({"scale": float("nan")}, ValueError, "scale must be finite"),
    ({"rows": -1}, ValueError, "rows must be between 0 and"),
    ({"rows": 2.0}, TypeError, "rows must be an int, got float"),
    ({"generator": 3}, TypeError, "generator must be a torch.Generator or None, got int"),
    ({"generator": 3, "positions": torch.tensor([8])}, TypeError,
     "generator must be a torch.Generator or None, got int"),
    ({"query": None}, TypeError, "query must be a Tensor, got NoneType"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "kind", "message"), REFUSED, ids=[message[:40] for _, _, message in REFUSED]
)
def test_bad_input_is_named(change, kind, message):
    call = {"query": QUERY, "key": KEY, "index_query": INDEX, "index_key": INDEX, "block_size": 4} | change
    with pytest.raises(kind, match=f"^index_loss: .*{re.escape(message)}"):
        htree_ops.index_loss(**call)


PACKED_REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"query": QUERY}, ShapeMismatchError, "query must be 3-D [N, H, K] with cu_seqlens, got 4-D"),
    ({"cu_seqlens": offsets((24,), "cpu").long()}, UnsupportedDtypeError,
     "cu_seqlens must have dtype torch.int32, got torch.int64"),
    ({"cu_seqlens": torch.zeros(0, dtype=torch.int32)}, ShapeMismatchError,
     "cu_seqlens must have at least one element"),
    ({"cu_seqlens": torch.tensor([0, 9, 5], dtype=torch.int32)}, ValueError, "cu_seqlens must not descend, got 5"),
    ({"cu_seqlens": torch.tensor([0, 30], dtype=torch.int32)}, ValueError,
     "cu_seqlens must end at or before the last row of query (24), got 30"),
    ({"positions": torch.zeros(2, 3, dtype=torch.int64)}, ShapeMismatchError,
     "positions must be 1-D [rows] with cu_seqlens, got 2-D"),
    ({"cu_seqlens": torch.tensor([0, 10, 24], dtype=torch.int32), "positions": torch.tensor([12])}, ValueError,
     "positions must have a whole block of 4 tokens before their own block, got 12 in the document from token 10"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "kind", "message"), PACKED_REFUSED, ids=[message[:40] for _, _, message in PACKED_REFUSED]
)
def test_bad_documents_are_named(change, kind, message):
    call = {"query": QUERY[0], "key": KEY[0], "index_query": INDEX[0], "index_key": INDEX[0], "block_size": 4}
    call |= {"cu_seqlens": offsets((24,), "cpu"), "positions": torch.tensor([8])}
    with pytest.raises(kind, match=f"^index_loss: .*{re.escape(message)}"):
        htree_ops.index_loss(**call | change)


@pytest.mark.parametrize("positions", [None, torch.tensor([8])], ids=["drawn", "given"])
@pytest.mark.parametrize(
    ("ends", "kind", "message"),
    [
        (
            torch.tensor([[0, 24]]),
            ShapeMismatchError,
            "cu_seqlens must be 1-D [documents + 1], got 2-D [1, 2]",
        ),
        (torch.tensor(24), ShapeMismatchError, "cu_seqlens must be 1-D [documents + 1], got 0-D []"),
        (torch.zeros(0), ShapeMismatchError, "cu_seqlens must have at least one element, got [0]"),
        (
            torch.tensor([0, 24], device="meta"),
            DeviceError,
            "cu_seqlens must be on the device of query (cpu), got meta",
        ),
    ],
    ids=["2-D", "0-D", "empty", "meta"],
)
def test_bad_offsets_are_named_wherever_positions_come_from(ends, kind, message, positions):
    call = {"query": QUERY[0], "key": KEY[0], "index_query": INDEX[0], "index_key": INDEX[0], "block_size": 4}
    with pytest.raises(kind, match=f"^index_loss: {re.escape(message)}"):
        htree_ops.index_loss(**call, cu_seqlens=ends.int(), positions=positions)


def test_documents_that_are_too_short_are_named():
    call = {
        "query": QUERY[0],
        "key": KEY[0],
        "index_query": INDEX[0],
        "index_key": INDEX[0],
        "block_size": 16,
    }
    message = "cu_seqlens must have a document of more than block_size = 16 tokens, got 14 in the longest"
    with pytest.raises(ValueError, match=f"^index_loss: {message}"):
        htree_ops.index_loss(**call, cu_seqlens=offsets((10, 14), "cpu"))
