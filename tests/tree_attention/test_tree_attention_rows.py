"""_attention_rows: queries anywhere in the sequence have the bits of a call with all of them (docs/semantics §1.8)."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.cases import normal
from tests.support.tree_attention_problem import packed

OPS = torch.ops.htree


def strided(rate: int, top_nodes: int, top_k: int, stride: int, base: float | None = None) -> tuple[Any, ...]:
    return rate, top_nodes, top_k, None, base, "lse_causal", stride


#: B, T, H, H_kv, K, V, dtype, where the sequence is cut, and the options up to selection_stride.
CASES: dict[str, tuple[tuple[int, ...], torch.dtype, tuple[int, ...], tuple[Any, ...]]] = {
    "three_layers": ((2, 61, 4, 2, 6, 5), torch.float32, (0, 7, 32, 61), (4, 8, 2)),
    "deep": ((1, 130, 2, 1, 4, 4), torch.float32, (0, 128, 130), (2, 2, 1)),
    "stride": ((1, 96, 4, 2, 8, 8), torch.float32, (0, 16, 48, 96), strided(8, 8, 2, 4, 10000.0)),
    "one_layer": ((1, 20, 2, 2, 4, 4), torch.float32, (0, 5, 20), (4, 32, 8)),
    "half": ((1, 640, 8, 2, 64, 64), torch.bfloat16, (0, 128, 320, 640), (16, 32, 4)),
    "half_stride": ((1, 608, 8, 2, 128, 128), torch.bfloat16, (0, 208, 608), strided(16, 32, 4, 16, 10000.0)),
    "half_stride_4": (
        (1, 608, 16, 1, 32, 32),
        torch.float16,
        (0, 304, 608),
        (16, 32, 4, None, None, "exp_joint", 4),
    ),
    "masked": ((1, 640, 8, 2, 64, 64), torch.bfloat16, (0, 128, 320, 640), (16, 32, 4, None, None)),
    "masked_stride": ((2, 608, 16, 1, 128, 128), torch.float16, (0, 208, 302, 608), strided(16, 64, 8, 2)),
    "free_top": ((2, 131, 4, 2, 6, 5), torch.float32, (0, 7, 32, 131), (4, 20, 2)),
    "free_top_stride": ((1, 208, 4, 2, 8, 8), torch.float32, (0, 16, 48, 208), strided(8, 50, 2, 4, 10000.0)),
    "free_top_half": ((1, 1200, 8, 2, 64, 64), torch.bfloat16, (0, 128, 320, 1200), (16, 200, 4)),
    "free_top_half_stride": (
        (1, 2000, 8, 1, 128, 128),
        torch.bfloat16,
        (0, 208, 1600, 2000),
        strided(16, 100, 4, 16),
    ),
    "dense": ((1, 400, 3, 1, 64, 64), torch.bfloat16, (0, 128, 400), (16, 512, 32)),
    "dense_below_a_top": ((1, 1200, 8, 1, 128, 128), torch.bfloat16, (0, 128, 512, 1200), (16, 512, 32)),
    "dense_stride": (
        (1, 800, 4, 2, 64, 64),
        torch.float16,
        (0, 256, 800),
        (16, 512, 32, None, 10000.0, "lse_causal", 16),
    ),
}


MASK = [True, True, True]
#: How far the sum of gradients in another order may be off, as a share of the largest.
BOUNDS = {torch.float32: 1e-5}


def assert_close(found: Tensor, expected: Tensor, share: float) -> None:
    """Equal but for ``share`` of the largest expected number; 0 means bit for bit."""
    error = float((found.double() - expected.double()).abs().max())
    assert error <= share * float(expected.double().abs().max())


def stacked(lists: Tensor, rows: int) -> Tensor:
    """The lists of attention_rows, `rows` of them for each layer, as [L, B, rows, H_kv, k]."""
    depth = lists.shape[1] // rows
    assert (lists[:, depth * rows :] == -1).all()
    return lists[:, : depth * rows].unflatten(1, (depth, rows)).transpose(0, 1)


def qkv(sizes: tuple[int, ...], dtype: torch.dtype, device: str) -> list[Tensor]:
    B, T, H, H_kv, K, V = sizes
    shapes = ((B, T, H, K), (B, T, H_kv, K), (B, T, H_kv, V), (B, T, H, V))
    return [normal(shape, dtype, device, seed) for seed, shape in enumerate(shapes)]


@pytest.mark.parametrize("name", CASES)
def test_rows_are_those_of_the_whole(name, device, nan_memory):
    sizes, dtype, cuts, options = CASES[name]
    q, k, v, dout = qkv(sizes, dtype, device)
    stride, tree = options[6] if len(options) > 6 else 1, packed(*options)
    *whole, parents = OPS.attention_forward(q, k, v, *options)
    dq, dk, dv = OPS.attention_backward(dout, q, k, v, *whole, parents, *options)
    sums = [torch.zeros_like(x, dtype=torch.float64) for x in (dk, dv)]
    for begin, end in itertools.pairwise(cuts):
        rows = q[:, begin:end]
        *results, lists = OPS._attention_rows(rows, k, v, [begin], True, *tree)
        for found, expected in zip(results, whole, strict=True):
            assert torch.equal(found, expected[:, begin:end])
        expected_lists = torch.stack(parents)[:, :, begin // stride : -(-end // stride)]
        assert torch.equal(stacked(lists, expected_lists.shape[2]), expected_lists)
        unstored = OPS._attention_rows(rows, k, v, [begin], False, *tree)
        assert unstored[3].shape == (lists.shape[0], 0, *lists.shape[2:])
        assert torch.equal(unstored[0], results[0])
        rest = (dout[:, begin:end], None, [begin], MASK, *tree)
        state = (rows, k, v, *results)
        gradients = OPS._attention_rows_backward(*state, lists, *rest)
        again = OPS._attention_rows_backward(*state, unstored[3], *rest)
        unrounded = OPS._attention_rows_backward_sums(*state, lists, *rest)
        for one, other, wide in zip(gradients, again, unrounded, strict=True):
            assert torch.equal(one, other)
            assert torch.equal(one, wide.to(dtype))
        for wide in unrounded[1:]:
            assert wide.dtype == torch.promote_types(dtype, torch.float32)
        assert_close(gradients[0], dq[:, begin:end], 0 if device == "cpu" else 2e-2)
        for total, part in zip(sums, gradients[1:], strict=True):
            total += part
    for total, expected in zip(sums, (dk, dv), strict=True):
        assert_close(total, expected, BOUNDS.get(dtype, 2e-2))


@pytest.mark.parametrize("name", CASES)
def test_pieces_share_a_tree(name, device):
    """Rows from several places in one call are those of a call for each place."""
    sizes, dtype, _, options = CASES[name]
    q, k, v, dout = qkv(sizes, dtype, device)
    stride, tree = options[6] if len(options) > 6 else 1, packed(*options)
    step = sizes[1] // 4 // stride * stride
    for places in ([0, 3], [2, 1], [0, 1, 2, 3], [0, 1, 3], [0, 2, 3]):  # neighbours are worked on together
        starts = [i * step for i in places]
        rows, upstream = (torch.cat([x[:, at : at + step] for at in starts], 1) for x in (q, dout))
        *results, lists = OPS._attention_rows(rows, k, v, starts, True, *tree)
        rest = (upstream, None, starts, MASK, *tree)
        ours = OPS._attention_rows_backward(rows, k, v, *results, lists, *rest)
        again = OPS._attention_rows_backward(rows, k, v, *results, lists[:, :0], *rest)
        sums = [torch.zeros_like(x, dtype=torch.float64) for x in (k, v)]
        for i, start in enumerate(starts):
            piece = slice(i * step, (i + 1) * step)
            one = OPS._attention_rows(rows[:, piece], k, v, [start], True, *tree)
            for found, expected in zip(results, one[:3], strict=True):
                assert torch.equal(found[:, piece], expected)
            ours_here = stacked(lists, len(starts) * step // stride)[:, :, i * step // stride :]
            assert torch.equal(ours_here[:, :, : step // stride], stacked(one[3], step // stride))
            state = (rows[:, piece], k, v, *one, upstream[:, piece], None)
            theirs = OPS._attention_rows_backward(*state, [start], MASK, *tree)
            assert_close(ours[0][:, piece], theirs[0], 0 if device == "cpu" else 2e-2)
            for total, part in zip(sums, theirs[1:], strict=True):
                total += part
        for found, other, total in zip(ours[1:], again[1:], sums, strict=True):
            assert torch.equal(found, other)
            assert_close(found, total, BOUNDS.get(dtype, 2e-2))


@pytest.mark.gpu
@pytest.mark.parametrize("importance", ["lse_causal", "exp_joint"])
@pytest.mark.parametrize("heads", [4, 32])
def test_a_chunk_of_a_long_sequence_has_the_rows_of_the_whole(importance, heads):
    """The scores of few lists take other thread blocks at the top than those of many (tree/plan/problem.h)."""
    q, k, v, _ = qkv((1, 24_576, heads, 4, 64, 64), torch.bfloat16, "cuda")
    tree = packed(16, 2048, 128, importance=importance, selection_stride=4)
    whole = OPS._attention_rows(q, k, v, [0], True, *tree)
    for begin, end in ((20_480, 24_576), (12_288, 13_312), (2048, 2304)):
        part = OPS._attention_rows(q[:, begin:end], k, v, [begin], True, *tree)
        expected_lists = stacked(whole[3], 24_576 // 4)[:, :, begin // 4 : end // 4]
        assert torch.equal(stacked(part[3], (end - begin) // 4), expected_lists)
        for found, expected in zip(part[:3], whole[:3], strict=True):
            assert torch.equal(found, expected[:, begin:end])


def test_lists_are_one_tensor_for_autograd(device):
    """What autograd keeps: q, k, v, out, gmax, gsum and the lists."""
    q, k, v, _ = qkv((1, 40, 4, 2, 6, 5), torch.float32, device)
    kept = []

    def keep(x):
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        OPS.attention(q.requires_grad_(), k, v, 4, 8, 2)
    assert [tuple(x.shape) for x in kept[-1:]] == [(1, 3 * 40, 2, 2)]
    assert len(kept) == 7


@pytest.mark.parametrize("stride", [1, 2])
def test_lists_of_one_row_have_a_second_one(stride, device):
    """A size that may be 1 would bind a compiled graph to lengths where it is or is not."""
    q, k, v, dout = qkv((2, 4, 4, 2, 6, 5), torch.float32, device)
    options = (4, 8, 2, None, 10000.0, "lse_causal", stride)
    tree = packed(*options)
    *results, lists = OPS._attention_rows(q[:, :1], k, v, [0], True, *tree)
    parents = OPS.attention_forward(q, k, v, *options)[3]
    assert lists.shape == (2, 2, 2, 2)
    assert torch.equal(lists[:, :1], parents[0][:, :1])
    assert (lists[:, 1:] == -1).all()
    rest = (dout[:, :1], None, [0], MASK, *tree)
    gradients = OPS._attention_rows_backward(q[:, :1], k, v, *results, lists, *rest)
    again = OPS._attention_rows_backward(q[:, :1], k, v, *results, lists[:, :0], *rest)
    for one, other in zip(gradients, again, strict=True):
        assert torch.equal(one, other)


def test_no_row(device):
    q, k, v, dout = qkv((1, 8, 2, 1, 4, 4), torch.float32, device)
    out, gmax, gsum, lists = OPS._attention_rows(q[:, :0], k, v, [4], True, *packed(4, 8, 2))
    assert out.shape == (1, 0, 2, 4)
    dq, dk, dv = OPS._attention_rows_backward(
        q[:, :0], k, v, out, gmax, gsum, lists, dout[:, :0], None, [4], MASK, *packed(4, 8, 2)
    )
    assert dq.numel() == 0
    assert not dk.any()
    assert not dv.any()
