"""HTreeAttention with padding and with packed documents (docs/semantics/tree_attention.md §1.16)."""

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

import htree_ops
from tests.support.cases import normal
from tests.support.documents import offsets
from tests.support.graphs import capture

OPTIONS: dict[str, Any] = {"compression_rate": 4, "max_top_nodes": 8, "top_k": 2}
WIDTH = 12


def layer_of(device: str, bias: bool = True, **more: Any) -> htree_ops.HTreeAttention:
    torch.manual_seed(0)
    layer = htree_ops.HTreeAttention(WIDTH, 4, 2, 6, bias, **(OPTIONS | more), dtype=torch.float64)
    return layer.to(device) if device == "cpu" else layer.float().to(device)


def width_of(device: str) -> torch.dtype:
    return torch.float64 if device == "cpu" else torch.float32


def mask_of(lengths: list[int], lefts: list[int], T: int, device: str) -> Tensor:
    """True at padding; the rows [left, left + length) of each sequence are real."""
    steps = torch.arange(T, device=device)
    first = torch.tensor(lefts, device=device)[:, None]
    count = torch.tensor(lengths, device=device)[:, None]
    return (steps < first) | (steps >= first + count)


def gradients_of(layer: torch.nn.Module, x: Tensor, real: Tensor, **more: Any) -> list[Tensor]:
    """The output and the gradients of x and of the parameters, for an upstream gradient that reads real rows."""
    leaves = [x.detach().requires_grad_(), *layer.parameters()]
    out = layer(leaves[0], **more)
    weight = normal(tuple(out.shape), out.dtype, out.device, 9) * real[..., None]
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    data=st.data(),
    stride=st.sampled_from((1, 4)),
    scope=st.sampled_from(("kv_head", "q_head")),
    garbage=st.sampled_from((0.0, torch.nan, torch.inf)),
)
def test_padding_at_both_ends_changes_nothing(lengths, data, stride, scope, garbage, device):
    """Each row of the batch is a sequence of its own, whatever is in the padding, and packed documents are the same."""
    T = max(lengths) + data.draw(st.integers(0, 5))
    lefts = [data.draw(st.integers(0, T - n)) for n in lengths]
    layer = layer_of(device, selection_stride=stride, scope=scope)
    x = normal((len(lengths), T, WIDTH), width_of(device), device, 3)
    mask = mask_of(lengths, lefts, T, device)
    x[mask] = garbage
    found = gradients_of(layer, x, ~mask, key_padding_mask=mask)
    assert (found[0][mask] == 0).all()
    assert (found[1][mask] == 0).all()
    parts = [x[i, left : left + n] for i, (left, n) in enumerate(zip(lefts, lengths, strict=True))]
    weight = normal(tuple(found[0].shape), x.dtype, x.device, 9)
    total = [torch.zeros_like(p) for p in layer.parameters()]
    for i, (part, left) in enumerate(zip(parts, lefts, strict=True)):
        leaf = part[None].detach().requires_grad_()
        out = layer(leaf)
        rows = slice(left, left + len(part))
        gradients = torch.autograd.grad((out * weight[i, None, rows]).sum(), [leaf, *layer.parameters()])
        near = {"rtol": 1e-9, "atol": 1e-9} if device == "cpu" else {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(found[0][i, rows], out[0], **near)
        torch.testing.assert_close(found[1][i, rows], gradients[0][0], **near)
        total = [a + b for a, b in zip(total, gradients[1:], strict=True)]
    for ours, theirs in zip(found[2:], total, strict=True):
        torch.testing.assert_close(ours, theirs, **near)
    spare = torch.full((data.draw(st.integers(0, 3)), WIDTH), garbage, dtype=x.dtype, device=x.device)
    packed = torch.cat([*parts, spare])
    cu = offsets(tuple(lengths), device)
    for rows in (packed, packed[None]):
        documents = layer(rows, cu_seqlens=cu, max_seqlen=data.draw(st.sampled_from((None, T))))
        assert documents.shape == rows.shape
        torch.testing.assert_close(documents.flatten(0, -2)[: int(cu[-1])], found[0][~mask], **near)
        assert (documents.flatten(0, -2)[int(cu[-1]) :] == 0).all()


def test_garbage_in_packed_padding_reaches_no_parameter(device):
    layer = layer_of(device)
    x = normal((20, WIDTH), width_of(device), device, 1)
    cu, real = offsets((9, 4), device), torch.arange(20, device=device) < 13
    clean = gradients_of(layer, x, real, cu_seqlens=cu, max_seqlen=9)
    x[13:] = torch.nan
    found = gradients_of(layer, x, real, cu_seqlens=cu, max_seqlen=9)
    assert all(torch.equal(a, b) for a, b in zip(found, clean, strict=True))


@pytest.mark.parametrize("packed", [False, True])
def test_lengths_alone_do_not_recompile(packed, device):
    torch._dynamo.reset()
    layer = layer_of(device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for step, lengths in enumerate(([20, 5, 11], [1, 0, 20], [20, 20, 20])):
        T = 20 + step
        x = normal((3, T, WIDTH), width_of(device), device, step)
        more = {"key_padding_mask": mask_of(lengths, [0, T - 20, 0], T, device)}
        if packed:
            x = x.flatten(0, 1)
            more = {"cu_seqlens": offsets(tuple(lengths), device), "max_seqlen": T}
        with torch.compiler.set_stance("default" if step == 0 else "fail_on_recompile"):
            torch.testing.assert_close(compiled(x, **more), layer(x, **more), rtol=1e-5, atol=1e-6)


def test_a_mask_with_holes_is_refused_or_nan(device):
    layer = layer_of(device)
    x = normal((2, 9, WIDTH), width_of(device), device, 1)
    mask = mask_of([9, 6], [0, 3], 9, device)
    whole = layer(x, key_padding_mask=mask)
    mask[0, 4] = True
    if device == "cpu":
        with pytest.raises(ValueError, match="nowhere else, got padding between tokens of sequence 0"):
            layer(x, key_padding_mask=mask)
        torch._dynamo.reset()
        layer = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = layer(x, key_padding_mask=mask)
    assert found[0][~mask[0]].isnan().all()
    assert (found[mask] == 0).all()
    torch.testing.assert_close(found[1], whole[1])


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        ({"attn_mask": torch.ones(5, 5)}, NotImplementedError, "attn_mask is not supported"),
        ({"key_padding_mask": torch.ones(2, 5)}, TypeError, "key_padding_mask must have dtype torch.bool"),
        (
            {"key_padding_mask": torch.zeros(2, 4, dtype=torch.bool)},
            htree_ops.ShapeMismatchError,
            r"key_padding_mask must be \[B, T\] = \(2, 5\), got \(2, 4\)",
        ),
        ({"key_padding_mask": [False]}, TypeError, "key_padding_mask must be a Tensor, got list"),
        (
            {"key_padding_mask": torch.zeros(2, 5, dtype=torch.bool), "cu_seqlens": offsets((5,), "cpu")},
            ValueError,
            "cu_seqlens must be None where key_padding_mask is given",
        ),
        ({"max_seqlen": 5}, ValueError, "max_seqlen must be None where cu_seqlens is None, got 5"),
        ({"cu_seqlens": offsets((5,), "cpu")}, htree_ops.ShapeMismatchError, r"x must be \[1, N, 12\] or \[N, 12\]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_bad_masks_are_named(call, kind, message):
    x = torch.zeros(2, 5, WIDTH, dtype=torch.float64)
    with pytest.raises(kind, match=f"HTreeAttention: {message}"):
        layer_of("cpu")(x, **call)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        ({"max_seqlen": 3}, ValueError, "max_seqlen must be at least the length of every document, got 3 and 4 rows"),
        ({"max_seqlen": 3.0}, TypeError, "max_seqlen must be an int"),
        ({"cu_seqlens": offsets((9,), "cpu")}, ValueError, "cu_seqlens must end at or before the last row"),
        ({"cu_seqlens": torch.zeros(2)}, TypeError, "cu_seqlens must have dtype torch.int32"),
        ({"cu_seqlens": torch.zeros(2, 2).int()}, ValueError, r"cu_seqlens must be \[documents \+ 1\]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_bad_documents_are_named(call, kind, message):
    x = torch.zeros(1, 5, WIDTH, dtype=torch.float64)
    with pytest.raises(kind, match=f"HTreeAttention: {message}"):
        layer_of("cpu")(x, **({"cu_seqlens": offsets((4, 1), "cpu")} | call))


def test_a_mask_needs_a_causal_importance():
    layer = layer_of("cpu", importance="lse")
    x = torch.zeros(2, 5, WIDTH, dtype=torch.float64)
    with pytest.raises(ValueError, match="key_padding_mask must be None where importance is 'lse'"):
        layer(x, key_padding_mask=torch.zeros(2, 5, dtype=torch.bool))
    packed = layer(x.flatten(0, 1), cu_seqlens=offsets((5, 5), "cpu"))
    torch.testing.assert_close(packed, layer(x).flatten(0, 1))


@pytest.mark.gpu
def test_a_graph_follows_the_mask_on_the_device():
    layer = layer_of("cuda")
    x = normal((2, 40, WIDTH), torch.float32, "cuda", 1)
    mask = mask_of([40, 30], [0, 10], 40, "cuda")
    layer(x, key_padding_mask=mask)
    graph, captured = capture(lambda: layer(x, key_padding_mask=mask))
    for lengths, lefts in (([40, 30], [0, 10]), ([3, 40], [37, 0]), ([0, 17], [5, 11])):
        mask.copy_(mask_of(lengths, lefts, 40, "cuda"))
        graph.replay()
        assert torch.equal(captured, layer(x, key_padding_mask=mask))
